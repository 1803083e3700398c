"""The process that pulls: it imports everything once, and forks a child for each task, which a test may kill."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from transformers import AutoModel, AutoModelForCausalLM, BertModel

import hfshard
import hfshard.load  # before the forks: each would import it
from hfshard.pull import pull_checkpoint
from hfshard.stores import hub_calls
from hfshard.viewing.inspection import inspect_checkpoint
from tests.hub.client_process import do_task, prepare
from tests.hub.models import Bert, digest_of


def pull(repo_id: str, local_dir: str | None = None, **options: Any) -> str:
    """`pull_checkpoint`."""
    return pull_checkpoint(repo_id, local_dir, **options)


def reshard(repo_id: str, target: str, max_shard_size: int | str, **options: Any) -> None:
    """`reshard_checkpoint`."""
    hfshard.reshard_checkpoint(repo_id, target, max_shard_size, **options)


def load(repo_id: str, cache: str, **options: Any) -> dict[str, Any]:
    """hfshard's `from_pretrained`."""
    model: Any = Bert.from_pretrained(repo_id, cache_dir=cache, strict=True, **options)
    return facts_of(model)


def load_hastily(repo_id: str, cache: str) -> dict[str, Any]:
    """`load` that waits a twentieth of the time between its tries."""
    hasty: Any = hub_calls
    hasty._FIRST_WAIT_SECONDS /= 20
    return load(repo_id, cache)


def load_auto(repo_id: str, cache: str, **options: Any) -> dict[str, Any]:
    """`load_model` of an Auto class."""
    return facts_of(hfshard.load_model(AutoModel, repo_id, cache_dir=cache, **options))


def load_causal(repo_id: str, cache: str, **options: Any) -> dict[str, Any]:
    """`load_model` of a class that generates, by its Auto class."""
    model: Any = hfshard.load_model(AutoModelForCausalLM, repo_id, cache_dir=cache, **options)
    return facts_of(model) | {"top_k": model.generation_config.top_k}


def load_stock(repo_id: str, cache: str, **options: Any) -> dict[str, Any]:
    """What transformers loads."""
    return facts_of(BertModel.from_pretrained(repo_id, cache_dir=cache, **options))


def facts_of(model: Any) -> dict[str, Any]:
    """What tells one loaded model from another."""
    return {
        "digest": digest_of(model.state_dict()),
        "name": model.name_or_path,
        "config name": model.config.name_or_path,
        "commit": getattr(model.config, "_commit_hash", None),  # newer ones of transformers do not say
    }


def read(repo_id: str, cache: str, **options: Any) -> dict[str, str]:
    """`load_state_dict`: name -> digest."""
    tensors = hfshard.load_state_dict(repo_id, cache_dir=cache, **options)
    return {name: digest_of({name: tensor}) for name, tensor in tensors.items()}


def signature(repo_id: str, **options: Any) -> str | None:
    """The signature that `inspect_checkpoint` sees."""
    return inspect_checkpoint(repo_id, **options).signature


def diff(a: str, b: str, **options: Any) -> dict[str, Any]:
    """`diff_checkpoints`: its places, what has changed, how many tensors are of which kind, bytes read."""
    report = hfshard.diff_checkpoints(a, b, **options)
    changed = [tensor.name for tensor in report.tensors if tensor.kind == "changed"]
    places = [report.a, report.b]
    return {"places": places, "changed": changed, "counts": report.counts, "read": report.read_bytes}


def stock_snapshot(repo_id: str, cache: str, **options: Any) -> list[str]:
    """The files that huggingface_hub's `snapshot_download` gives."""
    folder = Path(snapshot_download(repo_id, cache_dir=cache, **options))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def stock_files(repo_id: str, cache: str, names: list[str], **options: Any) -> list[int]:
    """The sizes of the files that huggingface_hub's `hf_hub_download` gives."""
    return [os.path.getsize(hf_hub_download(repo_id, name, cache_dir=cache, **options)) for name in names]


def stock_refs(repo_id: str, commit: str) -> str:
    """Make a branch and a tag at a commit, and a pull request on main that adds a file; gives its revision."""
    api = HfApi()
    api.create_branch(repo_id, branch="feature/x", revision=commit)
    api.create_tag(repo_id, tag="v1", revision=commit)
    added = [CommitOperationAdd("extra.txt", b"more\n")]
    return str(api.create_commit(repo_id, added, commit_message="More", create_pr=True).pr_revision)


TASKS: dict[str, Callable[..., Any]] = {
    task.__name__: task
    for task in (
        pull,
        reshard,
        load,
        load_hastily,
        load_auto,
        load_causal,
        load_stock,
        read,
        diff,
        signature,
        stock_snapshot,
        stock_files,
        stock_refs,
    )
}


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Do one task; gives what came of it."""
    kept = prepare(order, ("hfshard",))
    if not order["task"].startswith(("stock", "load_stock")):
        warnings.simplefilter("error")
    return do_task(order, TASKS) | {"log": kept.lines}
