"""How long a save into an object store takes, and a load from one: hfshard, a directory that is synced, torch's DCP."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.harness.figures import Data, at_most, peak_at_most, ratio, runs_of, skipped, table
from bench.harness.inputs import make_specs
from bench.harness.models import make_tensors
from bench.harness.question import Context, Job, Peer, Question, Target
from bench.markdown import paragraphs
from bench.places import services, ways

SERVICES = {"gs": "fake-gcs-server", "s3": "moto's S3"}
MOST = "645m"
"""The model that is saved where a larger one is asked for: the services hold it in memory, several times."""
OURS, SYNC, FSSPEC, CONNECTOR, LIMIT = "hfshard", "sync", "dcp fsspec", "dcp s3torchconnector", "limit"
SAVE_FACTOR, LOAD_FACTOR = 0.7, 0.9
PEAK_MIB = 256

_TITLES = {
    OURS: "hfshard",
    SYNC: "huggingface_hub into a directory, and sync",
    FSSPEC: "torch DCP, fsspec",
    CONNECTOR: "torch DCP, s3torchconnector",
    LIMIT: "the service alone: as many bytes, by plain requests for the same parts",
}


def peers(context: Context) -> list[Peer]:
    """The lines of the tables: state is the service, and what is done there."""
    found = []
    for service in SERVICES:
        for kind in ("save", "load"):
            state = f"{service} {kind}"
            keys = [OURS, SYNC, FSSPEC, *([CONNECTOR] if service == "s3" else []), LIMIT]
            for key in keys:
                prepare = partial(prepare_save if kind == "save" else prepare_load, key=key, service=service)
                limit = "" if key == LIMIT else f"{LIMIT} {state}"
                found.append(Peer(f"{key} {state}", _TITLES[key], prepare, base=f"{SYNC} {state}", limit=limit))
    return found


def way_of(key: str, service: str) -> tuple[ways.Save, ways.Load]:
    """How a library saves and loads there; it is imported by that."""
    ways.endpoint_of(service)
    sync = ways.s3_sync_way if service == "s3" else ways.gcs_sync_way
    found: dict[str, Callable[[], tuple[ways.Save, ways.Load]]] = {
        OURS: partial(ways.hfshard_way, service),
        SYNC: sync,
        FSSPEC: ways.fsspec_way,
        CONNECTOR: ways.s3torchconnector_way,
        LIMIT: ways.limit_way,
    }
    return found[key]()


@contextmanager
def around(context: Context) -> Iterator[Context]:
    """The services; what an earlier run left there goes with them."""
    smaller = context.params if context.params in ("tiny", "45m", "100m") else MOST
    directory = context.directory if smaller == context.params else context.directory / "stores"
    directory.mkdir(exist_ok=True)
    with services.running(ways.VARIABLES) as environment:
        yield replace(context, params=smaller, directory=directory, environment=environment)


def make_inputs(context: Context) -> None:
    """Each library's own save of the tensors, which it loads."""
    make_specs(context)
    tensors = make_tensors(context.specs)
    for service in SERVICES:
        for key in (OURS, SYNC, FSSPEC, CONNECTOR):
            if key != CONNECTOR or service == "s3":
                place = context.directory / "made"
                place.mkdir()
                try:
                    save, _ = way_of(key, service)
                    save(tensors, source_of(key, service), place)
                except Exception as error:
                    print(f"{key} {service}: {error}")
                    if key == OURS:
                        raise
                finally:
                    for path in ways.files_in(place):
                        path.unlink()
                    place.rmdir()


def source_of(key: str, service: str) -> str:
    """Where the checkpoint lies that a library loads."""
    key = OURS if key == LIMIT else key.replace(" ", "-")
    return f"{service}://{services.BUCKET}/source/{key}"


