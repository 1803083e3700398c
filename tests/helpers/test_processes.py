"""Forks share what a session has imported, and nothing else; none of it outlives the session."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

from tests import REPOSITORY
from tests.helpers import processes
from tests.helpers.processes import environment_of
from tests.hub import any_hub

WARN = "import warnings; warnings.warn('old', ResourceWarning); print('lived')"
OWNER = """
import os, time
from tests.helpers.processes import ForkServer
server = ForkServer(environment=os.environ)
child = server.call(time.sleep, 600)
print(server._process.pid, child.pid, flush=True)
time.sleep(600)
"""
PARENT = "import os; print(os.getppid())"
STARTS = """
import subprocess, sys
says = "import sys; sys.exit('transformers' in sys.modules and sys.stdin.read())"
for code in (says, "import os; os.kill(os.getpid(), 9)"):
    print(subprocess.run([sys.executable, "-u", "-c", code], input=b"said").returncode)
"""
CLIENT = """
import json, os, sys
is_imported = "transformers.modeling_utils" in sys.modules
import transformers.dynamic_module_utils as dynamic
from huggingface_hub import constants, hf_api, hf_file_system
print(json.dumps({
    "endpoints": [constants.ENDPOINT, hf_api.api.endpoint, hf_file_system.hffs.endpoint],
    "cache": constants.HF_HUB_CACHE, "modules": dynamic.HF_MODULES_CACHE, "hosts": sorted(constants.HF_URL_HOSTS),
    "parent": os.getppid(), "imported": is_imported,
}))
"""
OFFLINE = "import huggingface_hub; print(huggingface_hub.constants.HF_HUB_OFFLINE)"
NESTED = f"""
import os
from tests.helpers import processes
print(processes.run(["-c", {PARENT!r}], env=os.environ).stdout, end="")
"""


def test_processes_of_a_session_share_a_server(child_environment: dict[str, str]) -> None:
    ours = processes.run(["-c", PARENT], env=child_environment).stdout
    assert processes.run(["-c", NESTED], env=child_environment).stdout == ours
    assert int(ours) != os.getpid()


def test_interpreters_that_a_script_starts_are_forks(tmp_path: Path, child_environment: dict[str, str]) -> None:
    done = processes.run(["-c", STARTS], env=environment_of(tmp_path, child_environment))
    assert (done.stdout, done.stderr) == ("1\n-9\n", "said\n")


def test_clients_of_any_hub_share_a_server_and_each_has_its_own_hub(child_environment: dict[str, str]) -> None:
    others = {name: value for name, value in child_environment.items() if not name.startswith("HF_")}
    places = {"http://127.0.0.1:8": "/dev/null/a", "http://localhost:9": "/dev/null/b"}
    seen = [
        json.loads(processes.run(["-c", CLIENT], env={**others, **any_hub.SETTINGS, **own}).stdout)
        for own in ({"HF_ENDPOINT": endpoint, "HF_HOME": home} for endpoint, home in places.items())
    ]

    hosts = [["127.0.0.1", "hf.co"], ["hf.co", "localhost"]]
    found = [[one[name] for name in ("endpoints", "cache", "modules", "imported")] for one in seen]
    assert found == [[[endpoint] * 3, f"{home}/hub", f"{home}/modules", True] for endpoint, home in places.items()]
    assert [[host for host in one["hosts"] if "huggingface" not in host] for one in seen] == hosts
    assert seen[0]["parent"] == seen[1]["parent"]


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_process_with_settings_of_its_own_has_a_server_that_read_them(
    offline: str, child_environment: dict[str, str]
) -> None:
    environment = {**child_environment, "HF_HUB_OFFLINE": offline}
    # A new interpreter, as a pytest is that another one starts: to both these settings are those of the session.
    code = NESTED.replace(repr(PARENT), repr(OFFLINE))
    if offline == "0":  # its own server, of which this test needs no more
        code = f"from tests.helpers import processes; processes._EVERYTHING = ('huggingface_hub.constants',)\n{code}"
    done = processes.run_fresh(["-c", code], env=environment, check=True, cwd=REPOSITORY)
    assert done.stdout == f"{offline == '1'}\n"


@pytest.mark.parametrize(("options", "outcome"), [("", (0, False)), ("default", (0, True)), ("error", (1, True))])
def test_warnings_are_filtered_as_the_child_is_told(
    options: str, outcome: tuple[int, bool], child_environment: dict[str, str]
) -> None:
    done = processes.run(["-c", WARN], env={**child_environment, "PYTHONWARNINGS": options})
    assert (done.returncode, "ResourceWarning: old" in done.stderr) == outcome


HANGS = "import time\ndef hang():\n    time.sleep(600)\nprint('begun', flush=True)\nhang()"


def test_a_process_that_hangs_is_ended_and_says_where(
    capsys: pytest.CaptureFixture[str], child_environment: dict[str, str]
) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as late:
        processes.run(["-c", HANGS], env=child_environment, timeout=1)
    assert late.value.output == "begun\n"
    assert "Fatal Python error: Aborted" in capsys.readouterr().err
    assert "in hang" in str(late.value.stderr)


def test_a_fork_of_this_process_says_how_it_ended() -> None:
    ends = (lambda: None, lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert [processes.exit_of_fork(end) for end in ends] == [0, 1, -signal.SIGKILL]


def test_a_module_that_can_not_be_imported_is_named(child_environment: dict[str, str]) -> None:
    server = processes.ForkServer("tests.no_such_module", environment=child_environment)
    with pytest.raises(RuntimeError, match=r"No module named 'tests\.no_such_module'"):
        server.call(os.getpid)
    server.close()


def test_a_server_serves_others_beside_a_client_that_waits(child_environment: dict[str, str]) -> None:
    theirs, ours = os.pipe()
    with processes.start(["-c", "input()"], env=child_environment, stdin=theirs) as first:
        os.close(theirs)
        assert processes.run(["-c", "print('second')"], env=child_environment).stdout == "second\n"
        assert first.poll() is None
        os.write(ours, b"\n")
        os.close(ours)
        assert first.wait(60) == 0


def test_servers_and_children_end_with_an_owner_that_is_killed(child_environment: dict[str, str]) -> None:
    with processes.start(["-c", OWNER], env=child_environment, stdout=PIPE) as owner:
        assert owner.stdout is not None
        ends = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(ends) == 2 and select.select(ends, [], [], 0.1)[0] == []
        owner.kill()
        assert all(select.select([end], [], [], 60)[0] for end in ends)
        assert owner.wait(60) == -signal.SIGKILL
    for end in ends:
        os.close(end)
