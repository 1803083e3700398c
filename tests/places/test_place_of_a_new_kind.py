"""A new kind of place costs one file and one row of the table: then every verb works with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError, SaveDirectoryError
from hfshard.places import place
from hfshard.remove import REMOVALS
from tests.helpers.tiny_bert import bert
from tests.places import memory_place
from tests.places.memory_place import CLASS, FILES, MEMORY

ADDRESS = "mem://models/bert"
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(place, "KINDS", [MEMORY, *place.KINDS])
    monkeypatch.setitem(REMOVALS, CLASS, memory_place.plan_removal)
    yield
    FILES.clear()


def names_at(address: str) -> list[str]:
    return [path.removeprefix(f"{address}/") for path in sorted(FILES) if path.startswith(f"{address}/")]


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_it_is_one_file_of_at_most_250_lines() -> None:
    assert len(Path(memory_place.__file__).read_text().splitlines()) <= 250


def test_a_save_is_loaded_as_from_a_directory(tmp_path: Path) -> None:
    index = hfshard.save_state_dict(TENSORS, ADDRESS, max_shard_size=1)

    assert index == hfshard.save_state_dict(TENSORS, tmp_path, max_shard_size=1)
    assert names_at(ADDRESS) == sorted(path.name for path in tmp_path.iterdir())
    assert same(hfshard.load_state_dict(ADDRESS, verify="full"))
    assert hfshard.load_state_dict(f"{ADDRESS}/model-00001-of-00002.safetensors").keys() == {"a"}
    assert hfshard.load_state_dict("mem://models", subfolder="bert", keys="b").keys() == {"b"}


def test_another_save_replaces_the_first_one() -> None:
    hfshard.save_state_dict(TENSORS, ADDRESS, max_shard_size=1)
    hfshard.save_state_dict({"c": torch.zeros(1)}, ADDRESS)

    assert names_at(ADDRESS) == ["model.safetensors"]
    assert hfshard.load_state_dict(ADDRESS).keys() == {"c"}


def test_modules_and_transformers_models_are_saved_and_loaded() -> None:
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    hfshard.save_model(net, "mem://net")
    hfshard.load_model(other, "mem://net")

    assert torch.equal(net.weight, other.weight)

    model = bert(3)
    hfshard.save_model(model, ADDRESS)
    found = hfshard.load_model(type(model), ADDRESS)

    assert "config.json" in names_at(ADDRESS)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())


def test_damage_is_found() -> None:
    hfshard.save_state_dict(TENSORS, ADDRESS)

    assert hfshard.verify_checkpoint(ADDRESS).ok

    path = f"{ADDRESS}/model.safetensors"
    FILES[path] = FILES[path][:-1] + bytes([FILES[path][-1] ^ 1])
    report = hfshard.verify_checkpoint(ADDRESS)

    assert [problem.file for problem in report.problems] == [path]
    with pytest.raises(CheckpointNotFoundError, match="There is nothing at 'mem://models/none'"):
        hfshard.verify_checkpoint("mem://models/none")


def test_it_is_resharded_in_place_and_elsewhere(tmp_path: Path) -> None:
    hfshard.save_state_dict(TENSORS, ADDRESS)
    FILES[f"{ADDRESS}/tokenizer.json"] = b"{}"
    hfshard.reshard_checkpoint(ADDRESS, "mem://models/small", max_shard_size=1)
    hfshard.reshard_checkpoint(ADDRESS, tmp_path / "small", max_shard_size=1)

    assert names_at("mem://models/small") == sorted(path.name for path in (tmp_path / "small").iterdir())
    assert "tokenizer.json" in names_at("mem://models/small")

    hfshard.reshard_checkpoint(ADDRESS, ADDRESS, max_shard_size=1)

    assert len(names_at(ADDRESS)) == 4
    assert same(hfshard.load_state_dict(ADDRESS))
    with pytest.raises(InvalidArgumentError, match="is in the checkpoint to re-shard"):
        hfshard.reshard_checkpoint(ADDRESS, f"{ADDRESS}/below")


def test_it_is_pushed_to_and_pulled_from(tmp_path: Path) -> None:
    hfshard.save_state_dict(TENSORS, tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("trained twice")
    result = hfshard.push_checkpoint(tmp_path / "saved", ADDRESS)

    assert result.is_new
    assert result.url == ADDRESS
    assert result.sent_bytes == sum(map(len, FILES.values()))
    assert names_at(ADDRESS) == ["model.safetensors", "notes.txt"]
    assert not hfshard.push_checkpoint(tmp_path / "saved", ADDRESS).is_new

    hfshard.pull_checkpoint(ADDRESS, tmp_path / "pulled")

    assert same(hfshard.load_state_dict(tmp_path / "pulled"))
    assert (tmp_path / "pulled" / "notes.txt").read_text() == "trained twice"

    (tmp_path / "pulled" / "notes.txt").write_text("mine")
    with pytest.raises(SaveDirectoryError, match="files of its own"):
        hfshard.pull_checkpoint(ADDRESS, tmp_path / "pulled")
    with pytest.raises(InvalidArgumentError, match="which has no revisions"):
        hfshard.pull_checkpoint(ADDRESS, tmp_path / "other", revision="v1")


def test_it_is_pushed_to_a_hub_and_pulled_into_from_there(tmp_path: Path) -> None:
    hfshard.save_state_dict(TENSORS, ADDRESS)
    hfshard.push_checkpoint(ADDRESS, tmp_path / "hub")
    hfshard.pull_checkpoint(tmp_path / "hub", "mem://models/back")

    assert same(hfshard.load_state_dict(tmp_path / "hub"))
    assert same(hfshard.load_state_dict("mem://models/back"))

    FILES["mem://models/back/notes.txt"] = b"mine"
    (tmp_path / "saved").mkdir()
    hfshard.save_state_dict(TENSORS, tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("theirs")
    hfshard.push_checkpoint(tmp_path / "saved", tmp_path / "hub")
    with pytest.raises(SaveDirectoryError, match="files of its own"):
        hfshard.pull_checkpoint(tmp_path / "hub", "mem://models/back")


def test_a_checkpoint_is_removed_and_other_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    hfshard.save_state_dict(TENSORS, ADDRESS, max_shard_size=1)
    FILES[f"{ADDRESS}/notes.txt"] = b"mine"
    dry = hfshard.remove_checkpoint(ADDRESS, dry_run=True)

    assert list(dry.removed) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert dry.kept == {"notes.txt": "not part of the checkpoint"}
    assert len(names_at(ADDRESS)) == 4
    assert hfshard.remove_checkpoint(ADDRESS).is_done
    assert names_at(ADDRESS) == ["notes.txt"]
    assert hfshard.remove_checkpoint(ADDRESS, leftovers=True).is_empty
    with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint in 'mem://models/bert'"):
        hfshard.remove_checkpoint(ADDRESS)

    monkeypatch.delitem(REMOVALS, CLASS)
    with pytest.raises(InvalidArgumentError, match="Cannot remove from 'mem://models/bert'"):
        hfshard.remove_checkpoint(ADDRESS)


def test_what_needs_a_directory_says_so(tmp_path: Path) -> None:
    hfshard.save_state_dict(TENSORS, ADDRESS)
    (tmp_path / "key.pem").write_text("")

    with pytest.raises(InvalidArgumentError, match="only files on disk can be signed"):
        hfshard.sign_checkpoint(ADDRESS, private_key=tmp_path / "key.pem")
    with pytest.raises(InvalidArgumentError, match="low_disk re-shards a checkpoint in place"):
        hfshard.reshard_checkpoint(ADDRESS, ADDRESS, low_disk=True)
    with pytest.raises(InvalidArgumentError, match="revision='v1' is for a hub"):
        hfshard.load_state_dict(ADDRESS, revision="v1")
