"""Save directories that are traps: a save into one succeeds or is refused, and touches nothing outside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from tests.attacks.files import bases, raw
from tests.attacks.registry import Attack, Expected, Place

STAGING = ".cache/huggingface/hfshard"
SAVES: dict[str, Attack] = {}


def trap(build: Callable[[Place], None]) -> Callable[[Place], None]:
    """Register a save directory that is hostile or damaged."""

    def built(place: Place) -> Expected:
        build(place)
        return Expected("")

    name = f"save-{build.__name__.strip('_').replace('_', '-')}"
    SAVES[name] = Attack(name, built, ("save",))
    return build


def _precious(place: Place, *path: str) -> None:
    folder = place.outside.joinpath(*path)
    folder.mkdir(parents=True)
    (folder / "precious").write_text("do not delete")


@trap
def staging_is_a_link_to_outside(place: Place) -> None:
    """The staging directory is emptied before every save."""
    _precious(place, "kept")
    (place.checkpoint / STAGING).parent.mkdir(parents=True)
    os.symlink(place.outside / "kept", place.checkpoint / STAGING)


@trap
def cache_is_a_link_to_outside(place: Place) -> None:
    """`.cache` is often a link, to where there is space."""
    _precious(place, "huggingface", "hfshard")
    os.symlink(place.outside, place.checkpoint / ".cache")


@trap
def huggingface_cache_is_a_link_to_outside(place: Place) -> None:
    """The folder between."""
    _precious(place, "hfshard")
    (place.checkpoint / ".cache").mkdir()
    os.symlink(place.outside, place.checkpoint / ".cache" / "huggingface")


@trap
def cache_is_a_file(place: Place) -> None:
    """There can be no staging directory below."""
    (place.checkpoint / ".cache").write_bytes(b"")


@trap
def staging_holds_links_to_outside(place: Place) -> None:
    """What a killed save left, and somebody edited."""
    (place.checkpoint / STAGING).mkdir(parents=True)
    os.symlink(place.outside, place.checkpoint / STAGING / "00000.weights")
    os.symlink(place.outside / raw.SINGLE, place.checkpoint / STAGING / "000.small")


@trap
def old_index_names_files_outside(place: Place) -> None:
    """The files that the old index names are removed after the commit."""
    names = {"block.bias": "../outside/" + raw.SECOND, "block.weight": str(place.outside / raw.THIRD)}
    place.write(raw.stock_sharded() | {raw.INDEX: raw.index(names=names)})


@trap
def old_table_names_files_outside(place: Place) -> None:
    """The same by the table of files."""
    files = bases.ours_sharded(2)
    index, metadata = bases.metadata_of_index(files)
    metadata["files"]["../outside/" + raw.SECOND] = {"size": 1}
    bases.put_index(files, index)
    place.write(files)


@trap
def old_config_names_weights_outside(place: Place) -> None:
    """The weights that the old config names."""
    config = {"model_type": "hfshard_attack", "transformers_weights": "../outside/" + raw.SINGLE}
    place.write(raw.stock_single(2) | {raw.CONFIG: json.dumps(config).encode()})


@trap
def index_is_a_fifo(place: Place) -> None:
    """Whoever opens it to keep a copy waits for ever."""
    place.write(raw.stock_single(2))
    os.mkfifo(place.checkpoint / raw.INDEX)


@trap
def index_is_a_fifo_and_the_config_stays(place: Place) -> None:
    """Then its rename is the commit, and a copy of it would be kept to undo that."""
    place.write(bases.ours_single(2))
    os.mkfifo(place.checkpoint / raw.INDEX)


@trap
def index_is_a_link_to_itself(place: Place) -> None:
    """No status can be had of it."""
    place.write(bases.ours_single(2))
    os.symlink(raw.INDEX, place.checkpoint / raw.INDEX)


@trap
def config_is_a_fifo(place: Place) -> None:
    """Read before every save."""
    os.mkfifo(place.checkpoint / raw.CONFIG)


@trap
def single_is_a_fifo(place: Place) -> None:
    """Its keys are read, for the reader of the Hub's library."""
    place.write({raw.CONFIG: raw.config()})
    os.mkfifo(place.checkpoint / raw.SINGLE)


@trap
def shards_are_fifos(place: Place) -> None:
    """They have the names of a killed save's."""
    for name in raw.LAYOUT:
        os.mkfifo(place.checkpoint / name)


@trap
def single_is_a_directory(place: Place) -> None:
    """No file can take its place."""
    (place.checkpoint / raw.SINGLE).mkdir()


@trap
def index_is_a_bomb(place: Place) -> None:
    """A sparse file of eight gigabytes."""
    place.write(raw.stock_sharded())
    os.truncate(place.checkpoint / raw.INDEX, 8 * 1024**3)


@trap
def index_is_damaged(place: Place) -> None:
    """What it named is not known."""
    files = bases.ours_sharded(2)
    place.write(files | {raw.INDEX: files[raw.INDEX][:-9]})


@trap
def config_is_damaged(place: Place) -> None:
    """It is replaced."""
    place.write(bases.ours_sharded(2) | {raw.CONFIG: b"{"})
