"""Sharded, verified, crash-safe Hugging Face checkpoints: what is public, imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hfshard.errors import HfshardError
    from hfshard.plan import ShardPlan, plan_shards
    from hfshard.size import parse_size

__all__ = [
    "HfshardError",
    "ShardPlan",
    "__version__",
    "parse_size",
    "plan_shards",
]

# Lazy (PEP 562): `import hfshard` costs nothing, and only `hfshard.ShardedModelMixin` imports transformers.
_HOMES = {
    "HfshardError": "errors",
    "ShardPlan": "plan",
    "parse_size": "size",
    "plan_shards": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hfshard' has no attribute '{name}'")
    value = getattr(import_module(f"hfshard.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
