"""What goes up: readers that check what they read, and what a repo's .gitignore must not keep out."""

from __future__ import annotations

import hashlib
import io
import random
from pathlib import Path

import pytest

from hfshard.disk.byte_source import FileSource
from hfshard.errors import IntegrityError
from hfshard.hub.upload import CheckedReader
from tests.helpers import processes
from tests.servers.hub.hub_server import HubServer

pytestmark = pytest.mark.compat

RAW = random.Random(7).randbytes(1_000_003)
PUSH = """
import torch, hfshard
hfshard.save_state_dict({"a": torch.ones(4000), "b": torch.ones(4001)}, "out", max_shard_size="20KB")
print(hfshard.push_checkpoint("out", "org/m").is_new)
"""
AT_EXIT = """
import atexit
import torch, hfshard

tensors = {name: torch.full((4000,), float(number)) for number, name in enumerate("abc")}
hfshard.save_state_dict(tensors, "out", max_shard_size="20KB")
hfshard.push_checkpoint  # imported before the exit, as huggingface_hub must be


def work():
    print(hfshard.push_checkpoint("out", "org/m").is_new)
    loaded = hfshard.load_state_dict("org/m", verify="full")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    print(sorted(hfshard.load_state_dict("org/m", keys="c", ranges=True)))


atexit.register(work)
"""


def reader_of(path: Path, raw: bytes, counted: list[int]) -> CheckedReader:
    """A reader of a file that holds `raw`, announced as RAW."""
    path.write_bytes(raw)
    return CheckedReader("name", FileSource(str(path), len(RAW)), hashlib.sha256(RAW).hexdigest(), counted.append)


def test_reads_and_seeks_like_a_file_and_counts_each_byte_once(tmp_path: Path) -> None:
    counted: list[int] = []
    reader, plain, choice = reader_of(tmp_path / "f", RAW, counted), io.BytesIO(RAW), random.Random(1)
    for _ in range(500):
        if choice.random() < 0.3:
            position = choice.choice([0, plain.tell(), choice.randrange(len(RAW)), len(RAW)])
            assert reader.seek(position) == plain.seek(position)
        size = choice.choice([1, 4096, 300_000])
        assert reader.read(size) == plain.read(size)
        assert reader.tell() == plain.tell()
    reader.seek(0)
    assert reader.read() == RAW
    assert sum(counted) == len(RAW)


@pytest.mark.parametrize("at", [0, 500_000, len(RAW) - 1])
def test_damaged_file_never_gives_its_last_bytes(at: int, tmp_path: Path) -> None:
    damaged = bytearray(RAW)
    damaged[at] ^= 1
    reader = reader_of(tmp_path / "f", bytes(damaged), [])
    given = 0
    with pytest.raises(IntegrityError, match="'name' was not pushed: its bytes do not match its checksum") as raised:
        while block := reader.read(65_536):
            given += len(block)
    assert raised.value.path == "name"
    assert given == 983_040  # 15 blocks of 64 KiB; the 16th would end the file


def test_damage_is_found_when_parts_are_sent_one_by_one_and_one_is_sent_again(tmp_path: Path) -> None:
    damaged = bytearray(RAW)
    damaged[700_000] ^= 1
    for raw, is_whole in ((RAW, True), (bytes(damaged), False)):
        reader = reader_of(tmp_path / "f", raw, [])
        for start in (0, 400_000, 400_000, 0, 400_000):  # parts of 400,000, two of them sent again
            reader.seek(start)
            assert len(reader.read(400_000)) == 400_000
        reader.seek(800_000)
        if is_whole:
            assert reader.read(400_000) == RAW[800_000:]
        else:
            with pytest.raises(IntegrityError):
                reader.read(400_000)


def test_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="it was truncated while it was being read"):
        reader_of(tmp_path / "f", RAW[:-1], []).read()


def test_gitignore_of_the_repo_does_not_make_half_a_checkpoint(hub_server: HubServer, tmp_path: Path) -> None:
    hub_server.create_repo("org/m")
    before = hub_server.repo("org/m").commit({".gitignore": b"*-00002-*\n"}, "Ignore")
    environment = hub_server.environment(home=tmp_path / "home")

    done = processes.run(["-c", PUSH], env=environment, cwd=tmp_path)

    assert done.returncode == 1
    assert "HubError: The .gitignore of 'org/m' excludes 'model-00002-of-00002.safetensors'" in done.stderr
    assert hub_server.repo("org/m").commits()[0].oid == before


def test_push_and_pull_work_while_python_exits(hub_server: HubServer, tmp_path: Path) -> None:
    hub_server.create_repo("org/m")
    environment = hub_server.environment(home=tmp_path / "home")

    done = processes.run(["-c", AT_EXIT], env=environment, cwd=tmp_path)

    assert "Exception" not in done.stderr
    assert done.stdout == "True\n['c']\n"
