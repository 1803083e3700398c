"""Saves of tokenizers, processors and configs into stores: transformers writes a temporary directory, hfshard sends it.

Without `hfshard.install()`, transformers treats an address as a directory named `s3:` below the working directory.
This file imports neither torch nor transformers.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any, Final

from hfshard._util.arguments import SCHEMES, StoreAddress, absolute_path, is_store_address, parse_address
from hfshard._util.lazy_imports import on_import
from hfshard.models.install_settings import current_settings

logger = logging.getLogger(__name__)

_MODULES: Final = (
    "transformers.configuration_utils",
    "transformers.feature_extraction_utils",
    "transformers.generation.configuration_utils",
    "transformers.image_processing_base",
    "transformers.processing_utils",
    "transformers.tokenization_mistral_common",
    "transformers.tokenization_utils_base",
    "transformers.tokenization_utils_tokenizers",
    "transformers.video_processing_utils",
)
"""Modules in which transformers defines a `save_pretrained` for classes other than models."""

_METHOD: Final = "save_pretrained"
_MARK: Final = "_sends_for_hfshard"
"""The attribute that marks hfshard's functions."""


def send_small_saves() -> None:
    """Wrap the `save_pretrained` of transformers' classes that are not models, now or when they are imported.

    A wrapped method behaves as before, unless it is called with an address while hfshard is installed.
    """
    for name in _MODULES:
        on_import(name, _wrap_classes)


def _wrap_classes(module: ModuleType) -> None:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and _METHOD in vars(value):
            original = vars(value)[_METHOD]
            if not hasattr(original, _MARK):
                setattr(value, _METHOD, _sending(original))


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that a save to an address goes through a temporary directory."""

    @functools.wraps(original)
    def save_pretrained(target: Any, *args: Any, **kwargs: Any) -> Any:
        place: Any = args[0] if args else kwargs.get("save_directory")
        if current_settings() is None or not _is_for_store(place):
            return original(target, *args, **kwargs)

        def save(directory: str) -> Any:
            if args:
                return original(target, directory, *args[1:], **kwargs)
            return original(target, **{**kwargs, "save_directory": directory})

        return _save_into_store(save, parse_address(place, "save_directory"))

    setattr(save_pretrained, _MARK, True)
    return save_pretrained


def _is_for_store(place: Any) -> bool:
    """Return whether a place is an address.

    Raises:
        InvalidPathError: It is a path built from an address, which has lost a slash.
    """
    if isinstance(place, PurePath) and str(place).partition(":/")[0] in SCHEMES:
        absolute_path(place, "save_directory")
    return is_store_address(place)


def _save_into_store(save: Callable[[str], Any], address: StoreAddress) -> Any:
    """Save into a temporary directory, and put each file below the address, replacing any file of the same name.

    Returns:
        The method's result, with the files' addresses in place of their paths.
    """
    from hfshard.stores.open_store import open_store  # imported only by programs that use stores

    store = open_store(address)
    name = (address.prefix or address.bucket).rpartition("/")[2]  # transformers names a repo after the directory
    with tempfile.TemporaryDirectory(prefix="hfshard-") as folder:
        directory = os.path.join(folder, name)
        result = save(directory)
        paths = sorted(os.path.join(above, name) for above, _, names in os.walk(directory) for name in names)
        for path in paths:
            with open(path, "rb") as file:
                store.put(os.path.relpath(path, directory).replace(os.sep, "/"), file.read())
    logger.info("Saved %d small files into '%s'.", len(paths), address)
    return _renamed(result, directory, str(address))


def _renamed(result: Any, directory: str, address: str) -> Any:
    if isinstance(result, str) and result.startswith(directory):
        return address + result.removeprefix(directory)
    if isinstance(result, list | tuple):
        return type(result)(_renamed(one, directory, address) for one in result)
    return result
