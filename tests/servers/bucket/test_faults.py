"""What goes wrong between hf_xet and the bucket server, and what hf_xet makes of it: facts that clients rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.hub.hub_server import Fault, HubServer
from tests.servers.stock_client import kinds, run

pytestmark = pytest.mark.compat


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        server.create_bucket("org/b")
        yield server


BATCHES = """
from huggingface_hub.errors import HfHubHTTPError
api = HfApi()
result = []
for number in range(4):
    try:
        api.batch_bucket_files("org/b", add=[(b"%d" % number, f"{number}/{name}") for name in "abc"])
        result.append(None)
    except HfHubHTTPError as error:
        failures = [one["path"] for one in getattr(error, "failures", [])]
        result.append([type(error).__name__, error.response.status_code, failures])
"""


def test_batch_that_ends_half_way_keeps_what_it_did(hub: HubServer, tmp_path: Path) -> None:
    hub.fail(Fault(match="bucket_batch", kind="partial", operations=2, status=200))
    hub.fail(Fault(match="bucket_batch", kind="partial", operations=0, status=200))
    hub.fail(Fault(match="bucket_batch", kind="partial", operations=1, status=409))
    hub.fail(Fault(match="bucket_batch", kind="partial", operations=1, status=0))  # the client asks again
    outcomes = run(hub, tmp_path / "home", BATCHES, has_xet=True)

    assert outcomes == [
        ["BucketBatchError", 200, ["0/c"]],
        ["BucketBatchError", 422, ["1/a", "1/b", "1/c"]],
        ["HfHubHTTPError", 409, []],
        None,
    ]
    assert sorted(hub.bucket("org/b").files()) == ["0/a", "0/b", "2/a", "3/a", "3/b", "3/c"]


STREAMS = """
import hf_xet
session, headers = hf_xet.XetSession(), {"authorization": "Bearer hf_write"}
bucket = f"{os.environ['HF_ENDPOINT']}/api/buckets/org/b"
def attempt(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]
def access(scope):
    return {"token_refresh_url": f"{bucket}/xet-{scope}-token", "token_refresh_headers": headers}
def upload(data, first=None):
    with session.new_upload_commit(**access("write")) as commit:
        stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
        if first is not None:
            first(commit)
        for start in range(0, len(data), 1_000_000):
            stream.write(data[start : start + 1_000_000])
        return stream.finish().xet_info
def group():
    return session.new_download_stream_group(**access("read"))
def download(info, **bounds):
    return b"".join(group().download_stream(info, **bounds))
"""

HEALED = (
    STREAMS
    + """
data = os.urandom(3_000_000)
info = upload(data)
result = [info.file_size, download(info) == data, download(info, start=70_000, end=2_000_001) == data[70_000:2_000_001]]
"""
)


def test_hf_xet_tries_again_what_fails_for_a_while(hub: HubServer, tmp_path: Path) -> None:
    hub.fail(Fault(match="GET xet_token", kind="status", status=500))
    hub.fail(Fault(match="chunk_query", kind="status", status=500))
    hub.fail(Fault(match="xorb_put", kind="drop", after_bytes=1000, how="rst"))
    hub.fail(Fault(match="xorb_put", kind="status", status=429, retry_after=600))  # it does not wait for so long
    hub.fail(Fault(match="xorb_put", kind="lost_answer"))
    hub.fail(Fault(match="shard_put", kind="lost_answer"))
    hub.fail(Fault(match="reconstruction", kind="status", status=503))
    hub.fail(Fault(match="xorb_get", kind="expired"))
    hub.fail(Fault(match="xorb_get", kind="truncate", after_bytes=100_000))
    assert run(hub, tmp_path / "home", HEALED, has_xet=True) == [3_000_000, True, True]

    assert [one for one in kinds(hub.log) if one != "chunk_query"] == [
        "xet_token", "xet_token", "xorb_grant", "xorb_put", "xorb_put", "xorb_put", "xorb_put",
        "shard_put", "shard_put",
        "xet_token", "reconstruction", "reconstruction", "xorb_get", "reconstruction", "xorb_get", "xorb_get",
        "xet_token", "reconstruction", "xorb_get",
    ]  # fmt: skip
    assert hub.cas_counts.xorbs == 1


SPOILED = (
    STREAMS
    + """
def abort_another(commit):
    commit.start_upload_stream().abort()
info = upload(b"good" * 10)
spoiled = group()
attempt(lambda: list(spoiled.download_stream(info, start=100)))
result = {
    "aborted": attempt(upload, b"x", abort_another),
    "view": attempt(upload, memoryview(b"x")),
    "empty": upload(b"").hash,
    "short": download(hf_xet.XetFileInfo(info.hash, 7)).decode(),
    "beyond": download(info, start=36, end=1000).decode(),
    "unknown": (attempt(download, hf_xet.XetFileInfo("1" * 64, 7)) or ["ConnectionError"])[0],  # b"" now and then
    "after an error": attempt(lambda: b"".join(spoiled.download_stream(info)))[0],
}
"""
)


def test_one_aborted_stream_spoils_its_commit_and_views_are_refused(hub: HubServer, tmp_path: Path) -> None:
    seen: dict[str, Any] = run(hub, tmp_path / "home", SPOILED, has_xet=True)
    assert seen == {
        "aborted": ["RuntimeError", "Internal error: stream upload not finished before commit"],
        "view": ["TypeError", "'memoryview' object is not an instance of 'bytes'"],
        "empty": "0" * 64,
        "short": "goodgoo",
        "beyond": "good",
        "unknown": "ConnectionError",
        "after an error": "RuntimeError",
    }


CORRUPT = STREAMS + "data = os.urandom(100_000)\nresult = [one == data for one in [download(upload(data))]]\n"


def test_hf_xet_does_not_see_a_flipped_bit(hub: HubServer, tmp_path: Path) -> None:
    hub.fail(Fault(match="xorb_get", kind="corrupt", offset=50_000))
    assert run(hub, tmp_path / "home", CORRUPT, has_xet=True) == [False]


REFUSED = (
    STREAMS
    + """
info = upload(b"mine")
writes = bucket.replace("org/b", "org/other")
result = []
for bucket in (bucket, writes):
    for token in ("hf_write", "hf_read", "hf_wrong"):
        headers = {"authorization": f"Bearer {token}"}
        outcome = attempt(upload, b"mine")
        result.append(outcome[1].partition("(")[2].partition(")")[0] if isinstance(outcome, list) else "")
"""
)


def test_hf_xet_tells_refusals_only_by_a_text(hub: HubServer, tmp_path: Path) -> None:
    refused = run(hub, tmp_path / "home", REFUSED, has_xet=True)
    assert refused == ["", "403 Forbidden", "401 Unauthorized", "404 Not Found", "404 Not Found", "401 Unauthorized"]
