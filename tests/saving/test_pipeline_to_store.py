"""What a save leaves in a store, what it asks of it, and what it does not do again."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.commit.store_commit import store_transaction
from hfshard.commit.transaction import OwnShardWriter
from hfshard.disk.byte_source import BytesSource
from hfshard.errors import RemoteChangedError, StoreAccessError, StoreError
from hfshard.format.index import CheckpointIndex, FileDigest, without_commit_marker
from hfshard.saving.pipeline import Save
from hfshard.saving.save_request import SaveOptions, SaveRequest, request_from_state_dict
from tests.stores.saving.checkpoints import loaded, save_into
from tests.stores.saving.memory_store import MemoryStore

INDEX = "model.safetensors.index.json"
CONFIG = b'{\n  "hidden": 1\n}\n'


def weights(value: float, count: int = 3) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((4,), value + i) for i in range(count)}


def request(tensors: dict[str, torch.Tensor], limit: int = 1, **more: Any) -> SaveRequest:
    """A tensor a file, unless a limit is given."""
    options = SaveOptions(max_shard_size=limit, progress=False, **more.pop("options", {}))
    plain = request_from_state_dict(tensors, options)
    return SaveRequest(tensors=plain.tensors, options=options, tied_names=plain.tied_names, **more)


def save(store: MemoryStore, wanted: SaveRequest) -> CheckpointIndex:
    store.requests.clear()
    return save_into(store, wanted)


def shown(text: str) -> str:
    """A name or a request, with an x for the id of a save."""
    return re.sub(r"-[0-9a-f]{16}\b", "-x", text)


def names_of(index: CheckpointIndex, number: int, entry: str = INDEX) -> set[str]:
    """What the objects of a save are called, but for its id: shards, index, and the plain copy of that."""
    shards = {name.removesuffix(".safetensors") + f"-{number:08d}-x.safetensors" for name in index.weight_map.values()}
    return {*shards, f"{entry.removesuffix('.json')}-{number:08d}-x.json", entry}


def names_in(store: MemoryStore) -> set[str]:
    return set(map(shown, store.objects))


def test_a_save_into_an_empty_place_puts_shards_then_its_index_then_the_plain_copies(tmp_path: Path) -> None:
    store = MemoryStore()
    index = save(store, request(weights(1), config=CONFIG, options={"metadata": {"run": 7}}))

    asked = [shown(one) for one in store.requests]
    assert asked[0] == "list"
    assert sorted(asked[1:7]) == [
        "finish model-00001-of-00003-00000001-x.safetensors",
        "finish model-00002-of-00003-00000001-x.safetensors",
        "finish model-00003-of-00003-00000001-x.safetensors",
        "open model-00001-of-00003-00000001-x.safetensors",
        "open model-00002-of-00003-00000001-x.safetensors",
        "open model-00003-of-00003-00000001-x.safetensors",
    ]
    assert asked[7:] == [
        "put model.safetensors.index-00000001-x.json",
        "put config.json",
        f"put {INDEX}",
        "list",
    ]
    assert names_in(store) == {*names_of(index, 1), "config.json"}
    assert json.loads(store.objects[INDEX])["metadata"]["run"] == 7
    loaded = hfshard.load_state_dict(store.into(tmp_path / "copy"), verify="full")
    assert loaded.keys() == weights(1).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(1).items())


def test_an_unchanged_save_puts_nothing_and_unchanged_shards_are_copied() -> None:
    store = MemoryStore()
    wanted = request(weights(1), config=CONFIG, model_files={"generation_config.json": b"{}"})
    first = save(store, wanted)
    before = dict(store.objects)
    (entry,) = (name for name in store.objects if name.startswith("model.safetensors.index-"))
    elsewhere = MemoryStore(store.objects)
    assert save(elsewhere, wanted) == first
    assert elsewhere.requests == ["list", f"read {entry}"]  # S3's ETags tell of the small files

    assert save(store, wanted) == first
    assert store.requests == ["list"]  # it is this process that has put the index
    assert store.objects == before

    second = save(store, request(weights(1) | {"layer.1": torch.zeros(4)}, config=CONFIG))
    assert {shown(one) for one in store.requests if one.startswith(("open", "copy"))} == {
        "copy model-00001-of-00003-00000002-x.safetensors",
        "open model-00002-of-00003-00000002-x.safetensors",
        "copy model-00003-of-00003-00000002-x.safetensors",
    }
    assert names_in(store) == {*names_of(second, 2), "config.json", "generation_config.json"}
    assert [one.split()[0] for one in store.requests] == [
        "list", "copy", "copy", "open", "finish", "put", "put", "put", "put", "list", "delete", "sweep",
    ]  # fmt: skip


def test_a_shard_that_is_damaged_is_sent_again() -> None:
    store = MemoryStore()
    save(store, request(weights(1), config=CONFIG))
    (damaged,) = (name for name in store.objects if name.startswith("model-00002-of-00003-"))
    store.objects[damaged] = bytes(len(store.objects[damaged]))
    index = save(store, request(weights(1), config=CONFIG))
    assert {shown(one) for one in store.requests if one.startswith(("open", "copy"))} == {
        "copy model-00001-of-00003-00000002-x.safetensors",
        "open model-00002-of-00003-00000002-x.safetensors",
        "copy model-00003-of-00003-00000002-x.safetensors",
    }
    assert names_in(store) == {*names_of(index, 2), "config.json"}


def test_a_shard_that_is_gone_when_it_is_to_be_copied_is_sent() -> None:
    store = MemoryStore()
    save(store, request(weights(1), config=CONFIG))

    def remove(kind: str, name: str) -> None:
        if kind == "copy":
            for one in [one for one in store.objects if one.startswith("model-00001-of-00003-00000001-")]:
                del store.objects[one]

    store.before = remove
    index = save(store, request(weights(1) | {"layer.1": torch.zeros(4)}, config=CONFIG))
    assert "open model-00001-of-00003-00000002-x.safetensors" in map(shown, store.requests)
    assert names_in(store) == {*names_of(index, 2), "config.json"}


def test_a_config_that_is_edited_by_hand_is_replaced_by_a_save_that_has_one() -> None:
    store = MemoryStore()
    files = {"generation_config.json": b'{"a": 1}'}
    save(store, request(weights(1), config=CONFIG, model_files=files))
    store.objects["generation_config.json"] = b'{"a": 2}'
    save(store, request(weights(1), config=CONFIG, model_files=files))
    assert without_commit_marker(store.objects["generation_config.json"]) == b'{"a": 1}'
    store.objects["config.json"] = b"{}\n"
    save(store, request(weights(1), config=CONFIG, model_files=files))
    assert without_commit_marker(store.objects["config.json"]) == CONFIG
    store.objects["config.json"] = b'{"a": 3}\n'
    save(store, request(weights(2)))  # has none: the edit stays
    assert without_commit_marker(store.objects["config.json"]) == b'{"a": 3}\n'


@pytest.mark.parametrize("checksum", ["sha256", "xxh3", None])
def test_a_checkpoint_of_one_file_has_an_index_too(checksum: Any, tmp_path: Path) -> None:
    store = MemoryStore()
    index = save(store, request(weights(1), 10**6, options={"checksum": checksum, "variant": "fp16"}))
    assert set(index.weight_map.values()) == {"model.fp16-00001-of-00001.safetensors"}
    assert names_in(store) == names_of(index, 1, "model.safetensors.index.fp16.json")
    assert index.is_verifiable is (checksum is not None)
    loaded = hfshard.load_state_dict(store.into(tmp_path / "copy"), variant="fp16")
    assert torch.equal(loaded["layer.2"], weights(1)["layer.2"])


def test_files_that_go_along_are_sent_and_a_readme_that_is_there_stays() -> None:
    large = bytes(5 << 20)  # sent in parts
    files = {"tokenizer.json": BytesSource(large), "README.md": BytesSource(b"# theirs\n"), "code.py": BytesSource(b"")}
    store = MemoryStore(
        {"README.md": b"# mine\n", "notes/of/mine.txt": b"", "model_ema-00001-of-00001.safetensors": b"x"}
    )
    others = set(store.objects)
    index = save(store, request(weights(1), config=CONFIG, companion_files=files))
    assert store.objects["tokenizer.json"] == large
    assert store.objects["README.md"] == b"# mine\n"
    assert names_in(store) == {*others, *names_of(index, 1), "config.json", "tokenizer.json", "code.py"}

    assert save(store, request(weights(1), config=CONFIG, companion_files=files)) == index
    assert sorted(set(store.requests)) == ["list", "read tokenizer.json"]


def test_a_variant_leaves_the_weights_beside_it_alone() -> None:
    store = MemoryStore()
    plain = save(store, request(weights(1), config=CONFIG))
    save(store, request(weights(2), config=b'{\n  "hidden": 2\n}\n', options={"variant": "fp16"}))
    again = save(store, request(weights(3), config=CONFIG, options={"variant": "fp16"}))
    entry = "model.safetensors.index.fp16.json"
    assert names_in(store) == {*names_of(plain, 1), *names_of(again, 3, entry), "config.json"}


def test_shards_of_a_stock_save_that_was_killed_go() -> None:
    store = MemoryStore()
    save(store, request(weights(1), config=CONFIG))
    store.objects |= {f"model-0000{number}-of-00009.safetensors": b"x" for number in (1, 2)}
    index = save(store, request(weights(2), config=CONFIG))
    assert names_in(store) == {*names_of(index, 2), "config.json"}


def test_who_may_not_delete_is_told_what_other_tools_load(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore({"model.safetensors": b"theirs"})

    def refuse(kind: str, name: str) -> None:
        if kind == "delete":
            raise StoreAccessError("DeleteObject is not permitted.")

    store.before = refuse
    with caplog.at_level(logging.WARNING):
        save(store, request(weights(1), config=CONFIG))
    assert [record.message.partition(", but ")[2] for record in caplog.records] == [
        "earlier saves cannot be deleted: DeleteObject is not permitted. They take space, but do no harm.",
        "other tools load the remains of the old one until they are deleted: model.safetensors.",
    ]
    caplog.clear()
    del store.objects["model.safetensors"]
    save(store, request(weights(2), config=CONFIG))
    assert len(caplog.records) == 1


def test_ctrl_c_before_the_index_leaves_the_old_checkpoint_and_after_it_the_rest_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HFSHARD_WRITERS", "1")
    store = MemoryStore()
    save(store, request(weights(1), config=CONFIG))
    before = dict(store.objects)
    interrupted = 0
    for number in range(20):
        store.objects = dict(before)
        store.before = lambda kind, name, at=number: _press_ctrl_c() if len(store.requests) == at + 1 else None  # type: ignore[misc]
        try:
            index = save(store, request(weights(2), config=CONFIG))
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        assert not store.uploads
        is_new = store.objects[INDEX] != before[INDEX]
        assert is_new or before.items() <= store.objects.items()
        if is_new:  # nothing of the old one is left
            assert {name for name in names_in(store) if "00000001" in name} == set()
    assert names_in(store) == {*names_of(index, 2), "config.json"}
    assert interrupted == len(store.requests) == number


def _press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_check_that_fails_before_the_commit_leaves_the_place_as_it_was() -> None:
    store = MemoryStore()
    calls: list[str] = []

    def check() -> None:
        calls.append("check")
        if len(calls) == 2:
            raise RuntimeError("the run was removed")

    with pytest.raises(RuntimeError, match="the run was removed"):
        save_into(store, request(weights(1)), check)
    assert calls == ["check", "check"]
    assert {name.split("-0000000")[0] for name in store.objects} == {
        "model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003",
    }  # fmt: skip
    index = save(store, request(weights(1)))
    assert names_in(store) == names_of(index, 2)


def test_a_service_that_does_not_list_unfinished_uploads_is_saved_into_all_the_same() -> None:
    store = MemoryStore()
    save(store, request(weights(1)))

    def refuse(kind: str, name: str) -> None:
        if kind == "sweep":
            raise StoreError("S3 failed for s3://models/bert: 501, NotImplemented. Try again later.")

    store.before = refuse
    index = save(store, request(weights(2)))
    assert names_in(store) == names_of(index, 2)


def test_a_state_dict_without_tensors_is_saved_and_replaced(tmp_path: Path) -> None:
    store = MemoryStore()
    index = save(store, request({}))
    assert index.weight_map == {}
    assert hfshard.load_state_dict(store.into(tmp_path / "copy"), verify="full") == {}
    assert save(store, request({})) == index
    assert store.requests == ["list"]
    second = save(store, request(weights(1)))
    assert names_in(store) == names_of(second, 2)


def test_who_replaces_what_is_being_looked_at_is_looked_at_again() -> None:
    store = MemoryStore()
    save(store, request(weights(1), config=CONFIG, model_files={"generation_config.json": b"1"}))
    store.objects["generation_config.json"] = b"7"
    other = MemoryStore(store.objects)
    values = iter(b"23")

    def edit(kind: str, name: str) -> None:
        if kind == "read" and name == "generation_config.json" and (value := next(values, None)):
            store.objects["generation_config.json"] = bytes([value])

    other.before = edit
    save(other, request(weights(1), config=CONFIG, model_files={"generation_config.json": b"9"}))
    assert without_commit_marker(store.objects["generation_config.json"]) == b"9"
    assert other.requests.count("list") == 4  # three looks, and one after the commit


def test_a_place_that_changes_whenever_it_is_looked_at_is_left_to_others() -> None:
    old = MemoryStore()
    save(old, request(weights(1), config=CONFIG))
    store = MemoryStore({**old.objects, "config.json": b"{}"})

    def replace_config(kind: str, name: str) -> None:
        if kind == "read" and name == "config.json":
            store.objects["config.json"] += b" "

    store.before = replace_config
    with pytest.raises(RemoteChangedError, match=r"Other processes replaced the checkpoint in .* on every attempt"):
        save(store, request(weights(2), config=CONFIG))
    assert store.objects.keys() == old.objects.keys()


def test_a_save_that_another_overtakes_while_it_hashes_reads_no_object_that_is_gone() -> None:
    store = MemoryStore()
    large = b'{"x": "' + b"y" * (1 << 20) + b'"}'  # an object of its own, which the other save deletes
    wanted = request(weights(1), model_files={"large.json": large})
    save(store, wanted)
    other = MemoryStore(store.objects)

    class Slow(OwnShardWriter):
        def link(self, *arguments: Any) -> list[FileDigest | None]:
            found = super().link(*arguments)
            if not other.requests:
                save_into(other, request(weights(2), model_files={"large.json": large.replace(b"y", b"z")}))
            return found

    slow = Slow()
    one = Save({"model": wanted}, slow)
    with store_transaction(store, one.new, slow) as target:
        assert not one.into(target)  # it was all there when it began
    assert loaded(store.objects) == (None, {2.0, 3.0, 4.0})
