"""verify="full" compares every byte while transformers builds the model; a model comes out only if all are right."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import IntegrityError, StateDictMismatchError
from tests.helpers.tiny_bert import Bert, bert, value_of

pytestmark = pytest.mark.compat

BUILT: list[str] = []
DAMAGED = "encoder.layer.0.attention.self.query.weight"


class Recorded(Bert):
    """Says when it is built, and may fail then."""

    error: BaseException | None = None

    def __init__(self, config: Any) -> None:
        BUILT.append("built")
        super().__init__(config)
        if self.error is not None:
            raise self.error


class Interrupted(Recorded):
    """Ctrl-C comes while it is built."""

    error = KeyboardInterrupt()


class Failing(Recorded):
    """As code of a user's that fails."""

    error = ZeroDivisionError("of the user's")


@pytest.fixture(autouse=True)
def _nothing_built() -> None:
    BUILT.clear()


@pytest.fixture(params=["1GB", "50KB"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    bert(3, hidden=64).save_pretrained(tmp_path, max_shard_size=request.param)
    return tmp_path


@pytest.fixture
def damaged(saved: Path) -> Path:
    """The end of a matrix of 16 KB is other bytes than were saved, which no fingerprint sees."""
    for path in saved.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        if DAMAGED in header:
            end = 8 + length + header[DAMAGED]["data_offsets"][1]
            path.write_bytes(raw[: end - 4] + b"lost" + raw[end:])
    return saved


def threads() -> set[str]:
    """Those of hfshard that do not end by themselves; one that has done its work may not have ended yet."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("hfshard")]
    for thread in ours:
        thread.join(60)
    return {thread.name for thread in ours if thread.is_alive()}


def test_a_whole_checkpoint_is_built(saved: Path) -> None:
    assert value_of(Recorded.from_pretrained(saved, verify="full")) == 3
    assert not threads()


def test_a_damaged_one_is_noticed_though_the_model_is_built_meanwhile(damaged: Path) -> None:
    with pytest.raises(IntegrityError, match=f"Damaged: tensor '{DAMAGED}'"):
        Recorded.from_pretrained(damaged, verify="full")
    assert BUILT == ["built"]
    assert not threads()


def test_damage_is_named_before_what_it_may_have_brought_about(damaged: Path) -> None:
    with pytest.raises(IntegrityError, match=f"Damaged: tensor '{DAMAGED}'") as raised:
        Failing.from_pretrained(damaged, verify="full")
    assert isinstance(raised.value.__context__, ZeroDivisionError)
    assert not threads()


def test_an_error_of_the_building_is_raised_if_all_is_whole(saved: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        Failing.from_pretrained(saved, verify="full")
    with pytest.raises(StateDictMismatchError):
        Bert.from_pretrained(saved, verify="full", config=bert(0, hidden=16).config)
    assert not threads()


def test_ctrl_c_ends_the_check(damaged: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Interrupted.from_pretrained(damaged, verify="full")
    assert not threads()


def test_what_is_not_mapped_is_checked_before_it_is_read(damaged: Path) -> None:
    # Else the disk would be read twice at the same time.
    with pytest.raises(IntegrityError, match=f"Damaged: tensor '{DAMAGED}'"):
        Recorded.from_pretrained(damaged, verify="full", read="pread")
    assert BUILT == []


def test_where_no_thread_starts_it_is_checked_before(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(IntegrityError, match=f"Damaged: tensor '{DAMAGED}'"):
        Recorded.from_pretrained(damaged, verify="full")
    assert BUILT == []
