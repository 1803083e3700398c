"""Paths on the command lines of the benchmarks: what is not there is a sentence, before anything is measured."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def directory_for_data(text: str) -> Path:
    """A directory that exists, and can be written to; a `type` of argparse."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"there is no directory '{text}'. Make it, or name another one.")
    if not os.access(text, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"'{text}' can't be written to. Name another directory.")
    return Path(text)


def file_to_write(text: str) -> Path:
    """A file in such a directory; a `type` of argparse."""
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"'{text}' is a directory. Name a file in it.")
    directory_for_data(os.path.dirname(text) or os.curdir)
    return Path(text)
