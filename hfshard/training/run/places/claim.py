"""Which manager saves into a run in a store: the one whose claim is there; it notices when another one takes over."""

from __future__ import annotations

import json
import os
import secrets
import socket
from typing import Final

from hfshard.errors import HfshardError, RemoteChangedError, StaleObjectError
from hfshard.stores.protocols import ANYTHING, Store, StoredObject

CLAIM: Final = ".writer.json"
"""The name of the claim, beside the checkpoints."""

_TRIES: Final = 10
"""How often a claim is made that others make at the same time."""

_ID_BYTES: Final = 16


class RunClaim:
    """The claim of one manager: one small object, which the last one who begins to save puts there.

    A store has no lock that dies with its process, and its clock is nobody's. So a run that was killed and begins again
    takes the run over at once, and a manager that still lives finds its claim gone at its next save, or before the
    commit of the one that is under way.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: StoredObject | None = None
        self._process = 0
        """A forked process needs a claim of its own."""

    @property
    def is_made(self) -> bool:
        """Whether this process has put its claim."""
        return self._own is not None and self._process == os.getpid()

    def make(self) -> None:
        """Put the claim, in the place of one that is there.

        Raises:
            RemoteChangedError: Others kept doing the same.
        """
        for _ in range(_TRIES):
            found = self._store.find(CLAIM)
            try:
                own = self._store.put(CLAIM, _claim(), found if self._store.has_conditional_put else ANYTHING)
            except StaleObjectError:
                continue
            self._own = own
            self._process = os.getpid()
            return
        raise RemoteChangedError(
            f"Several CheckpointManagers begin to save into '{self._store.address}' at once. Let one of them save.",
            path=str(self._store.address),
        )

    def check(self) -> None:
        """Find out whether it is still there.

        Raises:
            RemoteChangedError: Another manager has taken the run over.
        """
        found = self._store.find(CLAIM)
        if not self._is_own(found):
            raise RemoteChangedError(
                f"Another CheckpointManager has begun to save into '{self._store.address}'{self._who(found)}, and has "
                "taken the run over: this one saves no more. Stop one of the two runs, or give it another address.",
                path=str(self._store.address),
            )

    def is_there(self) -> bool:
        """Whether it is still there."""
        return self._is_own(self._store.find(CLAIM))

    def forget(self) -> None:
        """Claim no more; what was put stays, for the next one to replace."""
        self._own = None

    def _is_own(self, found: StoredObject | None) -> bool:
        return found is not None and self._own is not None and found.etag == self._own.etag

    def _who(self, found: StoredObject | None) -> str:
        """Say who has put a claim."""
        if found is None:
            return ""
        try:
            claim = json.loads(self._store.read(found))
            return f" (process {claim['pid']} on {claim['host']})"
        except (HfshardError, ValueError, KeyError, TypeError):  # only words for an error that is raised anyway
            return ""


def _claim() -> bytes:
    """The bytes of a new claim, which no other has."""
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "writer": secrets.token_hex(_ID_BYTES)}
    return json.dumps(claim, sort_keys=True).encode() + b"\n"
