"""Any two state dicts, in files of any kind: the report equals one that is made by brute force in memory."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import Phase, given, settings
from safetensors.torch import save_file

import hfshard
from hfshard.format.index import Verify
from hfshard.viewing.results import ValueDiff
from tests.helpers.random_state_dicts import DTYPES, random_tensor, state_dicts
from tests.helpers.tensor_bytes import bytes_of
from tests.saving.helpers import write_bins

StateDict = dict[str, torch.Tensor]

WAYS = ("keep", "keep", "bit", "noise", "rename", "cast", "reshape", "drop", "add", "tie")

CASTS = [dtype for dtype in DTYPES if dtype is not torch.float4_e2m1fn_x2] + [torch.complex128]


@st.composite
def changed(draw: st.DrawFn, before: StateDict) -> StateDict:
    """Another state dict, made of the tensors of one; names that share a tensor may share one again."""
    after: StateDict = {}
    for number, (name, tensor) in enumerate(before.items()):
        what = draw(
            st.sampled_from(("keep", "keep", "bit", "noise", "rename", "cast", "reshape", "drop", "add", "tie"))
        )
        if what == "rename":
            after[f"{name}.renamed"] = tensor
        elif what == "bit" and tensor.numel():
            raw = bytearray(bytes_of(tensor))
            raw[-1] ^= 1
            flipped = torch.frombuffer(raw, dtype=torch.uint8)
            after[name] = flipped.view(tensor.dtype).reshape(tensor.shape)
        elif what == "noise":
            after[name] = random_tensor(number, tensor.dtype, tuple(tensor.shape))
        elif what == "cast" and tensor.dtype in CASTS:
            target = draw(st.sampled_from(CASTS))
            is_real = tensor.dtype.is_complex and not target.is_complex
            after[name] = (tensor.real if is_real else tensor).contiguous().to(target)
        elif what == "reshape" and tensor.dtype is not torch.float4_e2m1fn_x2:
            after[name] = tensor.reshape(-1, 1)
        elif what == "tie" and after:
            after[name] = after[draw(st.sampled_from(sorted(after)))]
        elif what != "drop":
            after[name] = tensor
        if what == "add":
            after[f"{name}.new"] = random_tensor(number, torch.float32, (3,))
    return after


def save(state_dict: StateDict, directory: Path, form: str) -> StateDict:
    """Save it in one of the forms that hfshard reads; return what is in there."""
    if form.startswith("hfshard"):
        size, checksum = ("500B", None) if form == "hfshard without digests" else ("1KB", "xxh3")
        hfshard.save_state_dict(state_dict, directory, max_shard_size=size, checksum=checksum)  # type: ignore[arg-type]
        return state_dict
    if form == "bins" and len(state_dict) > 1:
        write_bins(directory, state_dict, files=2)
        return {name: tensor for one in sorted(directory.glob("*.bin")) for name, tensor in torch.load(one).items()}
    directory.mkdir()
    if form in ("bin", "bins") or any(tensor.dtype is torch.complex128 for tensor in state_dict.values()):
        torch.save(state_dict, directory / "pytorch_model.bin")
        return state_dict
    apart = {name: _apart(tensor) for name, tensor in state_dict.items()}
    save_file(apart, directory / "model.safetensors")
    return apart


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of its own; torch copies no strides of float4."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(bytearray(bytes_of(tensor)), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


FORMS = ("hfshard", "hfshard without digests", "bin", "bins", "safetensors")


def groups_of(state_dict: Mapping[str, torch.Tensor]) -> dict[str, frozenset[str]]:
    """Name -> the names of the very same tensor."""
    key = {
        name: (t.data_ptr(), t.dtype, tuple(t.shape), tuple(strides_of(t)), t.is_conj(), t.is_neg())
        if t.numel()
        else (name,)
        for name, t in state_dict.items()
    }
    return {name: frozenset(other for other in key if key[other] == key[name]) for name in key}


def strides_of(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def is_cast(a: torch.Tensor, b: torch.Tensor) -> bool:
    """One number after the other."""
    ways = [(a, b), (b, a)]
    if not any(t.dtype.is_floating_point or t.dtype.is_complex for t in (a, b)):
        return [int(one) for one in a.flatten().tolist()] == [int(one) for one in b.flatten().tolist()]
    for source, target in ways:
        if target.dtype.is_complex or (target.dtype.is_floating_point and not source.dtype.is_complex):
            rounded = source.contiguous().to(target.dtype).to(torch.complex128).flatten().tolist()
            wanted = target.contiguous().to(torch.complex128).flatten().tolist()
            if all(one == other or (one != one and other != other) for one, other in zip(rounded, wanted, strict=True)):
                return True
    return False


def kind_of(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype == b.dtype:
        if bytes_of(a) != bytes_of(b):
            return "changed"
        return "same" if a.shape == b.shape else "reshaped"
    return "cast" if a.shape == b.shape and a.dtype in CASTS and b.dtype in CASTS and is_cast(a, b) else "changed"


@numpy.errstate(all="ignore")
def measured(a: torch.Tensor, b: torch.Tensor) -> ValueDiff | None:
    """In numpy's long double, whose squares do not overflow."""
    if a.numel() != b.numel() or a.dtype not in CASTS or b.dtype not in CASTS:
        return None
    x, y = (numpy.asarray(t.contiguous().to(torch.complex128).flatten().numpy(), numpy.clongdouble) for t in (a, b))
    both_nan = numpy.isnan(x) & numpy.isnan(y)
    finite = numpy.isfinite(x) & numpy.isfinite(y)
    changed = (x != y) & ~both_nan
    if not any(t.dtype.is_floating_point or t.dtype.is_complex for t in (a, b)):
        changed = numpy.array([one != other for one, other in zip(a.flatten().tolist(), b.flatten().tolist())])
    nan, inf = [int(numpy.isnan(v).sum()) for v in (x, y)], [int(numpy.isinf(v).sum()) for v in (x, y)]
    x, y = x[finite], y[finite]
    d = y - x
    norm_a, norm_b, norm_d = (numpy.sqrt((numpy.abs(v) ** 2).sum()) for v in (x, y, d))
    return ValueDiff(
        a.numel(),
        int(changed.sum()),
        float(numpy.abs(d).max()) if len(d) else 0.0,
        0.0 if not norm_d else float(norm_d / norm_a) if norm_a else math.inf,
        float((x.conj() * y).real.sum() / (norm_a * norm_b)) if norm_a and norm_b else None,
        nan[0], nan[1], inf[0], inf[1], (float(norm_a), float(norm_d)),
    )  # fmt: skip


