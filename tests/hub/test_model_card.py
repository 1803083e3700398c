"""The card in a README.md: inserted below the title, replaced between its markers, and nothing else is touched."""

from __future__ import annotations

import pytest

from hfshard.errors import InvalidArgumentError
from hfshard.hub.model_card import merge_card

CARD = b"<!-- hfshard:card -->\nnew\n<!-- /hfshard:card -->\n"


def test_a_readme_is_created() -> None:
    assert merge_card(None, "new", "org/name") == b"# org/name\n\n" + CARD


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"# Mine\n\ntext\n", b"# Mine\n\n" + CARD + b"\n\ntext\n"),
        (b"text without a title", CARD + b"\ntext without a title"),
        (b"---\ntags: [x]\n---\n\n# Mine\ntext", b"---\ntags: [x]\n---\n\n# Mine\n\n" + CARD + b"\ntext"),
        (b"---\ntags: [x]\n---\ntext", b"---\ntags: [x]\n---\n\n" + CARD + b"\ntext"),
        (b"# Mine", b"# Mine\n\n" + CARD),
        (b"", CARD),
        ("# M\u00fcller\n".encode(), "# M\u00fcller\n\n".encode() + CARD),
    ],
)
def test_a_card_is_inserted_below_the_title_or_the_metadata(old: bytes, new: bytes) -> None:
    assert merge_card(old, "new", "") == new
    assert merge_card(new, "new", "") == new  # and stays as it is


def test_only_what_is_between_the_markers_is_replaced() -> None:
    old = b"# Mine\r\n\r\n<!-- hfshard:card -->\r\nold\r\n\r\n| <!-- /hfshard:card --> |"
    with pytest.raises(InvalidArgumentError, match="not one pair on lines of their own"):
        merge_card(old, "new", "")

    old = b" a  \r\n<!-- hfshard:card -->\r\nold\r\n<!-- /hfshard:card -->  \r\nb\n\xc2\x85 c"
    assert merge_card(old, "x\ny", "") == (
        b" a  \r\n<!-- hfshard:card -->\r\nx\r\ny\r\n<!-- /hfshard:card -->\r\nb\n\xc2\x85 c"
    )


@pytest.mark.parametrize(
    ("old", "why"),
    [
        (b"<!-- hfshard:card -->\n", "it has 1 of .* and 0 of"),
        (b"text\n<!-- /hfshard:card -->\n", "it has 0 of .* and 1 of"),
        (CARD + CARD, "it has 2 of .* and 2 of"),
        (CARD + b"Say <!-- hfshard:card --> to me\n", "it has 2 of .* and 1 of"),
        (b"Between <!-- hfshard:card --> and <!-- /hfshard:card --> it is\n", "not one pair on lines of their own"),
        (b"<!-- /hfshard:card -->\n<!-- hfshard:card -->\n", "is before"),
        (b"---\n" + CARD + b"---\n", "they are in the metadata"),
        (b"```\n" + CARD + b"```\n", "they are in a block of code"),
        (b"\xff\xfe", "is not valid UTF-8"),
    ],
)
def test_a_readme_whose_markers_are_not_one_pair_is_refused(old: bytes, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        merge_card(old, "new", "")
