"""Saves of runs that end at any request: each checkpoint that is listed is whole, and the next save tidies up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.checkpoint import ranged_folder
from hfshard.commit import store_plan
from hfshard.errors import CommitUnfinishedError, StoreError
from hfshard.stores.retry import RETRY_VARIABLE
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run.run_store import RunStore
from tests.servers.stores.buckets import Bucket
from tests.servers.stores.fault_proxy import FaultProxy
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps

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


MANIFEST = r"^PUT put .*/checkpoint-\d{8}-[0-9a-f]{16}\.json"


@pytest.mark.parametrize("kind", ["lost_answer", "drop"])
def test_an_answer_that_is_lost_does_not_matter(run: BucketRun, proxy: FaultProxy, kind: str) -> None:
    with manager_of(run) as manager:
        save_steps(manager, 1)
        for match in (r"PUT put .*/\.saves/", "PUT put .*/model-0000", MANIFEST, "PUT put .*/checkpoint.json", "list"):
            proxy.fail(kind, match)
        save_steps(manager, 2)
        proxy.fail(kind, "delete", times=2)
        save_steps(manager, 3)
    assert values(run) == {2: 2.0, 3: 3.0}
    assert run.litter() == []


@pytest.mark.parametrize("earlier", [1, 2], ids=["of another step", "of its step"])
def test_a_manifest_that_comes_when_its_shards_are_deleted_is_no_checkpoint(
    run: BucketRun, proxy: FaultProxy, earlier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RETRY_VARIABLE, "1")
    manager = CheckpointManager(run.root)
    save_steps(manager, earlier)
    proxy.fail("late", MANIFEST, status=503)
    proxy.fail("status", MANIFEST, times=_ENDLESS, status=503)
    with pytest.raises(CommitUnfinishedError, match="It is unknown whether"):
        manager.save(2, TrainingState(model=Net(9.0)))
    proxy.clear()
    save_steps(manager, 3)

    proxy.release()

    assert values(run) == {earlier: float(earlier), 3: 3.0}
    if earlier == 2:
        assert hfshard.load_state_dict(f"{run.root}/checkpoint-00000002")["head.bias"].tolist() == [2.0, 2.0]
    save_steps(CheckpointManager(run.root), 4)
    assert values(run) == {earlier: float(earlier), 3: 3.0, 4: 4.0}
    assert run.litter() == []


def put_incomplete(run: BucketRun, step: int, number: int) -> list[str]:
    """Put a save of a step into its folder whose model is deleted already, as an overtaken one may have left."""
    folder = f"checkpoint-{step:08d}"
    before, own = run.saves()[folder]
    tail, new = f"-{before:08d}-{own}", f"-{number:08d}-{'f' * 16}"
    names = []
    for name in run.names(f"{folder}/"):
        if tail in name and "/model-0" not in name:
            raw = run.read(name)
            if "/checkpoint-0" in name:
                save = json.loads(raw)
                save["hfshard_save"] |= {"number": number, "id": "f" * 16}
                raw = json.dumps(save).encode()
            names.append(name.replace(tail, new))
            run.put(names[-1], raw)
    return names


@pytest.mark.parametrize(("replaced", "saved", "left"), [(1, 3, {2: []}), (2, 2, {1: [], 2: []})])
def test_a_checkpoint_that_a_save_replaces_while_it_is_verified_is_no_error(
    run: BucketRun, proxy: FaultProxy, replaced: int, saved: int, left: dict[int, list[Exception]]
) -> None:
    save_steps(manager_of(run), 1, 2)
    store_plan.forget_puts()  # as in another process
    manifest = f"GET get .*checkpoint-0000000{replaced}/checkpoint-0"
    raced = proxy.fail("race", manifest, skip=1, action=lambda: save_steps(manager_of(run), saved))

    assert CheckpointManager(run.root).verify() == left
    assert raced.times == 0


def test_a_manifest_that_is_too_large_is_not_brought_into_memory(
    run: BucketRun, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(CheckpointManager(run.root), 1)
    run.put("checkpoint-00000001/checkpoint-00000009-0123456789abcdef.json", b" " * (3 << 20))
    run.put("checkpoint-00000001/model-00001-of-00001-00000009-0123456789abcdef.safetensors", b"-")
    for module in (store_plan, ranged_folder):
        monkeypatch.setattr(module, "MAX_SAVE_BYTES", 2 << 20)
    proxy.clear()

    (problem,) = CheckpointManager(run.root).verify()[1]
    hfshard.remove_checkpoint(f"{run.root}/checkpoint-00000001")

    assert "has 3145728 bytes, but such a file has at most 2097152" in problem.message
    assert run.names("checkpoint-") == []
    assert sum(request.bytes_down for request in proxy.requests()) < 1 << 20


@pytest.mark.parametrize("number", [2, 7], ids=["overtaken", "the highest of the run"])
def test_a_folder_with_a_save_that_is_not_whole_shows_the_one_that_is(run: BucketRun, number: int) -> None:
    save_steps(CheckpointManager(run.root), 2, 3)
    names = put_incomplete(run, 2, number)

    assert values(run) == {2: 2.0, 3: 3.0}
    assert hfshard.load_state_dict(f"{run.root}/checkpoint-00000002")["head.bias"].tolist() == [2.0, 2.0]
    going = hfshard.remove_checkpoint(run.root, leftovers=True, unfinished=True, dry_run=True)
    assert sorted(going.removed) == sorted(names)
    save_steps(CheckpointManager(run.root), 4)
    assert values(run) == {2: 2.0, 3: 3.0, 4: 4.0}


def test_an_earlier_save_stays_where_a_later_one_is_withdrawn(run: BucketRun, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(CheckpointManager(run.root), 2, 3)
    names = put_incomplete(run, 2, 3)
    run.put(f".saves/checkpoint-00000002-{3:08d}-{'f' * 16}", b"")
    plain = RunStore._look

    def look_then_withdraw(self: RunStore) -> Any:
        seen = plain(self)
        for name in names:
            run.delete(name)
        return seen

    monkeypatch.setattr(RunStore, "_look", look_then_withdraw)
    save_steps(CheckpointManager(run.root), 4)

    assert values(run) == {2: 2.0, 3: 3.0, 4: 4.0}


def test_a_read_that_fails_after_the_commit_does_not_deny_it(run: BucketRun, proxy: FaultProxy) -> None:
    save_steps(CheckpointManager(run.root), 1, 2)
    run.put(f".saves/checkpoint-00000001-{1:08d}-{run.saves()['checkpoint-00000001'][1]}", b"")
    store_plan.forget_puts()
    proxy.fail("status", r"^GET get .*checkpoint-00000001-", times=_ENDLESS, status=403)

    with pytest.raises(CommitUnfinishedError, match="was saved"):
        save_steps(CheckpointManager(run.root), 3)

    proxy.clear()
    assert values(run) == {1: 1.0, 2: 2.0, 3: 3.0}


FAILURES = {
    "the look": "^GET list ",
    "its mark": r"^PUT put .*/\.saves/",
    "a shard": "^PUT put .*/model-0000",
    "its manifest": MANIFEST,
    "a plain copy": r"^PUT put .*/model\.safetensors\.index\.json",
    "the last listing": r"^GET list .*prefix=[^&]*checkpoint-",
}


@pytest.mark.parametrize("again", [2, pytest.param(3, marks=pytest.mark.slow)], ids=["the same step", "the next step"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_manager_goes_on_after_a_save_that_failed(
    run: BucketRun, proxy: FaultProxy, failure: str, again: int
) -> None:
    with manager_of(run) as manager:
        save_steps(manager, 1)
        proxy.fail("status", FAILURES[failure], status=403)
        with pytest.raises(CommitUnfinishedError if failure in SAVED else StoreError) as error:
            save_steps(manager, 2)
        assert ("was saved" in str(error.value)) is (failure in SAVED)
        assert values(run) == ({1: 1.0, 2: 2.0} if failure in SAVED else {1: 1.0})

        save_steps(manager, again)
        assert values(run) == ({1: 1.0} if again == 2 or failure not in SAVED else {2: 2.0}) | {again: again}
    assert run.litter() == []


SAVED = ("a plain copy", "the last listing")
"""Failures after the commit."""


@pytest.mark.parametrize("is_restarted", [False, True], ids=["one manager", "a new manager"])
def test_a_frozen_shard_that_was_damaged_is_sent_again(
    run: BucketRun, bucket: Bucket, proxy: FaultProxy, is_restarted: bool
) -> None:
    net = Net(1.0)
    net.body.requires_grad_(False)
    state = TrainingState(model=net)
    manager = CheckpointManager(run.root, max_shard_size="1KB", max_to_keep=2)
    manager.save(1, state)
    net.head.weight.data.fill_(2)
    manager.save(2, state)
    assert len(proxy.requests("copy")) == 6  # body.weight, both biases, and three of random states

    frozen = max(run.objects("checkpoint-00000002"), key=lambda name: "/model" in name and len(run.read(name)))
    raw = bytearray(run.read(frozen))
    raw[-1] ^= 1
    run.put(frozen, bytes(raw))
    later = CheckpointManager(run.root, max_shard_size="1KB", max_to_keep=2) if is_restarted else manager
    later.save(3, state)

    problems = CheckpointManager(run.root).verify()
    assert (len(problems[2]), problems[3]) == (1, [])
    restored = Net()
    assert CheckpointManager(run.root).restore_latest(TrainingState(model=restored)) == 3
    assert torch.equal(restored.body.weight, net.body.weight)
    later.save(4, state)
    assert CheckpointManager(run.root).verify() == {3: [], 4: []}


def test_requests_of_saves_and_questions_are_few(run: BucketRun, proxy: FaultProxy) -> None:
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1)
        # The run; the mark, two shards, the manifest and its five plain copies; the folder, the marks.
        assert asked(proxy) == "list put put put put put put put put list list"
        save_steps(manager, 2)
        # The marks first, in place of the run, and the delete of the mark before.
        later = "list put put put put put put put put list list delete_many"
        assert asked(proxy) == later
        save_steps(manager, 2)
        # What has not changed is copied; the delete of what the step had, and that of the mark.
        assert asked(proxy) == "list put copy put put put put put put list list delete_many delete_many"
        assert manager.latest_step() == 2
        assert asked(proxy) == "list"

    with CheckpointManager(run.root, max_to_keep=2) as manager:
        save_steps(manager, 3)
        # This process has put the manifest, by which shards are compared; a rotation lists the run.
        assert asked(proxy) == f"{later} list delete_many"
        store_plan.forget_puts()
        save_steps(manager, 4)
        assert asked(proxy) == later.replace("put", "put get", 1) + " list delete_many"
        store_plan.forget_puts()

    other = CheckpointManager(run.root)
    assert other.latest_step() == 4
    assert asked(proxy) == "list"
    assert other.all_steps() == [3, 4]
    assert asked(proxy) == "list"
    assert other.restore_latest(TrainingState(model=Net())) == 4
    # The run, and its newest manifest; the folder, and the manifest as what leads to the files; each shard behind a
    # look at the folder; and the manifest once more, which is to be the same.
    assert asked(proxy) == "list get list get list get list get list get"


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_later_save_asks_the_same_however_many_checkpoints_there_are(
    run: BucketRun, proxy: FaultProxy, count: int
) -> None:
    save_steps(CheckpointManager(run.root), 1)
    run.copy_checkpoint(1, range(2, count + 1))
    store_plan.forget_puts()
    proxy.clear()

    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1001)
        pages = -(-len(run.names()) // PAGE)
        puts = "put get put put put put put put put"
        # The manifest that the mark is of is read, too, as it is not the newest one here.
        assert asked(proxy) == f"{'list ' * pages}{puts} list list get delete_many"
        save_steps(manager, 1002)
        assert asked(proxy) == "list put put put put put put put put list list delete_many"
    assert len(manager.all_steps()) == count + 2
    assert manager.restore_latest(TrainingState(model=Net())) == 1002


PAGE = 1000
"""Objects in one answer of the service."""


def asked(proxy: FaultProxy) -> str:
    """The kinds of requests, in their order; forgets them."""
    kinds = [request.kind for request in proxy.requests()]
    proxy.clear()
    return " ".join(kinds)


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
    (manifest,) = run.names("checkpoint-00000001/checkpoint-")
    assert read[manifest.rpartition("/")[2]] == 2 * len(run.read(manifest))  # and whether it is still the same
