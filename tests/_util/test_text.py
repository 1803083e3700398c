"""Words for messages."""

from __future__ import annotations

import pytest

from hfshard._util.text import count_of, describe_error, format_size, printable, shorten_list, without_url_secrets


@pytest.mark.parametrize(
    ("items", "expected"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c"], "a, b and 1 more")],
)
def test_a_list_is_cut_and_says_how_much_is_missing(items: list[str], expected: str) -> None:
    assert shorten_list(items, 2) == expected


def test_each_item_is_quoted_where_asked_for() -> None:
    assert shorten_list({"x": 1, "y": 2}.keys(), 1, quote=True) == "'x' and 1 more"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name", "plain name"),
        ("größe.重み", "größe.重み"),
        ("bell\x07", "bell\\x07"),
        ("right\u202eleft", "right\\u202eleft"),
        ("nul\x00", "nul\\x00"),
        ("new\r\nline", "new\\r\\nline"),
    ],
)
def test_printable_escapes_what_is_not(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(("number", "text"), [(0, "0 files"), (1, "1 file"), (2000, "2,000 files")])
def test_a_noun_is_counted(number: int, text: str) -> None:
    assert count_of(number, "file") == text


def test_an_error_that_says_nothing_is_known_by_its_class_alone() -> None:
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert describe_error(OSError("the disk is full")) == "OSError: the disk is full"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "GET https://s3.example/x?X-Amz-Signature=abc&y=1 and http://h/p?sig=1) failed",
            "GET https://s3.example/x?… and http://h/p?…) failed",
        ),
        ("for url: http://someone:hunter2@mirror:80/a, b", "for url: http://mirror:80/a, b"),
        ("https://hunter2@mirror", "https://mirror"),
        ("Invalid endpoint: someone:hunter2@mirror", "Invalid endpoint: mirror"),
        ("User: me@corp in org/name@main, s3://b/a@b", "User: me@corp in org/name@main, s3://b/a@b"),
    ],
)
def test_users_and_queries_of_urls_are_left_out(text: str, shown: str) -> None:
    assert without_url_secrets(text) == shown


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1049, "1.0 KB"),
        (1051, "1.1 KB"),
        (99_949, "99.9 KB"),
        (999_949, "999.9 KB"),
        (999_950, "1.0 MB"),
        (999_999, "1.0 MB"),
        (46_881_792, "46.9 MB"),
        (90_868_376, "90.9 MB"),
        (1_500_000_000, "1.5 GB"),
        (5_368_709_120, "5.4 GB"),
        (2_000_000_000_000, "2.0 TB"),
        (3_000_000_000_000_000, "3.0 PB"),
        (4_000_000_000_000_000_000, "4000.0 PB"),
        (-5, "-5 B"),
        (-1500, "-1.5 KB"),
    ],
)
def test_format_size_is_short_and_in_powers_of_1000(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