def prepare_save(context: Context, key: str, service: str) -> Job:
    """A save into a new prefix."""
    save, _ = way_of(key, service)
    tensors = make_tensors(context.specs)
    services.clear(service, "target/")
    address = f"{service}://{services.BUCKET}/target/{uuid.uuid4().hex[:8]}"
    return Job([("save", lambda: save(tensors, address, context.target))])


def prepare_load(context: Context, key: str, service: str) -> Job:
    """A load of everything, and every byte touched: what is mapped is read only then."""
    import torch

    _, load = way_of(key, service)
    like = {name: tensor.to("meta") for name, tensor in make_tensors(context.specs).items()}
    loaded: ways.Tensors = {}
    touched: list[int] = []

    def run() -> None:
        loaded.update(load(source_of(key, service), context.target, like))

    def touch() -> None:
        touched.extend(int(tensor.flatten().view(torch.int64).sum()) for _, tensor in sorted(loaded.items()))

    def result() -> dict[str, str]:
        return {} if key == LIMIT else {"of": "tensors", "sum": hashlib.sha256(repr(touched).encode()).hexdigest()}

    return Job([("load", run), ("every byte", touch)], result)


def files(context: Context, peer: Peer) -> list[Path]:
    """Nothing of it lies on this machine's disk."""
    return []


def _names(data: Data, state: str) -> list[str]:
    return [name for name in data["peers"] if name.endswith(f" {state}")]


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = [
        f"{data['bytes'] / 10**9:.2f} GB of tensors in shards of {ways.SHARD_SIZE}, into a new prefix each time. The"
        " services run on this machine, on the same cores as what is measured, and keep everything in memory: the limit"
        " is what they take for as many bytes in the same parts of 8 MiB, from four connections. fake-gcs-server is"
        " compiled; the test suite's gateway before it, in Python, through which every peer goes, gives it the XML API."
        " moto is Python. CPU seconds are the library's, without the service's; `MB written` went to the disk."
    ]
    for service, title in SERVICES.items():
        for kind, phases in (("save", [("", "")]), ("load", [("every byte", "")])):
            state = f"{service} {kind}"
            if any(runs_of(data, name) for name in _names(data, state)):
                parts += [
                    f"### {kind.capitalize()}, {title}",
                    table(data, _names(data, state), phases, "save + sync" if kind == "save" else "sync + load"),
                    _where_the_service_limits(data, state, SAVE_FACTOR if kind == "save" else LOAD_FACTOR),
                ]
    return paragraphs(*parts, skipped(data))


def _where_the_service_limits(data: Data, state: str, factor: float) -> str:
    """Say so where the service alone takes longer than a save or load is meant to."""
    alone = ratio(data, f"{LIMIT} {state}", f"{SYNC} {state}")
    if alone is None or alone.median < factor:
        return ""
    return f"The service is the limit here: alone it takes {alone.median:.2f} × the sync, and {factor} × are aimed at."


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    found = []
    for service, title in SERVICES.items():
        saved = ratio(data, f"{OURS} {service} save", f"{SYNC} {service} save")
        found.append(Target(f"save, {title}: time ≤ {SAVE_FACTOR} × save + sync", *at_most(SAVE_FACTOR, saved)))
        state = f"{service} load"
        others = [name for name in _names(data, state) if not name.startswith((OURS, LIMIT)) and runs_of(data, name)]
        ratios = [found_ratio for name in others if (found_ratio := ratio(data, f"{OURS} {state}", name)) is not None]
        worst = max(ratios, key=lambda one: one.median, default=None)
        found.append(Target(f"load, {title}: time ≤ {LOAD_FACTOR} × the best peer", *at_most(LOAD_FACTOR, worst)))
    ours = [name for name in data["peers"] if name.startswith(f"{OURS} ") and "save" in name]
    found.append(Target(f"save into a store: peak memory ≤ {PEAK_MIB} MiB more", *peak_at_most(PEAK_MIB, data, ours)))
    return found


QUESTION = Question(
    "stores", "Object stores", peers, make_inputs, files, render, targets, held=3.0, side_by_side=1, around=around
)
