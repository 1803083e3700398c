"""Which names are one tensor, and which of them is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hfshard.tensors.state_dict import collect_state_dict
from hfshard.tensors.tied import find_merged_names, find_shared_tensors
from tests.distributed.gloo import check_ranks

BASE = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "other",
    [BASE, BASE.view(4, 6), BASE[:], nn.Parameter(BASE), BASE.detach(), BASE.t().t(), BASE.as_strided((4, 6), (6, 1))],
    ids=["itself", "view", "slice", "parameter", "detached", "transposed twice", "strided"],
)
def test_the_same_bytes_seen_the_same_way_are_tied(other: torch.Tensor) -> None:
    assert find_shared_tensors({"a": BASE, "b": other}) == {"b": "a"}


@pytest.mark.parametrize(
    "other",
    [
        BASE.clone(), BASE.t(), BASE.reshape(6, 4), BASE[:2], BASE[1:], BASE.view(torch.int32), BASE[:, :3],
        BASE.view(-1), BASE[0].expand(4, 6), torch._neg_view(BASE),
    ],
    ids=["clone", "transposed", "shape", "prefix", "suffix", "dtype", "columns", "flat", "expanded", "negative"],
)  # fmt: skip
def test_anything_else_is_a_tensor_of_its_own(other: torch.Tensor) -> None:
    assert find_shared_tensors({"a": BASE, "b": other}) == {}


def test_strides_of_dimensions_of_size_one_say_nothing() -> None:
    column = torch.arange(5.0).reshape(5, 1)
    assert find_shared_tensors({"a": column, "b": column.as_strided((5, 1), (1, 77))}) == {"b": "a"}


def test_a_tensor_and_its_conjugate_are_not_tied() -> None:
    values = torch.ones(3, dtype=torch.complex64)
    assert find_shared_tensors({"a": values, "b": values.conj()}) == {}


def test_empty_tensors_are_never_tied() -> None:
    empty = torch.zeros(0, 3)
    assert find_shared_tensors({"a": empty, "b": empty}) == {}


def test_of_three_names_the_first_in_the_alphabet_is_stored() -> None:
    assert find_shared_tensors({"c": BASE, "a": BASE, "b": BASE}) == {"c": "a", "b": "a"}


def test_a_name_that_the_model_declares_as_tied_gives_way() -> None:
    names = {"a.lm_head.weight": BASE, "model.embed.weight": BASE}
    assert find_shared_tensors(names, droppable_patterns=[r"lm_head\.weight"]) == {
        "a.lm_head.weight": "model.embed.weight"
    }


def test_when_all_names_are_declared_the_last_is_stored() -> None:
    names = {"decoder": BASE, "encoder": BASE}
    assert find_shared_tensors(names, droppable_patterns=["decoder", "encoder"]) == {"decoder": "encoder"}


def test_two_groups_are_told_apart_and_come_in_the_order_of_the_dict() -> None:
    other = torch.zeros(3)
    assert list(find_shared_tensors({"d": other, "b": BASE, "c": other, "a": BASE}).items()) == [("d", "c"), ("b", "a")]


class _Tied(nn.Module):
    """A head that is tied to the embedding, and a weight that only looks alike; all have fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1, 4)
        self.head = nn.Linear(4, 1, bias=False)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(4, 1, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return torch.cat([self.head(hidden), self.other(hidden)])


def _check_tied_dtensors(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    for is_kept_whole in (False, True):
        model = _Tied()
        fully_shard(model, reshard_after_forward=not is_kept_whole)
        assert find_shared_tensors(model.state_dict()) == {"head.weight": "embed.weight"}
        model(torch.zeros(1, dtype=torch.long))
        assert (type(model.head.weight.data) is torch.Tensor) == is_kept_whole
        collected = collect_state_dict(model)
        assert all(isinstance(tensor, DTensor) for tensor in collected.values())
        assert find_shared_tensors(collected) == {"head.weight": "embed.weight"}

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    row = distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)])
    copy = DTensor.from_local(torch.ones(1, 4), mesh, [Replicate()])
    summands = DTensor.from_local(copy.to_local(), mesh, [Shard(0)], shape=row.shape, stride=row.stride())
    assert find_shared_tensors({"a": row, "b": row.detach(), "c": row.clone(), "d": copy, "e": summands}) == {"b": "a"}
    view = DTensor.from_local(torch.ones(2, 4)[1:], mesh, [Replicate()])
    assert view.data_ptr() != 0 and find_merged_names({"a": copy}, {"a": view}) is None
    assert find_shared_tensors({"a": copy, "b": copy.to_local()}) == {}
    assert find_shared_tensors({"a": copy.to("meta"), "b": copy.to("meta")}) == {}


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_agree_which_dtensors_are_tied(tmp_path: Path, world_size: int) -> None:
    check_ranks(tmp_path, world_size, _check_tied_dtensors)
