"""Names of the objects of a save in a store, and its index: in literals, and hostile ones."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest

from hfshard.errors import DamagedCheckpointError, UnsafePathError, UnstorableTensorError
from hfshard.format import stored_save
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.format.stored_save import (
    SaveId,
    StoredObjectRecord,
    StoredSave,
    is_save_index,
    objects_of_saves,
    own_saves,
    plain_copy,
    plain_index,
    save_of,
    save_of_copy,
    saves_among,
    split_object_name,
)

SEVENTH = SaveId(7, "00112233445566ff")
OF_SEVENTH = "00000007-00112233445566ff"

NAMES = [
    ("model-00001-of-00002.safetensors", f"model-00001-of-00002-{OF_SEVENTH}.safetensors"),
    ("model.fp16-00001-of-00002.safetensors", f"model.fp16-00001-of-00002-{OF_SEVENTH}.safetensors"),
    ("model.safetensors.index.json", f"model.safetensors.index-{OF_SEVENTH}.json"),
    ("model.safetensors.index.fp16.json", f"model.safetensors.index.fp16-{OF_SEVENTH}.json"),
    ("checkpoint.json", f"checkpoint-{OF_SEVENTH}.json"),
    ("custom_generate/generate.py", f"custom_generate/generate-{OF_SEVENTH}.py"),
    ("a.b/LICENSE", f"a.b/LICENSE-{OF_SEVENTH}"),
    (".hidden", f".hidden-{OF_SEVENTH}"),
]


@pytest.mark.parametrize(("usual", "name"), NAMES)
def test_a_name_is_joined_and_split(usual: str, name: str) -> None:
    assert SEVENTH.object_name(usual) == name
    assert split_object_name(name) == (usual, SEVENTH)


def test_a_number_has_as_many_digits_as_it_needs_and_eight_at_least() -> None:
    name = "model-00001-of-00002-123456789012345-00112233445566ff.safetensors"
    assert SaveId(123456789012345, "00112233445566ff").object_name("model-00001-of-00002.safetensors") == name
    assert split_object_name(name) == (
        "model-00001-of-00002.safetensors",
        SaveId(123456789012345, "00112233445566ff"),
    )


@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00002.safetensors",
        "model-00001-of-00002-00112233445566ff.safetensors",
        "model-0000007-00112233445566ff.json",
        "model-000000007-00112233445566ff.json",
        "model-1234567890123456-00112233445566ff.json",
        "model-00000007-00112233445566FF.json",
        "model-00000007-00112233445566f.json",
        "model-00000007-00112233445566ff0.json",
        "model-00000007-00112233445566ff.json.bak",
        "model-00000007-00112233445566ff.json\n",
        "-00000007-00112233445566ff.json",
        "00000007-00112233445566ff",
        "",
    ],
)
def test_another_name_belongs_to_no_save(name: str) -> None:
    assert split_object_name(name) is None
    assert not is_save_index(name)


def test_saves_are_in_the_order_of_their_numbers_then_of_their_ids() -> None:
    in_order = [SaveId(2, "f" * 16), SaveId(10, "0" * 16), SaveId(10, "a" * 16)]
    assert sorted([in_order[2], in_order[0], in_order[1]]) == in_order
    assert [str(one) for one in in_order] == [
        "00000002-ffffffffffffffff",
        "00000010-0000000000000000",
        "00000010-aaaaaaaaaaaaaaaa",
    ]


def test_a_new_number_is_above_all_others() -> None:
    others = saves_among(["a-00000007-00112233445566ff.json", "b-00000012-ffffffffffffffff", "config.json"])
    assert others == {SEVENTH, SaveId(12, "f" * 16)}

    ids = [SaveId.after(others), SaveId.after(others), SaveId.after([]), SaveId.after(others, least=40)]

    assert [one.number for one in ids] == [13, 13, 1, 41]
    assert len({one.id for one in ids}) == 4
    assert all(split_object_name(one.object_name("x.py")) == ("x.py", one) for one in ids)
    with pytest.raises(UnstorableTensorError, match=r"number 999,999,999,999,999 .* Delete that object"):
        SaveId.after([SaveId(999999999999999, "0" * 16)])


def test_objects_are_those_of_a_checkpoint_or_of_another_one() -> None:
    plain, half = WeightNames(), WeightNames("fp16")
    found = [
        "model-00001-of-00001-00000003-aaaaaaaaaaaaaaaa.safetensors",
        "config-00000003-aaaaaaaaaaaaaaaa.json",
        "model.safetensors.index-00000004-bbbbbbbbbbbbbbbb.json",
        "model.safetensors.index.fp16-00000005-cccccccccccccccc.json",
        "model-00001-of-00001-00000006-dddddddddddddddd.safetensors",
        "optimizer-00001-of-00001-00000006-dddddddddddddddd.safetensors",
        "holiday-20240101-0123456789abcdef.jpg",
        "model.safetensors.index.json",
    ]

    assert own_saves(found, plain) == {SaveId(3, "a" * 16), SaveId(4, "b" * 16)}
    assert own_saves(found, half) == {SaveId(5, "c" * 16)}
    assert [save_of(name, plain) is not None for name in found] == [True, False, True, False, True, False, False, False]
    assert list(filter(is_save_index, found)) == [found[2], found[3]]
    assert objects_of_saves(found) == set(found[:6])
    assert objects_of_saves([*found[6:], f"checkpoint-{OF_SEVENTH}.json", f"a-{OF_SEVENTH}.py"]) == {
        f"checkpoint-{OF_SEVENTH}.json",
        f"a-{OF_SEVENTH}.py",
    }
    assert is_save_index(f"checkpoint-{OF_SEVENTH}.json")


SAVE = StoredSave(
    save_id=SEVENTH,
    objects={
        "model-00001-of-00001.safetensors": StoredObjectRecord(4144, "d41d8cd98f00b204"),
        "code/large.py": StoredObjectRecord(2000000, "0x8DC"),
    },
    small_files={"config.json": '{"größe": "1"}\r\n'.encode(), "code/odd.py": b"\xff\0"},
    replaced={"config.json": "a" * 64},
)

GOLDEN = """{
 "hfshard_save": {
  "format": 1,
  "number": 7,
  "id": "00112233445566ff",
  "objects": {
   "code/large.py": {
    "size": 2000000,
    "etag": "0x8DC"
   },
   "model-00001-of-00001.safetensors": {
    "size": 4144,
    "etag": "d41d8cd98f00b204"
   }
  },
  "replaced": {
   "config.json": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
  },
  "small_files": {
   "code/odd.py": {
    "base64": "/wA="
   },
   "config.json": {
    "text": "{\\"größe\\": \\"1\\"}\\r\\n"
   }
  }
 }
}
"""


def test_an_index_is_these_bytes_and_comes_back_from_them() -> None:
    assert SAVE.to_json().decode() == GOLDEN
    assert StoredSave.from_json(GOLDEN.encode(), "s3://b/i", SEVENTH) == SAVE


def _with(change: Any) -> bytes:
    value = json.loads(GOLDEN)
    change(value["hfshard_save"])
    return json.dumps(value).encode()


HOSTILE = {
    "another number": lambda save: save.update(number=8),
    "another id": lambda save: save.update(id="ff" * 8),
    "a number in text": lambda save: save.update(number="7"),
    "an older format": lambda save: save.update(format=0),
    "a format in text": lambda save: save.update(format="1"),
    "no objects": lambda save: save.pop("objects"),
    "objects in a list": lambda save: save.update(objects=[]),
    "an object without ETag": lambda save: save["objects"]["code/large.py"].pop("etag"),
    "a size below zero": lambda save: save["objects"]["code/large.py"].update(size=-1),
    "a size that is true": lambda save: save["objects"]["code/large.py"].update(size=True),
    "an ETag that is a number": lambda save: save["objects"]["code/large.py"].update(etag=1),
    "bad base64": lambda save: save["small_files"].update({"x.py": {"base64": "/w A="}}),
    "base64 that is cut off": lambda save: save["small_files"].update({"x.py": {"base64": "/wA"}}),
    "contents of an unknown kind": lambda save: save["small_files"].update({"x.py": {"gzip": ""}}),
    "contents of two kinds": lambda save: save["small_files"].update({"x.py": {"text": "", "base64": ""}}),
    "contents that are a number": lambda save: save["small_files"].update({"x.py": {"text": 1}}),
    "inlined weights": lambda save: save["small_files"].update({"model.safetensors": {"text": ""}}),
    "an inlined name that leads out": lambda save: save["small_files"].update({"../x.py": {"text": ""}}),
    "an inlined absolute name": lambda save: save["small_files"].update({"/x.py": {"text": ""}}),
    "an inlined name with a drive": lambda save: save["small_files"].update({"C:x.py": {"text": ""}}),
    "an inlined name with a backslash": lambda save: save["small_files"].update({"a\\x.py": {"text": ""}}),
    "a replaced name that leads out": lambda save: save["replaced"].update({"../x.py": "ab"}),
    "a digest in a list": lambda save: save["replaced"].update({"x.py": ["ab"]}),
    "a digest that is a number": lambda save: save["replaced"].update({"x.py": 1}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_that_hfshard_did_not_write_is_refused(what: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"^Index 's3://b/i' is damaged: .* Save the checkpoint again\.$"):
        StoredSave.from_json(_with(HOSTILE[what]), "s3://b/i", SEVENTH)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "C:x.safetensors", "a\\x", "a//x", "a\nx", ""])
def test_an_object_whose_name_leads_out_is_refused(name: str) -> None:
    raw = _with(lambda save: save["objects"].update({name: {"size": 1, "etag": ""}}))
    with pytest.raises(UnsafePathError, match=r"'s3://b/i' names the file"):
        StoredSave.from_json(raw, "s3://b/i", SEVENTH)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"hfshard_save": []}', b'{"weight_map": {}}', b'{"hfshard_save"', b"[" * 100_000]
)
def test_what_is_no_index_of_a_save_is_damaged(raw: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"'s3://b/i' .*Save the checkpoint again\.$"):
        StoredSave.from_json(raw, "s3://b/i", SEVENTH)


def test_a_newer_format_asks_for_a_newer_hfshard() -> None:
    with pytest.raises(
        DamagedCheckpointError, match=r"has hfshard's format 2, but this version reads format 1\. Run: pip install --up"
    ):
        StoredSave.from_json(_with(lambda save: save.update(format=2)), "s3://b/i", SEVENTH)


def test_an_index_that_is_too_large_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_save, "MAX_SAVE_BYTES", 500)
    with pytest.raises(UnstorableTensorError, match=r"would be 508 bytes, but hfshard reads at most 500\. Split"):
        SAVE.to_json()


def test_a_plain_copy_of_json_tells_its_save_and_an_edit_does_not() -> None:
    config = '{"größe": "1"}\r\n'.encode()
    bits = b"0000000000010001001000100011001101000100010101010110011011111111"  # 00112233445566ff
    copy = plain_copy("config.json", config, SEVENTH)

    assert copy == config + bits.replace(b"0", b" ").replace(b"1", b"\t") + b"\n"
    assert json.loads(copy) == {"größe": "1"}
    assert [plain_copy(name, b"1", SEVENTH) for name in ("a.py", "code/a.json", "x.safetensors.index.json")] == [
        b"1"
    ] * 3
    edits = {
        "the copy": copy,
        "as it was saved": config,
        "another save's copy": plain_copy("config.json", b"{}", SaveId(7, "0" * 16)),
        "edited": copy.replace(b"1", b"2"),
        "edited, without the last line": b"{}",
    }
    assert [what for what, raw in edits.items() if SAVE.is_edit("config.json", raw)] == [
        "edited",
        "edited, without the last line",
    ]
    found = dataclasses.replace(SAVE, replaced={"config.json": hashlib.sha256(b"{}").hexdigest()})
    assert not found.is_edit("config.json", b"{}")
    assert found.is_edit("config.json", b"{ }")


def test_a_plain_index_leads_to_the_objects_of_its_save() -> None:
    shard = "model-00001-of-00001.safetensors"
    index = CheckpointIndex(
        weight_map={"w": shard},
        total_size=8,
        metadata={"note": "x"},
        files={shard: FileDigest(size=80, sha256="c" * 64), "config.json": FileDigest(size=2, sha256="d" * 64)},
    )

    copied = CheckpointIndex.from_json(plain_index(index, SEVENTH), "i")

    assert copied.weight_map == {"w": f"model-00001-of-00001-{OF_SEVENTH}.safetensors"}
    assert list(copied.files) == ["config.json", f"model-00001-of-00001-{OF_SEVENTH}.safetensors"]
    assert (copied.total_size, copied.metadata) == (8, {"note": "x"})
    assert save_of_copy(copied) == SEVENTH
    assert save_of_copy(index) is None
    mixed = CheckpointIndex(weight_map={**copied.weight_map, "v": shard}, total_size=16)
    assert save_of_copy(mixed) is None
