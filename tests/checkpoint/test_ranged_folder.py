"""Folders read by ranges: what a store shows of the saves in it, and of what other tools have put next to them."""

from __future__ import annotations

import json

import pytest

from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, MissingShardError
from hfshard.format.file_names import WeightNames
from hfshard.format.stored_save import SaveId, StoredObjectRecord, StoredSave
from tests.stores.saving.memory_store import MemoryStore

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
A, B = "a" * 16, "b" * 16


def saved(
    number: int, save_id: str, *, entry: str = INDEX, config: bytes = b"{}", shard: bytes = b"0"
) -> dict[str, bytes]:
    """The objects of one save: a shard, and the index that inlines a config."""
    one = SaveId(number, save_id)
    index = json.dumps({"metadata": {}, "weight_map": {"w": SHARD}}).encode()
    save = StoredSave(
        save_id=one,
        objects={SHARD: StoredObjectRecord(len(shard), "etag")},
        small_files={"config.json": config, entry: index},
    )
    return {one.object_name(SHARD): shard, one.object_name(entry): save.to_json()}


def folder_of(objects: dict[str, bytes], variant: str | None = None) -> tuple[StoreFolder, MemoryStore]:
    """An entered folder over some objects."""
    store = MemoryStore(dict(objects))
    folder = StoreFolder(store, "s3://models/bert")
    folder.refresh(WeightNames(variant))
    return folder, store


@pytest.mark.parametrize(
    ("saves", "shown"),
    [
        ([(1, A)], (1, A)),
        ([(2, A), (10, A)], (10, A)),
        ([(2, A), (2, B)], (2, B)),
        ([(3, A), (2, B)], (3, A)),
    ],
)
def test_the_highest_index_is_shown(saves: list[tuple[int, str]], shown: tuple[int, str]) -> None:
    objects: dict[str, bytes] = {}
    for number, save_id in saves:
        objects |= saved(number, save_id, config=b'{"number": %d}' % number)
    objects[f"model-00001-of-00001-00000099-{A}.safetensors"] = b"of a save that has no index"

    folder, _ = folder_of(objects)

    assert folder.save_id == SaveId(*shown)
    assert folder.names() == ["config.json", SHARD, INDEX]
    assert folder.read_small("config.json", 100) == b'{"number": %d}' % shown[0]
    assert f"model.safetensors.index-{shown[0]:08d}-{shown[1]}.json" in str(folder.version(INDEX))
    assert folder.path_of(SHARD) == f"s3://models/bert/model-00001-of-00001-{shown[0]:08d}-{shown[1]}.safetensors"
    assert folder.path_of("config.json") == "s3://models/bert/config.json"
    assert (folder.size(SHARD), folder.size("config.json")) == (1, 13 if shown[0] < 10 else 14)
    assert folder.is_pinned


def test_what_is_asked_first_lists_the_objects_and_only_that() -> None:
    run = saved(1, A, entry="checkpoint.json", config=b"of the save")
    store = MemoryStore(run | {"config.json": b"plain"})
    folder = StoreFolder(store, "s3://models/bert")
    folder.enter(WeightNames())
    assert store.requests == []

    assert folder.read_small("config.json", 100) == b"of the save"
    assert folder.is_pinned
    assert [asked for asked in store.requests if asked.startswith("list")] == ["list"]


def test_plain_objects_are_shown_next_to_a_save_but_no_weights() -> None:
    plain = [
        "README.md",
        "tokenizer.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "adapter_model.bin",
    ]
    folder, _ = folder_of(saved(1, A) | dict.fromkeys([*plain, "code/a.py", f"photo-20240101-{B}.jpg"], b"x"))

    own = ["README.md", "adapter_model.bin", "config.json", SHARD, INDEX, f"photo-20240101-{B}.jpg", "tokenizer.json"]
    assert folder.names() == own
    assert not folder.has("model.safetensors")
    assert folder.read_small("README.md", 100) == b"x"
    with pytest.raises(MissingShardError, match=r"'s3://models/bert/model\.safetensors' is missing"):
        folder.source("model.safetensors")


