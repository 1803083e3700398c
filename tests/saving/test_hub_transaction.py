"""A save into a repo: the files of a save into a directory, streamed from the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

import hfshard
from hfshard.disk.byte_source import ByteSource
from hfshard.format.file_names import MODEL_BASE
from hfshard.format.index import sha256_of
from hfshard.hub.push_files import PushOptions
from hfshard.hub.repo import PushResult
from hfshard.places.source import CheckpointSource
from hfshard.saving.hub_transaction import HubTransaction, push_parts
from hfshard.saving.pipeline import Save
from hfshard.saving.save_request import SaveOptions, request_from_state_dict
from tests.foreign.dcp_files import save_dcp
from tests.helpers.tensor_bytes import bytes_of
from tests.saving.helpers import files_in, floats


@pytest.mark.parametrize("size", ["9KB", "1MB"])
def test_what_is_pushed_is_what_a_save_writes(size: str, tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "want", max_shard_size=size)
    pushed: dict[str, bytes] = {}
    hashes: dict[str, str | None] = {}

    def push(contents: dict[str, ByteSource]) -> list[PushResult]:
        for name, content in contents.items():
            hashes[name] = content.sha256
            with content.open() as reader:
                pushed[name] = reader.read()
        return [PushResult("c", "url", is_new=True)]

    save = Save({MODEL_BASE: request_from_state_dict(floats(), SaveOptions(max_shard_size=size))})
    target = HubTransaction(save.new, push)
    save.into(target)

    assert pushed == files_in(tmp_path / "want")
    assert hashes == {name: sha256_of(raw) for name, raw in pushed.items()}
    assert target.results[0].commit == "c"


def test_parts_are_pushed_without_a_copy_on_disk(tmp_path: Path) -> None:
    state = {f"model.{name}": tensor for name, tensor in floats().items()}
    save_dcp(tmp_path / "parts", state)
    (tmp_path / "parts" / "tokenizer.json").write_text("{}")
    before = sorted(tmp_path.iterdir())

    result = push_parts(CheckpointSource(str(tmp_path / "parts")), str(tmp_path / "hub"), PushOptions(progress=False))

    assert result.is_new
    assert set(tmp_path.iterdir()) - set(before) == {tmp_path / "hub"}
    loaded = hfshard.load_state_dict(tmp_path / "hub", verify="full")
    assert {name: bytes_of(one) for name, one in loaded.items()} == {
        name: bytes_of(one) for name, one in floats().items()
    }
