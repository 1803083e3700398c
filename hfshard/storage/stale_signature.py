"""Say when a save leaves a signature that no longer holds, and remove it where that was asked for."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from hfshard.constants import SIGNATURE_NAME
from hfshard.disk.fsops import sync_directory, unlink_if_there
from hfshard.disk.safe_open import Identity, identity_of, read_small
from hfshard.errors import HfshardError
from hfshard.format.digests import sha256_of
from hfshard.format.index import FileDigest

logger = logging.getLogger(__name__)

_MAX_BYTES: Final = 64 * 1024 * 1024
"""The largest signature that is looked at for a warning."""

_SMALL_BYTES: Final = 1024 * 1024
"""The largest file that is read for a warning; of shards the save has recorded the sha256."""


class SignatureWatch:
    """The files beside a signature, before a save changes them."""

    def __init__(self, directory: str) -> None:
        """Note what is there; nothing, where there is no signature."""
        self._directory = directory
        self._has_signature = os.path.isfile(os.path.join(directory, SIGNATURE_NAME))
        self._before = self._identities() if self._has_signature else {}

    def after_save(self, recorded: Callable[[], Mapping[str, FileDigest]], *, is_dropped: bool) -> None:
        """Warn that the signature no longer holds, if that is so.

        Args:
            recorded: Tells what the index there says of the files.
            is_dropped: Remove it instead.
        """
        path = os.path.join(self._directory, SIGNATURE_NAME)
        now = self._identities() if self._has_signature else {}
        if (
            SIGNATURE_NAME not in now
            or now[SIGNATURE_NAME] != self._before[SIGNATURE_NAME]
            or not self._is_stale(now, recorded)
        ):
            return  # none, or the one of what was saved, which came with it
        if is_dropped:
            unlink_if_there(path)
            sync_directory(self._directory)
            logger.info("Removed '%s', which no longer held.", path)
            return
        logger.warning(
            "'%s' no longer holds: the checkpoint beside it was replaced, and who checks the signature will refuse it. "
            "Sign it again (hfshard sign %s --private-key KEY), or remove the file.",
            path,
            self._directory,
        )

    def _is_stale(self, now: dict[str, Identity], recorded: Callable[[], Mapping[str, FileDigest]]) -> bool:
        changed = {name for name, identity in now.items() if self._before.get(name) != identity}
        gone = self._before.keys() - now.keys()
        if not changed and not gone:
            return False
        try:
            signed = _signed_digests(os.path.join(self._directory, SIGNATURE_NAME), self._directory)
            known = {name: digest.sha256 for name, digest in recorded().items()}
            return not gone.isdisjoint(signed) or any(
                signed.get(name, "") != (known.get(name) or self._digest(name)) for name in changed
            )
        except (HfshardError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.debug("What '%s' signs can't be told: %s", SIGNATURE_NAME, error)
            return True

    def _digest(self, name: str) -> str | None:
        path = os.path.join(self._directory, name)
        if os.path.getsize(path) > _SMALL_BYTES:
            return None
        with open(path, "rb") as file:
            return sha256_of(file.read())

    def _identities(self) -> dict[str, Identity]:
        found: dict[str, Identity] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # somebody removed it just now
                    if entry.is_file():
                        found[entry.name] = identity_of(entry.stat())
        return found


def _signed_digests(path: str, directory: str) -> dict[str, Any]:
    """What a signature says of files, whoever made it; only good for a warning."""
    bundle = json.loads(read_small(path, directory, _MAX_BYTES)[0])
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return {one["name"]: one["digest"] for one in payload["predicate"]["resources"]}
