"""Pushes over a bad line: they complete and send what is missing; one that dies makes no commit."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hub.models import contents, saved
from tests.hub.push.push_hub import PushHub, differences
from tests.hubserver.hub_server import Fault

FOUR = "20KB"  # 4 shards of 16.9 kB and less
UPLOAD = "PUT lfs_put"
SHARD = "model-00002-of-00004.safetensors"


def shard_bytes(folder: Path) -> int:
    return sum(len(raw) for name, raw in contents(folder).items() if name.endswith(".safetensors"))


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("after", [0, 1, 8_192, 16_000])
def test_dropped_upload_is_sent_again_and_the_others_are_not(
    hub: PushHub, repo: str, tmp_path: Path, how: str, after: int
) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    hub.server.fail(Fault(match=UPLOAD, kind="drop", after_bytes=after, how=how))
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert hub.kinds()["lfs_put"] == 4 + 1
    assert hub.server.bytes_up("lfs_put") == shard_bytes(folder) + after
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_upload_that_is_dropped_five_times_completes(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    for number, after in enumerate((100, 5_000, 3, 16_000, 12_345)):
        how = ("fin", "rst")[number % 2]
        hub.server.fail(Fault(match=UPLOAD, kind="drop", after_bytes=after, how=how))
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert hub.server.bytes_up("lfs_put") == shard_bytes(folder) + 100 + 5_000 + 3 + 16_000 + 12_345


@pytest.mark.compat
@pytest.mark.parametrize(
    "match", ["POST create_repo", "GET info", "POST preupload", "POST lfs_batch", UPLOAD, "POST lfs_verify"]
)
def test_busy_server_is_asked_again(hub: PushHub, repo: str, tmp_path: Path, match: str) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    hub.server.fail(Fault(match=match, kind="status", status=503, times=3))
    outcome = hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert len(outcome.waits) == 3
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
@pytest.mark.parametrize(
    "match",
    ["POST create_repo", "GET info", "POST preupload", "POST lfs_batch", UPLOAD, "POST lfs_verify", "POST commit"],
)
def test_rate_limit_is_kept_to(hub: PushHub, repo: str, tmp_path: Path, match: str) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    hub.server.fail(Fault(match=match, kind="status", status=429, retry_after=2))
    outcome = hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert len(outcome.waits) == 1 and outcome.waits[0] >= 2  # seconds, as the server asked for
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
@pytest.mark.parametrize(
    "match", ["POST create_repo", "GET info", "POST preupload", "POST lfs_batch", "POST lfs_verify", "POST commit"]
)
def test_connection_that_ends_without_an_answer_is_made_again(
    hub: PushHub, repo: str, tmp_path: Path, match: str
) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    hub.server.fail(Fault(match=match, kind="drop", how="rst"))
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_expired_upload_url_is_asked_for_anew(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    hub.server.fail(Fault(match=UPLOAD, kind="expired", times=2))
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_multipart_upload_survives_parts_that_fail(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, "5MB", size="large")  # parts of 1 MB
    part = "PUT lfs_part"
    hub.server.fail(Fault(match=f"{part}.*partNumber=2", kind="drop", after_bytes=700_000))
    hub.server.fail(Fault(match=f"{part}.*partNumber=3", kind="drop", after_bytes=10_000, how="rst"))
    hub.server.fail(Fault(match=f"{part}.*partNumber=1", kind="status", status=503, skip=1))
    hub.server.fail(Fault(match="lfs_complete", kind="status", status=503))
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    # a part that fails costs a part, and not its file
    assert hub.server.bytes_up("lfs_part") <= shard_bytes(folder) + 700_000 + 10_000 + 1_000_000


@pytest.mark.compat
def test_multipart_upload_survives_urls_that_expire(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, "5MB", size="large")
    hub.server.fail(Fault(match="PUT lfs_part.*partNumber=2", kind="expired"))
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}


@pytest.mark.compat
def test_push_that_is_killed_makes_no_commit_and_the_next_sends_what_is_missing(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "save", 1, "5MB", size="large")
    shards = {name: raw for name, raw in contents(folder).items() if name.endswith(".safetensors")}
    assert len(shards) == 5
    # The second part of one shard is held; the other four shards arrive.
    name, gate = sorted(shards)[2], threading.Event()
    sha256 = hashlib.sha256(shards[name]).hexdigest()
    held = hub.server.fail(Fault(match=f"{sha256}.*partNumber=2", kind="slow", after_bytes=5_000, gate=gate))
    arrived = hub.server.fail(Fault(match="POST lfs_verify", kind="slow", skip=3, after_bytes=1))
    task = hub.start("push", folder, repo)
    assert held.reached.wait(60) and arrived.reached.wait(60)
    task.kill()
    gate.set()
    assert hub.files(repo) == set()
    assert len(hub.view(repo).commits()) == 1
    hub.push(folder, repo)
    assert {one.path.split("?")[0].rpartition("/")[2] for one in hub.server.log if one.kind == "lfs_part"} == {sha256}
    assert hub.server.bytes_up("lfs_part") == len(shards[name])
    assert differences(hub, repo, contents(folder)) == {}


def test_push_that_is_killed_at_the_commit_has_made_it_or_not(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    gate = threading.Event()
    held = hub.server.fail(Fault(match="POST commit", kind="slow", after_bytes=1_000, gate=gate))
    task = hub.start("push", folder, repo)
    assert held.reached.wait(60)
    task.kill()
    assert len(hub.view(repo).commits()) == 1
    gate.set()
    hub.push(folder, repo)
    assert hub.server.bytes_up("lfs_put") == 0
    assert differences(hub, repo, contents(folder)) == {}


@pytest.mark.parametrize("at", [5_000, -1])
def test_shard_with_a_flipped_bit_is_not_committed(hub: PushHub, repo: str, tmp_path: Path, at: int) -> None:
    hub.push(saved(tmp_path / "old", 2, FOUR), repo)
    folder = saved(tmp_path / "save", 1, FOUR)
    raw = bytearray((folder / SHARD).read_bytes())
    raw[at] ^= 1
    (folder / SHARD).write_bytes(raw)
    outcome = hub.refused("push", folder, repo)
    assert outcome.error in ("IntegrityError", "DamagedCheckpointError", "ShardMismatchError"), outcome
    assert SHARD in outcome.message
    assert len(hub.view(repo).commits()) == 2
    assert differences(hub, repo, contents(tmp_path / "old")) == {}
    assert outcome.waits == []  # it is not tried again: it would not get better


@pytest.mark.compat
def test_shard_with_a_flipped_bit_far_inside_is_found_while_it_is_sent(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, "5MB", size="large")
    shard = sorted(folder.glob("model-*"))[2]
    raw = bytearray(shard.read_bytes())
    raw[500_000] ^= 1  # no sample of the structure check holds it
    shard.write_bytes(raw)
    outcome = hub.refused("push", folder, repo)
    assert outcome.error == "IntegrityError" and shard.name in outcome.message
    assert hub.files(repo) == set()
    assert outcome.waits == []


@pytest.mark.compat
def test_storage_that_refuses_for_good_is_an_error_and_no_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    hub.server.fail(Fault(match=UPLOAD, kind="status", status=403, times=1000))
    outcome = hub.refused("push", folder, repo)
    assert "403" in outcome.message
    assert len(hub.view(repo).commits()) == 1
    hub.server.clear_faults()
    hub.server.fail(Fault(match="POST lfs_batch", kind="drop", times=1000))
    outcome = hub.refused("push", folder, repo)
    assert outcome.error == "HubConnectionError"
    assert len(hub.view(repo).commits()) == 1


@pytest.mark.parametrize("limit", [FOUR, "9KB"])
def test_directory_that_is_saved_over_during_the_push_is_not_committed(
    hub: PushHub, repo: str, tmp_path: Path, limit: str
) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    gate = threading.Event()
    held = hub.server.fail(Fault(match="POST preupload", kind="slow", after_bytes=100, gate=gate))
    task = hub.start("push", folder, repo)
    assert held.reached.wait(60)
    saved(folder, 2, limit)
    gate.set()
    outcome = task.outcome()
    assert outcome.error is not None
    assert hub.files(repo) == set()
    assert outcome.is_ours and "No commit was made" in outcome.message, outcome.trace
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}


@pytest.mark.compat
def test_shard_that_grows_or_shrinks_during_the_push_is_not_committed(hub: PushHub, repo: str, tmp_path: Path) -> None:
    changes: list[Callable[[bytes], bytes]] = [lambda raw: raw + b"x", lambda raw: raw[:-1]]
    for number, change in enumerate(changes):
        folder = saved(tmp_path / f"save-{number}", 1, FOUR)
        gate = threading.Event()
        held = hub.server.fail(Fault(match="POST preupload", kind="slow", after_bytes=100, gate=gate))
        task = hub.start("push", folder, f"{repo}-{number}")
        assert held.reached.wait(60)
        (folder / SHARD).write_bytes(change((folder / SHARD).read_bytes()))
        gate.set()
        outcome = task.outcome()
        # What was added after the bytes that were announced is not sent; what is missing is noticed.
        assert outcome.error == (None if number == 0 else "IntegrityError"), outcome.trace


def test_file_that_vanishes_before_it_is_hashed_is_named(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    (folder / "notes.txt").write_text("n")
    gate = threading.Event()
    held = hub.server.fail(Fault(match="POST create_repo", kind="slow", after_bytes=10, gate=gate))
    task = hub.start("push", folder, repo)
    assert held.reached.wait(60)
    (folder / "notes.txt").unlink()
    gate.set()
    outcome = task.outcome()
    assert outcome.error == "IntegrityError" and "'notes.txt' was not pushed: it was removed" in outcome.message
    assert hub.files(repo) == set()
