"""The process that pushes: it imports everything once, and forks a child for each task, which a test may kill."""

from __future__ import annotations

import resource
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file
from transformers import AutoModel, BertModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

import hfshard
import hfshard.hub.hub_repo  # before the forks: what each would read and compile again is no part of its push
import hfshard.models.saver
from hfshard.push import push_checkpoint
from tests.hub.client_process import do_task, note_waits, prepare, set_limit
from tests.hub.models import digest_of, make_model


def push(directory: str, repo_id: str, commit_files: int | None = None, **options: Any) -> dict[str, Any]:
    """`push_checkpoint`; with `commit_files`, one commit takes so many files, and not 256."""
    if commit_files is not None:
        vars(hfshard.hub.hub_repo)["MAX_COMMIT_FILES"] = commit_files
    done = push_checkpoint(directory, repo_id, **options)
    return {
        "commit": done.commit, "url": done.url, "pr_url": done.pr_url, "is_new": done.is_new, "sent": done.sent_bytes
    }  # fmt: skip


def push_model(seed: int, repo_id: str, model: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """`model.push_to_hub`."""
    pushed: Any = make_model(seed, **model or {})
    done = pushed.push_to_hub(repo_id, **options)
    return {"commit": done.oid, "url": done.commit_url, "pr_url": done.pr_url, "pr_num": done.pr_num}


def save_and_push(seed: int, directory: str, **options: Any) -> None:
    """`model.save_pretrained(..., push_to_hub=True)`."""
    make_model(seed).save_pretrained(directory, push_to_hub=True, **options)


def push_stock(seed: int, repo_id: str, **options: Any) -> str:
    """What transformers' own `push_to_hub` does; it can't where it tries Xet and the server has none."""
    constants.HF_HUB_DISABLE_XET = True
    model: Any = make_model(seed, stock=True)
    return str(model.push_to_hub(repo_id, **options).oid)


def push_installed(seed: int, repo_id: str, directory: str | None = None, **options: Any) -> str:
    """`push_to_hub` of a stock model where hfshard is installed; or its `save_pretrained(push_to_hub=True)`."""
    constants.HF_HUB_DISABLE_XET = True  # of what is left to transformers
    model: Any = make_model(seed, stock=True)
    with hfshard.install(quiet=True):
        if directory is not None:
            return str(model.save_pretrained(directory, push_to_hub=True, repo_id=repo_id, **options))
        return str(model.push_to_hub(repo_id, **options).oid)


def load_installed(repo_id: str, cache: str, **options: Any) -> str:
    """The digest of what an Auto class loads where hfshard is installed, with a cache of its own."""
    with hfshard.install(quiet=True):
        return digest_of(AutoModel.from_pretrained(repo_id, cache_dir=cache, **options).state_dict())


def load_after_push(seed: int, repo_id: str, cache: str) -> str:
    """The digest of what is loaded of a revision that was resolved before another model was pushed."""
    revision: Any = HfApi().resolve_revision(repo_id)
    push_installed(seed, repo_id)
    return load_installed(repo_id, cache, revision=revision)


def load_stock(repo_id: str, cache: str, **options: Any) -> str:
    """The digest of what transformers loads, with a cache of its own."""
    found: Any = BertModel.from_pretrained(repo_id, cache_dir=cache, output_loading_info=True, **options)
    loaded, info = found
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return digest_of(loaded.state_dict())


def the_number(state_dict: Mapping[str, torch.Tensor]) -> float:
    """The one number that all tensors are full of."""
    (number,) = {float(value) for tensor in state_dict.values() for value in tensor.unique()}
    return number


def read_ours(repo_id: str, cache: str, **options: Any) -> float:
    """The number that a repo's tensors are full of, by hfshard."""
    return the_number(hfshard.load_state_dict(repo_id, cache_dir=cache, **options))


def read_stock(repo_id: str, cache: str, **options: Any) -> float:
    """The number that a repo's tensors are full of, by what transformers finds and safetensors reads."""
    wanted: dict[str, Any] = {"cache_dir": cache, "_raise_exceptions_for_missing_entries": False, **options}
    single = cached_file(repo_id, "model.safetensors", **wanted)
    if single is not None:
        return the_number(load_file(single))
    index = cached_file(repo_id, "model.safetensors.index.json", **wanted)
    if index is None:
        raise FileNotFoundError("no weights")
    files, _ = get_checkpoint_shard_files(repo_id, index, cache_dir=cache, **options)
    return the_number({name: tensor for file in files for name, tensor in load_file(file).items()})


TASKS: dict[str, Callable[..., Any]] = {
    task.__name__: task
    for task in (
        push,
        push_model,
        save_and_push,
        push_stock,
        push_installed,
        load_stock,
        load_installed,
        load_after_push,
        read_ours,
        read_stock,
    )
}


def moved() -> tuple[int, int]:
    """Bytes that this process has read and written by system calls on files and pipes (not on sockets)."""
    numbers = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(numbers["rchar"]), int(numbers["wchar"])


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Do one task; gives what came of it."""
    kept = prepare(order, ("hfshard", "huggingface_hub", "transformers"))
    if order["largest_file"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a larger file is an OSError then
        set_limit(resource.RLIMIT_FSIZE, order["largest_file"])
    if order["open_files"] is not None:
        set_limit(resource.RLIMIT_NOFILE, order["open_files"])
    waits = note_waits()
    if order["task"] in ("push", "push_model", "save_and_push", "push_installed"):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)  # huggingface_hub's own, of httpx
    read, written = moved()
    outcome = do_task(order, TASKS)
    read_after, written_after = moved()
    moved_bytes = {"read": read_after - read, "written": written_after - written}
    return outcome | moved_bytes | {"log": kept.lines, "waits": waits}
