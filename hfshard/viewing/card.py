"""The picture and the table of a checkpoint for the README.md of its repo, drawn from the files of a push."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from hfshard._util.text import count_of, format_size, printable
from hfshard.constants import SAFETENSORS_SUFFIX, SIGNATURE_NAME
from hfshard.disk.byte_source import ByteSource, sha256_of_source
from hfshard.format.header import LENGTH_BYTES, read_header_length
from hfshard.hub.model_card import CARD_PICTURE, DrawnCard
from hfshard.hub.push_files import detect_variants
from hfshard.viewing.inspection import inspect_checkpoint
from hfshard.viewing.page.checkpoint_page import make_checkpoint_page
from hfshard.viewing.page.page import render_page
from hfshard.viewing.results import Inspection
from hfshard.viewing.screenshot import ScreenshotOptions, require_chromium, take_screenshot

_WEIGHTS: Final = (SAFETENSORS_SUFFIX, ".bin")
_PLAIN: Final = " ,./-"
"""Punctuation that means nothing in Markdown within a line."""


def draw_card(contents: Mapping[str, ByteSource], name: str) -> DrawnCard:
    """Draw the card of the files of a push, as `hfshard.hub.model_card.draw_card` describes it."""
    require_chromium()
    with tempfile.TemporaryDirectory(prefix="hfshard-card-") as folder:
        for file, content in contents.items():
            if "/" not in file and file.endswith((*_WEIGHTS, ".json", SIGNATURE_NAME)):
                _write_head(content, Path(folder, file))
        names = {file for file in contents if "/" not in file}
        found = inspect_checkpoint(folder, variant=_variant_of(names))
    shown = replace(found, place=name)
    picture = take_screenshot(render_page(make_checkpoint_page(shown), is_still=True), ScreenshotOptions())
    return DrawnCard(picture, f"![Modules by bytes]({CARD_PICTURE})\n\n{card_table(shown, contents)}")


def card_table(found: Inspection, contents: Mapping[str, ByteSource]) -> str:
    """Describe a checkpoint, of which `contents` has the files, as a table in Markdown."""
    entry = contents[found.entry]
    files = found.weights_files
    rows = [
        ("parameters", f"{found.parameters:,}"),
        ("dtype", plain_markdown(", ".join(one.dtype for one in found.dtypes))),
        ("files", f"{count_of(len(files), 'file')}, {format_size(sum(file.nbytes for file in files))}"),
        (f"sha256 of {plain_markdown(found.entry)}", entry.sha256 or sha256_of_source(entry)),
        ("signature", found.signature or "none"),
    ]
    return "\n".join(["| checkpoint | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)])


def plain_markdown(text: str) -> str:
    """Write text so that Markdown and HTML show it as it is."""
    return "".join(one if one.isalnum() or one in _PLAIN else f"&#{ord(one)};" for one in printable(text))


def _variant_of(names: set[str]) -> str | None:
    """Return the variant to show: none, where there is a checkpoint without one, else the first."""
    found = detect_variants(names)
    return None if None in found or not found else min(filter(None, found))


def _write_head(content: ByteSource, path: Path) -> None:
    """Write what is needed to inspect a file: of safetensors only the header, with a hole in place of the data."""
    with content.open() as reader, open(path, "wb") as file:
        if path.suffix != SAFETENSORS_SUFFIX:
            shutil.copyfileobj(reader, file)
            return
        first = reader.read(LENGTH_BYTES)
        file.write(first + reader.read(read_header_length(first, content.size, os.fspath(path.name))))
        file.truncate(content.size)
