"""Arguments that several commands have."""

from __future__ import annotations

import argparse

from hfshard._util.text import parse_size

REPO = "org/name on the Hub, or a path or file:// URL of a directory that serves as a hub"
STORE = "s3://bucket/prefix, gs://..., az://... or hf://buckets/org/name/prefix"
OR_STORE = f"; or in a store: {STORE}"


def add_directory(parser: argparse.ArgumentParser, text: str, *, takes_address: bool = True) -> None:
    """Take a directory."""
    parser.set_defaults(needs_directory=True, takes_file=False, takes_address=takes_address)
    parser.add_argument("directory", metavar="DIR", help=f"{text}{OR_STORE if takes_address else ''}")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Take a directory or one file of weights."""
    parser.set_defaults(needs_directory=True, takes_file=True, takes_address=True)
    parser.add_argument(
        "directory", metavar="PATH", help=f"the checkpoint's directory, or one file of weights{OR_STORE}"
    )


def add_key(parser: argparse.ArgumentParser) -> None:
    """Take the place of the weights in a file of torch.save."""
    parser.add_argument("--key", help="where the weights lie in a file of torch.save that holds several, as model_ema")


def add_variant(parser: argparse.ArgumentParser) -> None:
    """Take the variant of the weights."""
    parser.add_argument("--variant", help='the variant of the weights, for example "fp16"')


def add_format(parser: argparse.ArgumentParser) -> None:
    """Take the form of what is printed."""
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")


def add_token(parser: argparse.ArgumentParser) -> None:
    """Take a token for the Hub."""
    parser.add_argument("--token", help="token for the Hub (default: HF_TOKEN, or the saved one)")


def add_no_progress(parser: argparse.ArgumentParser) -> None:
    """Take the wish for no progress bar."""
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_const",
        const=False,
        help="show no progress bar on the terminal",
    )


def shard_size(text: str) -> int | str:
    """Check a size as `max_shard_size` is checked; digits alone are bytes."""
    try:
        size = int(text) if text.isascii() and text.isdigit() else text
        parse_size(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return size
