"""A page is put into its file whole, and over nothing but a page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfshard.errors import FileError, InvalidPathError
from hfshard.viewing.page.checkpoint_page import make_checkpoint_page
from hfshard.viewing.page.page import checked_output, name_of, percent_text, render_page, write_page
from tests.viewing.page.checkpoints import small_checkpoint

PAGE = render_page(make_checkpoint_page(small_checkpoint()))


def test_percentages_have_three_digits_and_all_before_the_point() -> None:
    shares = (0.0178, 0.0246, 0.000231, 1e-7, 0.0, 1.0, 5.5, 81.0, 12_345.678, 1e9)

    assert [percent_text(share) for share in shares] == [
        "1.78 %", "2.46 %", "0.0231 %", "1e-05 %", "0 %", "100 %", "550 %", "8,100 %", "1.23e+06 %", "1e+11 %",
    ]  # fmt: skip
    assert [percent_text(share, 2) for share in shares[:3]] == ["1.8 %", "2.5 %", "0.023 %"]


def test_page_replaces_a_page_and_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write_page(PAGE, checked_output(target))
    assert target.stat().st_size == len(PAGE.encode())
    target.chmod(0o600)

    write_page(f"{PAGE}\n", checked_output(target))

    assert target.read_text(encoding="utf-8") == f"{PAGE}\n"
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path) -> None:
    target = tmp_path / f"{'é' * 125}.html"  # 255 bytes

    write_page(PAGE, checked_output(target))

    assert os.listdir(tmp_path) == [target.name]


def test_link_to_a_page_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to("real/page.html")

    write_page(PAGE, checked_output(link))

    assert link.is_symlink()
    assert (tmp_path / "real" / "page.html").read_text(encoding="utf-8") == PAGE


def test_what_is_no_page_is_left_as_it_is(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(InvalidPathError, match=r"model\.safetensors' exists and is not a page of hfshard"):
        checked_output(weights)
    with pytest.raises(InvalidPathError, match="pipe' exists and is not a page"):
        checked_output(pipe)
    with pytest.raises(InvalidPathError, match=r"is a directory. Pass the file"):
        checked_output(tmp_path)
    with pytest.raises(InvalidPathError, match=r"The directory '.*/none' does not exist"):
        checked_output(tmp_path / "none" / "page.html")
    with pytest.raises(InvalidPathError, match="is a store address"):
        checked_output("s3://bucket/page.html")
    assert weights.read_bytes() == b"weights"


def test_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    target = checked_output(tmp_path / "page.html")
    os.mkdir(target)  # meanwhile

    with pytest.raises(FileError, match=r"page\.html': Is a directory"):
        write_page(PAGE, target)

    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/models/bert", "bert"),
        ("/models/bert/model.safetensors", "model.safetensors"),
        ("/runs/bert/checkpoint-00000030", "bert/checkpoint-00000030"),
        ("/checkpoint-30", "checkpoint-30"),
        ("/", "/"),
        ("/models/a\u202eb", "a\\u202eb"),
        ("/hub/org/name@main", "name@main"),
        ("org/name@v1", "org/name@v1"),
        ("s3://bucket/runs/bert/checkpoint-30", "bert/checkpoint-30"),
        ("s3://bucket", "bucket"),
    ],
)
def test_a_place_is_known_by_its_last_part(place: str, name: str) -> None:
    assert name_of(place) == name
