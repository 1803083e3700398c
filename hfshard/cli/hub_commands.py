"""The commands that use a hub: push, pull, revisions."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from hfshard._util.text import format_size, printable
from hfshard.cli import shared_arguments
from hfshard.cli.output import print_json, print_message, print_text, short_hash, table


def add_push(commands: shared_arguments.CommandGroup) -> None:
    """Add `push`."""
    parser = commands.add_parser(
        "push",
        push,
        help="push a checkpoint to a hub as one commit, or to a store",
        description="Push a checkpoint from a directory or a store as one commit. Contents that the hub has are not "
        "sent, and old weights are removed. To a store, the checkpoint is copied as a save would write it.",
    )
    shared_arguments.add_directory(parser, "the checkpoint's directory")
    parser.add_argument(
        "repo_id", metavar="REPO", help=f"{shared_arguments.REPO}; or, without commits, {shared_arguments.STORE}"
    )
    parser.add_argument("--revision", help="the branch to push to, created if missing (default: main)")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of pushing to the branch")
    parser.add_argument("--path-in-repo", default="", help="folder in the repo")
    parser.add_argument("--message", "--commit-message", dest="commit_message", help="title of the commit")
    parser.add_argument(
        "--description", "--commit-description", dest="commit_description", help="description of the commit"
    )
    parser.add_argument("--private", action="store_true", default=None, help="make the repo private if it is new")
    parser.add_argument("--include", action="append", metavar="GLOB", help="push only these files; repeatable")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="exclude these files; repeatable")
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="also push files outside DIR that links lead to; otherwise they are rejected",
    )
    parser.add_argument(
        "--card-picture",
        action="store_true",
        help="show the checkpoint in the repo's README.md: a picture, drawn by an installed Chromium, and a table",
    )
    shared_arguments.add_token(parser)
    shared_arguments.add_format(parser)
    shared_arguments.add_no_progress(parser)


def push(arguments: argparse.Namespace) -> int:
    """Push a checkpoint, and print the address of its commit, or of its place in a store."""
    from hfshard.hub.push_files import PushOptions
    from hfshard.push import push_to_place

    options = PushOptions(
        commit_message=arguments.commit_message,
        commit_description=arguments.commit_description,
        private=arguments.private,
        token=arguments.token,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
        path_in_repo=arguments.path_in_repo,
        follow_links=arguments.follow_links,
        card_picture=arguments.card_picture,
        progress=arguments.progress,
    )
    result = push_to_place(
        arguments.directory,
        arguments.repo_id,
        options,
        allow_patterns=arguments.include,
        ignore_patterns=arguments.exclude,
    )
    if arguments.format == "json":
        print_json(asdict(result))
    elif result.is_new:
        print_text(printable(f"{result.pr_url or result.url}: {format_size(result.sent_bytes)} sent"))
    else:
        print_text(printable(f"{result.url}: already has everything; nothing was sent"))
    return 0


def add_pull(commands: shared_arguments.CommandGroup) -> None:
    """Add `pull`."""
    parser = commands.add_parser(
        "pull",
        pull,
        help="pull a checkpoint from a hub or a store, and check it",
        description="Pull a checkpoint into the cache, into a directory or to a store, check it, and print where it "
        "is. Existing files are not fetched again.",
    )
    parser.add_argument("repo_id", metavar="REPO", help=f"{shared_arguments.REPO}; or {shared_arguments.STORE}")
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help=f"the directory to write (default: huggingface_hub's cache){shared_arguments.OR_STORE}",
    )
    parser.add_argument("--revision", help="branch, tag, commit or refs/pr/N (default: main)")
    parser.add_argument("--subfolder", default="", help="folder in the repo")
    parser.add_argument(
        "--include", action="append", metavar="GLOB", help="besides the checkpoint, pull only these files; repeatable"
    )
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="exclude these files; repeatable")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace your files in DIR that have other contents; otherwise they are an error",
    )
    parser.add_argument(
        "--force-download", action="store_true", help="fetch again even what is cached, in case the cache is damaged"
    )
    parser.add_argument("--local-files-only", action="store_true", help="use only the cache, not the network")
    shared_arguments.add_verify_level(parser, "what to check, as in from_pretrained")
    shared_arguments.add_variant(parser)
    shared_arguments.add_token(parser)
    shared_arguments.add_format(parser)
    shared_arguments.add_no_progress(parser)


def pull(arguments: argparse.Namespace) -> int:
    """Pull a checkpoint, and print the directory or the address that it is in."""
    from hfshard.pull import pull_checkpoint

    directory = pull_checkpoint(
        arguments.repo_id,
        arguments.directory,
        revision=arguments.revision,
        variant=arguments.variant,
        subfolder=arguments.subfolder,
        token=arguments.token,
        local_files_only=arguments.local_files_only,
        force_download=arguments.force_download,
        allow_patterns=arguments.include,
        ignore_patterns=arguments.exclude,
        overwrite=arguments.force,
        verify=arguments.verify,
        progress=arguments.progress,
    )
    if arguments.format == "json":
        print_json({"directory": directory})
    else:
        print_text(printable(directory))
    return 0


def add_revisions(commands: shared_arguments.CommandGroup) -> None:
    """Add `revisions`."""
    parser = commands.add_parser(
        "revisions",
        revisions,
        help="list, tag or delete the revisions of a directory hub",
        description="Show the branches, tags and commits of a directory that serves as a hub.",
    )
    shared_arguments.add_directory(parser, "the directory that serves as a hub", takes_address=False)
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--delete", metavar="REV", help="delete a branch, a tag, or a commit that no branch or tag leads to"
    )
    change.add_argument("--tag", nargs=2, metavar=("NAME", "REV"), help="give a revision a permanent name")
    change.add_argument("--prune", action="store_true", help="delete every commit that no branch or tag leads to")
    parser.add_argument("--force", action="store_true", help="with --delete: also main")
    shared_arguments.add_format(parser)


def revisions(arguments: argparse.Namespace) -> int:
    """Show the revisions of a directory hub, after deleting, tagging or pruning if that is requested."""
    from hfshard.hub.directory.directory_hub import DirectoryHub

    hub = DirectoryHub.open(arguments.directory)
    freed = None
    if arguments.delete is not None:
        freed = hub.delete(arguments.delete, force=arguments.force)
    elif arguments.tag is not None:
        hub.tag(arguments.tag[0], arguments.tag[1])
    elif arguments.prune:
        freed = hub.prune()
    found = hub.revisions()
    for problem in dict.fromkeys(revision.problem for revision in found if revision.is_damaged):
        print_message(f"warning: {problem}")
    if arguments.format == "json":
        shown = [{**asdict(revision), "date": revision.date.isoformat()} for revision in found]
        print_json({"revisions": shown, "freed_bytes": freed})
        return 0
    rows = [
        [item.name if item.kind != "commit" else "", item.kind, short_hash(item.commit), format_size(item.size),
         f"{item.date:%Y-%m-%d %H:%M}", "(damaged)" if item.is_damaged else item.message]
        for item in found
    ]  # fmt: skip
    print_text(table(["name", "kind", "commit", ">size", "date", "message"], rows))
    if freed:
        print_text(f"\n{format_size(freed)} freed")
    return 0
