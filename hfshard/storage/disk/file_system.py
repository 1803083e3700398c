"""Tell file systems of the network from local ones."""

from __future__ import annotations

import os
from typing import Final

_REMOTE: Final = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
    "pvfs2", "orangefs", "wekafs", "panfs",
})  # fmt: skip
"""Types whose files lie on another machine: a page fault is a request there. FUSE's are added: most of them do."""


def is_remote(device: int) -> bool:
    """Whether the files of a device (`st_dev`) come over the network; False where the system does not say."""
    kind = _type_of(device)
    return kind in _REMOTE or kind.split(".")[0] in ("fuse", "fuseblk")


def _type_of(device: int) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                mount, _, kind = line.partition(" - ")
                if mount.split()[2:3] == [number]:
                    return kind.split()[0]
    except OSError:
        return ""
    return ""
