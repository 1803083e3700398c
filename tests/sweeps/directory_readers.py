"""What each reader makes of a directory: one generation, an error, or a mixture."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from tests.sweeps.directory_models import (
    Content,
    config_marks,
    expected,
    matches,
    model_class,
    plain_module,
    sharded_class,
    stock_class,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one reader saw.

    Attributes:
        kind: "whole", "error" or "mixed".
        generation: Of a whole one.
        detail: Of an error or a mixture, in words.
        is_clear: Whether an error is one that a user can act on.
        note: Seen, and not counted as a mixture.
    """

    kind: str
    generation: int | None = None
    detail: str = ""
    is_clear: bool = True
    note: str = ""

    def __str__(self) -> str:
        return f"g{self.generation}" if self.kind == "whole" else f"{self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Reader:
    """A way to load a checkpoint, and the variant that it asks for."""

    name: str
    variant: str | None = None

    @property
    def label(self) -> str:
        """Name and variant."""
        return self.name if self.variant is None else f"{self.name}[{self.variant}]"


def read(reader: Reader, directory: Path, contents: Sequence[Content]) -> Verdict:
    """Load a directory and say which of the known contents it is."""
    try:
        return READERS[reader.name](directory, reader.variant, contents)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Verdict("error", detail=text[:300], is_clear=_is_clear(error, reader.name, directory))


def _is_clear(error: Exception, reader: str, directory: Path) -> bool:
    """Of our readers: an HfshardError that says where. Of stock ones: the kinds that they document."""
    if reader.startswith("hfshard"):
        import hfshard

        return isinstance(error, hfshard.HfshardError) and str(directory) in str(error)
    return isinstance(error, (OSError, ValueError))


def _weights_verdict(state_dict: Mapping[str, Tensor], contents: Sequence[Content]) -> Verdict:
    found = [content for content in contents if matches(state_dict, content)]
    if found:
        return Verdict("whole", found[0].generation)
    return Verdict("mixed", detail=_describe(state_dict))


def _describe(state_dict: Mapping[str, Tensor]) -> str:
    """Which generations' values the tensors hold: a key of the report on a mixture."""
    values: dict[str, int] = {}
    for tensor in state_dict.values():
        low, high = float(tensor.float().min()), float(tensor.float().max())
        text = f"~g{(low - 0.5) // 2:.0f}" if low == high and low >= 2.5 else ("zero" if low == high == 0 else "other")
        values[text] = values.get(text, 0) + 1
    return ", ".join(f"{count} tensors {text}" for text, count in sorted(values.items()))


def model_verdict(model: Any, contents: Sequence[Content]) -> Verdict:
    weights = _weights_verdict(model.state_dict(), contents)
    if weights.kind != "whole":
        return weights
    marks = config_marks(model.config)
    sides = [content.generation for content in contents if expected(content).marks == marks]
    if weights.generation not in sides:
        return Verdict("mixed", detail=f"weights g{weights.generation} beside a config of {sides or marks}")
    same = next(content for content in contents if content.generation == weights.generation)
    generation_config = getattr(model, "generation_config", None)
    tokens = getattr(generation_config, "max_new_tokens", None)
    note = "" if tokens == expected(same).new_tokens else f"generation_config of another save ({tokens})"
    return Verdict("whole", weights.generation, note=note)


def _load_model(cls: Any, directory: Path, variant: str | None, **options: Any) -> Any:
    """Load from this machine alone, or from a store."""
    if "://" not in str(directory):
        options["local_files_only"] = True
    return cls.from_pretrained(directory, variant=variant, **options)


def _by_transformers(directory: Path, variant: str | None, contents: Sequence[Content]) -> Verdict:
    return model_verdict(_load_model(model_class(contents[0].arch), directory, variant), contents)


def _by_hfshard(directory: Path, variant: str | None, contents: Sequence[Content]) -> Verdict:
    return model_verdict(_load_model(sharded_class(contents[0].arch), directory, variant), contents)


def _by_hub_mixin(directory: Path, variant: str | None, contents: Sequence[Content]) -> Verdict:
    """huggingface_hub's mixin, which reads config.json and `model.safetensors`, and nothing else."""
    del variant  # it knows none
    with redirect_stdout(StringIO()):  # it prints
        return model_verdict(stock_class().from_pretrained(directory, strict=True), contents)


def _by_hfshard_weights(
    directory: Path,
    variant: str | None,
    contents: Sequence[Content],
    verify: Literal["structure", "full"] = "structure",
) -> Verdict:
    import hfshard

    return _weights_verdict(hfshard.load_state_dict(directory, variant=variant, verify=verify), contents)


def _by_hub(directory: Path, variant: str | None, contents: Sequence[Content], safe: bool = True) -> Verdict:
    """`load_torch_model` into a plain module of each side in turn; by default it forgives missing keys."""
    from huggingface_hub import load_torch_model

    del variant  # it knows none
    verdict = Verdict("mixed", detail="nothing tried")
    for content in sorted(contents, key=lambda content: -content.generation):
        module = plain_module(content)
        try:
            keys: Any = load_torch_model(module, directory, safe=safe)
        except RuntimeError as error:  # shapes of another side: torch's own refusal, try the next side
            verdict = Verdict("mixed", detail=f"{error}"[:200])
            continue
        got = {name: tensor for name, tensor in module.state_dict().items() if name not in keys.missing_keys}
        unexpected = set(keys.unexpected_keys) - set(expected(content).full)
        if not keys.missing_keys and not unexpected and matches(got, content):
            return Verdict("whole", content.generation)
        detail = f"{_describe(module.state_dict())}; missing {len(keys.missing_keys)}, unexpected {len(unexpected)}"
        verdict = Verdict("mixed", detail=detail)
    return verdict


READERS: Mapping[str, Callable[[Path, str | None, Sequence[Content]], Verdict]] = {
    "hfshard": _by_hfshard,
    "hfshard-weights": _by_hfshard_weights,
    "hfshard-full": partial(_by_hfshard_weights, verify="full"),
    "transformers": _by_transformers,
    "hub": _by_hub,
    "hub-bin": partial(_by_hub, safe=False),
    "hub-mixin": _by_hub_mixin,
}


def read_all(readers: Sequence[Reader], directory: Path, contents: Sequence[Content]) -> dict[str, Verdict]:
    """The verdict of every reader, by its label."""
    if not os.path.isdir(directory):
        return {reader.label: Verdict("error", detail="no such directory") for reader in readers}
    return {reader.label: read(reader, directory, contents) for reader in readers}
