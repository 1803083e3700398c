"""The arguments of all commands, and the help that lists the commands in groups; importing it does not load torch."""

from __future__ import annotations

import argparse
from typing import Any, Final, NoReturn

from hfshard._util.text import parse_size, without_url_secrets
from hfshard.cli.output import printable
from hfshard.cli.run_command import COMMAND
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE, VERSION


class _Parser(argparse.ArgumentParser):
    """Parser, also of each command, that shows a rejected argument without its passwords and control characters."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(without_url_secrets(message)))


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; each command is in one group of its help."""
    parser = _Parser(
        prog="hfshard",
        usage="hfshard [-h] [--version] COMMAND ...",
        epilog="`hfshard COMMAND --help` shows the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hfshard {VERSION}")
    commands = Commands(parser)
    look = commands.group("inspect")
    add_inspect(look)
    add_show(look)
    add_diff(look)
    add_checkpoints(look)
    check = commands.group("check")
    add_verify(check)
    add_sign(check)
    move = commands.group("move")
    add_push(move)
    add_pull(move)
    add_revisions(move)
    rewrite = commands.group("rewrite")
    add_reshard(rewrite)
    add_convert(rewrite)
    add_remove(rewrite)
    add_run(commands.group("run"))
    parser.description = f"Inspect, check, move and rewrite sharded checkpoints.\n\n{commands.show()}"
    return parser


# The commands of `hfshard` in groups, and the help that lists them.


_GAP: Final = 2
"""Spaces before a command, and between the longest one and its line."""


class Commands:
    """The commands of a parser, in groups that its help shows in the order of their creation."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        # argparse would list all commands together below "positional arguments": the groups replace that list.
        self._parsers: Any = parser.add_subparsers(
            dest="command", metavar="COMMAND", required=True, prog=parser.prog, help=argparse.SUPPRESS
        )
        self._groups: list[CommandGroup] = []

    def group(self, title: str) -> CommandGroup:
        """Begin a group; commands are added to it."""
        group = CommandGroup(title, self._parsers)
        self._groups.append(group)
        return group

    def show(self) -> str:
        """List every command with its line, group by group."""
        width = max(len(name) for group in self._groups for name in group.lines)
        return "\n\n".join(group.show(width) for group in self._groups)


class CommandGroup:
    """Commands that the help lists together."""

    def __init__(self, title: str, parsers: Any) -> None:
        self._title = title
        self._parsers = parsers
        self.lines: dict[str, str] = {}
        """Command -> its line in the help, in the order in which they were added."""

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:
        """Add a command.

        Args:
            name: The command.
            help: Its line in the help of `hfshard`.
            options: For its own parser.
        """
        self.lines[name] = help
        parser: argparse.ArgumentParser = self._parsers.add_parser(name, **options)
        return parser

    def show(self, width: int) -> str:
        """Return the title, and a line for each command, with its name in `width` columns."""
        gap = " " * _GAP
        lines = [f"{gap}{name:{width}}{gap}{line}" for name, line in self.lines.items()]
        return "\n".join([f"{self._title}:", *lines])


# Arguments that several commands have.


REPO = "org/name on the Hub, or a path or file:// URL of a directory that serves as a hub"
STORE = "s3://bucket/prefix, gs://..., az://... or hf://buckets/org/name/prefix"
OR_STORE = f"; or in a store: {STORE}"


def add_directory(parser: argparse.ArgumentParser, text: str, *, takes_address: bool = True) -> None:
    """Add a directory as an argument."""
    parser.set_defaults(needs_directory=True, takes_file=False, takes_address=takes_address)
    parser.add_argument("directory", metavar="DIR", help=f"{text}{OR_STORE if takes_address else ''}")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add a directory or one file of weights as an argument."""
    parser.set_defaults(needs_directory=True, takes_file=True, takes_address=True)
    parser.add_argument(
        "directory", metavar="PATH", help=f"the checkpoint's directory, or one file of weights{OR_STORE}"
    )


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add `--key`, the place of the weights in a file of torch.save."""
    parser.add_argument(
        "--key", help="key of the weights in a torch.save file that contains several, such as model_ema"
    )


def add_variant(parser: argparse.ArgumentParser) -> None:
    """Add `--variant`."""
    parser.add_argument("--variant", help='the variant of the weights, for example "fp16"')


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add `--format`, text or JSON."""
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")


