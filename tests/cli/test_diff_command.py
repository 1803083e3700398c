"""`hfshard diff`: what it prints, its exit codes, its tables and maps, and what training leaves."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertModel

import hfshard
from hfshard.cli.diff_command import (
    HeatMapStyle,
    heat_maps,
    modules_table,
    not_finite_lines,
    renames_table,
    tensors_table,
)
from hfshard.cli.main import main
from hfshard.viewing.describe import headline
from hfshard.viewing.results import CheckpointDiff
from tests.cli.conftest import Run, check_reader_that_goes_away
from tests.saving.helpers import flip
from tests.viewing.adapters import make_adapter, make_base
from tests.viewing.reports import BERT, marked, renamed, report_of, tensor_diff, values_of


def state_dict() -> dict[str, torch.Tensor]:
    tensors = {
        f"encoder.layer.{layer}.{part}.{kind}": torch.full((4, 2), float(layer))
        for layer in range(12)
        for part in ("attention.query", "output")
        for kind in ("weight", "bias")
    }
    return {"embed.weight": torch.ones(8, 4), **tensors, "classifier.weight": torch.ones(2, 4)}


def save(directory: Path, changes: dict[str, torch.Tensor] | None = None, **options: object) -> Path:
    hfshard.save_state_dict({**state_dict(), **(changes or {})}, directory, **options)  # type: ignore[arg-type]
    return directory


def test_text_says_what_changed_and_where(tmp_path: Path, run: Run) -> None:
    a = save(tmp_path / "a")
    b = save(tmp_path / "b", {name: torch.zeros(4, 2) - 1 for name in state_dict() if "query.weight" in name})
    assert (
        run.ok("diff", a, b, code=1, COLUMNS="80")
        == f"""\
Only query.weight of all 12 layers changed: 12 of 50 tensors.

   tensors    size  dtypes  place
A       50  1.7 KB  F32     {a}
B       50  1.7 KB  F32     {b}

Compared by names and digests; no tensor was read.

