"""The services of this test run: whoever asks first starts one, all processes of the run use it, and it ends with it.

Of S3, whose server answers one request at a time, every other worker uses a second one. A keeper process holds the
service and watches the process that began the session; it tells the URL to all who connect to a socket whose name is
made of the session, the scheme and the number of the service.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
import traceback
from functools import cache

from tests import REPOSITORY
from tests.helpers import processes
from tests.servers.asking import UPSTREAM_SECONDS
from tests.servers.stores.buckets import BUCKETS
from tests.servers.stores.kinds import ENDS, SERVICES, START_SECONDS

_ERROR = "error: "
_LISTEN_SECONDS = 60.0
_SERVICES = {"s3": 2}
"""How many of one scheme serve a session; else one."""


@cache
def url_of(scheme: str) -> str:
    """The URL of a service, started if need be.

    Raises:
        RuntimeError: It does not start.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    address = f"\0{processes.session()}-{scheme}-{worker % _SERVICES.get(scheme, 1)}"
    with processes.listening(address) as listener:
        if listener is not None:
            owner, _, _ = processes.session().partition("-")
            command = [sys.executable, "-m", __name__, scheme, owner, str(listener.fileno())]
            subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests
            ).returncode = 0  # nobody waits for it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
        keeper.settimeout(START_SECONDS + UPSTREAM_SECONDS)
        _connect(keeper, address)
        url = keeper.recv(1 << 16).decode()
    if not url or url.startswith(_ERROR):
        raise RuntimeError(f"The test service of {scheme}:// does not start. {url}")
    return url


def _connect(keeper: socket.socket, address: str) -> None:
    """Connect to a keeper, whose socket may have a name already and not listen yet."""
    deadline = time.monotonic() + _LISTEN_SECONDS
    while True:
        try:
            return keeper.connect(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _keep(scheme: str, owner: int, listener: socket.socket) -> None:
    """Start a service and tell everybody its URL, or why there is none, until the owner ends."""
    owner_fd = os.pidfd_open(owner)
    waited = [listener.fileno(), owner_fd]
    try:
        answer = SERVICES[scheme].start()
        BUCKETS[scheme](answer).create()
    except Exception:
        answer = _ERROR + traceback.format_exc()
    while listener.fileno() in select.select(waited, [], [])[0]:
        client, _ = listener.accept()
        with client:
            client.send(answer.encode())


if __name__ == "__main__":
    _, given_scheme, given_owner, given_listener = sys.argv
    _keep(given_scheme, int(given_owner), socket.socket(fileno=int(given_listener)))
    ENDS.close()
    os._exit(0)