def add_token(parser: argparse.ArgumentParser) -> None:
    """Add `--token` for the Hub."""
    parser.add_argument("--token", help="token for the Hub (default: HF_TOKEN, or the saved one)")


def add_no_progress(parser: argparse.ArgumentParser) -> None:
    """Add `--no-progress`."""
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_const",
        const=False,
        help="show no progress bar on the terminal",
    )


def shard_size(text: str) -> int | str:
    """Check a size like `max_shard_size`; digits alone are bytes."""
    try:
        size = int(text) if text.isascii() and text.isdigit() else text
        parse_size(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return size


# Arguments of the commands that show checkpoints: inspect, show, diff, checkpoints.


def add_inspect(commands: CommandGroup) -> None:
    """Add `inspect`."""
    inspect = commands.add_parser(
        "inspect",
        help="show shards, dtypes, the largest tensors, tied names, metadata",
        description="Show a checkpoint's contents from its index and headers, without reading tensors.",
    )
    add_checkpoint(inspect)
    add_variant(inspect)
    add_key(inspect)
    add_format(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, not only the largest")


def add_show(commands: CommandGroup) -> None:
    """Add `show`."""
    show = commands.add_parser(
        "show",
        help="write an HTML page: a map of the modules, files, search",
        description="Write one HTML file that shows a checkpoint's contents: modules by bytes, files, dtypes, ties, "
        "the largest tensors, metadata, search by name. Of a training run, show its checkpoints side by side: bytes, "
        "metrics, what is damaged. The file needs no network and no other files.",
    )
    show.set_defaults(needs_directory=False)
    show.add_argument("checkpoint", metavar="CHECKPOINT", help=f"a directory, or one file of weights; {REPO}{OR_STORE}")
    show.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the page (default: the checkpoint's name with .html, in this directory; with --png: none)",
    )
    add_variant(show)
    add_key(show)
    show.add_argument("--revision", help="revision on a hub: branch, tag, commit or refs/pr/N (default: main)")
    show.add_argument("--subfolder", default="", help="folder in CHECKPOINT")
    show.add_argument(
        "--max-shard-size",
        type=shard_size,
        metavar="SIZE",
        help="measure the files against this size, not the largest file",
    )
    show.add_argument(
        "--values", action="store_true", help="read the tensors, and show the distribution of their values"
    )
    show.add_argument(
        "--png",
        metavar="FILE",
        help="write a screenshot of the page, drawn by an installed Chromium; with -o, write both",
    )
    show.add_argument(
        "--png-size", default="1280x800", metavar="WxH", help="screenshot size in pixels (default: %(default)s)"
    )
    show.add_argument(
        "--png-theme", choices=("light", "dark"), default="light", help="screenshot theme (default: %(default)s)"
    )
    show.add_argument("--against", metavar="BASE", help="show the differences from another checkpoint")
    _add_best(show, "for a run: mark")
    add_token(show)
    add_format(show)
    add_no_progress(show)


def add_diff(commands: CommandGroup) -> None:
    """Add `diff`."""
    diff = commands.add_parser(
        "diff",
        help="show what differs between two checkpoints, and where",
        description="Show which tensors of two checkpoints are the same, changed, cast, reshaped, renamed or in only "
        "one, however they are sharded. Tensors with digests in both are not read. Exit 0: nothing differs, 1: "
        "something does, 2: bad usage, or one of them is damaged or cannot be read.",
    )
    diff.set_defaults(needs_directory=False, exit_failed=2)
    place = (
        f"a directory, one file of weights, a run or one of its checkpoints; {REPO}, also with @revision; or {STORE}"
    )
    diff.add_argument("a", metavar="A", help=place)
    diff.add_argument("b", metavar="B", help="the same")
    diff.add_argument(
        "--values",
        action="store_true",
        help="also show by how much: read the changed tensors block by block, and compare their values",
    )
    diff.add_argument("--all", action="store_true", help="list every tensor that differs, with its full name")
    diff.add_argument(
        "--verify",
        choices=("none", "structure", "full"),
        default="structure",
        help="full: trust no digests; read and compare every byte of both (default: %(default)s)",
    )
    add_variant(diff)
    diff.add_argument(
        "--key",
        action="append",
        help="key of the weights in torch.save files that contain several, such as model_ema; twice: for A, for B",
    )
    diff.add_argument("--subfolder", action="append", help="folder in both; twice: for A, for B")
    add_token(diff)
    add_format(diff)
    add_no_progress(diff)


def add_checkpoints(commands: CommandGroup) -> None:
    """Add `checkpoints`."""
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list a training run's checkpoints, and what is wrong with them",
        description="List a training run's checkpoints in the order in which they were saved, and what is wrong with "
        "them. Exit 0: none is damaged or unfinished, 1: one is, or the run has none, 2: bad usage.",
    )
    add_directory(checkpoints, "the run's directory")
    checkpoints.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    _add_best(checkpoints, "mark")
    add_format(checkpoints)
    add_no_progress(checkpoints)


def _add_best(parser: argparse.ArgumentParser, mark: str) -> None:
    parser.add_argument("--best", metavar="METRIC", help=f"{mark} the checkpoint with the best value of this metric")
    parser.add_argument(
        "--metric-mode", choices=("min", "max"), default="min", help="which value is best (default: %(default)s)"
    )


# Arguments of the commands that check whether a checkpoint is intact, and sign it: verify, sign.


def add_verify(commands: CommandGroup) -> None:
    """Add `verify`."""
    verify = commands.add_parser(
        "verify",
        help="check every file of a checkpoint or training run",
        description="Check every file of a checkpoint; of a training checkpoint, also the optimizer's and all others; "
        "of a run, all its checkpoints. Exit 0: intact, 1: damaged, 2: bad usage.",
    )
    add_checkpoint(verify)
    add_variant(verify)
    add_format(verify)
    verify.add_argument(
        "--level",
        choices=("full", "structure"),
        default="full",
        help="full: every byte against its checksum (default); structure: what can be checked without reading tensors",
    )
    signed = verify.add_argument_group(
        "signature", "Require that every file was signed (model.sig, see `hfshard sign`) by one of these."
    )
    signed.add_argument("--public-key", metavar="FILE", help="the signer's public key: elliptic curve, PEM")
    signed.add_argument(
        "--certificate-chain",
        metavar="FILE",
        action="append",
        default=[],
        help="root certificate (PEM) that the signer's certificate must chain to; repeatable",
    )
    signed.add_argument("--identity", help="the signer's Sigstore identity; with --oidc-issuer")
    signed.add_argument("--oidc-issuer", metavar="URL", help="the issuer that vouches for the identity")
    signed.add_argument("--use-staging", action="store_true", help="use Sigstore's staging instance")
    signed.add_argument("--trust-config", metavar="FILE", help="JSON file with the keys of another Sigstore")
    add_no_progress(verify)


def add_sign(commands: CommandGroup) -> None:
    """Add `sign`."""
    sign = commands.add_parser(
        "sign",
        help="sign every file of a checkpoint, as OpenSSF Model Signing does",
        description="Sign every file of a directory: write model.sig next to them, which `hfshard verify` and "
        "`model_signing verify` check. Shards that hfshard saved are not read again. The password of a key is read "
        "from HFSHARD_KEY_PASSWORD, or asked for.",
    )
    add_directory(sign, "the checkpoint's directory", takes_address=False)
    who = sign.add_mutually_exclusive_group(required=True)
    who.add_argument("--private-key", metavar="FILE", help="an elliptic curve key (P-256, P-384, P-521), PEM")
    who.add_argument("--sigstore", action="store_true", help="sign with a Sigstore identity; asks in the browser")
    sign.add_argument("--signing-certificate", metavar="FILE", help="the key's certificate, PEM")
    sign.add_argument(
        "--certificate-chain",
        metavar="FILE",
        action="append",
        default=[],
        help="an intermediate certificate between that one and the root, PEM; repeatable",
    )
    sign.add_argument(
        "--use-ambient-credentials", action="store_true", help="with --sigstore: use this workflow's identity, as in CI"
    )
    sign.add_argument("--use-staging", action="store_true", help="with --sigstore: use Sigstore's staging instance")
    sign.add_argument(
        "--trust-config", metavar="FILE", help="with --sigstore: JSON file with the keys of another Sigstore"
    )
    sign.add_argument(
        "--verify",
        choices=("structure", "full"),
        default="structure",
        help="full: also read the shards, and compare every byte before signing (default: %(default)s)",
    )
    add_format(sign)
    add_no_progress(sign)


# Arguments of the commands that copy checkpoints between places: push, pull; and revisions.


def add_push(commands: CommandGroup) -> None:
    """Add `push`."""
    push = commands.add_parser(
        "push",
        help="push a checkpoint to a hub as one commit, or to a store",
        description="Push a checkpoint from a directory or a store as one commit. Contents that the hub has are not "
        "sent, and old weights are removed. To a store, the checkpoint is copied as a save would write it.",
    )
    add_directory(push, "the checkpoint's directory")
    push.add_argument("repo_id", metavar="REPO", help=f"{REPO}; or, without commits, {STORE}")
    push.add_argument("--revision", help="the branch to push to, created if missing (default: main)")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of pushing to the branch")
    push.add_argument("--path-in-repo", default="", help="folder in the repo")
    push.add_argument("--message", "--commit-message", dest="commit_message", help="title of the commit")
    push.add_argument(
        "--description", "--commit-description", dest="commit_description", help="description of the commit"
    )
    push.add_argument("--private", action="store_true", default=None, help="make the repo private if it is new")
    push.add_argument("--include", action="append", metavar="GLOB", help="push only these files; repeatable")
    push.add_argument("--exclude", action="append", metavar="GLOB", help="exclude these files; repeatable")
    push.add_argument(
        "--follow-links",
        action="store_true",
        help="also push files outside DIR that links lead to; otherwise they are rejected",
    )
    add_token(push)
    add_format(push)
    add_no_progress(push)


def add_pull(commands: CommandGroup) -> None:
    """Add `pull`."""
    pull = commands.add_parser(
        "pull",
        help="pull a checkpoint from a hub or a store, and check it",
        description="Pull a checkpoint into the cache, into a directory or to a store, check it, and print where it "
        "is. Existing files are not fetched again.",
    )
    pull.set_defaults(needs_directory=False)
    pull.add_argument("repo_id", metavar="REPO", help=f"{REPO}; or {STORE}")
    pull.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help=f"the directory to write (default: huggingface_hub's cache){OR_STORE}",
    )
    pull.add_argument("--revision", help="branch, tag, commit or refs/pr/N (default: main)")
    pull.add_argument("--subfolder", default="", help="folder in the repo")
    pull.add_argument("--include", action="append", metavar="GLOB", help="pull only these files; repeatable")
    pull.add_argument("--exclude", action="append", metavar="GLOB", help="exclude these files; repeatable")
    pull.add_argument(
        "--force",
        action="store_true",
        help="replace your files in DIR that have other contents; otherwise they are an error",
    )
    pull.add_argument(
        "--force-download", action="store_true", help="fetch again even what is cached, in case the cache is damaged"
    )
    pull.add_argument("--local-files-only", action="store_true", help="use only the cache, not the network")
    pull.add_argument(
        "--verify",
        choices=("none", "structure", "full"),
        default="structure",
        help="what to check, as in from_pretrained (default: %(default)s)",
    )
    add_variant(pull)
    add_token(pull)
    add_format(pull)
    add_no_progress(pull)


