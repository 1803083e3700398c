"""Attacks on what hfshard adds: the files table, the tied names, a single file's own metadata, and mixed saves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from tests.attacks.files import bases, raw
from tests.attacks.registry import ENTRIES, Build, Expected, Place, attack, register

S = raw.SECOND
Metadata = dict[str, Any]


def _edit_index(change: Callable[[Metadata], Any], expected: Expected) -> Build:
    def build(place: Place) -> Expected:
        files = bases.ours_sharded()
        index, metadata = bases.metadata_of_index(files)
        change(metadata)
        bases.put_index(files, index)
        place.write(files)
        return expected

    return build


def _digest(field: str, value: Any) -> Callable[[Metadata], Any]:
    return lambda metadata: metadata["files"][S].__setitem__(field, value)


def _set(key: str, value: Any) -> Callable[[Metadata], Any]:
    return lambda metadata: metadata.__setitem__(key, value)


def _file(name: str, value: Any) -> Callable[[Metadata], Any]:
    return lambda metadata: metadata["files"].__setitem__(name, value)


def _ties(**ties: Any) -> Callable[[Metadata], Any]:
    return _set("tied_names", {name.replace("__", "."): stored for name, stored in ties.items()})


GOOD = {"size": 4224, "sha256": "0" * 64, "fingerprint": "0" * 32}
INDEX_EDITS: dict[str, Callable[[Metadata], Any]] = {
    "format-2": _set("format", 2),
    "format-0": _set("format", 0),
    "format-text": _set("format", "1"),
    "format-null": _set("format", None),
    "format-true": _set("format", True),
    "format-float": _set("format", 1.0),
    "format-missing": lambda metadata: metadata.pop("format"),
    "files-null": _set("files", None),
    "files-list": _set("files", list(raw.LAYOUT)),
    "files-text": _set("files", "all"),
    "file-missing-from-the-table": lambda metadata: metadata["files"].pop(S),
    "file-null": _file(S, None),
    "file-text": _file(S, "ok"),
    "file-list": _file(S, [1, 2]),
    "size-text": _digest("size", "4176"),
    "size-float": _digest("size", 4176.0),
    "size-bool": _digest("size", True),
    "size-negative": _digest("size", -1),
    "sha256-number": _digest("sha256", 7),
    "sha256-short": _digest("sha256", "ab" * 16),
    "sha256-not-hex": _digest("sha256", "zz" * 32),
    "sha256-list": _digest("sha256", ["ab" * 32]),
    "fingerprint-number": _digest("fingerprint", 0),
    "fingerprint-short": _digest("fingerprint", "00"),
    "fingerprint-with-newline": _digest("fingerprint", "0" * 32 + "\n"),
    "table-climbs-out": _file("../outside/" + S, GOOD),
    "table-is-absolute": _file("/etc/passwd", GOOD),
    "table-climbs-out-as-json": _file("../outside/config.json", GOOD),
    "table-has-a-url": _file("https://example.invalid/model.safetensors", GOOD),
    "table-has-an-empty-name": _file("", GOOD),
    "ties-list": _set("tied_names", ["a", "b"]),
    "ties-null": _set("tied_names", None),
    "tie-to-a-number": _ties(twin=1),
    "tie-to-null": _ties(twin=None),
    "tie-to-nowhere": _ties(twin="ghost"),
    "tie-to-itself": _ties(twin="twin"),
    "ties-at-each-other": _ties(castor="pollux", pollux="castor"),
    "ties-in-a-ring": _ties(a="b", b="c", c="a"),
    "tie-of-a-tie": _ties(twin="block.bias", second="twin"),
    "tie-shadows-a-stored-name": _ties(block__bias="head.bias"),
    "tie-shadows-itself": _ties(block__bias="block.bias"),
    "ties-in-a-million-steps": _set("tied_names", {f"a{i}": f"a{i + 1}" for i in range(100_000)}),
    "ties-as-deep-names": _ties(**{"a" * 100_000: "ghost"}),
    "written-before-the-first-release": lambda metadata: metadata.update(aliases=metadata.pop("tied_names")),
    "undeclared-text": _set("undeclared_ties", "twin"),
    "undeclared-unknown": _set("undeclared_ties", ["twin"]),
    "undeclared-number": _set("undeclared_ties", [7]),
}
for _name, _change in INDEX_EDITS.items():
    register(f"metadata-index-{_name}", _edit_index(_change, Expected(raw.INDEX)))

FILE_EDITS: dict[str, tuple[Callable[[Metadata], Any], str, bool]] = {
    "size-wrong": (_digest("size", 4177), S, False),
    "size-zero": (_digest("size", 0), S, False),
    "size-huge": (_digest("size", 2**70), S, False),
    "fingerprint-wrong": (_digest("fingerprint", "0" * 32), S, False),
    "sha256-wrong": (_digest("sha256", "0" * 64), S, True),
    "shard-in-the-table-alone": (_file("model-00004-of-00003.safetensors", GOOD), "model-00004-of-00003", False),
    "one-checksum-lost": (lambda metadata: metadata["files"][S].pop("sha256"), S, True),
    "config-sha256-wrong": (
        lambda metadata: metadata["files"][raw.CONFIG].__setitem__("sha256", "0" * 64),
        raw.CONFIG,
        True,
    ),
}
for _name, (_change, _named, _full) in FILE_EDITS.items():
    register(f"metadata-index-{_name}", _edit_index(_change, Expected(_named)), full=_full)


def _gone(metadata: Metadata) -> None:
    metadata.clear()
    metadata.update({"format": 1, "files": {}, "tied_names": {}})


register("metadata-index-table-emptied", _edit_index(_gone, Expected("", "checksum")), full=True)


@attack("metadata-index", full=True)
def own_metadata_taken_out(place: Place) -> Expected:
    """Whoever takes the hashes out must not turn a full check into none."""
    files = bases.ours_sharded()
    index, _ = bases.metadata_of_index(files)
    del index["metadata"]["hfshard"]
    bases.put_index(files, index)
    place.write(files)
    return Expected("", "checksum|hash|verif|sha256")


SINGLE_VALUES: dict[str, str] = {
    "empty": "",
    "not-json": "{not json}",
    "null": "null",
    "list": "[1]",
    "number": "2",
    "deep": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "format-2": '{"format":2,"files":{},"tied_names":{}}',
    "format-text": '{"format":"1","files":{},"tied_names":{}}',
    "sha256-number": '{"format":1,"sha256":1,"files":{},"tied_names":{}}',
    "fingerprint-lies": json.dumps({"format": 1, "fingerprint": "0" * 32, "files": {}, "tied_names": {}}),
    "tie-to-nowhere": '{"format":1,"files":{},"tied_names":{"twin":"ghost"}}',
    "tie-shadows": '{"format":1,"files":{},"tied_names":{"block.bias":"head.bias"}}',
    "ties-list": '{"format":1,"files":{},"tied_names":[]}',
    "files-climb-out": '{"format":1,"files":{"../outside/config.json":{"size":1}},"tied_names":{}}',
    "duplicate-ties": '{"format":1,"files":{},"tied_names":{"t":"block.bias","t":"head.bias"}}',
}


COMPLEX_VALUES: dict[str, str] = {
    "not-json": "block.bias",
    "number": "7",
    "unknown-name": '["ghost"]',
    "unhashable-name": '[["block.bias"]]',
    "not-a-pair": '["block.bias"]',
    "deep": "[" * 50_000,
}
"""Values of `hfshard.complex`, which lists the complex tensors that are stored as real pairs."""


def _complex(value: str, place: Place) -> Expected:
    metadata = {"format": "pt", "hfshard.complex": value}
    place.write({raw.CONFIG: raw.config(), raw.SINGLE: raw.shard(raw.tensors(), metadata)})
    return Expected(raw.SINGLE)


for _name, _value in COMPLEX_VALUES.items():
    register(f"metadata-complex-{_name}", functools.partial(_complex, _value))


def _single(value: str, place: Place) -> Expected:
    place.write({raw.CONFIG: raw.config(), raw.SINGLE: raw.shard(raw.tensors(), {"format": "pt", "hfshard": value})})
    return Expected(raw.SINGLE)


for _name, _value in SINGLE_VALUES.items():
    register(f"metadata-single-{_name}", lambda place, v=_value: _single(v, place))  # type: ignore[misc]
register(
    "metadata-single-sha256-lies",
    lambda place: _single(json.dumps({"format": 1, "sha256": "0" * 64, "files": {}, "tied_names": {}}), place),
    full=True,
)


@attack("metadata-index")
def forgets_a_shard(place: Place) -> Expected:
    """The weight_map and the table agree, and a third of the weights is in neither."""
    files = bases.ours_sharded()
    index, metadata = bases.metadata_of_index(files)
    del metadata["files"][raw.FIRST]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != raw.FIRST}
    bases.put_index(files, index)
    place.write(files)
    return Expected(raw.INDEX, "total_size")


def _total_size(place: Place, value: Any) -> Expected:
    files = bases.ours_sharded()
    index, _ = bases.metadata_of_index(files)
    index["metadata"]["total_size"] = value
    bases.put_index(files, index)
    place.write(files)
    return Expected(raw.INDEX, "total_size")


# Other tools write wrong totals, so a foreign index may lie; ours never does.
register("metadata-index-total-size-wrong", lambda place: _total_size(place, 269))
register("metadata-index-total-size-text", lambda place: _total_size(place, "268"))
register("metadata-index-total-size-negative", lambda place: _total_size(place, -268))


def _mixed(place: Place, *names: str) -> Expected:
    files, other = bases.ours_sharded(1), bases.ours_sharded(2)
    place.write(files | {name: other[name] for name in names})
    return Expected(names[0])


for _number, _shard in enumerate(raw.LAYOUT, 1):
    register(f"mixed-shard-{_number}-of-another-save", lambda place, s=_shard: _mixed(place, s))  # type: ignore[misc]
register("mixed-all-shards-of-another-save", lambda place: _mixed(place, *raw.LAYOUT))
register("mixed-index-of-another-save", lambda place: _other_index(place))


def _other_index(place: Place) -> Expected:
    place.write(bases.ours_sharded(1) | {raw.INDEX: bases.ours_sharded(2)[raw.INDEX]})
    return Expected(raw.FIRST)


@attack("mixed")
def two_shards_that_changed_places(place: Place) -> Expected:
    """Each is whole, and stands under the other's name."""
    files = bases.ours_sharded()
    files[S], files[raw.THIRD] = files[raw.THIRD], files[S]
    place.write(files)
    return Expected(S)


@attack("mixed", entries=(*ENTRIES,), full=True)
def config_of_another_save(place: Place) -> Expected:
    """The weights are whole and the config is not theirs: a warning by default, an error when asked."""
    files = bases.ours_sharded()
    files[raw.CONFIG] = raw.config()
    place.write(files)
    return Expected(raw.CONFIG)
