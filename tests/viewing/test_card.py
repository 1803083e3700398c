"""Cards of checkpoints: a picture of 1200 x 630, and a table, from indexes and headers alone."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.disk.byte_source import ByteSource, BytesSource, file_source
from hfshard.errors import InvalidArgumentError
from hfshard.hub.push_files import collect_directory
from hfshard.viewing.card import card_table, draw_card, plain_markdown
from hfshard.viewing.inspection import inspect_checkpoint
from hfshard.viewing.screenshot import find_chromium

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")


@dataclass(frozen=True)
class OnlyHead:
    """A file whose bytes after the header raise."""

    source: ByteSource

    @property
    def size(self) -> int:
        return self.source.size

    @property
    def sha256(self) -> str | None:
        return self.source.sha256

    def open(self) -> io.BufferedIOBase:
        with self.source.open() as reader:
            first = reader.read(8)
            return _Ending(first + reader.read(struct.unpack("<Q", first)[0]))


class _Ending(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        assert size is not None and len(found) == size, "the data was read"
        return found


def save(directory: Path) -> dict[str, ByteSource]:
    tensors = {"h.0.weight": torch.ones(10, 10), "h.1.weight": torch.ones(10, 10), "b": torch.ones(5).half()}
    hfshard.save_state_dict(tensors, directory, max_shard_size="500B")
    return collect_directory(str(directory))[0]


@needs_chromium
def test_a_card_is_drawn_from_headers_alone(tmp_path: Path) -> None:
    contents = save(tmp_path / "out")
    index = hashlib.sha256((tmp_path / "out" / "model.safetensors.index.json").read_bytes()).hexdigest()
    heads = {name: OnlyHead(one) if name.endswith(".safetensors") else one for name, one in contents.items()}

    card = draw_card(heads, "org/name")

    assert struct.unpack(">II", card.picture[16:24]) == (1200, 630)
    lines = card.text.splitlines()
    assert lines[0] == "![Modules by bytes](hfshard-card.png)"
    assert lines[4:6] == ["| parameters | 205 |", "| dtype | F32, F16 |"]
    assert lines[7:] == [f"| sha256 of model.safetensors.index.json | {index} |", "| signature | none |"]


def test_a_table_names_the_signature_and_counts_the_files(tmp_path: Path) -> None:
    contents = save(tmp_path / "out")
    (tmp_path / "out" / "model.sig").write_text("{}")

    table = card_table(inspect_checkpoint(tmp_path / "out"), {**contents, "model.sig": BytesSource(b"{}")})

    assert table.splitlines()[-1] == "| signature | model.sig |"
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(list((tmp_path / "out").glob("*.safetensors")))
    assert f"| files | {count} files, {size / 1000:.1f} KB |" in table


def test_a_signed_checkpoint_is_refused_before_anything_is_drawn_or_pushed(tmp_path: Path) -> None:
    save(tmp_path / "out")
    (tmp_path / "out" / "model.sig").write_text("{}")

    with pytest.raises(InvalidArgumentError, match="which the card would change"):
        hfshard.push_checkpoint(tmp_path / "out", tmp_path / "hub" / "mine", card_picture=True)

    assert not (tmp_path / "hub").exists()


@needs_chromium
def test_a_card_of_an_adapter_shows_the_adapter_and_not_the_base_beside_it(tmp_path: Path) -> None:
    tensors = {
        f"base_model.model.h.{layer}.q.lora_{side}.weight": torch.ones(2, 8) for layer in (0, 1) for side in "AB"
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2, "target_modules": ["q"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    contents: dict[str, ByteSource] = {one.name: file_source(str(one)) for one in tmp_path.iterdir()}

    card = draw_card(contents, "org/adapter")

    assert struct.unpack(">II", card.picture[16:24]) == (1200, 630)
    digest = hashlib.sha256((tmp_path / "adapter_model.safetensors").read_bytes()).hexdigest()
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert card.text.splitlines()[4:] == [
        "| parameters | 64 |",
        "| dtype | F32 |",
        f"| files | 1 file, {size} B |",
        f"| sha256 of adapter&#95;model.safetensors | {digest} |",
        "| signature | none |",
    ]


def test_hostile_text_means_nothing_in_markdown() -> None:
    assert plain_markdown("model.a|b`<i>_x\n.safetensors") == ("model.a&#124;b&#96;&#60;i&#62;&#95;x&#92;n.safetensors")
