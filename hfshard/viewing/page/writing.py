"""Puts a page into its file: whole or not at all, and over nothing but a page."""

from __future__ import annotations

import os
import secrets
import stat
from typing import Final

from hfshard._util.arguments import absolute_directory, names_files
from hfshard.disk.fsops import rename, unlink_if_there, write_file
from hfshard.errors import InvalidPathError

PAGE_BEGINNING: Final = "<!doctype html>\n<!-- A page of hfshard"
"""How each of our pages begins; every template inherits it."""
PNG_BEGINNING: Final = b"\x89PNG\r\n\x1a\n"


def checked_output(output: str | os.PathLike[str], *, is_picture: bool = False) -> str:
    """Check where a page, or a picture of one, is to be written, before anything is read for it.

    Returns:
        The absolute path, without links.

    Raises:
        InvalidPathError: It is an address or a directory, its folder does not exist, or a file is there that is no
            page of hfshard, or no PNG.
    """
    path = os.path.realpath(absolute_directory(output, "output"))
    if os.path.isdir(path):
        raise InvalidPathError(f"'{path}' is a directory: give the file that the page is written to.", path=path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise InvalidPathError(f"There is no directory '{folder}' for the page. Make it, or give another.", path=path)
    what, beginning = ("PNG", PNG_BEGINNING) if is_picture else ("page of hfshard", PAGE_BEGINNING.encode())
    if os.path.lexists(path) and not _begins_with(path, beginning):
        raise InvalidPathError(
            f"'{path}' is there and is no {what}, so it is left as it is. Give another file, or remove it.",
            path=path,
        )
    return path


@names_files("path")
def write_page(page: str | bytes, path: str) -> int:
    """Write a page or a picture beside its place and rename it: who opens the file sees the old one or the new one.

    Args:
        page: HTML, or the bytes of a PNG.
        path: What `checked_output` returned.

    Returns:
        Bytes.

    Raises:
        FileError: The disk is full, or the directory can't be written to. An old page is as it was.
    """
    raw = page.encode() if isinstance(page, str) else page
    like = os.stat(path) if os.path.exists(path) else None
    name = os.path.basename(path).encode(errors="ignore")[:200].decode(errors="ignore")
    beside = os.path.join(os.path.dirname(path), f".{name}.{secrets.token_hex(4)}")
    try:
        write_file(beside, raw, like=like)
        rename(beside, path)
    except BaseException:
        unlink_if_there(beside)
        raise
    return len(raw)


def _begins_with(path: str, beginning: bytes) -> bool:
    """Whether a file is of this kind, or empty."""
    if not os.path.exists(path) or not stat.S_ISREG(os.stat(path).st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(beginning)) in (b"", beginning)
