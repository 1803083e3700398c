"""Which processes of this machine have ended."""

from __future__ import annotations

import json
import os
import signal

from hfshard.distributed.liveness.process_record import has_ended, own_record


def test_a_process_has_ended_before_its_parent_knows_and_one_that_is_stopped_has_not() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, own_record())
        signal.pause()
    record = os.read(reader, 1000)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)

    assert not has_ended(record)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(record)
    os.waitpid(pid, 0)
    assert has_ended(record)


def test_who_is_elsewhere_or_unknown_has_not_ended() -> None:
    machine, pid, started = json.loads(own_record())

    assert not has_ended(own_record())
    assert not has_ended(b"")
    assert not has_ended(None)
    assert not has_ended(json.dumps([["elsewhere", *machine[1:]], pid, "0"]).encode())
    assert has_ended(json.dumps([machine, pid, f"{started}0"]).encode())
