"""Which processes of this machine have ended."""

from __future__ import annotations

import json
import os
import signal

from hfshard.distributed.liveness.process_record import has_ended, own_record, runs_here


def test_a_process_has_ended_before_its_parent_knows_and_one_that_is_stopped_has_not() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, own_record())
        signal.pause()
    record = os.read(reader, 1000)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)

    assert (has_ended(record), runs_here(record)) == (False, True)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (has_ended(record), runs_here(record)) == (True, False)
    os.waitpid(pid, 0)
    assert (has_ended(record), runs_here(record)) == (True, False)


def test_who_is_elsewhere_or_unknown_has_not_ended() -> None:
    machine, pid, started = json.loads(own_record())

    assert runs_here(own_record())
    assert not has_ended(b"")
    assert not has_ended(None)
    elsewhere = json.dumps([["elsewhere", *machine[1:]], pid, "0"]).encode()
    assert (has_ended(elsewhere), runs_here(elsewhere)) == (False, False)
    assert has_ended(json.dumps([machine, pid, f"{started}0"]).encode())
