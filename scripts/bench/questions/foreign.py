"""Costs of making weights of other frameworks' checkpoints, with AdamW: hfshard against the frameworks' own tools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.figures import (
    MEGABYTE,
    STATES,
    Data,
    Target,
    at_most,
    markdown_table,
    paragraphs,
    ratio,
    runs_of,
    seconds,
    show,
    show_ratio,
    spread,
)
from bench.harness.inputs import sized, write_limit
from bench.harness.models import SEED, config_of, total_bytes
from bench.harness.processes import free_port
from bench.harness.question import SIDE, Context, Job, Peer, Question, SkipPeer
from bench.machine.limits import read_files, sync_files

BIN, SAFE, DCP, MERGE = "bin", "safetensors", "dcp_to_torch_save", "merge-weights"
SHA256, NONE = OURS = ("hfshard", "hfshard-none")
WRITE, BOTH = LIMITS = ("limit", "limit-both")
TITLES = {
    BIN: "`zero_to_fp32.py`",
    SAFE: "`zero_to_fp32.py --safe_serialization`",
    DCP: "`dcp_to_torch_save`: of all, as it can't choose",
    MERGE: "`accelerate merge-weights`",
    SHA256: "hfshard convert, sha256",
    NONE: "hfshard convert, no checksum, like the other tools",
    WRITE: "the limit of the second half: O_DIRECT writes from memory, flushed",
    BOTH: "the limit: those writes, and O_DIRECT reads of as many bytes, at once",
}
TIME, ANONYMOUS, READ = 0.5, 0.1, 1.02
"""Aims: times of the other tools', and shares of the float32 weights."""
FLOAT32 = 2
"""Of the weights' bytes in bfloat16, which `Data` has."""
TOKENS = 8


class Source(NamedTuple):
    """A checkpoint to convert."""

    title: str
    save: Callable[[Context, int, Path], None]
    """What each rank does, by its number, to save into a directory."""
    ranks: int
    tools: tuple[str, ...]
    """Keys of `TITLES`, besides hfshard; the first one is what the others are compared with."""
    folder: str = ""
    """The checkpoint, in the directory."""


def build_model(context: Context, dtype: Any) -> Any:
    """Build the model of foreign checkpoints, the same on each rank, in a dtype."""
    import torch
    from transformers import LlamaForCausalLM

    config = config_of(context.size)
    config.tie_word_embeddings = False  # DeepSpeed's tool fails for tied weights in safetensors
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def loss_of(model: Any) -> Any:
    """Run a forward pass over a few tokens."""
    import torch

    tokens = torch.arange(TOKENS)[None]
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _save_zero(context: Context, rank: int, place: Path, stage: int) -> None:
    """One step under DeepSpeed's ZeRO, in bfloat16 with float32 masters."""
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = build_model(context, torch.bfloat16)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
    engine.backward(loss_of(engine))
    engine.step()
    engine.save_checkpoint(str(place))


def _save_dcp(context: Context, rank: int, place: Path, with_optimizer: bool) -> None:
    """One step under FSDP2, in float32."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dcp: Any = import_module("torch.distributed.checkpoint")
    states: Any = import_module("torch.distributed.checkpoint.state_dict")
    torch.distributed.init_process_group("gloo")
    model = build_model(context, torch.float32)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": states.get_model_state_dict(model)}
    if with_optimizer:
        loss_of(model).backward()
        optimizer.step()
        state["optimizer"] = states.get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=place)


SOURCES = {
    **{
        f"zero{stage}-{ranks}": Source(
            f"ZeRO-{stage}, {ranks} ranks", partial(_save_zero, stage=stage), ranks, (BIN, SAFE), "global_step1"
        )
        for stage in (2, 3)
        for ranks in (2, 4)
    },
    "dcp": Source("DCP of FSDP2 and its optimizer, 4 ranks", partial(_save_dcp, with_optimizer=True), 4, (DCP,)),
    "fsdp": Source(
        "Accelerate's FSDP2 weights, 4 ranks",
        lambda context, rank, place: _save_dcp(context, rank, place / "pytorch_model_fsdp_0", with_optimizer=False),
        4,
        (MERGE,),
        "pytorch_model_fsdp_0",
    ),
}


def make_inputs(context: Context) -> None:
    """Save each checkpoint by ranks that are forks of this process, which imports for all."""
    if not context.specs.exists():
        write_untied_specs(context)
    has_deepspeed = import_deepspeed()
    for name, source in SOURCES.items():
        place = context.directory / name
        if place.exists() or (name.startswith("zero") and not has_deepspeed):
            continue
        method = get_context("fork")
        port = free_port()
        ranks = [method.Process(target=_save_on_rank, args=(context, name, rank, port)) for rank in range(source.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"{source.title}: a rank has failed, and says why above")


def write_untied_specs(context: Context) -> None:
    """Write names and shapes of the model's tensors."""
    import torch

    with torch.device("meta"):
        state_dict = build_model(context, torch.bfloat16).state_dict()
    context.specs.write_text(json.dumps([(name, list(tensor.shape)) for name, tensor in state_dict.items()]))


