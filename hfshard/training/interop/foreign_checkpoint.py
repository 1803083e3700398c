"""Another program's checkpoint: its directory, read file by file, and what a reader returns of it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hfshard.checkpoint.check_files import check_checksums, check_pickle_checksums
from hfshard.checkpoint.companion_files import list_companion_files
from hfshard.checkpoint.load_options import read_tensors
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.constants import MAX_INDEX_BYTES
from hfshard.disk.safe_open import Identity, identity_of, read_small, reject_links_to_outside
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, StateDictMismatchError
from hfshard.foreign.find_foreign import open_foreign_run
from hfshard.format.strict_json import parse_json_object
from hfshard.pickles.pickle_file import PickleFile
from hfshard.pickles.plain_values import read_plain_file
from hfshard.shards.shard import SafetensorsShard
from hfshard.training.interop.named_run import NamedRun
from hfshard.training.run.find_checkpoint import Level
from hfshard.training.run.manifest import MANIFEST, TRAINING_STATE
from hfshard.training.state.training_state import PartKind

_TAIL_BYTES: Final = 1 << 16
"""The end of a file that distinguishes it from another: there a zip lists the checksums of its records."""


LACKS_RNG: Final = "the random number generators (dropout and shuffling go on from those of this process)"
KEYS_OF_RUNS: Final = frozenset(("model", "optimizer"))
"""Parts that the reader of a run in parts has found already, by their keys in its directory."""
NO_STEP: Final = "the number of steps (0 is taken)"


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A request for the contents of a foreign checkpoint."""

    kinds: Mapping[str, PartKind] = field(default_factory=dict)
    """The parts of the state that is restored: name -> kind. Empty if there is no state: a conversion."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Name of a part -> where its state is in the file, with dots for nested ones: "ema.state_dict"."""
    strict: bool = True
    """Reject a file if something in it cannot be read without running code; else that is left out and reported."""
    verify: Level = "full"
    """"full": compare every byte with the checksums that the files have."""
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """Another program's checkpoint, read and not yet compared with a training state.

    Values that were not read, such as a scheduler's bound method, are `nested.NOT_STORED`.
    """

    path: str
    """The file or directory."""
    files: Mapping[str, Identity]
    """Path of each file that was read -> its identity."""
    step: int | None
    """None if the checkpoint has none."""
    components: Mapping[str, Any]
    """Name of a part -> what its own `state_dict()` returned; an optimizer's parameters are still by position. Names
    are those of the request where they were found, and those of the file otherwise. Tensors of modules may be mapped
    files, all others are in memory."""
    files_of_rank: Mapping[str, Identity] = field(default_factory=dict)
    """Like `files`, for those that only this rank has read."""
    named: NamedRun | None = None
    """Where the tensors of the model and the optimizer are, if these are by name, and on the meta device; else None."""
    has_order: bool = True
    """True if the tensors of modules are in the order of their `state_dict()`: safetensors sorts them."""
    epochs: float | None = None
    """The number of epochs trained, with a fraction for a part of one; None if the checkpoint does not state it."""
    extra: Any = None
    """Everything else in it: epoch, loss, arguments."""
    rng: dict[str, Any] | None = None
    """This rank's random number generators, in the form of `state.rng.rng_state`; None if it has none."""
    companions: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that belong to the model, such as config.json; a conversion copies them."""
    lacking: tuple[str, ...] = ()
    """Missing items, in words that follow on "lacks": "the position in the data"."""
    differences: tuple[str, ...] = ()
    """Sentences about what was left out: it cannot be read without running code. Always empty with strict."""

    def confirm(self) -> None:
        """Check that no file was replaced or changed since it was read.

        Raises:
            CheckpointChangedError: A file was replaced or changed.
        """
        for path, identity in {**self.files, **self.files_of_rank}.items():
            try:
                now = identity_of(os.stat(path))
            except OSError:
                now = None
            if now != identity:
                raise CheckpointChangedError(
                    f"'{path}' was replaced while it was being read. Nothing was restored. Retry.", path=path
                )

    def fingerprint(self) -> str:
        """Digest the names, sizes and ends of its files: the same on every rank that sees the same files."""
        digest = hashlib.sha256()
        for path in sorted(self.files):
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                digest.update(f"{os.path.basename(path)} {size} ".encode() + file.read(_TAIL_BYTES))
        return digest.hexdigest()


# A directory of another program's checkpoint, read file by file: weights, pickles and JSON; a missing file gives None.


_OURS: Final = frozenset({MANIFEST, TRAINING_STATE})
"""A directory that has one of these is an hfshard checkpoint, possibly a damaged one."""

_OF_MANY_RANKS: Final = re.compile(
    r"global_step\d+|zero_to_fp32\.py|mp_rank_.*|iter_\d+|pytorch_model(?:_fsdp)?(?:_\d+)?|optimizer_\d+|"
    r"pytorch_model_fsdp(?:_\d+)?\.bin|rank\d+-of-\d+-optimizer\.pt|optimizer\.pt_.*"
)
"""Files that DeepSpeed, FSDP, Megatron-LM and XLA leave: parts of tensors, for the ranks that saved them."""


def list_foreign_directory(place: object) -> frozenset[str]:
    """Return the entries of a directory that another program may have saved; none for hfshard's or no directory."""
    names = frozenset(os.listdir(place)) if isinstance(place, str) and os.path.isdir(place) else frozenset()
    return frozenset() if names & _OURS else names


