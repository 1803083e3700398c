"""Parts of a checkpoint on the Hub: only the shards that hold the names, or only the bytes of the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from tests.hub.models import digest_of, make_model, saved
from tests.hub.pull.pull_hub import PullHub
from tests.hubserver.hub_server import Fault

pytestmark = pytest.mark.compat
MIB = 1024**2
LIMIT = 4_300_000
"""Bytes: the large model of 16.9 MB of weights then has 5 shards."""

BIAS = "pooler.dense.bias"
"""512 numbers of 4 bytes, the last of the last shard."""

WORDS = "embeddings.word_embeddings.weight"
"""1000 x 512 numbers of 4 bytes."""

HEAD = 32 * 1024
"""Bytes that are read of each file at first; what is not its header is not read again."""

HEADER = 4096
"""Bytes before the data of a shard; WORDS is the first of its shard."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of 5 shards."""
    return saved(tmp_path_factory.mktemp("weights"), 1, LIMIT, size="large")


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """Name -> digest of its tensor."""
    return {name: digest_of({name: tensor}) for name, tensor in make_model(1, size="large").state_dict().items()}


def test_only_the_shards_that_hold_the_names_are_downloaded(
    hub: PullHub, repo: str, weights: Path, digests: dict[str, str], tmp_path: Path
) -> None:
    hub.publish(repo, weights)

    found = hub.call("read", repo, tmp_path, keys=[BIAS, "pooler.dense.*"])

    assert found == {name: digests[name] for name in ("pooler.dense.bias", "pooler.dense.weight")}
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 1}
    assert hub.weights_down(repo) == (weights / "model-00005-of-00005.safetensors").stat().st_size
    # The same again, and then all: only what lacks.
    assert hub.call("read", repo, tmp_path, keys=[BIAS], local_files_only=True) == {BIAS: digests[BIAS]}
    assert hub.call("read", repo, tmp_path) == digests
    assert hub.kinds()["storage_get"] == 4


