"""Each library's way into an object store and out of it: a save of tensors, and a load of all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bench.harness.question import SkipPeer
from bench.places.services import BUCKET, answer_of, ask, listed, port_of, signed_path

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
Save = Callable[[Tensors, str, Path], None]
"""Saves tensors below an address; the directory is empty, for what has to lie on a disk."""
Load = Callable[[str, Path, Tensors], Tensors]
"""Loads all tensors from an address; the last argument is a state dict of meta tensors, for who needs one."""

VARIABLES = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}
"""Scheme -> the variable that tells every peer where the service is."""

SHARD_SIZE = "50MB"
_SHARD_BYTES = 50 * 10**6
_RAW_PART = 8 * 2**20
_RAW_CONNECTIONS = 4


def hfshard_way(service: str) -> tuple[Save, Load]:
    """hfshard: streamed, hashed, and committed by one put."""
    import hfshard
    from hfshard.stores.open_store import open_store

    hfshard.save_state_dict, hfshard.load_state_dict  # noqa: B018  imported before the clock starts
    open_store(f"{service}://{BUCKET}").folders()  # as the other peers have their clients made

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        hfshard.save_state_dict(tensors, address, max_shard_size=SHARD_SIZE, progress=False)

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        return hfshard.load_state_dict(address, progress=False)

    return save, load


def sync_way(upload: Callable[[Path, str], None], download: Callable[[str, Path], None]) -> tuple[Save, Load]:
    """What people do: huggingface_hub saves into a directory, which is uploaded; and the other way round."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        save_torch_state_dict(tensors, directory, max_shard_size=SHARD_SIZE)
        upload(directory, prefix_of(address))

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        download(prefix_of(address), directory)
        files = sorted(directory.glob("*.safetensors"))
        return {name: tensor for path in files for name, tensor in load_file(path).items()}

    return save, load


def s3_sync_way() -> tuple[Save, Load]:
    """boto3's managed transfers, as the AWS command line makes them: 8 MB parts, 10 at once, 10 files at once."""
    import boto3

    client = boto3.client("s3")

    def upload(directory: Path, prefix: str) -> None:
        with ThreadPoolExecutor(10) as pool:
            list(
                pool.map(
                    lambda path: client.upload_file(str(path), BUCKET, f"{prefix}/{path.name}"), files_in(directory)
                )
            )

    def download(prefix: str, directory: Path) -> None:
        names = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")["Contents"]]
        with ThreadPoolExecutor(10) as pool:
            list(pool.map(lambda key: client.download_file(BUCKET, key, str(directory / Path(key).name)), names))

    return sync_way(upload, download)


def gcs_sync_way() -> tuple[Save, Load]:
    """google-cloud-storage's transfer manager, files side by side in threads."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from google.cloud.storage import transfer_manager

    bucket = storage.Client(project="bench", credentials=AnonymousCredentials()).bucket(BUCKET)
    threads = {"worker_type": transfer_manager.THREAD, "max_workers": 8, "raise_exception": True}

    def upload(directory: Path, prefix: str) -> None:
        names = [path.name for path in files_in(directory)]
        found = transfer_manager.upload_many_from_filenames(
            bucket, names, source_directory=str(directory), blob_name_prefix=f"{prefix}/", **threads
        )
        assert len(found) == len(names)

    def download(prefix: str, directory: Path) -> None:
        names = [blob.name for blob in bucket.list_blobs(prefix=f"{prefix}/")]
        pairs = [(bucket.blob(name), str(directory / Path(name).name)) for name in names]
        transfer_manager.download_many(pairs, **threads)

    return sync_way(upload, download)


def fsspec_way() -> tuple[Save, Load]:
    """torch's distributed checkpoints by its fsspec writer and reader: s3fs, gcsfs."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    from torch.distributed.checkpoint.state_dict_loader import load as load_into
    from torch.distributed.checkpoint.state_dict_saver import save as save_all

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        options: dict[str, Any] = {"token": "anon"} if address.startswith("gs") else {}
        save_all(tensors, storage_writer=FsspecWriter(address, thread_count=2, **options), no_dist=True)

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        options: dict[str, Any] = {"token": "anon"} if address.startswith("gs") else {}
        return _loaded_into(
            like, lambda state: load_into(state, storage_reader=FsspecReader(address, **options), no_dist=True)
        )

    for module in ("s3fs", "gcsfs"):
        import_module(module)
    return save, load