_LINKS: Final = (
    "the directory to convert, and the targets would be published with the checkpoint. Put the files that belong to it "
    "in place of the links, or move the links elsewhere."
)


class ForeignDirectory:
    """The files of one directory, and the ones that were read.

    Attributes:
        path: The directory.
        request: What to read from it.
        names: The names of all its entries.
        files: Path of each file that was read -> its identity.
        files_of_rank: Those that this rank alone reads.
        named: The model and optimizer that ranks have saved in parts; None: there are none.
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
        self.differences: list[str] = []
        run = open_foreign_run(path, {name: key for name, key in request.keys.items() if name in KEYS_OF_RUNS})
        self.named = None if run is None else NamedRun(run)
        self.has_order = run is None
        if self.named is None:
            found = sorted(name for name in self.names if _OF_MANY_RANKS.fullmatch(name))
            if found:
                raise _parts_of_ranks(self.path, found[0])
            return
        self.files |= self.named.run.files
        if request.verify == "full" and request.rank == 0:
            self.named.check_values()

    def weights(self, base: str = "model") -> dict[str, Any] | None:
        """Read the weights whose file names begin with `base`; None if there are none.

        Raises:
            DamagedCheckpointError, UnsafePickleError: A file is damaged, or asks for more than tensors.
            StateDictMismatchError: They were saved by FSDP or DeepSpeed, in parts.
        """
        if self.named is not None:
            return None  # 16 bit, if there are any; those of the run are the masters
        try:
            with open_checkpoint(self.path, base=base) as checkpoint:
                if checkpoint.foreign is not None:
                    raise _parts_of_ranks(self.path, checkpoint.weights.name)
                if self.request.verify == "full" and checkpoint.pickles:
                    check_pickle_checksums(checkpoint.pickles)
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
        """Read a file of torch.save as plain values; None if it is missing.

        Args:
            name: The file's name.
            is_of_rank: Whether other ranks read another file in its place.

        Raises:
            UnsafePickleError: It asks for something that runs code; or, with strict, for anything but plain data.
            DamagedCheckpointError: It is incomplete.
        """
        if name not in self.names:
            return None
        path = os.path.join(self.path, name)
        file = read_plain_file(path, self.path, strict=self.request.strict, verify=self.request.verify)
        (self.files_of_rank if is_of_rank else self.files)[path] = file.identity
        self.differences += file.left_out()
        return file.copied(file.value, name)

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object, in which Python's json may have written NaN; None if the file is missing.

        Raises:
            DamagedCheckpointError: The file is not a JSON object.
        """
        if name not in self.names:
            return None
        path = os.path.join(self.path, name)
        raw, self.files[path] = read_small(path, self.path, MAX_INDEX_BYTES)
        return parse_json_object(raw, path=path, what="Training state", takes_constants=True)

    def companions(self, but: Collection[str]) -> dict[str, bytes]:
        """Read the small files next to the weights, such as config.json and the tokenizer's; only for a conversion.

        Args:
            but: Names to leave out.

        Raises:
            DamagedCheckpointError: A file cannot be read.
        """
        if self.request.kinds:
            return {}
        read = {}
        companions = list_companion_files(self.path, but)
        reject_links_to_outside(self.path, companions, _LINKS)
        for name, file in companions.items():
            with file.open() as opened:
                read[name] = opened.read()
        return read

    def components(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the existing parts, by the names that the request has for them; those of a run by name are added.

        Raises:
            StateDictMismatchError: The request names a missing part.
        """
        found = {name: state for name, state in parts.items() if state is not None}
        keys = self.request.keys
        if self.named is not None:
            found = {**self.named.parts(self.request.kinds), **found}
            keys = {name: own for name, own in keys.items() if name not in KEYS_OF_RUNS}
        for name, own in keys.items():
            if own not in found:
                raise StateDictMismatchError(
                    f"'{self.path}' has no '{own}', which keys names for '{name}'. It has: {', '.join(found)}. Nothing "
                    "was restored.",
                    path=self.path,
                )
        taken = set(keys.values())
        named = {name: found[own] for name, own in keys.items()}
        return {name: state for name, state in found.items() if name not in taken} | named

    @property
    def step(self) -> int | None:
        """The step of a run in parts; None if there is none, or it states none."""
        return None if self.named is None else self.named.run.step

    def extra(self) -> dict[str, Any]:
        """Return what the user has saved with a run in parts."""
        return {} if self.named is None else self.named.extra()

    def checkpoint(self, components: Mapping[str, Any], **more: Any) -> ForeignCheckpoint:
        """Return what was read; `more` is what its files alone do not show."""
        return ForeignCheckpoint(
            path=self.path,
            files=self.files,
            files_of_rank=self.files_of_rank,
            named=self.named,
            has_order=self.has_order,
            components=components,
            differences=tuple(self.differences),
            **more,
        )


def _parts_of_ranks(path: str, name: str) -> StateDictMismatchError:
    return StateDictMismatchError(
        f"'{path}' has '{name}', which contains parts of tensors for the ranks that saved it (DeepSpeed, FSDP or "
        "similar). Resume it once in the program that saved it, and save there: manager.save(step, state).",
        path=path,
    )
