"""What a review of pushes and pulls found: each of these once went wrong."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

import hfshard
from hfshard._util.threads import in_threads
from hfshard.errors import (
    HubAccessError,
    HubConnectionError,
    IntegrityError,
    InvalidArgumentError,
    UnknownArgumentError,
)
from hfshard.hub.address import directory_of
from hfshard.hub.directory.hub import DirectoryHub
from hfshard.hub.remote.client import translate_hub_errors
from hfshard.hub.resolve import CheckpointQuery, companion_files
from tests.helpers.tiny_bert import Bert, bert, value_of

pytestmark = pytest.mark.compat


@pytest.mark.parametrize(
    "argument", [{"state_dict": {}}, {"is_main_process": False}, {"checksum": None}, {"save_directory": "x"}]
)
def test_push_of_a_model_refuses_what_it_does_not_take(argument: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UnknownArgumentError):
        bert(1).push_to_hub(str(tmp_path / "hub"), **argument)
    assert not (tmp_path / "hub").exists()


def test_pickles_are_not_pushed_on_request_either(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="does not write pickles"):
        bert(1).push_to_hub(str(tmp_path / "hub"), safe_serialization=False)
    bert(1).push_to_hub(str(tmp_path / "hub"), safe_serialization=True)


@pytest.mark.parametrize("token", ["hf_SECRETSECRET\n", " hf_SECRETSECRET", "", "hf_SECRETSECRÉT"])
def test_token_that_can_not_be_one_is_refused_and_not_quoted(token: str) -> None:
    with (
        pytest.raises(HubAccessError, match="The token that was passed is empty, or has") as raised,
        translate_hub_errors("o/n", token),
    ):
        pass
    assert "SECRET" not in str(raised.value)


def offloaded(value: float) -> Any:
    """A model that only upstream can collect: accelerate keeps one of its parts on the CPU, away from the rest."""
    model: Any = bert(value)
    cpu_offload(model.pooler)
    model.hf_device_map = {"embeddings": 0, "encoder": 0, "pooler": "cpu"}
    return model


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_model_that_upstream_collects_is_one_commit_with_deletes_and_variant(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    bert(1).push_to_hub(str(hub))
    first = DirectoryHub.open(hub).resolve()
    offloaded(2).push_to_hub(str(hub), variant="fp16", max_shard_size=10**9)
    offloaded(3).push_to_hub(str(hub), max_shard_size=1000)
    tree = DirectoryHub.open(hub).tree()
    assert tree is not None
    assert "model.safetensors" not in tree.files
    assert {"model.fp16.safetensors", "model.safetensors.index.json", "README.md"} <= tree.files.keys()
    assert value_of(Bert.from_pretrained(str(hub))) == 3
    assert value_of(Bert.from_pretrained(str(hub), variant="fp16")) == 2
    assert value_of(Bert.from_pretrained(str(hub), revision=first)) == 1


def test_single_file_with_a_flipped_bit_is_not_pushed(tmp_path: Path) -> None:
    for checksum in ("sha256", "xxh3"):
        folder = tmp_path / checksum
        hfshard.save_state_dict({"w": torch.ones(100_000)}, folder, checksum=checksum)
        raw = bytearray((folder / "model.safetensors").read_bytes())
        raw[-1] ^= 1
        (folder / "model.safetensors").write_bytes(raw)
        with pytest.raises(IntegrityError, match=r"model\.safetensors"):
            hfshard.push_checkpoint(folder, tmp_path / "hub")
        assert not (tmp_path / "hub").exists()


def test_shards_of_another_checksum_are_compared_before_they_are_pushed(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(5000), "b": torch.ones(5000)}, tmp_path / "x", max_shard_size="25KB",
                            checksum="xxh3")  # fmt: skip
    assert hfshard.push_checkpoint(tmp_path / "x", tmp_path / "hub").is_new
    shard = tmp_path / "x" / "model-00002-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(IntegrityError, match="model-00002-of-00002"):
        hfshard.push_checkpoint(tmp_path / "x", tmp_path / "hub2")


def test_one_place_has_one_meaning_for_push_pull_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    bert(5).push_to_hub("~/hub")
    places: list[Any] = ["~/hub", "hub", "./hub", Path("hub"), tmp_path / "hub", (tmp_path / "hub").as_uri()]
    for place in places:
        assert value_of(Bert.from_pretrained(place)) == 5
        assert os.path.samefile(hfshard.pull_checkpoint(place), DirectoryHub.open(tmp_path / "hub").snapshot())
        bert(5).push_to_hub(place)
    assert len([item for item in DirectoryHub.open("hub").revisions() if item.kind == "commit"]) == 1


@pytest.mark.parametrize("url", ["file:///x/hub#y", "file:///x/hub?y", "file://other/x", "https://x/y", "file://"])
def test_url_that_would_be_cut_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        directory_of(url)


def test_directory_names_are_decoded(tmp_path: Path) -> None:
    assert directory_of("file:///a%20b/c%23d%3Fe") == "/a b/c#d?e"
    assert directory_of("org/name") is None
    assert directory_of(tmp_path) == str(tmp_path)


def test_error_in_one_thread_stops_the_others() -> None:
    started, stopped = threading.Barrier(2), threading.Event()

    def work(item: int, stop: threading.Event) -> int:
        started.wait(30)
        if item == 0:
            raise HubConnectionError("no")
        if stop.wait(30):
            stopped.set()
        return item

    with pytest.raises(HubConnectionError):
        in_threads(work, [0, 1], 2)
    assert stopped.is_set()


def test_pull_brings_modules_in_folders_but_no_other_weights_of_the_checkpoint() -> None:
    listed = dict.fromkeys(
        ["config.json", "tokenizer.json", "model.safetensors", "model.fp16.safetensors", "pytorch_model.bin",
         "adapter_model.safetensors", "consolidated.safetensors", "tf_model.h5", "2_Dense/model.safetensors",
         "2_Dense/config.json", "onnx/model.onnx", "voices/a.pt", "model.safetensors.index.fp16.json"], 100
    )  # fmt: skip
    files = partial(companion_files, listed)
    beside = ["config.json", "tokenizer.json", "adapter_model.safetensors", "2_Dense/model.safetensors",
              "2_Dense/config.json"]  # fmt: skip
    assert files(CheckpointQuery()) == beside
    asked = CheckpointQuery(allow_patterns=["voices/*", "*.safetensors"])
    assert files(asked) == [
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "2_Dense/model.safetensors",
        "voices/a.pt",
    ]