def add_revisions(commands: CommandGroup) -> None:
    """Add `revisions`."""
    revisions = commands.add_parser(
        "revisions",
        help="list, tag or delete the revisions of a directory hub",
        description="Show the branches, tags and commits of a directory that serves as a hub.",
    )
    add_directory(revisions, "the directory that serves as a hub", takes_address=False)
    change = revisions.add_mutually_exclusive_group()
    change.add_argument(
        "--delete", metavar="REV", help="delete a branch, a tag, or a commit that no branch or tag leads to"
    )
    change.add_argument("--tag", nargs=2, metavar=("NAME", "REV"), help="give a revision a permanent name")
    change.add_argument("--prune", action="store_true", help="delete every commit that no branch or tag leads to")
    revisions.add_argument("--force", action="store_true", help="with --delete: also main")
    add_format(revisions)


# Arguments of the commands that rewrite or remove: reshard, convert, remove.


def add_reshard(commands: CommandGroup) -> None:
    """Add `reshard`."""
    reshard = commands.add_parser(
        "reshard",
        help="write a checkpoint in files of another size",
        description="Copy the tensors of a checkpoint into files of another size, bit for bit, and compare them with "
        "their checksums. The target's old checkpoint stays loadable until the new files are complete.",
    )
    _add_source_and_target(reshard)
    reshard.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), help="cast floating tensors")
    reshard.add_argument(
        "--low-disk", action="store_true", help="in place only: keep at most one shard on disk twice at any time"
    )


