"""Cards of checkpoints: a picture of 1200 x 630, and a table, from indexes and headers alone."""

from __future__ import annotations

import hashlib
import io
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.disk.byte_source import ByteSource, BytesSource
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


@needs_chromium
def test_a_signature_that_does_not_cover_the_card_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "out")
    (tmp_path / "out" / "model.sig").write_text("{}")
    (tmp_path / "out" / "README.md").write_text("My words.\n")

    pushed = hfshard.push_checkpoint(tmp_path / "out", tmp_path / "hub" / "mine", card_picture=True)

    [snapshot] = (tmp_path / "hub" / "mine").rglob(f"{pushed.commit}/README.md")
    readme = snapshot.read_text()
    assert readme.startswith("<!-- hfshard:card -->\n![Modules by bytes](hfshard-card.png)\n")
    assert readme.endswith("| signature | model.sig |\n<!-- /hfshard:card -->\n\nMy words.\n")
    assert (tmp_path / "out" / "README.md").read_text() == "My words.\n"  # what was pushed is not changed on disk
    assert "The signature 'model.sig' does not cover the card." in caplog.text


def test_hostile_text_means_nothing_in_markdown() -> None:
    assert plain_markdown("model.a|b`<i>_x\n.safetensors") == ("model.a&#124;b&#96;&#60;i&#62;&#95;x&#92;n.safetensors")
