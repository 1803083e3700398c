"""Saves whose deciding put is late, or lost its answer: what was acknowledged stays, and what is there loads."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import hfshard
from hfshard.commit import store_plan
from hfshard.errors import CheckpointChangedError, CommitUnfinishedError, RemoteChangedError
from hfshard.format.file_names import WeightNames
from hfshard.format.stored_save import split_object_name
from hfshard.places.place import place_to_save
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, request_from_state_dict
from hfshard.stores import retry
from hfshard.stores.open_store import open_store
from tests.servers.stores.buckets import Bucket
from tests.servers.stores.fault_proxy import FaultProxy

pytestmark = pytest.mark.stores
SCHEMES = pytest.mark.parametrize("scheme", ["s3", "gs", "hf"])
_INDEX = r"put .*index(-|%2D)\d"
DECIDING = {"s3": _INDEX, "gs": _INDEX, "hf": "batch"}
"""What the put of an index looks like; in a bucket the first batch names a shard, the second one the index."""
LONG = 10**6


@pytest.fixture(autouse=True)
def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a request that fails be tried again for a second."""
    monkeypatch.setenv(retry.RETRY_VARIABLE, "1")


def save(address: str, value: float) -> None:
    hfshard.save_state_dict({"a": torch.full((8,), value)}, address)


def loaded(address: str) -> float:
    tensor = hfshard.load_state_dict(address, verify="full")["a"]
    (value,) = set(tensor.tolist())
    return float(value)


def saves_at(address: str) -> set[int]:
    """The numbers of the saves of which there is an object."""
    found = (split_object_name(name) for name in open_store(address).list_objects())
    return {split[1].number for split in found if split is not None}


def delay_index(proxy: FaultProxy, scheme: str, times: int = 1) -> None:
    """Let the put of an index arrive late: the first try hangs at the service, which refuses all others."""
    skip = 1 if scheme == "hf" else 0
    proxy.fail("late", DECIDING[scheme], skip=skip, times=times, status=503)
    proxy.fail("status", DECIDING[scheme], skip=skip, times=LONG, status=503)


@SCHEMES
def test_an_index_that_comes_late_leads_to_shards_that_are_there(
    scheme: str, proxy: FaultProxy, store_address: str
) -> None:
    save(store_address, 1.0)
    delay_index(proxy, scheme)
    with pytest.raises(CommitUnfinishedError, match="It is unknown whether"):
        save(store_address, 2.0)
    proxy.clear()
    assert loaded(store_address) == 1.0

    proxy.release()

    assert loaded(store_address) == 2.0
    save(store_address, 3.0)
    assert (loaded(store_address), saves_at(store_address)) == (3.0, {3})


