"""A safetensors file that is not on a disk: its bytes come from a header and tensors when they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from hfshard.constants import COPY_BYTES
from hfshard.disk.byte_source import SeekableReader
from hfshard.tensors.stored_tensor import TensorLike, iter_blocks, tensor_nbytes


class SafetensorsStream(SeekableReader):
    """Reads like the file with this header and these tensors; at most one block of a tensor is copied at a time."""

    def __init__(self, header: bytes, tensors: Sequence[TensorLike]) -> None:
        """Make a reader at the first byte.

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
        super().__init__(end)
        self._rest: Iterator[memoryview] = iter(())
        self._block = memoryview(b"")
        self._block_end = -1
        """The end of the block that was read last: reading on from there needs no search."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next `size` bytes, or fewer at the end; all that are left if it is None or negative."""
        left = self._size - self._position
        left = max(0, left if size is None or size < 0 else min(size, left))
        parts = []
        while left:
            view = self._next(left)
            parts.append(view.tobytes())  # a block may be invalid when the next one is asked for
            left -= len(view)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _next(self, limit: int) -> memoryview:
        """Read between 1 and `limit` bytes; the end must not be reached yet."""
        if self._block_end - len(self._block) != self._position or not self._block:
            self._find()
        view = self._block[:limit]
        self._block = self._block[len(view) :]
        self._position += len(view)
        return view

    def _find(self) -> None:
        """Load the block that holds the position, without what is before it."""
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
        # The tensor ended, and the next one begins here (bisect passes over empty ones).
        self._block_end = -1
        self._find()
