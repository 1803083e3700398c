"""The page of one checkpoint, as HTML and as data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfshard.errors import escaped
from hfshard.viewing.page.checkpoint_page import (
    ModuleValues,
    NameTree,
    make_checkpoint_page,
    make_name_tree,
    values_facts,
    values_overview,
)
from hfshard.viewing.page.page import json_for_html, render_page
from hfshard.viewing.results import Inspection
from hfshard.viewing.tensor_values import MeasuredValues, ValueSummary
from tests.viewing.page.checkpoints import (
    HOSTILE_NAMES,
    hostile_checkpoint,
    inspection_of,
    large_page,
    small_checkpoint,
    tensor,
)


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and the text of each kind."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            continue

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


def html_of(found: Inspection) -> str:
    return render_page(make_checkpoint_page(found))


def data_of(html: str) -> dict[str, Any]:
    """What the scripts draw from, with its labels as the scripts decode them."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    labels = [""]
    for common, rest in zip(data["labels"][::2], data["labels"][1::2]):
        labels.append(labels[-1][:common] + rest)
    return {**data, "labels": labels[1:]}


@pytest.fixture(scope="module")
def small() -> str:
    return html_of(small_checkpoint())


@pytest.fixture(scope="module")
def hostile() -> str:
    return html_of(hostile_checkpoint())


def test_facts_and_tables_can_be_read_without_scripts(small: str) -> None:
    text = re.sub(
        r"\s+", " ", re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", small.replace("<wbr>", ""), flags=re.DOTALL)
    )

    assert "parameters 34,000 weights 102.4 KB 102,400 bytes dtypes F32, BF16 67 % F32 tensors 25 and 1 tied" in text
    assert "files 2 largest 66.5 KB checksums yes" in text
    assert "model-00001-of-00002.safetensors 44.1 KB 1 xxh3 0123456789ab…" in text
    assert "F32 68.8 KB 13 17,200 BF16 33.6 KB 12 16,800" in text
    assert "model.embed.weight F32 100 × 100 10,000 40.0 KB model-00001-of-00002.safetensors" in text
    assert "lm_head.weight model.embed.weight" in text
    assert "format pt note {&#34;by&#34;: &#34;tests&#34;}" in text


def test_a_signature_is_named_and_not_vouched_for(small: str) -> None:
    signed = html_of(inspection_of([tensor("a", 10)], signature="model.sig"))

    assert "<dt>signature</dt><dd>model.sig<small>not checked here</small></dd>" in signed.replace("<wbr>", "")
    assert "signature" not in small


def test_data_is_a_tree_in_columns(small: str) -> None:
    data = data_of(small)

    assert [data["labels"][label] for label in data["label"][:4]] == ["", "lm_head.weight", "model", "embed.weight"]
    nodes = len(data["label"])
    assert {len(data[column]) for column in ("label", "depth", "kind", "file")} == {nodes}
    assert data["parts"] == ["embeddings", "attention", "MLP"]
    assert data["kinds"] == [[0, [100, 100], 40_000, 0], [0, [20, 30], 2_400, 1], [1, [35, 40], 2_800, 2]]
    assert data["dtypes"] == ["F32", "BF16"]
    assert [data["file"].count(number) for number in range(3)] == [nodes - 25, 1, 24]
    ((tied, stored),) = data["ties"]
    assert (data["kind"][tied], data["kinds"][data["kind"][stored] - 1][2]) == (0, 40_000)


def test_policy_lets_nothing_in_but_the_page_own_style_and_script(small: str) -> None:
    elements = Elements(small)
    (policy,) = [
        attributes["content"] for tag, attributes in elements.found if attributes.get("http-equiv") is not None
    ]
    (style,) = re.findall(r"<style>(.*?)</style>", small, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", small, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]

    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'; trusted-types 'none'; require-trusted-types-for 'script'"
    )
    for tag, attributes in elements.found:
        assert not {"style", "onclick", "onload", "src"} & set(attributes), tag
        assert tag not in ("iframe", "object", "embed", "form", "base", "img"), tag
        assert not (attributes.get("href") or "data:").startswith(("http", "//")), tag


