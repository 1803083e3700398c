"""Sharded, verified, crash-safe checkpoints for PyTorch and transformers.

Save and load any module or state dict; a save is all or nothing, and a load checks what it reads:

    import hfshard
    from torch import nn

    model = nn.Linear(4, 4)
    hfshard.save_model(model, "out", max_shard_size="5GB")
    hfshard.load_model(model, "out", verify="full")

Add the mixin before a transformers model's class, and its own methods do the same:

    from transformers import BertConfig, BertModel

    class Bert(hfshard.ShardedModelMixin, BertModel): ...

    bert = Bert(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    bert.save_pretrained("bert", max_shard_size="5GB")
    bert = Bert.from_pretrained("bert")
    bert.push_to_hub("./hub/bert")  # or "org/name", on the Hugging Face Hub

Save a training run, and resume it bit for bit:

    import torch

    optimizer = torch.optim.AdamW(model.parameters())
    state = hfshard.training.TrainingState(model=model, optimizer=optimizer)
    with hfshard.CheckpointManager("run", max_to_keep=3) as manager:
        first_step = manager.restore_latest(state) or 0
        manager.save(first_step + 1, state)

See `hfshard.errors` for errors, `hfshard.hub` for hubs, and `hfshard.training` for training runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import fcntl as _fcntl  # noqa: F401  # what every lock of a directory is made of
except ModuleNotFoundError as error:
    raise ImportError(
        "hfshard needs a POSIX system, such as Linux or macOS, but this one has no 'fcntl'. On Windows, run it in WSL: "
        "https://learn.microsoft.com/windows/wsl"
    ) from error

from hfshard._util.lazy_imports import hand_down, lazy_exports
from hfshard.constants import VERSION

__version__ = VERSION

# Public name -> the module that defines it. Each is imported on first use, so that `import hfshard` takes no time.
# transformers is imported only in a call with one of its models or classes.
_HOMES = {
    "CheckpointDiff": "viewing.results",
    "CheckpointIndex": "format.index",
    "CheckpointManager": "training.manager",
    "FileDigest": "format.index",
    "HfshardError": "errors",
    "PlannedShard": "shards.shard_plan",
    "Problem": "checkpoint.reports",
    "PushResult": "hub.repo",
    "RemovalReport": "checkpoint.reports",
    "ShardPlan": "shards.shard_plan",
    "ShardedModelMixin": "models.mixin",
    "TensorDiff": "viewing.results",
    "TensorSpec": "tensors.stored_tensor",
    "VerifyReport": "checkpoint.reports",
    "diff_checkpoints": "viewing.diff_checkpoints",
    "distributed": "distributed",
    "errors": "errors",
    "hub": "hub",
    "install": "models.install",
    "load_model": "load",
    "load_state_dict": "load",
    "parse_size": "_util.arguments",
    "plan_shards": "shards.shard_plan",
    "pull_checkpoint": "pull",
    "push_checkpoint": "push",
    "remove_checkpoint": "remove",
    "reshard_checkpoint": "reshard",
    "save_model": "save",
    "save_state_dict": "save",
    "show_checkpoint": "viewing.show",
    "sign_checkpoint": "signing.sign",
    "signing": "signing",
    "training": "training",
    "uninstall": "models.install",
    "verify_checkpoint": "verify",
}

__all__ = sorted([*_HOMES, "__version__"])

if TYPE_CHECKING:
    from hfshard import distributed as distributed
    from hfshard import errors as errors
    from hfshard import hub as hub
    from hfshard import signing as signing
    from hfshard import training as training
    from hfshard._util.arguments import parse_size as parse_size
    from hfshard.checkpoint.reports import Problem as Problem
    from hfshard.checkpoint.reports import RemovalReport as RemovalReport
    from hfshard.checkpoint.reports import VerifyReport as VerifyReport
    from hfshard.errors import HfshardError as HfshardError
    from hfshard.format.index import CheckpointIndex as CheckpointIndex
    from hfshard.format.index import FileDigest as FileDigest
    from hfshard.hub.repo import PushResult as PushResult
    from hfshard.load import load_model as load_model
    from hfshard.load import load_state_dict as load_state_dict
    from hfshard.models.install import install as install
    from hfshard.models.install import uninstall as uninstall
    from hfshard.models.mixin import ShardedModelMixin as ShardedModelMixin
    from hfshard.pull import pull_checkpoint as pull_checkpoint
    from hfshard.push import push_checkpoint as push_checkpoint
    from hfshard.remove import remove_checkpoint as remove_checkpoint
    from hfshard.reshard import reshard_checkpoint as reshard_checkpoint
    from hfshard.save import save_model as save_model
    from hfshard.save import save_state_dict as save_state_dict
    from hfshard.shards.shard_plan import PlannedShard as PlannedShard
    from hfshard.shards.shard_plan import ShardPlan as ShardPlan
    from hfshard.shards.shard_plan import plan_shards as plan_shards
    from hfshard.signing.sign import sign_checkpoint as sign_checkpoint
    from hfshard.tensors.stored_tensor import TensorSpec as TensorSpec
    from hfshard.training.manager import CheckpointManager as CheckpointManager
    from hfshard.verify import verify_checkpoint as verify_checkpoint
    from hfshard.viewing.diff_checkpoints import diff_checkpoints as diff_checkpoints
    from hfshard.viewing.results import CheckpointDiff as CheckpointDiff
    from hfshard.viewing.results import TensorDiff as TensorDiff
    from hfshard.viewing.show import show_checkpoint as show_checkpoint
else:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)


def _card_drawer() -> object:
    """Import what draws the card of a push. Pages are above pushes, and only this file is above every package."""
    from hfshard.viewing.card import draw_card

    return draw_card


hand_down("draw_card", _card_drawer)
