"""The commands of `hfshard` and their arguments."""

from __future__ import annotations

import argparse
from typing import Any

from hfshard._util.size import parse_size
from hfshard.cli.run.words import COMMAND
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE, VERSION

_REPO = "org/name on the Hub, or a path or file:// URL of a directory that serves as a hub"
_STORE = "s3://bucket/prefix, gs://..., az://... or hf://buckets/org/name/prefix"
_OR_STORE = f"; or in a store: {_STORE}"


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="hfshard",
        description="Look at sharded checkpoints, verify, re-shard, convert, push and pull them; "
        "run programs with hfshard on.",
    )
    parser.add_argument("--version", action="version", version=f"hfshard {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_verify(commands)
    _add_checkpoints(commands)
    _add_reshard(commands)
    _add_convert(commands)
    _add_push(commands)
    _add_pull(commands)
    _add_revisions(commands)
    _add_run(commands)
    return parser


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show shards, dtypes, the largest tensors, tied names and metadata",
        description="Show what a checkpoint consists of, from its index and headers; no tensor is read.",
    )
    _add_checkpoint(inspect)
    _add_variant(inspect)
    _add_key(inspect)
    _add_format(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, not only the largest")


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="check every file of a checkpoint or of a training run; exit 0: whole, 1: damaged",
        description="Check every file of a checkpoint: of a training checkpoint also the optimizer's and all others; "
        "of a run all its checkpoints. Exit 0: it is whole, 1: it is damaged, 2: bad usage.",
    )
    _add_checkpoint(verify)
    _add_variant(verify)
    _add_format(verify)
    verify.add_argument(
        "--level",
        choices=("full", "structure"),
        default="full",
        help="full: every byte against its checksum (default); structure: what can be checked without reading tensors",
    )
    _add_no_progress(verify)


def _add_checkpoints(commands: Any) -> None:
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list the checkpoints of a training run; exit 0: none is damaged, 1: one is",
        description="Show the checkpoints of a training run in the order in which they were saved, and what is wrong "
        "with them. Exit 0: none is damaged, 1: one is, or there is none, 2: bad usage.",
    )
    _add_directory(checkpoints, "the run's directory")
    checkpoints.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    checkpoints.add_argument("--best", metavar="METRIC", help="mark the one with the best value of this metric")
    checkpoints.add_argument(
        "--metric-mode", choices=("min", "max"), default="min", help="which value is best (default: %(default)s)"
    )
    _add_format(checkpoints)
    _add_no_progress(checkpoints)


def _add_reshard(commands: Any) -> None:
    reshard = commands.add_parser(
        "reshard",
        help="write a checkpoint in files of another size; the same directory twice: in place",
        description="Copy the tensors of a checkpoint into files of another size, bit for bit, and compare them with "
        "their checksums on the way. What lies in the target stays loadable until the new files are whole.",
    )
    _add_source_and_target(reshard)
    reshard.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), help="cast floating tensors")
    reshard.add_argument(
        "--low-disk", action="store_true", help="in place only: keep at most one shard on the disk twice at any time"
    )


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="write pytorch_model.bin, .pt, .pth.tar ... as safetensors; the same directory twice: in place",
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