def s3torchconnector_way() -> tuple[Save, Load]:
    """Amazon's connector: torch's distributed checkpoints by its own writer and reader."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
    from torch.distributed.checkpoint.state_dict_loader import load as load_into
    from torch.distributed.checkpoint.state_dict_saver import save as save_all

    config = S3ClientConfig(force_path_style=True)

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        writer = S3StorageWriter("us-east-1", address, s3client_config=config, thread_count=2)
        save_all(tensors, storage_writer=writer, no_dist=True)

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        reader = S3StorageReader("us-east-1", address, s3client_config=config)
        return _loaded_into(like, lambda state: load_into(state, storage_reader=reader, no_dist=True))

    return save, load


def limit_way() -> tuple[Save, Load]:
    """The service alone: as many bytes in as many parts, nothing hashed; reads are ranges of hfshard's objects."""

    def save(tensors: Tensors, address: str, directory: Path) -> None:
        block = memoryview(bytes(_RAW_PART))
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        shards = [min(_SHARD_BYTES, total - at) for at in range(0, total, _SHARD_BYTES)]
        paths = [_object_path(f"{prefix_of(address)}/{number}") for number in range(len(shards))]
        keys = [_begin_upload(address, path) for path in paths]
        parts = [
            (f"{path}?partNumber={number + 1}&uploadId={key}", min(_RAW_PART, size - number * _RAW_PART))
            for path, key, size in zip(paths, keys, shards, strict=True)
            for number in range(-(-size // _RAW_PART))
        ]
        etags = dict(_in_connections(lambda path, size: (path, _put(address, path, block[:size])), parts))
        for path, key in zip(paths, keys, strict=True):
            _complete_upload(address, path, key, [tag for part, tag in etags.items() if part.endswith(f"={key}")])

    def load(address: str, directory: Path, like: Tensors) -> Tensors:
        found = listed(scheme_of(address), f"{prefix_of(address)}/")
        ranges = [(name, at) for name, size in found for at in range(0, size, _RAW_PART)]
        _in_connections(lambda name, at: _get(scheme_of(address), name, at), ranges)
        return {}

    return save, load


def _object_path(name: str) -> str:
    return f"/{BUCKET}/{quote(name)}"


def _begin_upload(address: str, path: str) -> str:
    status, body, _ = answer_of(_port(address), "POST", f"{path}?uploads")
    _expect(200, status)
    return body.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]


def _put(address: str, path: str, body: memoryview) -> str:
    status, _, headers = answer_of(_port(address), "PUT", path, body)
    _expect(200, status)
    return str(headers["etag"])


def _complete_upload(address: str, path: str, key: str, etags: list[str]) -> None:
    rows = [
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in enumerate(etags, 1)
    ]
    body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
    _expect(200, answer_of(_port(address), "POST", f"{path}?uploadId={key}", body)[0])


def _get(scheme: str, name: str, at: int) -> None:
    path = (
        signed_path(name) if scheme == "s3" else f"/download/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}?alt=media"
    )
    _expect(206, ask(_port(scheme), "GET", path, headers={"Range": f"bytes={at}-{at + _RAW_PART - 1}"}))


def _port(address: str) -> int:
    return port_of(os.environ[VARIABLES[scheme_of(address)]])


def _expect(wanted: int, status: int) -> None:
    if status != wanted:
        raise RuntimeError(f"the service answered {status}, not {wanted}")


def _in_connections(send: Callable[[str, int], Any], requests: list[tuple[str, int]]) -> list[Any]:
    with ThreadPoolExecutor(_RAW_CONNECTIONS) as pool:
        return list(pool.map(lambda request: send(*request), requests))


def _loaded_into(like: Tensors, load: Callable[[Tensors], object]) -> Tensors:
    import torch

    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    load(state)
    return state


def scheme_of(address: str) -> str:
    """What stands before the colon."""
    return address.partition(":")[0]


def prefix_of(address: str) -> str:
    """What follows the bucket."""
    return address.partition("://")[2].partition("/")[2]


def files_in(directory: Path) -> list[Path]:
    """The files of a directory, in order."""
    return sorted(path for path in directory.iterdir() if path.is_file())


def endpoint_of(service: str) -> str:
    """Where a service answers.

    Raises:
        SkipPeer: It can't be had here.
    """
    try:
        return os.environ[VARIABLES[service]]
    except KeyError as error:
        raise SkipPeer(f"no service for {service}://: pip install 'hfshard[test]'") from error
