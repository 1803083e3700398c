"""All attacks, and the positive controls: checkpoints that are unusual, and whole, and must load."""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

from tests.attacks.files import bases, raw, torchfile
from tests.attacks.kinds.hubcache import REPO, snapshot
from tests.attacks.registry import ATTACKS, ENTRIES, Attack, Expected, Place

CONTROLS: dict[str, Attack] = {}


def load_all() -> dict[str, Attack]:
    """Import every theme, which registers its attacks."""
    from tests.attacks.kinds import configs, damage, headers, hfshard_metadata, hubcache, indexes, names, pickles, zips

    assert all((configs, damage, headers, hfshard_metadata, hubcache, indexes, names, pickles, zips))
    return ATTACKS


def control(
    name: str, build: Callable[[Place], object], entries: tuple[str, ...] = (*ENTRIES, "stock"), *, full: bool = False
) -> None:
    """Add a checkpoint that must load, by hfshard and by stock transformers."""

    def built(place: Place) -> Expected:
        build(place)
        return Expected("")

    CONTROLS[name] = Attack(name, built, entries, full)


def _files(make: Callable[[], raw.Files]) -> Callable[[Place], object]:
    return lambda place: place.write(make())


def _with_index(content: bytes) -> Callable[[], raw.Files]:
    return lambda: raw.stock_sharded() | {raw.INDEX: content}


def _with_single(content: Callable[[], bytes]) -> Callable[[], raw.Files]:
    return lambda: {raw.CONFIG: raw.config(), raw.SINGLE: content()}


def _padded() -> bytes:
    whole = raw.stock_single()[raw.SINGLE]
    length = struct.unpack("<Q", whole[:8])[0]
    return raw.framed(whole[8 : 8 + length] + b" " * 500, whole[8 + length :])


def _no_metadata() -> bytes:
    return raw.framed(raw.dumps(raw.entries(raw.tensors())), raw.data(raw.tensors()))


def _entries_in_another_order() -> bytes:
    listed = raw.entries(raw.tensors())
    return raw.framed(raw.dumps(dict(reversed(listed.items()))), raw.data(raw.tensors()))


def _in_a_folder(place: Place) -> None:
    files = raw.stock_sharded()
    files["sub/" + raw.SECOND] = files.pop(raw.SECOND)
    place.write(files | {raw.INDEX: raw.index(names=dict.fromkeys(raw.LAYOUT[raw.SECOND], "sub/" + raw.SECOND))})


def _link_inside(place: Place) -> None:
    files = raw.stock_sharded()
    files["real.safetensors"] = files.pop(raw.SECOND)
    place.write(files)
    os.symlink("real.safetensors", place.checkpoint / raw.SECOND)


def _linked(make: Callable[[], raw.Files]) -> Callable[[Place], None]:
    """Every file is a link to one on another disk, as DVC, git-annex and Nix keep them: read-only, by a hash."""

    def build(place: Place) -> None:
        elsewhere = place.root / "hub" / "elsewhere"
        elsewhere.mkdir(parents=True)
        for number, (name, content) in enumerate(make().items()):
            target = elsewhere / f"object-{number}"
            target.write_bytes(content)
            target.chmod(0o444)
            if number % 2:  # a chain of two, the first one relative
                (elsewhere / f"hop-{number}").symlink_to(target)
                target = Path("../hub/elsewhere") / f"hop-{number}"
            (place.checkpoint / name).symlink_to(target)

    return build


def _weights_of_the_config(name: str) -> raw.Files:
    config = {**json.loads(raw.config()), "transformers_weights": name}
    return {raw.CONFIG: json.dumps(config).encode(), name: raw.stock_single()[raw.SINGLE]}


def _cached_blobs_elsewhere(place: Place) -> None:
    """A cache whose blobs were moved to a larger disk."""
    snapshot(place, raw.stock_sharded())
    blobs = place.root / "hub" / REPO / "blobs"
    blobs.rename(place.root / "hub" / "large-disk")
    blobs.symlink_to("../large-disk")


def _directory_is_a_link(place: Place) -> None:
    place.checkpoint.rmdir()
    real = place.root / "hub" / "elsewhere"
    real.mkdir(parents=True)
    os.symlink(real, place.checkpoint)
    place.write(raw.stock_sharded())


def _hostile_neighbours(place: Place) -> None:
    payload = torchfile.call("os", "system", torchfile.text(f"touch '{place.executed}'"))
    names = ("optimizer.pt", "training_args.bin", "rng_state.pth", raw.BIN, "scheduler.pt")
    code = f"open({str(place.executed)!r}, 'w').close()\n".encode()
    place.write(raw.stock_sharded() | dict.fromkeys(names, torchfile.legacy(payload, {})) | {"modeling_tiny.py": code})
    config = {"model_type": "hfshard_attack", "auto_map": {"AutoModel": "modeling_tiny.Evil"}}
    place.write({raw.CONFIG: json.dumps(config).encode()})


