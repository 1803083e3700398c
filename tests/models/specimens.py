"""The models that are spread over ranks: those of the zoo, some of other sizes, and one of each kind of contents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.zoo.models import ZOO, Specimen


class BufferedLlama(LlamaForCausalLM):
    """Stores buffers of other dtypes, of no dimension and of no element."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("scale", torch.tensor(0.0, dtype=torch.float16))
        self.register_buffer("table", torch.zeros(7, 3, dtype=torch.int8))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


@dataclass(frozen=True, slots=True)
class OwnSpecimen(Specimen):
    """A model of a class of these tests."""

    own_class: type[PreTrainedModel] = PreTrainedModel

    @property
    def stock_class(self) -> type[PreTrainedModel]:
        """The class itself."""
        return self.own_class


def _config(name: str, **values: int) -> Any:
    config = ZOO[name].make_config()
    for key, value in values.items():
        setattr(config, key, value)
    return config


_even = partial(_config, vocab_size=64, num_key_value_heads=2)
"""The sizes that transformers' own tensor parallelism takes in its oldest version, too."""
_uneven = partial(_config, "llama_untied", intermediate_size=51, num_key_value_heads=2)
"""No dimension of a matrix but its features can be halved; the vocabulary is odd."""
_six_experts = partial(_config, "qwen3_moe", num_experts=6)


def freeze(model: Any) -> None:
    """Train one layer only."""
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)


EVEN = {
    f"{name}_even": replace(ZOO[name], name=f"{name}_even", make_config=partial(_even, name))
    for name in ("llama_untied", "llama_tied", "llama_bf16", "qwen3_moe")
}
SIX_EXPERTS = "qwen3_moe_six"
"""Four ranks have two, two, two and none of the experts."""
KINDS = {
    "llama": EVEN["llama_untied_even"],
    "tied": EVEN["llama_tied_even"],
    "uneven": replace(ZOO["llama_untied"], name="uneven", make_config=_uneven),
    "bf16": EVEN["llama_bf16_even"],
    "moe": EVEN["qwen3_moe_even"],
    "buffers": OwnSpecimen("buffers", "BufferedLlama", partial(_even, "llama_untied"), own_class=BufferedLlama),
    "frozen": replace(EVEN["llama_untied_even"], name="frozen", finish=freeze),
}
"""One of each kind of contents: what every layout is tried with."""
SPECIMENS = {**ZOO, **EVEN, SIX_EXPERTS: replace(ZOO["qwen3_moe"], name=SIX_EXPERTS, make_config=_six_experts), **KINDS}
"""All of them by name."""