def test_hostile_names_are_text(hostile: str, small: str) -> None:
    attacked, calm = Elements(hostile), Elements(small)

    assert {tag for tag, _ in attacked.found} == {tag for tag, _ in calm.found}
    assert [tag for tag, _ in attacked.found].count("script") == 2
    names = {name for _, attributes in attacked.found for name in attributes}
    assert names == {name for _, attributes in calm.found for name in attributes}
    assert "".join(attacked.texts["title"]) == "</title><script>window.attacked=1</script>"
    shown = "".join(attacked.texts["div"])
    for name in HOSTILE_NAMES[:6]:
        assert name in shown
    assert "a\\u202egnp.exe" in shown
    assert not set("\u202e\u2028\u2029\x1b") & set(hostile)
    assert "window.attacked" not in attacked.texts["script"][-1]
    assert attacked.texts["script"][-1] == calm.texts["script"][-1]


def test_data_of_hostile_names_has_each_of_them(hostile: str) -> None:
    data = data_of(hostile)

    path: list[str] = []
    names = []
    for label, depth, kind in zip(data["label"], data["depth"], data["kind"]):
        path[depth:] = [data["labels"][label]]
        if kind:
            names.append(".".join(path[1:]))
    assert sorted(names) == sorted(
        name.replace("\u202e", "\\u202e").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        .replace("\n", "\\n").replace("\x1b", "\\x1b")
        for name in HOSTILE_NAMES
    )  # fmt: skip


def test_json_can_not_end_its_element() -> None:
    text = json_for_html({"</script>": "<!-- & \u2028\u2029"})

    assert text == '{"\\u003c/script\\u003e":"\\u003c!-- \\u0026 \\u2028\\u2029"}'
    assert json.loads(text) == {"</script>": "<!-- & \u2028\u2029"}


def test_a_hundred_thousand_tensors_and_their_values_fit_in_five_megabytes() -> None:
    html = large_page(100)

    assert len(html.encode()) < 5_000_000
    assert "those of the 90,000 smallest tensors were not read, to keep the page small" in html
    assert len(data_of(html)["values"]["rows"]) == 10_000
    assert html.count("<tr>") < 700
    assert sum(1 for kind in data_of(html)["kind"] if kind) == 100_000


def test_names_without_dots_are_stored_by_what_they_add() -> None:
    names = [
        f"lora_unet_down_blocks_{n % 7}_transformer_blocks_{n}_attn1_to_out_0_lora_down_weight" for n in range(9_000)
    ]

    html = html_of(inspection_of([tensor(name, 1) for name in names]))

    assert len(html) < 60 * len(names) < sum(map(len, names))
    assert set(names) < set(data_of(html)["labels"])


def test_names_of_megabytes_are_cut() -> None:
    html = html_of(inspection_of([tensor(f"{number}{'é' * 9_000}", 1) for number in range(300)]))

    assert len(html) < 2_800_000
    assert data_of(html)["labels"][1] == f"0{'é' * 8_304}…"


def test_metadata_of_megabytes_is_cut() -> None:
    html = html_of(inspection_of([tensor("a", 1)], metadata={"key" * 1_000_000: {"<config>": "<b>" * 1_000_000}}))

    assert len(html) < 100_000
    assert "keyk … and 2,996,000 more characters" in html
    assert "&lt;b&gt;&lt;b&gt;" in html


