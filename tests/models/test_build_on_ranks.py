"""Models that all ranks build together: what one refuses, all refuse, and all build the same checkpoint or commit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from hfshard.errors import (
    CheckpointChangedError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    MissingShardError,
    RankFailedError,
)
from tests.distributed.gloo import await_file, check_ranks, free_port, run_ranks
from tests.helpers import processes
from tests.helpers.tiny_bert import Bert, bert
from tests.hub.on_ranks import talking_to
from tests.models.layouts import spread
from tests.models.specimens import SPECIMENS
from tests.saving.helpers import files_in, flip
from tests.servers.hub.hub_server import Fault, HubServer
from tests.zoo.mixin_classes import with_mixin

SHARDS = "20KB"
FULLY = partial(spread, layout="fsdp")


Mine: Any = with_mixin(LlamaForCausalLM)


def by_function(path: Path, **options: Any) -> Any:
    return Mine.from_pretrained(path, parallelize=FULLY, **options)


def by_config(path: Path, **options: Any) -> Any:
    return hfshard.load_model(AutoModelForCausalLM, path, distributed_config=DistributedConfig(fsdp_size=2), **options)


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def without_a_shard(directory: Path) -> None:
    first_shard(directory).unlink()


def hostile_header(directory: Path) -> None:
    path = first_shard(directory)
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def flipped_bit(directory: Path) -> None:
    flip(first_shard(directory), -1)


def other_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")


def other_config(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))


def other_weights(directory: Path) -> None:
    """Of the same names, shapes and sizes, saved by stock transformers: nothing in the index tells them apart."""
    shutil.copytree(directory.parent / "other", directory, dirs_exist_ok=True)


def refuse_on_both_ranks(rank: int, place: Path) -> None:
    cases: tuple[tuple[str, Callable[[Path], None], type[HfshardError], dict[str, Any]], ...] = (
        ("ours", without_a_shard, MissingShardError, {}),
        ("ours", hostile_header, DamagedCheckpointError, {}),
        ("ours", other_generation_config, DamagedCheckpointError, {}),
        ("ours", flipped_bit, IntegrityError, {"verify": "full"}),
        ("stock", other_config, CheckpointChangedError, {}),
        ("stock", other_weights, CheckpointChangedError, {}),
    )
    for load in (by_function, by_config):
        for number, (saved, damage, kind, options) in enumerate(cases):
            failing = number % 2
            own = place / f"{load.__name__}-{damage.__name__}-{rank}"
            shutil.copytree(place / saved, own)
            if rank == failing:
                damage(own)
            expected = kind if rank == failing or kind is CheckpointChangedError else RankFailedError
            with pytest.raises(expected) as caught:
                load(own, **options)
            case = load.__name__, damage.__name__
            assert type(caught.value) is expected, case
            if isinstance(caught.value, RankFailedError):
                assert caught.value.rank == failing, case
                assert kind.__name__ in str(caught.value), case
        assert load(place / "ours", verify="full").lm_head.weight.full_tensor().shape[0] == 64


def fail_in_function(rank: int, place: Path) -> None:
    def fail(model: Any) -> Any:
        if rank == 1:
            raise MemoryError("no room")
        return FULLY(model)

    with pytest.raises(MemoryError if rank == 1 else RankFailedError, match="no room"):
        Mine.from_pretrained(place / "ours", parallelize=fail)
    if rank == 1:  # a model that no other rank has is loaded by this rank alone
        Mine.from_pretrained(place / "ours")
        Mine.from_pretrained(place / "ours", distributed_config=DistributedConfig(fsdp_size=1))


def refuse_everywhere(rank: int, place: Path) -> None:
    refuse_on_both_ranks(rank, place)
    fail_in_function(rank, place)


def die_in_function(rank: int, place: Path) -> None:
    def die(model: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()  # as code of users and of transformers may do
        return FULLY(model)

    with pytest.raises(RankFailedError, match=r"Rank 1 sent no (more )?heartbeat") as caught:
        Mine.from_pretrained(place, parallelize=die)
    assert caught.value.rank == 1
    os._exit(0)


def test_a_rank_that_dies_while_the_model_is_spread_is_named(tmp_path: Path) -> None:
    SPECIMENS["llama_untied_even"].build(Mine).save_pretrained(tmp_path / "ours")

    ends = run_ranks(tmp_path / "ranks", 2, die_in_function, tmp_path / "ours", ports=[free_port()])

    assert [end.status for end in ends] == [0, -signal.SIGKILL], ends[0].words


def load_without_a_group(rank: int, place: Path, port: int) -> None:
    """What torchrun starts, and transformers makes a process group of."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(RankFailedError if rank == 0 else MissingShardError):
        by_config(place / f"{rank}")
    os._exit(0)


