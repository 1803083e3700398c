"""Processes that save, hold the lock, or read beside a writer: run by test_concurrency.py."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hfshard
from hfshard.commit.directory_commit import save_session
from hfshard.errors import DirectoryLockedError
from hfshard.format.file_names import WeightNames

LIMITS = (10**6, 4096 + 90, 4096 + 700)
"""One file, a file for each tensor, a few."""


def state_dict(generation: int) -> dict[str, torch.Tensor]:
    """As many tensors as the generation says, so that a mixture is seen by names too; all of its number."""
    return {f"layer.{i}.weight": torch.full((20,), float(generation)) for i in range(3 + generation % 3)}


def save_once(folder: str, generation: int) -> None:
    hfshard.save_state_dict(state_dict(generation), folder, max_shard_size=LIMITS[generation % 3])


def hold(folder: str) -> None:
    with save_session(folder, WeightNames()) as session:
        Path(session.staging, "00000.weights").write_bytes(b"begun")
        print("held", flush=True)
        time.sleep(600)


def fail_to_wait(folder: str) -> None:
    try:
        with save_session(folder, WeightNames(), wait_seconds=0.2):
            print("entered")
    except DirectoryLockedError as error:
        print(error)


def bert(generation: int) -> torch.nn.Module:
    """A tiny model whose config and weights say its generation."""
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 8 * (1 + generation % 2), "intermediate_size": 16, "num_attention_heads": 1}
    config = BertConfig(vocab_size=10, num_hidden_layers=1, max_position_embeddings=8, **sizes)
    config.layer_norm_eps = float(generation)
    with torch.device("meta"):
        model: torch.nn.Module = BertModel(config)
    model = model.float().to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(generation % 120)
    return model


def write_models(folder: str, count: int, enough: Path) -> None:
    """Save at least so many, until a reader has seen enough of them."""
    logging.disable()
    for generation in itertools.count(1):
        if generation > count and enough.exists():
            break
        limit = 4096 + 600 if generation % 4 in (1, 2) else 10**6
        model = bert(generation if generation % 5 else generation - 1)  # now and then only the layout changes
        hfshard.save_model(model, folder, max_shard_size=limit, checksum=None)


class Reads:
    """Counts reads, and the generations that they saw; tells of the first, and when they are enough."""

    def __init__(self, enough: Path) -> None:
        self._enough, self.count, self._seen = enough, 0, set[float]()

    def note(self, generation: float) -> None:
        self.count += 1
        self._seen.add(generation)
        if self.count == 1:
            print("reading", flush=True)
        if self.count > 10 and len(self._seen) > 5:
            self._enough.touch()

    def __str__(self) -> str:
        return f"{self.count} {len(self._seen)}"


def read_state_dicts(folder: str, stop: Path, reads: Reads) -> None:
    """Load until told to stop; complain of any tensor that is not of the generation of the others."""
    while not stop.exists():
        loaded = hfshard.load_state_dict(folder, disable_mmap=bool(reads.count % 2))
        values = {tensor.unique().item() for tensor in loaded.values()}
        widths = {tensor.shape[-1] for name, tensor in loaded.items() if "LayerNorm" in name}
        assert len(values) == len(widths) == 1 and len(loaded) == 23, (values, widths, len(loaded))
        reads.note(*values)


def read_models(folder: str, stop: Path, reads: Reads) -> None:
    from transformers import BertModel

    class Bert(hfshard.ShardedModelMixin, BertModel):
        pass

    logging.disable()
    while not stop.exists():
        model, info = Bert.from_pretrained(folder, output_loading_info=True)
        generation = int(model.config.layer_norm_eps)
        values = {tensor.unique().item() for name, tensor in model.named_parameters()}
        assert values == {float(generation % 120)}, (generation, values)
        assert model.config.hidden_size == 8 * (1 + generation % 2) and not info["missing_keys"]
        reads.note(*values)


def main() -> None:
    torch.set_num_threads(1)
    role, folder, *rest = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        if role == "hold":
            hold(folder)
        elif role == "wait":
            fail_to_wait(folder)
        elif role == "save":
            for generation in range(int(rest[0]), int(rest[1])):
                save_once(folder, generation)
        elif role == "write":
            write_models(folder, int(rest[0]), Path(rest[1]))
        elif role == "read":
            reads = Reads(Path(rest[2]))
            {"state_dict": read_state_dicts, "model": read_models}[rest[0]](folder, Path(rest[1]), reads)
            print(reads)


if __name__ == "__main__":
    main()