def test_what_no_save_has_made_is_shown_as_it_is() -> None:
    objects = {"model.safetensors": b"x", "config.json": b"{}", f"model-00001-of-00001-00000001-{A}.safetensors": b"y"}
    folder, _ = folder_of(objects)

    assert folder.names() == sorted(objects)
    assert (folder.save_id, folder.save, folder.is_pinned) == (None, None, False)
    assert folder.describe_plain_weights() is None
    assert folder.stale_copies() == []


def test_variants_and_checkpoints_of_runs_have_entries_of_their_own() -> None:
    half = "model.safetensors.index.fp16.json"
    objects = saved(1, A) | saved(2, B, entry=half)

    assert folder_of(objects)[0].save_id == SaveId(1, A)
    assert folder_of(objects, "fp16")[0].save_id == SaveId(2, B)
    assert folder_of(objects, "bf16")[0].save_id is None
    assert folder_of(saved(4, A, entry="checkpoint.json"))[0].save_id == SaveId(4, A)


def test_a_save_that_comes_is_shown_after_the_next_look() -> None:
    folder, store = folder_of(saved(1, A, config=b"old"))
    assert folder.read_small("config.json", 100) == b"old"
    before = folder.version(INDEX)
    store.objects = saved(2, A, config=b"new")

    assert folder.read_small("config.json", 100) == b"old"
    assert folder.version(INDEX) == before
    assert not folder.is_current()
    folder.refresh()
    assert folder.read_small("config.json", 100) == b"new"
    assert folder.version(INDEX) != before
    assert folder.is_current()
    assert [asked for asked in store.requests if asked.startswith("read")] == [
        f"read model.safetensors.index-00000001-{A}.json",
        f"read model.safetensors.index-00000002-{A}.json",
    ]


def test_an_index_that_is_gone_or_damaged_is_an_error() -> None:
    folder, store = folder_of(saved(1, A))
    del store.objects[f"model.safetensors.index-00000001-{A}.json"]
    with pytest.raises(CheckpointChangedError):
        folder.names()

    folder, _ = folder_of({f"model.safetensors.index-00000001-{A}.json": saved(2, A).popitem()[1]})
    with pytest.raises(
        DamagedCheckpointError, match=rf"'s3://models/bert/model\.safetensors\.index-00000001-{A}\.json'"
    ):
        folder.names()


@pytest.mark.parametrize(
    ("plain", "entry"),
    [
        ({"model.safetensors": b"x"}, "model.safetensors"),
        ({"other.safetensors": b"x", INDEX: b'{"weight_map": {"w": "other.safetensors"}}'}, INDEX),
        ({"other.safetensors": b"x"}, None),
        ({"other.safetensors": b"x", INDEX: b"no JSON"}, None),
        ({INDEX: b'{"weight_map": {"w": "other.safetensors"}}'}, None),
    ],
)
def test_uploaded_weights_are_named_by_what_leads_to_all_of_them(plain: dict[str, bytes], entry: str | None) -> None:
    message = folder_of(saved(1, A) | plain)[0].describe_plain_weights()

    assert (message is None) == (entry is None)
    assert entry is None or f"pass 's3://models/bert/{entry}'" in (message or "")


def test_a_folder_below_is_listed_once_after_each_look() -> None:
    folder, store = folder_of(saved(1, A) | {"code/net.py": b"", "custom_generate/generate.py": b"", "logs/x.py": b""})
    store.requests.clear()

    assert folder.list_code_files(["code"]) == ["code/net.py", "custom_generate/generate.py"]
    assert folder.list_code_files(["code"]) == ["code/net.py", "custom_generate/generate.py"]
    folder.refresh()
    folder.list_code_files([])

    listed = [asked for asked in store.requests if asked.startswith("list")]
    assert listed == ["list code", "list custom_generate", "list", "list custom_generate"]
