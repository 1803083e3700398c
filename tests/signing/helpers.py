"""model-signing's own command line, and what a signature says."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


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


def sign_payload(directory: Path, private_key: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Sign what was signed once more, changed: what a signer makes who has the key, and other tools."""
    payload = payload_of(directory)
    change(payload)
    digests = [bytes.fromhex(one["digest"]) for one in payload["predicate"]["resources"]]
    payload["subject"][0]["digest"]["sha256"] = hashlib.sha256(b"".join(digests)).hexdigest()
    raw = json.dumps(payload).encode()
    kind = b"application/vnd.in-toto+json"
    key: Any = serialization.load_pem_private_key(private_key.read_bytes(), None)
    signed = key.sign(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(raw), raw), ec.ECDSA(hashes.SHA256()))
    bundle = json.loads((directory / "model.sig").read_text())
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(raw).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signed).decode()
    (directory / "model.sig").write_text(json.dumps(bundle))
