"""The index file, in literal bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hfshard.errors import DamagedCheckpointError, UnsafePathError, UnstorableTensorError
from hfshard.format.index import CheckpointIndex, FileDigest, build_hfshard_metadata, parse_single_file_metadata

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = CheckpointIndex(
    weight_map={"b": FILES[1], "a": FILES[0]},
    total_size=12,
    total_parameters=3,
    metadata={"größe": [1]},
    files={
        FILES[0]: FileDigest(4104, sha256="0" * 64, fingerprint="1" * 32),
        FILES[1]: FileDigest(4100, xxh3="2" * 32),
    },
    tied_names={"c": "a"},
)
RAW = """{
  "metadata": {
    "größe": [
      1
    ],
    "hfshard": {
      "files": {
        "model-00001-of-00002.safetensors": {
          "fingerprint": "11111111111111111111111111111111",
          "sha256": "0000000000000000000000000000000000000000000000000000000000000000",
          "size": 4104
        },
        "model-00002-of-00002.safetensors": {
          "size": 4100,
          "xxh3": "22222222222222222222222222222222"
        }
      },
      "format": 1,
      "tied_names": {
        "c": "a"
      }
    },
    "total_parameters": 3,
    "total_size": 12
  },
  "weight_map": {
    "a": "model-00001-of-00002.safetensors",
    "b": "model-00002-of-00002.safetensors"
  }
}
"""


def test_an_index_is_sorted_json_with_a_newline_at_its_end() -> None:
    assert INDEX.to_json().decode() == RAW


def test_it_is_read_back() -> None:
    assert CheckpointIndex.from_json(RAW.encode(), "i") == INDEX


def test_the_callers_metadata_never_override_ours() -> None:
    index = CheckpointIndex({}, total_size=5, total_parameters=6, metadata={"total_size": 1, "total_parameters": 2})
    assert json.loads(index.to_json())["metadata"] == {"total_size": 5, "total_parameters": 6}


def test_the_checksum_of_a_file_is_its_sha256_if_known() -> None:
    assert FileDigest(1, sha256="a", xxh3="b", fingerprint="c").checksum == ("sha256", "a")
    assert FileDigest(1, xxh3="b", fingerprint="c").checksum == ("xxh3", "b")
    assert FileDigest(1, fingerprint="c", tensor_digests="").checksum is None


def test_metadata_is_stored_only_as_deep_as_it_can_be_read() -> None:
    deep: Any = 1
    for _ in range(125):
        deep = {"a": deep}
    fits = replace(INDEX, metadata={"deep": deep})
    too_deep = replace(INDEX, metadata={"deep": {"a": deep, "b": [deep]}})

    assert CheckpointIndex.from_json(fits.to_json(), "index.json").metadata == {"deep": deep}
    with pytest.raises(UnstorableTensorError, match="nested deeper than 128 levels"):
        too_deep.to_json()


@pytest.mark.parametrize("metadata", [None, {"total_size": 8}, {"total_size": 8.0}, {"anything": "else"}])
def test_foreign_indexes_are_read(metadata: dict[str, Any] | None) -> None:
    value = {"weight_map": {"a": "x.safetensors"}} | ({} if metadata is None else {"metadata": metadata})
    index = CheckpointIndex.from_json(json.dumps(value).encode(), "i")
    assert (index.weight_map, index.files, index.is_verifiable) == ({"a": "x.safetensors"}, {}, False)


def _with(**changes: Any) -> dict[str, Any]:
    return {
        "metadata": {"hfshard": {"format": 1, "files": {}, "tied_names": {}} | changes},
        "weight_map": {"a": FILES[0], "b": FILES[0]},
    }


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "object"),
        ({}, "weight_map"),
        ({"weight_map": []}, "weight_map"),
        ({"weight_map": {"a": 1}}, "to a int"),
        ({"weight_map": {"a": FILES[0]}, "metadata": 7}, "metadata"),
        (_with(format="1"), "'format' number"),
        (_with(format=2), "pip install --upgrade hfshard"),
        (_with(files=[]), "must map files to digests"),
        (_with(files={FILES[1]: {}}), f"lack '{FILES[0]}'"),
        (_with(files={FILES[0]: {"size": -1}}), "size and hex digests"),
        (_with(files={FILES[0]: {"sha256": "zz"}}), "size and hex digests"),
        (_with(files={FILES[0]: {}}, tied_names={"c": "nowhere"}), "which no file contains"),
        (_with(files={FILES[0]: {}}, tied_names={"a": "b"}), "both a stored tensor and tied to 'b'"),
        (_with(tied_names={"c": "d", "d": "a"}), "which is a tied name itself"),
    ],
)
def test_a_wrong_index_is_refused_with_its_reason(value: object, problem: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=problem) as caught:
        CheckpointIndex.from_json(json.dumps(value).encode(), "dir/i.json")
    assert "dir/i.json" in str(caught.value)


def test_an_index_of_before_the_first_release_is_refused_with_what_to_do() -> None:
    value = {
        "metadata": {"hfshard": {"format": 1, "files": {FILES[0]: {"size": 8}}, "aliases": {}}},
        "weight_map": {"a": FILES[0]},
    }
    with pytest.raises(DamagedCheckpointError, match=r"before hfshard's first release.*save it again") as caught:
        CheckpointIndex.from_json(json.dumps(value).encode(), "dir/i.json")

    assert (caught.value.path, caught.value.expected, caught.value.actual) == ("dir/i.json", "tied_names", "aliases")


def test_an_index_that_names_files_outside_is_refused() -> None:
    with pytest.raises(UnsafePathError):
        CheckpointIndex.from_json(b'{"weight_map": {"a": "../x.safetensors"}}', "i")


def test_the_mark_of_a_shard_says_nothing_and_that_of_a_single_file_all() -> None:
    assert parse_single_file_metadata("1", "x").files == {}
    text = '{"fingerprint":"%s","format":1,"files":{"config.json":{"size":2}},"tied_names":{"b":"a"}}' % ("0" * 32)
    found = parse_single_file_metadata(text, "x")
    assert (found.tied_names, found.files, found.digests.fingerprint) == (
        {"b": "a"},
        {"config.json": FileDigest(2)},
        "0" * 32,
    )


def test_undeclared_ties_are_listed_where_there_are_any() -> None:
    assert build_hfshard_metadata({}, {}, ()) == {"format": 1, "files": {}, "tied_names": {}}
    assert build_hfshard_metadata({}, {"b": "a"}, ("b",))["undeclared_ties"] == ["b"]