def import_deepspeed() -> bool:
    """Import DeepSpeed for a CPU, without its communication in shared memory, which wants a compiler."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.real_accelerator import set_accelerator
    except ModuleNotFoundError:
        return False

    class Accelerator(CPU_Accelerator):  # type: ignore[misc]
        def create_op_builder(self, class_name: str) -> Any:
            return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    set_accelerator(Accelerator())
    deepspeed.logger.setLevel("WARNING")
    return True


def _save_on_rank(context: Context, name: str, rank: int, port: int) -> None:
    import torch

    source = SOURCES[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(source.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    source.save(context, rank, context.directory / name)
    torch.distributed.barrier()
    os._exit(0)


def peers(context: Context) -> list[Peer]:
    """The lines of the tables."""
    return [
        Peer(
            f"{tool} {name}",
            f"{source.title}: {TITLES[tool]}",
            partial(_prepare, name=name, tool=tool),
            state,
            1 if state == "cold" else SIDE,
            f"{source.tools[0]} {name}/{state}",
        )
        for state in STATES
        for name, source in SOURCES.items()
        for tool in (*source.tools, *OURS, *LIMITS)
    ]


def files(context: Context, peer: Peer) -> list[Path]:
    """All files of the checkpoint."""
    return _files_of(context, peer.key.split()[1])


def _files_of(context: Context, name: str) -> list[Path]:
    return [path for path in (context.directory / name).rglob("*") if path.is_file()]


def _prepare(context: Context, name: str, tool: str) -> Job:
    place = context.directory / name
    if not place.exists():
        raise SkipPeer("pip install deepspeed")
    if tool in LIMITS:
        write = write_limit(context, "convert", context.size.shard_size, times=FLOAT32)
        return write if tool == WRITE else _at_once(write, _largest(context, name))
    convert = CONVERSIONS[tool](place, place / SOURCES[name].folder, context)

    def convert_and_flush() -> None:
        convert()
        sync_files(context.target)

    return Job([("convert", convert_and_flush)], partial(_written, context))


def _largest(context: Context, name: str) -> list[tuple[Path, int]]:
    """Of each rank's largest file, as many bytes as are its share of the weights."""
    found = sorted(sized(_files_of(context, name)), key=lambda one: -one[1])
    ranks = SOURCES[name].ranks
    return [(path, min(size, FLOAT32 * total_bytes(context.specs) // ranks)) for path, size in found[:ranks]]


def _at_once(write: Job, reads: list[tuple[Path, int]]) -> Job:
    """Write, and read files meanwhile."""
    [(phase, action)] = write.phases

    def both() -> None:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_files, None, reads)
            action()
            reading.result()

    return Job([(phase, both)], write.result)


def _by_script(place: Path, _: Path, context: Context, **options: Any) -> Callable[[], object]:
    """DeepSpeed's script that is saved along with a checkpoint."""
    import_deepspeed()
    for module in ("runtime.fp16.loss_scaler", "runtime.zero.config", "utils.tensor_fragment"):
        import_module(f"deepspeed.{module}")  # which the files name: before the clock starts
    tool = import_module("deepspeed.utils.zero_to_fp32").convert_zero_checkpoint_to_fp32_state_dict
    return lambda: tool(str(place), str(context.target), **options)


def _by_torch(_: Path, checkpoint: Path, context: Context) -> Callable[[], object]:
    """torch's own conversion."""
    tool = import_module("torch.distributed.checkpoint.format_utils").dcp_to_torch_save
    return lambda: tool(checkpoint, context.target / "all.pt")


def _by_accelerate(_: Path, checkpoint: Path, context: Context) -> Callable[[], object]:
    """Accelerate's command."""
    tool = import_module("accelerate.utils").merge_fsdp_weights
    import_module("torch.distributed.checkpoint.format_utils")  # before the clock starts
    return lambda: tool(str(checkpoint), str(context.target))


def _by_hfshard(_: Path, checkpoint: Path, context: Context, checksum: Any) -> Callable[[], object]:
    """`hfshard convert`."""
    import hfshard

    convert = hfshard.reshard_checkpoint
    options: dict[str, Any] = {"max_shard_size": context.size.shard_size, "checksum": checksum, "progress": False}
    return partial(convert, checkpoint, context.target, **options)


CONVERSIONS: dict[str, Callable[[Path, Path, Context], Callable[[], object]]] = {
    BIN: _by_script,
    SAFE: lambda place, checkpoint, context: _by_script(
        place, checkpoint, context, max_shard_size=context.size.shard_size, safe_serialization=True
    ),
    DCP: _by_torch,
    MERGE: _by_accelerate,
    SHA256: partial(_by_hfshard, checksum="sha256"),
    NONE: partial(_by_hfshard, checksum=None),
}


def _written(context: Context) -> dict[str, Any]:
    written = [path for path in context.target.rglob("*") if path.is_file()]
    return {"bytes": sum(size for _, size in sized(written))}


def _pairs(data: Data) -> Iterator[tuple[str, str, Source]]:
    """(state, name, source) that were measured."""
    for state in STATES:
        for name, source in SOURCES.items():
            if runs_of(data, f"{SHA256} {name}/{state}"):
                yield state, name, source


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    titles = ["", "s (min–max)", "× the first", "CPU s", "anonymous, × weights", "mapped, × weights", "read, × weights"]
    sections = [
        f"### {source.title}, {state}\n\n"
        + markdown_table(
            [*titles, "written, × weights"],
            [_row(data, f"{tool} {name}/{state}", tool) for tool in (*source.tools, *OURS, *LIMITS)],
        )
        for state, name, source in _pairs(data)
    ]
    weights = FLOAT32 * data["bytes"] / MEGABYTE
    return paragraphs(
        f"A Llama with {weights:.0f} MB of float32 weights or masters, and AdamW's two moments beside them. Each tool"
        " is called in a process that has imported it; its files are flushed after it. Anonymous and mapped: the peaks"
        " of either. A convert reads as many bytes as the limit writes.",
        *sections,
    )


def _row(data: Data, name: str, tool: str) -> list[str]:
    runs = runs_of(data, name)
    if not runs:
        return [TITLES[tool], *[""] * 7]
    times = [
        TITLES[tool],
        show(spread(seconds(run) for run in runs)),
        show_ratio(data, name, data["peers"][name]["base"]),
        f"{min(run['cpu'] for run in runs):.2f}",
    ]
    if tool in LIMITS:
        return [*times, *[""] * 4]
    weights = FLOAT32 * data["bytes"]

    def share(values: list[int]) -> str:
        return f"{max(values) / weights:.2f}"

    return [
        *times,
        share([run["peak"] for run in runs]),
        share([run["mapped"] for run in runs]),
        share([run["read"] for run in runs]),
        share([run["result"]["bytes"] for run in runs]),
    ]


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    found = []
    for state, name, source in _pairs(data):
        for own, tool in product(OURS, source.tools):
            what = f"{TITLES[own].removeprefix('hfshard ').split(', like')[0]}: time"
            other = f"{TITLES[tool].split(':')[0]}, {source.title}, {state}"
            measured = ratio(data, f"{own} {name}/{state}", f"{tool} {name}/{state}")
            found.append(at_most(what, TIME, measured, other))
    weights = FLOAT32 * data["bytes"]
    runs = [
        (state, run)
        for state, name, _ in _pairs(data)
        for own in OURS
        for run in runs_of(data, f"{own} {name}/{state}")
    ]
    anonymous = max((run["peak"] / weights for _, run in runs), default=None)
    read = max((run["read"] / weights for state, run in runs if state == "cold"), default=None)
    found.append(at_most("convert: anonymous memory", ANONYMOUS, anonymous, "the weights"))
    found.append(at_most("convert, cold: bytes read", READ, read, "the weights"))
    return found


QUESTION = Question(
    name="foreign",
    title="Weights of other frameworks",
    peers=peers,
    make_inputs=make_inputs,
    files=files,
    render=render,
    targets=targets,
    held=7.0,
    side_by_side=1,
)
