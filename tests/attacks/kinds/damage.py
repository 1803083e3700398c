"""Accidents: files cut short, flipped bits, empty files, and other things in a file's place."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable

from tests.attacks.files import bases, raw
from tests.attacks.registry import Build, Expected, Place, edited, register, register_all, replaced

S = raw.SECOND
DATA_AT = 4096
"""Where hfshard's own files have their data."""

Base = Callable[[], raw.Files]


def _edit(base: Base, file: str, change: Callable[[bytes], bytes]) -> Build:
    return edited(base, lambda files: files.update({file: change(files[file])}), file)


def _cut(base: Base, file: str, at: Callable[[bytes], int]) -> Build:
    return _edit(base, file, lambda content: content[: at(content)])


def _share(share: float, least: int = 0) -> Callable[[bytes], int]:
    return lambda content: least + int(len(content) * share)


def _header_end(content: bytes) -> int:
    return 8 + int(struct.unpack("<Q", content[:8])[0])


CUTS: dict[str, Callable[[bytes], int]] = {
    "empty": lambda content: 0,
    "one-byte": lambda content: 1,
    "seven-bytes": lambda content: 7,
    "length-only": lambda content: 8,
    "in-the-header": lambda content: 60,
    "one-before-the-header-ends": lambda content: _header_end(content) - 1,
    "header-only": _header_end,
    "in-the-data": lambda content: _header_end(content) + 9,
    "last-byte": lambda content: len(content) - 1,
}
BASES: dict[str, tuple[Base, str]] = {
    "stock-shard": (raw.stock_sharded, S),
    "stock-single": (raw.stock_single, raw.SINGLE),
    "our-shard": (bases.ours_sharded, S),
    "our-single": (bases.ours_single, raw.SINGLE),
}
for _base_name, (_base, _file) in BASES.items():
    register_all(f"truncated-{_base_name}", {name: _cut(_base, _file, at) for name, at in CUTS.items()})
    register(f"padded-{_base_name}-with-a-page-of-zeros", _edit(_base, _file, lambda content: content + bytes(4096)))
    register(f"zeroed-{_base_name}", _edit(_base, _file, lambda content: bytes(len(content))))

BIN_CUTS: dict[str, Callable[[bytes], int]] = {
    "first-byte": _share(0.0, least=1),
    "half": _share(0.5, least=1),
    "nine-tenths": _share(0.9, least=1),
    "last-byte": CUTS["last-byte"],
    "empty": CUTS["empty"],
}
INDEX_CUTS = {"empty": _share(0.0), "half": _share(0.5), "last-brace": _share(0.99)}
BINS: dict[str, Base] = {"zip": bases.stock_bin, "legacy": functools.partial(bases.stock_bin, legacy=True)}
for _name, _base in BINS.items():
    register_all(f"truncated-bin-{_name}", {name: _cut(_base, raw.BIN, at) for name, at in BIN_CUTS.items()})
for _name, _base in {"stock": raw.stock_sharded, "our": bases.ours_sharded}.items():
    register_all(f"truncated-{_name}-index", {name: _cut(_base, raw.INDEX, at) for name, at in INDEX_CUTS.items()})


