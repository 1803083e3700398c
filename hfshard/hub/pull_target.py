"""Protect the user's own files in the target of a pull: files that differ are rejected by name, not replaced."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping
from typing import Final

from hfshard._util.text import shorten_list
from hfshard.checkpoint.folder import CurrentFile, Folder
from hfshard.checkpoint.locate import locate_checkpoint
from hfshard.commit.directory_commit import LOCK_WAIT_SECONDS
from hfshard.commit.directory_state import read_directory_state
from hfshard.constants import CONFIG_NAME, GENERATION_CONFIG_NAME, README, SIGNATURE_NAME
from hfshard.disk.byte_source import ByteSource, contents_equal
from hfshard.disk.fsops import locked_directory
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError, SaveDirectoryError, UnsafePathError
from hfshard.format.file_names import WeightNames

logger = logging.getLogger(__name__)

_OF_A_CHECKPOINT: Final = frozenset({
    CONFIG_NAME, GENERATION_CONFIG_NAME, SIGNATURE_NAME,
    # tokenizers
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "spm.model",
    "sentencepiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "target_vocab.json", "vocab-src.json",
    "vocab-tgt.json", "bpe.codes", "entity_vocab.json", "normalizer.json", "prophetnet.tokenizer", "spm_char.model",
    "tiktoken.model", "tekken.json",
    # processors
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
})  # fmt: skip
"""Files next to the weights that a save of a model, a tokenizer or a processor by transformers replaces."""

_CHAT_TEMPLATES: Final = "additional_chat_templates/"
"""The folder of a tokenizer's additional templates."""

_SHOWN: Final = 20
"""Names of files in a message."""


class OwnFiles:
    """The user's own files in the target of a pull, compared on construction, before anything is written.

    If a checkpoint of the variant exists, a pull replaces what belongs to it, as a save does: its weights and indexes,
    config.json, generation_config.json, model.sig, and the files of a tokenizer or processor, by the names that
    transformers gives them. (If weights of another variant share these files, only its weights and indexes.) Every
    other file, weights and index included, is the user's own, even if an earlier pull has written it: only its contents
    could show that, and they differ. So it is rejected if the file that would replace it has other contents. Shards
    that no index names are rejected too, because the commit would remove them. A README.md stays as it is, and is not
    rejected.

    Args:
        folder: The target, a directory, which may be missing, or a place in a store.
        names: File names of the weights to pull.
        new: All files to pull that keep their names; name -> contents.

    Raises:
        SaveDirectoryError: Files differ; the message names them.
    """

    def __init__(self, folder: Folder, names: WeightNames, new: Mapping[str, ByteSource]) -> None:
        self._folder = folder
        self._place = folder.path
        replaces, replaced, unnamed = self._look(names)
        own = {
            name: source
            for name, source in new.items()
            if name not in replaced and not (replaces and _is_of_a_checkpoint(name))
        }
        taken = folder.look_up(own)
        differing = {name for name, there in taken.items() if not contents_equal(there.contents, own[name])}
        self.keeps_readme = README in differing
        """Whether an existing README.md has other contents, and stays."""
        self._names = [name for name in own if name not in differing | unnamed]
        self._before = folder.look_up(self._names)
        unnamed -= own.keys() - differing
        differing -= {README, *unnamed}
        if differing or unnamed:
            raise self._refusal(differing, unnamed)
        if self.keeps_readme:
            logger.warning(
                "Keeping '%s/%s', although the checkpoint's differs. Pass overwrite=True (hfshard pull --force) to "
                "replace it.",
                self._place,
                README,
            )

    def __call__(self) -> None:
        """Compare again, right before the commit.

        Raises:
            SaveDirectoryError: A file that would be replaced has changed since.
        """
        now = self._folder.look_up(self._names)
        changed = [name for name in self._names if _version(now, name) != _version(self._before, name)]
        if changed:
            raise SaveDirectoryError(
                f"{shorten_list(sorted(changed), _SHOWN, quote=True)} in '{self._place}' changed during the pull, "
                "which would replace it. Nothing was replaced. Pull again.",
                path=f"{self._place}/{min(changed)}",
            )

    def _look(self, names: WeightNames) -> tuple[bool, set[str], set[str]]:
        """Return whether the pull replaces a checkpoint, its weights, and shards to remove though no index names them.

        The weights include the indexes, and what a killed save has left of others.
        """
        if not self._folder.traits.is_directory:
            is_shared = names.variant is not None and _has_checkpoint(self._folder, WeightNames(None, names.base))
            return _has_checkpoint(self._folder, names) and not is_shared, set(), set()
        try:
            with locked_directory(self._place, wait_seconds=LOCK_WAIT_SECONDS):
                state = read_directory_state(self._place, names)
        except (FileNotFoundError, NotADirectoryError):  # there is none, or a failed save has removed it
            return False, set(), set()
        # Leftovers of a killed save are removed, as a save does. But without any index, shards may be all that is left
        # of another model.
        leftovers = {name for name in state.leftovers if not names.is_commit_temporary(name)}
        unnamed = state.strays - leftovers if state.has_weights else state.strays | leftovers
        replaced = state.owned.union(state.leftovers) - unnamed
        return state.has_weights and not state.shares_config, set(replaced), set(unnamed)

    def _refusal(self, differing: Collection[str], unnamed: Collection[str]) -> SaveDirectoryError:
        problems = []
        if differing:
            problems.append(f"{shorten_list(sorted(differing), _SHOWN, quote=True)} with other contents")
        if unnamed:
            problems.append(f"weights that no index names: {shorten_list(sorted(unnamed), _SHOWN, quote=True)}")
        return SaveDirectoryError(
            f"'{self._place}' has files of its own that this pull would replace or remove: {', and '.join(problems)}. "
            "Nothing was written. Pull into a new directory, move the files away, or pass overwrite=True "
            "(hfshard pull --force) to replace them.",
            path=f"{self._place}/{min({*differing, *unnamed})}",
        )


def _has_checkpoint(folder: Folder, names: WeightNames) -> bool:
    if not folder.names():
        return False  # without a listing of what is next to it, for a message
    try:
        locate_checkpoint(folder, names)
    except (CheckpointNotFoundError, DamagedCheckpointError, UnsafePathError):
        return False
    return True


def _is_of_a_checkpoint(name: str) -> bool:
    return name in _OF_A_CHECKPOINT or (name.startswith(_CHAT_TEMPLATES) and name.endswith(".jinja"))


def _version(found: Mapping[str, CurrentFile], name: str) -> Hashable:
    return found[name].version if name in found else None
