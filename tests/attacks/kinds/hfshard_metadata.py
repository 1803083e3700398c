"""Attacks on what hfshard adds: the files table, the tied names, a single file's own metadata, and mixed saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.attacks.files import bases, raw
from tests.attacks.registry import Build, edited, register, register_all

S = raw.SECOND
Metadata = dict[str, Any]


def _edit_index(change: Callable[[Metadata], object], file: str = raw.INDEX, match: str = "") -> Build:
    """Change the index of a save of ours."""

    def changed(files: raw.Files) -> None:
        index, _ = bases.metadata_of_index(files)
        change(index)
        bases.put_index(files, index)

    return edited(bases.ours_sharded, changed, file, match)


def _edit_own(change: Callable[[Metadata], object], file: str = raw.INDEX, match: str = "") -> Build:
    """Change what hfshard adds to it."""
    return _edit_index(lambda index: change(index["metadata"]["hfshard"]), file, match)


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
register_all("metadata-index", {name: _edit_own(change) for name, change in INDEX_EDITS.items()})

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
    register(f"metadata-index-{_name}", _edit_own(_change, _named), full=_full)

EMPTY: Metadata = {"format": 1, "files": {}, "tied_names": {}}
EMPTIED = _edit_index(lambda index: index["metadata"].update(hfshard=EMPTY), "", "checksum")
register("metadata-index-table-emptied", EMPTIED, full=True)
# Whoever takes the hashes out must not turn a full check into none.
TAKEN_OUT = _edit_index(lambda index: index["metadata"].pop("hfshard"), "", "checksum|hash|verif|sha256")
register("metadata-index-own-metadata-taken-out", TAKEN_OUT, full=True)


def _forget_a_shard(index: Metadata) -> None:
    """The weight_map and the table agree, and a third of the weights is in neither."""
    del index["metadata"]["hfshard"]["files"][raw.FIRST]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != raw.FIRST}


def _total_size(value: Any) -> Build:
    return _edit_index(lambda index: index["metadata"].update(total_size=value), raw.INDEX, "total_size")


# Other tools write wrong totals, so a foreign index may lie; ours never does.
TOTALS = {"wrong": 269, "text": "268", "negative": -268}
register_all("metadata-index-total-size", {name: _total_size(value) for name, value in TOTALS.items()})
register("metadata-index-forgets-a-shard", _edit_index(_forget_a_shard, raw.INDEX, "total_size"))

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


def _single(**metadata: str) -> Build:
    """A file of all weights with this in its metadata."""
    content = raw.shard(raw.tensors(), {"format": "pt", **metadata})
    return lambda place: place.write({raw.CONFIG: raw.config(), raw.SINGLE: content}).expects(raw.SINGLE)


register_all("metadata-complex", {name: _single(**{"hfshard.complex": text}) for name, text in COMPLEX_VALUES.items()})
register_all("metadata-single", {name: _single(hfshard=text) for name, text in SINGLE_VALUES.items()})
LIE = json.dumps({"format": 1, "sha256": "0" * 64, "files": {}, "tied_names": {}})
register("metadata-single-sha256-lies", _single(hfshard=LIE), full=True)


def _mixed(*names: str, file: str) -> Build:
    """Some files of another save among those of one."""
    return edited(
        bases.ours_sharded, lambda files: files.update({name: bases.ours_sharded(2)[name] for name in names}), file
    )


MIXED: dict[str, Build] = {
    **{f"shard-{at}-of-another-save": _mixed(name, file=name) for at, name in enumerate(raw.LAYOUT, 1)},
    "all-shards-of-another-save": _mixed(*raw.LAYOUT, file=raw.FIRST),
    "index-of-another-save": _mixed(raw.INDEX, file=raw.FIRST),
    # Each is whole, and stands under the other's name.
    "two-shards-that-changed-places": edited(
        bases.ours_sharded, lambda files: files.update({S: files[raw.THIRD], raw.THIRD: files[S]}), S
    ),
}
register_all("mixed", MIXED)
# The weights are whole and the config is not theirs: a warning by default, an error when asked.
OTHER_CONFIG = edited(bases.ours_sharded, lambda files: files.update({raw.CONFIG: raw.config()}), raw.CONFIG)
register("mixed-config-of-another-save", OTHER_CONFIG, full=True)