@pytest.mark.parametrize("scheme", ["hf"])
@pytest.mark.parametrize(("call", "status"), [("batch", 403), ("(batch|paths-info)", 503)])
def test_an_index_that_may_have_a_name_in_a_bucket_is_not_called_refused(
    scheme: str, proxy: FaultProxy, store_address: str, call: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    save(store_address, 1.0)
    proxy.fail("late", "batch", skip=1, status=504)
    proxy.fail("status", call, skip=1, times=LONG, status=status)
    with pytest.raises(CommitUnfinishedError, match="It is unknown whether"):
        save(store_address, 2.0)
    proxy.clear()
    assert loaded(store_address) == 1.0

    proxy.release()

    assert loaded(store_address) == 2.0


@pytest.mark.parametrize("scheme", ["az"])
def test_a_plain_copy_that_is_replaced_while_it_is_compared_is_put_again(
    scheme: str, proxy: FaultProxy, bucket: Bucket, store_address: str, store_prefix: str
) -> None:
    save(store_address, 1.0)
    store_plan.forget_puts()  # as in a new process
    copy = f"{store_prefix}/model.safetensors.index.json"
    raw = bucket.read(copy)
    proxy.fail("race", rf"GET get .*{copy}", action=lambda: bucket.put(copy, raw))

    save(store_address, 1.0)

    assert (loaded(store_address), saves_at(store_address)) == (1.0, {2})
    assert bucket.read(copy) != raw


@SCHEMES
def test_an_index_that_comes_after_a_later_save_is_not_the_checkpoint(
    scheme: str, proxy: FaultProxy, store_address: str
) -> None:
    save(store_address, 1.0)
    delay_index(proxy, scheme)
    with pytest.raises(CommitUnfinishedError):
        save(store_address, 2.0)
    proxy.clear()
    save(store_address, 3.0)

    proxy.release()

    assert loaded(store_address) == 3.0
    save(store_address, 4.0)
    assert (loaded(store_address), saves_at(store_address)) == (4.0, {4})


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("raw", [b'{"hfshard_save": {"format": 2}}', b"damaged"])
def test_a_higher_index_that_can_not_be_read_counts(
    scheme: str, proxy: FaultProxy, bucket: Bucket, store_address: str, store_prefix: str, raw: bytes
) -> None:
    save(store_address, 1.0)
    higher = f"{store_prefix}/model.safetensors.index-00000007-0123456789abcdef.json"
    proxy.fail("race", r"put .*index(-|%2D)\d", action=lambda: bucket.put(higher, raw))

    with pytest.raises(RemoteChangedError, match="its checkpoint is the newer one"):
        save(store_address, 2.0)

    assert saves_at(store_address) == {1, 2, 7}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_save_whose_answer_was_lost_takes_nothing_from_one_that_came_after(
    scheme: str, proxy: FaultProxy, store_address: str
) -> None:
    save(store_address, 1.0)
    proxy.fail("lost_answer", DECIDING[scheme])
    proxy.fail("race", DECIDING[scheme], action=lambda: save(store_address, 3.0))

    with pytest.raises(RemoteChangedError, match="at the same time"):
        save(store_address, 2.0)

    assert (loaded(store_address), saves_at(store_address) & {3}) == (3.0, {3})
    save(store_address, 4.0)
    assert (loaded(store_address), saves_at(store_address)) == (4.0, {4})


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_a_save_that_sleeps_before_its_index_takes_nothing_from_those_that_came_meanwhile(
    scheme: str, proxy: FaultProxy, store_address: str
) -> None:
    save(store_address, 1.0)
    skip = 1 if scheme == "hf" else 0
    proxy.fail("race", DECIDING[scheme], skip=skip, action=lambda: save(store_address, 3.0))

    with pytest.raises(RemoteChangedError):
        save(store_address, 2.0)

    assert loaded(store_address) == 3.0
    save(store_address, 4.0)
    assert (loaded(store_address), saves_at(store_address)) == (4.0, {4})


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_saving_again_heals_a_damaged_shard(scheme: str, bucket: Bucket, store_address: str, store_prefix: str) -> None:
    save(store_address, 1.0)
    shard = next(name for name in open_store(store_address).list_objects() if re.search(r"-\d{8}-.*safetensors$", name))
    raw = bytearray(bucket.read(f"{store_prefix}/{shard}"))
    raw[-1] ^= 1
    bucket.put(f"{store_prefix}/{shard}", bytes(raw))
    assert not hfshard.verify_checkpoint(store_address).ok

    save(store_address, 1.0)

    assert hfshard.verify_checkpoint(store_address).ok
    assert loaded(store_address) == 1.0


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_a_config_that_another_save_replaces_while_it_is_compared_is_not_the_same(
    scheme: str, proxy: FaultProxy, store_address: str
) -> None:
    def save_large(value: float) -> None:
        request = request_from_state_dict({"a": torch.full((8,), value)}, SaveOptions())
        save_request(replace(request, config=b'{"a": "%s"}' % (b"x" * (1 << 20))), place_to_save(store_address))

    save_large(1.0)
    store_plan.forget_puts()  # as in a new process
    raced = proxy.fail("race", "GET get .*/config-0", action=lambda: save_large(2.0))
    expected = 1.0
    try:
        save_large(1.0)
    except RemoteChangedError:  # both have one number, and chance decides which id is higher
        expected = 2.0

    assert (loaded(store_address), raced.times) == (expected, 0)


@pytest.mark.parametrize("scheme", ["s3", "az"])
@pytest.mark.parametrize("is_uploaded", [False, True])
@pytest.mark.parametrize("damaged", [b"{}\0", b"{", b"\0" * 100])
def test_saving_again_heals_a_damaged_config(
    bucket: Bucket, store_address: str, store_prefix: str, damaged: bytes, *, is_uploaded: bool
) -> None:
    request = replace(request_from_state_dict({"a": torch.ones(8)}, SaveOptions()), config=b"{}\n")
    if is_uploaded:
        bucket.put(f"{store_prefix}/model.safetensors", safetensors.torch.save({"a": torch.zeros(8)}))
    else:
        save_request(request, place_to_save(store_address))
    bucket.put(f"{store_prefix}/config.json", damaged)

    save_request(request, place_to_save(store_address))

    assert bucket.read(f"{store_prefix}/config.json").startswith(b"{}\n")
    assert f"{store_prefix}/model.safetensors" not in bucket.sizes(f"{store_prefix}/")
    assert hfshard.verify_checkpoint(store_address).ok
    assert loaded(store_address) == 1.0


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf"])
@pytest.mark.parametrize("status", [400, 403, 501])
def test_a_shard_that_can_not_be_copied_is_sent(
    scheme: str, proxy: FaultProxy, store_address: str, status: int
) -> None:
    frozen = torch.zeros(4000)
    hfshard.save_state_dict({"a": torch.zeros(8), "b": frozen}, store_address, max_shard_size="16KB")
    copies = proxy.fail("status", "batch" if scheme == "hf" else " copy ", status=status)

    hfshard.save_state_dict({"a": torch.ones(8), "b": frozen}, store_address, max_shard_size="16KB")

    assert copies.times == 0
    assert (loaded(store_address), saves_at(store_address)) == (1.0, {2})


@pytest.mark.parametrize("scheme", ["s3"])
def test_where_nothing_may_be_deleted_a_save_ends_well(
    scheme: str, proxy: FaultProxy, store_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store_address, 1.0)
    proxy.fail("status", "delete", status=403, times=LONG)

    save(store_address, 2.0)

    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "earlier saves cannot be deleted" in caplog.text
    assert (loaded(store_address), saves_at(store_address)) == (2.0, {1, 2})


@SCHEMES
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_save_whose_shards_were_deleted_before_its_index_deletes_nothing(
    scheme: str, proxy: FaultProxy, bucket: Bucket, store_address: str, store_prefix: str, *, is_removed: bool
) -> None:
    save(store_address, 1.0)

    def delete_shards() -> None:
        if is_removed:
            hfshard.remove_checkpoint(store_address, leftovers=True, unfinished=True)
        else:
            for name in bucket.sizes(f"{store_prefix}/"):
                if "-00000002-" in name and name.endswith(".safetensors"):
                    bucket.delete(name)

    raced = proxy.fail("race", DECIDING[scheme], skip=1 if scheme == "hf" else 0, action=delete_shards)
    with pytest.raises(RemoteChangedError, match="were deleted while it ran"):
        save(store_address, 2.0)

    assert (loaded(store_address), raced.times) == (1.0, 0)
    assert hfshard.verify_checkpoint(store_address).ok
    assert bucket.read(f"{store_prefix}/model.safetensors.index.json").count(b"-00000001-") > 0  # for other tools
    save(store_address, 3.0)
    assert (loaded(store_address), len(saves_at(store_address))) == (3.0, 1)


@SCHEMES
def test_resharding_in_place_does_not_replace_what_another_process_saves_meanwhile(
    scheme: str, proxy: FaultProxy, store_address: str
) -> None:
    hfshard.save_state_dict({"a": torch.ones(8), "b": torch.ones(8)}, store_address, max_shard_size=40)
    first = "batch" if scheme == "hf" else "(put|finish|begin|part) .*model(-|%2D)0000"
    raced = proxy.fail("race", first, action=lambda: save(store_address, 2.0))

    with pytest.raises(CheckpointChangedError, match="while it was being re-sharded"):
        hfshard.reshard_checkpoint(store_address, store_address, "1GB")

    assert (loaded(store_address), raced.times) == (2.0, 0)


@pytest.mark.parametrize("scheme", ["s3", "hf"])
@pytest.mark.parametrize("is_uploaded", [False, True])
def test_a_variant_without_a_config_leaves_that_of_the_checkpoint_next_to_it(
    bucket: Bucket, store_address: str, store_prefix: str, *, is_uploaded: bool
) -> None:
    request = replace(request_from_state_dict({"a": torch.ones(8)}, SaveOptions()), config=b"{}\n")
    if is_uploaded:
        bucket.put(f"{store_prefix}/model.safetensors", safetensors.torch.save({"a": torch.ones(8)}))
        bucket.put(f"{store_prefix}/config.json", b"{}\n")
    else:
        save_request(request, place_to_save(store_address))

    ema = replace(request_from_state_dict({"a": torch.zeros(8)}, SaveOptions(variant="ema")), drops_config=True)
    save_request(ema, place_to_save(store_address))

    assert bucket.read(f"{store_prefix}/config.json").startswith(b"{}\n")
    assert hfshard.load_state_dict(store_address)["a"].tolist() == [1.0] * 8
    alone = f"{store_address}/alone"
    save_request(replace(request, options=SaveOptions(variant="ema")), place_to_save(alone))
    save_request(ema, place_to_save(alone))
    assert "config.json" not in open_store(alone).list_objects()


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize("has_copy", [False, True])
def test_a_config_whose_object_is_lost_does_not_end_the_next_save(
    bucket: Bucket, store_address: str, store_prefix: str, caplog: pytest.LogCaptureFixture, *, has_copy: bool
) -> None:
    config = b'{"a": "%s"}\n' % (b"x" * (1 << 20))
    request = replace(request_from_state_dict({"a": torch.ones(8)}, SaveOptions()), config=config)
    save_request(request, place_to_save(store_address))
    copy = f"{store_prefix}/config.json"
    for name in bucket.sizes(f"{store_prefix}/config"):
        if name != copy or not has_copy:
            bucket.delete(name)

    save(store_address, 2.0)

    assert loaded(store_address) == 2.0
    assert ("is replaced by its plain copy" if has_copy else "is dropped") in caplog.text
    kept = store_plan.read_store_state(open_store(store_address), WeightNames()).kept_files([])
    assert (kept.get("config.json", b"").partition(b"\n")[0] + b"\n" == config) is has_copy
