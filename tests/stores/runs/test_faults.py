"""Saves of runs that end at any request: each checkpoint that is listed is whole, and the next save tidies up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import nn

from hfshard.errors import CommitUnfinishedError, StoreError
from hfshard.training import CheckpointManager, TrainingState
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps
from tests.stores.services.buckets import Bucket
from tests.stores.services.fault_proxy import FaultProxy

KEPT = 2
_ENDLESS = 10**6
_FEW = 2
"""Of the requests of a save, those that are tried without --slow."""

pytestmark = pytest.mark.parametrize("scheme", ["s3"])


def manager_of(run: BucketRun) -> CheckpointManager:
    return CheckpointManager(run.root, max_to_keep=KEPT, max_shard_size="1KB")


def copies(run: BucketRun, bucket: Bucket) -> Iterator[BucketRun]:
    """Fresh copies of a run, put there without hfshard."""
    objects = bucket.objects(run.prefix)
    number = 0
    while True:
        copy = BucketRun(bucket, f"{run.root}-{number}")
        for name, raw in objects.items():
            copy.put(name, raw)
        yield copy
        number += 1


def values(run: BucketRun) -> dict[int, float]:
    """Step -> the value of its weights, of all checkpoints, which must be whole."""
    manager = CheckpointManager(run.root)
    assert not any(problems for problems in manager.verify().values())
    net = Net()
    return {manager.restore(TrainingState(model=net), step): net.value() for step in manager.all_steps()}


@pytest.mark.parametrize("is_every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("step", "old", "new"), [(3, {1: 1.0, 2: 2.0}, {2: 2.0, 3: 9.0}), (2, {1: 1, 2: 2}, {1: 1, 2: 9})]
)
def test_a_save_that_is_killed_at_any_request_leaves_whole_checkpoints(
    run: BucketRun,
    bucket: Bucket,
    proxy: FaultProxy,
    step: int,
    old: dict[int, float],
    new: dict[int, float],
    is_every: bool,
) -> None:
    with manager_of(run) as manager:
        save_steps(manager, 1, 2)
    fresh = copies(run, bucket)
    state = TrainingState(model=Net(9.0))
    whole = next(fresh)
    proxy.clear()
    manager_of(whole).save(step, state)
    total = len(proxy.requests())
    seen = []
    for stop in range(0, total, 1 if is_every else total // _FEW):
        killed = next(fresh)
        proxy.fail("status", skip=stop, times=_ENDLESS, status=403)
        with suppress(StoreError, CommitUnfinishedError):  # deletes that fail are warned of
            manager_of(killed).save(step, state)
        proxy.clear()

        found = values(killed)
        assert found in (old, new, old | new)
        seen.append(found)
        save_steps(manager_of(killed), 5)
        assert (killed.litter(), bucket.unfinished(killed.prefix)) == ([], [])
    assert seen[0] == old
    assert values(whole) == new


@pytest.mark.parametrize("kind", ["lost_answer", "drop"])
def test_an_answer_that_is_lost_does_not_matter(run: BucketRun, proxy: FaultProxy, kind: str) -> None:
    with manager_of(run) as manager:
        save_steps(manager, 1)
        for match in ("put .*checkpoint.json", "put .*writer.json", "put .*index.json", "list"):
            proxy.fail(kind, match)
        save_steps(manager, 2, 3)
    assert values(run) == {2: 2.0, 3: 3.0}
    assert run.litter() == []


MANIFEST = r"^PUT put .*/checkpoint-\d{8}-[0-9a-f]{16}\.json"
FAILURES = {
    "the look": "^GET list ",
    "its mark": r"^PUT put .*/\.saves/",
    "a shard": "^PUT put .*/model-0000",
    "its manifest": MANIFEST,
    "a plain copy": r"^PUT put .*/model\.safetensors\.index\.json",
    "the last listing": r"^GET list .*prefix=[^&]*checkpoint-",
}


@pytest.mark.parametrize("again", [2, 3], ids=["the same step", "the next step"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_manager_goes_on_after_a_save_that_failed(
    run: BucketRun, proxy: FaultProxy, failure: str, again: int
) -> None:
    with manager_of(run) as manager:
        save_steps(manager, 1)
        proxy.fail("status", FAILURES[failure], status=403)
        with pytest.raises(CommitUnfinishedError if failure in SAVED else StoreError) as error:
            save_steps(manager, 2)
        assert ("is saved" in str(error.value)) is (failure in SAVED)
        assert values(run) == ({1: 1.0, 2: 2.0} if failure in SAVED else {1: 1.0})

        save_steps(manager, again)
        assert values(run) == ({1: 1.0} if again == 2 or failure not in SAVED else {2: 2.0}) | {again: again}
    assert run.litter() == []


SAVED = ("a plain copy", "the last listing")
"""Failures after the commit."""


def test_requests_of_saves_and_questions_are_few(run: BucketRun, proxy: FaultProxy) -> None:
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1, 2)
        proxy.clear()
        save_steps(manager, 3)
        kinds = Counter(request.kind for request in proxy.requests())
        assert kinds == {"head": 2, "list": 2, "put": 6}  # two shards with an index each

        other = CheckpointManager(run.root)
        proxy.clear()
        assert other.latest_step() == 3
        assert sorted(request.kind for request in proxy.requests()) == ["get"] * 3 + ["list"]
        proxy.clear()
        assert manager.latest_step() == 3
        assert [request.kind for request in proxy.requests()] == ["list"]


def test_every_byte_is_sent_and_read_once(run: BucketRun, bucket: Bucket, proxy: FaultProxy) -> None:
    net = nn.Linear(500, 500)
    net.weight.sum().backward()
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.step()
    state = TrainingState(model=net, optimizer=optimizer)
    with CheckpointManager(run.root) as manager:
        manager.save(1, state)
    sizes = {name: size for name, size in bucket.sizes(f"{run.prefix}/").items() if name.endswith(".safetensors")}
    sent = Counter[str]()
    for request in proxy.requests():
        if ".safetensors" in request.path and ".json" not in request.path:
            sent[request.kind] += request.bytes_up
    assert sum(sent.values()) == sum(sizes.values()) > 3_000_000

    proxy.clear()
    assert CheckpointManager(run.root).restore_latest(state) == 1
    read = Counter[str]()
    for request in proxy.requests("get"):
        read[request.path.partition("?")[0].rpartition("/")[2]] += request.bytes_down
    assert {name: read[name.rpartition("/")[2]] for name in sizes} == sizes
    assert read["checkpoint.json"] == 2 * 4096  # and whether it is still the same
