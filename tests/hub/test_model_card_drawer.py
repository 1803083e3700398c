"""What draws cards: handed in from above, and imported only by a push that asks for a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import CheckpointNotFoundError
from hfshard.hub.model_card import draw_card
from hfshard.viewing.screenshot import find_chromium
from tests.helpers import processes


def test_what_draws_is_set_with_the_package_whatever_is_imported_first(child_environment: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "from hfshard.hub.model_card import draw_card\n"
        "import hfshard.push\n"
        "assert 'hfshard.viewing' not in sys.modules\n"
        "try: draw_card({}, 'org/name')\n"
        "except hfshard.errors.HfshardError as error: print(type(error).__name__)\n"
        "assert 'hfshard.viewing.card' in sys.modules\n"
    )

    done = processes.run_fresh(["-c", code], env={**child_environment, "HFSHARD_CHROMIUM": "/none"}, check=True)

    assert done.stdout.split() == ["BrowserError"]


def test_a_push_without_a_card_imports_no_pages(child_environment: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys, torch, hfshard\n"
        f"hfshard.save_state_dict({{'w': torch.ones(8)}}, {str(tmp_path / 'out')!r})\n"
        f"assert hfshard.push_checkpoint({str(tmp_path / 'out')!r}, {str(tmp_path / 'hub' / 'mine')!r}).is_new\n"
        "print(sorted(name for name in sys.modules if name.startswith(('hfshard.viewing', 'jinja2'))))\n"
    )

    done = processes.run_fresh(["-c", code], env=child_environment, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
def test_errors_of_what_draws_are_raised() -> None:
    contents: dict[str, ByteSource] = {"notes.json": BytesSource(b"{}")}

    with pytest.raises(CheckpointNotFoundError):
        draw_card(contents, "org/name")