def _stray_links(place: Place) -> None:
    """Rubbish that no index names: not read, and no reason to fail."""
    place.write(bases.ours_sharded())
    os.symlink("nowhere", place.checkpoint / "dangling.safetensors")
    os.symlink("loop.safetensors", place.checkpoint / "loop.safetensors")
    os.mkfifo(place.checkpoint / "fifo.safetensors")
    os.mkdir(place.checkpoint / "folder.safetensors")


def _stale_shards(place: Place) -> None:
    place.write(raw.stock_sharded() | {"model-00004-of-00004.safetensors": b"", "model-x.safetensors": b"?"})


def _handmade(form: str) -> raw.Files:
    opcodes, storages = torchfile.state(legacy=form == "legacy")
    return {raw.CONFIG: raw.config(), raw.BIN: torchfile.wrapped(torchfile.mapping(opcodes), storages, form)}


ONLY_OURS = ENTRIES
FILES: dict[str, Callable[[], raw.Files]] = {
    "stock-sharded": raw.stock_sharded,
    "stock-single": raw.stock_single,
    "index-total-size-zero": _with_index(raw.index({"metadata": {"total_size": 0}})),
    "index-total-size-wrong": _with_index(raw.index({"metadata": {"total_size": 4_000_080}})),
    "index-metadata-of-others": _with_index(
        raw.index({"metadata": {"total_size": raw.TOTAL_BYTES, "tool": {"a": [1, None]}}})
    ),
    "index-unknown-key": _with_index(raw.index({"generator": "elsewhere"})),
    "index-in-one-line": _with_index(json.dumps(json.loads(raw.index())).encode()),
    "header-padded-with-blanks": _with_single(_padded),
    "header-in-another-order": _with_single(_entries_in_another_order),
    "bin-zip": bases.stock_bin,
    "bin-legacy": functools.partial(bases.stock_bin, legacy=True),
    "bin-handmade-zip": functools.partial(_handmade, "zip"),
    "bin-handmade-legacy": functools.partial(_handmade, "legacy"),
    "bin-sharded-zip": bases.stock_bin_sharded,
    "bin-sharded-legacy": functools.partial(bases.stock_bin_sharded, legacy=True),
}
for _name, _make in FILES.items():
    control(f"control-{_name}", _files(_make))
control(
    "control-generation-config",
    lambda place: place.write(raw.stock_single() | {"generation_config.json": b'{"max_length":7}'}),
    ("generating",),
)
control("control-our-sharded", _files(bases.ours_sharded), full=True)
control("control-our-single", _files(bases.ours_single), full=True)
control("control-index-without-metadata", _files(_with_index(raw.index({"metadata": None}))), ONLY_OURS)
control(
    "control-index-metadata-null",
    _files(_with_index(b'{"metadata":null,' + raw.index({"metadata": None})[1:])),
    ONLY_OURS,
)
control("control-header-without-metadata", _files(_with_single(_no_metadata)), ENTRIES)
control("control-shard-in-a-folder", _in_a_folder)
control("control-link-inside", _link_inside)
for _name, _make in {
    "stock-sharded": raw.stock_sharded,
    "stock-single": raw.stock_single,
    "our-sharded": bases.ours_sharded,
    "our-single": bases.ours_single,
    "bin": bases.stock_bin,
    "bin-sharded": bases.stock_bin_sharded,
    "weights-of-the-config": lambda: _weights_of_the_config("other.safetensors"),
}.items():
    control(f"control-links-{_name}", _linked(_make), full=_name.startswith("our"))
control(
    "control-links-generation-config",
    _linked(lambda: raw.stock_single() | {"generation_config.json": b'{"max_length":7}'}),
    ("generating",),
)
control("control-cache-blobs-elsewhere", _cached_blobs_elsewhere)
control("control-directory-is-a-link", _directory_is_a_link)
control("control-cache-snapshot-sharded", lambda place: snapshot(place, raw.stock_sharded()))
control("control-cache-snapshot-single", lambda place: snapshot(place, raw.stock_single()))
control("control-cache-snapshot-bin", lambda place: snapshot(place, bases.stock_bin()))
control("control-cache-snapshot-ours", lambda place: snapshot(place, bases.ours_sharded()))
control("control-hostile-neighbours", _hostile_neighbours)
control("control-stale-shards", _stale_shards)
control("control-stray-links", _stray_links, full=True)