def test_values_belong_to_their_tensor_even_where_names_look_alike() -> None:
    found = inspection_of([tensor("a\x1b", 1), tensor("a\\x1b", 2)])
    measured = MeasuredValues({name: _summary(number) for number, name in enumerate(("a\x1b", "a\\x1b"))}, 0, 0)

    data = data_of(render_page(make_checkpoint_page(found, None, measured)))

    shapes = {node: data["kinds"][kind - 1][1] for node, kind in enumerate(data["kind"]) if kind}
    assert {row[4]: shapes[row[0]] for row in data["values"]["rows"]} == {0: [1], 1: [2]}


def _summary(number: int) -> ValueSummary:
    value = float(number)
    return ValueSummary(1, 0, 0, value, value, value, 0.0, value, value, (1,))


def summary(elements: int, minimum: float, maximum: float, norm: float | None, **more: int) -> ValueSummary:
    return ValueSummary(
        elements, more.pop("nan", 0), 0, minimum, maximum, 0.0, 1.0, minimum, maximum, (1,), norm=norm, **more
    )


def test_values_are_shown_by_layer_and_what_is_odd_is_said() -> None:
    measured = MeasuredValues(
        {
            "embed.weight": summary(100, -1.0, 1.5, 12.0),
            "h.0.up.weight": summary(30, -2.0, 2.0, 3.0, zeros=15, dead_rows=2),
            "h.0.down.weight": summary(10, -7.0, 1.0, 4.0, nan=1),
            "h.1.up.weight": summary(40, 0.0, 0.0, 0.0, zeros=40, dead_rows=4),
            "h.1.down.weight": summary(40, -1.0, 1.0, None),
        },
        0,
        0,
    )

    overview = values_overview(measured)

    assert overview["rows"] == [
        ModuleValues("embed", 100, 12.0, 100.0, 0, -1.0, 1.5, 0, 0, 0),
        ModuleValues("h.0", 40, 5.0, 41.67, 15, -7.0, 2.0, 2, 1, 0),
        ModuleValues("h.1", 80, None, 0.0, 40, -1.0, 1.0, 4, 0, 0),
    ]
    assert overview["sentences"] == [
        "NaN or infinite numbers in h.0.down.weight.",
        "All zero: h.1.up.weight.",
        "2 rows of zeros in h.0.up.weight.",
    ]
    assert [(fact.label, fact.value, fact.note) for fact in values_facts(measured)] == [
        ("zeros", "25.0 %", "6 rows of zeros"),
        ("NaN, inf", "1, 0", "in 1 tensor"),
    ]


def test_values_without_anything_odd_have_no_columns_for_it() -> None:
    names = [f"m{number}.weight" for number in range(250)]
    measured = MeasuredValues({name: summary(1, 1.0, 1.0, 1.0) for name in names}, 0, 0)

    html = render_page(make_checkpoint_page(inspection_of([tensor(name, 1) for name in names]), None, measured))

    assert "All numbers are finite, and no row is all zero." in html
    assert "and 50 more modules" in html
    assert "rows of zeros</th>" not in html
    assert ">NaN</th>" not in html


def test_long_tables_say_what_they_leave_out() -> None:
    many = [tensor(f"t{number}", 1, file=f"{number}.safetensors") for number in range(600)]
    found = inspection_of(
        many,
        tied_names={f"tied{number}": "t0" for number in range(250)},
        metadata={f"key{number}": "x" * 5000 for number in range(103)},
    )

    html = html_of(found)

    assert "and 100 more files" in html
    assert "and 50 more tied names" in html
    assert "and 3 more keys" in html
    assert "x … and 1,000 more characters" in html


@pytest.mark.parametrize("tensors", [[], [tensor("empty", 0)]], ids=["no tensor", "no bytes"])
def test_a_checkpoint_without_bytes_has_a_page(tensors: list[Any]) -> None:
    html = html_of(inspection_of(tensors))

    assert "<dt>weights</dt><dd>0 B" in html
    assert '<section class="map empty"' in html


def test_the_same_checkpoint_makes_the_same_page(small: str) -> None:
    assert html_of(small_checkpoint()) == small


# Names as a tree in columns.


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
