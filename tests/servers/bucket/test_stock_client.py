"""Stock huggingface_hub and hf_xet work with buckets of the test Hub, of both ends of what is supported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers.hub.hub_server import HubServer
from tests.servers.stock_client import WEIGHTS, kinds, run

pytestmark = pytest.mark.compat

ROUND_TRIP = """
api = HfApi()
url = api.create_bucket("org/b")
api.create_bucket("org/b", exist_ok=True)
files = {"a/1.txt": b"one", "a/b/2.bin": b"2" * 600_000, "empty": b"", "ab": b"x"}
api.batch_bucket_files("org/b", add=[(content, path) for path, content in files.items()])
def names(**options):
    return [entry.path for entry in api.list_bucket_tree("org/b", **options)]
api.download_bucket_files("org/b", [(path, home / path) for path in files])
head = api.get_bucket_file_metadata("org/b", "a/1.txt")
first = next(iter(api.get_bucket_paths_info("org/b", ["a/1.txt", "nothing"])))
api.batch_bucket_files("org/b", delete=["ab"])
info = api.bucket_info("org/b")
result = {
    "url": url.bucket_id,
    "all": names(recursive=True),
    "top": names(),
    "prefix": names(prefix="a"),
    "folder": names(prefix="a/"),
    "head": [head.size, head.xet_file_data.file_hash == first.xet_hash],
    "downloaded": {path: (home / path).read_bytes() == content for path, content in files.items()},
    "info": [info.id, info.private, info.size, info.total_files],
}
"""


@dataclass(frozen=True)
class RoundTrip:
    """What a client did with a bucket, and what it saw."""

    hub: HubServer
    seen: dict[str, Any]


@pytest.fixture(scope="module")
def round_trip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoundTrip]:
    """One client that does a bit of everything."""
    root = tmp_path_factory.mktemp("buckets")
    with HubServer(root / "hub", page_size=2) as hub:
        yield RoundTrip(hub, run(hub, root / "home", ROUND_TRIP, has_xet=True))


def test_files_that_are_added_are_listed_and_downloaded(round_trip: RoundTrip) -> None:
    assert round_trip.seen == {
        "url": "org/b",
        "all": ["a/1.txt", "a/b/2.bin", "empty"],
        "top": ["a", "empty"],
        "prefix": ["a/1.txt", "a/b"],
        "folder": ["a/1.txt", "a/b"],
        "head": [3, True],
        "downloaded": {"a/1.txt": True, "a/b/2.bin": True, "empty": True, "ab": True},
        "info": ["org/b", False, 600_003, 3],
    }


def test_server_has_what_the_client_added(round_trip: RoundTrip) -> None:
    bucket = round_trip.hub.bucket("org/b")
    expected = {"a/1.txt": b"one", "a/b/2.bin": b"2" * 600_000, "empty": b""}
    assert {path: bucket.read(path) for path in bucket.files()} == expected


def test_bytes_go_up_once_in_a_xorb_and_are_counted(round_trip: RoundTrip) -> None:
    counted = Counter(kinds(round_trip.hub.log))
    assert (counted["xorb_put"], counted["shard_put"], counted["bucket_batch"]) == (1, 1, 2)
    counts = round_trip.hub.cas_counts
    assert counts.xorbs == 1
    assert counts.file_bytes == 600_004
    assert counts.xorb_bytes < counts.chunk_bytes < counts.file_bytes


PUSH = """
from huggingface_hub.utils import disable_progress_bars
api = HfApi()
api.create_repo("org/model")
folder = home / "folder"
folder.mkdir()
(folder / "config.json").write_text("{}")
(folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
first = api.upload_folder(repo_id="org/model", folder_path=folder)
again = api.upload_file(repo_id="org/model", path_or_fileobj=bytes(range(256)) * 1000, path_in_repo="copy.safetensors")
head = get_hf_file_metadata(hf_hub_url("org/model", "model.safetensors"))
tree = {one.path: one.xet_hash for one in api.list_repo_tree("org/model")}
path = hf_hub_download("org/model", "model.safetensors")
result = {
    "head": head.xet_file_data.file_hash == tree["model.safetensors"] == tree["copy.safetensors"],
    "regular": tree["config.json"],
    "pulled": Path(path).read_bytes() == bytes(range(256)) * 1000,
}
"""


def test_repositories_take_and_give_files_through_xet(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub", has_xet=True) as hub:
        seen = run(hub, tmp_path / "home", PUSH, has_xet=True)
        counted = Counter(kinds(hub.log))
        repo = hub.repo("org/model")
        stored = {path: repo.read(path) for path in repo.files() if path != ".gitattributes"}

    assert seen == {"head": True, "regular": None, "pulled": True}
    assert stored == {"config.json": b"{}", "model.safetensors": WEIGHTS, "copy.safetensors": WEIGHTS}
    assert (counted["lfs_batch"], counted["lfs_put"], counted["storage_get"], counted["xorb_put"]) == (0, 0, 0, 1)


AGAIN = """
import hf_xet
bucket = f"{os.environ['HF_ENDPOINT']}/api/buckets/org/b"
def upload(data):
    session = hf_xet.XetSession()
    headers = {"authorization": "Bearer hf_write"}
    access = {"token_refresh_url": f"{bucket}/xet-write-token", "token_refresh_headers": headers}
    with session.new_upload_commit(**access) as commit:
        stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
        stream.write(data)
        metrics = stream.finish().dedup_metrics
    return [metrics.new_bytes, metrics.deduped_bytes]
data = bytes(range(256)) * 4096
data = b"".join(bytes([n % 251]) * 3 + data[n * 7 : n * 7 + 997] for n in range(1000))
result = upload(data)
"""


def test_chunks_that_any_client_has_sent_are_not_sent_again(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as hub:
        hub.create_bucket("org/b")
        assert run(hub, tmp_path / "home", AGAIN, has_xet=True) == [1_000_000, 0]
        assert run(hub, tmp_path / "home", AGAIN, has_xet=True) == [0, 1_000_000]  # it knows itself
        assert hub.count("chunk_query") == 1
        assert run(hub, tmp_path / "another", AGAIN, has_xet=True) == [0, 1_000_000]  # it asks
        assert (hub.count("chunk_query"), hub.count("xorb_put"), hub.count("shard_put")) == (2, 1, 3)
        assert hub.cas_counts.chunk_bytes == 1_000_000
        assert hub.cas_counts.file_bytes == 3_000_000


HIDDEN = """
from huggingface_hub.errors import HfHubHTTPError
api = HfApi()
def refused(function, *args, **kwargs):
    try:
        return [] if function(*args, **kwargs) is None else ["done"]
    except HfHubHTTPError as error:
        return [type(error).__name__, error.response.status_code]
api.create_bucket("org/hidden", private=True)
api.create_bucket("mine")
reader, stranger = HfApi(token="hf_member"), HfApi(token=False)
result = {
    "mine": api.bucket_info("alice/mine").private,
    "member": reader.bucket_info("org/hidden").private,
    "stranger": refused(stranger.bucket_info, "org/hidden"),
    "gone": refused(api.bucket_info, "org/nothing"),
    "again": refused(api.create_bucket, "org/hidden"),
    "batch": refused(reader.batch_bucket_files, "org/hidden", delete=["a"]),
    "create": refused(reader.create_bucket, "org/new"),
    "missing": refused(api.get_bucket_file_metadata, "org/hidden", "a"),
}
"""


def test_buckets_are_seen_and_changed_by_those_who_may(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as hub:
        assert run(hub, tmp_path / "home", HIDDEN, has_xet=True) == {
            "mine": False,
            "member": True,
            "stranger": ["BucketNotFoundError", 401],
            "gone": ["BucketNotFoundError", 404],
            "again": ["HfHubHTTPError", 409],
            "batch": ["HfHubHTTPError", 403],
            "create": ["HfHubHTTPError", 403],
            "missing": ["RemoteEntryNotFoundError", 404],
        }


VERSIONS = """
import random, hf_xet
bucket = f"{os.environ['HF_ENDPOINT']}/api/buckets/org/b"
headers = {"authorization": "Bearer hf_write"}
def access(scope):
    return {"token_refresh_url": f"{bucket}/xet-{scope}-token", "token_refresh_headers": headers}
def upload(session, data):
    with session.new_upload_commit(**access("write")) as commit:
        stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
        stream.write(data)
        return stream.finish().xet_info
def download(session, info, start, end):
    return b"".join(session.new_download_stream_group(**access("read")).download_stream(info, start=start, end=end))
old = random.Random(1).randbytes(6_000_000)
new = old[:2_500_000] + random.Random(2).randbytes(1_000_000) + old[3_500_000:]
result = []
for name, value in [("shard_api_version", 1), ("reconstruction_api_version", 1), ("enable_multirange_fetching", True)]:
    session = hf_xet.XetSession(hf_xet.XetConfig().with_config(f"client.{name}", value))
    upload(session, old)
    info = upload(session, new)
    bounds = [(0, None), (2_400_001, 3_700_001)]
    result.append([download(session, info, start, end) == new[start:end] for start, end in bounds])
"""


def test_files_of_several_xorbs_come_by_each_version_of_the_protocol(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as hub:
        hub.create_bucket("org/b")
        assert run(hub, tmp_path / "home", VERSIONS, has_xet=True) == [[True, True]] * 3
        shards = [request.path for request in hub.log if request.kind == "shard_put"]
        assert shards == ["/v1/shards"] * 2 + ["/v2/shards"] * 4
        asked = [request.path[:4] for request in hub.log if request.kind == "reconstruction"]
        assert asked == ["/v2/"] * 2 + ["/v1/"] * 2 + ["/v2/"] * 2

        ranges = [(request.range or "").count("-") for request in hub.log if request.kind == "xorb_get"]
        assert sorted(ranges) == [1] * 14 + [2, 2]
        assert hub.cas_counts.xorbs == 2
