"""Arguments of the commands that take checkpoints from one place to another."""

from __future__ import annotations

from hfshard.cli.arguments.groups import CommandGroup
from hfshard.cli.arguments.shared import (
    OR_STORE,
    REPO,
    STORE,
    add_directory,
    add_format,
    add_no_progress,
    add_token,
    add_variant,
)


def add_push(commands: CommandGroup) -> None:
    """Add `push`."""
    push = commands.add_parser(
        "push",
        help="a checkpoint to a hub as one commit, or to a store",
        description="Push a directory, or what a store holds, as one commit: what the hub has is not sent, and old "
        "weights are removed. To a store, the checkpoint is copied as a save puts it there.",
    )
    add_directory(push, "the checkpoint's directory")
    push.add_argument("repo_id", metavar="REPO", help=f"{REPO}; or, without commits, {STORE}")
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
    add_token(push)
    add_format(push)
    add_no_progress(push)


def add_pull(commands: CommandGroup) -> None:
    """Add `pull`."""
    pull = commands.add_parser(
        "pull",
        help="a checkpoint from a hub or a store, and check it",
        description="Pull a checkpoint into the cache, into a directory or to a store, check it, and print where it is."
        " What is there already is not fetched again.",
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
    pull.add_argument("--subfolder", default="", help="folder of the repo")
    pull.add_argument("--include", action="append", metavar="GLOB", help="pull only these files; may be repeated")
    pull.add_argument("--exclude", action="append", metavar="GLOB", help="leave these files out; may be repeated")
    pull.add_argument(
        "--force", action="store_true", help="replace files of yours in DIR that have other contents, else refused"
    )
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
    add_variant(pull)
    add_token(pull)
    add_format(pull)
    add_no_progress(pull)


def add_revisions(commands: CommandGroup) -> None:
    """Add `revisions`."""
    revisions = commands.add_parser(
        "revisions",
        help="list, tag or delete what a directory hub keeps",
        description="Show the branches, tags and commits of a directory that serves as a hub.",
    )
    add_directory(revisions, "the directory that serves as a hub", takes_address=False)
    change = revisions.add_mutually_exclusive_group()
    change.add_argument("--delete", metavar="REV", help="delete a branch, a tag, or a commit that none leads to")
    change.add_argument("--tag", nargs=2, metavar=("NAME", "REV"), help="give a revision a name that stays")
    change.add_argument("--prune", action="store_true", help="delete every commit that no branch or tag leads to")
    revisions.add_argument("--force", action="store_true", help="with --delete: main too")
    add_format(revisions)
