"""Time of a save into an object store and of a load from one: hfshard, a directory that is synced, torch's DCP."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bench.harness.figures import Data, Target, at_most, paragraphs, peak_at_most, ratio, runs_of, table
from bench.harness.inputs import make_specs
from bench.harness.models import make_tensors
from bench.harness.question import Context, Job, Peer, Question, SkipPeer

if TYPE_CHECKING:
    from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[3]
SERVICES = {"gs": "fake-gcs-server", "s3": "moto's S3"}
VARIABLES = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}
"""Scheme -> the variable that tells every peer where the service is."""
BUCKET = "bench"
MOST = "645m"
"""The model to save where a larger one is asked for: the services hold it in memory, several times."""
OURS, SYNC, FSSPEC, CONNECTOR, LIMIT = ("hfshard", "sync", "dcp fsspec", "dcp s3torchconnector", "limit")
SAVE_FACTOR, LOAD_FACTOR = 0.7, 0.9
PEAK_MIB = 256
SHARD_SIZE, SHARD_BYTES = "50MB", 50 * 10**6
RAW_PART = 8 * 2**20
RAW_CONNECTIONS = 4

_TITLES = {
    OURS: "hfshard",
    SYNC: "huggingface_hub into a directory, and sync",
    FSSPEC: "torch DCP, fsspec",
    CONNECTOR: "torch DCP, s3torchconnector",
    LIMIT: "the service alone: as many bytes, by plain requests for the same parts",
}

_PROGRAM = """
import json, sys
from tests.servers.stores.kinds import ENDS, SERVICES
service = SERVICES[sys.argv[1]]
url = "" if service.lacks() else service.start()
print(json.dumps([url, dict(service.environment(url)) if url else {}]), flush=True)
sys.stdin.read()
ENDS.close()
"""
_ENVIRONMENT = {
    "AWS_REGION": "us-east-1",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks over gRPC, which the service does not speak
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
"""Needs of peers beside those of the service's own tools."""

Tensors = dict[str, "Tensor"]
Save = Callable[[Tensors, str, Path], None]
"""Saves tensors below an address; the directory is empty, for what has to lie on a disk."""
Load = Callable[[str, Path, Tensors], Tensors]
"""Loads all tensors from an address; the last argument is a state dict of meta tensors, for who needs one."""
Way = tuple[Save, Load]
"""One library's way into an object store and out of it."""


def peers(context: Context) -> list[Peer]:
    """The lines of the tables: state is the service, and what is done there."""
    found = []
    for service in SERVICES:
        for kind, prepare in (("save", _prepare_save), ("load", _prepare_load)):
            state = f"{service} {kind}"
            for key in [*_libraries(service), LIMIT]:
                limit = "" if key == LIMIT else f"{LIMIT} {state}"
                job = partial(prepare, key=key, service=service)
                found.append(Peer(f"{key} {state}", _TITLES[key], job, base=f"{SYNC} {state}", limit=limit))
    return found


def _libraries(service: str) -> list[str]:
    return [OURS, SYNC, FSSPEC, *([CONNECTOR] if service == "s3" else [])]


@contextmanager
def around(context: Context) -> Iterator[Context]:
    """The services, each in a process of its own that keeps all in memory; one that lacks a package is absent."""
    smaller = context.params if context.params in ("tiny", "45m", "100m") else MOST
    directory = context.directory if smaller == context.params else context.directory / "stores"
    directory.mkdir(exist_ok=True)
    environment = dict(_ENVIRONMENT)
    with ExitStack() as stack:
        for service, variable in VARIABLES.items():
            url, more = stack.enter_context(_running(service))
            if url:
                environment |= {**more, variable: url}
        yield replace(context, params=smaller, directory=directory, environment=environment)


@contextmanager
def _running(service: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Start a service with an empty bucket; give its URL, "" if it cannot be had, and the environment of clients."""
    command = [sys.executable, "-c", _PROGRAM, service]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as server:
        try:
            assert server.stdout
            url, environment = json.loads(server.stdout.readline())
            if url and service == "gs":
                _ask(url, "POST", "/storage/v1/b?project=bench", json.dumps({"name": BUCKET}).encode())
            elif url:
                _ask(url, "PUT", f"/{BUCKET}")
            yield url, environment
        finally:
            server.terminate()


def _ask(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, expected: int = 200
) -> tuple[bytes, http.client.HTTPMessage]:
    """Send one request; return the body and the headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=600)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        found = answer.read()
        if answer.status != expected:
            raise RuntimeError(f"the service answered {answer.status}, not {expected}")
        return found, answer.headers
    finally:
        connection.close()


