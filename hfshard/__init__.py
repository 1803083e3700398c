"""Sharded, verified, crash-safe Hugging Face checkpoints: what is public, imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hfshard import training
    from hfshard.errors import HfshardError
    from hfshard.hub.pull import pull_checkpoint
    from hfshard.hub.push import push_checkpoint
    from hfshard.hub.repo_tree import PushResult
    from hfshard.load import load_model, load_state_dict
    from hfshard.planning.plan import ShardPlan, plan_shards
    from hfshard.planning.size import parse_size
    from hfshard.pretrained.mixin import ShardedModelMixin
    from hfshard.reshard import reshard_checkpoint
    from hfshard.save import save_model, save_state_dict
    from hfshard.storage.checkpoint.report import VerifyReport
    from hfshard.storage.format.index import CheckpointIndex
    from hfshard.training.manager import CheckpointManager
    from hfshard.verify import verify_checkpoint

__all__ = [
    "CheckpointIndex",
    "CheckpointManager",
    "HfshardError",
    "PushResult",
    "ShardPlan",
    "ShardedModelMixin",
    "VerifyReport",
    "__version__",
    "load_model",
    "load_state_dict",
    "parse_size",
    "plan_shards",
    "pull_checkpoint",
    "push_checkpoint",
    "reshard_checkpoint",
    "save_model",
    "save_state_dict",
    "training",
    "verify_checkpoint",
]

# Lazy (PEP 562): `import hfshard` costs nothing, and only `hfshard.ShardedModelMixin` imports transformers.
_HOMES = {
    "CheckpointIndex": "storage.format.index",
    "CheckpointManager": "training.manager",
    "HfshardError": "errors",
    "PushResult": "hub.repo_tree",
    "ShardPlan": "planning.plan",
    "ShardedModelMixin": "pretrained.mixin",
    "VerifyReport": "storage.checkpoint.report",
    "load_model": "load",
    "load_state_dict": "load",
    "parse_size": "planning.size",
    "plan_shards": "planning.plan",
    "pull_checkpoint": "hub.pull",
    "push_checkpoint": "hub.push",
    "reshard_checkpoint": "reshard",
    "save_model": "save",
    "save_state_dict": "save",
    "verify_checkpoint": "verify",
}


def __getattr__(name: str) -> Any:
    if name == "training":
        return import_module("hfshard.training")
    if name not in _HOMES:
        raise AttributeError(f"module 'hfshard' has no attribute '{name}'")
    value = getattr(import_module(f"hfshard.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
