"""Pulls from a directory hub into directories with files of the user's own, which are refused by name or stay."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.cli.main import main
from hfshard.commit.directory_commit import save_session
from hfshard.disk import fsops
from hfshard.disk.byte_source import BytesSource
from hfshard.errors import SaveDirectoryError
from hfshard.format.file_names import WeightNames
from hfshard.hub.pull_target import OwnFiles
from tests.hub.models import files_of
from tests.stores.saving.memory_store import MemoryStore

pytestmark = pytest.mark.compat
OLD = {"a": torch.ones(3000), "b": torch.zeros(9)}
NEW = {"a": torch.full((3000,), 2.0), "b": torch.zeros(9), "c": torch.ones(4)}
"""In other files than `OLD`: three of them."""
CHECKPOINT = {
    "config.json": '{"model_type": "bert"}',
    "generation_config.json": "{}",
    "tokenizer.json": '{"version": "1.0"}',
    "vocab.txt": "[PAD]",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}
OTHERS = {"train.py": "print('theirs')", ".env": "TOKEN=theirs", "notes/todo.txt": "theirs", "modeling.py": "x = 1"}


@pytest.fixture
def repo(tmp_path: Path) -> str:
    """A hub whose main has a checkpoint in two shards, and other files."""
    push(tmp_path, OLD, CHECKPOINT | OTHERS | {"README.md": "# First"})
    return str(tmp_path / "hub")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the tests pull to; it does not exist yet."""
    return tmp_path / "mine"