def _url_of(service: str) -> str:
    """Find where a service answers.

    Raises:
        SkipPeer: It cannot be had here.
    """
    try:
        return os.environ[VARIABLES[service]]
    except KeyError as error:
        raise SkipPeer(f"no service for {service}://: pip install 'hfshard[test]'") from error


def _listed(service: str, prefix: str) -> list[tuple[str, int]]:
    """Names and sizes of the objects below a prefix."""
    if service == "s3":
        import boto3

        return [(found.key, found.size) for found in boto3.resource("s3").Bucket(BUCKET).objects.filter(Prefix=prefix)]
    url = f"{_url_of(service)}/storage/v1/b/{BUCKET}/o?prefix={prefix}&maxResults=5000"
    with urllib.request.urlopen(url) as answer:
        return [(found["name"], int(found["size"])) for found in json.load(answer).get("items", [])]


def _clear(service: str, prefix: str) -> None:
    """Delete the objects below a prefix, so that the service's memory holds one save at a time."""
    if service == "s3":
        import boto3

        boto3.resource("s3").Bucket(BUCKET).objects.filter(Prefix=prefix).delete()
        return
    for name, _ in _listed(service, prefix):
        _ask(_url_of(service), "DELETE", f"/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}")


def make_inputs(context: Context) -> None:
    """Save the tensors by each library, which loads that."""
    make_specs(context)
    tensors = make_tensors(context.specs)
    for service in SERVICES:
        for key in _libraries(service):
            with tempfile.TemporaryDirectory(dir=context.directory) as place:
                try:
                    save, _ = _way_of(key, service)
                    save(tensors, _source_of(key, service), Path(place))
                except Exception as error:
                    print(f"{key} {service}: {error}")
                    if key == OURS:
                        raise


def _source_of(key: str, service: str) -> str:
    """The address of the checkpoint that a library loads."""
    return f"{service}://{BUCKET}/source/{OURS if key == LIMIT else key.replace(' ', '-')}"


def _prepare_save(context: Context, key: str, service: str) -> Job:
    """A save into a new prefix."""
    save, _ = _way_of(key, service)
    tensors = make_tensors(context.specs)
    _clear(service, "target/")
    address = f"{service}://{BUCKET}/target/{uuid.uuid4().hex[:8]}"
    return Job([("save", lambda: save(tensors, address, context.target))])


def _prepare_load(context: Context, key: str, service: str) -> Job:
    """A load of everything, and every byte touched: what is mapped is read only then."""
    import torch

    _, load = _way_of(key, service)
    like = {name: tensor.to("meta") for name, tensor in make_tensors(context.specs).items()}
    loaded: Tensors = {}
    touched: list[int] = []

    def run() -> None:
        loaded.update(load(_source_of(key, service), context.target, like))

    def touch() -> None:
        touched.extend(int(tensor.flatten().view(torch.int64).sum()) for _, tensor in sorted(loaded.items()))

    def result() -> dict[str, str]:
        return {} if key == LIMIT else {"of": "tensors", "sum": hashlib.sha256(repr(touched).encode()).hexdigest()}

    return Job([("load", run), ("every byte", touch)], result)


def _way_of(key: str, service: str) -> Way:
    """Import a library, and prepare its save and load there."""
    _url_of(service)
    ways: dict[str, Callable[[], Way]] = {
        OURS: partial(_by_hfshard, service),
        SYNC: _by_s3_sync if service == "s3" else _by_gcs_sync,
        FSSPEC: _by_fsspec,
        CONNECTOR: _by_s3torchconnector,
        LIMIT: partial(_limit, service),
    }
    return ways[key]()


