"""What saves and loads cost a service and the machine: requests, bytes on the wire, bytes on the disk, memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import safetensors.torch
import torch
from torch import nn

import hfshard
from hfshard.commit import store_plan
from tests.helpers import processes
from tests.helpers.memory import peak_during
from tests.servers.stores.buckets import Bucket
from tests.servers.stores.fault_proxy import FaultProxy
from tests.stores.test_store_contract import MIB
from tests.sweeps.directory_models import Content, sharded_model

PARTS = 2
"""Of 9 MiB in parts of 8 MiB."""
INDEX = "model.safetensors.index.json"
ASKED_FIRST = 32768
"""Bytes of a shard that are asked for at once: its header, and what follows it."""
MEMORY_BYTES = 32 * MIB
SLACK_BYTES = 16 * MIB
"""What clients, threads and the interpreter take beside the parts."""

OBJECT_STORES = pytest.mark.parametrize("scheme", ["s3", "gs", "az"])


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    """A shard of 9 MiB, which is sent in parts, and one of 2 MiB with two tensors, which is sent whole."""
    return {
        "a": torch.full((9 * MIB // 4,), value),
        "b": torch.full((MIB // 4,), value),
        "c": torch.arange(MIB // 4) + value,
    }


def save(address: str, value: float = 1.0) -> hfshard.CheckpointIndex:
    return hfshard.save_state_dict(state(value), address, max_shard_size=9 * MIB + 5000)


def bytes_of(proxy: FaultProxy, name: str) -> int:
    """Body bytes of the answers about the objects of a file, whichever save's they are."""
    stem, suffix = (re.escape(part) for part in os.path.splitext(name))
    numbered = re.compile(rf"/{stem}-\d{{8}}-[0-9a-f]{{16}}{suffix}$")
    found = [one for one in proxy.requests("get") if numbered.search(unquote(one.path.partition("?")[0]))]
    return sum(request.bytes_down for request in found)


def asked(proxy: FaultProxy) -> str:
    """The kinds of requests beside those of shards in parts, in their order; forgets them."""
    kinds = [request.kind for request in proxy.requests() if request.kind not in ("begin", "part", "finish")]
    proxy.clear()
    return " ".join(kinds)


@OBJECT_STORES
def test_a_save_asks_little_and_an_unchanged_one_puts_nothing(
    scheme: str, proxy: FaultProxy, store_address: str
) -> None:
    # Only S3 (and the real GCS) name an object by its MD5, which tells that a plain copy is the right one.
    copy_is_read = "" if scheme == "s3" else " get"
    save(store_address)
    kinds = Counter(request.kind for request in proxy.requests())
    assert kinds["begin"] + kinds["part"] + kinds["finish"] == PARTS + (1 if scheme == "az" else 2)
    assert asked(proxy) == "list put put put list"  # the small shard, the index, its plain copy

    save(store_address, 2.0)
    kinds = Counter(request.kind for request in proxy.requests())
    assert kinds["part"] == PARTS
    sent = sum(request.bytes_up for request in proxy.requests())
    assert 11 * MIB < sent < 11 * MIB + 20_000
    assert asked(proxy) == f"list put put put list delete_many{_uploads(scheme)}"

    save(store_address, 2.0)
    assert sum(request.bytes_up for request in proxy.requests()) == 0
    assert asked(proxy) == "list"

    store_plan.forget_puts()  # as in a new process
    save(store_address, 2.0)
    assert asked(proxy) == f"list get{copy_is_read}"

    # What the shards are compared with is in the old index alone.
    store_plan.forget_puts()
    save(store_address, 3.0)
    assert asked(proxy) == f"list get put put put list delete_many{_uploads(scheme)}"


