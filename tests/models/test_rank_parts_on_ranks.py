"""Which rectangle of which tensor each stored one is, and which ones are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hfshard.models import rank_parts
from hfshard.models.rank_parts import ConvertedTensor, trace_reverted
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat


def test_each_expert_is_a_rectangle_of_the_fused_ones() -> None:
    model = ZOO["qwen3_moe"].build()

    traced = trace_reverted(model, model.state_dict())

    experts = "model.layers.1.mlp.experts"
    fused = f"{experts}.gate_up_proj"  # [4 experts, 2 x 16 features, 32]
    assert traced[f"{experts}.2.gate_proj.weight"] == ConvertedTensor(
        (16, 32), torch.float32, (fused,), ((2, 3), (0, 16), (0, 32))
    )
    assert traced[f"{experts}.3.up_proj.weight"].window == ((3, 4), (16, 32), (0, 32))
    assert traced["model.norm.weight"] == ConvertedTensor((32,), torch.float32, ("model.norm.weight",), ((0, 32),))
    assert list(traced)[:2] == ["lm_head.weight", "model.embed_tokens.weight"]


def written(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy[0] = 0
    return copy


Reversion = Callable[[dict[str, torch.Tensor]], torch.Tensor]
VIEWS: dict[str, tuple[Reversion, tuple[tuple[int, int], ...]]] = {
    "itself": (lambda it: it["a"].contiguous().detach(), ((0, 6), (0, 4))),
    "in another shape": (lambda it: it["a"].reshape(2, 3, 4), ((0, 6), (0, 4))),
    "a column": (lambda it: it["a"][:, 1:2], ((0, 6), (1, 2))),
    "a chunk of rows": (lambda it: torch.chunk(it["a"], 3)[1].contiguous(), ((2, 4), (0, 4))),
    "half a row": (lambda it: it["a"].view(-1)[4:6].unsqueeze(0), ((1, 2), (0, 2))),
    "one element": (lambda it: it["a"][5, 3], ((5, 6), (3, 4))),
    "nothing": (lambda it: it["empty"].t().t(), ((0, 0), (0, 3))),
}
COMPUTED: dict[str, tuple[Reversion, tuple[str, ...]]] = {
    "transposed": (lambda it: it["a"].t().contiguous(), ("a",)),
    "two rows and a half": (lambda it: it["a"].view(-1)[:10], ("a",)),
    "every other row": (lambda it: it["a"][::2], ("a",)),
    "expanded": (lambda it: it["a"][:1].expand(6, 4), ("a",)),
    "concatenated": (lambda it: torch.cat([it["b"], it["a"]])[6:], ("a", "b")),
    "cast": (lambda it: it["a"].half(), ("a",)),
    "as other bits": (lambda it: it["a"].view(torch.int32), ("a",)),
    "written into a copy": (lambda it: written(it["a"]), ("a",)),
    "put into a new tensor": (lambda it: torch.empty_like(it["b"]).copy_(it["a"]), ("a", "b")),
    "given by nobody": (lambda it: torch.zeros(3, device="meta"), ()),
}


def traced_as(reversion: Reversion, monkeypatch: pytest.MonkeyPatch) -> ConvertedTensor:
    def revert(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"stored": reversion(tensors)}

    monkeypatch.setattr(rank_parts, "revert_weight_conversion", revert)
    tensors = {"a": torch.zeros(6, 4), "b": torch.zeros(6, 4), "empty": torch.zeros(0, 3)}
    return trace_reverted(torch.nn.Linear(1, 1), tensors)["stored"]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", VIEWS)
def test_a_view_is_a_rectangle_of_its_source(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reversion, window = VIEWS[case]
    assert traced_as(reversion, monkeypatch).window == window


@pytest.mark.parametrize("case", COMPUTED)
def test_what_shows_another_order_is_computed_from_its_sources(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reversion, sources = COMPUTED[case]
    traced = traced_as(reversion, monkeypatch)
    assert (traced.window, traced.sources) == (None, sources)
