"""Which models of the zoo a test takes, in which layouts, and which of them again on the oldest versions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.models.conftest import SHARDS, WHOLE
from tests.zoo.models import ZOO

REPRESENTATIVES = frozenset(
    {
        "bert_pretraining", "levit", "resnet", "wav2vec2", "gpt2_resized", "llama_tied", "llama_mixed_dtypes",
        "llama_generation", "mixtral", "ernie_bf16", "t5_fp16", "vision_encoder_decoder", "llava",
    }
)  # fmt: skip
"""One for each thing that sets models apart: tied biases and weights, children called `module`, buffers of integers,
parametrizations, resized embeddings, mixed and half dtypes, a generation config, experts that are converted in two
ways, and models in models."""


def parameters(cases: Iterable[Any], on_oldest: Collection[Any], slow: Iterable[Any] = ()) -> list[Any]:
    """Cases for a test, marked: those for the oldest versions, too, and those that run with --slow."""
    marks = {case: [pytest.mark.compat] if case in on_oldest else [] for case in cases}
    for case in slow:
        marks[case].append(pytest.mark.slow)
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case]) for case in marks]


LAYOUTS = [(name, SHARDS) for name in ZOO] + [(name, WHOLE) for name in sorted(REPRESENTATIVES)]
"""What a model is called in its files is the same in each layout: representatives show that for single files."""

representatives = pytest.mark.parametrize("name", parameters(sorted(REPRESENTATIVES), REPRESENTATIVES))
every_model = pytest.mark.parametrize("name", parameters(ZOO, REPRESENTATIVES))
_OTHERS = [name for name in ZOO if name not in REPRESENTATIVES]
every_model_by_representatives = pytest.mark.parametrize("name", parameters(ZOO, REPRESENTATIVES, _OTHERS))
"""For what combines things that other tests show of each model: the others run with --slow."""
_SHARDED_REPRESENTATIVES = [(name, SHARDS) for name in REPRESENTATIVES]
every_layout = pytest.mark.parametrize(("name", "size"), parameters(LAYOUTS, _SHARDED_REPRESENTATIVES))
"""Each model in shards, representatives as a single file, too."""
every_layout_by_representatives = pytest.mark.parametrize(
    ("name", "size"), parameters(LAYOUTS, _SHARDED_REPRESENTATIVES, [(name, SHARDS) for name in _OTHERS])
)
every_layout_compat = pytest.mark.parametrize(("name", "size"), parameters(LAYOUTS, [(name, SHARDS) for name in ZOO]))
"""The same, and every model on the oldest versions."""
