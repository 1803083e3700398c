"""The harness itself: it reads traces rightly, and stops a process where it is told to."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.sweeps.child import Aside, Call, has_strace, parse_trace, traced
from tests.sweeps.power import Effect, effect_of

TRACE = """\
101   openat(AT_FDCWD</tmp>, "/s/out/a", O_WRONLY|O_CREAT|O_EXCL|O_CLOEXEC, 0666) = 3</s/out/a>
101   openat(AT_FDCWD</tmp>, "/s/out/b", O_RDONLY|O_CLOEXEC) = 4</s/out/b>
102   write(3</s/out/a>, "abc"..., 3)   = 3
101   write(1</dev/null>, "x", 1)       = 1
101   write(3</s/out/a>, "abc"..., 3 <unfinished ...>
101   <... write resumed>)              = 3
101   --- SIGINT {si_signo=SIGINT, si_code=SI_KERNEL} ---
101   fsync(3</s/out/a>)                = -1 EIO (Input/output error) (INJECTED)
101   unlinkat(5</s/out>, "a", 0)       = 0
101   mkdir("/s/outside", 0777)         = 0
101   +++ exited with 0 +++
"""


def test_calls_are_counted_by_name_and_thread() -> None:
    calls = parse_trace(TRACE)
    assert [(call.thread, call.name, call.k) for call in calls] == [
        (0, "openat", 1),
        (0, "openat", 2),
        (1, "write", 1),
        (0, "write", 1),
        (0, "write", 2),
        (0, "fsync", 1),
        (0, "unlinkat", 1),
        (0, "mkdir", 1),
    ]


def test_only_calls_that_change_the_directory_are_points() -> None:
    changing = [call.name for call in parse_trace(TRACE) if call.changes(Path("/s/out"))]
    assert changing == ["openat", "write", "write", "fsync", "unlinkat"]


@pytest.mark.parametrize(
    ("name", "text", "effect"),
    [
        ("openat", 'AT_FDCWD</t>, "/s/a", O_WRONLY|O_CREAT|O_EXCL, 0666) = 3</s/a>', Effect("create", "/s/a")),
        ("openat", 'AT_FDCWD</t>, "/s/a", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3</s/a>', Effect("open", "/s/a")),
        ("openat", 'AT_FDCWD</t>, "/s/a", O_RDONLY|O_CLOEXEC) = 3</s/a>', None),
        ("rename", '"/s/a", "/s/b") = 0', Effect("rename", "/s/a", "/s/b")),
        ("renameat2", '4</s>, "a", 5</t>, "b", RENAME_NOREPLACE) = 0', Effect("rename", "/s/a", "/t/b")),
        ("linkat", 'AT_FDCWD</s>, "a", AT_FDCWD</s>, "/t/b", 0) = 0', Effect("link", "/s/a", "/t/b")),
        ("unlinkat", '4</s>, "a", AT_REMOVEDIR) = 0', Effect("rmdir", "/s/a")),
        ("unlink", '"/s/a") = -1 ENOENT (No such file or directory)', None),
        ("fsync", "4</s>) = 0", Effect("sync", "/s")),
        ("rename", '"/s/a", "/s/b") = ?', None),
    ],
)
def test_the_effect_of_a_call(name: str, text: str, effect: Effect | None) -> None:
    assert effect_of(Call(0, name, 1, text)) == effect


@pytest.mark.skipif(not has_strace(), reason="NO STRACE: the harness can't be tried here. Install strace.")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestStops:
    def _work(self, directory: Path) -> None:
        for name in ("a", "b", "c"):
            with open(directory / name, "w") as file:
                file.write(name)
        os.rename(directory / "a", directory / "d")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        (tmp_path / "x").mkdir()
        return tmp_path / "x"

    def test_a_recorded_run_ends_by_itself(self, place: Path, tmp_path: Path) -> None:
        run = traced(lambda: self._work(place), tmp_path / "trace")
        assert run.status == "saved"
        made = [call.name for call in run.calls if call.changes(place)]
        assert made == ["openat", "write", "openat", "write", "openat", "write", "rename"]

    @pytest.mark.parametrize(
        ("inject", "status", "report", "left"),
        [
            ("write:signal=KILL:when=2", "killed", "", {"a": "a", "b": ""}),  # before the call
            ("rename:signal=INT:when=1", "raised", "^KeyboardInterrupt(:|$)", {"b": "b", "c": "c", "d": "a"}),  # after
            ("rename:error=ENOSPC:when=1", "raised", "No space left on device", {"a": "a", "b": "b", "c": "c"}),
        ],
    )
    def test_a_run_is_stopped_at_its_call(
        self, inject: str, status: str, report: str, left: dict[str, str], place: Path, tmp_path: Path
    ) -> None:
        run = traced(lambda: self._work(place), tmp_path / "trace", inject)
        assert run.status == status
        assert re.search(report, run.report)
        assert {path.name: path.read_text() for path in place.iterdir()} == left


def test_what_is_done_aside_stays_there_and_is_remembered() -> None:
    aside = Aside()
    first = aside.call(os.getpid)
    assert first not in (os.getpid(), Aside().call(os.getpid))
    assert aside.call(os.getpid) == first
    before = aside.call(os.umask, 0o27)
    assert aside.call(os.umask, before) == 0o27
    here = os.umask(before)
    assert here == before


def test_what_fails_or_dies_aside_is_told() -> None:
    aside = Aside()
    with pytest.raises(RuntimeError, match=r"FileNotFoundError: .*'/no/such'"):
        aside.call(os.stat, "/no/such")
    with pytest.raises(RuntimeError, match="died or hung: wait status 1536"):
        aside.call(os._exit, 6)
    assert aside.call(os.getpid) != os.getpid()
