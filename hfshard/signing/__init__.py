"""Signatures of checkpoints in the format of OpenSSF Model Signing: signing, checking, and requiring them in loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfshard._util.lazy_imports import lazy_exports

_HOMES = {
    "SignResult": "sign",
    "SignedBy": "signer",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from hfshard.signing.sign import SignResult as SignResult
    from hfshard.signing.signer import SignedBy as SignedBy
else:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
