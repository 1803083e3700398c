"""What a checkpoint is: a model by its config.json, or an adapter by its adapter_config.json."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from hfshard._util.text import count_of, shorten_list
from hfshard.checkpoint.folder import Folder
from hfshard.checkpoint.locate import ADAPTER_WEIGHTS, config_in
from hfshard.constants import ADAPTER_CONFIG_NAME, CONFIG_NAME, MAX_CONFIG_BYTES
from hfshard.errors import DamagedCheckpointError, UnsafePathError
from hfshard.format.strict_json import parse_json_object

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_WIDTHS: Final = ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where the config of a model of several kinds of input has that of its language model."""

_LONGEST: Final = 80
"""The most characters of a text: names of classes and repos are shorter."""
_MOST: Final = 10**12
"""The largest number that is shown, far above any model's."""
_TARGETS: Final = 4
_OTHER_SCALES: Final = ("alpha_pattern", "rank_pattern", "use_dora", "fan_in_fan_out", "megatron_config")
"""Keys of PEFT's LoraConfig with which the change of a weight is not B x A times one number."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """A model or an adapter, as described by its config. A field is None if the config does not say it."""

    architecture: str | None = None
    """The class: "BertModel"."""
    model_type: str | None = None
    layers: int | None = None
    decoder_layers: int | None = None
    """Those of the decoder, if `layers` are those of the encoder."""
    width: int | None = None
    """The hidden size."""
    experts: int | None = None
    """The experts of a layer."""
    vocabulary: int | None = None
    dtype: str | None = None
    """As written in the config: "bfloat16"."""
    quantization: str | None = None
    adapter: str | None = None
    """An adapter's method: "LORA"; None for a model."""
    base: str | None = None
    """The model that the adapter belongs to: a name on the Hub, or a path."""
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = None
    """What the product of a LoRA's two factors is multiplied by; None if it is not one number, or not all of the
    change (DoRA), or if weights are transposed."""
    targets: tuple[str, ...] = ()
    """The modules that the adapter changes."""

    def describe(self) -> tuple[str, ...]:
        """Describe it in a few words each, the most telling first.

        Example:
            >>> ModelSummary(architecture="BertModel", model_type="bert", layers=6, width=384).describe()
            ('BertModel (bert)', '6 layers × 384')
        """
        return tuple(filter(None, self._of_model() if self.adapter is None else self._of_adapter()))

    def _of_model(self) -> tuple[str | None, ...]:
        kind = self.architecture or self.model_type
        return (
            f"{kind} ({self.model_type})" if self.architecture and self.model_type else kind,
            self._size(),
            None if self.experts is None else f"{self.experts:,} experts a layer",
            None if self.vocabulary is None else f"vocabulary {self.vocabulary:,}",
            self.dtype,
            None if self.quantization is None else f"quantized: {self.quantization}",
        )

    def _size(self) -> str | None:
        """Return layers x width, or the one of them that is known."""
        layers = None if self.layers is None else count_of(self.layers, "layer")
        if layers is not None and self.decoder_layers is not None:
            layers = f"{self.layers:,} + {self.decoder_layers:,} layers"
        if layers is None or self.width is None:
            return layers or (None if self.width is None else f"width {self.width:,}")
        return f"{layers} × {self.width:,}"

    def _of_adapter(self) -> tuple[str | None, ...]:
        method = {"LORA": "LoRA", "IA3": "IA³"}.get(self.adapter or "", self.adapter)
        targets = shorten_list(self.targets, _TARGETS)
        return (
            f"{method} adapter",
            None if self.base is None else f"of {self.base}",
            None if self.rank is None else f"rank {self.rank:,}",
            None if self.alpha is None else f"alpha {self.alpha:g}",
            f"on {targets}" if targets else None,
        )

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for `--format json`."""
        return {**asdict(self), "targets": list(self.targets)}


def read_model_summary(folder: Folder, weights: str) -> ModelSummary | None:
    """Read what an opened checkpoint is; None if its config is missing or damaged: it can be viewed without.

    The file that readers open first, `weights`, tells an adapter from a model beside it.
    """
    is_adapter = weights in ADAPTER_WEIGHTS
    name = ADAPTER_CONFIG_NAME if is_adapter else CONFIG_NAME
    try:
        if is_adapter:
            raw = folder.read_small(name, MAX_CONFIG_BYTES) if folder.has(name) else None
        else:
            raw = config_in(folder)
        if raw is None:
            return None
        config = parse_json_object(
            raw, path=f"{folder.path}/{name}", what="Config", remedy="Download it again.", takes_constants=True
        )
    except (DamagedCheckpointError, UnsafePathError) as error:
        logger.info("%s The checkpoint is shown without it.", error)
        return None
    return summary_of_adapter(config) if is_adapter else summary_of_model(config)


def summary_of_model(config: Mapping[str, Any]) -> ModelSummary | None:
    """Summarize a config.json; None if it says nothing of a model."""
    inner = next((part for key in _PARTS if isinstance(part := config.get(key), Mapping)), {})
    both = {**inner, **{key: value for key, value in config.items() if value is not None}}
    classes = config.get("architectures")
    quantization = config.get("quantization_config")
    summary = ModelSummary(
        architecture=_text(classes[0]) if isinstance(classes, list) and classes else _text(config.get("_class_name")),
        model_type=_text(config.get("model_type")),
        layers=_first(both, _LAYERS),
        decoder_layers=_first(both, ("num_decoder_layers", "decoder_layers")),
        width=_first(both, _WIDTHS),
        experts=_first(both, _EXPERTS),
        vocabulary=_number(both.get("vocab_size")),
        dtype=_dtype(both),
        quantization=_text(quantization.get("quant_method")) if isinstance(quantization, Mapping) else None,
    )
    return None if summary == ModelSummary() else summary


def summary_of_adapter(config: Mapping[str, Any]) -> ModelSummary:
    """Summarize PEFT's adapter_config.json."""
    targets = config.get("target_modules")
    listed = [targets] if isinstance(targets, str) else targets if isinstance(targets, list) else []
    given = config.get("lora_alpha")
    alpha = given if isinstance(given, int | float) and _is_shown(given) else None
    method, rank = _text(config.get("peft_type")) or "PEFT", _number(config.get("r"))
    has_one_scale = method == "LORA" and not any(config.get(key) for key in _OTHER_SCALES)
    divisor = None if rank is None else math.sqrt(rank) if config.get("use_rslora") else rank
    return ModelSummary(
        adapter=method,
        base=_text(config.get("base_model_name_or_path")),
        rank=rank,
        alpha=alpha,
        scale=None if alpha is None or divisor is None or not has_one_scale else alpha / divisor,
        targets=tuple(sorted(filter(None, map(_text, listed)))),
    )


def _dtype(config: Mapping[str, Any]) -> str | None:
    text = _text(config.get("dtype")) or _text(config.get("torch_dtype"))
    return None if text is None else text.removeprefix("torch.")


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((number for key in keys if (number := _number(config.get(key))) is not None), None)


def _number(value: Any) -> int | None:
    return value if type(value) is int and _is_shown(value) and value > 0 else None


def _is_shown(value: float) -> bool:
    return not isinstance(value, bool) and abs(value) <= _MOST  # false for NaN and infinity


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