def _by_hfshard(service: str) -> Way:
    """hfshard: streamed, hashed, and committed by one put."""
    import hfshard
    from hfshard.stores.open_store import open_store

    save_state_dict, load_state_dict = hfshard.save_state_dict, hfshard.load_state_dict
    open_store(f"{service}://{BUCKET}").folders()  # as the other peers have their clients made

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        save_state_dict(tensors, address, max_shard_size=SHARD_SIZE, progress=False)

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        return load_state_dict(address, progress=False)

    return save, load


def _by_sync(upload: Callable[[Path, str], None], download: Callable[[str, Path], None]) -> Way:
    """The common way: huggingface_hub saves into a directory, which is uploaded; and the other way round."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        save_torch_state_dict(tensors, directory, max_shard_size=SHARD_SIZE)
        upload(directory, _prefix_of(address))

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        download(_prefix_of(address), directory)
        files = sorted(directory.glob("*.safetensors"))
        return {name: tensor for path in files for name, tensor in load_file(path).items()}

    return save, load


def _by_s3_sync() -> Way:
    """boto3's managed transfers, as the AWS command line makes them: 8 MB parts, 10 at once, 10 files at once."""
    import boto3

    client = boto3.client("s3")

    def upload(directory: Path, prefix: str) -> None:
        def put(path: Path) -> None:
            client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}")

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(put, sorted(directory.iterdir())))

    def download(prefix: str, directory: Path) -> None:
        names = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]]
        with ThreadPoolExecutor(10) as pool:
            list(pool.map(lambda key: client.download_file(BUCKET, key, str(directory / Path(key).name)), names))

    return _by_sync(upload, download)


def _by_gcs_sync() -> Way:
    """google-cloud-storage's transfer manager, files side by side in threads."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from google.cloud.storage import transfer_manager

    bucket = storage.Client(project="bench", credentials=AnonymousCredentials()).bucket(BUCKET)
    threads = {"worker_type": transfer_manager.THREAD, "max_workers": 8, "raise_exception": True}

    def upload(directory: Path, prefix: str) -> None:
        names = [path.name for path in sorted(directory.iterdir())]
        transfer_manager.upload_many_from_filenames(
            bucket, names, source_directory=str(directory), blob_name_prefix=f"{prefix}/", **threads
        )

    def download(prefix: str, directory: Path) -> None:
        names = [blob.name for blob in bucket.list_blobs(prefix=f"{prefix}/")]
        pairs = [(bucket.blob(name), str(directory / Path(name).name)) for name in names]
        transfer_manager.download_many(pairs, **threads)

    return _by_sync(upload, download)


def _by_dcp(writer: Callable[[str], Any], reader: Callable[[str], Any]) -> Way:
    """torch's distributed checkpoints, by a writer and a reader of an address."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load as load_into
    from torch.distributed.checkpoint.state_dict_saver import save as save_all

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        save_all(tensors, storage_writer=writer(address), no_dist=True)

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
        load_into(state, storage_reader=reader(address), no_dist=True)
        return state

    return save, load


def _by_fsspec() -> Way:
    """DCP's own fsspec writer and reader: s3fs, gcsfs."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    for module in ("s3fs", "gcsfs"):
        import_module(module)

    def options(address: str) -> dict[str, Any]:
        return {"token": "anon"} if address.startswith("gs") else {}

    return _by_dcp(
        lambda address: FsspecWriter(address, thread_count=2, **options(address)),
        lambda address: FsspecReader(address, **options(address)),
    )


def _by_s3torchconnector() -> Way:
    """Amazon's connector: DCP by its own writer and reader."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    return _by_dcp(
        lambda address: S3StorageWriter("us-east-1", address, s3client_config=config, thread_count=2),
        lambda address: S3StorageReader("us-east-1", address, s3client_config=config),
    )


