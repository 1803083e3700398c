"""Checkpoints in stores: the folder, read by ranges, and its small files for code that needs a directory."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from dataclasses import replace
from typing import Final

from hfshard._util.arguments import parse_address
from hfshard.checkpoint.check_files import retry_if_replaced
from hfshard.checkpoint.locate import CheckpointQuery, is_weights_name
from hfshard.checkpoint.ranged_folder import RangedFolder, StoreFolder
from hfshard.constants import ADAPTER_CONFIG_NAME, CONFIG_NAME, GENERATION_CONFIG_NAME, MAX_CONFIG_BYTES
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import WeightNames, check_file_name, is_safe_file_name
from hfshard.format.strict_json import json_object_or_none
from hfshard.stores.byte_budget import store_memory_bytes
from hfshard.stores.open_store import open_store

_SMALL_NAMES: Final = (CONFIG_NAME, GENERATION_CONFIG_NAME, ADAPTER_CONFIG_NAME)
"""Files that a model is built from, along with its weights."""

_CODE_SUFFIX: Final = ".py"

_PLAIN: Final = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that are replaced in the name of a directory."""
_LONGEST_NAME: Final = 255
"""Maximum bytes of a directory's name on Linux and macOS; a name in a store has up to 1,024."""
_DIGEST_DIGITS: Final = 16


class SmallFilesMirror:
    """The small files of a remote checkpoint, in a temporary directory; never the weights.

    The directory is removed when this is garbage-collected, and when Python exits.
    """

    def __init__(self, folder: RangedFolder, subfolder: str, *, has_code: bool) -> None:
        """Create an empty directory.

        Args:
            folder: The folder of the files.
            subfolder: The end of the folder's address that was given as `subfolder`, and is passed to transformers.
            has_code: Whether the checkpoint's own code may be run, so that it is needed too.
        """
        self.folder = folder
        """The files, by ranges."""
        self._has_code = has_code
        self._written: dict[str, bytes] = {}
        parent = tempfile.mkdtemp(prefix="hfshard-")
        weakref.finalize(self, _remove, parent, os.getpid())
        below = [part for part in subfolder.split("/") if part]
        place = "/".join(folder.path.split("/")[: -len(below)]) if below else folder.path
        # transformers keeps a checkpoint's code under its directory's name, so that must be the same each time.
        self.path = os.path.join(parent, _directory_name(place.rpartition("/")[2]))
        """The path that transformers is given, together with the subfolder."""
        self._long_part = next((part for part in below if len(os.fsencode(part)) > _LONGEST_NAME), None)
        if self._long_part is not None:
            below = [_directory_name(subfolder)]  # stays empty: see `fill`
        self.directory = os.path.join(self.path, *below)
        os.makedirs(self.directory)
        self.is_filled = False
        """True once the files were requested; they are kept up to date from then on."""

    def fill(self) -> None:
        """List the files, and download them into the directory; retry if they change.

        Raises:
            InvalidArgumentError: No directory can have the name of the subfolder, which transformers is given.
            DamagedCheckpointError, CheckpointChangedError: See `refresh`; it changed on every try.
        """
        if self._long_part is not None:
            raise InvalidArgumentError(
                f"subfolder has a part of {len(os.fsencode(self._long_part))} bytes, but a directory's name on this "
                f"machine has at most {_LONGEST_NAME}. Make it part of the address: '{self.folder.path}'.",
                path=self.folder.path,
            )
        self.is_filled = True

        def list_and_write() -> None:
            self.folder.refresh_early()
            self.refresh()

        retry_if_replaced(list_and_write, self.folder.traits, self.folder.path)

    def look(self) -> None:
        """List the files, unless they were listed to fill the directory."""
        if not self.is_filled:
            self.folder.refresh_early()

    def read_all(self) -> dict[str, bytes]:
        """Read the files as the folder last listed them: name -> contents."""
        return {name: self.folder.read_small(name, MAX_CONFIG_BYTES) for name in self._names()}

    def refresh(self) -> None:
        """Update the directory, if it was filled, to the folder's last listing.

        Raises:
            DamagedCheckpointError: A file is too large, or not text.
            CheckpointChangedError: It was replaced since.
        """
        if not self.is_filled:
            return
        for name in [name for name in self._written if not self.folder.has(name)]:
            os.unlink(os.path.join(self.directory, name))
            del self._written[name]
        for name, raw in self.read_all().items():
            if self._written.get(name) != raw:
                path = os.path.join(self.directory, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as out:
                    out.write(raw)
                self._written[name] = raw

    def _names(self) -> list[str]:
        code = self.folder.list_code_files(self._code_folders()) if self._has_code else []
        for name in code:
            check_file_name(name, index_path=self.folder.path, suffix=_CODE_SUFFIX)
        return [name for name in _SMALL_NAMES if self.folder.has(name)] + code

    def _code_folders(self) -> set[str]:
        """Return the folders of the modules that the config names, which also have the modules' relative imports."""
        if not self.folder.has(CONFIG_NAME):
            return set()
        config = json_object_or_none(self.folder.read_small(CONFIG_NAME, MAX_CONFIG_BYTES)) or {}
        auto_map = config.get("auto_map")  # transformers reports a damaged config
        values = auto_map.values() if isinstance(auto_map, dict) else ()
        named = [one for value in values for one in (value if isinstance(value, list) else [value])]
        folders = {one.rpartition("/")[0] for one in named if isinstance(one, str) and "--" not in one}
        return {folder for folder in folders if is_safe_file_name(folder)}


def _directory_name(name: str) -> str:
    """Return the name of a store folder's temporary directory: the same, unless characters or length forbid it."""
    plain = _PLAIN.sub("_", name).lstrip(".") or "_"
    module = "_" + plain.replace(".", "_dot_").replace("-", "_hyphen_")  # transformers' directory for its code
    if len(module) <= _LONGEST_NAME:
        return plain
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
    return f"{module[: _LONGEST_NAME - len(digest) - 1]}_{digest}"


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves it to its parent
        shutil.rmtree(directory, ignore_errors=True)


def locate_in_store(text: str, query: CheckpointQuery, *, takes_files: bool) -> tuple[StoreFolder, str | None]:
    """Find the folder of a checkpoint in a store, and the file of weights if the address may be, and is, that of one.

    Raises:
        InvalidArgumentError: A store does not support the query.
        InvalidPathError: The subfolder leads elsewhere.
        StoreError: There is no such bucket, no permission, or no connection.
    """
    if query.local_files_only:
        raise InvalidArgumentError(
            f"local_files_only=True, but '{text}' is not on this machine. Leave it out.", path=text
        )
    address = parse_address(text)
    parent, _, name = address.prefix.rpartition("/")
    if takes_files and is_weights_name(name):
        place = replace(address, prefix=parent)
        store = open_store(place)
        if store.find(name) is not None:
            if query.subfolder or query.variant is not None:
                raise InvalidArgumentError(f"'{text}' is a file: leave out subfolder and variant.", path=text)
            return StoreFolder(store, str(place), store_memory_bytes()), name
    folder = open_store_folder(f"{address}/{query.subfolder}")
    folder.enter(WeightNames(query.variant))
    return folder, None


def open_store_folder(text: str) -> StoreFolder:
    """Return the folder at an address, with its objects as they are; nothing is listed yet."""
    address = parse_address(text)
    return StoreFolder(open_store(address), str(address), store_memory_bytes())