@OBJECT_STORES
def test_a_save_sends_the_shard_that_changed(scheme: str, proxy: FaultProxy, store_address: str) -> None:
    tensors = {f"layer.{number}": torch.full((MIB // 4,), float(number)) for number in range(5)}
    hfshard.save_state_dict(tensors, store_address, max_shard_size="1.1MB")
    proxy.clear()
    tensors["layer.3"] += 1
    index = hfshard.save_state_dict(tensors, store_address, max_shard_size="1.1MB")
    assert len(set(index.weight_map.values())) == 5
    sent = sum(request.bytes_up for request in proxy.requests())
    assert MIB < sent < MIB + 20_000
    kinds = Counter(request.kind for request in proxy.requests())
    heads = 0 if scheme == "s3" else 8  # of source and copy, where the request for the copy has no condition
    uploads = len(_uploads(scheme).split())
    expected = {"list": 2, "copy": 4, "head": heads, "put": 3, "delete_many": 1, "uploads": uploads}
    assert kinds == Counter(expected)


@OBJECT_STORES
def test_a_save_over_a_single_file_does_not_read_it(
    scheme: str, proxy: FaultProxy, store_address: str, store_prefix: str, bucket: Bucket
) -> None:
    raw = safetensors.torch.save(state(), metadata={"format": "pt"})
    bucket.put(f"{store_prefix}/model.safetensors", raw)

    save(store_address, 2.0)

    assert asked(proxy) == f"list put put put list {_delete_one(scheme)}"  # the small shard, the index, its plain copy


@OBJECT_STORES
def test_a_save_of_a_model_with_another_config(scheme: str, proxy: FaultProxy, store_address: str) -> None:
    old, new = (sharded_model(Content(generation, own_config=True)) for generation in (1, 2))
    old.save_pretrained(store_address)
    assert asked(proxy) == "list put put put put list"  # the shard, the index, and plain copies of config and index

    new.save_pretrained(store_address)
    assert asked(proxy) == f"list put put put put list delete_many{_uploads(scheme)}"

    # A plain config that is none that was saved is a user's edit: where the ETag does not tell, it is read.
    config_is_read = "" if scheme == "s3" else " get"
    store_plan.forget_puts()
    old.save_pretrained(store_address)
    assert asked(proxy) == f"list get{config_is_read} put put put put list delete_many{_uploads(scheme)}"


def _uploads(scheme: str) -> str:
    """The listing of unfinished uploads, which Azure removes itself."""
    return "" if scheme == "az" else " uploads"


def _delete_one(scheme: str) -> str:
    return "delete" if scheme == "gs" else "delete_many"


@OBJECT_STORES
def test_each_byte_is_read_once(proxy: FaultProxy, store_address: str) -> None:
    index = save(store_address)
    files = {name: one.size for name, one in index.files.items() if name.endswith(".safetensors")}
    for verify in ("structure", "full"):
        proxy.clear()
        loaded = hfshard.load_state_dict(store_address, verify=verify)
        assert torch.equal(loaded["c"], state()["c"])
        assert {name: bytes_of(proxy, name) for name in files} == files
        assert bytes_of(proxy, INDEX) < 5000


@OBJECT_STORES
def test_one_tensor_costs_its_bytes_and_a_header(proxy: FaultProxy, store_address: str) -> None:
    index = save(store_address)
    proxy.clear()
    loaded = hfshard.load_state_dict(store_address, keys=["c"])
    assert torch.equal(loaded["c"], state()["c"])
    assert bytes_of(proxy, index.weight_map["a"]) == 0
    assert bytes_of(proxy, index.weight_map["c"]) <= MIB + ASKED_FIRST
    assert asked(proxy) == "list get get get"  # the index, the header, and the tensor


def count_disk(address: str, report: str) -> None:
    """Save tensors twice, then a model twice; writes down what the kernel counts as written to a disk meanwhile."""
    model = sharded_model(Content(1, own_config=True))
    other = sharded_model(Content(2, own_config=True))
    before = _written()
    save(address)
    save(address, 2.0)
    of_tensors = _written() - before
    model.save_pretrained(f"{address}/model")
    other.save_pretrained(f"{address}/model")
    of_models = _written() - before - of_tensors
    Path(report).write_text(f"{of_tensors} {of_models}")


def _written() -> int:
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("write_bytes")]
    return int(line.split()[1])


@OBJECT_STORES
@pytest.mark.usefixtures("bucket")
def test_nothing_is_written_to_a_disk(store_address: str, tmp_path: Path) -> None:
    with processes.call(count_disk, store_address, str(tmp_path / "report"), stderr=subprocess.PIPE) as child:
        assert child.wait(120) == 0, child.stderr and child.stderr.read()
    assert (tmp_path / "report").read_text() == "0 0"


def save_and_load(address: str) -> None:
    """Save and load 96 MiB in three files; prints the most bytes that each of them took beside them."""
    torch.set_num_threads(1)
    hfshard.save_state_dict({"warm": torch.ones(5_000_000)}, f"{address}/warm")
    hfshard.load_state_dict(f"{address}/warm")
    tensors = {f"layer.{number}": torch.full((4 * MIB,), float(number)) for number in range(6)}
    module = nn.Module()
    module.layer = nn.ParameterList(torch.zeros(4 * MIB) for _ in tensors)
    saved = peak_during(lambda: hfshard.save_state_dict(tensors, address, max_shard_size="35MB"))
    loaded = peak_during(lambda: hfshard.load_model(module, address, verify="full"))
    assert all(torch.equal(module.get_parameter(name), tensor) for name, tensor in tensors.items())
    print(json.dumps([saved, loaded]))


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    "scheme", ["az", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("s3", "gs", "hf"))]
)
def test_memory_is_bounded(store_address: str) -> None:
    environment = {**os.environ, "HFSHARD_STORE_MEMORY": f"{MEMORY_BYTES // MIB}MiB"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.call(save_and_load, store_address, env=environment, **streams) as child:
        said, complaints = child.communicate(120)
    assert child.returncode == 0, complaints
    saved, loaded = json.loads(said)
    assert saved < MEMORY_BYTES + SLACK_BYTES
    assert loaded < MEMORY_BYTES + SLACK_BYTES
