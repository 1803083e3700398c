"""The index file, in literal bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, UnsafePathError, UnstorableTensorError
from hfshard.format.index import (
    HASHERS,
    CheckpointIndex,
    FileDigest,
    build_hfshard_metadata,
    check_checksum,
    check_verify_level,
    fingerprint_positions,
    md5_of,
    new_fingerprint,
    parse_single_file_metadata,
    sha256_of,
    tensor_digest,
    tensor_digest_of_bytes,
    with_commit_marker,
    with_weights_override,
    with_zeroed_digests,
    without_commit_keys,
    without_weights_override,
)

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


# Checksums by published values, what a fingerprint samples, and how a file's own digests are blanked.

SHA256_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
XXH3_64_ABC = "78af5f94892f3950"
XXH3_128_ABC = "06b05ab6733a618578af5f94892f3950"


def test_each_kind_of_checksum_is_the_algorithm_of_its_name() -> None:
    found = {}
    for kind, new_hasher in HASHERS.items():
        hasher = new_hasher()
        hasher.update(b"abc")
        found[kind] = hasher.hexdigest()
    fingerprint = new_fingerprint()
    fingerprint.update(b"abc")

    assert found == {"sha256": SHA256_ABC, "xxh3": XXH3_128_ABC}
    assert fingerprint.hexdigest() == XXH3_128_ABC
    assert sha256_of(b"abc") == SHA256_ABC
    assert md5_of(b"abc") == "900150983cd24fb0d6963f7d28e17f72"


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [([], "2d06800538d394c2"), ([b"abc"], XXH3_64_ABC), ([b"a", b"", memoryview(b"bc")], XXH3_64_ABC)],
)
def test_a_tensor_has_the_same_digest_in_any_blocks(blocks: list[Any], expected: str) -> None:
    assert tensor_digest(blocks) == expected
    assert tensor_digest_of_bytes(b"".join(blocks)) == expected


def test_an_unknown_checksum_or_level_is_refused_even_if_it_is_no_text() -> None:
    for kind in ("sha256", "xxh3", None):
        check_checksum(kind)
    for level in ("none", "structure", "full", "sha256"):
        check_verify_level(level)
    no_text: Any = ["sha256"]

    with pytest.raises(InvalidArgumentError, match=r"^checksum must be 'sha256', 'xxh3' or None, got 'SHA256'\.$"):
        check_checksum("SHA256")
    with pytest.raises(InvalidArgumentError, match=r"got \['sha256'\]"):
        check_checksum(no_text)
    with pytest.raises(InvalidArgumentError, match=r"^verify must be .* \(or 'sha256'\), got 'xxh3'\.$"):
        check_verify_level("xxh3")


def test_up_to_1024_tensors_are_all_in_the_fingerprint() -> None:
    assert list(fingerprint_positions(0)) == []
    assert list(fingerprint_positions(3)) == [0, 1, 2]
    assert list(fingerprint_positions(1024)) == list(range(1024))


def test_of_more_tensors_1024_are_chosen_evenly() -> None:
    one_and_a_half, a_million = fingerprint_positions(1536), fingerprint_positions(1 << 20)

    assert list(one_and_a_half[:6]) == [0, 1, 3, 4, 6, 7]
    assert (len(one_and_a_half), one_and_a_half[-1]) == (1024, 1534)
    assert (len(a_million), a_million[1], a_million[-1]) == (1024, 1024, 1_047_552)


def test_the_digests_that_a_file_states_are_blanked_and_nothing_else() -> None:
    header = rb'{"__metadata__":{"hfshard":"{\"sha256\":\"ab12\",\"xxh3\":\"ab12\"}","note":"ab12"}}'

    blank = with_zeroed_digests(header, [("sha256", "ab12"), ("fingerprint", "ab12"), ("xxh3", "cd34")])

    assert blank == rb'{"__metadata__":{"hfshard":"{\"sha256\":\"0000\",\"xxh3\":\"ab12\"}","note":"ab12"}}'


def test_of_a_digest_that_is_stated_twice_the_first_is_blanked() -> None:
    stated = rb"\"xxh3\":\"ff\""

    assert with_zeroed_digests(stated + b"," + stated, [("xxh3", "ff")]) == rb"\"xxh3\":\"00\"" + b"," + stated


# The key that a commit puts into config.json for a while comes out without a trace.

UNIQUE = "model-hfshard-0123456789abcdef.safetensors.index.json"
CONFIG = b'{\n  "a": 1,\n  "name": "\\u00e9 of json.dumps"\n}\n'


@pytest.mark.parametrize("name", [UNIQUE, "model.fp16-hfshard-0123456789abcdef.safetensors"])
def test_what_is_put_in_comes_out_byte_for_byte(name: str) -> None:
    pointing = with_weights_override(CONFIG, name)
    assert pointing == b'{\n  "transformers_weights": "%s",' % name.encode() + CONFIG[1:]
    assert json.loads(pointing) == {**json.loads(CONFIG), "transformers_weights": name}
    assert without_weights_override(pointing) == without_commit_keys(pointing) == CONFIG


@pytest.mark.parametrize(
    "config", [b"{}\n", b'{"a": 1}', b'{\n  "transformers_weights": "old.safetensors",\n  "a": -Infinity\n}\n']
)
def test_configs_in_other_forms_get_the_key_too(config: bytes) -> None:
    value = {key: item for key, item in json.loads(config).items() if key != "transformers_weights"}
    assert json.loads(with_weights_override(config, UNIQUE)) == {**value, "transformers_weights": UNIQUE}
    assert json.loads(without_weights_override(with_weights_override(config, UNIQUE))) == value


def test_a_pointer_that_a_user_wrote_is_part_of_what_was_saved() -> None:
    config = b'{\n  "transformers_weights": "mine.safetensors",\n  "a": 1\n}\n'
    assert without_commit_keys(config) == config
    assert json.loads(without_weights_override(config)) == {"a": 1}


@pytest.mark.parametrize("config", [b'{"a": 1}\n', b'{"a": 1}'])
def test_a_mark_goes_byte_for_byte_and_is_replaced_by_the_next(config: bytes) -> None:
    marked = with_commit_marker(config, "00000000000000ff")
    assert json.loads(marked) == {"a": 1}
    assert without_commit_keys(marked) == config
    other = with_commit_marker(marked, "0000000000000001")
    assert without_commit_keys(other) == config
    assert len(other) == len(marked)
    assert other != marked
