"""Names of a checkpoint's files: weights, shards, indexes, variants, and temporary names of a commit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from hfshard.constants import BIN_SUFFIX, INDEX_SUFFIX, SAFETENSORS_SUFFIX
from hfshard.errors import InvalidArgumentError, UnsafePathError

INDEX_FILE: Final = re.compile(r".+\.(?:safetensors|bin)\.index(?:\.[^/]+)?(?<!\d{8}-[0-9a-f]{16})\.json")
"""Pattern of the name of any checkpoint's index, but not of a save's own index in a store."""

_OF_SAVE: Final = r"-\d{8,15}-[0-9a-f]{16}"
"""The number and id of a save, in the names of its objects in a store, and of files that were synced from one."""

_BIN_INDEX: Final = re.compile(r"[^.]+\.bin\.index\.")

MODEL_BASE: Final = "model"
"""The beginning of the names of a model's files; config.json refers to these only."""

DIFFUSERS_BASE: Final = "diffusion_pytorch_model"
"""The same of a model of diffusers; its pickled weights begin with it, too."""

_NO_NAMES: Final = frozenset(("", ".", ".."))
"""Parts of a path that are not names."""

_LONGEST_VARIANT: Final = 150
"""Characters: with everything around it, a file's name has at most 255."""
_VARIANT = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{_LONGEST_VARIANT - 1}}}")


class WeightNames:
    """The names of the files of one checkpoint, for a base name ("model") and a variant ("fp16")."""

    def __init__(self, variant: str | None = None, base: str = MODEL_BASE) -> None:
        if variant is not None and not (isinstance(variant, str) and _VARIANT.fullmatch(variant)):
            raise InvalidArgumentError(
                f"The variant {variant!r:.200} cannot be part of a file name. Use letters, digits, '_', and, after the "
                f"first character, '-' and '.': {_LONGEST_VARIANT} at most."
            )
        infix = "" if variant is None else f".{variant}"
        self.variant, self.base = variant, base
        self.stem = f"{base}{infix}"
        self.single = f"{self.stem}{SAFETENSORS_SUFFIX}"
        self.index = f"{base}{SAFETENSORS_SUFFIX}.index{infix}.json"
        self.hub_index = f"{self.stem}{SAFETENSORS_SUFFIX}{INDEX_SUFFIX}"
        """The index's name by huggingface_hub, which places a variant elsewhere; only read, never written."""
        bin_base = base if base == DIFFUSERS_BASE else f"pytorch_{base}"
        self.bin_single = f"{bin_base}{infix}{BIN_SUFFIX}"
        self.bin_index = f"{bin_base}{BIN_SUFFIX}.index{infix}.json"
        self.placeholder = f"{self.stem}-hfshard-placeholder{SAFETENSORS_SUFFIX}"
        stem = re.escape(self.stem)
        self._shard = re.compile(rf"{stem}-\d{{5,}}-of-\d{{5,}}(?:-[0-9a-f]{{16}}|{_OF_SAVE})?\.safetensors")
        self._renamed_shard = re.compile(rf"{stem}-\d{{5,}}-of-\d{{5,}}-[0-9a-f]{{16}}\.safetensors")
        self._stored_index = re.compile(re.escape(self.index.removesuffix(".json")) + rf"{_OF_SAVE}\.json")
        self._stock_shard = re.compile(rf"{stem}-(\d{{5}})-of-(\d{{5}})\.safetensors")
        self._bin_shard = re.compile(rf"{bin_base}{re.escape(infix)}-\d{{5,}}-of-\d{{5,}}\.bin")
        self._transient = re.compile(rf"{stem}-hfshard-(?:placeholder|[0-9a-f]{{16}})\.safetensors(?:\.index\.json)?")

    def shard(self, number: int, count: int) -> str:
        """Return the name of shard `number` (from 1) of `count`."""
        return f"{self.stem}-{number:05d}-of-{count:05d}{SAFETENSORS_SUFFIX}"

    def shards(self, count: int) -> list[str]:
        """Return the names of all `count` shards, in order."""
        return [self.shard(number, count) for number in range(1, count + 1)]

    def unique_single(self, digest: str) -> str:
        """Return a temporary name for one file of weights during a commit; `digest` is hex, from its content."""
        return f"{self.stem}-hfshard-{digest[:16]}{SAFETENSORS_SUFFIX}"

    def unique_index(self, digest: str) -> str:
        """Return a temporary name for an index during a commit; `digest` is hex, from its content."""
        return f"{self.unique_single(digest)}{INDEX_SUFFIX}"

    def renamed_shard(self, name: str, digest: str) -> str:
        """Return a temporary name for an old shard while it is being replaced; `digest` is hex."""
        return f"{name.removesuffix(SAFETENSORS_SUFFIX)}-{digest[:16]}{SAFETENSORS_SUFFIX}"

    def is_shard(self, name: str) -> bool:
        """Return whether a file is named like a shard of this checkpoint, with or without a save's number and id."""
        return self._shard.fullmatch(name) is not None

    def is_renamed_shard(self, name: str) -> bool:
        """Return whether a file has a name that only hfshard gives: to an old shard while it is being replaced."""
        return self._renamed_shard.fullmatch(name) is not None

    def is_stored_index(self, name: str) -> bool:
        """Return whether a file is named like a save's own index in a store, from which it may have been synced."""
        return self._stored_index.fullmatch(name) is not None

    def has_standard_shard_name(self, name: str) -> bool:
        """Return whether a file has a shard name of transformers' own save, which removes it when it saves again."""
        match = self._stock_shard.fullmatch(name)
        return match is not None and 1 <= int(match.group(1)) <= int(match.group(2))

    def is_bin_shard(self, name: str) -> bool:
        """Return whether a file is named like a shard of the pickled weights."""
        return self._bin_shard.fullmatch(name) is not None

    def is_commit_temporary(self, name: str) -> bool:
        """Return whether a file has a temporary name, which exists only during a commit."""
        return self._transient.fullmatch(name) is not None

    def owns(self, name: str) -> bool:
        """Return whether a file has, by convention, the name of an index or of weights of this checkpoint."""
        if name in (self.single, self.index, self.hub_index, self.bin_single, self.bin_index):
            return True
        if self.is_shard(name) or self.is_bin_shard(name):
            return True
        return self.is_commit_temporary(name) or self.is_stored_index(name)


