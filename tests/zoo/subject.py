"""The class under test for an upstream class: as a user would write it, under a name of the user's own."""

from __future__ import annotations

from functools import cache

from transformers import PreTrainedModel

import hfshard


@cache
def sharded(upstream: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`class Mine(hfshard.ShardedModelMixin, Upstream)`."""
    return type("Mine", (hfshard.ShardedModelMixin, upstream), {"__module__": __name__})
