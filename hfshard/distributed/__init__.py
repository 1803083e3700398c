"""Models and tensors spread over many ranks: each rank saves and loads its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfshard._util.lazy_imports import lazy_exports

# Public name -> the module that defines it, imported when it is first used: torch.distributed takes time to import.
_HOMES = {
    "StorageReader": "dcp_reader",
    "StorageWriter": "dcp_writer",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from hfshard.distributed.dcp_reader import StorageReader as StorageReader
    from hfshard.distributed.dcp_writer import StorageWriter as StorageWriter
else:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
