"""A directory of another program's checkpoint, read file by file: weights, pickles and JSON, and what is not there."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from hfshard.checkpoint.check_files import check_checksums, compare_pickles
from hfshard.checkpoint.companion_files import find_companion_files
from hfshard.checkpoint.load_options import read_tensors
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.constants import MAX_INDEX_BYTES
from hfshard.disk.safe_open import Identity, open_regular, read_small, refuse_links_to_outside
from hfshard.errors import CheckpointNotFoundError, StateDictMismatchError, remedy
from hfshard.format.strict_json import parse_json_object
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.shard import SafetensorsShard
from hfshard.training.foreign.checkpoint import ForeignRequest
from hfshard.training.foreign.pickles.plain_files import read_plain_file
from hfshard.training.run.manifest import MANIFEST
from hfshard.training.run.writing import TRAINING_STATE

_OURS: Final = frozenset({MANIFEST, TRAINING_STATE})
"""A directory that has one of these is a checkpoint of ours, maybe a damaged one."""

_OF_MANY_RANKS: Final = re.compile(
    r"global_step\d+|zero_to_fp32\.py|mp_rank_.*|iter_\d+|pytorch_model(?:_fsdp)?(?:_\d+)?|optimizer_\d+|"
    r"pytorch_model_fsdp(?:_\d+)?\.bin|rank\d+-of-\d+-optimizer\.pt|optimizer\.pt_.*"
)
"""What DeepSpeed, FSDP, Megatron-LM and XLA leave: parts of tensors, for the ranks that saved them."""


def names_in(place: object) -> frozenset[str]:
    """The entries of a directory in which another program may have saved; none where it is none, or has ours."""
    names = frozenset(os.listdir(place)) if isinstance(place, str) and os.path.isdir(place) else frozenset()
    return frozenset() if names & _OURS else names


_LINKS: Final = (
    "the directory that is converted, and what they lead to would be published with the checkpoint. Put what belongs "
    "to it in their place, or move the links away."
)


class ForeignDirectory:
    """The files of one directory, and which of them were read.

    Attributes:
        path: The directory.
        request: What is wanted of it.
        names: Of all its entries.
        files: Path of each file that was read -> which one it was.
        files_of_rank: Those that this rank alone reads.
        has_order: Whether tensors came in the order of a `state_dict()`.
        differences: What was left out, in sentences.
    """

    def __init__(self, path: str, request: ForeignRequest) -> None:
        """List the directory.

        Raises:
            StateDictMismatchError: Its tensors are spread over files of many ranks.
        """
        self.path = path
        self.request = request
        self.names = frozenset(os.listdir(path))
        self.files: dict[str, Identity] = {}
        self.files_of_rank: dict[str, Identity] = {}
        self.has_order = True
        self.differences: list[str] = []
        self._refuse_parts_of_ranks()

    def weights(self, base: str = "model") -> dict[str, Any] | None:
        """Read the weights whose files begin with a word; None where there are none.

        Raises:
            DamagedCheckpointError, UnsafePickleError: A file is damaged, or asks for more than tensors.
        """
        try:
            with open_checkpoint(self.path, base=base) as checkpoint:
                if self.request.verify == "full" and checkpoint.pickles:
                    compare_pickles(checkpoint.pickles)
                elif self.request.verify == "full" and checkpoint.index.is_verifiable:
                    weights_path = checkpoint.weights_path
                    check_checksums(checkpoint.folder, weights_path, checkpoint.index, checkpoint.shards, None)
                opened: list[SafetensorsShard | PickleFile] = [
                    *checkpoint.shards.values(),
                    *checkpoint.pickles.values(),
                ]
                self.has_order &= len(opened) == 1 and not checkpoint.shards
                self.files |= {one.path: one.identity for one in opened}
                return read_tensors(checkpoint, None, "cpu", "auto")
        except CheckpointNotFoundError:
            return None

    def pickle(self, name: str, *, is_of_rank: bool = False) -> Any:
        """Read a file of torch.save as plain values; None where it is missing.

        Args:
            name: The file's.
            is_of_rank: Whether other ranks read another one in its place.

        Raises:
            UnsafePickleError: It asks for what runs code; or, with strict, for anything but plain data.
            DamagedCheckpointError: It is not whole.
        """
        if name not in self.names:
            return None
        path = os.path.join(self.path, name)
        file = read_plain_file(path, self.path, strict=self.request.strict, verify=self.request.verify)
        (self.files_of_rank if is_of_rank else self.files)[path] = file.identity
        self.differences += file.left_out()
        return file.copied(file.value, name)

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object, in which Python's json may have written NaN; None where the file is missing.

        Raises:
            DamagedCheckpointError: It is not one.
        """
        if name not in self.names:
            return None
        path = os.path.join(self.path, name)
        raw, self.files[path] = read_small(path, self.path, MAX_INDEX_BYTES)
        return parse_json_object(raw, path=path, what="Training state", remedy=remedy(path), takes_constants=True)

    def companions(self, but: Collection[str]) -> dict[str, bytes]:
        """Read the small files beside the weights, such as config.json and the tokenizer's, for a conversion alone.

        Args:
            but: Names to leave out.

        Raises:
            DamagedCheckpointError: One can't be read.
        """
        if self.request.kinds:
            return {}
        read = {}
        companions = find_companion_files(self.path, but)
        refuse_links_to_outside(self.path, companions, _LINKS)
        for name, file in companions.items():
            with os.fdopen(open_regular(file.path, file.root), "rb") as opened:
                read[name] = opened.read()
        return read

    def components(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """The parts that are there, by the names that the request has for them.

        Raises:
            StateDictMismatchError: It names one that is not there.
        """
        found = {name: state for name, state in parts.items() if state is not None}
        for name, own in self.request.keys.items():
            if own not in found:
                raise StateDictMismatchError(
                    f"'{self.path}' has no '{own}', which keys names for '{name}', and nothing was restored. It has: "
                    f"{', '.join(found)}.",
                    path=self.path,
                )
        taken = set(self.request.keys.values())
        named = {name: found[own] for name, own in self.request.keys.items()}
        return {name: state for name, state in found.items() if name not in taken} | named

    def _refuse_parts_of_ranks(self) -> None:
        found = sorted(name for name in self.names if _OF_MANY_RANKS.fullmatch(name))
        if found:
            raise StateDictMismatchError(
                f"'{self.path}' has '{found[0]}', which DeepSpeed, FSDP or another way of spreading a model over ranks "
                "saves: parts of tensors for the ranks that saved them. Resume it once in the program that saved it, "
                "and save there: manager.save(step, state).",
                path=self.path,
            )