def _add_source_and_target(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_directory=False)
    parser.add_argument("source", metavar="SRC", help=f"a directory, or one file of weights; {_REPO}; or {_STORE}")
    parser.add_argument("target", metavar="DST", help=f"the directory to write; the same one: in place{_OR_STORE}")
    parser.add_argument(
        "--max-shard-size", type=_shard_size, default=DEFAULT_MAX_SHARD_SIZE, metavar="SIZE",
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
    _add_variant(parser)
    _add_key(parser)
    parser.add_argument("--revision", help="revision of SRC on a hub: branch, tag, commit or refs/pr/N (default: main)")
    parser.add_argument("--subfolder", default="", help="folder of SRC")
    parser.add_argument(
        "--local-files-only", action="store_true", help="read SRC on the Hub from the cache alone, not from the network"
    )
    _add_token(parser)
    _add_format(parser)
    _add_no_progress(parser)


def _part(text: str) -> tuple[str, str]:
    """Split the name of a part from its key in a file."""
    name, equals, key = text.partition("=")
    if not name or not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=KEY")
    return name, key


def _shard_size(text: str) -> int | str:
    """Check a size as `max_shard_size` is checked; digits alone are bytes."""
    try:
        size = int(text) if text.isascii() and text.isdigit() else text
        parse_size(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return size


def _add_push(commands: Any) -> None:
    push = commands.add_parser(
        "push",
        help="push a checkpoint to a hub as one commit, or to a store",
        description="Push a directory, or what a store holds, as one commit: what the hub has is not sent, and old "
        "weights are removed. To a store, the checkpoint is copied as a save puts it there.",
    )
    _add_directory(push, "the checkpoint's directory")
    push.add_argument("repo_id", metavar="REPO", help=f"{_REPO}; or, without commits, {_STORE}")
    push.add_argument("--revision", help="the branch to push to, made if it is missing (default: main)")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of pushing to the branch")
    push.add_argument("--path-in-repo", default="", help="folder of the repo")
    push.add_argument("--message", "--commit-message", dest="commit_message", help="title of the commit")
    push.add_argument(
        "--description", "--commit-description", dest="commit_description", help="description of the commit"
    )
    push.add_argument("--private", action="store_true", default=None, help="make the repo private if it is new")
    push.add_argument("--include", action="append", metavar="GLOB", help="push only these files; may be repeated")
    push.add_argument("--exclude", action="append", metavar="GLOB", help="leave these files out; may be repeated")
    push.add_argument(
        "--follow-links", action="store_true", help="push also what links lead to outside of DIR, else refused"
    )
    _add_token(push)
    _add_format(push)
    _add_no_progress(push)


def _add_pull(commands: Any) -> None:
    pull = commands.add_parser(
        "pull",
        help="pull a checkpoint from a hub or a store and check it; what is there already is not fetched again",
        description="Pull a checkpoint into the cache, into a directory or to a store, and print where it is.",
    )
    pull.set_defaults(needs_directory=False)
    pull.add_argument("repo_id", metavar="REPO", help=f"{_REPO}; or {_STORE}")
    pull.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help=f"the directory to write (default: huggingface_hub's cache){_OR_STORE}",
    )
    pull.add_argument("--revision", help="branch, tag, commit or refs/pr/N (default: main)")
    pull.add_argument("--subfolder", default="", help="folder of the repo")
    pull.add_argument("--include", action="append", metavar="GLOB", help="pull only these files; may be repeated")
    pull.add_argument("--exclude", action="append", metavar="GLOB", help="leave these files out; may be repeated")
    pull.add_argument(
        "--force-download", action="store_true", help="fetch again what is in the cache, which may be damaged"
    )
    pull.add_argument("--local-files-only", action="store_true", help="use the cache alone, not the network")
    pull.add_argument(
        "--verify",
        choices=("none", "structure", "full"),
        default="structure",
        help="what is checked, as in from_pretrained (default: %(default)s)",
    )
    _add_variant(pull)
    _add_token(pull)
    _add_format(pull)
    _add_no_progress(pull)


def _add_revisions(commands: Any) -> None:
    revisions = commands.add_parser(
        "revisions",
        help="list, tag or delete what a directory that serves as a hub keeps",
        description="Show the branches, tags and commits of a directory that serves as a hub.",
    )
    _add_directory(revisions, "the directory that serves as a hub", takes_address=False)
    change = revisions.add_mutually_exclusive_group()
    change.add_argument("--delete", metavar="REV", help="delete a branch, a tag, or a commit that none leads to")
    change.add_argument("--tag", nargs=2, metavar=("NAME", "REV"), help="give a revision a name that stays")
    change.add_argument("--prune", action="store_true", help="delete every commit that no branch or tag leads to")
    revisions.add_argument("--force", action="store_true", help="with --delete: main too")
    _add_format(revisions)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        COMMAND,
        help="run a program with hfshard on: what it does with transformers models is crash-safe and checked",
        usage="hfshard run [OPTIONS] SCRIPT | -m MODULE | -c CODE | COMMAND  [ARGUMENT ...]",
        description="Run a Python program, or a command such as torchrun, as it is, with hfshard.install() in it and "
        "in the Python processes that it starts. What follows the options is given to Python as it stands.",
        allow_abbrev=False,
    )
    run.set_defaults(needs_directory=False)
    run.add_argument(
        "--verify",
        choices=("none", "structure", "full"),
        default="structure",
        help="what from_pretrained checks (default: %(default)s)",
    )
    run.add_argument(
        "--checksum",
        choices=("sha256", "xxh3", "none"),
        default="sha256",
        help="checksum of the files that save_pretrained writes (default: %(default)s)",
    )
    run.add_argument("--quiet", action="store_true", help="do not say on stderr that hfshard is on")


def _add_directory(parser: argparse.ArgumentParser, text: str, *, takes_address: bool = True) -> None:
    parser.set_defaults(needs_directory=True, takes_file=False, takes_address=takes_address)
    parser.add_argument("directory", metavar="DIR", help=f"{text}{_OR_STORE if takes_address else ''}")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_directory=True, takes_file=True, takes_address=True)
    parser.add_argument(
        "directory", metavar="PATH", help=f"the checkpoint's directory, or one file of weights{_OR_STORE}"
    )


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key", help="where the weights lie in a file of torch.save that holds several, as model_ema")


def _add_variant(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", help='the variant of the weights, for example "fp16"')


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")


def _add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", help="token for the Hub (default: HF_TOKEN, or the saved one)")


def _add_no_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_const",
        const=False,
        help="show no progress bar on the terminal",
    )
