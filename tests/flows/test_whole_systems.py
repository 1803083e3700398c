"""Systems that lack calls or descriptors, a working directory that changes, an interpreter that exits."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertModel

import hfshard
from hfshard.cli.main import main
from hfshard.disk import direct_io
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.pickles.pickle_file import MemoryFile
from hfshard.shards import shard_file
from hfshard.training import TrainingState
from tests.helpers import processes
from tests.helpers.page_cache import drop
from tests.helpers.tiny_bert import bert, value_of

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

CHILD = """
import logging, sys, torch, hfshard
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions
from hfshard.saving.save_request import SaveRequest
from hfshard.saving.pipeline import save_request
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
torch.set_num_threads(1)
folder, generation, limit = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
tensors = {name: torch.full((8,), generation) for name in ("a", "b", "c")}
options = SaveOptions(max_shard_size=limit)
save_request(SaveRequest(tensors=tensors, options=options, config=b'{"n": %d}\\n' % generation), place_to_save(folder))
"""
SHARDED, SINGLE = 4130, 10**6
"""Limits: a header of 4,096 bytes and one tensor of 32; everything."""


def save_without(
    call: str, folder: Path, environment: dict[str, str], *, generation: int = 2, limit: int = SHARDED
) -> str:
    """Save in a child to which the system says that it lacks a call ("rename:error=ENOSYS"); returns its stderr."""
    calls = call.split(":")[0]
    strace = ["-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={call}"]
    run = processes.run(["-c", CHILD, folder, generation, limit], env=environment, strace=strace)
    assert run.returncode == 0, run.stderr
    return run.stderr


def assert_holds(folder: Path, generation: int) -> None:
    loaded = hfshard.load_state_dict(folder, verify="full")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == dict.fromkeys("abc", [float(generation)] * 8)
    assert (folder / "config.json").read_bytes() == b'{"n": %d}\n' % generation
    expected = {"config.json", *(name for name in os.listdir(folder) if name.startswith("model"))}
    assert set(os.listdir(folder)) == expected
    assert not [name for name in expected if "hfshard" in name]


def old_save(folder: Path, limit: int) -> None:
    (folder / "config.json").write_bytes(b'{"n": 1}\n')
    hfshard.save_state_dict({name: torch.ones(8) for name in "abc"}, folder, max_shard_size=limit)
    assert len(list(folder.glob("*.safetensors"))) == (3 if limit == SHARDED else 1)


NO_RENAME = "rename,renameat,renameat2:error=ENOSYS"


@needs_strace
@pytest.mark.parametrize(
    ("call", "old", "new", "words"),
    [
        (NO_RENAME, None, SHARDED, "does not support rename"),
        (NO_RENAME, SINGLE, SINGLE, "does not support rename"),
        (NO_RENAME, SINGLE, SHARDED, "does not support rename"),
        (NO_RENAME, SHARDED, SINGLE, "does not support rename"),
        (NO_RENAME, SHARDED, SHARDED, "does not support rename"),
        ("flock:error=EOPNOTSUPP", None, SHARDED, "cannot be locked"),
        ("flock:error=ENOLCK", None, SHARDED, "cannot be locked"),
        ("fsync,fdatasync:error=EINVAL", SHARDED, SHARDED, "cannot be flushed"),
        ("link,linkat:error=EPERM", SINGLE, SINGLE, "hard link"),
        ("link,linkat:error=EOPNOTSUPP", SHARDED, SINGLE, "hard link"),
    ],
)
def test_a_file_system_that_lacks_a_call_is_saved_to_with_a_warning(
    call: str, old: int | None, new: int, words: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    if old is not None:
        old_save(tmp_path, old)
    assert words in save_without(call, tmp_path, child_environment, limit=new)
    assert_holds(tmp_path, 2)
    if words == "hard link":  # a single file over another config becomes shards
        assert (tmp_path / "model.safetensors.index.json").exists()


def modes_in(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600), (0o000, 0o666)])
@pytest.mark.parametrize("limit", [SHARDED, SINGLE])
def test_files_get_the_mode_that_the_umask_gives(umask: int, mode: int, limit: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        old_save(tmp_path, limit)
    finally:
        os.umask(before)
    assert modes_in(tmp_path) == {mode}


@pytest.mark.parametrize("old", [SINGLE, SHARDED])
@pytest.mark.parametrize("new", [SINGLE, SHARDED])
def test_a_save_over_another_keeps_its_mode_and_group(old: int, new: int, tmp_path: Path) -> None:
    old_save(tmp_path, old)
    group = next((group for group in os.getgroups() if group != os.getegid()), 12345 if os.geteuid() == 0 else None)
    for path in tmp_path.iterdir():
        path.chmod(0o640)
        if group is not None:
            os.chown(path, -1, group)
    hfshard.save_state_dict({name: torch.zeros(8) for name in "abc"}, tmp_path, max_shard_size=new)
    assert modes_in(tmp_path) == {0o640}
    if group is not None:
        assert {path.stat().st_gid for path in tmp_path.iterdir()} == {group}


@needs_strace
def test_a_copy_in_place_of_a_rename_keeps_the_mode_too(tmp_path: Path, child_environment: dict[str, str]) -> None:
    old_save(tmp_path, SHARDED)
    for path in tmp_path.iterdir():
        path.chmod(0o640)
    save_without(NO_RENAME, tmp_path, child_environment)
    assert modes_in(tmp_path) == {0o640}


FULL_FLUSH = 51
"""F_FULLFSYNC of macOS."""
UNKNOWN = 9999
"""Advice that no kernel knows."""

WAYS: tuple[tuple[str, Any, Any], ...] = (
    ("saved", "mmap", "structure"),
    ("saved", "pread", "full"),
    ("resharded", "mmap", "full"),
    ("resharded", "pread", "structure"),
)
"""What is loaded, and the arguments `read` and `verify`."""


@cache
def tensors() -> dict[str, torch.Tensor]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(2000, 1100, generator=generator),  # 9 MB
        "other": torch.randn(1_000_003, generator=generator, dtype=torch.float64),
        **{f"small.{number}": torch.full((number,), number, dtype=torch.int16) for number in range(50)},
    }


def no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    monkeypatch.setattr(shard_file, "_HUGE_PAGE", UNKNOWN)


def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    open_file, set_flags = os.open, fcntl.fcntl

    def refuse(flags: int) -> None:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def opened(path: str, flags: int, *arguments: int, **keywords: int) -> int:
        refuse(flags)
        return open_file(path, flags, *arguments, **keywords)

    def controlled(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            refuse(argument)
        return set_flags(fd, command, argument)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(fcntl, "fcntl", controlled)


def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POPULATE_READ", "_WILL_NEED", "_HUGE_PAGE"):
        monkeypatch.setattr(shard_file, name, UNKNOWN)


LACKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "huge pages": no_huge_pages,
    "direct I/O": no_direct_io,
    "direct I/O in Python": lambda patch: patch.delattr(os, "O_DIRECT"),
    "populate": lambda patch: patch.setattr(shard_file, "_POPULATE_READ", UNKNOWN),
    "advice": no_advice,
    "mincore": lambda patch: patch.setattr(direct_io.LIBRARY, "mincore", lambda *_arguments: -1),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """File -> bytes of a save, and of a re-shard of it, on this machine as it is."""
    directory = tmp_path_factory.mktemp("expected")
    save_and_reshard(directory)
    return contents(directory)


def save_and_reshard(directory: Path) -> None:
    hfshard.save_state_dict(tensors(), directory / "saved", max_shard_size="9MB")
    drop(*(directory / "saved").glob("*.safetensors"))
    hfshard.reshard_checkpoint(directory / "saved", directory / "resharded", max_shard_size="1GB")
    drop(*(directory / "resharded").glob("*.safetensors"))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.glob("*/*") if path.is_file()}


@pytest.mark.parametrize(
    "lacks", [*([one] for one in LACKS), ["huge pages", "direct I/O in Python", "advice", "mincore"]], ids="+".join
)
def test_whatever_is_missing_the_bytes_are_the_same(
    lacks: list[str],
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    for lack in lacks:
        LACKS[lack](monkeypatch)
    save_and_reshard(tmp_path)
    for name in ("saved", "resharded"):
        assert hfshard.verify_checkpoint(tmp_path / name).ok
    for name, read, verify in WAYS:
        drop(*(tmp_path / name).glob("*.safetensors"))
        found = hfshard.load_state_dict(tmp_path / name, read=read, verify=verify)
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors().items())
    assert contents(tmp_path) == expected
    assert not recwarn.list and not caplog.records


def test_a_device_map_is_made_where_the_system_does_not_tell_free_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(3, cls=BertModel).save_pretrained(tmp_path)
    ask = os.sysconf

    def as_on_macos(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return ask(name)

    monkeypatch.setattr(os, "sysconf", as_on_macos)

    with hfshard.install(quiet=True):
        assert value_of(BertModel.from_pretrained(tmp_path, device_map="auto")) == 3


@pytest.mark.parametrize("is_known", [True, False])
def test_the_disk_is_flushed_where_fsync_does_not_do_it(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, flush = fcntl.fcntl, os.fsync
    flushed: dict[str, int] = {"disk": 0, "file": 0}

    def controlled(fd: int, command: int, argument: Any = 0) -> Any:
        if command != FULL_FLUSH:
            return control(fd, command, argument)
        flushed["disk"] += 1
        if not is_known:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return 0

    def synced(fd: int) -> None:
        flushed["file"] += 1
        flush(fd)

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_FLUSH, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", controlled)
    monkeypatch.setattr(os, "fsync", synced)

    hfshard.save_state_dict({"a": torch.ones(3)}, tmp_path / "out")

    assert flushed["disk"] > 1
    assert flushed["file"] == (0 if is_known else flushed["disk"])


def test_files_in_memory_are_temporary_ones_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    file = MemoryFile(3, lambda begin, target: target.__setitem__(slice(None), b"abc"[begin:]))
    with os.fdopen(file.open(), "rb") as reading:
        assert (len(list(tmp_path.iterdir())), reading.read()) == (1, b"abc")
    del file

    assert list(tmp_path.iterdir()) == []


def test_a_system_without_posix_is_told_so_by_the_import(child_environment: dict[str, str]) -> None:
    code = "import sys; sys.modules['fcntl'] = None\nimport hfshard"

    done = processes.run_fresh(["-c", code], env=child_environment)  # a fork has imported it

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: hfshard needs a POSIX system, such as Linux or macOS")


AT_EXIT = """
import atexit, os, threading
import torch, hfshard

