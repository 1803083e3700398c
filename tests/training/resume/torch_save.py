"""Checkpoints as everybody writes them by hand, with torch.save: what the matrix must find fault with."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


class TorchSave:
    """All state dicts and the three generators in one pickle; it shows that the tests can fail."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.path = root / "checkpoint.pt"
        root.mkdir(exist_ok=True)

    def save(self, step: int, state: dict[str, Any], *, blocking: bool = True) -> None:
        """Write it aside, and rename it."""
        rngs = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        states = {name: one.state_dict() for name, one in state.items() if one is not None}
        aside = self.path.with_suffix(".tmp")
        torch.save({"step": step, "states": states, "rngs": rngs}, aside)
        os.replace(aside, self.path)

    def restore_latest(self, state: dict[str, Any]) -> int | None:
        """Load what each object can load."""
        saved = torch.load(self.path, weights_only=False)
        for name, one in state.items():
            if one is not None:
                one.load_state_dict(saved["states"][name])
        random.setstate(saved["rngs"][0])
        np.random.set_state(saved["rngs"][1])
        torch.set_rng_state(saved["rngs"][2])
        step: int = saved["step"]
        return step

    def restore(self, state: dict[str, Any], step: int) -> int:
        """There is only the newest."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is under way."""
