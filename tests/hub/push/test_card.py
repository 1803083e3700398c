"""Pushes with a card: picture, README.md and weights in one Hub commit; refused before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfshard.viewing.screenshot import CHROMIUM, find_chromium
from tests.hub.models import contents
from tests.hub.push.conftest import PushHub, differences

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")

HEAD = b"<!-- hfshard:card -->\n![Modules by bytes](hfshard-card.png)\n\n| checkpoint | |\n"


@needs_chromium
def test_card_and_weights_are_one_commit_and_what_people_wrote_stays(hub: PushHub, repo: str, folder: Path) -> None:
    hub.server.create_repo(repo).commit({"README.md": b"---\ntags: [x]\n---\n# Mine\n\nMy words.\n"}, "readme")
    before = len(hub.view(repo).commits())

    hub.push(folder, repo, card_picture=True)

    assert len(hub.view(repo).commits()) == before + 1
    assert hub.view(repo).read("hfshard-card.png").startswith(b"\x89PNG")
    readme = hub.view(repo).read("README.md")
    assert readme.startswith(b"---\ntags: [x]\n---\n# Mine\n\n" + HEAD)
    assert readme.endswith(b"<!-- /hfshard:card -->\n\n\nMy words.\n")
    assert differences(hub, repo, contents(folder)).keys() == {"hfshard-card.png", "README.md"}
    hub.push(folder, repo, card_picture=True)
    assert len(hub.view(repo).commits()) == before + 1  # the same card: nothing to commit


@needs_chromium
def test_a_model_is_pushed_with_its_card_and_the_template_stays(hub: PushHub, repo: str) -> None:
    hub.done("push_model", 3, repo, card_picture=True)

    readme = hub.view(repo).read("README.md")
    assert hub.view(repo).read("hfshard-card.png").startswith(b"\x89PNG")
    assert b"library_name: transformers" in readme
    assert readme.count(HEAD) == 1


def test_markers_that_are_not_a_pair_are_refused_before_anything_is_sent(hub: PushHub, repo: str, folder: Path) -> None:
    if find_chromium() is None:
        pytest.skip("no chromium: apt-get install chromium")
    hub.server.create_repo(repo).commit({"README.md": b"# Mine\n<!-- hfshard:card -->\n"}, "readme")
    before = len(hub.view(repo).commits())

    outcome = hub.refused("push", folder, repo, card_picture=True)

    assert outcome.error == "InvalidArgumentError"
    assert "leave one line '<!-- hfshard:card -->' above one line" in outcome.message
    assert hub.server.bytes_up("lfs_put") == 0
    assert len(hub.view(repo).commits()) == before


def test_without_chromium_nothing_is_sent(hub: PushHub, repo: str, folder: Path, tmp_path: Path) -> None:
    code = (
        f"import os; os.environ[{CHROMIUM!r}] = {str(tmp_path / 'none')!r}\n"
        "import hfshard\n"
        f"try: hfshard.push_checkpoint({os.fspath(folder)!r}, {repo!r}, card_picture=True)\n"
        "except hfshard.errors.BrowserError as error: print(error)\n"
    )
    hub.server.clear_log()

    said = hub.interpret(code)

    assert "which is not a program. Run: apt-get install chromium" in said
    assert hub.kinds() == {}