tensors = {f"t{number}": torch.full((1_100_000,), float(number)) for number in range(3)}
hfshard.save_state_dict(tensors, "before", max_shard_size="5MB")
state = hfshard.training.TrainingState(model=torch.nn.Linear(4, 4))
manager = hfshard.CheckpointManager("run")


def check(directory):
    report = hfshard.verify_checkpoint(directory)
    assert report.ok and report.checked_bytes > 13_200_000, report
    loaded = hfshard.load_state_dict(directory, read="pread", verify="full")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def work(name):
    hfshard.save_state_dict(tensors, name, max_shard_size="5MB")
    hfshard.reshard_checkpoint(name, f"{name}-larger", max_shard_size="9MB")
    hfshard.push_checkpoint(f"{name}-larger", f"./hubs/{name}")
    hfshard.pull_checkpoint(f"./hubs/{name}", f"{name}-pulled")
    for directory in ("before", name, f"{name}-pulled"):
        check(directory)
    print(name, len(os.listdir(name)), len(os.listdir(f"{name}-pulled")))


def work_without_threads():
    def refuse(thread):
        raise RuntimeError("can't start new thread")  # as since Python 3.12 at this time

    threading.Thread.start = refuse
    work("unthreaded")


def train():
    for step in (1, 2):
        manager.save(step, state, blocking=False)
    manager.close()
    print("steps", manager.all_steps())


