"""What a save leaves in a store, what it asks of it, and what it does not do again."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import RemoteChangedError, StoreError
from hfshard.saving.options import SaveOptions
from hfshard.saving.request import SaveRequest, request_from_state_dict
from hfshard.saving.to_store import save_into
from hfshard.saving.writing import OwnShardWriter
from hfshard.storage.disk.byte_source import BytesSource
from hfshard.storage.format.index import CheckpointIndex
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
    return save_into(store, wanted, lambda: None, OwnShardWriter())


def shown(text: str) -> str:
    """A name or a request, with zeros for the digits of one save."""
    return re.sub(r"-[0-9a-f]{16}(?=\.safetensors)", "-0", text)


def test_a_save_into_an_empty_place_puts_shards_then_the_config_then_the_index(tmp_path: Path) -> None:
    store = MemoryStore()
    index = save(store, request(weights(1), config=CONFIG, options={"metadata": {"run": 7}}))

    assert [shown(one) for one in store.requests if one.startswith(("put", "delete", "list", "read", "sweep"))] == [
        "list",
        "put model-hfshard-placeholder.safetensors",
        "put config.json",
        f"put {INDEX}",
        "delete model-hfshard-placeholder.safetensors",
    ]
    assert sorted(map(shown, store.objects)) == [
        "config.json",
        "model-00001-of-00003-0.safetensors",
        "model-00002-of-00003-0.safetensors",
        "model-00003-of-00003-0.safetensors",
        INDEX,
    ]
    assert set(index.weight_map.values()) < store.objects.keys()
    assert json.loads(store.objects[INDEX])["metadata"]["run"] == 7
    loaded = hfshard.load_state_dict(store.into(tmp_path / "copy"), verify="full")
    assert loaded.keys() == weights(1).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(1).items())


def test_an_unchanged_save_puts_nothing_and_unchanged_shards_are_kept() -> None:
    store = MemoryStore()
    first = save(store, request(weights(1), config=CONFIG, model_files={"generation_config.json": b"{}"}))
    before = dict(store.objects)
    elsewhere = MemoryStore(store.objects)
    save(elsewhere, request(weights(1), config=CONFIG, model_files={"generation_config.json": b"{}"}))
    assert elsewhere.requests == ["list", f"read {INDEX}"]  # S3's ETags tell of the small files

    assert save(store, request(weights(1), config=CONFIG, model_files={"generation_config.json": b"{}"})) == first
    assert store.requests == ["list"]  # it is this process that has put the rest
    assert store.objects == before

    tensors = weights(1) | {"layer.1": torch.zeros(4)}
    second = save(store, request(tensors, config=CONFIG))
    opened = [shown(one) for one in store.requests if one.startswith("open")]
    assert opened == ["open model-00002-of-00003-0.safetensors"]
    assert second.weight_map["layer.0"] == first.weight_map["layer.0"]
    assert first.weight_map["layer.1"] not in store.objects
    assert [one.split()[0] for one in store.requests] == ["list", "open", "finish", "sweep", "put", "delete"]


def test_who_edits_a_small_file_by_hand_is_noticed() -> None:
    store = MemoryStore()
    files = {"generation_config.json": b'{"a": 1}'}
    save(store, request(weights(1), config=CONFIG, model_files=files))
    store.objects["generation_config.json"] = b'{"a": 2}'
    save(store, request(weights(1), config=CONFIG, model_files=files))
    assert store.objects["generation_config.json"] == b'{"a": 1}'
    store.objects["config.json"] = b"{}\n"
    save(store, request(weights(1), config=CONFIG, model_files=files))
    assert store.objects["config.json"] == CONFIG


@pytest.mark.parametrize("checksum", ["sha256", "xxh3", None])
def test_a_checkpoint_of_one_file_has_an_index_too(checksum: Any, tmp_path: Path) -> None:
    store = MemoryStore()
    index = save(store, request(weights(1), 10**6, options={"checksum": checksum, "variant": "fp16"}))
    (name,) = set(index.weight_map.values())
    assert shown(name) == "model.fp16-00001-of-00001-0.safetensors"
    assert store.objects.keys() == {name, "model.safetensors.index.fp16.json"}
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
    assert store.objects.keys() == {
        *others, *index.weight_map.values(), INDEX, "config.json", "tokenizer.json", "code.py",
    }  # fmt: skip

    assert save(store, request(weights(1), config=CONFIG, companion_files=files)) == index
    assert store.requests == ["list", "read tokenizer.json"]


def test_a_variant_leaves_the_weights_beside_it_alone() -> None:
    store = MemoryStore()
    plain = save(store, request(weights(1), config=CONFIG))
    both = save(store, request(weights(2), config=b'{\n  "hidden": 2\n}\n', options={"variant": "fp16"}))
    again = save(store, request(weights(3), config=CONFIG, options={"variant": "fp16"}))
    assert set(both.weight_map.values()).isdisjoint(store.objects)
    assert store.objects.keys() == {
        *plain.weight_map.values(), *again.weight_map.values(), INDEX, "model.safetensors.index.fp16.json",
        "config.json",
    }  # fmt: skip
    assert save(store, request(weights(1), config=CONFIG)) == plain
    assert store.requests == ["list"]


def test_ctrl_c_before_the_deciding_put_takes_all_back_and_after_it_the_rest_is_done(
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
            save(store, request(weights(2), config=CONFIG))
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        assert not store.uploads
        is_new = store.objects[INDEX] != before[INDEX]
        assert is_new or store.objects == before
        if is_new:  # nothing of the old one is left
            assert len(store.objects) == len(before)
            assert not before.keys() & {name for name in store.objects if "-of-" in name}
    assert interrupted == len(store.requests) == number


def _press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_check_that_fails_before_the_commit_leaves_nothing() -> None:
    store = MemoryStore()
    calls: list[str] = []

    def check() -> None:
        calls.append("check")
        if len(calls) == 2:
            raise RuntimeError("the run was removed")

    with pytest.raises(RuntimeError, match="the run was removed"):
        save_into(store, request(weights(1)), check, OwnShardWriter())
    assert store.objects == {}
    assert calls == ["check", "check"]


def test_a_service_that_does_not_list_unfinished_uploads_is_saved_into_all_the_same() -> None:
    store = MemoryStore()
    save(store, request(weights(1)))

    def refuse(kind: str, name: str) -> None:
        if kind == "sweep":
            raise StoreError("S3 failed for s3://models/bert: 501, NotImplemented. Try again later.")

    store.before = refuse
    index = save(store, request(weights(2)))
    assert store.objects.keys() == {INDEX, *index.weight_map.values()}


def test_a_state_dict_without_tensors_is_saved_and_replaced(tmp_path: Path) -> None:
    store = MemoryStore()
    index = save(store, request({}))
    assert index.weight_map == {}
    assert hfshard.load_state_dict(store.into(tmp_path / "copy"), verify="full") == {}
    assert save(store, request({})) == index
    assert store.requests == ["list"]
    save(store, request(weights(1)))
    assert len(store.objects) == 4


def test_who_replaces_what_is_being_looked_at_is_looked_at_again() -> None:
    store = MemoryStore()
    save(store, request(weights(1), config=CONFIG, model_files={"code.py": b"1"}))
    other = MemoryStore(store.objects)
    values = iter(b"23")

    def edit(kind: str, name: str) -> None:
        if kind == "read" and name == "code.py" and (value := next(values, None)):
            store.objects["code.py"] = bytes([value])

    other.before = edit
    save(other, request(weights(1), config=CONFIG, model_files={"code.py": b"9"}))
    assert store.objects["code.py"] == b"9"
    assert other.requests.count("list") == 3


def test_a_place_that_changes_whenever_it_is_looked_at_is_left_to_others() -> None:
    old = MemoryStore()
    save(old, request(weights(1), config=CONFIG))
    store = MemoryStore({**old.objects, "config.json": b"{}"})

    def replace_config(kind: str, name: str) -> None:
        if name == "config.json":
            store.objects["config.json"] += b" "

    store.before = replace_config
    with pytest.raises(RemoteChangedError, match=r"Others save into .* was replaced while it was looked at"):
        save(store, request(weights(2), config=CONFIG))
    assert store.objects.keys() == old.objects.keys()
