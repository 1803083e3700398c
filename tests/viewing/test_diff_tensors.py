"""Both sides of a diff: their tensors and ties, pairs by name and by contents, and what a report adds up to."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

import hfshard
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.viewing.diff_tensors import Side, pair_by_contents, pair_by_name, side_of
from hfshard.viewing.inspection import open_for_viewing
from hfshard.viewing.results import TensorEntry
from tests.viewing.reports import renamed, report_of, tensor_diff, values_of


def opened(stack: ExitStack, path: Path) -> Side:
    return side_of(stack.enter_context(open_for_viewing(path, CheckpointQuery(), LoadOptions())))


def saved(directory: Path, *names: str) -> Path:
    """Save a tensor of its own under each name, in this order; plainly, so without ties and checksums."""
    directory.mkdir()
    save_file({name: torch.tensor([float(at)]) for at, name in enumerate(names)}, directory / "model.safetensors")
    return directory


def test_a_side_has_each_stored_tensor_once_with_all_of_its_names(tmp_path: Path) -> None:
    embed = torch.arange(4.0)
    hfshard.save_state_dict({"embed": embed, "head": embed, "half": torch.ones(2, 3).half()}, tmp_path / "out")

    with ExitStack() as stack:
        side, again = opened(stack, tmp_path / "out"), opened(stack, tmp_path / "out")

        assert side.ties == {"head": "embed"}
        assert (side.place, side.is_networked, side.optional_names) == (str(tmp_path / "out"), False, frozenset())
        assert [one.position for one in side.tensors] == [0, 1]
        assert {one.facts.name: sorted(one.names) for one in side.tensors} == {
            "embed": ["embed", "head"],
            "half": ["half"],
        }
        embed_side, half = side.by_name()["head"], side.by_name()["half"]
        assert embed_side is side.by_name()["embed"]
        assert (half.form, half.facts.nbytes, half.torch_dtype) == (("F16", (2, 3)), 12, torch.float16)
        assert b"".join(half.blocks()) == b"\x00\x3c" * 6  # 1.0 as F16
        assert half.digest is not None and half.digest != embed_side.digest
        assert half.places & again.by_name()["half"].places and not half.places & embed_side.places


def test_complex_numbers_in_a_pickle_are_shown_as_such(tmp_path: Path) -> None:
    torch.save({"z": torch.ones(2, dtype=torch.complex128), "r": torch.ones(1)}, tmp_path / "z.bin")

    with ExitStack() as stack:
        z, r = opened(stack, tmp_path / "z.bin").tensors
        assert z.facts == TensorEntry("z", "C128", (2,), 32, "z.bin")
        assert r.facts == TensorEntry("r", "F32", (1,), 4, "z.bin")
        assert (z.torch_dtype, z.digest, z.places) == (torch.complex128, None, frozenset())


def test_a_tied_name_pairs_tensors_and_ties_of_one_side_are_told(tmp_path: Path) -> None:
    embed = torch.arange(4.0)
    hfshard.save_state_dict({"embed": embed, "head": embed, "old": torch.ones(1)}, tmp_path / "a")
    saved(tmp_path / "b", "head", "new")

    with ExitStack() as stack:
        found = pair_by_name(opened(stack, tmp_path / "a"), opened(stack, tmp_path / "b"))

        assert [(pair.a.facts.name, pair.b.facts.name, pair.name_a, pair.name_b) for pair in found.pairs] == [
            ("embed", "head", "head", "head")
        ]
        assert found.pairs[0].nbytes == 16 + 4
        assert [one.facts.name for one in found.only_in_a] == ["old"]
        assert [one.facts.name for one in found.only_in_b] == ["new"]
        assert found.retied == ("head",)


def test_twins_are_paired_by_their_last_parts_then_their_first_then_in_order(tmp_path: Path) -> None:
    with ExitStack() as stack:
        a = opened(stack, saved(tmp_path / "a", "g.0.bias", "h.1.bias", "out.x", "plain"))
        b = opened(stack, saved(tmp_path / "b", "aa.1.bias", "layers.0.bias", "one_more", "other", "out.y"))

        pairs = pair_by_contents(a.tensors, b.tensors, lambda tensor: tensor.form)

        assert sorted((pair.name_a, pair.name_b) for pair in pairs) == [
            ("g.0.bias", "layers.0.bias"),
            ("h.1.bias", "aa.1.bias"),
            ("out.x", "out.y"),
            ("plain", "one_more"),
        ]
        assert pair_by_contents(a.tensors, b.tensors, lambda tensor: tensor.facts.name) == []


def test_a_report_is_the_same_only_with_the_same_names_and_ties() -> None:
    same = [tensor_diff("same", "a"), tensor_diff("same", "b")]

    assert report_of(same).is_same and report_of([]).is_same
    assert not report_of(same, retied=("b",)).is_same
    mixed = report_of([*same, renamed("old", "new"), tensor_diff("only_in_a", "gone")])
    assert not mixed.is_same
    assert mixed.counts == {"same": 2, "renamed": 1, "only_in_a": 1}
    assert [tensor.name for tensor in mixed.tensors] == ["a", "b", "new", "gone"]
    assert values_of(math.inf).was_zero and not values_of(0.0).was_zero
