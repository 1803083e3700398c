"""The weights in a file of torch.save, such as `pytorch_model.bin`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from hfshard.disk.direct_io import read_blocks
from hfshard.errors import DamagedCheckpointError, remedy
from hfshard.storage.weights.open_files import HeldFile, open_with_room
from hfshard.storage.weights.pickles.choosing import choose_weights
from hfshard.storage.weights.pickles.reading import read_pickle
from hfshard.tensors.stored_tensor import RawTensor, TensorLike, is_plain, tensor_layout


class PickleFile:
    """The tensors of one pickled file, read with `weights_only=True`; a zip file is mapped, not read.

    Attributes:
        path: Where it was found.
        key: The key under which the file has the weights; None: it holds nothing else.
        tensors: FQN -> tensor.
        size: Bytes.
        identity: Which file it was.
        changed_ns: See `PickleContents`.
    """

    def __init__(self, path: str, root: str, key: str | None = None, opener: Callable[[], int] | None = None) -> None:
        """Read a file.

        Args:
            path: The file.
            root: The directory in which it, and what it links to, must lie.
            key: As for `choose_weights`.
            opener: As for `read_pickle`.

        Raises:
            AmbiguousWeightsError, InvalidArgumentError: `key` does not say which weights.
            UnsafePickleError: It asks for anything but tensors and plain containers.
            DamagedCheckpointError: It is not whole, or there are no weights in it.
        """
        self.path = path
        contents = read_pickle(path, root, opener)
        self.key: str | None
        self.tensors: dict[str, torch.Tensor]
        self.key, self.tensors = choose_weights(contents.value, path, key)
        self.size, self.identity = contents.size, contents.identity
        self.changed_ns = contents.changed_ns
        self._contents = replace(contents, value=None)  # the rest of it, such as an optimizer, need not stay
        self._held: HeldFile | None = None
        self._opening = threading.Lock()

    def stored_tensors(self, least_bytes: int = 0) -> dict[str, TensorLike]:
        """The tensors to be copied or compared: those that lie in the file in a row are read from it, block by block.

        Pages of a mapped file that were touched count as the process's memory until it is unmapped, all of them; and
        where it is truncated meanwhile, touching one ends the process. Tensors with other strides, of files before the
        zip format or of the other byte order are torch's own.

        Args:
            least_bytes: Smaller ones are torch's own, too: a call for each would take longer than its pages.
        """
        return {name: self._stored(name, tensor, least_bytes) for name, tensor in self.tensors.items()}

    def close(self) -> None:
        """Close the file, if tensors were read from it; those that are mapped stay valid."""
        with self._opening:
            if self._held is not None:
                self._held.close()

    def _stored(self, name: str, tensor: torch.Tensor, least_bytes: int) -> TensorLike:
        address = self._contents.address
        if address is None or not is_plain(tensor, name) or not tensor.is_contiguous() or tensor.numel() == 0:
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            return tensor
        layout = tensor_layout(tensor)
        if layout.nbytes < least_bytes:
            return tensor
        return RawTensor(layout, partial(self._blocks, tensor.data_ptr() - address, layout.nbytes))

    def _blocks(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        found_bytes = 0
        with self._file().opened() as fd:
            for block in read_blocks(fd, start, count_bytes, block_bytes):
                found_bytes += len(block)
                yield block
        if found_bytes != count_bytes:
            raise DamagedCheckpointError(
                f"'{self.path}' was truncated while it was being read. {remedy(self.path)}", path=self.path
            )

    def _file(self) -> HeldFile:
        with self._opening:
            if self._held is None:
                open_again = self._contents.open_again
                self._held = HeldFile(open_with_room(open_again), open_again)
            return self._held

    def check_every_byte(self, progress_callback: Callable[[int], object] = lambda count: None) -> bool:
        """Compare all bytes with their checksums; see `PickleContents.check_every_byte`."""
        return self._contents.check_every_byte(progress_callback)
