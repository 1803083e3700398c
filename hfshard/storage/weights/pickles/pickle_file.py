"""The weights in a file of torch.save, such as `pytorch_model.bin`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hfshard.storage.weights.pickles.choosing import choose_weights
from hfshard.storage.weights.pickles.reading import read_pickle


class PickleFile:
    """The tensors of one pickled file, read with `weights_only=True`; a zip file is mapped, not read.

    Attributes:
        path: Where it was found.
        key: The key under which the file has the weights; None: it holds nothing else.
        tensors: FQN -> tensor.
        size: Bytes.
        identity: Which file it was.
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
        self._contents = replace(contents, value=None)  # the rest of it, such as an optimizer, need not stay

    def check_every_byte(self, progress_callback: Callable[[int], object] = lambda count: None) -> bool:
        """Compare all bytes with their checksums; see `PickleContents.check_every_byte`."""
        return self._contents.check_every_byte(progress_callback)