def test_only_the_bytes_of_the_tensors_are_downloaded(
    hub: PullHub, repo: str, weights: Path, digests: dict[str, str], tmp_path: Path
) -> None:
    hub.publish(repo, weights)

    found = hub.call("read", repo, tmp_path, keys=[BIAS], ranges=True, verify="full")

    assert found == {BIAS: digests[BIAS]}
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 2}
    assert hub.weights_down(repo) == HEAD + 2048
    assert list(tmp_path.iterdir()) == []
    both = hub.call("read", repo, tmp_path, keys=[BIAS, WORDS], ranges=True)
    assert both == {name: digests[name] for name in (WORDS, BIAS)}
    assert hub.weights_down(repo) == HEAD + 2048 + HEADER + 2_048_000
    assert hub.call("read", repo, tmp_path, ranges=True) == digests


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        (["wide"], [8 * MIB, 8 * MIB, 4 * MIB]),
        (["narrow.*"], [40 * 65536 - (HEAD - 8192)]),  # the header has 8192 bytes
        (["narrow.*", "wide"], [40 * 65536 - (HEAD - 8192), 8 * MIB, 8 * MIB, 4 * MIB]),
        (None, [40 * 65536 - (HEAD - 8192), 8 * MIB, 8 * MIB, 4 * MIB + 4 * MIB]),
    ],
)
def test_large_tensors_come_by_8_mib_and_near_ones_by_one_request(
    keys: list[str] | None, asked: list[int], hub: PullHub, repo: str, tmp_path: Path
) -> None:
    state = {f"narrow.{number}": torch.full((16_384,), float(number)) for number in range(40)}  # of 64 KiB
    state |= {"wide": torch.arange(20 * MIB // 4, dtype=torch.int32), "next": torch.ones(MIB)}
    hfshard.save_state_dict(state, tmp_path / "saved")
    hub.publish(repo, tmp_path / "saved")

    found = hub.call("read", repo, tmp_path / "cache", keys=keys, ranges=True, verify="full")

    names = [name for name in state if keys is None or name.partition(".")[0] in "".join(keys)]
    assert found == {name: digest_of({name: state[name]}) for name in names}
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "storage_get": 1 + len(asked)}
    answers = [request.bytes_down for request in hub.requests_of(repo) if request.kind == "storage_get"]
    assert answers[0] == HEAD
    assert sorted(answers[1:]) == sorted(asked)


@pytest.mark.parametrize("stock", [False, True])
def test_ranges_of_a_single_file_are_read(
    stock: bool, hub: PullHub, repo: str, digests: dict[str, str], tmp_path: Path
) -> None:
    model: Any = make_model(1, size="large", stock=stock)
    model.save_pretrained(tmp_path / "saved")
    hub.publish(repo, tmp_path / "saved")

    found = hub.call("read", repo, tmp_path / "cache", keys="*.bias", ranges=True)

    assert found == {name: digest for name, digest in digests.items() if name.endswith(".bias")}
    assert len(found) == 10
    assert hub.weights_down(repo) < 300_000
    if stock:
        outcome = hub.refused("read", repo, tmp_path / "cache", keys="*.bias", ranges=True, verify="full")
        assert "can't be verified in full: it has no checksum" in outcome.message


def test_tied_and_aliased_names_are_read_by_ranges(hub: PullHub, repo: str, tmp_path: Path) -> None:
    hub.publish(repo, saved(tmp_path / "saved", 1, 20_000, kind="tied"))
    alias, stored = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"

    found = hub.call("read", repo, tmp_path / "cache", keys=[alias], ranges=True)

    whole = hub.call("read", repo, tmp_path / "cache", keys=[alias, stored])
    assert found == {alias: whole[alias]}
    assert whole.keys() == {alias, stored}


def test_damaged_tensor_is_named_and_the_others_load(
    hub: PullHub, repo: str, weights: Path, digests: dict[str, str], tmp_path: Path
) -> None:
    hub.publish(repo, weights)
    shard = "model-00005-of-00005.safetensors"
    hub.view(repo).corrupt(shard, at=(weights / shard).stat().st_size - 1)

    outcome = hub.refused("read", repo, tmp_path, keys="pooler.*", ranges=True)

    assert outcome.error == "IntegrityError"
    assert f"Tensor 'pooler.dense.bias' of shard '{repo}/{shard}' is not what was saved" in outcome.message
    assert hub.call("read", repo, tmp_path, keys=["pooler.dense.weight"], ranges=True) == {
        "pooler.dense.weight": digests["pooler.dense.weight"]
    }


def test_ranges_of_a_directory_change_nothing(hub: PullHub, weights: Path, digests: dict[str, str]) -> None:
    assert hub.call("read", weights, "unused", keys=[BIAS], ranges=True) == {BIAS: digests[BIAS]}
    assert hub.kinds() == {}


def test_name_that_is_not_there_is_told_before_any_weights_come(
    hub: PullHub, repo: str, weights: Path, tmp_path: Path
) -> None:
    hub.publish(repo, weights)
    for ranges in (False, True):
        outcome = hub.refused("read", repo, tmp_path, keys=["no.such"], ranges=ranges)
        assert outcome.error == "StateDictMismatchError"
        assert hub.kinds()["storage_get"] == 0


def test_broken_connections_do_not_disturb_ranges(
    hub: PullHub, repo: str, weights: Path, digests: dict[str, str], tmp_path: Path
) -> None:
    hub.publish(repo, weights)
    hub.server.fail(Fault(match=f"storage_get /{repo}/", kind="drop", after_bytes=700_000, how="rst"))
    hub.server.fail(Fault(match=f"storage_get /{repo}/", kind="expired", skip=1))

    found = hub.call("read", repo, tmp_path, keys=[WORDS], ranges=True)

    assert found == {WORDS: digests[WORDS]}
    assert hub.weights_down(repo) == HEADER + 2_048_000