difference  tensors  where
changed          12  encoder.layer.{{0-11}}.attention.query.weight
same             38  the rest
"""
    )


def test_the_same_tensors_in_other_files_exit_with_0(tmp_path: Path, run: Run) -> None:
    out = run.ok("diff", save(tmp_path / "a"), save(tmp_path / "b", max_shard_size="1KB"))
    assert out.startswith("The same 50 tensors, in 50 files instead of 1.\n")
    assert "difference" not in out


def test_json_has_everything(tmp_path: Path, run: Run) -> None:
    hfshard.save_state_dict({"w": torch.ones(2, 3), "old": torch.zeros(1)}, tmp_path / "a")
    hfshard.save_state_dict({"w": torch.zeros(2, 3), "x": torch.ones(1), "y": torch.ones(2)}, tmp_path / "b")
    found = json.loads(run.ok("diff", tmp_path / "a", tmp_path / "b", "--format", "json", code=1))

    def tensor(name: str, *shape: int) -> dict[str, object]:
        size = 4 * math.prod(shape)
        return {"name": name, "dtype": "F32", "shape": [*shape], "nbytes": size, "file": "model.safetensors"}

    assert found == {
        "a": str(tmp_path / "a"),
        "b": str(tmp_path / "b"),
        "is_same": False,
        "headline": "The one tensor in both changed; 1 tensor only in A (old); 2 tensors only in B (x and y).",
        "counts": {
            "same": 0, "changed": 1, "renamed": 0, "cast": 0, "reshaped": 0, "only_in_a": 1, "only_in_b": 2,
        },
        "read_bytes": 0,
        "retied": [],
        "ties_a": {},
        "ties_b": {},
        "tensors": [
            {"kind": "changed", "a": tensor("w", 2, 3), "b": tensor("w", 2, 3), "values": None},
            {"kind": "only_in_b", "a": None, "b": tensor("x", 1), "values": None},
            {"kind": "only_in_b", "a": None, "b": tensor("y", 2), "values": None},
            {"kind": "only_in_a", "a": tensor("old", 1), "b": None, "values": None},
        ],
        "merged": None,
    }  # fmt: skip


def test_an_adapter_beside_its_base_is_mapped_as_what_it_changes(tmp_path: Path, run: Run) -> None:
    text = run.ok("diff", make_base(tmp_path / "base"), make_adapter(tmp_path / "x"), "--values", code=1)

    assert text.splitlines()[0] == "B is an adapter (LoRA) that changes q.weight of layer 0 of 2 of A: 1 of 6 tensors."
    assert "\nh.*       0\nq.weight  9.\n" in text


def test_all_lists_tensors_with_their_whole_names(tmp_path: Path, run: Run) -> None:
    long = f"{'x' * 200}.weight"
    hfshard.save_state_dict({long: torch.ones(2, 3), "h.2.w": torch.ones(1), "h.10.w": torch.ones(1)}, tmp_path / "a")
    hfshard.save_state_dict({long: torch.ones(3, 2), "h.2.w": torch.ones(2), "h.10.w": torch.ones(3)}, tmp_path / "b")
    short, whole = (run("diff", tmp_path / "a", tmp_path / "b", *more, COLUMNS="80") for more in ((), ("--all",)))
    assert max(map(len, short.stdout.split("difference")[1].splitlines())) <= 80
    assert whole.stdout.split("\n\n")[-1].replace(" ", "") == (
        f"differenceshapetensor\nchanged1→2h.2.w\nchanged1→3h.10.w\nreshaped2×3→3×2{long}\n"
    )


def test_what_cannot_be_compared_exits_with_2(tmp_path: Path, run: Run) -> None:
    a = save(tmp_path / "a")
    damaged = save(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\x00" * 100)

    for arguments in ((a, tmp_path / "none"), (a, damaged), (a,), (a, a, "--format", "xml")):
        assert run.fails(2, "diff", *arguments), arguments


def test_what_nobody_expected_exits_with_2_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [str(save(tmp_path / place, {"new": torch.full((9,), n)}, checksum=None)) for n, place in enumerate("ab")]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(torch, "frombuffer", fail)
    assert main(["diff", *places]) == 2
    assert capsys.readouterr().err.endswith("RuntimeError: no memory left\n")


def test_weights_are_chosen_in_files_of_torch_save(tmp_path: Path, run: Run) -> None:
    a, b = save(tmp_path / "a"), tmp_path / "last.pth"
    torch.save({"model": state_dict(), "model_ema": {**state_dict(), "embed.weight": torch.zeros(8, 4)}}, b)

    def said(*arguments: str | Path) -> tuple[int, str]:
        done = run("diff", *arguments)
        return done.returncode, (done.stdout or done.stderr).splitlines()[0]

    assert said(a, b, "--key", "model") == (0, "The same 50 tensors, in other files.")
    assert said(a, b, "--key", "model_ema") == (1, "Only embed changed: 1 of 50 tensors.")
    assert said(b, b, "--key", "model_ema") == (0, "The same 50 tensors.")
    assert said(b, b, "--key", "model", "--key", "model_ema") == (1, "Only embed changed: 1 of 50 tensors.")
    model = ("--key", "model")
    wrongs: list[list[str | Path]] = [[b, b], [a, b, "--key", "ema"], [a, a, *model], [b, b, *model * 3]]
    assert [said(*wrong)[0] for wrong in wrongs] == [2, 2, 2, 2]


def test_digests_that_lie_are_found_by_verify(tmp_path: Path, run: Run) -> None:
    a = save(tmp_path / "a", {"large": torch.ones(9000)}, checksum="xxh3")
    file = Path(shutil.copytree(a, tmp_path / "b")) / "model.safetensors"
    flip(file, file.read_bytes().index(torch.ones(9000).numpy().tobytes()) + 18_000)
    believed, read = (run("diff", a, tmp_path / "b", "--verify", level) for level in ("none", "full"))
    assert (believed.returncode, read.returncode, read.stdout) == (0, 2, "")
    assert "is damaged: its xxh3 is" in read.stderr


def test_folders_of_both_are_chosen(tmp_path: Path, run: Run) -> None:
    save(tmp_path / "a" / "x")
    save(tmp_path / "b" / "x")
    save(tmp_path / "b" / "y", {"embed.weight": torch.zeros(8, 4)})
    a, b = tmp_path / "a", tmp_path / "b"
    assert run("diff", a, b, "--subfolder", "x").returncode == 0
    assert run("diff", a, b, "--subfolder", "x", "--subfolder", "y").returncode == 1
    assert run("diff", a, b, "--subfolder", "y").returncode == 2


def test_hostile_names_do_not_move_the_cursor(tmp_path: Path, run: Run) -> None:
    names = ["w\x1b[2J\n\x07", "h.0.\x1b]0;t\x07", "h.1.\x1b]0;t\x07", "\u202ereversed"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "a.safetensors")
    save_file({name: torch.ones(1) for name in names[1:]}, tmp_path / "b.safetensors")
    for more in ((), ("--all",)):
        out = run.ok("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", *more, code=1)
        assert out.replace("\n", "").isprintable()
        assert "w\\x1b[2J\\n\\x07" in out


def test_reader_that_goes_away_is_no_error(tmp_path: Path, child_environment: dict[str, str]) -> None:
    for place, number in (("a", 0), ("b", 1)):
        (tmp_path / place).mkdir()
        tensors = {f"{'tensor.' * 15}{index:04d}": torch.full((1,), number) for index in range(1000)}
        save_file(tensors, tmp_path / place / "model.safetensors")
    first_line = "All 1,000 tensors changed.\n"
    check_reader_that_goes_away(first_line, child_environment, "diff", tmp_path / "a", tmp_path / "b", "--all")


def test_values_are_summed_up_by_module() -> None:
    found = [
        tensor_diff("changed", "h.0.w", values_of(0.125, changed=1)),
        tensor_diff("changed", "h.1.w", values_of(0.25, changed=0)),
        tensor_diff("cast", "g.w", values_of(0.001, changed=0)),
        tensor_diff("only_in_b", "new"),
        tensor_diff("same", "rest"),
    ]
    assert modules_table(report_of(found), 80).splitlines() == [
        "difference     tensors  elements     norm  where",
        "cast F32→BF16        1      none  1.0e-03  g",
        "changed              2     25.0%  2.5e-01  h.{0-1}",
        "only in B            1                     new",
        "same                 1                     the rest",
    ]
    assert tensors_table(report_of([*found, renamed("old", "h.2.w")])).splitlines() == [
        "difference     shape  elements     norm  largest  tensor",
        "cast F32→BF16  2          none  1.0e-03  2.5e-01  g.w",
        "changed        2         50.0%  1.2e-01  2.5e-01  h.0.w",
        "changed        2          none  2.5e-01  2.5e-01  h.1.w",
        "renamed        2                                  old → h.2.w",
        "only in B      2                                  new",
    ]


def test_rows_fit_the_terminal() -> None:
    found = marked([f"{'module.' * 20}{number}.{part}" for number in range(3) for part in "ab"], changed=[".a"])
    lines = modules_table(report_of(found), 60).split("\n")
    assert lines[1] == "changed           3  module.module.modul…dule.module.{0-2}.a"
    assert max(map(len, lines)) == 60


def test_what_is_irregular_is_counted() -> None:
    found = [tensor_diff("changed" if number % 3 else "same", f"w{number}") for number in range(10_000)]
    lines = modules_table(report_of(found), 80).split("\n")
    assert lines[1:] == ["changed     6,666 of 10,000  (everywhere)", "same                  3,334  the rest"]


def test_renames_are_told_by_rule() -> None:
    found = [renamed(name, f"model.{name}") for name in BERT] + [renamed(f"x{n}", f"y{n}") for n in range(20)]
    assert renames_table(report_of(found)) == "\n".join(
        ["renamed  how", "    100  with 'model.' in front", *(f"      1  'x{n}' is 'y{n}'" for n in range(7))]
        + ["     13  in 13 other ways"]
    )
    assert renames_table(report_of(marked(BERT))) == ""


def test_numbers_that_are_not_finite_are_named() -> None:
    values = replace(values_of(0.0), nan_b=2, inf_a=1, inf_b=2)
    found = report_of([tensor_diff("changed", "a\x1b", values), tensor_diff("changed", "b", replace(values, nan_a=9))])
    assert not_finite_lines(found) == [
        "NaN or infinite in B and not in A: 3 elements of a\\x1b",
        "NaN or infinite in A and not in B: 6 elements of b",
    ]


def test_what_was_zero_hides_no_other_norm() -> None:
    norms = {"h.0.b": math.inf, "h.1.b": 0.25, "g.b": math.inf}
    found = report_of(tensor_diff("changed", name, values_of(norm)) for name, norm in norms.items())

    assert (
        modules_table(found, 80)
        == """\
