"""Holders: simulated ranks, whose listings are united."""

from __future__ import annotations

from typing import Any

import pytest

from hfshard.distributed.layout import Interval, Placement
from hfshard.distributed.tensor_owners import ListedTensor, Listing, Mesh, RankGroup, TensorOwners, assign_owners
from hfshard.errors import InvalidArgumentError
from hfshard.tensors.stored_tensor import TensorLayout


def whole(*shape: int) -> ListedTensor:
    layout = layout_of(*shape)
    return ListedTensor(layout, 1, (layout.nbytes,), None, None, ())


def split(
    shape: tuple[int, ...], *dims: int | None, window: tuple[Interval, ...] | None = None, stored: Any = None
) -> ListedTensor:
    """A tensor of 4-byte elements that each dimension of the mesh splits along one dimension, or not."""
    placements = tuple(Placement(dim) for dim in dims)
    return ListedTensor(layout_of(*(stored or shape)), 4, shape, window, 0, placements)


def layout_of(*shape: int) -> TensorLayout:
    count = 1
    for size in shape:
        count *= size
    return TensorLayout("F32", shape, 4 * count)


def listing(entries: dict[str, ListedTensor], **more: Any) -> Listing:
    return Listing(entries, more.get("tied_names", {}), more.get("undeclared_ties", ()), more.get("separate_names", ()))


def unite(*groups: tuple[tuple[int, ...], Listing, tuple[Mesh, ...]], name_order: tuple[str, ...] = ()) -> TensorOwners:
    listings = {str(number): said for number, (_, said, _) in enumerate(groups)}
    return TensorOwners.unite(
        [RankGroup(ranks, str(number), meshes) for number, (ranks, _, meshes) in enumerate(groups)],
        listings,
        name_order,
    )


def held(holders: TensorOwners, name: str) -> list[tuple[tuple[int, ...], int]]:
    """(ranks, bytes) of each part."""
    return [(part.ranks, part.runs.total) for part in holders.parts[name]]


def test_rows_and_columns_and_copies_of_them() -> None:
    meshes = (Mesh((2, 2), (0, 1, 2, 3)),)
    entries = {
        "grid": split((4, 6), 0, 1),
        "rows": split((5, 2), 0, None),
        "copies": split((3,), None, None),
        "nothing": split((0, 3), 0, None),
        "plain": whole(2, 2),
        "point": split((), None, None),
    }

    holders = unite(((0, 1, 2, 3), listing(entries), meshes))

    assert held(holders, "grid") == [((0,), 24), ((1,), 24), ((2,), 24), ((3,), 24)]
    assert held(holders, "rows") == [((0, 1), 24), ((2, 3), 16)]
    assert held(holders, "copies") == [((0, 1, 2, 3), 12)]
    assert held(holders, "nothing") == []
    assert held(holders, "plain") == [((0,), 16)]
    assert held(holders, "point") == [((0, 1, 2, 3), 4)]


def test_all_parts_come_from_one_copy_the_owners_if_it_has_one() -> None:
    mesh = Mesh((2, 2), (0, 3, 2, 1))
    holders = unite(((0, 1, 2, 3, 4, 5), listing({"rows": split((4, 1), None, 0)}), (mesh,)))
    parts = holders.parts["rows"]

    assert [parts.number_of(rank) for rank in range(5)] == [0, 1, 0, 1, None]
    assert [[parts.source(number, owner) for number in (0, 1)] for owner in range(6)] == [
        [0, 3],
        [2, 1],
        [2, 1],
        [0, 3],
        [0, 3],
        [2, 1],
    ]


def test_parts_are_found_by_their_range() -> None:
    holders = unite(((0, 1), listing({"columns": split((3, 4), 1), "rows": split((4, 2), 0)}), (Mesh((2,), (0, 1)),)))
    columns, rows = holders.parts["columns"], holders.parts["rows"]

    assert (list(columns.between(0, 8)), list(columns.between(8, 16)), list(columns.between(40, 48))) == (
        [0],
        [0, 1],
        [1],
    )
    assert (list(rows.between(0, 16)), list(rows.between(15, 17)), list(rows.between(16, 32))) == ([0], [0, 1], [1])
    clipped = columns.clip(1, 10, 30)
    assert clipped is not None
    assert (clipped.offsets.tolist(), clipped.lengths.tolist(), clipped.positions.tolist()) == (
        [10, 24],
        [6, 6],
        [2, 8],
    )
    assert rows.clip(1, 0, 16) is None


def test_a_window_of_a_tensor_is_stored_by_who_has_it() -> None:
    window = ((1, 2), (0, 4))
    entries = {
        "expert": split((3, 4), 0, window=window, stored=(4,)),
        "across": split((3, 4), 1, window=((1, 3), (1, 4)), stored=(2, 3)),
    }

    holders = unite(((0, 1, 2), listing(entries), (Mesh((3,), (0, 1, 2)),)))

    assert held(holders, "expert") == [((1,), 16)]
    assert held(holders, "across") == [((0,), 8), ((1,), 16)]  # two columns each, but the last, which has none


