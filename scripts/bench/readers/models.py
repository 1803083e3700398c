"""A whole model, by transformers and by hfshard."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.question import Context, Job
from bench.readers.job import loading


def with_transformers(context: Context, directory: Path | None = None, *, again: bool = False) -> Job:
    """`from_pretrained` of the class."""
    import torch
    from transformers import LlamaForCausalLM

    directory = directory or context.source
    return loading(
        lambda: LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16),
        lambda model: model.parameters(),
        again=again,
        of=_contents(context, directory),
    )


def with_hfshard(context: Context, directory: Path | None = None, *, again: bool = False, **options: Any) -> Job:
    """The same class, by `hfshard.load_model`."""
    import torch
    from transformers import LlamaForCausalLM

    import hfshard

    import_module("hfshard.models.build")  # which the first call would import
    directory = directory or context.source
    return loading(
        lambda: hfshard.load_model(LlamaForCausalLM, directory, dtype=torch.bfloat16, **options),
        lambda model: model.parameters(),
        again=again,
        of=_contents(context, directory),
    )


def _contents(context: Context, directory: Path) -> str:
    """What tells the checkpoint of another model apart; in one file or in five, the bytes are the same."""
    return "many" if directory == context.directory / "many" else ""
