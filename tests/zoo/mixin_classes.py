"""Classes with the mixin, as users write them, under a name of their own."""

from __future__ import annotations

from transformers import PreTrainedModel

import hfshard

_MADE: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def with_mixin(stock_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Make `class Mine(hfshard.ShardedModelMixin, StockClass)`, once for each class."""
    if stock_class not in _MADE:
        _MADE[stock_class] = type("Mine", (hfshard.ShardedModelMixin, stock_class), {"__module__": __name__})
    return _MADE[stock_class]
