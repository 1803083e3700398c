"""The parser of the whole command line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hfshard._util.text import without_url_secrets
from hfshard.cli.arguments.checking import add_sign, add_verify
from hfshard.cli.arguments.groups import Commands
from hfshard.cli.arguments.looking import add_checkpoints, add_diff, add_inspect, add_show
from hfshard.cli.arguments.moving import add_pull, add_push, add_revisions
from hfshard.cli.arguments.rewriting import add_convert, add_remove, add_reshard
from hfshard.cli.arguments.running import add_run
from hfshard.cli.output import printable
from hfshard.constants import VERSION


class _Parser(argparse.ArgumentParser):
    """Shows an argument that it refuses without the passwords and the control characters in it; so do its commands'."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(without_url_secrets(message)))


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; each command stands in one group of its help."""
    parser = _Parser(
        prog="hfshard",
        usage="hfshard [-h] [--version] COMMAND ...",
        epilog="`hfshard COMMAND --help` shows the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hfshard {VERSION}")
    commands = Commands(parser)
    look = commands.group("look")
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
    parser.description = f"Sharded checkpoints: look at them, check, move and rewrite them.\n\n{commands.show()}"
    return parser
