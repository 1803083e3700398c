"""PEFT, for tests of adapters that transformers itself adds, saves and loads; it asks for a version of its own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version


def peft_of_transformers() -> Any:
    """The package `peft`; skips the test or the module where it is lacking or older than transformers wants it."""
    peft = pytest.importorskip("peft")
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"peft {peft.__version__}: {error}", allow_module_level=True)
    return peft