def _flip_hex(field: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        at = content.index(field.encode()) + len(field) + 12
        while content[at : at + 1] not in b"02468":
            at += 1
        return raw.flip(content, at)

    return change


FLIPS: dict[str, tuple[Base, str, Callable[[bytes], bytes], bool]] = {
    "stock-length": (raw.stock_sharded, S, lambda c: raw.flip(c, 1), False),
    "stock-length-top-bit": (raw.stock_sharded, S, lambda c: raw.flip(c, 7, 7), False),
    "stock-dtype": (raw.stock_sharded, S, lambda c: c.replace(b'"F32"', b'"G32"', 1), False),
    "stock-name": (raw.stock_sharded, S, lambda c: c.replace(b"block.bias", b"block.bhas"), False),
    "stock-offset": (raw.stock_sharded, S, lambda c: c.replace(b"[0,16]", b"[0,17]"), False),
    "our-length": (bases.ours_sharded, S, lambda c: raw.flip(c, 1), False),
    "our-dtype-of-the-same-width": (bases.ours_sharded, S, lambda c: c.replace(b'"F32"', b'"I32"', 1), False),
    "our-name": (bases.ours_sharded, S, lambda c: c.replace(b"block.bias", b"block.bhas"), False),
    "our-padding": (bases.ours_sharded, S, lambda c: raw.flip(c, DATA_AT - 1, 3), False),
    "our-metadata": (bases.ours_sharded, S, lambda c: c.replace(b'"pt"', b'"qt"'), False),
    "our-first-data-byte": (bases.ours_sharded, S, lambda c: raw.flip(c, DATA_AT), False),
    "our-last-data-byte": (bases.ours_sharded, S, lambda c: raw.flip(c, len(c) - 1, 7), False),
    "our-single-data": (bases.ours_single, raw.SINGLE, lambda c: raw.flip(c, len(c) - 30, 4), False),
    "our-single-dtype": (bases.ours_single, raw.SINGLE, lambda c: c.replace(b'"F32"', b'"I32"', 1), False),
    "our-single-padding": (bases.ours_single, raw.SINGLE, lambda c: raw.flip(c, DATA_AT - 1, 3), False),
    "our-single-sha256": (bases.ours_single, raw.SINGLE, _flip_hex("sha256"), True),
    "our-single-fingerprint": (bases.ours_single, raw.SINGLE, _flip_hex("fingerprint"), False),
}
for _name, (_base, _file, _change, _full) in FLIPS.items():
    register(f"flipped-{_name}", _edit(_base, _file, _change), full=_full)

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 90868376\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>503 Service Unavailable</title></head><body>Try later.</body></html>\n"
IMPOSTORS: dict[str, tuple[bytes, str]] = {
    "git-lfs-pointer": (LFS_POINTER, "git.lfs"),
    "html-page": (HTML, ""),
    "json-error": (b'{"error":"Invalid credentials in Authorization header"}', ""),
    "xml-error": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', ""),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(64), ""),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(64), ""),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), ""),
    "zeros": (bytes(512), ""),
}
PLACES: dict[str, tuple[Base, str]] = {
    "a-shard": (raw.stock_sharded, S),
    "the-single-file": (raw.stock_single, raw.SINGLE),
    "the-index": (raw.stock_sharded, raw.INDEX),
    "the-bin": (bases.stock_bin, raw.BIN),
    "a-bin-shard": (bases.stock_bin_sharded, "pytorch_model-00002-of-00003.bin"),
}
for _place, (_base, _file) in PLACES.items():
    for _name, (_content, _match) in IMPOSTORS.items():
        if _place in ("a-shard", "the-single-file") or _name in ("git-lfs-pointer", "html-page"):
            register(f"impostor-{_name}-for-{_place}", replaced(_base, _file, _content, _match))
SWAPPED = {
    "bin-for-the-single-file": _edit(raw.stock_single, raw.SINGLE, lambda _: bases.stock_bin()[raw.BIN]),
    "safetensors-for-the-bin": replaced(bases.stock_bin, raw.BIN, raw.stock_single()[raw.SINGLE]),
}
register_all("impostor", SWAPPED)
POINTER = replaced(raw.stock_sharded, raw.CONFIG, LFS_POINTER)
register("impostor-git-lfs-pointer-for-the-config", POINTER, entries=("pretrained",))


def _large(position: int, place: Place) -> Expected:
    """Turn a byte in the second of two tensors of 8 KiB."""
    import torch

    import hfshard

    weights = {"a": torch.arange(2048, dtype=torch.float32), "b": torch.arange(2048, dtype=torch.float32) + 1}
    hfshard.save_state_dict(weights, place.checkpoint, max_shard_size=4096 + 8192)
    name = json.loads((place.checkpoint / raw.INDEX).read_bytes())["weight_map"]["b"]
    content = (place.checkpoint / name).read_bytes()
    return place.write({name: raw.flip(content, position % len(content))}).expects(name)


# The last byte is covered by the full hash alone; the others are those that every load checks.
for _name, _position, _full in (("beyond", -1, True), ("within", -8192, False)):
    register(
        f"flipped-our-data-{_name}-the-sample",
        functools.partial(_large, _position),
        entries=("state_dict", "verify"),
        full=_full,
    )
