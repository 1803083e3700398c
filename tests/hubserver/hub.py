"""What all routes of the test Hub server share: repositories, settings, log, faults and signed URLs."""

from __future__ import annotations

from pathlib import Path

from tests.hubserver.faults import Faults
from tests.hubserver.log import Log
from tests.hubserver.repos import RepoStore
from tests.hubserver.urls import Signer

# What the Hub sends through LFS whatever its size.
LFS_SUFFIXES = (".bin", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors")


class Hub:
    """The state of one server; see `HubServer` for what the settings mean."""

    def __init__(
        self, root: Path, *, page_size: int, lfs_threshold: int, multipart_bytes: int | None, max_commit_files: int
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.page_size = page_size
        self.lfs_threshold = lfs_threshold
        self.multipart_bytes = multipart_bytes
        self.max_commit_files = max_commit_files
        self.store = RepoStore(root)
        self.uploads = root / "uploads"
        self.signer = Signer(root)
        self.log = Log()
        self.faults = Faults()
        self.errors: list[str] = []
        """Tracebacks of what went wrong in the server itself."""
        self.api_origin = ""
        self.storage_origin = ""

    def sign(self, path: str, method: str, **values: str) -> str:
        """Make a URL of the storage origin."""
        return self.signer.sign(self.storage_origin, path, method, **values)

    def upload_mode(self, path: str, size: int) -> str:
        """Say how a file of this name and size goes up: `"lfs"` or `"regular"`."""
        is_lfs = size > 0 and (path.endswith(LFS_SUFFIXES) or size > self.lfs_threshold)
        return "lfs" if is_lfs else "regular"