def assert_is_that_of_brute_force(report: hfshard.CheckpointDiff, a: StateDict, b: StateDict) -> None:
    groups_a, groups_b = groups_of(a), groups_of(b)
    named = [one for one in report.tensors if one.a and one.b and one.kind != "renamed"]
    for name in a.keys() & b.keys():
        found = [one for one in named if one.a and one.b]
        found = [one for one in found if name in groups_a[one.a.name] and name in groups_b[one.b.name]]  # type: ignore[union-attr]
        assert [one.kind for one in found] == [kind_of(a[name], b[name])], name
        expected = None if found[0].kind == "same" else measured(a[name], b[name])
        assert (found[0].values is None) == (expected is None)
        if expected is not None and found[0].values is not None:
            assert_close(found[0].values, expected)
    left_a = {names for names in groups_a.values() if not names & b.keys()}
    left_b = {names for names in groups_b.values() if not names & a.keys()}
    keys_a = Counter(key_of(a[min(names)]) for names in left_a)
    keys_b = Counter(key_of(b[min(names)]) for names in left_b)
    renamed = [one for one in report.tensors if one.kind == "renamed"]
    assert all(one.a and one.b and key_of(a[one.a.name]) == key_of(b[one.b.name]) for one in renamed)
    assert Counter(key_of(b[one.name]) for one in renamed) == keys_a & keys_b
    assert Counter(key_of(a[one.name]) for one in report.tensors if one.kind == "only_in_a") == keys_a - keys_b
    assert Counter(key_of(b[one.name]) for one in report.tensors if one.kind == "only_in_b") == keys_b - keys_a
    has_all_same = a.keys() == b.keys() and all(kind_of(a[name], b[name]) == "same" for name in a)
    assert report.is_same == (has_all_same and groups_a == groups_b)


def key_of(tensor: torch.Tensor) -> object:
    return tensor.dtype, tuple(tensor.shape), bytes_of(tensor)


def assert_close(found: ValueDiff, expected: ValueDiff) -> None:
    for field in ValueDiff.__slots__:
        one, other = getattr(found, field), getattr(expected, field)
        if isinstance(other, float | tuple):
            assert one == pytest.approx(other, rel=1e-7, abs=1e-12), field
        else:
            assert one == other, field


@settings(max_examples=15, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_report_is_that_of_brute_force(data: st.DataObject) -> None:
    a = data.draw(state_dicts()).state_dict
    b = data.draw(changed(a))
    with tempfile.TemporaryDirectory() as folder:
        in_a = save(a, Path(folder, "a"), data.draw(st.sampled_from(FORMS)))
        in_b = save(b, Path(folder, "b"), data.draw(st.sampled_from(FORMS)))

        levels: tuple[Verify, ...] = ("none", "full")
        report = hfshard.diff_checkpoints(Path(folder, "a"), Path(folder, "b"), values=True)

        assert_is_that_of_brute_force(report, in_a, in_b)
        for verify in levels:
            again = hfshard.diff_checkpoints(Path(folder, "a"), Path(folder, "b"), verify=verify)
            assert again.counts == report.counts
