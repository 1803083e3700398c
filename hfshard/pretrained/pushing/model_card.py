"""The README.md of a model that is pushed, as transformers makes it: a card from the template, and its tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from huggingface_hub import ModelCard, ModelCardData

from hfshard.errors import InvalidArgumentError

_DESCRIPTION: Final = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    "This model card has been automatically generated."
)


def tagged_card(read_old: Callable[[], bytes] | None, tags: Sequence[str]) -> bytes | None:
    """Make the card to push; None where the one on the hub needs no change.

    Args:
        read_old: Reads the README.md on the hub; None where there is none.
        tags: Those that it must have.

    Raises:
        InvalidArgumentError: The one on the hub can't be read.

    Source: transformers `create_and_tag_model_card`.
    """
    if read_old is None:
        data = ModelCardData(tags=list(tags), library_name="transformers")
        return _to_bytes(ModelCard.from_template(data, model_description=_DESCRIPTION))
    if not tags:
        return None
    raw = read_old()
    try:
        if b"\0" in raw:
            raise ValueError("it contains NUL bytes")
        card: Any = ModelCard(raw.decode("utf-8"), ignore_metadata_errors=True)
    except Exception as error:  # they have no common base class: PyYAML's, UnicodeDecodeError, ValueError
        raise InvalidArgumentError(
            f"The tags can't be added to the README.md on the hub, whose metadata can't be read: {error}. Mend it "
            "there, or push without tags."
        ) from error
    there = card.data.tags or []
    there = [there] if isinstance(there, str) else list(there)
    missing = [tag for tag in tags if tag not in there]
    if not missing:
        return None
    card.data.tags = [*there, *missing]
    return _to_bytes(card)


def _to_bytes(card: ModelCard) -> bytes:
    return str(card).encode("utf-8")
