"""The readers that are fuzzed, and what they must give: the bytes that stand in the files, as others read them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import hfshard
from hfshard.errors import HfshardError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import CheckpointManager
from tests.attacks.files import raw
from tests.attacks.fuzz.bases import OLD_RUN, TRAINING_STEP, Base, training_state
from tests.attacks.target import same
from tests.helpers.tensor_bytes import bytes_of

Tensors = dict[str, torch.Tensor]


def read(reader: str, directory: Path, base: Base) -> str | None:
    """Read a directory one way; what is wrong with what came of it, or None.

    Raises:
        Whatever the reader raises.
    """
    return READERS[reader](directory, base)


def _load(directory: Path, base: Base, **options: Any) -> str | None:
    variant = "fp16" if base.name == "golden-variant" else None
    found = hfshard.load_state_dict(directory, variant=variant, **options)
    return _compare(found, directory, base, is_full=options.get("verify") == "full")


def _some(directory: Path, base: Base) -> str | None:
    return _load(directory, base, keys=lambda name: len(name) % 2 == 0)


def _verify(directory: Path, base: Base) -> str | None:
    variant = "fp16" if base.name == "golden-variant" else None
    report = hfshard.verify_checkpoint(directory, variant=variant, progress=False)
    if not report.ok or report.warnings or not base.truth:
        return None
    return _load(directory, base)


def _restore(directory: Path, base: Base) -> str | None:
    state = training_state()
    step = CheckpointManager(directory, progress=False).restore_latest(state)
    if base.sealed:
        return None
    wanted = training_state(1.0).components["model"].state_dict()
    if step != TRAINING_STEP or not same(state.components["model"].state_dict(), wanted):
        return f"restored step {step}, and other weights"
    return None


def _restore_old(directory: Path, base: Base) -> str | None:
    """The file's checksums are put right too, so any numbers may come of it; but no error that is not ours."""
    manager = CheckpointManager(directory / "run", progress=False)
    manager.restore(training_state(), directory / OLD_RUN, strict=False)
    return None


def _parts(directory: Path, base: Base, **options: Any) -> str | None:
    """As for an old run: shapes and checksums may be put right, and others read them only by running them."""
    hfshard.load_state_dict(directory, **options)
    return None


def _parts_verify(directory: Path, base: Base) -> str | None:
    report = hfshard.verify_checkpoint(directory, progress=False)
    if report.ok:
        hfshard.load_state_dict(directory, verify="full")
    return None


def _parts_convert(directory: Path, base: Base) -> str | None:
    """All or nothing is written."""
    target = directory.parent / "converted"
    shutil.rmtree(target, ignore_errors=True)
    try:
        hfshard.reshard_checkpoint(directory, target, progress=False)
    except HfshardError:
        if target.exists() and any(target.iterdir()):
            return f"an error left {sorted(path.name for path in target.iterdir())}"
        raise
    found = hfshard.load_state_dict(target, verify="full")
    return None if same(found, hfshard.load_state_dict(directory)) else "other weights were written than are loaded"


def _run_verify(directory: Path, base: Base) -> str | None:
    manager = CheckpointManager(directory, progress=False)
    manager.all_steps()
    found = manager.verify()
    return None if found or base.sealed else "the checkpoint is not listed"


def _run_load(directory: Path, base: Base) -> str | None:
    (checkpoint,) = directory.glob("checkpoint-*")
    hfshard.load_state_dict(checkpoint, verify="full")
    return None


def _hub_load(directory: Path, base: Base) -> str | None:
    found = hfshard.load_state_dict(directory, verify="full")
    return None if base.sealed or same(found, base.truth) else "other weights"


def _hub_pull(directory: Path, base: Base) -> str | None:
    target = directory.parent / "pulled"
    shutil.rmtree(target, ignore_errors=True)
    hfshard.pull_checkpoint(str(directory), target, progress=False)
    return None if base.sealed or same(hfshard.load_state_dict(target), base.truth) else "other weights"


def _hub_revisions(directory: Path, base: Base) -> str | None:
    DirectoryHub.open(directory).revisions()
    return None


READERS: Mapping[str, Callable[[Path, Base], str | None]] = {
    "structure": lambda directory, base: _load(directory, base),
    "full": lambda directory, base: _load(directory, base, verify="full"),
    "pread": lambda directory, base: _load(directory, base, read="pread", verify="none"),
    "some": _some,
    "verify": _verify,
    "restore": _restore,
    "restore-old": _restore_old,
    "parts": _parts,
    "parts-full": lambda directory, base: _parts(directory, base, verify="full"),
    "parts-verify": _parts_verify,
    "parts-convert": _parts_convert,
    "run-verify": _run_verify,
    "run-load": _run_load,
    "hub-load": _hub_load,
    "hub-pull": _hub_pull,
    "hub-revisions": _hub_revisions,
}


def _compare(found: Tensors, directory: Path, base: Base, *, is_full: bool) -> str | None:
    if is_full and base.truth:
        return None if same(found, base.truth) else "verify='full' let other weights pass"
    if base.original and same(found, {name: one for name, one in base.original.items() if name in found}):
        return None  # others may still make something else of it, as of a record that the directory calls a folder
    try:
        stored, tied = _as_others_read(directory, base, found)
    except Exception as error:
        return f"others can't read it: {type(error).__name__}: {error!s:.200}"
    for name, tensor in found.items():
        other = stored.get(name, stored.get(tied.get(name, "")))
        if other is None:
            return f"'{name}' is in no file"
        if bytes_of(tensor) != bytes_of(other):
            return f"'{name}' has other bytes than stand in the file"
    return None


def _as_others_read(directory: Path, base: Base, wanted: Tensors) -> tuple[Tensors, Mapping[str, str]]:
    """The tensors of a checkpoint by the libraries of others, and which names are tied to which.

    Of several files, those that hold what is wanted: a load of some names opens no others.
    """
    paths = {path.name: path for path in directory.iterdir() if path.is_file()}
    if raw.SINGLE in paths:
        content = paths[raw.SINGLE].read_bytes()
        length = int.from_bytes(content[:8], "little")
        own = json.loads(json.loads(content[8 : 8 + length]).get("__metadata__", {}).get("hfshard", "{}"))
        return safetensors.torch.load(content), _tied_names(own)
    if raw.BIN in paths:
        return _unpickled(paths[raw.BIN].read_bytes()), {}
    index = next(path for name, path in paths.items() if ".index." in name)
    value = json.loads(index.read_bytes())
    own = (value.get("metadata") or {}).get("hfshard") or {}
    tied = _tied_names(own) or _tied_by_others(value)
    stored: Tensors = {}
    for file in {value["weight_map"][tied.get(name, name)] for name in wanted}:
        content = (directory / file).read_bytes()
        stored |= _unpickled(content) if file.endswith(".bin") else safetensors.torch.load(content)
    return stored, tied


def _tied_names(own: Any) -> Mapping[str, str]:
    found = own.get("tied_names") or own.get("aliases") if isinstance(own, dict) else None
    return found if isinstance(found, dict) else {}


def _tied_by_others(index: Any) -> Mapping[str, str]:
    """The names that huggingface_hub notes as tied: entries of the metadata whose value is the name of a tensor."""
    noted = (index.get("metadata") or {}).items()
    return {name: stored for name, stored in noted if isinstance(stored, str) and stored in index["weight_map"]}


def _unpickled(content: bytes) -> Tensors:
    value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return dict(value.get("state_dict", value)) if isinstance(value.get("state_dict"), dict) else dict(value)
