"""Arguments of the commands that write a checkpoint in other files."""

from __future__ import annotations

import argparse

from hfshard.cli.arguments.groups import CommandGroup
from hfshard.cli.arguments.shared import (
    OR_STORE,
    REPO,
    STORE,
    add_format,
    add_key,
    add_no_progress,
    add_token,
    add_variant,
    shard_size,
)
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE


def add_reshard(commands: CommandGroup) -> None:
    """Add `reshard`."""
    reshard = commands.add_parser(
        "reshard",
        help="a checkpoint in files of another size",
        description="Copy the tensors of a checkpoint into files of another size, bit for bit, and compare them with "
        "their checksums on the way. What lies in the target stays loadable until the new files are whole.",
    )
    _add_source_and_target(reshard)
    reshard.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), help="cast floating tensors")
    reshard.add_argument(
        "--low-disk", action="store_true", help="in place only: keep at most one shard on the disk twice at any time"
    )


def add_convert(commands: CommandGroup) -> None:
    """Add `convert`."""
    convert = commands.add_parser(
        "convert",
        help="pytorch_model.bin, .pt, .pth.tar ... into safetensors",
        description="Write pickled weights as safetensors, of a directory or of one file; of what another program has "
        "saved with an optimizer, make a checkpoint of the run DST (of SRC in a store, convert the weights alone). A "
        "pickle that asks for more than plain data is "
        "refused. In place, the pickles are removed when the safetensors are whole.",
    )
    _add_source_and_target(convert)
    convert.set_defaults(dtype=None)
    convert.add_argument("--weights", action="store_true", help="write the weights alone, though SRC has an optimizer")
    convert.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint's step (default: SRC's own)")
    convert.add_argument(
        "--part",
        action="append",
        type=_part,
        default=[],
        metavar="NAME=KEY",
        help='of a run: where SRC has a part, such as model=ema.state_dict or optimizer="optim.0"; may be repeated',
    )
    convert.add_argument(
        "--not-strict", dest="strict", action="store_false", help="of a run: leave out what can't be read, and say so"
    )


def add_remove(commands: CommandGroup) -> None:
    """Add `remove`."""
    remove = commands.add_parser(
        "remove",
        help="a checkpoint, one of a run, or what killed saves have left",
        description="Remove a checkpoint: its weights, indexes and configs, and nothing else. What goes, with sizes, "
        "and what stays is listed before it asks. In a store, nothing may save there meanwhile. Exit 0: it is removed, "
        "or there are no leftovers, 1: it is not, 2: bad usage.",
    )
    remove.set_defaults(needs_directory=False)
    remove.add_argument(
        "directory", metavar="PLACE", help=f"the checkpoint's directory, a run's, or a checkpoint of one{OR_STORE}"
    )
    remove.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint of this step")
    add_variant(remove)
    remove.add_argument(
        "--leftovers", action="store_true", help="no checkpoint, but what killed saves have left in PLACE"
    )
    remove.add_argument(
        "--unfinished",
        action="store_true",
        help="of a store: also objects of a newer save, which is under way or was killed",
    )
    remove.add_argument("--dry-run", action="store_true", help="list what goes and what stays, and remove nothing")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    add_format(remove)


def _add_source_and_target(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_directory=False)
    parser.add_argument("source", metavar="SRC", help=f"a directory, or one file of weights; {REPO}; or {STORE}")
    parser.add_argument("target", metavar="DST", help=f"the directory to write; the same one: in place{OR_STORE}")
    parser.add_argument(
        "--max-shard-size", type=shard_size, default=DEFAULT_MAX_SHARD_SIZE, metavar="SIZE",
        help="the most that a file may have, such as 5GB or 500MiB (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--packing", choices=("greedy", "balanced"), default="greedy",
        help="greedy: in the order of the tensors (default); balanced: fewer files where it can, levelled",
    )  # fmt: skip
    parser.add_argument(
        "--checksum",
        choices=("sha256", "xxh3", "none"),
        default="sha256",
        help="checksum of the files that are written (default: %(default)s)",
    )
    add_variant(parser)
    add_key(parser)
    parser.add_argument("--revision", help="revision of SRC on a hub: branch, tag, commit or refs/pr/N (default: main)")
    parser.add_argument("--subfolder", default="", help="folder of SRC")
    parser.add_argument(
        "--local-files-only", action="store_true", help="read SRC on the Hub from the cache alone, not from the network"
    )
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="copy also what links beside the weights lead to outside of the checkpoint, else refused",
    )
    parser.add_argument(
        "--drop-signature",
        action="store_true",
        help="remove model.sig of DST, which no longer holds; without it, a signed checkpoint is refused in place",
    )
    add_token(parser)
    add_format(parser)
    add_no_progress(parser)


def _part(text: str) -> tuple[str, str]:
    """Split the name of a part from its key in a file."""
    name, equals, key = text.partition("=")
    if not name or not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=KEY")
    return name, key
