"""The weights in a file of torch.save, such as `pytorch_model.bin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfshard.errors import DamagedCheckpointError, remedy
from hfshard.storage.weights.pickles.reading import read_pickle


class PickleFile:
    """The tensors of one pickled file, read with `weights_only=True`; a zip file is mapped, not read.

    Attributes:
        path: Where it was found.
        tensors: FQN -> tensor.
        size: Bytes.
        identity: Which file it was.
    """

    def __init__(self, path: str, root: str) -> None:
        """Read a file.

        Raises:
            UnsafePickleError: It asks for anything but tensors and plain containers.
            DamagedCheckpointError: It is not a pickle of a state dict.
        """
        self.path = path
        self._contents = read_pickle(path, root)
        self.tensors: dict[str, torch.Tensor] = _state_dict_of(self._contents.value, path)
        self.size, self.identity = self._contents.size, self._contents.identity

    def check_every_byte(self, progress_callback: Callable[[int], object] = lambda count: None) -> bool:
        """Compare all bytes with their checksums; see `PickleContents.check_every_byte`."""
        return self._contents.check_every_byte(progress_callback)


def _state_dict_of(value: Any, path: str) -> dict[str, torch.Tensor]:
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict):
        raise DamagedCheckpointError(
            f"'{path}' holds a {type(value).__name__}, not a state dict. {remedy(path)}", path=path, expected="dict"
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise DamagedCheckpointError(
                f"'{path}' is not a state dict: its entry {str(name)[:200]!r} is a {kind}, not a tensor. "
                f"{remedy(path)}",
                path=path,
                fqn=str(name),
            )
    return dict(value)
