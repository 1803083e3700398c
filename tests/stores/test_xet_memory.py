"""Memory of transfers over Xet: how many go at once, and the settings that bound hf_xet."""

from __future__ import annotations

import hf_xet
import pytest

from hfshard.stores import xet
from hfshard.stores.xet import _new_session, session_limits


def test_memory_says_how_many_go_at_once() -> None:
    at_once = [xet.uploads_at_once(size << 20) for size in (32, 256, 512, 1024)]
    assert at_once == [1, 1, 2, 5]
    assert [xet.downloads_at_once(size << 20) for size in (32, 256, 512, 1024)] == [1, 4, 8, 16]


def test_files_share_upload_commits_as_the_memory_allows() -> None:
    sizes = [300_000_000, 40_000_000, 67_108_864, 67_108_865, 10]

    assert xet.upload_commits(sizes, 333 << 20) == [[0], [3], [1, 2, 4]]
    assert xet.upload_commits(sizes, 334 << 20) == [[0, 1, 2, 3, 4]]
    assert xet.upload_commits([300_000_000], 32 << 20) == [[0]]
    assert xet.upload_commits([40_000_000] * 3, 32 << 20) == [[0, 1, 2]]
    assert xet.upload_commits([], 256 << 20) == []
    assert [xet.commit_streams(sizes, size << 20) for size in (333, 334, 504, 768, 1024)] == [0, 1, 2, 3, 5]
    assert xet.commit_streams([40_000_000] * 3, 256 << 20) == 1


@pytest.mark.compat
def test_hf_xet_knows_the_settings_that_bound_it() -> None:
    limits = session_limits(256 << 20)

    assert limits.keys() <= set(hf_xet.XetConfig().keys())
    assert limits["client.ac_max_upload_concurrency"] == 1
    assert limits["reconstruction.download_buffer_limit"] == 67_108_864


def test_users_settings_that_take_less_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_XET_FIXED_UPLOAD_CONCURRENCY", "16")
    monkeypatch.setenv("HF_XET_RECONSTRUCTION_MIN_PREFETCH_BUFFER", "1mb")

    shown = repr(_new_session(256 << 20))

    assert "client.ac_min_upload_concurrency=1," in shown
    assert "client.ac_max_upload_concurrency=1," in shown
    assert "reconstruction.min_prefetch_buffer=1000000," in shown
