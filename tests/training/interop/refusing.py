"""Restores of old files that must change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState


def refused(manager: CheckpointManager, state: TrainingState, path: str, match: str, **options: Any) -> None:
    """Restore what does not fit, and compare the state with what it was before."""
    before = {name: repr(part.state_dict()) for name, part in state.components.items() if name != "loader"}
    with pytest.raises(StateDictMismatchError, match=match) as caught:
        manager.restore(state, path, **options)
    assert before == {name: repr(part.state_dict()) for name, part in state.components.items() if name != "loader"}
    assert caught.value.path == path
