"""The drawing of cards, which a push asks for and which is above it: `hfshard/__init__.py` hands in what draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # `import hfshard` imports this module
    from hfshard.disk.byte_source import ByteSource
    from hfshard.hub.model_card import DrawnCard

CardDrawer: TypeAlias = "Callable[[Mapping[str, ByteSource], str], DrawnCard]"
"""What draws a card. Its arguments are those of `draw_card`."""

_importers: list[Callable[[], CardDrawer]] = []
"""The function that imports what draws cards; empty before it is set."""


def set_card_drawer(import_drawer: Callable[[], CardDrawer]) -> None:
    """Set the function that imports what draws cards, which only a push with a card calls."""
    _importers[:] = [import_drawer]


def draw_card(contents: Mapping[str, ByteSource], name: str) -> DrawnCard:
    """Draw the card of a checkpoint.

    Args:
        contents: Path in the repo -> contents; of weights, only headers are read.
        name: The name of the repo, which the picture shows.

    Raises:
        BrowserError: There is no Chromium, or it failed.
        DamagedCheckpointError: A file is damaged.
    """
    return _importers[0]()(contents, name)
