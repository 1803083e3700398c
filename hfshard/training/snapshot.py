"""Copies of a state's tensors in host memory that is used again: training goes on while they are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hfshard.storage.stored_tensor import Storable
from hfshard.training.collecting import Collected


class Snapshots:
    """Buffers as large as the state, filled at each save."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copy_of(self, collected: Collected) -> Collected:
        """The same with copies of all tensors, made now; what was copied before is overwritten.

        Buffers of tensors that the state does not have any more are freed. Tensors of an accelerator are copied to
        page-locked memory, side by side.
        """
        wanted = {
            (base, name): tensor
            for base, request in collected.requests.items()
            for name, tensor in request.tensors.items()
        }
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in wanted}
        devices = set()
        for key, tensor in wanted.items():
            if isinstance(tensor, torch.Tensor):
                self._buffers[key] = self._filled(self._buffers.get(key), tensor)
                devices |= {tensor.device} if tensor.device.type != "cpu" else set()
        for device in devices:
            torch.accelerator.synchronize(device)
        return replace(
            collected,
            requests={
                base: replace(
                    request, tensors={name: self._of(base, name, one) for name, one in request.tensors.items()}
                )
                for base, request in collected.requests.items()
            },
        )

    def _of(self, base: str, name: str, tensor: Storable) -> Any:
        return self._buffers.get((base, name), tensor)

    @staticmethod
    def _filled(buffer: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        is_remote = tensor.device.type != "cpu"
        with torch.no_grad():
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_remote)
            return buffer.copy_(tensor.detach(), non_blocking=is_remote)