difference  tensors  elements     norm  where
changed           1    100.0%   from 0  g
changed           2    100.0%  2.5e-01  h.{0-1}"""
    )


DIGITS = HeatMapStyle(80, has_shades=False, has_colors=False)


def norms_report(norms: dict[str, float]) -> CheckpointDiff:
    kinds = {name: tensor_diff("changed" if norm else "same", name, values_of(norm)) for name, norm in norms.items()}
    same = {name: tensor_diff("same", name) for name, norm in norms.items() if not norm}
    return report_of({**kinds, **same}.values())


NORMS = {
    **{f"h.{layer}.q.weight": 10.0 ** (layer - 9) for layer in range(8)},
    **{f"h.{layer}.k.weight": 0.0 for layer in range(8)},
    **{f"h.{layer}.mlp": 0.01 if layer in (0, 7) else 0.0 for layer in (0, 1, 7)},
    "embed.weight": 1e-9,
}


def test_a_name_in_several_pairs_has_the_largest_norm_on_the_scale() -> None:
    found = [tensor_diff("changed", f"h.{n}.w", values_of(norm)) for n, norm in ((0, 1e-7), (0, 1e-3), (1, 1e-1))]

    drawn = list(heat_maps(report_of(found), DIGITS))

    assert drawn == [
        "h.*  0\nw    19",
        "relative norm |B-A| / |A|:  . same  1 1.0e-03  9 1.0e-01",
    ]


def test_digits_are_levels_of_the_logarithm() -> None:
    assert list(heat_maps(norms_report(NORMS), DIGITS)) == [
        "h.*       0    5\nq.weight  11245689\nmlp       9.     9",
        "relative norm |B-A| / |A|:  . same  1 1.0e-08  9 1.0e-02",
    ]


def test_a_terminal_gets_shades_and_colors() -> None:
    drawn, legend = heat_maps(norms_report(NORMS), HeatMapStyle(80, has_shades=True, has_colors=False))
    assert drawn == "h.*       0    5\nq.weight  ░░░▒▓▓██\nmlp       █·     █"
    assert legend == "relative norm |B-A| / |A|:  · same  ░ 1.0e-08  ▒ 3.2e-07  ▓ 1.0e-05  █ 3.2e-04"
    colored, _ = heat_maps(norms_report(NORMS), HeatMapStyle(80, has_shades=True, has_colors=True))
    assert colored.split("\n")[2] == "mlp       \x1b[38;5;124m█\x1b[0m·     \x1b[38;5;124m█\x1b[0m"


def test_many_layers_share_columns_and_many_kinds_are_cut() -> None:
    norms = {f"h.{layer}.k{kind}": 1e-3 if layer % 4 else 1e-2 for layer in range(200) for kind in range(50)}
    drawn, _ = heat_maps(norms_report(norms), DIGITS)
    lines = drawn.split("\n")
    assert len(lines) == 1 + 40 + 2
    assert lines[:2] == [
        "h.*  0    15   30   45   60   75   90   105  120  135  150  165  180  195",
        "k0   " + "9991" * 16 + "991",
    ]
    assert lines[-2:] == ["... and 10 kinds of tensors that changed less", "(each column: the maximum of 3 layers)"]


def test_what_is_infinite_or_no_number_is_drawn_too() -> None:
    assert list(heat_maps(norms_report({"h.0.w": inf, "h.1.w": 0.5, "h.2.w": 0.1}), DIGITS)) == [
        "h.*  0\nw    993",
        "relative norm |B-A| / |A|:  . same  1 5.0e-02  9 5.0e-01",
    ]
    only_nan = report_of([tensor_diff("changed", f"h.{layer}.w", values_of(0.0, changed=1)) for layer in (0, 1)])
    drawn, _ = heat_maps(only_nan, DIGITS)
    assert drawn == "h.*  0\nw    11"


def test_without_values_or_layers_nothing_is_drawn() -> None:
    assert list(heat_maps(report_of([tensor_diff("changed", "h.0.w"), tensor_diff("changed", "h.1.w")]), DIGITS)) == []
    assert list(heat_maps(norms_report({"w": 0.5, "h.0.w": 0.0, "h.1.w": 0.0}), DIGITS)) == []


def test_what_differs_otherwise_is_not_drawn_as_the_same() -> None:
    zeros = tensor_diff("changed", "h.0.w", values_of(0.0, changed=0))  # only the sign of a zero
    others = [tensor_diff("changed", "h.1.w"), tensor_diff("only_in_b", "h.2.w"), tensor_diff("same", "h.3.w")]
    renames = renamed("g.4.w", "h.4.w")
    exact_cast = tensor_diff("cast", "h.5.w", values_of(0.0, changed=0))
    drawn, legend = heat_maps(report_of([zeros, *others, renames, exact_cast]), DIGITS)
    assert drawn == "h.*  0    5\nw    1??..."
    assert legend.startswith("relative norm |B-A| / |A|:  . same  1 ")
    assert legend.endswith("  ? differs otherwise")
    assert list(heat_maps(report_of([*others, exact_cast]), DIGITS)) == []


def trained(minilm: Path, *parts: str) -> BertModel:
    """MiniLM after two steps of the parameters with one of these parts in their names."""
    model = BertModel.from_pretrained(minilm)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        output = model(input_ids=torch.arange(1000, 1016).reshape(2, 8) + step)
        (output.last_hidden_state.square().mean() + output.pooler_output.square().mean()).backward()
        optimizer.step()
    return model


@pytest.mark.compat
def test_trained_layers_are_those_that_are_shown(minilm: Path, tmp_path: Path, run: Run) -> None:
    hfshard.save_model(trained(minilm, "layer.4.", "layer.5."), tmp_path / "tuned", max_shard_size="20MB")

    lines = run.ok("diff", minilm, tmp_path / "tuned", "--values", code=1, COLUMNS="80").splitlines()

    # position_ids is in the old file alone: transformers no longer saves it.
    assert lines[0] == "Only layers 4-5 of 6 changed: 32 of 103 tensors; 1 tensor only in A (embeddings.position_ids)."
    rows = [line.split() for line in lines if line.startswith(("changed", "only", "same"))]
    assert [(row[0], row[-1]) for row in rows] == [
        ("only", "embeddings.position_ids"), ("changed", "encoder.layer.{4-5}"), ("same", "rest"),
    ]  # fmt: skip
    assert (rows[1][1], rows[2][1]) == ("32", "71")
    drawn = {words[0]: words[1] for line in lines[-18:-2] if len(words := line.split()) == 2}
    assert len(drawn) == 16
    assert {row[:4] for row in drawn.values()} == {"...."}
    assert all(level in "123456789" for row in drawn.values() for level in row[4:])


def test_a_head_a_cast_and_a_prefix_are_told_in_a_sentence(minilm: Path, tmp_path: Path) -> None:
    base = BertModel.from_pretrained(minilm).state_dict()
    hfshard.save_state_dict(base, tmp_path / "base")
    head = trained(minilm, "pooler").state_dict()
    cast = {name: tensor.bfloat16() for name, tensor in base.items()}
    prefixed = {f"model.{name}": tensor for name, tensor in base.items()}

    def said(state_dict: dict[str, torch.Tensor]) -> str:
        hfshard.save_state_dict(state_dict, tmp_path / "b")
        return headline(hfshard.diff_checkpoints(tmp_path / "base", tmp_path / "b"))

    assert said(head) == "Only pooler.dense changed: 2 of 103 tensors."
    assert said(cast) == "Cast from F32 to BF16, nothing else."
    assert said(prefixed) == "The same 103 tensors under other names: with 'model.' in front."


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_an_adapter_and_what_it_was_merged_into(minilm: Path, tmp_path: Path, run: Run) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(BertModel.from_pretrained(minilm), config)
    hfshard.save_state_dict(BertModel.from_pretrained(minilm).state_dict(), tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    hfshard.save_model(model.merge_and_unload(), tmp_path / "merged")

    merged = run("diff", tmp_path / "base", tmp_path / "merged")
    adapter = run("diff", tmp_path / "base", tmp_path / "adapter" / "adapter_model.safetensors", "--format", "json")

    assert merged.stdout.startswith("Only query.weight and value.weight of all 6 layers changed: 12 of 103 tensors.\n")
    assert "changed           6  encoder.layer.{0-5}.attention.self.query.weight\n" in merged.stdout
    found = json.loads(adapter.stdout)
    assert found["headline"] == (
        "No tensor in common; 103 tensors only in A; "
        "B is an adapter (LoRA) for query and value of all 6 layers: 24 tensors."
    )
    assert (merged.returncode, adapter.returncode, found["counts"]["only_in_b"]) == (1, 1, 24)
