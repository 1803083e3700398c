"""Copies the tensors of a state into reused host memory, so that training goes on while they are written."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Final

import torch

from hfshard._util.threads import in_threads
from hfshard.tensors.stored_tensor import TensorLike, is_plain_type
from hfshard.training.collecting import SavePayload

_THREADS: Final = 4
"""Copies at a time, at most: two saturate a desktop's memory; new pages, which the kernel clears, need more."""


class HostCopies:
    """Buffers as large as the state, made at the first save and filled at each one."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def copy_of(self, payload: SavePayload) -> SavePayload:
        """Return the payload with copies of all tensors; earlier copies are overwritten."""
        tensors: dict[Hashable, torch.Tensor] = {
            (base, name): tensor
            for base, request in payload.requests.items()
            for name, tensor in request.tensors.items()
            if isinstance(tensor, torch.Tensor)
        }
        copies = self.copies_of(tensors)
        requests = {}
        for base, request in payload.requests.items():
            copied: dict[str, TensorLike] = {
                name: copies.get((base, name), tensor) for name, tensor in request.tensors.items()
            }
            requests[base] = replace(request, tensors=copied)
        return replace(payload, requests=requests)

    def copies_of(self, tensors: Mapping[Hashable, torch.Tensor]) -> dict[Hashable, torch.Tensor]:
        """Copy tensors; earlier copies are overwritten.

        Buffers of tensors that are no longer part of the state are freed. Tensors of an accelerator are copied into
        page-locked memory, several at once.
        """
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # buffers that are made in inference mode are used outside of it, too
            self._fill(tensors)
        return dict(self._buffers)

    def _fill(self, tensors: Mapping[Hashable, torch.Tensor]) -> None:
        old = {key: buffer for key, buffer in self._buffers.items() if key in tensors}
        self._buffers = {}  # free unused ones first: the copies must not come on top of them
        self._buffers = {key: _buffer_for(tensor, old.pop(key, None)) for key, tensor in tensors.items()}
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        for device in devices:  # work that was started on any stream
            torch.accelerator.synchronize(device)
        pairs = [(self._buffers[key], tensor) for key, tensor in tensors.items()]
        in_threads(lambda pair, _: _copy(*pair), pairs, min(_THREADS, os.cpu_count() or 1))
        for device in devices:
            torch.accelerator.synchronize(device)


def _buffer_for(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
        return old
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type != "cpu")


def _copy(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    is_plain = is_plain_type(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
    is_plain = is_plain and not (tensor.is_conj() or tensor.is_neg())
    if is_plain:  # bytes as they are, past the caches: torch's own copy takes half as long again
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return
    with torch.no_grad():
        buffer.copy_(tensor, non_blocking=True)
