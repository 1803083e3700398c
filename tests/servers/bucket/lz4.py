"""Unpack the chunks of xorbs: LZ4 frames, in which bytes of numbers of four bytes may be grouped."""

from __future__ import annotations

import struct

import numpy as np

_HEADER_BYTES = 8
_MAGIC = 0x184D2204
_HAS_BLOCK_CHECKSUMS = 1 << 4
_HAS_SIZE = 1 << 3
_IS_STORED = 1 << 31
# A length of 15 goes on in the next byte; a match is 4 bytes longer than its number says.
_MORE = 15
_SHORTEST_MATCH = 4


def unpack_chunk(chunk: memoryview) -> bytes:
    """Unpack one chunk with its header.

    Raises:
        ValueError: It is packed in a way that nobody knows.
    """
    scheme, data = chunk[4], chunk[_HEADER_BYTES:]
    if scheme == 0:
        return bytes(data)
    if scheme == 1:
        return _unpack_frame(data)
    if scheme == 2:
        return _regroup(_unpack_frame(data))
    raise ValueError(f"No chunk is packed by scheme {scheme}.")


def _regroup(grouped: bytes) -> bytes:
    # First all first bytes of four, then all second ones, ...
    groups = np.frombuffer(grouped, np.uint8)
    result, start = np.empty_like(groups), 0
    for number in range(4):
        size = len(result[number::4])
        result[number::4] = groups[start : start + size]
        start += size
    return result.tobytes()


def _unpack_frame(frame: memoryview) -> bytes:
    magic, flags = struct.unpack_from("<IB", frame)
    if magic != _MAGIC:
        raise ValueError("This is no LZ4 frame.")
    position = 7 + (8 if flags & _HAS_SIZE else 0)
    output = bytearray()
    while (size := int.from_bytes(frame[position : position + 4], "little")) != 0:
        position += 4
        block = frame[position : position + (size & ~_IS_STORED)]
        position += len(block) + (4 if flags & _HAS_BLOCK_CHECKSUMS else 0)
        if size & _IS_STORED:
            output += block
        else:
            _unpack_block(block.tobytes(), output)
    return bytes(output)


def _unpack_block(block: bytes, output: bytearray) -> None:
    position, end = 0, len(block)
    while position < end:
        token = block[position]
        position += 1
        literals, position = _length(block, token >> 4, position)
        output += block[position : position + literals]
        position += literals
        if position >= end:
            return
        distance = block[position] | block[position + 1] << 8
        length, position = _length(block, token & _MORE, position + 2)
        length += _SHORTEST_MATCH
        start = len(output) - distance
        if distance >= length:
            output += output[start : start + length]
        else:
            pattern = bytes(output[start:])
            output += (pattern * (length // distance + 1))[:length]


def _length(block: bytes, length: int, position: int) -> tuple[int, int]:
    if length == _MORE:
        more = 255
        while more == 255:
            more = block[position]
            position += 1
            length += more
    return length, position
