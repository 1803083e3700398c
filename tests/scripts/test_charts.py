"""The charts show what was measured, and can be read on a telephone and by those who see few colours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

from tests import REPOSITORY
from tests.helpers import processes

BENCH = REPOSITORY / "scripts" / "bench"
CHARTS = BENCH / "charts"
NAMESPACE = "{http://www.w3.org/2000/svg}"
PLACES = ("README.md", "scripts/bench/REQUESTS.md")
NOT_BARS = {
    "save": {"limit", "hash"},
    "load": {"limit/cold", "hash/cold", "fresh memory/cold"},
    "reshard": {"read alone/cold", "write alone/cold"},
}
"""What the limits themselves are made of."""


def raw(name: str) -> Any:
    return json.loads((BENCH / name).read_text(encoding="utf-8"))


def groups(name: str) -> list[tuple[dict[str, str], ElementTree.Element]]:
    """The data of each group of a chart, and the group."""
    found = ElementTree.parse(CHARTS / name).getroot().iter(f"{NAMESPACE}g")
    return [({key.removeprefix("data-"): value for key, value in group.attrib.items()}, group) for group in found]


def test_the_charts_are_drawn_from_what_was_measured(child_environment: dict[str, str]) -> None:
    done = processes.run([BENCH / "charts.py", "--check"], env=child_environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_check_names_a_chart_that_is_not_drawn_so(child_environment: dict[str, str], tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from bench import charts
charts.DIRECTORY = Path({str(tmp_path)!r})
charts.main([])
Path({str(tmp_path)!r}, "save-dark.svg").write_text("<svg/>")
raise SystemExit(charts.main(["--check"]))
"""
    environment = child_environment | {"PYTHONPATH": f"{REPOSITORY / 'scripts'}:{REPOSITORY}"}
    done = processes.run(["-c", code], env=environment)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'save-dark.svg'} is not what is drawn now: python scripts/bench/charts.py\n"


def ratios_of(data: Any, peer: str, phase: str) -> list[float]:
    """The peer's seconds divided by the limit of the same round."""

    def seconds(name: str) -> dict[int, float]:
        runs = data["peers"][name]["runs"]
        return {run["round"]: run["seconds"].get(phase, list(run["seconds"].values())[-1]) for run in runs}

    names = data["peers"][peer]["limit"]
    joined = sum if " + " in names else max
    limits = [seconds(name) for name in re.split(r" [+|] ", names)]
    return [value / joined([limit[number] for limit in limits]) for number, value in seconds(peer).items()]


@pytest.mark.parametrize(("name", "phase"), [("save", "save"), ("load", "read"), ("reshard", "reshard")])
def test_every_bar_is_a_ratio_of_the_results(name: str, phase: str) -> None:
    data = raw("results.json")[name]
    scales = set()
    for shown, group in groups(f"{name}-light.svg"):
        ratios = ratios_of(data, shown["peer"], phase)
        expected = [median(ratios), min(ratios), max(ratios)]
        assert [float(shown[key]) for key in ("ratio", "lowest", "highest")] == pytest.approx(expected, abs=1e-4)

        length = float(next(group.iter(f"{NAMESPACE}rect")).attrib["width"])
        assert f"{expected[0]:.2f} ×" in "".join(group.itertext())
        scales.add(round(length / expected[0]))
    assert len(scales) == 1

    with_limit = {peer for peer, found in data["peers"].items() if found["limit"] and found["runs"]}
    assert {shown["peer"] for shown, _ in groups(f"{name}-light.svg")} == with_limit - NOT_BARS[name]


@pytest.mark.parametrize("over", ["xet", "lfs"])
def test_every_count_on_the_wire_is_shown(over: str) -> None:
    counts = raw("hub_requests.json")["over"][over]
    shown = {(data["client"], data["action"]): data for data, _ in groups(f"wire-{over}-dark.svg")}
    assert {key: (int(data["requests"]), int(data["bytes"])) for key, data in shown.items()} == {
        (client, action): (found["requests"], found["up"] + found["down"])
        for client, actions in counts.items()
        for action, found in actions.items()
    }


def test_every_resume_is_shown() -> None:
    cells = raw("resume.json")["cells"]
    shown = [data for data, _ in groups("resumes-light.svg")]
    assert {(data["case"], data["way"]): data["outcome"] for data in shown} == {
        (case, way): outcome for case, ways in cells.items() for way, (outcome, _) in ways.items()
    }


def test_charts_have_a_description_and_no_small_letters() -> None:
    for path in sorted(CHARTS.iterdir()):
        root = ElementTree.parse(path).getroot()
        assert root.attrib["role"] == "img"
        assert [root[0].tag, root[1].tag] == [f"{NAMESPACE}title", f"{NAMESPACE}desc"]
        assert root[1].text and len(root[1].text) > 100
        # On a telephone of 390 pixels, whose page has margins of 16, the 380 of a chart become 358.
        sizes = {float(text.attrib["font-size"]) for text in root.iter(f"{NAMESPACE}text")}
        assert (root.attrib["width"], min(sizes) * 358 / 380 >= 11) == ("380", True)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb. Source: WCAG 2.2."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(*colours: str) -> float:
    darker, lighter = sorted(map(luminance, colours))
    return (lighter + 0.05) / (darker + 0.05)


def texts_and_grounds(root: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """The colour of each text, and of what it stands on: in a cell of the grid its rectangle, else the page."""
    page = next(root.iter(f"{NAMESPACE}rect")).attrib["fill"]
    for parent in root.iter():
        for before, element in pairwise([*parent[:1], *parent]):
            if element.tag == f"{NAMESPACE}text":
                is_cell = "data-outcome" in parent.attrib
                yield element.attrib["fill"], before.attrib["fill"] if is_cell else page


def test_colours_of_text_and_of_bars_stand_out() -> None:
    for path in sorted(CHARTS.iterdir()):
        root = ElementTree.parse(path).getroot()
        assert min(contrast(*pair) for pair in set(texts_and_grounds(root))) >= 4.5
        if not path.name.startswith("resumes"):
            page, *bars = dict.fromkeys(found.attrib["fill"] for found in root.iter(f"{NAMESPACE}rect"))
            assert len(bars) == 2
            assert min(contrast(page, bar) for bar in bars) >= 3


def test_each_chart_is_shown_by_a_readme_in_light_and_dark() -> None:
    shown = set()
    for place in PLACES:
        text = (REPOSITORY / place).read_text(encoding="utf-8")
        pictures = re.findall(
            r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)-dark\.svg">\s*'
            r'<img alt="[^"]{10,}" src="([^"]+)-light\.svg" width="380" align="top">\s*</picture>',
            text,
        )
        assert text.count("charts/") == 2 * len(pictures)
        for dark, light in pictures:
            assert dark == light
            shown |= {
                (REPOSITORY / place).parent.joinpath(f"{dark}-{theme}.svg").resolve() for theme in ("dark", "light")
            }
    assert shown == set(CHARTS.iterdir())
