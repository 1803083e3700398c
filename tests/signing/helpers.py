"""model-signing's own command line, and what a signature says."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def model_signing(verb: str, method: str, directory: Path, *options: object, exit_code: int = 0) -> str:
    """Run `model_signing VERB METHOD DIRECTORY --signature DIRECTORY/model.sig OPTIONS` in this process."""
    from click.testing import CliRunner
    from model_signing._cli import main

    words = [verb, method, str(directory), "--signature", str(directory / "model.sig"), *map(str, options)]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.output


def payload_of(directory: Path) -> dict[str, Any]:
    """What was signed."""
    bundle = json.loads((directory / "model.sig").read_text())
    payload: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return payload
