"""Loads into modules and state dicts that are spread over ranks, compared with the whole tensors that were saved."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hfshard
from hfshard.errors import (
    CheckpointChangedError,
    DamagedCheckpointError,
    HubNotFoundError,
    InvalidArgumentError,
    RankFailedError,
    StateDictMismatchError,
)
from hfshard.places import store_mirror
from tests.distributed.gloo import check_ranks, make_mesh, run_ranks, waiting
from tests.servers.hub.hub_server import HubServer
from tests.stores.saving.memory_store import MemoryStore
from tests.zoo.mixin_classes import with_mixin


class Tiny(nn.Module):
    """Uneven dimensions, a tie, plain buffers, a module that loads by itself, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.up = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.down = nn.Linear(12, 8, dtype=torch.float32)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([1.0]), requires_grad=False)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(self.embedding(tokens)))
        return self.head(self.down(hidden) * self.scale)  # type: ignore[no-any-return]


def saved_model() -> Tiny:
    """The same in every process."""
    torch.manual_seed(5)
    model = Tiny()
    with torch.no_grad():
        model.norm.running_mean.uniform_()  # type: ignore[union-attr]
        model.norm.num_batches_tracked.fill_(3)  # type: ignore[union-attr]
        model.mask.copy_(torch.tensor([True, False, True]))  # type: ignore[operator]
        model.scale.fill_(2.5)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process saved."""
    directory = tmp_path_factory.mktemp("saved")
    hfshard.save_model(saved_model(), directory, max_shard_size="1kB")
    return directory


def fully_shard_all(model: Tiny, mesh: Any, **options: Any) -> Tiny:
    from torch.distributed.fsdp import fully_shard

    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[return-value]


def split_layers(model: Tiny, mesh: Any) -> Tiny:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})  # type: ignore[return-value]


def in_both(model: Tiny, mesh: Any) -> Tiny:
    return fully_shard_all(split_layers(model, mesh["b"]), mesh["a"])


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def assert_loaded(model: nn.Module) -> None:
    expected = saved_model().state_dict()
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def load_in_layouts(rank: int, world_size: int, saved: Path) -> None:
    layouts: dict[str, Callable[[Tiny], Tiny]] = {
        "fsdp": lambda model: fully_shard_all(model, make_mesh(world_size)),
        "tp": lambda model: split_layers(model, make_mesh(world_size)),
    }
    if world_size == 4:
        layouts["hsdp"] = lambda model: fully_shard_all(model, make_mesh(2, 2))
        layouts["both"] = lambda model: in_both(model, make_mesh(2, 2))
    for parallelize in layouts.values():
        torch.manual_seed(rank)
        model = parallelize(Tiny())
        parameters = dict(model.named_parameters())

        _, info = hfshard.load_model(model, saved, verify="full", output_loading_info=True)

        assert_loaded(model)
        assert dict(model.named_parameters()) == parameters or all(
            one is parameters[name] for name, one in model.named_parameters()
        )
        assert info["missing_keys"] == set()

        state = hfshard.load_state_dict(saved, like=model.state_dict())
        for name, tensor in model.state_dict().items():
            assert type(state[name]) is type(tensor)
            assert torch.equal(whole(state[name]), whole(tensor))
            if hasattr(tensor, "placements"):
                assert state[name].placements == tensor.placements  # type: ignore[attr-defined]
        assert state["head.weight"] is state["embedding.weight"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_one_process_saved_is_loaded_in_each_layout(tmp_path: Path, saved: Path, world_size: int) -> None:
    check_ranks(tmp_path, world_size, load_in_layouts, world_size, saved)


def load_after_a_forward_pass(rank: int, saved: Path) -> None:
    tokens = torch.tensor([0, 3, 8])
    model = fully_shard_all(Tiny(), make_mesh(2), reshard_after_forward=False).eval()
    model(tokens)

    hfshard.load_model(model, saved)

    assert_loaded(model)
    torch.testing.assert_close(model(tokens), saved_model().eval()(tokens))


def load_into_meta(rank: int, saved: Path) -> None:
    tokens = torch.tensor([0, 3, 8])
    for parallelize in (fully_shard_all, split_layers):
        with torch.device("meta"):
            model = Tiny().eval()
        model.embedding.weight.requires_grad_(False)
        parallelize(model, make_mesh(2))

        hfshard.load_model(model, saved)

        assert_loaded(model)
        assert model.head.weight is model.embedding.weight
        assert not model.head.weight.requires_grad
        assert not model.scale.requires_grad
        assert model.up.weight.requires_grad
        if parallelize is fully_shard_all:  # of TP, upstream's embedding gives plain tensors
            torch.testing.assert_close(model(tokens), saved_model().eval()(tokens))


class Renamed(nn.Module):
    """Has hooks before and after a load, and one below it that takes in tensors by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 4, bias=False)
        self.hooked = nn.Linear(4, 4, bias=False)
        self.seen: list[str] = []
        self.hooked.register_load_state_dict_pre_hook(self._doubled)
        self.register_load_state_dict_post_hook(lambda module, keys: self.seen.append("after"))  # type: ignore[no-untyped-call]

    def _doubled(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.seen.append(prefix)
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


def load_with_hooks(rank: int, place: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Renamed()
    for layer in (model.plain, model.hooked):
        fully_shard(layer, mesh=make_mesh(2))
    fully_shard(model, mesh=make_mesh(2))

    hfshard.load_model(model, place)

    assert torch.equal(whole(model.plain.weight), torch.arange(16.0).view(4, 4))
    assert torch.equal(whole(model.hooked.weight), torch.arange(16.0).view(4, 4) * 2)
    assert model.seen == ["hooked.", "after"]


def refuse_on_all_ranks(rank: int, saved: Path, place: Path) -> None:
    mesh = make_mesh(2)

    def refused(directory: Path, kind: type[Exception], match: str, model: nn.Module, **options: Any) -> None:
        before = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(kind, match=match):
            hfshard.load_model(model, directory, **options)
        assert all(torch.equal(whole(tensor), before[name]) for name, tensor in model.state_dict().items())

    model = fully_shard_all(Tiny(), mesh)
    if rank == 0:
        with waiting(0):
            hfshard.save_state_dict({"up.weight": torch.zeros(2)}, place / "small")
    dist.barrier()

    # a shape differs, on every rank
    refused(place / "small", StateDictMismatchError, r"up.weight \[2\] in the checkpoint, \[12, 8\]", model)
    # one rank's file is damaged, which the other one learns
    (place / f"{rank}").mkdir()
    for path in saved.iterdir():
        raw = bytearray(path.read_bytes())
        if rank == 1 and path.suffix == ".safetensors":
            raw[-1] ^= 1
        (place / f"{rank}" / path.name).write_bytes(raw)
    kind: type[Exception] = RankFailedError if rank == 0 else DamagedCheckpointError
    refused(place / f"{rank}", kind, "is not the file that was saved", model, verify="full")
    # ranks have different checkpoints
    with waiting(0):
        hfshard.save_model(saved_model(), place / f"other-{rank}", max_shard_size="1kB" if rank else "1MB")
    refused(place / f"other-{rank}", CheckpointChangedError, "Ranks 0 and 1 have different checkpoints", model)
    # and afterwards the same ranks load
    hfshard.load_model(model, saved)
    assert_loaded(model)


def load_like(rank: int, saved: Path) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = make_mesh(2)
    up = saved_model().up.weight.detach()
    columns = distribute_tensor(torch.zeros(12, 8, dtype=torch.bfloat16), mesh, [Shard(1)])
    part = torch.empty(5 - rank, 8, device="meta")
    meta = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size((9, 8)), stride=(8, 1))
    copied = distribute_tensor(torch.zeros(1), mesh, [Replicate()])

    state = hfshard.load_state_dict(saved, like={"up.weight": columns, "head.weight": meta, "scale": copied})

    assert list(state) == ["up.weight", "head.weight", "scale"]
    assert torch.equal(state["up.weight"].to_local(), up.bfloat16()[:, 4 * rank : 4 * rank + 4])  # type: ignore[attr-defined]
    assert state["up.weight"].placements == (Shard(1),)  # type: ignore[attr-defined]
    assert torch.equal(whole(state["head.weight"]), saved_model().head.weight)
    assert state["scale"].to_local().tolist() == [2.5]  # type: ignore[attr-defined]
    assert not whole(columns).any()

    one_lacks = {"scale": copied, **({"absent": copied} if rank else {})}
    with pytest.raises(StateDictMismatchError if rank else RankFailedError, match="1 missing: absent"):
        hfshard.load_state_dict(saved, like=one_lacks)
    with pytest.raises(StateDictMismatchError, match=r"'scale' .* is torch.float32, whose values torch.int32 cannot"):
        hfshard.load_state_dict(saved, like={"scale": copied.int()})
    summands = DTensor.from_local(torch.zeros(1), mesh, [Partial()], run_check=False)
    with pytest.raises(InvalidArgumentError, match=r"Cannot load into 'scale', .*: its ranks have summands of it"):
        hfshard.load_state_dict(saved, like={"scale": summands})
    if rank == 1:  # of plain tensors, each rank loads its own
        assert hfshard.load_state_dict(saved, like={"scale": torch.zeros(1)})["scale"].tolist() == [2.5]


def load_by_fsdp1(rank: int, saved: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings(action="ignore"):  # FSDP1 is deprecated
        model = FullyShardedDataParallel(Tiny(), device_id=torch.device("cpu"), use_orig_params=True)
        hfshard.load_model(model, saved)
        with FullyShardedDataParallel.summon_full_params(model):
            assert torch.equal(dict(model.module.named_parameters())["up.weight"], saved_model().up.weight)


def load_in_many_ways(rank: int, saved: Path, place: Path) -> None:
    load_after_a_forward_pass(rank, saved)
    load_into_meta(rank, saved)
    load_with_hooks(rank, place / "hooked")
    refuse_on_all_ranks(rank, saved, place)
    load_like(rank, saved)
    load_by_fsdp1(rank, saved)


def test_modules_and_state_dicts_in_many_states(tmp_path: Path, saved: Path) -> None:
    weight = torch.arange(16.0).view(4, 4)
    hfshard.save_state_dict({"plain.weight": weight, "hooked.weight": weight}, tmp_path / "hooked")

    check_ranks(tmp_path / "ranks", 2, load_in_many_ways, saved, tmp_path)


def test_like_without_other_ranks(saved: Path) -> None:
    state = hfshard.load_state_dict(
        saved, like={"up.bias": torch.zeros(12, dtype=torch.float64), "scale": torch.zeros(1, device="meta")}
    )

    assert torch.equal(state["up.bias"], saved_model().up.bias.double())
    assert state["scale"].tolist() == [2.5]

    with pytest.raises(StateDictMismatchError, match=r"up.bias \[12\] in the checkpoint, \[3\] in "):
        hfshard.load_state_dict(saved, like={"up.bias": torch.zeros(3)})
    with pytest.raises(InvalidArgumentError, match="Cannot combine like= with keys="):
        hfshard.load_state_dict(saved, like={}, keys="*")
    with pytest.raises(InvalidArgumentError, match="'scale' is mapped to a float"):
        hfshard.load_state_dict(saved, like={"scale": 2.5})  # type: ignore[dict-item]


# Ranks that load one checkpoint of the Hub: one of them asks for it, and one of each cache downloads it.

TENSORS = {name: torch.arange(4000.0) + number for number, name in enumerate("ab")}


def load_from_hub(rank: int, place: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    like: dict[str, Any] = {name: distribute_tensor(torch.zeros(4000), mesh, [Shard(0)]) for name in TENSORS}
    with pytest.raises(HubNotFoundError if rank == 0 else RankFailedError, match=r"HubNotFoundError|no repo"):
        hfshard.load_state_dict("org/absent", like=like)
    for cache in (place / "common", place / f"of-{rank}"):
        state = hfshard.load_state_dict("org/m", like=like, cache_dir=cache, verify="full")
        assert torch.equal(state["b"].full_tensor(), TENSORS["b"])  # type: ignore[attr-defined]
        refs = cache / "models--org--m" / "refs" / "main"
        assert len(refs.read_text()) == 40


def test_one_rank_asks_the_hub_and_one_of_each_cache_downloads(
    hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hfshard.save_state_dict(TENSORS, tmp_path / "saved", max_shard_size="20KB")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    hub_server.create_repo("org/m")
    hub_server.repo("org/m").commit(dict(files), "Save")
    hub_server.clear_log()
    for name, value in hub_server.environment(home=tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    ends = run_ranks(tmp_path / "ranks", 2, load_from_hub, tmp_path)

    assert [end.status for end in ends] == [0, 0], "\n".join(end.words for end in ends)
    asked = Counter((request.kind, request.path.partition("?")[0].count("/revision/")) for request in hub_server.log)
    assert asked == {
        ("info", 0): 1 + 2,  # of the repo that is absent, and of main for two loads
        ("info", 1): 1 + 2,  # of the commit, for each cache
        ("resolve_get", 0): 1 + 2,
        ("lfs_batch", 0): 1 + 2,
        ("storage_get", 0): 2 * (1 + 2),
    }


# Ranks that load a signed checkpoint from a store, a file of which is replaced after their last meeting.

ADDRESS = "s3://models/llama"
NOTICED_SECONDS = 60.0
"""Longer than a load takes on a busy machine, and much shorter than ranks wait for each other."""
MODEL: Any = with_mixin(LlamaForCausalLM)


def spread(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def load(key: Path) -> Any:
    return MODEL.from_pretrained(ADDRESS, parallelize=spread, public_key=key)


def load_what_changes(rank: int, saved: Path, key: Path) -> None:
    store = MemoryStore({path.name: path.read_bytes() for path in saved.iterdir()})
    vars(store_mirror)["open_store"] = lambda address: store
    asked: Counter[str] = Counter()
    store.before = lambda kind, name: asked.update([kind])
    load(key)
    last = asked["list"]  # whether the weights are still those that were opened, before the model is built

    def replace(kind: str, name: str) -> None:
        asked.update([kind])
        if rank == 1 and asked["list"] == 2 * last:
            store.objects["generation_config.json"] = b"{}"

    store.before = replace
    start = time.monotonic()
    error, words = (CheckpointChangedError, "The") if rank == 1 else (RankFailedError, "Rank 1 failed.* the")
    with pytest.raises(error, match=rf"(?i)^{words} .*checkpoint in '{ADDRESS}' was replaced while it was loaded"):
        load(key)
    assert time.monotonic() - start < NOTICED_SECONDS
    assert asked["list"] == 2 * last  # no rank starts again


def test_a_rank_that_notices_a_change_after_the_last_meeting_fails_on_all_at_once(tmp_path: Path) -> None:
    from tests.signing.conftest import write_pair

    private, public = write_pair(tmp_path, "key")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    MODEL(LlamaConfig(**sizes, intermediate_size=32, num_hidden_layers=1)).save_pretrained(tmp_path / "saved")
    hfshard.sign_checkpoint(tmp_path / "saved", private_key=private)

    check_ranks(tmp_path / "ranks", 2, load_what_changes, tmp_path / "saved", public)
