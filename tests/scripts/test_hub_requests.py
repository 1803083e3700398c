"""The tables of requests and bytes are those that were counted."""

from __future__ import annotations

from tests import REPOSITORY
from tests.helpers import processes


def test_the_page_is_what_was_counted(child_environment: dict[str, str]) -> None:
    done = processes.run([REPOSITORY / "scripts/bench/hub_requests.py", "--render"], env=child_environment)
    assert done.returncode == 0, done.stderr
    assert "| `push_to_hub`, new repo | 22 | 3,805,314 | 5,566 | 8 | 21 | 3,829,673 | 5,986 | 8 |" in done.stdout
    assert done.stdout == (REPOSITORY / "scripts/bench/REQUESTS.md").read_text(encoding="utf-8")
