"""Which files a load may read beside the weights that it opens, and what a config says of code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX, SIGNATURE_NAME, WEIGHTS_SUFFIXES
from hfshard.format.file_names import INDEX_FILE
from hfshard.signing.files import DEBRIS

_OWN_STEMS: Final = ("model.", "model-", "pytorch_model.", "pytorch_model-", "optimizer.", "optimizer-")
"""How weights begin that nothing reads but a load that opens them, and looks at them then."""

_READ_WEIGHTS: Final = (SAFETENSORS_SUFFIX, BIN_SUFFIX, ".pt", ".pth", ".ckpt")
"""Weights that a class may read beside a checkpoint's own, such as an adapter; torch reads no others."""

_DOCUMENTS: Final = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf")
"""Files for people: no load reads them."""

_FOR_PROGRAMS: Final = (".py", ".json", ".jinja", ".txt", ".model", *_READ_WEIGHTS)
"""Files that are refused, where they are not signed, though who signed left them out on purpose."""

_TRAINING: Final = frozenset({"checkpoint.json", "training_state.json"})
"""Files of a training checkpoint that no model needs, so that a pull of the model leaves them out."""

_CODE_KEY: Final = "auto_map"
"""Where a config names code."""

_OTHER_REPO: Final = "--"
"""What stands in a config between a repo and the name of code in it."""


def is_read(name: str, *, has_code: bool = False) -> bool:
    """Whether a load may read a file that is none of the checkpoint's own weights; its code may read any other."""
    *folders, last = name.split("/")
    if _is_for_people(name):
        return False
    if not folders and last == SIGNATURE_NAME:
        return False
    if last.endswith(WEIGHTS_SUFFIXES):
        is_own = not folders and last.startswith(_OWN_STEMS)
        return not is_own and (has_code or (not folders and last.endswith(_READ_WEIGHTS)))
    return True


def is_needed(name: str) -> bool:
    """Whether such a file may not be missing: those of other weights may, and what training keeps."""
    last = os.path.basename(name)
    is_of_weights = last.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(last) is not None
    return is_read(name) and not is_of_weights and last not in _TRAINING


def may_be_left_out(name: str) -> bool:
    """Whether who signs may leave a file out on purpose, as no load takes it."""
    return _is_for_people(name) or not name.endswith(_FOR_PROGRAMS)


def references_elsewhere(config: bytes) -> list[str]:
    """The names of code of other repos in a config, and in those that it holds."""
    try:
        return [text for text in _texts_below(json.loads(config), is_code=False) if _OTHER_REPO in text]
    except (ValueError, RecursionError):
        return []  # whoever reads it says so


def _is_for_people(name: str) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") or part in DEBRIS for part in parts) or name.lower().endswith(_DOCUMENTS)


def _texts_below(value: Any, *, is_code: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts_below(one, is_code=is_code or key == _CODE_KEY)
    elif isinstance(value, list):
        for one in value:
            yield from _texts_below(one, is_code=is_code)
    elif is_code and isinstance(value, str):
        yield value
