"""Compares what is read of a file by ranges with the digests that were recorded when it was saved."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from functools import partial

from hfshard.errors import IntegrityError
from hfshard.format.digests import HASHERS, Verify, fingerprint_positions, new_fingerprint, tensor_hasher
from hfshard.format.header import TensorInfo
from hfshard.storage.weights.ranged.ranged_shard import RangedShard
from hfshard.storage.weights.ranged.requests import REQUEST_BYTES, Piece
from hfshard.storage.weights.ranged.running_digest import RunningDigest


class Comparison:
    """The digests of one file that a read of some of its tensors can compare.

    1. Of a tensor that is read whole, its own; at every level but "none".
    2. "full" compares every byte: where the file has no digests of its tensors, the whole file is read, in order, for
       its checksum. Where they are all read, the fingerprint is compared too, for the header's sake.
    """

    def __init__(self, shard: RangedShard, level: Verify) -> None:
        self._shard = shard
        self._is_full = level in ("full", "sha256")
        self._expected = {} if level == "none" else shard.tensor_digests()
        self._digests: dict[str, RunningDigest] = {}
        self._file: tuple[str, RunningDigest] | None = None
        recorded = shard.recorded
        if self._is_full and shard.header.tensors and not self._expected and recorded.is_verifiable:
            kind = "sha256" if recorded.sha256 is not None else "xxh3"
            hasher = HASHERS[kind]()
            hasher.update(shard.header_as_hashed())
            self._file = kind, RunningDigest(hasher, shard.header.data_start, shard.data_bytes)

    def digest_of(self, info: TensorInfo) -> RunningDigest | None:
        """What takes the bytes of a tensor that is read whole, once; None: nothing is to be compared."""
        if self._file is not None:
            return self._file[1]
        if info.name not in self._expected or info.name in self._digests:
            return None
        digest = RunningDigest(tensor_hasher(), self._shard.header.data_start + info.begin, info.nbytes)
        self._digests[info.name] = digest
        return digest

    def others(self, names: Collection[str]) -> Iterator[Piece]:
        """What has to be read besides tensors of these names, which are read anyway."""
        if self._file is None:
            return
        digest = self._file[1]
        for info in self._shard.header.tensors.values():
            if info.name not in names:
                begin = self._shard.header.data_start + info.begin
                for start in range(begin, begin + info.nbytes, REQUEST_BYTES):
                    nbytes = min(REQUEST_BYTES, begin + info.nbytes - start)
                    yield Piece(start, nbytes, None, partial(_hash, digest, start))

    def compare(self) -> None:
        """Compare, when everything has been read.

        Raises:
            IntegrityError: It names a tensor, or the file, whose bytes are not those that were saved.
        """
        for name, digest in self._digests.items():
            if digest.is_whole and digest.hexdigest() != self._expected[name]:
                raise self._differs(f"Tensor '{name}' of", "xxh3", self._expected[name], digest.hexdigest(), name)
        recorded = self._shard.recorded
        if self._file is not None:
            kind, whole = self._file
            expected = recorded.sha256 if kind == "sha256" else recorded.xxh3
            if whole.hexdigest() != expected:
                raise self._differs("", kind, str(expected), whole.hexdigest())
            return
        fingerprint = self._fingerprint() if self._is_full and recorded.fingerprint is not None else None
        if fingerprint not in (None, recorded.fingerprint):
            raise self._differs("The header of", "fingerprint", str(recorded.fingerprint), str(fingerprint))

    def _fingerprint(self) -> str | None:
        """The file's fingerprint, made of what has passed; None where not all of it has."""
        infos = list(self._shard.header.tensors.values())
        fingerprint = new_fingerprint()
        fingerprint.update(self._shard.header_as_hashed())
        for position in fingerprint_positions(len(infos)):
            info = infos[position]
            if info.nbytes:
                digest = self._digests.get(info.name)
                if digest is None or not digest.is_whole:
                    return None
                fingerprint.update(digest.head)
        return fingerprint.hexdigest()

    def _differs(self, what: str, kind: str, expected: str, found: str, fqn: str | None = None) -> IntegrityError:
        path = self._shard.path
        return IntegrityError(
            f"{f'{what} shard' if what else 'Shard'} '{path}' is not what was saved: its {kind} is {found}, but was "
            f"{expected}. Read it again; if it fails again, it is damaged where it lies: save it again.",
            path=path,
            fqn=fqn,
            expected=expected,
            actual=found,
        )


def _hash(digest: RunningDigest, start: int, block: memoryview, cancelled: threading.Event) -> None:
    digest.add(start, block, cancelled, stays=False)
