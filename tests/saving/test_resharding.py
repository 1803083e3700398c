"""The source of a re-shard: what is copied beside its weights, and how its bytes are checked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.errors import IntegrityError, InvalidArgumentError, MissingShardError
from hfshard.places.place import DirectoryPlace
from hfshard.places.source import CheckpointSource
from hfshard.saving.resharding import reshard_source
from hfshard.saving.save_request import SaveOptions
from tests.helpers.random_state_dicts import random_tensor
from tests.saving.helpers import files_in, flip, floats, weights_in

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_what_lies_beside_goes_along_and_weights_of_others_do_not(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    hfshard.save_state_dict(floats(), old, max_shard_size="9KB")
    beside = {
        "config.json": "{}", "generation_config.json": '{"max_new_tokens": 5}', "tokenizer.json": '{"a": 1}',
        "modeling_own.py": "x = 1\n", "README.md": "# theirs\n", "chat_template.jinja": "{{ x }}",
    }  # fmt: skip
    for name, text in beside.items():
        (old / name).write_text(text)
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "model.fp16.safetensors",
        "adapter_config.json",
        ".gitattributes",
    ):
        (old / name).write_text("{}")
    (old / "onnx").mkdir()
    new.mkdir()
    (new / "README.md").write_text("# mine\n")
    result = reshard_source(CheckpointSource(str(old)), DirectoryPlace(str(new)), SaveOptions(max_shard_size="1MB"))
    assert result.companion_files == ("README.md", "chat_template.jinja", "modeling_own.py", "tokenizer.json")
    assert sorted(os.listdir(new)) == sorted([*beside, "model.safetensors"])
    for name in beside.keys() - {"README.md"}:
        assert (new / name).read_text() == beside[name]
    assert (new / "README.md").read_text() == "# mine\n"
    assert set(result.index.files) == {"model.safetensors", "config.json", "generation_config.json"}
    assert hfshard.verify_checkpoint(new).ok


def test_broken_link_in_the_source_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old")
    (tmp_path / "old" / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(MissingShardError, match=r"tokenizer\.json"):
        hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "config.json"])
def test_links_that_leave_the_source_are_refused_as_a_push_refuses_them(tmp_path: Path, name: str) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old")
    (tmp_path / "token").write_text('{"token": "hf_secret"}')
    (tmp_path / "old" / name).symlink_to(tmp_path / "token")
    for change in (
        lambda: hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new"),
        lambda: hfshard.push_checkpoint(tmp_path / "old", tmp_path / "new"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"old/{name}' is a link to '{tmp_path}/token', outside the "):
            change()
        assert not (tmp_path / "new").exists()


def test_a_link_within_the_source_is_followed(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old")
    (tmp_path / "old" / "tokenizer.json").write_text("t")
    (tmp_path / "old" / "notes.txt").symlink_to("tokenizer.json")
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new" / "notes.txt").read_text() == "t"
    assert not (tmp_path / "new" / "notes.txt").is_symlink()


def test_a_pipe_is_left_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old")
    os.mkfifo(tmp_path / "old" / "pipe.json")
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    assert os.listdir(tmp_path / "new") == ["model.safetensors"]
    assert "is a pipe, a socket or a device: it is not copied" in caplog.text


def test_a_save_in_place_touches_nothing_else(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m", max_shard_size="1MB")
    (tmp_path / "m" / "tokenizer.json").write_text("t")
    (tmp_path / "m" / "model.fp16.safetensors").write_bytes(b"somebody else's")
    os.chmod(tmp_path / "m" / "model.safetensors", 0o640)
    hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m", "9KB")
    assert weights_in(tmp_path / "m") == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.fp16.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "t"
    assert (tmp_path / "m" / "model-00001-of-00003.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("low_disk", [False, True])
@pytest.mark.parametrize("old", ["20KB", "1MB"])
def test_a_damaged_source_is_not_written_anew(old: str, low_disk: bool, tmp_path: Path) -> None:
    state_dict = {f"layer.{number}": random_tensor(number, torch.uint8, (6000,)) for number in range(6)}
    hfshard.save_state_dict(state_dict, tmp_path / "m", max_shard_size=old)
    last = weights_in(tmp_path / "m")[-1]
    flip(tmp_path / "m" / last, -1)  # past the 4 KiB of the tensor that its sample has
    before = files_in(tmp_path / "m")
    with pytest.raises(IntegrityError, match=rf"Tensor 'layer\.5' of shard '.*{last}' is damaged") as caught:
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m", "12KB" if old == "1MB" else "1MB", low_disk=low_disk)
    assert (caught.value.fqn, caught.value.path) == ("layer.5", str(tmp_path / "m" / last))
    assert files_in(tmp_path / "m") == before
    with pytest.raises(IntegrityError):
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "elsewhere", "12KB")
    assert not (tmp_path / "elsewhere").exists()


def test_a_source_without_checksums_is_said_to_be_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "old").mkdir()
    save_file(floats(), tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    new = DirectoryPlace(str(tmp_path / "new"))
    with caplog.at_level("INFO", logger="hfshard"):
        result = reshard_source(CheckpointSource(str(tmp_path / "old")), new, SaveOptions())
    assert not result.is_compared
    assert "has no checksums: only its structure was checked" in caplog.text
    again = DirectoryPlace(str(tmp_path / "again"))
    assert reshard_source(CheckpointSource(new.address), again, SaveOptions()).is_compared