def add_convert(commands: CommandGroup) -> None:
    """Add `convert`."""
    convert = commands.add_parser(
        "convert",
        help="convert pytorch_model.bin, .pt, .pth.tar ... into safetensors",
        description="Write the pickled weights of a directory or one file as safetensors. If another program saved "
        "SRC with an optimizer, create a checkpoint of the run DST (of SRC in a store, convert the weights alone). A "
        "pickle that asks for more than plain data is rejected. In place, the pickles are removed when the "
        "safetensors are complete.",
    )
    _add_source_and_target(convert)
    convert.set_defaults(dtype=None)
    convert.add_argument("--weights", action="store_true", help="write only the weights, even if SRC has an optimizer")
    convert.add_argument("--step", type=int, metavar="N", help="for a run: the checkpoint's step (default: SRC's own)")
    convert.add_argument(
        "--part",
        action="append",
        type=_part,
        default=[],
        metavar="NAME=KEY",
        help='for a run: where SRC has a part, such as model=ema.state_dict or optimizer="optim.0"; repeatable',
    )
    convert.add_argument(
        "--not-strict",
        dest="strict",
        action="store_false",
        help="for a run: leave out what cannot be read, and report it",
    )


def add_remove(commands: CommandGroup) -> None:
    """Add `remove`."""
    remove = commands.add_parser(
        "remove",
        help="remove a checkpoint, also of a run, or leftovers of killed saves",
        description="Remove a checkpoint: its weights, indexes and configs, and nothing else. What goes, with sizes, "
        "and what stays is listed before it asks. In a store, no save may run at the same time. Exit 0: removed, or "
        "no leftovers, 1: not removed, 2: bad usage.",
    )
    remove.set_defaults(needs_directory=False)
    remove.add_argument(
        "directory", metavar="PLACE", help=f"the directory of a checkpoint, a run or a run's checkpoint{OR_STORE}"
    )
    remove.add_argument("--step", type=int, metavar="N", help="for a run: the checkpoint of this step")
    add_variant(remove)
    remove.add_argument(
        "--leftovers", action="store_true", help="remove not a checkpoint, but what killed saves have left in PLACE"
    )
    remove.add_argument(
        "--unfinished",
        action="store_true",
        help="in a store: also objects of a newer save, which is running or was killed",
    )
    remove.add_argument("--dry-run", action="store_true", help="list what goes and what stays, and remove nothing")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    add_format(remove)