for one in (train, work_without_threads, lambda: work("threaded")):
    atexit.register(one)
"""


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


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param(AT_EXIT, "threaded 4 3\nunthreaded 4 3\nsteps [1, 2]\n", id="while Python exits"),
        pytest.param(MANY, "61\n31\n16\ntensor(6.)\n", id="more shards than the process may open"),
    ],
)
def test_everything_works(program: str, said: str, child_environment: dict[str, str], tmp_path: Path) -> None:
    done = processes.run(["-c", program], env=child_environment, cwd=tmp_path)

    assert (done.stderr, done.stdout) == ("", said)


OLD, NEW = 1.0, 2.0


def values_of(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4,), value) for name in "abc"}


def module(value: float) -> nn.Module:
    made = nn.Module()
    for name, tensor in values_of(value).items():
        made.register_parameter(name, nn.Parameter(tensor))
    return made


def state(value: float) -> TrainingState:
    return TrainingState(model=module(value))


def furnish(place: Path, value: float) -> None:
    """Put into a working directory all that a verb may look for in it."""
    hfshard.save_state_dict(values_of(value), place / "out", max_shard_size=1)
    hfshard.save_state_dict(values_of(value - 0.5), place / "whole")
    hfshard.push_checkpoint(place / "out", DirectoryHub.create(place / "hub").root)
    hfshard.CheckpointManager(place / "run").save(1, state(value))


def listing(place: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(place)): path.read_bytes() if path.is_file() else None for path in place.glob("**/*")}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two working directories: `here`, where the call is made, and `there`, where the process goes meanwhile."""
    place = tmp_path_factory.mktemp("working-directories")
    furnish(place / "here", OLD)
    furnish(place / "there", 9.0)
    return place


def manage(place: str) -> str:
    with hfshard.CheckpointManager("run", push_to_hub="./hub@runs") as manager:
        path = manager.save(2, state(NEW))
        os.chdir(place)
        assert manager.restore(state(0.0), "run/checkpoint-00000002") == 2
    assert DirectoryHub.open(f"{place}/hub").resolve("runs")
    return path


