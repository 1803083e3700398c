"""Checkpoints of more files than the process may open at once."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import forkserver

MANY = """
import os, resource
import torch, hfshard

tensors = {f"t{number:02d}": torch.full((40,), float(number)) for number in range(60)}
hfshard.push_checkpoint  # imports take descriptors, too
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def check(directory, **options):
    loaded = hfshard.load_state_dict(directory, **options)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


hfshard.save_state_dict(tensors, "many", max_shard_size=4096 + 160)
print(len(os.listdir("many")))
for options in ({"verify": "full"}, {"read": "pread"}, {"read": "mmap", "verify": "none"}):
    check("many", **options)
os.environ["HFSHARD_DIRECT"] = "1"
check("many", read="pread", verify="full")
assert hfshard.verify_checkpoint("many").ok
hfshard.push_checkpoint("many", "./hub/many")
check("./hub/many")
hfshard.pull_checkpoint("./hub/many", "pulled")
check("pulled")
for low_disk in (False, True):
    hfshard.reshard_checkpoint("many", "many", max_shard_size=4096 + (320, 640)[low_disk], low_disk=low_disk)
    check("many")
    print(len(os.listdir("many")))
os.mkdir("one")
for name in ("model-00007-of-00060.safetensors", "model.safetensors.index.json"):
    os.link(f"pulled/{name}", f"one/{name}")
print(hfshard.load_state_dict("one", keys="t06", verify="full")["t06"][0])
"""


def test_more_shards_than_the_process_may_open(child_environment: dict[str, str], tmp_path: Path) -> None:
    done = forkserver.run(["-c", MANY], env=child_environment, cwd=tmp_path)

    assert done.stderr == ""
    assert done.stdout == "61\n31\n16\ntensor(6.)\n"
