"""Time of a push: to a directory that serves as a hub, and over HTTP to the test suite's Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.harness.figures import Data, Target, paragraphs, table
from bench.harness.inputs import make_source
from bench.harness.question import Context, Job, Peer, Question

REPOSITORY = Path(__file__).resolve().parents[3]
MOST = "100m"
"""The model to push where a larger one is asked for: the test suite's Hub is not a fast server."""
BASE = "upload_folder"


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def line(key: str, title: str, prepare: Callable[[Context], Job]) -> Peer:
        return Peer(key, title, prepare, "warm", base=f"{BASE}/warm")

    return [
        line(BASE, "huggingface_hub `upload_folder`, over HTTP", _by_upload_folder),
        line("hfshard http", "hfshard `push_checkpoint`, over HTTP", partial(_by_hfshard, is_remote=True)),
        line("hfshard directory", "hfshard, into a directory hub (flushed)", partial(_by_hfshard, is_remote=False)),
    ]


@contextmanager
def around(context: Context) -> Iterator[Context]:
    """A Hub in a process of its own."""
    home, params = context.directory / "hub-home", context.params
    home.mkdir(exist_ok=True)
    # The server puts what huggingface_hub asks for once a day into the home, so that it is not in one peer's time.
    directories = ["--root", str(context.directory / "hub"), "--client-home", str(home)]
    command = [sys.executable, "-m", "tests.servers.hub.hub_server", *directories]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            endpoint = server.stdout.readline().strip()
            server.stdout.readline()  # the environment of a client, whose home is made now
            environment = {
                "HF_ENDPOINT": endpoint,
                "HF_HOME": str(home),
                "HF_TOKEN": "hf_write",
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",  # the server has none: hf_xet would fail, not go over LFS
                "NO_PROXY": "127.0.0.1,localhost",
                "no_proxy": "127.0.0.1,localhost",
            }
            smaller = params if params in ("tiny", MOST) else MOST
            directory = context.directory if smaller == params else context.directory / "push"
            directory.mkdir(exist_ok=True)
            yield replace(context, params=smaller, directory=directory, environment=environment)
        finally:
            server.terminate()


def _by_upload_folder(context: Context) -> Job:
    """The usual way, into a new repo."""
    from huggingface_hub import HfApi

    api, repo_id = HfApi(), _new_repo()

    def push() -> None:
        api.create_repo(repo_id)
        api.upload_folder(repo_id=repo_id, folder_path=context.source)

    return Job([("push", push)])


def _by_hfshard(context: Context, is_remote: bool) -> Job:
    """`push_checkpoint` of the same directory into a new repo."""
    import hfshard

    push_checkpoint = hfshard.push_checkpoint
    repo_id = _new_repo() if is_remote else str(context.target / "hub")

    def push() -> None:
        if not push_checkpoint(context.source, repo_id).is_new:
            raise RuntimeError("nothing was pushed")

    return Job([("push", push)])


def _new_repo() -> str:
    return f"org/m{os.getpid()}-{uuid.uuid4().hex[:8]}"


def files(context: Context, peer: Peer) -> list[Path]:
    """The files to push."""
    return [path for path in context.source.iterdir() if path.is_file()]


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        f"A checkpoint of {data['bytes'] / 10**9:.2f} GB, its files cached, into a new repo each time. The server is"
        " the test suite's, on this machine, with LFS and without Xet, and takes most of the time. [hub_requests.py]"
        "(hub_requests.py) counts the requests.",
        table(data, list(data["peers"]), [("push", "")], "upload_folder"),
    )


def targets(data: Data) -> list[Target]:
    """None: the server takes most of the time."""
    return []


QUESTION = Question(
    name="push",
    title="Push",
    peers=peers,
    make_inputs=make_source,
    files=files,
    render=render,
    targets=targets,
    max_rounds=5,
    around=around,
)
