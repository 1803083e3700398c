"""Several processes at one directory: writers wait for each other, a reader sees only whole checkpoints."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.commit.directory_commit import save_session
from hfshard.errors import DirectoryLockedError
from hfshard.format.file_names import WeightNames
from tests.helpers import processes
from tests.helpers.tiny_bert import Bert
from tests.sweeps.engine import memory

LIMITS = (10**6, 4096 + 90, 4096 + 700)
"""One file, a file for each tensor, a few."""


def state_dict(generation: int) -> dict[str, torch.Tensor]:
    """As many tensors as the generation says, so that a mixture is seen by names too; all of its number."""
    return {f"layer.{i}.weight": torch.full((20,), float(generation)) for i in range(3 + generation % 3)}


def hold(folder: Path) -> None:
    with save_session(os.fspath(folder), WeightNames()) as session:
        Path(session.staging, "00000.weights").write_bytes(b"begun")
        print("held", flush=True)
        time.sleep(600)


def fail_to_wait(folder: Path) -> None:
    try:
        with save_session(os.fspath(folder), WeightNames(), wait_seconds=0.2):
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


def write_models(folder: Path, count: int, enough: Path) -> None:
    """Save at least so many, until a reader has seen enough of them."""
    logging.disable()
    for generation in itertools.count(1):
        if generation > count and enough.exists():
            break
        limit = 4096 + 600 if generation % 4 in (1, 2) else 10**6
        model = bert(generation if generation % 5 else generation - 1)  # now and then only the layout changes
        hfshard.save_model(model, folder, max_shard_size=limit, checksum=None)


def read(kind: str, folder: Path, stop: Path, enough: Path) -> None:
    """Load until told to stop; tell of the first, when they are enough, and how many generations they saw."""
    logging.disable()
    seen: list[float] = []
    while not stop.exists():
        seen.append(read_state_dict(folder, len(seen)) if kind == "state_dict" else read_model(folder))
        if len(seen) == 1:
            print("reading", flush=True)
        if len(seen) > 10 and len({*seen}) > 5:
            enough.touch()
    print(len(seen), len({*seen}))


def read_state_dict(folder: Path, number: int) -> float:
    """Complain of any tensor that is not of the generation of the others."""
    loaded = hfshard.load_state_dict(folder, disable_mmap=bool(number % 2))
    values = {tensor.unique().item() for tensor in loaded.values()}
    widths = {tensor.shape[-1] for name, tensor in loaded.items() if "LayerNorm" in name}
    assert len(values) == len(widths) == 1 and len(loaded) == 23, (values, widths, len(loaded))
    return float(values.pop())


def read_model(folder: Path) -> float:
    model, info = Bert.from_pretrained(folder, output_loading_info=True)
    generation = int(model.config.layer_norm_eps)
    values = {tensor.unique().item() for name, tensor in model.named_parameters()}
    assert values == {float(generation % 120)}, (generation, values)
    assert model.config.hidden_size == 8 * (1 + generation % 2) and not info["missing_keys"]
    return float(values.pop())


@contextmanager
def child(environment: dict[str, str], work: Callable[..., None], *arguments: object) -> Iterator[processes.Child]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.call(work, *arguments, env=environment, **pipes) as process:
        try:
            if work in (hold, read):
                assert (
                    process.stdout is not None
                    and process.stdout.readline() == {hold: "held\n", read: "reading\n"}[work]
                )
            yield process
        finally:
            process.kill()


def ended(process: processes.Child) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is some: reads do not wait for the disk, and saves would, hundreds of times."""
    with tempfile.TemporaryDirectory(dir=memory() or tmp_path) as folder:
        yield Path(folder)


def generation_in(folder: Path) -> int:
    loaded = hfshard.load_state_dict(folder, verify="full")
    (value,) = {tensor.unique().item() for tensor in loaded.values()}
    assert loaded.keys() == state_dict(int(value)).keys()
    return int(value)


def test_two_writers_leave_one_whole_checkpoint_of_one_of_them(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    with (
        child(child_environment, save_generations, tmp_path, 0, 40) as first,
        child(child_environment, save_generations, tmp_path, 60, 100) as second,
    ):
        ended(first)
        ended(second)
    assert generation_in(tmp_path) in (39, 99)
    stray = [one for one in hfshard.verify_checkpoint(tmp_path).warnings if "is not part of a checkpoint" in one]
    assert stray == []
    assert not (tmp_path / ".cache").exists()


def test_a_second_writer_that_waits_too_long_is_told_so(tmp_path: Path, child_environment: dict[str, str]) -> None:
    with child(child_environment, hold, tmp_path), child(child_environment, fail_to_wait, tmp_path) as waiting:
        assert re.fullmatch(
            rf"'{tmp_path}' is locked: process \d+ \(.*\) was still saving there after 0.2 s. "
            r"Wait for it, or save into another directory.\n",
            ended(waiting),
        )


def test_a_killed_writer_frees_the_lock_and_its_litter_is_swept(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    with child(child_environment, hold, tmp_path) as holder:
        assert (tmp_path / ".cache/huggingface/hfshard/00000.weights").exists()
        holder.kill()
        holder.wait()
        hfshard.save_state_dict(state_dict(1), tmp_path)
    assert generation_in(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}


@pytest.mark.parametrize("saves", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["state_dict", "model"])
def test_a_reader_beside_many_saves_reads_only_whole_checkpoints(
    kind: str, saves: int, place: Path, child_environment: dict[str, str]
) -> None:
    folder, stop, enough = place / "model", place / "stop", place / "enough"
    hfshard.save_model(bert(0), folder)
    with child(child_environment, read, kind, folder, stop, enough) as reader:
        with child(child_environment, write_models, folder, saves, enough) as writer:
            end = time.monotonic() + 100 + saves
            while writer.poll() is None and reader.poll() is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    writer.wait(0.1)
            if reader.poll() is None:
                ended(writer)
        stop.touch()
        reads, generations = map(int, ended(reader).split())
    print(f"\n{kind}: {reads} reads beside {saves} saves saw {generations} generations")
    assert reads > 10 and generations > 5


def save_generations(folder: Path, first: int, end: int) -> None:
    for generation in range(first, end):
        hfshard.save_state_dict(state_dict(generation), folder, max_shard_size=LIMITS[generation % 3])
