"""`hfshard show`: where the page is, and what it is of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.cli.check_commands import default_output
from hfshard.cli.main import main
from hfshard.errors import InvalidArgumentError, InvalidPathError
from hfshard.viewing.screenshot import find_chromium
from tests.cli.conftest import Run


def test_page_is_written_where_it_is_asked_for(example: Path, tmp_path: Path, run: Run) -> None:
    page = tmp_path / "page.html"

    done = run("show", example, "-o", page)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{page}: {page.stat().st_size / 1000:.1f} KB\n"
    html = page.read_text(encoding="utf-8")
    assert f"<title>{example}</title>" in html
    assert "<dt>weights</dt><dd>460.1 KB" in html

    again = run("show", example / "model-00001-of-00002.safetensors", "-o", page, "--format", "json",
        "--max-shard-size", "200KB")  # fmt: skip

    assert json.loads(again.stdout) == {"page": str(page), "size": page.stat().st_size}
    html = page.read_text(encoding="utf-8")
    assert "<dt>weights</dt><dd>400.0 KB" in html
    assert '<th scope="col" class="wide">of 200.0 KB</th>' in html
    assert "<small>202 %</small>" in html


def test_weights_are_not_replaced_by_a_page(example: Path, run: Run) -> None:
    shard = example / "model-00001-of-00002.safetensors"

    done = run("show", example, "-o", shard)

    assert (done.returncode, done.stdout) == (2, "")
    assert "is there and is no page of hfshard" in done.stderr
    assert hfshard.verify_checkpoint(example).ok


def test_nothing_is_written_where_there_are_no_weights(tmp_path: Path, run: Run) -> None:
    done = run("show", tmp_path, "-o", tmp_path / "page.html")

    assert (done.returncode, done.stdout) == (1, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
def test_only_a_picture_is_written_where_only_that_is_asked_for(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "out.png"

    code = main(["show", str(example), "--png", str(picture), "--png-size", "200x200", "--format", "json"])

    assert (code, json.loads(capsys.readouterr().out)) == (0, {"png": str(picture), "size": picture.stat().st_size})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["example", "out.png"]
    with pytest.raises(InvalidArgumentError, match="There is nothing to write: give output="):
        hfshard.show_checkpoint(example)


def test_page_has_the_name_of_its_checkpoint() -> None:
    assert default_output("models/bert/") == "bert.html"
    assert default_output("org/name@v1") == "name@v1.html"
    assert default_output("s3://bucket/runs/bert?region=eu") == "bert.html"
    assert default_output("hf://buckets/org/name/") == "name.html"
    assert default_output(f"s3://bucket/{'é' * 150}") == f"{'é' * 125}.html"
    assert default_output("/") == "checkpoint.html"
    assert default_output(".") == f"{Path.cwd().name}.html"


def test_a_revision_of_a_directory_hub_is_shown(tmp_path: Path, example: Path) -> None:
    hfshard.push_checkpoint(example, f"{tmp_path}/hub")

    path = hfshard.show_checkpoint(f"{tmp_path}/hub@main", tmp_path / "page.html")

    assert f"<title>{tmp_path}/hub@main</title>" in Path(path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": "B", "best": "loss"}, "best is not for a page with `against`"),
        ({"against": "B", "revision": "v1"}, "write a revision behind its checkpoint: 'org/name@revision'"),
        ({"best": "loss"}, "best is for a run, not for one checkpoint"),
    ],
)
def test_an_argument_of_another_page_is_refused(
    tmp_path: Path, example: Path, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        hfshard.show_checkpoint(example, tmp_path / "page.html", **arguments)  # type: ignore[arg-type]

    assert not (tmp_path / "page.html").exists()


def test_key_and_subfolder_are_of_both_that_are_compared(tmp_path: Path) -> None:
    for name, number in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name / "sub").mkdir(parents=True)
        parts = {"model": {"in_model": torch.ones(3)}, "state_dict": {"in_state": torch.full((3,), number)}}
        torch.save(parts, tmp_path / name / "sub" / "pytorch_model.bin")

    path = hfshard.show_checkpoint(
        tmp_path / "b", tmp_path / "page.html", against=tmp_path / "a", subfolder="sub", key="state_dict"
    )

    html = Path(path).read_text(encoding="utf-8")
    assert "<dt>changed</dt><dd>1" in html
    assert "in_state" in html
    assert "in_model" not in html


def test_page_and_picture_are_two_files(tmp_path: Path, example: Path) -> None:
    with pytest.raises(InvalidPathError, match="page' can't be both the page and its picture: give two files"):
        hfshard.show_checkpoint(example, tmp_path / "page", png=tmp_path / "page")
