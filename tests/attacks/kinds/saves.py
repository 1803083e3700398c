"""Save directories that are traps: a save into one succeeds or is refused, and touches nothing outside."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.attacks.files import bases, raw
from tests.attacks.registry import Attack, Expected, Place

CACHE = ".cache/huggingface"
STAGING = f"{CACHE}/hfshard"
Trap = Callable[[Place], object]


def _linked(name: str, target: str, precious: str) -> Trap:
    """A folder of the save's own that leads outside, to where there is something to lose."""

    def build(place: Place) -> None:
        folder = place.outside / precious
        folder.mkdir(parents=True)
        (folder / "precious").write_text("do not delete")
        place.link(name, place.outside / target)

    return build


def _old_table(place: Place) -> None:
    files = bases.ours_sharded(2)
    index, metadata = bases.metadata_of_index(files)
    metadata["files"]["../outside/" + raw.SECOND] = {"size": 1}
    bases.put_index(files, index)
    place.write(files)


def _old_index(place: Place) -> None:
    names = {"block.bias": "../outside/" + raw.SECOND, "block.weight": str(place.outside / raw.THIRD)}
    place.write(raw.stock_sharded() | {raw.INDEX: raw.index(names=names)})


OLD_CONFIG = {"model_type": "hfshard_attack", "transformers_weights": "../outside/" + raw.SINGLE}
TRAPS: dict[str, Trap] = {
    # The staging directory is emptied before every save; `.cache` is often a link, to where there is space.
    "staging-is-a-link-to-outside": _linked(STAGING, "kept", precious="kept"),
    "cache-is-a-link-to-outside": _linked(".cache", "", precious="huggingface/hfshard"),
    "huggingface-cache-is-a-link-to-outside": _linked(CACHE, "", precious="hfshard"),
    # There can be no staging directory below.
    "cache-is-a-file": lambda place: place.write({".cache": b""}),
    # What a killed save left, and somebody edited.
    "staging-holds-links-to-outside": lambda place: place.link(f"{STAGING}/00000.weights", place.outside).link(
        f"{STAGING}/000.small", place.outside / raw.SINGLE
    ),
    # The files that the old index names, or the table of files, or the config, are removed after the commit.
    "old-index-names-files-outside": _old_index,
    "old-table-names-files-outside": _old_table,
    "old-config-names-weights-outside": lambda place: place.write(
        raw.stock_single(2) | {raw.CONFIG: json.dumps(OLD_CONFIG).encode()}
    ),
    # Whoever opens it to keep a copy waits for ever.
    "index-is-a-fifo": lambda place: place.write(raw.stock_single(2)).fifo(raw.INDEX),
    # Then its rename is the commit, and a copy of it would be kept to undo that.
    "index-is-a-fifo-and-the-config-stays": lambda place: place.write(bases.ours_single(2)).fifo(raw.INDEX),
    # No status can be had of it.
    "index-is-a-link-to-itself": lambda place: place.write(bases.ours_single(2)).link(raw.INDEX, raw.INDEX),
    # Read before every save.
    "config-is-a-fifo": lambda place: place.fifo(raw.CONFIG),
    # Its keys are read, for the reader of the Hub's library.
    "single-is-a-fifo": lambda place: place.write({raw.CONFIG: raw.config()}).fifo(raw.SINGLE),
    # They have the names of a killed save's.
    "shards-are-fifos": lambda place: place.fifo(*raw.LAYOUT),
    # No file can take its place.
    "single-is-a-directory": lambda place: place.folder(raw.SINGLE),
    "index-is-a-bomb": lambda place: place.write(raw.stock_sharded()).stretch(raw.INDEX, 8 * 1024**3),
    # What it named is not known.
    "index-is-damaged": lambda place: place.write(
        bases.ours_sharded(2) | {raw.INDEX: bases.ours_sharded(2)[raw.INDEX][:-9]}
    ),
    # It is replaced.
    "config-is-damaged": lambda place: place.write(bases.ours_sharded(2) | {raw.CONFIG: b"{"}),
}


def _built(trap: Trap) -> Callable[[Place], Expected]:
    def build(place: Place) -> Expected:
        trap(place)
        return Expected("")

    return build


SAVES = {f"save-{name}": Attack(f"save-{name}", _built(trap), ("save",)) for name, trap in TRAPS.items()}
