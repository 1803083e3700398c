"""All attacks, and the positive controls: checkpoints that are unusual, and whole, and must load."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.attacks.files import bases, raw, torchfile
from tests.attacks.kinds.hubcache import REPO, snapshot
from tests.attacks.registry import ATTACKS, ENTRIES, Attack, Expected, Place

CONTROLS: dict[str, Attack] = {}
GENERATION = {"generation_config.json": b'{"max_length":7}'}


def load_all() -> dict[str, Attack]:
    """Import every theme, which registers its attacks."""
    from tests.attacks.kinds import (
        configs,
        damage,
        headers,
        hfshard_metadata,
        hubcache,
        indexes,
        names,
        parts,
        pickles,
        zips,
    )

    assert all((configs, damage, headers, hfshard_metadata, hubcache, indexes, names, parts, pickles, zips))
    return ATTACKS


def control(
    name: str, build: Callable[[Place], object], entries: tuple[str, ...] = (*ENTRIES, "stock"), *, full: bool = False
) -> None:
    """Add a checkpoint that must load, by hfshard and by stock transformers."""

    def built(place: Place) -> Expected:
        build(place)
        return Expected("")

    CONTROLS[f"control-{name}"] = Attack(f"control-{name}", built, entries, full)


def _index(content: bytes) -> raw.Files:
    return raw.stock_sharded() | {raw.INDEX: content}


def _single(content: bytes) -> raw.Files:
    return {raw.CONFIG: raw.config(), raw.SINGLE: content}


def _header(listed: dict[str, object]) -> raw.Files:
    return _single(raw.framed(raw.dumps(listed), raw.data(raw.tensors())))


def _padded() -> raw.Files:
    header, body = raw.split(raw.stock_single()[raw.SINGLE])
    return _single(raw.framed(raw.dumps(header) + " " * 500, body))


def _in_a_folder() -> raw.Files:
    files = raw.stock_sharded()
    files["sub/" + raw.SECOND] = files.pop(raw.SECOND)
    return files | {raw.INDEX: raw.index(names=dict.fromkeys(raw.LAYOUT[raw.SECOND], "sub/" + raw.SECOND))}


def _link_inside(place: Place) -> None:
    files = raw.stock_sharded()
    files["real.safetensors"] = files.pop(raw.SECOND)
    place.write(files).link(raw.SECOND, "real.safetensors")


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
    config = {"model_type": "hfshard_attack", "auto_map": {"AutoModel": "modeling_tiny.Evil"}}
    place.write(raw.stock_sharded() | dict.fromkeys(names, torchfile.legacy(payload, {})))
    place.write({"modeling_tiny.py": code, raw.CONFIG: json.dumps(config).encode()})


def _handmade(form: str) -> raw.Files:
    opcodes, storages = torchfile.state(legacy=form == "legacy")
    return {raw.CONFIG: raw.config(), raw.BIN: torchfile.wrapped(torchfile.mapping(opcodes), storages, form)}


FILES: dict[str, Callable[[], raw.Files]] = {
    "stock-sharded": raw.stock_sharded,
    "stock-single": raw.stock_single,
    "index-total-size-zero": lambda: _index(raw.index({"metadata": {"total_size": 0}})),
    "index-total-size-wrong": lambda: _index(raw.index({"metadata": {"total_size": 4_000_080}})),
    "index-metadata-of-others": lambda: _index(
        raw.index({"metadata": {"total_size": raw.TOTAL_BYTES, "tool": {"a": [1, None]}}})
    ),
    "index-unknown-key": lambda: _index(raw.index({"generator": "elsewhere"})),
    "index-in-one-line": lambda: _index(json.dumps(json.loads(raw.index())).encode()),
    "header-padded-with-blanks": _padded,
    "header-in-another-order": lambda: _header(dict(reversed(raw.entries(raw.tensors()).items()))),
    "bin-zip": bases.stock_bin,
    "bin-legacy": functools.partial(bases.stock_bin, legacy=True),
    "bin-handmade-zip": functools.partial(_handmade, "zip"),
    "bin-handmade-legacy": functools.partial(_handmade, "legacy"),
    "bin-sharded-zip": bases.stock_bin_sharded,
    "bin-sharded-legacy": functools.partial(bases.stock_bin_sharded, legacy=True),
    "shard-in-a-folder": _in_a_folder,
    "stale-shards": lambda: (
        raw.stock_sharded() | {"model-00004-of-00004.safetensors": b"", "model-x.safetensors": b"?"}
    ),
}
OF_OURS: dict[str, Callable[[], raw.Files]] = {
    "index-without-metadata": lambda: _index(raw.index({"metadata": None})),
    "index-metadata-null": lambda: _index(b'{"metadata":null,' + raw.index({"metadata": None})[1:]),
    "header-without-metadata": lambda: _header(raw.entries(raw.tensors())),
}
"""What stock transformers does not load."""
LINKED: dict[str, Callable[[], raw.Files]] = {
    "stock-sharded": raw.stock_sharded,
    "stock-single": raw.stock_single,
    "our-sharded": bases.ours_sharded,
    "our-single": bases.ours_single,
    "bin": bases.stock_bin,
    "bin-sharded": bases.stock_bin_sharded,
    "weights-of-the-config": lambda: _weights_of_the_config("other.safetensors"),
}
CACHED = {"sharded": raw.stock_sharded, "single": raw.stock_single, "bin": bases.stock_bin, "ours": bases.ours_sharded}


def _files(make: Callable[[], raw.Files]) -> Callable[[Place], object]:
    return lambda place: place.write(make())


def _cached(make: Callable[[], raw.Files]) -> Callable[[Place], object]:
    return lambda place: snapshot(place, make())


for _name, _make in FILES.items():
    control(_name, _files(_make))
for _name, _make in OF_OURS.items():
    control(_name, _files(_make), ENTRIES)
for _name, _make in LINKED.items():
    control(f"links-{_name}", _linked(_make), full=_name.startswith("our"))
for _name, _make in CACHED.items():
    control(f"cache-snapshot-{_name}", _cached(_make))
control("generation-config", lambda place: place.write(raw.stock_single() | GENERATION), ("generating",))
control("links-generation-config", _linked(lambda: raw.stock_single() | GENERATION), ("generating",))
control("our-sharded", _files(bases.ours_sharded), full=True)
control("our-single", _files(bases.ours_single), full=True)
control("link-inside", _link_inside)
control("cache-blobs-elsewhere", _cached_blobs_elsewhere)
control("directory-is-a-link", _directory_is_a_link)
control("hostile-neighbours", _hostile_neighbours)
# Rubbish that no index names: not read, and no reason to fail.
control(
    "stray-links",
    lambda place: (
        place.write(bases.ours_sharded())
        .link("dangling.safetensors", "nowhere")
        .link("loop.safetensors", "loop.safetensors")
        .fifo("fifo.safetensors")
        .folder("folder.safetensors")
    ),
    full=True,
)