def _add_source_and_target(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(needs_directory=False)
    parser.add_argument("source", metavar="SRC", help=f"a directory, or one file of weights; {REPO}; or {STORE}")
    parser.add_argument("target", metavar="DST", help=f"the directory to write; if it is SRC: in place{OR_STORE}")
    parser.add_argument(
        "--max-shard-size", type=shard_size, default=DEFAULT_MAX_SHARD_SIZE, metavar="SIZE",
        help="maximum size of a file, such as 5GB or 500MiB (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--packing", choices=("greedy", "balanced"), default="greedy",
        help="greedy: in the order of the tensors (default); balanced: files of similar size, and fewer if possible",
    )  # fmt: skip
    parser.add_argument(
        "--checksum",
        choices=("sha256", "xxh3", "none"),
        default="sha256",
        help="checksum of the written files (default: %(default)s)",
    )
    add_variant(parser)
    add_key(parser)
    parser.add_argument("--revision", help="revision of SRC on a hub: branch, tag, commit or refs/pr/N (default: main)")
    parser.add_argument("--subfolder", default="", help="folder in SRC")
    parser.add_argument(
        "--local-files-only", action="store_true", help="read SRC on the Hub only from the cache, not from the network"
    )
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="also copy files outside the checkpoint that links next to the weights lead to; otherwise they are "
        "rejected",
    )
    parser.add_argument(
        "--drop-signature",
        action="store_true",
        help="remove DST's model.sig, which becomes stale; otherwise a signed checkpoint is rejected in place",
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


# Arguments of `hfshard run`.


def add_run(commands: CommandGroup) -> None:
    """Add `run`."""
    run = commands.add_parser(
        COMMAND,
        help="run a program unchanged, with hfshard enabled",
        usage="hfshard run [OPTIONS] SCRIPT | -m MODULE | -c CODE | COMMAND  [ARGUMENT ...]",
        description="Run a Python program, or a command such as torchrun, unchanged, with hfshard.install() in it and "
        "in the Python processes that it starts. What follows the options is passed to Python unchanged.",
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
    run.add_argument("--quiet", action="store_true", help="do not report on stderr that hfshard is enabled")