_ENTRY: Final = re.compile(
    r"(?:(?:pytorch_)?(?P<model>model)|diffusion_pytorch_model)(?:\.(?P<variant>[^/]+))?\.(?:safetensors|bin)"
    r"(?:\.index(?:\.(?P<variant_of_index>[^/]+))?\.json)?"
)
_NO_ENTRY: Final = re.compile(rf"-\d{{5,}}-of-\d{{5,}}\.|-hfshard-|{_OF_SAVE}\.")
"""Parts of the names of shards, of temporary files, and of a save's own files in a store."""


def names_of_entry(name: str) -> WeightNames | None:
    """Return the names of the checkpoint that a single file of weights, or an index, leads to; None for other files."""
    match = _ENTRY.fullmatch(name)
    if match is None or _NO_ENTRY.search(name):
        return None
    variant = match["variant"] or match["variant_of_index"]
    if variant is not None and _VARIANT.fullmatch(variant) is None:
        return None
    return WeightNames(variant, MODEL_BASE if match["model"] else DIFFUSERS_BASE)


def replaced_weights(found: Iterable[str], new: Iterable[str]) -> set[str]:
    """Find the files of the checkpoints in folders that new files replace, and that are not among these.

    Left next to them, an old single file would be loaded in place of a new index.

    Args:
        found, new: Paths of the files that are there, and of the new ones. Those without a folder do not matter.
    """
    brought = {path for path in new if "/" in path}
    checkpoints: dict[str, list[WeightNames]] = {}
    for path in brought:
        folder, _, name = path.rpartition("/")
        names = names_of_entry(name)
        if names is not None:
            checkpoints.setdefault(folder, []).append(names)
    splits = (path.rpartition("/") for path in found if path not in brought)
    return {
        f"{folder}/{name}"
        for folder, _, name in splits
        if any(names.owns(name) for names in checkpoints.get(folder, ()))
    }


def suffix_of_shards(index_name: str) -> str:
    """Return the suffix of an index's shards: ".bin" for `pytorch_model.bin.index.json`, else ".safetensors"."""
    return BIN_SUFFIX if _BIN_INDEX.match(index_name) else SAFETENSORS_SUFFIX


def check_file_name(name: object, *, index_path: str, suffix: str) -> str:
    """Accept only a name that stays inside the checkpoint's directory on every system, and has the right suffix.

    Raises:
        UnsafePathError: It is absolute, has a drive, `..`, NUL or an empty part, is a URL, or ends in another suffix.
    """
    if isinstance(name, str) and name.endswith(suffix) and len(name) <= 1024 and is_safe_file_name(name):
        return name
    kind = f"a {suffix} file" if suffix else "a file"
    raise UnsafePathError(
        f"Index '{index_path}' names the file {str(name)[:200]!r}: it must be {kind} inside the checkpoint's "
        "directory. Do not load this checkpoint; download it again from a source that you trust.",
        path=index_path,
        expected=f"*{suffix}",
        actual=name,
    )


def is_safe_file_name(name: str) -> bool:
    """Return whether a name stays inside the checkpoint's directory, on every system."""
    # On Windows a backslash ends a folder, and a colon a drive; a name that begins with "/" has an empty part.
    return "\\" not in name and ":" not in name and _NO_NAMES.isdisjoint(name.split("/")) and name.isprintable()
