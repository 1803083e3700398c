"""What lies beside the weights of a checkpoint and belongs to who uses it: found without trust, and copied."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from hfshard.constants import ADAPTER_CONFIG_NAME, COPY_BYTES, MAX_OTHER_BYTES, WEIGHTS_SUFFIXES
from hfshard.storage.durable import copy_mode, sync
from hfshard.storage.names import INDEX_FILE
from hfshard.storage.regular_file import open_regular

logger = logging.getLogger(__name__)

_LEFT_OUT: Final = frozenset({".gitattributes", ".gitignore", ".DS_Store", ADAPTER_CONFIG_NAME})
"""What git, the Hub and the Finder keep for themselves, and what says that adapter weights lie there."""


@dataclass(frozen=True, slots=True)
class BesideFile:
    """A file beside the weights of a checkpoint in the directory `root`."""

    path: str
    root: str
    size: int

    def copy_to(self, target: str, like: os.stat_result | None, on_bytes: Callable[[int], object] | None) -> None:
        """Copy it into a new file, durably.

        Raises:
            UnsafePathError, DamagedCheckpointError: It became a link that leaves `root`, or no regular file.
        """
        fd = open_regular(self.path, self.root)
        try:
            with open(target, "xb") as writing:
                while block := os.read(fd, COPY_BYTES):
                    writing.write(block)
                    if on_bytes is not None:
                        on_bytes(len(block))
                writing.flush()
                copy_mode(writing.fileno(), like)
                sync(writing.fileno(), target)
        finally:
            os.close(fd)


def files_beside(directory: str, but: Collection[str]) -> dict[str, BesideFile]:
    """The files at the top level of a checkpoint's directory that are no weights: tokenizer, README, code, by name.

    Left out are weights and indexes of whatever library, files over 256 MiB (they are data sets), what git and the Hub
    keep for themselves, folders, and an adapter's config, whose weights do not go along.

    Args:
        directory: The checkpoint's.
        but: Names to leave out.

    Raises:
        UnsafePathError: A link that leaves the directory.
        DamagedCheckpointError: A link to nothing, or a file that can't be opened.
    """
    found = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name in _LEFT_OUT or name in but or name.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(name):
            continue
        if os.path.exists(path) and not os.path.isfile(path):
            if not os.path.isdir(path):
                logger.warning("'%s' is a pipe, a socket or a device: it is not copied.", path)
            continue
        os.close(open_regular(path, directory))
        size = os.stat(path).st_size
        if size > MAX_OTHER_BYTES:
            logger.warning("'%s' has %d bytes and is no weights: it is not copied.", path, size)
            continue
        found[name] = BesideFile(path, directory, size)
    return found