def push(tmp_path: Path, tensors: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    """Push tensors, a shard each, and other files."""
    folder = tmp_path / "pushed"
    hfshard.save_state_dict(tensors, folder, max_shard_size=1)
    for name, text in files.items():
        put(folder / name, text)
    hfshard.push_checkpoint(folder, tmp_path / "hub")


def put(path: Path, text: str) -> None:
    """Write a file, in a folder that may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_files_of_the_user_are_refused_by_name_and_nothing_changes(repo: str, target: Path) -> None:
    for name in OTHERS:
        put(target / name, "mine")
    before = files_of(target)
    stamps = {path: path.stat().st_mtime_ns for path in (target, *target.rglob("*"))}

    with pytest.raises(SaveDirectoryError) as caught:
        hfshard.pull_checkpoint(repo, target)

    assert str(caught.value) == (
        f"'{target}' has files of its own that this pull would replace or remove: '.env', 'modeling.py', "
        "'notes/todo.txt', 'train.py' with other contents. Nothing was written. Pull into a new directory, move the "
        "files away, or pass overwrite=True (hfshard pull --force) to replace them."
    )
    assert files_of(target) == before
    assert {path: path.stat().st_mtime_ns for path in (target, *target.rglob("*"))} == stamps


def test_a_directory_with_the_very_files_is_no_refusal(repo: str, target: Path, tmp_path: Path) -> None:
    for name, text in (CHECKPOINT | OTHERS).items():
        put(target / name, text)
    put(target / "more.py", "mine")

    hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == files_of(tmp_path / "pushed") | {"more.py": b"mine"}


def test_overwrite_replaces_them_and_the_readme(
    repo: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*OTHERS, "README.md", "config.json"):
        put(target / name, "mine")

    assert main(["pull", repo, str(target)]) == 1
    assert "'.env', 'config.json', 'modeling.py', 'notes/todo.txt', 'train.py'" in capsys.readouterr().err
    assert main(["pull", repo, str(target), "--force"]) == 0

    assert files_of(target) == files_of(tmp_path / "pushed")


def test_config_and_tokenizer_are_the_users_own_where_no_checkpoint_is(repo: str, target: Path) -> None:
    for name in CHECKPOINT:
        put(target / name, "mine")
    before = files_of(target)

    with pytest.raises(SaveDirectoryError, match=r"'additional_chat_templates/tool_use\.jinja', 'config\.json', 'gen"):
        hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == before


def test_a_pull_over_an_older_pull_replaces_what_belongs_to_the_checkpoint(
    repo: str, target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hfshard.pull_checkpoint(repo, target)
    changed = {name: f"{text} " for name, text in CHECKPOINT.items()}
    push(tmp_path, NEW, changed | {"README.md": "# Second"})

    hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == files_of(tmp_path / "pushed") | {"README.md": b"# First"}
    assert "README.md', although the checkpoint's differs" in caplog.text
    assert torch.equal(hfshard.load_state_dict(target, verify="full")["a"], NEW["a"])
    hfshard.pull_checkpoint(repo, target, overwrite=True)
    assert files_of(target) == files_of(tmp_path / "pushed")


def test_code_of_an_older_pull_that_changed_on_the_hub_is_refused(repo: str, target: Path, tmp_path: Path) -> None:
    hfshard.pull_checkpoint(repo, target)
    before = files_of(target)
    push(tmp_path, NEW, {"modeling.py": "x = 2"})

    with pytest.raises(SaveDirectoryError, match=r"remove: 'modeling\.py' with other contents"):
        hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == before


def test_another_models_shards_with_their_index_stay(repo: str, target: Path, tmp_path: Path) -> None:
    ema = tmp_path / "ema"
    hfshard.save_state_dict(NEW, ema, max_shard_size=1)
    target.mkdir()
    index = json.loads((ema / "model.safetensors.index.json").read_text())
    named = {name: name.replace("model-", "model_ema-") for name in os.listdir(ema) if name.startswith("model-")}
    index["weight_map"] = {tensor: named[file] for tensor, file in index["weight_map"].items()}
    put(target / "model_ema.safetensors.index.json", json.dumps(index))
    for old, new in named.items():
        (target / new).write_bytes((ema / old).read_bytes())
    before = files_of(target)

    hfshard.pull_checkpoint(repo, target)
    push(tmp_path, NEW, {})
    hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == files_of(tmp_path / "pushed") | before
    assert len(before) == 4


@pytest.mark.parametrize("limit", [1, "1GB"])
def test_weights_of_the_user_and_their_index_are_refused_by_any_name(
    limit: int | str, target: Path, tmp_path: Path
) -> None:
    entry = "model.safetensors" if limit == "1GB" else "model.safetensors.index.json"
    best = entry.replace("model", "best")
    folder = tmp_path / "pushed"
    hfshard.save_state_dict(OLD, folder, max_shard_size=limit)
    (folder / entry).rename(folder / best)
    put(folder / "config.json", json.dumps({"transformers_weights": best}))
    hfshard.push_checkpoint(folder, tmp_path / "hub")
    put(target / best, "mine")

    with pytest.raises(SaveDirectoryError, match=rf"replace or remove: '{best}' with other contents"):
        hfshard.pull_checkpoint(tmp_path / "hub", target)

    assert files_of(target) == {best: b"mine"}
    hfshard.pull_checkpoint(tmp_path / "hub", target, overwrite=True)
    assert files_of(target) == files_of(folder)


def test_a_single_file_that_another_index_names_is_refused(target: Path, tmp_path: Path) -> None:
    hfshard.save_state_dict(OLD, tmp_path / "pushed")
    hfshard.push_checkpoint(tmp_path / "pushed", tmp_path / "hub")
    hfshard.save_state_dict(NEW, target)
    put(target / "ema.safetensors.index.json", json.dumps({"weight_map": dict.fromkeys(NEW, "model.safetensors")}))
    before = files_of(target)

    with pytest.raises(SaveDirectoryError, match=r"remove: 'model\.safetensors' with other contents"):
        hfshard.pull_checkpoint(tmp_path / "hub", target)

    assert files_of(target) == before


@pytest.mark.parametrize("has_weights", [False, True])
def test_shards_that_no_index_names_are_refused_and_removed_by_overwrite(
    has_weights: bool, repo: str, target: Path, tmp_path: Path
) -> None:
    hfshard.save_state_dict(NEW, target, max_shard_size=1)
    (target / "model.safetensors.index.json").unlink()
    if has_weights:  # then what hfshard wrote is what a killed save left, and other programs' shards are the user's
        put(target / "model.safetensors", "mine")
        for path in target.glob("model-*"):
            path.write_bytes(b"mine")
    before = files_of(target)

    with pytest.raises(
        SaveDirectoryError, match=r"weights that no index names: 'model-00001-of-00003\.safetensors', 'm"
    ):
        hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == before
    hfshard.pull_checkpoint(repo, target, overwrite=True)
    assert files_of(target) == files_of(tmp_path / "pushed")


def test_overwrite_takes_the_names_of_shards_that_no_index_names(repo: str, target: Path, tmp_path: Path) -> None:
    put(target / "model-00001-of-00002.safetensors", "mine")
    shutil.copy(tmp_path / "pushed" / "model-00002-of-00002.safetensors", target)

    with pytest.raises(SaveDirectoryError, match=r"no index names: 'model-00001-of-00002\.safetensors'\. Nothing"):
        hfshard.pull_checkpoint(repo, target)
    hfshard.pull_checkpoint(repo, target, overwrite=True)

    assert files_of(target) == files_of(tmp_path / "pushed")


def test_a_variant_does_not_replace_the_config_of_the_weights_next_to_it(
    repo: str, target: Path, tmp_path: Path
) -> None:
    hfshard.pull_checkpoint(repo, target)
    folder = tmp_path / "other"
    hfshard.save_state_dict(NEW, folder, variant="fp16")
    put(folder / "config.json", '{"model_type": "llama"}')
    hfshard.push_checkpoint(folder, tmp_path / "hub2")
    before = files_of(target)

    with pytest.raises(SaveDirectoryError, match=r"remove: 'config\.json' with other contents"):
        hfshard.pull_checkpoint(tmp_path / "hub2", target, variant="fp16")

    assert files_of(target) == before


def test_a_link_a_pipe_and_what_cannot_be_read_count_as_other_contents(repo: str, target: Path, tmp_path: Path) -> None:
    put(target / "notes" / "todo.txt", "theirs")
    (target / "train.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(target / ".env")

    with pytest.raises(SaveDirectoryError, match=r"remove: '\.env', 'train\.py' with other contents"):
        hfshard.pull_checkpoint(repo, target)

    assert sorted(path.name for path in target.rglob("*")) == [".env", "notes", "todo.txt", "train.py"]


def test_a_file_that_is_written_during_the_pull_is_not_replaced(
    repo: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.makedirs

    def make_while_the_user_writes(path: str, *arguments: object, **options: object) -> None:
        """The directory of staged files is the first thing that a pull writes."""
        make(path, *arguments, **options)  # type: ignore[arg-type]
        if path.endswith("/hfshard"):
            put(target / "train.py", "mine")

    monkeypatch.setattr(os, "makedirs", make_while_the_user_writes)
    with pytest.raises(SaveDirectoryError, match=r"'train\.py' in .* changed during the pull, which would replace it"):
        hfshard.pull_checkpoint(repo, target)

    assert files_of(target) == {"train.py": b"mine"}


def test_a_directory_that_a_failed_save_removes_meanwhile_has_no_files_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fsops, "_SILENT_SECONDS", 0.0)
    place = str(tmp_path / "out")
    failing = save_session(place, WeightNames())
    failing.__enter__()
    monkeypatch.setattr(
        caplog.handler, "filters", [lambda _record: not failing.__exit__(OSError, OSError("full"), None)]
    )

    OwnFiles(LocalFolder(place), WeightNames(), {"train.py": BytesSource(b"theirs")})()

    assert len(caplog.records) == 1 and not os.path.exists(place)


def test_an_empty_store_is_listed_once_and_nothing_next_to_it() -> None:
    store = MemoryStore()
    OwnFiles(StoreFolder(store, "s3://models/bert"), WeightNames(), {"train.py": BytesSource(b"theirs")})

    assert store.requests == ["list", "find train.py", "find train.py"]
