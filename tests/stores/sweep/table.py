"""The transitions of the sweep: those of directories that mean something in a store, and a large one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from tests.crash.saves.generations import Content
from tests.crash.saves.transitions import Save, Transition, all_transitions

_OF_DIRECTORIES = (
    "fresh->sharded", "bystanders->single", "bystanders->sharded", "single->single+config", "single->sharded",
    "single->sharded+config", "sharded->single", "sharded->single+config", "sharded->sharded",
    "sharded->sharded+config", "sharded->fewer", "sharded->more+config", "bin->sharded", "bin->single+config",
    "sharded-bin->sharded+config", "upstream-sharded->sharded", "upstream-sharded->sharded+config",
    "upstream-sharded->single", "upstream-single->sharded", "upstream-single->sharded+config", "mess->sharded",
    "mess->single+config", "identical-sharded", "single->sharded+keys", "sharded->sharded+shapes",
    "single->sharded+fewer-keys", "variant-sharded-beside-sharded", "variant-half-beside-sharded",
    "variant-over-variant", "default-beside-variant", "strays-beside-sharded->sharded+config", "bare-fresh->sharded",
    "bare-single->sharded", "bare-sharded->sharded", "gpt2-sharded->sharded", "strangers", "net-fresh->sharded",
    "net-sharded->sharded+config", "net-sharded->sharded-config", "reshard-single->sharded",
    "reshard-sharded->single",
)  # fmt: skip

LARGE = "large->large"
"""One shard of 9.4 MB, which is sent in two parts."""

KEPT: Final = "sharded->sharded+kept"
"""Of its shards, all but the last have the tensors that they had: they are copied on the server."""
_KEPT_TENSORS: Final = 20


@cache
def transitions() -> Mapping[str, Transition]:
    """Name -> transition."""
    known = {transition.name: transition for transition in all_transitions()}
    large = [Content(generation, own_config=True, layers=0, hidden=1536) for generation in (1, 2)]
    old, new = (Save(content, "whole") for content in large)
    kept_old, kept_new = (Save(Content(generation, kept=_KEPT_TENSORS), "three") for generation in (1, 2))
    return {name: known[name] for name in _OF_DIRECTORIES} | {
        LARGE: Transition(LARGE, (old,), new),
        KEPT: Transition(KEPT, (kept_old,), kept_new),
    }