def _limit(service: str) -> Way:
    """The service alone: as many bytes in as many parts, nothing hashed; reads are ranges of hfshard's objects."""
    url = _url_of(service)

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        block = memoryview(bytes(RAW_PART))
        total = sum(tensor.nbytes for tensor in tensors.values())
        uploads, parts = [], []
        for number, at in enumerate(range(0, total, SHARD_BYTES)):
            path = f"/{BUCKET}/{quote(f'{_prefix_of(address)}/{number}')}"
            answer, _ = _ask(url, "POST", f"{path}?uploads")
            key = answer.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
            size = min(SHARD_BYTES, total - at)
            uploads.append((path, key))
            parts += [
                (path, key, part, min(RAW_PART, size - start)) for part, start in enumerate(range(0, size, RAW_PART), 1)
            ]

        def put(path: str, key: str, part: int, size: int) -> str:
            _, headers = _ask(url, "PUT", f"{path}?partNumber={part}&uploadId={key}", block[:size])
            return f"<Part><PartNumber>{part}</PartNumber><ETag>{headers['etag']}</ETag></Part>"

        rows = list(zip(parts, _in_connections(put, parts)))
        for path, key in uploads:
            listed = "".join(row for part, row in rows if part[1] == key)
            body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
            _ask(url, "POST", f"{path}?uploadId={key}", body)

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        def get(name: str, at: int) -> None:
            path = f"/download/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}?alt=media"
            path = _signed_path(name) if service == "s3" else path
            _ask(url, "GET", path, headers={"Range": f"bytes={at}-{at + RAW_PART - 1}"}, expected=206)

        found = _listed(service, f"{_prefix_of(address)}/")
        _in_connections(get, [(name, at) for name, size in found for at in range(0, size, RAW_PART)])
        return {}

    return save, load


def _in_connections(send: Callable[..., Any], requests: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(RAW_CONNECTIONS) as pool:
        return list(pool.map(lambda request: send(*request), requests))


@cache
def _signed_path(name: str) -> str:
    """The path and query with which anybody may read an object of S3."""
    import boto3

    url = boto3.client("s3").generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": name})
    return "/" + str(url).split("/", 3)[3]


def _prefix_of(address: str) -> str:
    """The part of an address after the bucket."""
    return address.partition("://")[2].partition("/")[2]


def _names(data: Data, state: str) -> list[str]:
    return [name for name in data["peers"] if name.endswith(f" {state}")]


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = [
        f"{data['bytes'] / 10**9:.2f} GB of tensors in shards of {SHARD_SIZE}, into a new prefix each time. The"
        " services run on this machine, on the same cores as what is measured, and keep everything in memory: the limit"
        " is what they take for as many bytes in the same parts of 8 MiB, from four connections. fake-gcs-server is"
        " compiled; the test suite's gateway before it, in Python, through which every peer goes, gives it the XML API."
        " moto is Python. CPU seconds are the library's, without the service's; `MB written` went to the disk."
    ]
    kinds = (("save", "", "save + sync", SAVE_FACTOR), ("load", "every byte", "sync + load", LOAD_FACTOR))
    for service, title in SERVICES.items():
        for kind, phase, base, factor in kinds:
            names = _names(data, f"{service} {kind}")
            if any(runs_of(data, name) for name in names):
                parts += [f"### {kind.capitalize()}, {title}", table(data, names, [(phase, "")], base)]
                alone = ratio(data, f"{LIMIT} {service} {kind}", f"{SYNC} {service} {kind}")
                if alone is not None and alone.median >= factor:
                    shown = f"{alone.median:.2f} × the sync, and {factor} × are aimed at"
                    parts.append(f"The service is the limit here: alone it takes {shown}.")
    return paragraphs(*parts)


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    found = []
    for service, title in SERVICES.items():
        saved = ratio(data, f"{OURS} {service} save", f"{SYNC} {service} save")
        found.append(at_most(f"save, {title}: time", SAVE_FACTOR, saved, "save + sync"))
        state = f"{service} load"
        others = [name for name in _names(data, state) if not name.startswith((OURS, LIMIT))]
        ratios = [one for name in others if (one := ratio(data, f"{OURS} {state}", name)) is not None]
        worst = max(ratios, key=lambda one: one.median, default=None)
        found.append(at_most(f"load, {title}: time", LOAD_FACTOR, worst, "the best peer"))
    ours = [name for name in data["peers"] if name.startswith(f"{OURS} ") and "save" in name]
    return [*found, peak_at_most("save into a store", PEAK_MIB, data, ours)]


QUESTION = Question(
    name="stores",
    title="Object stores",
    peers=peers,
    make_inputs=make_inputs,
    render=render,
    targets=targets,
    held=3.0,
    side_by_side=1,
    around=around,
)
