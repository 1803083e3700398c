"""An adapter of PEFT that must be signed: its base model is found first, and must be signed too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final

from hfshard.checkpoint.load_options import LoadOptions, SignedFiles
from hfshard.constants import ADAPTER_CONFIG_NAME, CONFIG_NAME, MAX_CONFIG_BYTES
from hfshard.disk.safe_open import read_small
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, SignatureError
from hfshard.places.source import LocalCheckpoint

_OF_THE_ADAPTER: Final = ("revision", "subfolder", "adapter_name", "adapter_kwargs", "output_loading_info")
"""Arguments that don't go to the base model."""

_whose_base: ContextVar[str | None] = ContextVar("whose_base", default=None)
"""The adapter whose base model is being loaded."""


def load_on_signed_base(
    load_base: Callable[[str, dict[str, Any]], Any],
    local: LocalCheckpoint,
    signed: SignedFiles,
    kwargs: Mapping[str, Any],
    options: LoadOptions,
) -> Any:
    """Load the base model that an adapter names, held to the same signer, and put the adapter on it.

    Args:
        load_base: Loads a model from a path or a repo, with keyword arguments, as it must be signed.
        local: Where the adapter is.
        signed: Its files, which have been compared.
        kwargs: Those of `from_pretrained`.
        options: hfshard's own.

    Returns:
        The model; with output_loading_info, also what transformers says of the adapter.

    Raises:
        SignatureError: The base model is not signed by whom it must be; or a file of the adapter was changed.
        InvalidArgumentError: The directory holds a model too, or the model is to be spread over ranks.
        DamagedCheckpointError: The adapter names no base model, or another adapter, as PEFT never does.
    """
    directory = local.directory
    above = _whose_base.get()
    if above is not None:
        raise DamagedCheckpointError(
            f"The adapter '{above}' names '{directory}' as its base model, which is an adapter, too. Correct "
            f"'base_model_name_or_path' in its '{ADAPTER_CONFIG_NAME}', and sign it again.",
            path=above,
        )
    if os.path.lexists(os.path.join(directory, CONFIG_NAME)):
        raise InvalidArgumentError(
            f"'{directory}' holds an adapter and a model, which can't be held to a signature together. Load the model "
            f"with public_key from a folder without '{ADAPTER_CONFIG_NAME}', and the adapter from one of its own.",
            path=directory,
        )
    if options.parallelize is not None:
        raise InvalidArgumentError("parallelize can't be given for an adapter that must be signed. Leave one out.")
    base = _base_of(directory)
    token = _whose_base.set(directory)
    try:
        model = load_base(base, {name: value for name, value in kwargs.items() if name not in _OF_THE_ADAPTER})
    except SignatureError as error:
        raise SignatureError(
            f"The base model of the adapter '{directory}' can't be trusted: {error.message} Or load '{base}' without "
            "the key, check the adapter by hfshard verify, and put it on: model.load_adapter.",
            path=error.path,
        ) from error
    finally:
        _whose_base.reset(token)
    info = model.load_adapter(directory, adapter_name=kwargs.get("adapter_name") or "default")
    signed.confirm()
    return (model, info.to_dict()) if kwargs.get("output_loading_info") else model


def _base_of(directory: str) -> str:
    path = os.path.join(directory, ADAPTER_CONFIG_NAME)
    raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
    try:
        base = json.loads(raw)["base_model_name_or_path"]
    except (ValueError, RecursionError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise DamagedCheckpointError(
            f"'{path}' names no base model: there is no 'base_model_name_or_path' in it. Save the adapter again, with "
            "a model that was loaded from a path or a repo.",
            path=path,
        )
    return base