def test_a_name_on_several_meshes_comes_from_the_first() -> None:
    norm = listing({"norm": split((4,), 0)})
    groups = [RankGroup((0, 2), "n", (Mesh((2,), (0, 2)),)), RankGroup((1, 3), "n", (Mesh((2,), (1, 3)),))]

    holders = TensorOwners.unite(groups, {"n": norm})

    assert held(holders, "norm") == [((0,), 8), ((2,), 8)]


def test_names_of_pipeline_stages_are_united_in_rank_order() -> None:
    first = listing({"b": whole(2), "a": whole(2)}, tied_names={"x": "a"}, separate_names=("a",))
    second = listing({"c": whole(3), "a": whole(2)}, tied_names={"y": "c"}, undeclared_ties=("y",))
    one, two = ((0,), first, ()), ((1,), second, ())

    holders = unite(two, one)

    assert list(holders.layouts) == ["b", "a", "c"]
    assert held(holders, "a") == [((0,), 8)]
    assert holders.tied_names == {"x": "a", "y": "c"}
    assert holders.undeclared_ties == ("y",)
    assert holders.separate_names == {"a"}
    assert list(unite(one, two, name_order=("c", "a", "gone")).layouts) == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (whole(3), "rank 1 has a F32 of shape \\[3\\], whole, but an earlier one has a F32 of shape \\[4\\], whole"),
        (split((4,), 0), "spread by"),
    ],
)
def test_ranks_that_disagree_are_told(other: ListedTensor, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        unite(((0,), listing({"w": whole(4)}), ()), ((1,), listing({"w": other}), (Mesh((1,), (1,)),)))
    assert caught.value.fqn == "w"


def test_a_name_that_is_tied_on_one_rank_and_stored_on_another_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="The ranks disagree about 'head'"):
        unite(
            ((0,), listing({"embed": whole(4)}, tied_names={"head": "embed"}), ()),
            ((1,), listing({"head": whole(4)}), ()),
        )


@pytest.mark.parametrize(
    "meshes", [(Mesh((2,), (0, 1)), Mesh((3,), (2, 3, 4))), (Mesh((2,), (0, 1)), Mesh((2,), (1, 0)))]
)
def test_parts_that_do_not_cover_a_tensor_exactly_are_refused(meshes: tuple[Mesh, Mesh]) -> None:
    said = listing({"w": split((6,), 0)})
    groups = [RankGroup((0,), "same", meshes[:1]), RankGroup((2,), "same", meshes[1:])]
    with pytest.raises(InvalidArgumentError, match="do not have all of 'w', or have some of it twice"):
        TensorOwners.unite(groups, {"same": said})


@pytest.mark.parametrize(
    "entry",
    [
        split((6,), 0, window=((0, 8),), stored=(8,)),
        split((6,), None, window=((2, 7),), stored=(5,)),
        split((2, 4), 0, window=((0, 2), (0, 5)), stored=(2, 5)),
    ],
    ids=["split", "whole on each", "across"],
)
def test_parts_that_lack_the_end_of_a_tensor_are_refused(entry: ListedTensor) -> None:
    with pytest.raises(InvalidArgumentError, match="do not have all of 'w'"):
        unite(((0, 1), listing({"w": entry}), (Mesh((2,), (0, 1)),)))


def test_listings_survive_json() -> None:
    said = listing(
        {"w": split((3, 4), 0, 1, window=((1, 2), (0, 4)), stored=(4,)), "b": whole(2)}, tied_names={"t": "b"}
    )

    assert Listing.from_json(said.to_json()) == said


def test_a_rank_of_the_mesh_that_has_another_name_for_its_part_is_refused() -> None:
    mesh = (Mesh((2,), (0, 1)),)
    with pytest.raises(InvalidArgumentError, match=r"do not have all of 'blocks\.0\.w'"):
        unite(((0,), listing({"blocks.0.w": split((6,), 0)}), mesh), ((1,), listing({"0.w": split((6,), 0)}), mesh))


# Which rank writes which file.


def test_the_largest_file_goes_first_to_who_has_least() -> None:
    assert assign_owners([5, 9, 4, 4, 1], [0, 1]) == [1, 0, 1, 0, 1]
    assert assign_owners([1, 1, 1, 1], [3, 1, 2]) == [1, 2, 3, 1]
    assert assign_owners([], [0]) == []


def test_few_files_go_to_ranks_far_from_each_other() -> None:
    assert assign_owners([3, 2, 1], range(12)) == [0, 4, 8]
    assert assign_owners([1, 2, 3, 4], [0, 2, 4, 6, 8]) == [6, 4, 2, 0]
    assert assign_owners([7], range(4)) == [0]


def test_loads_are_even_for_many_ranks_and_files() -> None:
    sizes = [4_000_000_000 + 1_000_000 * (number % 700) for number in range(4096)]
    owners = assign_owners(sizes, range(1024))
    loads = [0] * 1024
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    assert max(loads) < 1.01 * sum(sizes) / 1024
