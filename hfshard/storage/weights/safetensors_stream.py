"""A safetensors file that is nowhere on disk: its bytes are made from a header and tensors when they are read."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from hfshard.constants import COPY_BYTES
from hfshard.storage.tensors.tensor_bytes import iter_blocks, tensor_nbytes
from hfshard.storage.tensors.tensor_layout import TensorLike


class SafetensorsStream(io.BufferedIOBase):
    """Reads like the file of this header and these tensors; at most one block of a tensor is copied at a time."""

    def __init__(self, header: bytes, tensors: Sequence[TensorLike]) -> None:
        """Take what the file consists of.

        Args:
            header: Everything before the data.
            tensors: In the order of their bytes; they must not change until the last byte is read.
        """
        self._header, self._tensors = header, tensors
        self._starts = [0]
        end = len(header)
        for tensor in tensors:
            self._starts.append(end)
            end += tensor_nbytes(tensor)
        self._size = end
        self._position = 0
        self._rest: Iterator[memoryview] = iter(())
        self._block = memoryview(b"")
        self._block_end = -1
        """Where the block ends that was read last: reading on from there needs no search."""

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def seekable(self) -> bool:
        """Reading may begin again anywhere."""
        return True

    def tell(self) -> int:
        """Bytes from the beginning."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position, as in a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes: `size`, or fewer at the end; all that are left where it is None or negative."""
        left = self._size - self._position
        left = max(0, left if size is None or size < 0 else min(size, left))
        parts = []
        while left:
            view = self._next(left)
            parts.append(view.tobytes())  # a block may be valid until the next is asked for, no longer
            left -= len(view)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _next(self, limit: int) -> memoryview:
        """Some bytes from the position on, at most `limit`; there are more."""
        if self._block_end - len(self._block) != self._position or not self._block:
            self._find()
        view = self._block[:limit]
        self._block = self._block[len(view) :]
        self._position += len(view)
        return view

    def _find(self) -> None:
        """Have the block that holds the position, from the position on."""
        if self._block_end != self._position:
            number = bisect_right(self._starts, self._position) - 1
            at = self._starts[number]
            self._rest = (
                iter_blocks(self._tensors[number - 1], COPY_BYTES) if number else iter([memoryview(self._header)])
            )
        else:
            at = self._position
        for block in self._rest:
            if at + len(block) > self._position:
                self._block, self._block_end = block[self._position - at :], at + len(block)
                return
            at += len(block)
        # The tensor is at its end: the next one begins here (empty ones have no bytes, and bisect passes over them).
        self._block_end = -1
        self._find()
