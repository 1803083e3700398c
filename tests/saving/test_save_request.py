"""Options of a save check themselves, and say in bytes and names what they mean."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.errors import InvalidArgumentError, InvalidSizeError, InvalidSizeTypeError
from hfshard.places.place import place_to_save
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, request_from_state_dict


def test_a_size_is_in_bytes() -> None:
    assert SaveOptions(max_shard_size="1.5KB").max_shard_bytes == 1500


def test_a_variant_and_a_base_are_in_the_names() -> None:
    names = SaveOptions(variant="fp16", base="optimizer").names

    assert names.single == "optimizer.fp16.safetensors"


def test_a_changed_copy_is_checked_too() -> None:
    options = replace(SaveOptions(), max_shard_size="2MB")

    assert options.max_shard_bytes == 2_000_000
    with pytest.raises(InvalidSizeError, match="2 apples"):
        replace(options, max_shard_size="2 apples")


def test_options_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SaveOptions().packing = "balanced"  # type: ignore[misc]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("error", "message", "argument"),
    [
        (InvalidSizeTypeError, "of type NoneType", {"max_shard_size": None}),
        (InvalidArgumentError, "packing must be 'greedy' or 'balanced', got 'tight'", {"packing": "tight"}),
        (InvalidArgumentError, "checksum must be", {"checksum": "md5"}),
        (InvalidArgumentError, "cannot be part of a file name", {"variant": "../x"}),
        (InvalidArgumentError, "metadata must be JSON", {"metadata": {"x": float("nan")}}),
        (InvalidArgumentError, "metadata is nested too deep", {"metadata": {"x": nested(127)}}),
    ],
)
def test_what_is_not_valid_is_refused(error: type[Exception], message: str, argument: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        SaveOptions(**argument)


def test_metadata_of_the_most_levels_are_saved_and_read(tmp_path: Path) -> None:
    metadata = {"x": nested(126)}
    options = SaveOptions(metadata=metadata, max_shard_size=8, progress=False)
    save_request(request_from_state_dict({"a": torch.ones(4), "b": torch.ones(4)}, options), place_to_save(tmp_path))

    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.index.metadata["x"] == metadata["x"]
