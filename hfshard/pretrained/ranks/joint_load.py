"""Which loads of a model every rank makes together, so that all build it or none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.distributed import utils as their_utils
from transformers.distributed.configuration_utils import DistributedConfig

from hfshard.checkpoint.load_options import LoadOptions
from hfshard.distributed.load_on_ranks import load_together


@contextmanager
def load_on_ranks(options: LoadOptions, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let all ranks build a model that is spread over them, or none; a model that is not, each rank builds alone.

    Args:
        options: hfshard's own arguments of `from_pretrained`.
        kwargs: All others.

    Raises:
        RankFailedError: Another rank refused, failed, died, or did not come.
    """
    is_spread = options.parallelize is not None
    if _is_spread_by_transformers(kwargs.get("distributed_config")):
        is_spread = True
        _join_process_group()
    with load_together("from_pretrained", is_collective=is_spread) as agreement, agreement.naming_who_broke_it():
        yield


def _is_spread_by_transformers(given: Any) -> bool:
    """Whether a `distributed_config` says that there are several ranks; what is none, transformers refuses."""
    config = DistributedConfig.from_dict(given) if isinstance(given, dict) else given
    sizes = (getattr(config, name, None) for name in ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size"))
    return any((size or 1) > 1 for size in sizes)


def _join_process_group() -> None:
    """Join the group of a launcher as transformers would a moment later, so that ranks can agree before."""
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        their_utils._ensure_torch_distributed()