@pytest.mark.compat
def test_ranks_of_a_launcher_agree_before_transformers_makes_its_group(tmp_path: Path) -> None:
    for rank in range(2):
        SPECIMENS["llama_untied_even"].build(Mine).save_pretrained(tmp_path / f"{rank}", max_shard_size=SHARDS)
    without_a_shard(tmp_path / "1")
    port = free_port()

    def run(rank: int) -> processes.End:
        return processes.end_of(tmp_path / f"{rank}.txt", load_without_a_group, rank, tmp_path, port)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(run, range(2)))

    assert [end.status for end in ends] == [0, 0], "\n".join(end.words for end in ends)


@pytest.mark.compat
def test_what_one_rank_refuses_no_rank_builds(tmp_path: Path) -> None:
    specimen = SPECIMENS["llama_untied_even"]
    specimen.build(Mine).save_pretrained(tmp_path / "ours", max_shard_size=SHARDS)
    stock = specimen.build()
    stock.save_pretrained(tmp_path / "stock", max_shard_size=SHARDS)
    with torch.no_grad():
        stock.lm_head.weight.add_(1)
    stock.save_pretrained(tmp_path / "other", max_shard_size=SHARDS)
    check_ranks(tmp_path / "ranks", 2, refuse_everywhere, tmp_path)


REPO = "org/moving"


def load_in_all_ways(repo: str | Path, cache: Path) -> dict[str, float]:
    """What each call loads: the one number that the whole of it is full of."""
    mine = fully_shard(bert(-1))
    hfshard.load_model(mine, repo, cache_dir=cache / "1")
    like = fully_shard(bert(-1)).state_dict()
    found = {
        "load_model": mine.state_dict(),
        "load_state_dict": hfshard.load_state_dict(repo, like=like, cache_dir=cache / "2"),
        "from_pretrained": Bert.from_pretrained(repo, parallelize=fully_shard, cache_dir=cache / "3").state_dict(),
    }
    return {call: value_of(state) for call, state in found.items()}


def value_of(state: dict[str, Any]) -> float:
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in state.values()]
    (value,) = {float(number) for tensor in whole for number in tensor.unique()}
    return value


def load_from_the_hub(rank: int, endpoint: str, place: Path) -> None:
    with talking_to(endpoint, place / f"home-{rank}"):
        load_in_all_ways(REPO, place / f"cache-{rank}")  # each of which finds one number


@pytest.mark.compat
def test_all_ranks_load_the_commit_that_one_has_found(hub_server: HubServer, tmp_path: Path) -> None:
    view = hub_server.create_repo(REPO)
    saved = []
    for value in range(8):
        bert(value).save_pretrained(tmp_path / str(value), max_shard_size=4696)
        saved.append(files_in(tmp_path / str(value)))
    view.commit(saved.pop(), "first")

    def move() -> None:
        if saved:
            view.commit(saved.pop(), "next")

    hub_server.fail(Fault(match="GET info", kind="race", times=100, action=move))
    check_ranks(tmp_path / "ranks", 2, load_from_the_hub, hub_server.endpoint, tmp_path)
    assert not saved  # it has moved with every question


def when_opening(words: str, work: Callable[[], object]) -> None:
    """Do something, once, right before this process opens a file whose path has these words."""
    wanted = [words]

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and wanted and wanted[0] in str(args[0]):
            wanted.clear()
            work()

    sys.addaudithook(look)


def load_from_a_directory_hub(rank: int, place: Path) -> None:
    hub = place / "hub"
    has_found = place / "rank 0 has found a commit"

    def push() -> None:
        await_file(has_found)
        hfshard.push_checkpoint(place / "new", hub)

    if rank:
        when_opening("refs/heads/main", push)
    else:
        when_opening("/commits/", has_found.touch)
    loaded = hfshard.load_state_dict(hub, like=fully_shard(bert(-1)).state_dict())
    assert value_of(loaded) == 1
    dist.barrier()
    assert load_in_all_ways(hub, place) == dict.fromkeys(("load_model", "load_state_dict", "from_pretrained"), 2)
    with pytest.raises(RankFailedError if rank else FileNotFoundError):
        hfshard.load_state_dict(place / "absent" if rank == 0 else hub, like=fully_shard(bert(-1)).state_dict())


def test_all_ranks_load_one_commit_of_a_directory_hub(tmp_path: Path) -> None:
    bert(1).push_to_hub(tmp_path / "hub")
    bert(2).save_pretrained(tmp_path / "new")
    check_ranks(tmp_path / "ranks", 2, load_from_a_directory_hub, tmp_path)
