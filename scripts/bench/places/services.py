"""Object stores on this machine, those of the test suite: moto's S3, and fake-gcs-server, which is compiled."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
BUCKET = "bench"
Body = bytes | memoryview | None

_PROGRAM = """
import sys
from tests.stores.services.kinds import ENDS, SERVICES
service = SERVICES[sys.argv[1]]
print(service.lacks() and "!" + service.lacks() or service.start(), flush=True)
sys.stdin.read()
ENDS.close()
"""

_ENVIRONMENT = {
    "AWS_REGION": "us-east-1",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks over gRPC, which the service does not speak
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
"""What peers need beside what the service's own tools do."""


@contextmanager
def running(schemes: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start services, each in a process of its own that keeps everything in memory, with an empty bucket.

    Args:
        schemes: "s3" and "gs", with the variables that hold their URLs for the peers here.

    Yields:
        What the clients need in their environment. A service that can't be had is not in it.
    """
    with ExitStack() as stack:
        environment = dict(_ENVIRONMENT)
        for scheme, variable in schemes.items():
            url, more = stack.enter_context(_one(scheme))
            if url:
                environment |= {**more, variable: url}
        yield environment


@contextmanager
def _one(scheme: str) -> Iterator[tuple[str, dict[str, str]]]:
    command = [sys.executable, "-c", _PROGRAM, scheme]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().strip()
            if not url.startswith("http"):
                yield "", {}
                return
            port = port_of(url)
            if scheme == "gs":
                ask(port, "POST", "/storage/v1/b?project=bench", json.dumps({"name": BUCKET}).encode())
            else:
                ask(port, "PUT", f"/{BUCKET}")
            from tests.stores.services.kinds import SERVICES

            yield url, dict(SERVICES[scheme].environment(url))
        finally:
            server.terminate()


def port_of(url: str) -> int:
    """The port of a service's URL."""
    return int(url.rpartition(":")[2])


def ask(port: int, method: str, path: str, body: Body = None, headers: Mapping[str, str] | None = None) -> int:
    """Send one request, and return the status."""
    return answer_of(port, method, path, body, headers)[0]


def answer_of(
    port: int, method: str, path: str, body: Body = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """Send one request, and return the status, the body and the headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def listed(scheme: str, prefix: str) -> list[tuple[str, int]]:
    """Names and sizes of the objects below a prefix."""
    if scheme == "s3":
        import boto3

        return [(found.key, found.size) for found in boto3.resource("s3").Bucket(BUCKET).objects.filter(Prefix=prefix)]
    endpoint = os.environ["STORAGE_EMULATOR_HOST"]
    with urllib.request.urlopen(f"{endpoint}/storage/v1/b/{BUCKET}/o?prefix={prefix}&maxResults=5000") as answer:
        return [(found["name"], int(found["size"])) for found in json.load(answer).get("items", [])]


@cache
def signed_path(name: str) -> str:
    """The path and query with which anybody may read an object of S3."""
    import boto3

    url = boto3.client("s3").generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": name})
    return "/" + str(url).split("/", 3)[3]


def clear(scheme: str, prefix: str) -> None:
    """Delete what lies below a prefix, so that the service's memory holds one save at a time."""
    if scheme == "s3":
        import boto3

        boto3.resource("s3").Bucket(BUCKET).objects.filter(Prefix=prefix).delete()
        return
    port = port_of(os.environ["STORAGE_EMULATOR_HOST"])
    for name, _ in listed(scheme, prefix):
        ask(port, "DELETE", f"/storage/v1/b/{BUCKET}/o/{urllib.parse.quote(name, safe='')}")
