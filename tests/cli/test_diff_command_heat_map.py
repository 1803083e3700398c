"""The map of layers, character by character."""

from __future__ import annotations

from math import inf

from hfshard.cli.diff_command import HeatMapStyle, heat_maps
from hfshard.viewing.diff_tensors import CheckpointDiff
from tests.viewing.reports import renamed, report_of, tensor_diff, values_of

DIGITS = HeatMapStyle(80, has_shades=False, has_colors=False)


def report(norms: dict[str, float]) -> CheckpointDiff:
    kinds = {name: tensor_diff("changed" if norm else "same", name, values_of(norm)) for name, norm in norms.items()}
    same = {name: tensor_diff("same", name) for name, norm in norms.items() if not norm}
    return report_of({**kinds, **same}.values())


NORMS = {
    **{f"h.{layer}.q.weight": 10.0 ** (layer - 9) for layer in range(8)},
    **{f"h.{layer}.k.weight": 0.0 for layer in range(8)},
    **{f"h.{layer}.mlp": 0.01 if layer in (0, 7) else 0.0 for layer in (0, 1, 7)},
    "embed.weight": 1e-9,
}


def test_digits_are_levels_of_the_logarithm() -> None:
    assert list(heat_maps(report(NORMS), DIGITS)) == [
        "h.*       0    5\nmlp       9.     9\nq.weight  11245689",
        "relative norm |B-A| / |A|:  . same  1 1.0e-08  9 1.0e-02",
    ]


def test_a_terminal_gets_shades_and_colors() -> None:
    drawn, legend = heat_maps(report(NORMS), HeatMapStyle(80, has_shades=True, has_colors=False))
    assert drawn == "h.*       0    5\nmlp       █·     █\nq.weight  ░░░▒▓▓██"
    assert legend == "relative norm |B-A| / |A|:  · same  ░ 1.0e-08  ▒ 3.2e-07  ▓ 1.0e-05  █ 3.2e-04"
    colored, _ = heat_maps(report(NORMS), HeatMapStyle(80, has_shades=True, has_colors=True))
    assert colored.split("\n")[1] == "mlp       \x1b[38;5;124m█\x1b[0m·     \x1b[38;5;124m█\x1b[0m"


def test_many_layers_share_columns_and_many_kinds_are_cut() -> None:
    norms = {f"h.{layer}.k{kind}": 1e-3 if layer % 4 else 1e-2 for layer in range(200) for kind in range(50)}
    drawn, _ = heat_maps(report(norms), DIGITS)
    lines = drawn.split("\n")
    assert len(lines) == 1 + 40 + 2
    assert lines[:2] == [
        "h.*  0    15   30   45   60   75   90   105  120  135  150  165  180  195",
        "k0   " + "9991" * 16 + "991",
    ]
    assert lines[-2:] == ["... and 10 kinds of tensors that changed less", "(each column: the most of 3 layers)"]


def test_what_is_infinite_or_no_number_is_drawn_too() -> None:
    assert list(heat_maps(report({"h.0.w": inf, "h.1.w": 0.5, "h.2.w": 0.1}), DIGITS)) == [
        "h.*  0\nw    993",
        "relative norm |B-A| / |A|:  . same  1 5.0e-02  9 5.0e-01",
    ]
    only_nan = report_of([tensor_diff("changed", f"h.{layer}.w", values_of(0.0, changed=1)) for layer in (0, 1)])
    drawn, _ = heat_maps(only_nan, DIGITS)
    assert drawn == "h.*  0\nw    11"


def test_without_values_or_layers_nothing_is_drawn() -> None:
    assert list(heat_maps(report_of([tensor_diff("changed", "h.0.w"), tensor_diff("changed", "h.1.w")]), DIGITS)) == []
    assert list(heat_maps(report({"w": 0.5, "h.0.w": 0.0, "h.1.w": 0.0}), DIGITS)) == []


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
