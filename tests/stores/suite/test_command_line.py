"""The command line with an address in the place of a directory."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.cli.main import main
from tests.stores.suite.conftest import Place, usual_name

pytestmark = pytest.mark.parametrize("scheme", ["s3"])


@pytest.fixture
def saved(store: Place) -> Place:
    """Two tensors in two files, in a store."""
    state = {"a": torch.arange(500.0), "b": torch.ones(600, dtype=torch.bfloat16), "tied": torch.zeros(0)}
    hfshard.save_state_dict(state, store.path, max_shard_size="4KB")
    return store


def test_inspect_shows_files_tensors_and_where(saved: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", saved.path]) == 0
    shown = capsys.readouterr().out
    assert main(["inspect", saved.path, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert f"checkpoint  {saved.path}\n" in shown
    assert "checksums   yes" in shown
    assert found["directory"] == saved.path
    assert found["total_size"] == 3200
    assert {file["name"]: file["size"] for file in found["files"]} == {
        "model-00001-of-00003.safetensors": 6096,
        "model-00002-of-00003.safetensors": 5296,
        "model-00003-of-00003.safetensors": 4096,
    }
    sizes = {usual_name(name): len(raw) for name, raw in saved.files().items()}
    assert sizes.items() >= {file["name"]: file["size"] for file in found["files"]}.items()
    assert found["signature"] is None
    saved.put("model.sig", b"{}")
    assert main(["inspect", saved.path]) == 0
    assert "signature   model.sig, not checked: hfshard verify --public-key KEY" in capsys.readouterr().out


def test_verify_says_whole_or_what_is_damaged(saved: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", saved.path]) == 0
    assert capsys.readouterr().out == f"{saved.path}: intact: 4 files, 15.5 KB compared with their checksums\n"
    name = next(name for name, raw in saved.files().items() if b'"b"' in raw and name.endswith(".safetensors"))
    raw = bytearray(saved.files()[name])
    raw[-1] ^= 1
    saved.put(name, bytes(raw))

    assert main(["verify", saved.path]) == 1
    shown = capsys.readouterr().out
    assert f"DAMAGED  {saved.path}/{name}, tensor b\n" in shown  # the object that is damaged
    assert main(["verify", f"{saved.path}/nothing"]) == 1
    assert f"There is nothing at '{saved.path}/nothing'" in capsys.readouterr().err


def test_reshard_push_and_pull_go_on_from_a_store(
    saved: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        f"reshard {saved.path} {saved.path}-2 --max-shard-size 1MB --format json",
        f"push {saved.path}-2 {tmp_path}/hub",
        f"pull {tmp_path}/hub {saved.path}-3",
        f"pull {saved.path}-3 {tmp_path}/plain",
        f"push {tmp_path}/plain {saved.path}-4",
        f"push {tmp_path}/plain {saved.path}-4",
        f"reshard {saved.path} {saved.path} --max-shard-size 1MB",
    ):
        assert main(shlex.split(words)) == 0, words
    out = capsys.readouterr().out

    assert f'"directory": "{saved.path}-2"' in out
    assert f"\n{saved.path}-3\n{tmp_path}/plain\n{saved.path}-4: " in out
    assert f"{saved.path}-4: already has everything; nothing was sent\n" in out
    assert f"To check it at any time, run: hfshard verify {saved.path}" in out
    for place in (f"{saved.path}-2", tmp_path / "hub", f"{saved.path}-3", tmp_path / "plain", f"{saved.path}-4"):
        assert hfshard.load_state_dict(place, verify="full")["b"].sum().item() == 600


def test_convert_writes_a_pickle_into_a_store(store: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "ema": {"w": torch.zeros(3)}}, tmp_path / "old.pt")
    assert main(["convert", f"{tmp_path}/old.pt", store.path, "--key", "ema"]) == 0
    assert hfshard.load_state_dict(store.path, verify="full")["w"].tolist() == [0, 0, 0]

    assert main(["convert", store.path, store.path]) == 2
    assert "has no pickles to convert: its weights are safetensors" in capsys.readouterr().err


def test_convert_makes_a_checkpoint_of_a_run_in_a_store(store: Place, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {"step": 7, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "trained.pt")

    assert main(["convert", f"{tmp_path}/trained.pt", store.path]) == 0
    assert main(["verify", store.path]) == 0

    assert {"checkpoint-00000007/checkpoint.json", "checkpoint-00000007/training_state.json"} <= store.files().keys()
    store.put("old.pt", (tmp_path / "trained.pt").read_bytes())
    assert main(["convert", f"{store.path}/old.pt", f"{store.path}-2"]) == 0
    assert torch.equal(hfshard.load_state_dict(f"{store.path}-2")["weight"], model.weight)


@pytest.mark.parametrize("words", ["inspect s3://", "verify ftp://x/y", "push hf://org/name x/y", "pull s3:///x y"])
def test_bad_addresses_are_bad_usage(words: str, store: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"hfshard: {'path' if words[0] in 'iv' else ''}")
