"""The class under test for an upstream class: as a user would write it, under a name of the user's own."""

from __future__ import annotations

from transformers import PreTrainedModel

import hfshard

_MADE: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def sharded(upstream: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`class Mine(hfshard.ShardedModelMixin, Upstream)`, made once for each upstream class."""
    if upstream not in _MADE:
        _MADE[upstream] = type("Mine", (hfshard.ShardedModelMixin, upstream), {"__module__": __name__})
    return _MADE[upstream]