def load_all(place: str) -> dict[str, torch.Tensor]:
    hfshard.load_model(made := module(0.0), "out")
    os.chdir(place)
    assert made.state_dict()["a"][0] == OLD
    return hfshard.load_state_dict("out", verify="full")


def check(loaded: dict[str, torch.Tensor], value: float) -> bool:
    return all(torch.equal(tensor, torch.full((4,), value)) for tensor in loaded.values()) and len(loaded) == 3


VERBS: dict[str, Callable[[str], Any]] = {
    "save_state_dict": lambda _: hfshard.save_state_dict(values_of(NEW), "out", max_shard_size=1),
    "save_model": lambda _: hfshard.save_model(module(NEW), "out", max_shard_size=1),
    "reshard": lambda _: hfshard.reshard_checkpoint("whole", "./out", 1),
    "reshard in place": lambda _: hfshard.reshard_checkpoint("out", "out", "1GB"),
    "reshard with little disk": lambda _: hfshard.reshard_checkpoint("out", "out", 4200, low_disk=True),
    "push": lambda _: hfshard.push_checkpoint("out", "./hub", revision="pushed", commit_message="New"),
    "pull": lambda _: hfshard.pull_checkpoint("hub", "pulled"),
    "load": load_all,
    "verify": lambda _: hfshard.verify_checkpoint("out"),
    "manager": manage,
    "command line": lambda _: main(["reshard", "whole", "out", "--max-shard-size", "4200", "--no-progress"]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_changed_working_directory_leads_nowhere_else(
    verb: str, furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    here, there = tmp_path / "here", tmp_path / "there"
    before = listing(there)
    monkeypatch.chdir(here)
    kept = os.open

    def open_elsewhere(*arguments: Any, **keywords: Any) -> int:
        os.chdir(there)  # as another thread does, from the first file that is opened on
        return kept(*arguments, **keywords)

    monkeypatch.setattr(os, "open", open_elsewhere)
    result = VERBS[verb](str(here))
    monkeypatch.undo()

    assert listing(there) == before
    if verb in ("save_state_dict", "save_model"):
        assert check(hfshard.load_state_dict(here / "out"), NEW)
        assert len(list((here / "out").glob("*.safetensors"))) == 4  # one more, as the old names were taken
    elif verb == "pull":
        assert result == str(here / "pulled")
        assert check(hfshard.load_state_dict(here / "pulled"), OLD)
    elif verb == "load":
        assert check(result, OLD)
    elif verb == "verify":
        assert result.ok
        assert result.checked_bytes
    elif verb == "manager":
        assert result == str(here / "run" / "checkpoint-00000002")
    elif verb == "push":
        assert DirectoryHub.open(here / "hub").resolve("pushed")
    else:
        assert check(hfshard.load_state_dict(here / "out"), OLD if "in place" in verb or "disk" in verb else OLD - 0.5)
        assert hfshard.verify_checkpoint(here / "out").ok


def test_absolute_paths_need_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    furnish(tmp_path / "new", OLD)
    furnish(tmp_path / "new", NEW)
    hfshard.reshard_checkpoint(tmp_path / "new" / "out", tmp_path / "new" / "other", "1GB")
    pulled = hfshard.pull_checkpoint(str(tmp_path / "new" / "hub"), tmp_path / "pulled", verify="full")
    with hfshard.CheckpointManager(tmp_path / "new" / "run") as manager:
        assert manager.restore_latest(state(0.0)) == 1

    assert check(hfshard.load_state_dict(pulled, verify="full", read="pread"), NEW)
    assert hfshard.verify_checkpoint(tmp_path / "new" / "other").ok
    assert main(["inspect", pulled]) == 0
    with pytest.raises(hfshard.errors.InvalidPathError, match="save_directory='out' is a relative path, but the"):
        hfshard.save_state_dict(values_of(NEW), "out")


def test_a_tilde_is_a_name_as_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)

    hfshard.save_state_dict(values_of(OLD), "~/out")
    hfshard.save_model(module(OLD), Path("~/model"))
    hfshard.reshard_checkpoint("~/out", "~/sharded", 1)
    hfshard.push_checkpoint("~/sharded", "~/hub")

    assert check(hfshard.load_state_dict("~/model"), OLD)
    assert hfshard.verify_checkpoint("~/sharded").ok
    assert hfshard.pull_checkpoint("~/hub", "~/pulled") == str(here / "~" / "pulled")
    assert hfshard.CheckpointManager("~/run").root == str(here / "~" / "run")
    assert main(["verify", "~/pulled"]) == main(["inspect", "~/pulled"]) == 0
    assert sorted(path.name for path in (here / "~").iterdir()) == ["hub", "model", "out", "pulled", "sharded"]
    assert not list(home.iterdir())
