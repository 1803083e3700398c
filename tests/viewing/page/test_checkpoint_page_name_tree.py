"""Names as a tree in columns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hfshard.errors import escaped
from hfshard.viewing.page.checkpoint_page import NameTree, make_name_tree


def lines_of(tree: NameTree) -> list[str]:
    return [f"{'  ' * depth}{tree.labels[label]}" for label, depth in zip(tree.label, tree.depth)]


def names_from(tree: NameTree) -> dict[int, str]:
    """Node -> what its path spells."""
    path: list[str] = []
    names = {}
    for node, (label, depth) in enumerate(zip(tree.label, tree.depth)):
        path[depth:] = [tree.labels[label]]
        names[node] = ".".join(path[1:])
    return names


def test_siblings_are_in_natural_order_and_chains_are_one_node() -> None:
    tree = make_name_tree(
        ["head.weight", "encoder.layer.10.w", "encoder.layer.2.w", "encoder.layer.2.b", "encoder.layer", "head"]
    )

    assert lines_of(tree) == [
        "",
        "  encoder.layer",
        "    2",
        "      b",
        "      w",
        "    10.w",
        "  head",
        "    weight",
    ]
    assert tree.node_of == {
        "encoder.layer": 1,
        "encoder.layer.2.b": 3,
        "encoder.layer.2.w": 4,
        "encoder.layer.10.w": 5,
        "head": 6,
        "head.weight": 7,
    }
    assert tree.labels == ["", "encoder.layer", "2", "b", "w", "10.w", "head", "weight"]


@given(st.sets(st.text(st.sampled_from("ab.0\u202e\\"), max_size=8)))
def test_every_name_is_spelt_by_its_path(names: set[str]) -> None:
    tree = make_name_tree(names)

    spelt = names_from(tree)
    assert set(tree.node_of) == names
    assert len(set(tree.node_of.values())) == len(names)
    assert {name: spelt[node] for name, node in tree.node_of.items()} == {
        name: escaped(name, keep="") for name in names
    }
    assert all(below <= above + 1 for above, below in zip(tree.depth, tree.depth[1:]))


def test_a_name_of_a_million_dots_makes_few_nodes() -> None:
    tree = make_name_tree(["." * 1_000_000, "a"])

    assert len(tree.label) == 3
    assert names_from(tree)[tree.node_of["." * 1_000_000]] == "." * 1_000_000
