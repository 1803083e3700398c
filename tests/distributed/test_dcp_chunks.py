"""Rectangles of tensors: what makes a tensor whole, by hand."""

from __future__ import annotations

import pytest

from hfshard.distributed.dcp_chunks import Chunk, chunk_box, cover_problem


def test_box_of_a_chunk() -> None:
    assert chunk_box(((2, 0), (3, 4))) == (((2, 5),), ((0, 4),))
    assert chunk_box(((5, 0), (0, 4))) == ((), ((0, 4),))
    assert chunk_box(((), ())) == ()


@pytest.mark.parametrize(
    ("shape", "chunks", "problem"),
    [
        ((4,), [((0,), (4,))], None),
        ((4,), [((2,), (2,)), ((0,), (2,)), ((4,), (0,))], None),
        ((), [((), ())], None),
        ((0, 3), [], None),
        # An L and what it leaves.
        ((3, 3), [((0, 0), (3, 1)), ((2, 1), (1, 2)), ((0, 1), (2, 2))], None),
        ((4,), [], "4 of its 4 elements are in no chunk"),
        ((4,), [((0,), (3,))], "1 of its 4 elements are in no chunk"),
        ((), [((), ()), ((), ())], "some of its elements are in several chunks"),
        ((4,), [((0,), (4,)), ((0,), (4,))], "some of its elements are in several chunks"),
        # As many elements as there are, but one twice and one never.
        ((4,), [((0,), (2,)), ((1,), (2,))], "some of its elements are in several chunks"),
        ((2, 2), [((0, 0), (1, 2)), ((0, 1), (2, 1))], "some of its elements are in several chunks"),
        ((4,), [((2,), (3,))], "a chunk at [2] of shape [3] is outside the tensor"),
        ((4,), [((-1,), (3,))], "a chunk at [-1] of shape [3] is outside the tensor"),
        ((4, 1), [((0,), (4,))], "a chunk at [0] of shape [4] is outside the tensor"),
    ],
)
def test_chunks_must_be_the_whole_once(shape: tuple[int, ...], chunks: list[Chunk], problem: str | None) -> None:
    assert cover_problem(shape, chunks) == problem
