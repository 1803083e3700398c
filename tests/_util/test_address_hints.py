"""What is nearly an address is refused everywhere, with what to write in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hfshard
from hfshard._util.address_hints import suggest_address
from hfshard._util.arguments import absolute_path, check_slashes
from hfshard.cli.main import main
from hfshard.errors import InvalidPathError


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("s3a://models/bert", "Write 's3://models/bert'."),
        ("S3N://key:secret@models/bert/", "Write 's3://models/bert'."),
        ("gcs://models/bert", "Write 'gs://models/bert'."),
        ("abfs://models/bert", "Write 'az://models/bert'."),
        (
            "abfss://models@mine.dfs.core.windows.net/bert",
            "Write 'az://models/bert', and set AZURE_STORAGE_ACCOUNT=mine.",
        ),
        (
            "wasb://models@mine.blob.core.windows.net/bert",
            "Write 'az://models/bert', and set AZURE_STORAGE_ACCOUNT=mine.",
        ),
        ("wasbs://models@elsewhere/bert", None),
        ("https://models.s3.amazonaws.com/bert/1?X-Amz-Signature=secret", "Write 's3://models/bert/1'."),
        ("https://my.models.s3.eu-west-1.amazonaws.com/a%20b", "Write 's3://my.models/a b'."),
        ("https://models.s3.dualstack.eu-west-1.amazonaws.com/bert", "Write 's3://models/bert'."),
        ("https://s3.eu-west-1.amazonaws.com/models/bert", "Write 's3://models/bert'."),
        ("https://s3-eu-west-1.amazonaws.com/models", "Write 's3://models'."),
        ("https://s3.cn-north-1.amazonaws.com.cn/models", "Write 's3://models'."),
        ("https://s3.amazonaws.com/", None),
        ("https://storage.googleapis.com/models/bert", "Write 'gs://models/bert'."),
        ("https://models.storage.googleapis.com/bert", "Write 'gs://models/bert'."),
        ("https://storage.cloud.google.com/models/bert", "Write 'gs://models/bert'."),
        ("https://console.cloud.google.com/storage/browser/models/bert;tab=objects", "Write 'gs://models/bert'."),
        (
            "https://mine.blob.core.windows.net/models/bert?sv=1&sig=secret",
            "Write 'az://models/bert', and set AZURE_STORAGE_ACCOUNT=mine.",
        ),
        ("hf://org/name", "write 'org/name'."),
        ("hf://models/org/name", "write 'org/name'."),
        ("hf://user:secret@org/name@v1", "write 'org/name', with revision='v1'."),
        ("abfss://user:secret@models@mine.dfs.core.windows.net/bert", None),
        ("hf://org/name@v1/sub/folder", "write 'org/name', with revision='v1' and subfolder='sub/folder'."),
        ("hf://org/name@refs/pr/1/sub", "write 'org/name', with revision='refs/pr/1' and subfolder='sub'."),
        ("hf://datasets/org/name", "Datasets on the Hub contain no checkpoints that hfshard reads."),
        ("hf://org", None),
        ("https://huggingface.co/org/name", "write 'org/name'."),
        ("https://hf.co/org/name/tree/main", "write 'org/name'."),
        ("https://huggingface.co/org/name/tree/v1/sub", "write 'org/name', with revision='v1' and subfolder='sub'."),
        ("https://huggingface.co/org/name/blob/main/sub/model.safetensors", "write 'org/name'."),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", "write 'org/name', with revision='refs/pr/1'."),
        ("https://huggingface.co/buckets/org/name/tree/run/1", "Write 'hf://buckets/org/name/run/1'."),
        ("https://huggingface.co/spaces/org/name", "Spaces on the Hub contain no checkpoints that hfshard reads."),
        ("https://models.example/org/name", None),
        ("https://[bad", None),
        ("ftp://models/bert", None),
    ],
)
def test_an_address_of_another_kind_is_answered_with_what_to_write(text: str, advice: str | None) -> None:
    found = suggest_address(text)
    assert found == advice or (advice is not None and found is not None and found.endswith(f" {advice}"))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("s3:/models/bert", "Pass the address as a string: 's3://models/bert'."),
        ("GS:/models", "Pass the address as a string: 'GS://models'."),
        ("s3a:/models/bert", "Write 's3://models/bert'."),
        ("gcs:/models/bert", "Write 'gs://models/bert'."),
        ("hf:/buckets/org/name", "Write 'hf://buckets/org/name'."),
        ("hf:/org/name", "write 'org/name'."),
        ("https:/huggingface.co/org/name", "write 'org/name'."),
        ("https:/models.s3.amazonaws.com/bert", "Write 's3://models/bert'."),
        ("file:/srv/bert", "Write the path alone: '/srv/bert'."),
    ],
)
def test_a_lost_slash_is_told_by_text_and_by_path(text: str, advice: str) -> None:
    for given in (text, Path(text)):
        with pytest.raises(InvalidPathError) as raised:
            absolute_path(given, "save_directory")
        assert str(raised.value).startswith(f"save_directory={text!r} is an address that lost a slash")
        assert str(raised.value).endswith(advice)


def test_a_folder_with_such_a_name_is_reached_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bert").mkdir(parents=True)
    with pytest.raises(InvalidPathError, match=r"For the folder 's3:' here, write './s3:'\.$"):
        check_slashes("s3:/bert", "path")
    assert absolute_path("./s3:/bert") == absolute_path(tmp_path / "s3:" / "bert") == f"{tmp_path}/s3:/bert"
    assert absolute_path("/s3:/bert") == absolute_path(Path("/s3:/bert")) == "/s3:/bert"
    for plain in ("s3:", "s3:x", "s3x:/a", "c:/a", "data/s3:/a"):
        check_slashes(plain, "path")


@pytest.mark.parametrize("text", ["file:///srv/bert", "FILE:///srv/bert"])
def test_a_file_url_is_no_directory_to_save_to(text: str) -> None:
    with pytest.raises(InvalidPathError, match=r"is a file URL\. Write the path alone: '/srv/bert'"):
        absolute_path(text, "save_directory")


class Plain(hfshard.ShardedModelMixin, nn.Linear):
    pass


class Bert(hfshard.ShardedModelMixin, transformers.BertModel):
    pass


CONFIG = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
TENSORS = {"a": torch.ones(2)}
STATE = hfshard.training.TrainingState(model=nn.Linear(1, 1))


def _installed(act: Callable[[Any], object]) -> Callable[[Any], object]:
    def acting(place: Any) -> object:
        hfshard.install()
        try:
            return act(place)
        finally:
            hfshard.uninstall()

    return acting


ACTS: dict[str, Callable[[Any], object]] = {
    "save_state_dict": lambda place: hfshard.save_state_dict(TENSORS, place),
    "save_model": lambda place: hfshard.save_model(nn.Linear(1, 1), place),
    "save a plain module": lambda place: Plain(1, 1).save_pretrained(place),
    "save a model": lambda place: Bert(CONFIG).save_pretrained(place),
    "save by install": _installed(lambda place: transformers.BertModel(CONFIG).save_pretrained(place)),
    "push_to_hub": lambda place: Bert(CONFIG).push_to_hub(place),
    "load_state_dict": hfshard.load_state_dict,
    "load_model": lambda place: hfshard.load_model(nn.Linear(1, 1), place),
    "load_model of a class": lambda place: hfshard.load_model(transformers.AutoModel, place),
    "load a plain module": lambda place: Plain.from_pretrained(place),
    "load a model": lambda place: Bert.from_pretrained(place),
    "load by install": _installed(lambda place: transformers.BertModel.from_pretrained(place)),
    "manager": hfshard.CheckpointManager,
    "manager that pushes": lambda place: hfshard.CheckpointManager("run", push_to_hub=place),
    "restore": lambda place: hfshard.CheckpointManager("run").restore(STATE, place),
    "push from": lambda place: hfshard.push_checkpoint(place, "org/name"),
    "push to": lambda place: hfshard.push_checkpoint("good", place),
    "pull from": lambda place: hfshard.pull_checkpoint(place, "out"),
    "pull to": lambda place: hfshard.pull_checkpoint("good", place),
    "re-shard from": lambda place: hfshard.reshard_checkpoint(place, "out", "1GB"),
    "re-shard to": lambda place: hfshard.reshard_checkpoint("good", place, "1GB"),
    "verify": hfshard.verify_checkpoint,
    "diff": lambda place: hfshard.diff_checkpoints("good", place),
    "show": lambda place: hfshard.show_checkpoint(place, "page.html"),
    "dcp writer": hfshard.distributed.StorageWriter,
    "dcp reader": hfshard.distributed.StorageReader,
}


@pytest.mark.parametrize("act", ACTS)
def test_nothing_takes_what_is_nearly_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    monkeypatch.chdir(tmp_path)
    hfshard.save_state_dict(TENSORS, "good")
    for place in ("s3:/models/bert", Path("s3://models/bert")):
        with pytest.raises(InvalidPathError, match=r"lost a slash.* Pass the address as a string: 's3://models/bert'"):
            ACTS[act](place)
    with pytest.raises(hfshard.errors.InvalidArgumentError, match=r"Write 's3://models/bert'\."):
        ACTS[act]("s3a://models/bert")
    with pytest.raises(hfshard.errors.InvalidArgumentError, match=r"write 'org/name', with revision='v1'\."):
        ACTS[act]("https://huggingface.co/org/name/tree/v1")
    assert os.listdir() == ["good"]


COMMANDS = [
    "inspect PLACE",
    "verify PLACE",
    "show PLACE",
    "diff good PLACE",
    "checkpoints PLACE",
    "reshard PLACE out --max-shard-size 1GB",
    "reshard good PLACE --max-shard-size 1GB",
    "convert PLACE out",
    "convert good PLACE",
    "push PLACE org/name",
    "push good PLACE",
    "pull PLACE out",
    "pull good PLACE",
    "revisions PLACE",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_what_is_nearly_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    hfshard.save_state_dict(TENSORS, "good")
    try:
        code: object = main(command.replace("PLACE", "s3:/models/bert").split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert (
        "is an address that lost a slash, as in pathlib.Path(address). Pass the address as a string: "
        "'s3://models/bert'."
    ) in capsys.readouterr().err
    assert os.listdir() == ["good"]
