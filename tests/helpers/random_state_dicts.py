"""Random state dicts for the property tests: every dtype that safetensors stores, every kind of view, ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import hypothesis.strategies as st
import torch

from tests.helpers.tensor_bytes import bytes_of

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)  # fmt: skip
"""What safetensors 0.8 has a name for and torch has a dtype for."""


@dataclass
class Sample:
    """A state dict, and which of its names were made to be one tensor."""

    state_dict: dict[str, torch.Tensor]
    tied: dict[str, str]
    """Name -> another name of the very same tensor."""


def random_tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits at all: NaN payloads, infinities, denormals, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for size in shape:
        count *= size
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw &= 1
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return raw.view(dtype).reshape(shape) if dtype.itemsize > 1 else raw.reshape(shape).view(dtype)


def fingerprint(state_dict: Mapping[str, torch.Tensor]) -> list[tuple[object, ...]]:
    """Everything about a dict that a save could have changed."""
    return [
        (name, id(t), t.data_ptr(), t.dtype, t.shape, t.stride(), t.storage_offset(), t._version, bytes_of(t))
        for name, t in state_dict.items()
    ]


def _contiguous(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return random_tensor(seed, dtype, shape)


def _transposed(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return random_tensor(seed, dtype, shape).permute(tuple(reversed(range(len(shape)))))


def _sliced(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    larger = tuple(size * 2 + 1 for size in shape)
    return random_tensor(seed, dtype, larger)[tuple(slice(1, 2 * size, 2) for size in shape)]


def _expanded(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return random_tensor(seed, dtype, (1, *shape[1:])).expand(shape) if shape else random_tensor(seed, dtype, ())


def _conjugated(seed: int, _dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return random_tensor(seed, torch.complex64, shape).conj()


def _negative(seed: int, _dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return random_tensor(seed, torch.complex64, shape).conj().imag


_KINDS: tuple[Callable[[int, torch.dtype, tuple[int, ...]], torch.Tensor], ...] = (
    _contiguous, _contiguous, _transposed, _sliced, _expanded, _conjugated, _negative,
)  # fmt: skip

_SHAPES = st.one_of(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.tuples(st.integers(1, 80), st.integers(1, 80)),
    st.tuples(st.integers(1000, 9000)),
)

_NAMES = st.one_of(
    st.from_regex(r"\A(?:[a-z]{1,8}\.){0,2}(?:weight|bias|[a-z0-9_]{1,9})\Z"),
    st.text(st.characters(codec="utf-8"), max_size=10),
).filter(lambda name: name != "__metadata__")


@st.composite
def state_dicts(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Sample:
    """Up to a dozen tensors; some of them views of one storage, some of them the same tensor."""
    names = draw(st.lists(_NAMES, max_size=12, unique=True))
    seed = draw(st.integers(0, 2**32))
    made: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for number, name in enumerate(names):
        dtype, shape = draw(st.sampled_from(dtypes)), draw(_SHAPES)
        if dtype is torch.float4_e2m1fn_x2 and not shape:
            shape = (1,)  # the format counts nibbles, and has no way to say two of them without a dimension
        others = [other for other in made if made[other].numel() > 0]
        relation = draw(st.sampled_from(("own", "own", "own", "tied", "same view", "overlapping")))
        if relation == "own" or not others:
            kind = draw(st.sampled_from(_KINDS)) if dtypes is DTYPES else _KINDS[seed % 4 + 1]
            made[name] = kind(seed + number, dtype, shape)
            continue
        other = draw(st.sampled_from(others))
        if relation == "tied":
            made[name], tied[name] = made[other], other
        elif relation == "same view":
            made[name], tied[name] = made[other].view(made[other].shape), other
        else:
            made[name] = made[other][1:] if made[other].dim() else made[other].view(1)
    return Sample(made, tied)
