"""One rank of a save that is measured, a process of its own: `-m bench.many_ranks.one_rank PEER CONTEXT RANK PORT`."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.question import Context

RANKS = 4
LOGGER_OF_SENT = "hfshard.distributed.exchange"

Measured = dict[str, Any]
"""Seconds, and bytes: "peak" (resident, beyond those before), "written", "sent" (tensors, to other ranks)."""


def main(peer: str, raw_context: str, rank: int, port: str) -> None:
    """Join, load this rank's part, say so, wait for the word, save, answer in a line of JSON."""
    import torch
    import torch.distributed as dist

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    context = Context.from_json(json.loads(raw_context))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    save = SAVES[peer](context, load_part(context), rank)
    gc.collect()
    print("ready", file=answers, flush=True)
    sys.stdin.readline()
    print(json.dumps(measure(save, flushes=peer.startswith("hfshard"))), file=answers, flush=True)
    sys.stdin.readline()  # the one that keeps the store waits for the others, too
    os._exit(0)


def load_part(context: Context) -> Any:
    """The model under transformers' FSDP2, all of its pages in memory."""
    from transformers import LlamaForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(context.source, distributed_config=DistributedConfig(fsdp_size=RANKS))
    parameter: Any
    for parameter in model.parameters():
        parameter.to_local().sum().item()
    return model


def with_transformers(context: Context, model: Any, rank: int) -> Callable[[], object]:
    """Gather on rank 0, which writes."""
    import_module("torch.distributed.checkpoint.state_dict")  # by which it gathers: before the clock starts
    size = context.size.shard_size
    return lambda: model.save_pretrained(context.target, is_main_process=rank == 0, max_shard_size=size)


def with_dcp(context: Context, model: Any, rank: int) -> Callable[[], object]:
    """Each rank writes its part by DCP, and each makes some of the whole files of all parts."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    consolidation: Any = import_module("torch.distributed.checkpoint._consolidate_hf_safetensors")
    state_dict = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    index = json.loads((context.source / "model.safetensors.index.json").read_text())  # cut as hfshard cuts it
    files = sorted(set(index["weight_map"].values()))
    numbers = {name: files.index(file) + 1 for name, file in index["weight_map"].items()}
    parts = context.target / "parts"
    whole = context.target / "whole"
    whole.mkdir(exist_ok=True)
    writer = dcp.HuggingFaceStorageWriter(str(parts), fqn_to_index_mapping=numbers, save_distributed=True)

    def save() -> None:
        dcp.save(state_dict, storage_writer=writer)
        consolidation.consolidate_safetensors_files_on_every_rank(str(parts), str(whole), numbers)

    return save


def with_hfshard(checksum: Any) -> Callable[[Context, Any, int], Callable[[], object]]:
    """`hfshard.save_model` on every rank."""

    def prepare(context: Context, model: Any, rank: int) -> Callable[[], object]:
        import hfshard

        hfshard.save_model  # noqa: B018  imported before the clock starts, and so is what it calls:
        import_module("hfshard.models.saver")
        size = context.size.shard_size
        return lambda: hfshard.save_model(model, context.target, rank == 0, max_shard_size=size, checksum=checksum)

    return prepare


SAVES = {
    "transformers": with_transformers,
    "torch DCP": with_dcp,
    "hfshard sha256": with_hfshard("sha256"),
    "hfshard none": with_hfshard(None),
}


def measure(save: Callable[[], object], *, flushes: bool) -> Measured:
    """Save together with the other ranks.

    Args:
        save: On every rank.
        flushes: Whether it does; else the disk is flushed in the end, which counts.
    """
    import torch.distributed as dist

    sent = _Sent()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    resident = number_in("status", "VmRSS")
    written = number_in("io", "write_bytes")
    begin = time.perf_counter()
    save()
    if not flushes:
        dist.barrier()
        if dist.get_rank() == 0:
            os.sync()
        dist.barrier()
    return {
        "seconds": time.perf_counter() - begin,
        "peak": (number_in("status", "VmHWM") - resident) * 1024,
        "written": number_in("io", "write_bytes") - written,
        "sent": sent.stop(),
    }


def number_in(file: str, key: str) -> int:
    """A number that the kernel tells of this process."""
    found = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


class _Sent(logging.Handler):
    """Bytes that the exchange has sent to other ranks, as it says itself in the end."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._bytes = 0
        self._logger = logging.getLogger(LOGGER_OF_SENT)
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        """Note what one says of all orders so far."""
        assert isinstance(record.args, tuple) and isinstance(record.args[0], int)
        self._bytes = record.args[0]

    def stop(self) -> int:
        """Listen no more; gives the bytes."""
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        return self._bytes


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
