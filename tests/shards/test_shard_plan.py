"""Plans worked out by hand: a file is 4,096 bytes of header (for few tensors), then its tensors."""

from __future__ import annotations

import pytest
import torch

import hfshard
from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from hfshard.format.file_names import WeightNames
from hfshard.shards.shard_plan import plan_specs, with_one_more_shard
from hfshard.tensors.stored_tensor import TensorSpec

NAMES = WeightNames()
HEADER = 4096


def spec(name: str, nbytes: int) -> TensorSpec:
    return TensorSpec(name, "U8", (nbytes,), nbytes)


def groups(sizes: dict[str, int], limit: int, packing: str = "greedy") -> list[list[str]]:
    plan = plan_specs([spec(*item) for item in sizes.items()], limit, packing=packing, names=NAMES)  # type: ignore[arg-type]
    return [list(shard.names) for shard in plan.shards]


def test_what_fits_goes_into_one_file_by_its_plain_name() -> None:
    plan = hfshard.plan_shards({"a": torch.zeros(10), "b": torch.zeros(10)}, HEADER + 80)
    assert plan.weight_map == {"a": "model.safetensors", "b": "model.safetensors"}
    assert (plan.is_sharded, plan.total_size, plan.max_shard_size) == (False, 80, 4176)


def test_one_byte_less_makes_two_files() -> None:
    plan = hfshard.plan_shards({"a": torch.zeros(10), "b": torch.zeros(10)}, HEADER + 79)
    assert plan.weight_map == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    assert [shard.nbytes for shard in plan.shards] == [40, 40]


@pytest.mark.parametrize(
    ("sizes", "free", "greedy", "balanced"),
    [
        ([40, 40, 40, 40], 80, ["ab", "cd"], ["ac", "bd"]),
        ([10, 70, 10, 70], 80, ["ab", "cd"], ["ab", "cd"]),
        ([50, 50, 30, 30], 80, ["a", "bc", "d"], ["ac", "bd"]),
        ([90, 10, 10], 80, ["a", "bc"], ["a", "bc"]),
        ([10, 90, 10], 80, ["b", "ac"], ["ac", "b"]),
        ([90, 90, 90], 80, ["a", "b", "c"], ["a", "b", "c"]),
        ([0, 0, 90], 80, ["c", "ab"], ["ab", "c"]),
    ],
)
def test_greedy_keeps_the_order_and_balanced_makes_the_fewest(
    sizes: list[int], free: int, greedy: list[str], balanced: list[str]
) -> None:
    # Balanced deals the largest first, each to the least filled file. It counts the entries in the header with the
    # data, and so gets a limit that is a page wider.
    scaled = {name: size * 1000 for name, size in zip("abcd", sizes)}
    assert groups(scaled, HEADER + free * 1000) == [list(names) for names in greedy]
    assert groups(scaled, 2 * HEADER + free * 1000, "balanced") == [list(names) for names in balanced]


@pytest.mark.parametrize("limit", [1, 10, 4096])
def test_a_limit_below_a_header_gives_each_tensor_a_file(limit: int) -> None:
    assert groups({"a": 5, "b": 5, "c": 0}, limit) == [["a"], ["b"], ["c"]]


def test_nothing_to_save_is_one_empty_file() -> None:
    plan = hfshard.plan_shards({}, 1)
    assert (len(plan.shards), plan.weight_map, plan.total_size) == (1, {}, 0)


def test_a_tie_is_planned_once_and_named() -> None:
    shared = torch.zeros(10)
    plan = hfshard.plan_shards({"b": shared, "a": shared, "c": shared[:5]})
    assert plan.tied_names == {"b": "a"} or plan.tied_names == {"a": "b"}
    assert (plan.total_size, len(plan.weight_map)) == (60, 2)


def test_a_variant_is_part_of_the_names() -> None:
    plan = hfshard.plan_shards({"a": torch.zeros(10), "b": torch.zeros(10)}, 1, variant="fp16")
    assert [shard.file for shard in plan.shards] == [
        "model.fp16-00001-of-00002.safetensors",
        "model.fp16-00002-of-00002.safetensors",
    ]


def test_one_more_shard_splits_the_smallest_and_leaves_the_others() -> None:
    plan = plan_specs([spec("a", 5), spec("b", 5), spec("c", 4), spec("d", 9)], HEADER + 13, names=NAMES)
    assert [shard.names for shard in plan.shards] == [("a", "b"), ("c", "d")]
    more = with_one_more_shard(plan, NAMES)
    assert [(shard.file, shard.names) for shard in more.shards] == [
        ("model-00001-of-00003.safetensors", ("a",)),
        ("model-00002-of-00003.safetensors", ("b",)),
        ("model-00003-of-00003.safetensors", ("c", "d")),
    ]


def test_one_more_shard_of_single_tensors_is_an_empty_one() -> None:
    plan = plan_specs([spec("a", 5)], 10**6, names=NAMES)
    assert [(shard.file, shard.names) for shard in with_one_more_shard(plan, NAMES).shards] == [
        ("model-00001-of-00002.safetensors", ("a",)),
        ("model-00002-of-00002.safetensors", ()),
    ]


def test_a_packing_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'tight'"):
        hfshard.plan_shards({}, packing="tight")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (1.5, "float"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), r"sparse.*to_dense\(\)"),
        (torch.empty(2, dtype=torch.bits8), "bits8"),
    ],
    ids=["float", "meta", "sparse", "bits8"],
)
def test_what_the_format_has_no_bytes_for_is_refused_by_name(value: object, problem: str) -> None:
    with pytest.raises(UnstorableTensorError, match=problem) as caught:
        hfshard.plan_shards({"fine": torch.zeros(1), "wrong": value})  # type: ignore[dict-item]
    assert caught.value.fqn == "wrong"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensor_is_refused_with_what_can_be_done_with_it(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)
    with pytest.raises(UnstorableTensorError, match=r"'wrong': it is a nested tensor\. .*unbind\(\)") as caught:
        hfshard.plan_shards({"wrong": nested})
    assert "to_dense" not in str(caught.value)

    padded = torch.nested.to_padded_tensor(nested, 0.0)
    assert hfshard.plan_shards({"right": padded, "row": nested.unbind()[1]}).total_size == 16 + 8
