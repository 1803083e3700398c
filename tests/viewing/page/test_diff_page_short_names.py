"""Two places have short names that differ where the places do."""

from __future__ import annotations

import pytest

from hfshard.viewing.page.diff_page import short_names


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ("/data/base", "/data/tuned", ("base", "tuned")),
        ("/data/minilm/base", "/data/finetuned/base", ("minilm/base", "finetuned/base")),
        ("/run/checkpoint-10", "/run/checkpoint-20", ("checkpoint-10", "checkpoint-20")),
        ("org/name@v1", "org/name", ("name@v1", "name")),
        ("/models/org/name", "org/name", ("models/org/name", "org/name")),
        ("s3://one/run/out", "s3://two/run/out", ("one/run/out", "two/run/out")),
        ("/data/out", "/data/out", ("out", "out")),
        ("/", "/out", ("/", "out")),
        (f"/1/{'x' * 80}/out", f"/2/{'x' * 80}/out", ("1/…/out", "2/…/out")),
        ("/" + "x" * 99, "/y", ("x" * 30 + "…" + "x" * 29, "y")),
    ],
)
def test_short_names_of(a: str, b: str, names: tuple[str, str]) -> None:
    assert short_names(a, b) == names
