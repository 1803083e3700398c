"""Checkpoints between directories, stores and hubs: re-shard, push, pull, convert."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import IntegrityError, InvalidArgumentError, SaveDirectoryError
from hfshard.hub import DirectoryHub
from hfshard.places.place import place_to_save
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, request_from_state_dict
from tests.stores.suite.conftest import Place

CONFIG = b'{\n  "hidden_size": 8\n}\n'
TOKENIZER = b'{"version": "1.0"}'


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = {f"layer.{number}": torch.randn(40, 10, generator=generator) for number in range(6)}
    return {**state, "tied": state["layer.0"], "half": torch.ones(5, dtype=torch.bfloat16), "step": torch.tensor(4)}


def _saved(directory: Path, **options: Any) -> Path:
    how = SaveOptions(**{"max_shard_size": "4KB", "metadata": {"note": "x"}} | options)
    save_request(replace(request_from_state_dict(_state(), how), config=CONFIG), place_to_save(directory))
    (directory / "tokenizer.json").write_bytes(TOKENIZER)
    (directory / "vocab").mkdir(exist_ok=True)
    (directory / "vocab" / "words.txt").write_bytes(b"a b c")
    return directory


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _assert_loads(place: str | Path) -> None:
    loaded = hfshard.load_state_dict(place, verify="full")
    assert loaded.keys() == _state().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in _state().items())
    assert loaded["tied"] is loaded["layer.0"]


def test_a_directory_pushed_to_a_store_comes_back_as_it_was(store: Place, tmp_path: Path) -> None:
    directory = _saved(tmp_path / "old")

    pushed = hfshard.push_checkpoint(directory, store.path)
    again = hfshard.push_checkpoint(directory, store.path)

    assert (pushed.url, pushed.commit, pushed.is_new) == (store.path, "", True)
    assert pushed.sent_bytes is not None
    assert pushed.sent_bytes >= 12_000
    assert (again.is_new, again.sent_bytes) == (False, 0)
    _assert_loads(store.path)
    _assert_loads(store.synced())
    assert store.files()["tokenizer.json"] == TOKENIZER
    assert store.files()["vocab/words.txt"] == b"a b c"
    assert hfshard.pull_checkpoint(store.path, tmp_path / "new", verify="full") == str(tmp_path / "new")
    assert _files(tmp_path / "new") == _files(directory)


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_push_replaces_the_readme_and_a_pull_passes_over_folders_made_by_hand(store: Place, tmp_path: Path) -> None:
    directory = _saved(tmp_path / "old")
    for text in (b"first", b"second"):
        (directory / "README.md").write_bytes(text)
        hfshard.push_checkpoint(directory, store.path)
        assert store.files()["README.md"] == text

    store.put("vocab/", b"")
    assert hfshard.pull_checkpoint(store.path, tmp_path / "new") == str(tmp_path / "new")
    assert _files(tmp_path / "new") == _files(directory)


def test_a_reshard_from_to_between_and_in_a_store(store: Place, tmp_path: Path) -> None:
    directory = _saved(tmp_path / "old")

    hfshard.reshard_checkpoint(directory, store.path, "1MB")
    hfshard.reshard_checkpoint(store.path, store.below("deep").path.replace("/place/", "/other/"), "3KB")
    hfshard.reshard_checkpoint(store.path, store.path, "2500B")
    hfshard.reshard_checkpoint(store.path, tmp_path / "back", "4KB")

    _assert_loads(store.path)
    _assert_loads(store.path.replace("/place", "/other/deep"))
    assert store.files()["config.json"].startswith(CONFIG)  # and a line of blanks that tells the save
    assert json.loads(store.files()["config.json"]) == {"hidden_size": 8}
    assert sorted(name[:20] for name in store.files() if name.endswith(".safetensors")) == [
        f"model-0000{number}-of-00008" for number in range(1, 9)
    ]
    _assert_loads(tmp_path / "back")
    assert _files(tmp_path / "back")["config.json"] == CONFIG
    assert _files(tmp_path / "back")["tokenizer.json"] == TOKENIZER
    cast = hfshard.reshard_checkpoint(store.path, store.path, dtype="bfloat16")
    assert len(cast.weight_map) == 8
    assert {tensor.dtype for tensor in hfshard.load_state_dict(store.path, keys="layer.*").values()} == {torch.bfloat16}
    assert json.loads(store.files()["config.json"])["dtype"] == "bfloat16"


@pytest.mark.parametrize("scheme", ["s3"])
def test_what_a_reshard_into_a_store_refuses(store: Place, tmp_path: Path) -> None:
    directory = _saved(tmp_path / "old")
    hfshard.push_checkpoint(directory, store.path)
    before = store.files()
    with pytest.raises(InvalidArgumentError, match="is in the checkpoint to re-shard"):
        hfshard.reshard_checkpoint(store.path, f"{store.path}/below")
    index = next(name for name in before if name.endswith("index.json"))
    with pytest.raises(InvalidArgumentError, match=r"itself\. Pass another one to write into"):
        hfshard.reshard_checkpoint(f"{store.path}/{index}", store.path)
    (directory / "tokenizer.json").write_bytes(b"another")
    with pytest.raises(SaveDirectoryError, match=r"tokenizer\.json' already exists"):
        hfshard.reshard_checkpoint(directory, store.path)
    assert store.files() == before


def test_a_store_is_pushed_to_a_hub_and_pulled_from_it(store: Place, tmp_path: Path) -> None:
    directory = _saved(tmp_path / "old")
    hub = tmp_path / "hub"
    first = hfshard.push_checkpoint(directory, hub)
    hfshard.pull_checkpoint(hub, store.path)
    _assert_loads(store.path)
    assert store.files()["vocab/words.txt"] == b"a b c"

    again = hfshard.push_checkpoint(store.path, hub)

    assert not again.is_new
    hfshard.save_state_dict({**_state(), "step": torch.tensor(5)}, store.path, max_shard_size="4KB")
    moved = hfshard.push_checkpoint(store.path, hub, commit_message="Step 5")
    assert moved.is_new
    assert hfshard.load_state_dict(hub, verify="full")["step"].item() == 5
    assert hfshard.load_state_dict(hub, revision=first.commit)["step"].item() == 4
    tree = DirectoryHub.open(hub).tree(None)
    assert tree is not None
    names = {path for path in tree.files if "model-" in path}
    assert all(len(name) == len("model-00001-of-00008.safetensors") for name in names)


@pytest.mark.parametrize("scheme", ["s3"])
def test_damage_in_a_store_is_found_before_it_spreads(store: Place, tmp_path: Path) -> None:
    hfshard.push_checkpoint(_saved(tmp_path / "old"), store.path)
    name = max(name for name in store.files() if name.endswith(".safetensors"))
    raw = bytearray(store.files()[name])
    raw[-1] ^= 1
    store.put(name, bytes(raw))
    for act in (
        lambda: hfshard.pull_checkpoint(store.path, tmp_path / "new"),
        lambda: hfshard.push_checkpoint(store.path, tmp_path / "hub"),
        lambda: hfshard.reshard_checkpoint(store.path, f"{store.path}-2"),
    ):
        with pytest.raises(IntegrityError):
            act()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("scheme", ["s3"])
def test_pickles_become_safetensors_on_their_way_to_a_store(store: Place, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    torch.save(_state(), tmp_path / "old" / "pytorch_model.bin")

    hfshard.push_checkpoint(tmp_path / "old", store.path)
    hfshard.reshard_checkpoint(tmp_path / "old" / "pytorch_model.bin", f"{store.path}-2")

    _assert_loads(store.path)
    _assert_loads(f"{store.path}-2")


@pytest.mark.parametrize("scheme", ["s3"])
def test_pickles_in_a_store_are_read_from_memory(store: Place, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    torch.save(_state(), tmp_path / "old" / "pytorch_model.bin")
    torch.save(_state(), tmp_path / "old" / "legacy.pt", _use_new_zipfile_serialization=False)
    for name in ("pytorch_model.bin", "legacy.pt"):
        store.put(name, (tmp_path / "old" / name).read_bytes())

    loaded = [hfshard.load_state_dict(path) for path in (store.path, f"{store.path}/legacy.pt")]
    report = hfshard.verify_checkpoint(store.path)
    hfshard.pull_checkpoint(store.path, tmp_path / "new")
    hfshard.reshard_checkpoint(store.path, store.path, "2KB")  # in place

    for state in loaded:
        assert all(torch.equal(state[name], tensor) for name, tensor in _state().items())
    assert report.ok
    _assert_loads(tmp_path / "new")
    _assert_loads(store.path)
    assert "pytorch_model.bin" not in store.files()
    assert "legacy.pt" in store.files()


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize("options", [{"checksum": "xxh3"}, {"checksum": None}, {"max_shard_size": "1GB"}])
def test_a_copy_keeps_the_kind_of_checksum_and_the_files(store: Place, tmp_path: Path, options: dict[str, Any]) -> None:
    directory = _saved(tmp_path / "old", **options)
    hfshard.push_checkpoint(directory, store.path, ignore_patterns="vocab/*")
    assert set(store.files()) - {name for name in store.files() if name.startswith("model")} == {
        "config.json",
        "tokenizer.json",
    }
    hfshard.pull_checkpoint(store.path, tmp_path / "new", allow_patterns=["*.txt"])

    assert _files(tmp_path / "new") == {
        name: raw for name, raw in _files(directory).items() if name.startswith(("model", "config"))
    }
