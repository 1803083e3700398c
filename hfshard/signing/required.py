"""What a load, or a check, is given: who must have signed; and the signature that is looked for then."""

from __future__ import annotations

import os
from typing import Final

from hfshard.checkpoint.folder import StoreFolder
from hfshard.checkpoint.load_options import FilesBeside
from hfshard.constants import SIGNATURE_NAME
from hfshard.disk.safe_open import read_small
from hfshard.errors import SignatureError
from hfshard.signing.check import SignedPlace
from hfshard.signing.files import SMALL_SIGNATURE_BYTES, list_files, most_signature_bytes, seen_file
from hfshard.signing.signed_by import SignedBy
from hfshard.signing.stored_files import SignedObjects, find_signed_objects
from hfshard.signing.upstream import signed_manifest

_BLOCK_BYTES: Final = 512
"""Of st_blocks."""


class RequiredSignature:
    """What a load asks for when it is given a public key."""

    def __init__(self, by: SignedBy) -> None:
        """Take who must have signed."""
        self.by = by

    def find(self, directory: str, subfolder: str = "", *, has_code: bool = False) -> SignedPlace:
        """Find the signature of a checkpoint, check it, and every file that a load reads beside the weights.

        Args:
            directory: The checkpoint's, with the subfolder.
            subfolder: The end of that path, if the checkpoint lies below the directory or repo that was given: where
                it has no signature of its own, that of the whole counts.
            has_code: Whether code of the checkpoint may be run.

        Raises:
            SignatureError: There is none, or not this one's; a file differs, is missing, or was added.
        """
        place = self._place(directory, subfolder, has_code=has_code)
        place.check_beside()
        return place

    def find_in_store(self, folder: StoreFolder, beside: FilesBeside, *, has_code: bool = False) -> SignedObjects:
        """Find the signature in a folder of a store (args, raises: as `find_signed_objects`)."""
        return find_signed_objects(folder, beside, self.by, has_code=has_code)

    def find_all(self, directory: str, subfolder: str = "") -> SignedPlace:
        """Find the signature, and compare nothing yet (raises as `find`, for the signature)."""
        return self._place(directory, subfolder, has_code=False)

    def _place(self, directory: str, subfolder: str, *, has_code: bool) -> SignedPlace:
        root = directory.rstrip(os.sep) or os.sep
        if has_code or not os.path.lexists(os.path.join(root, SIGNATURE_NAME)):
            for _ in filter(None, subfolder.split("/")):  # code lies above too
                root = os.path.dirname(root).rstrip(os.sep)
        path = os.path.join(root, SIGNATURE_NAME)
        if not os.path.lexists(path):
            raise SignatureError(
                f"'{root}' has no signature: there is no '{SIGNATURE_NAME}'. If you trust what is there, sign it: "
                f"hfshard sign {root} --private-key KEY; or leave out the public key.",
                path=root,
            )
        raw, _ = read_small(path, root, _most_bytes(root, path))  # no pipe, no link to elsewhere, not endless
        manifest = signed_manifest(root, path, self.by.choose, str(self.by), raw)
        below = os.path.relpath(directory, root)
        return SignedPlace(root, manifest, "" if below == os.curdir else f"{below}/", has_code=has_code)


def _most_bytes(root: str, signature: str) -> int:
    seen = seen_file(signature)
    if seen is None or seen[2] <= SMALL_SIGNATURE_BYTES:
        return SMALL_SIGNATURE_BYTES
    names = list_files(root).names
    blocks = sum(os.stat(os.path.join(root, name)).st_blocks for name in names)  # holes count for nothing
    return most_signature_bytes(len(names), blocks * _BLOCK_BYTES)


def required_signature(public_key: str | os.PathLike[str] | SignedBy | None) -> RequiredSignature | None:
    """What a load asks for when it is given this `public_key`; None: nothing."""
    by = SignedBy.of(public_key)
    return None if by is None else RequiredSignature(by)
