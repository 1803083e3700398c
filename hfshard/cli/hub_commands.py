"""The commands that use a hub: push, pull, revisions."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from hfshard._util.text import format_size
from hfshard.cli.output import print_json, print_message, print_text, printable, short_hash, table
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.push_files import PushOptions
from hfshard.pull import pull_checkpoint
from hfshard.push import push_to_place


def push(arguments: argparse.Namespace) -> int:
    """Push a checkpoint, and print the address of its commit, or of its place in a store."""
    options = PushOptions(
        commit_message=arguments.commit_message,
        commit_description=arguments.commit_description,
        private=arguments.private,
        token=arguments.token,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
        path_in_repo=arguments.path_in_repo,
        follow_links=arguments.follow_links,
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


def pull(arguments: argparse.Namespace) -> int:
    """Pull a checkpoint, and print the directory or the address that it is in."""
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


def revisions(arguments: argparse.Namespace) -> int:
    """Show the revisions of a directory hub, after deleting, tagging or pruning if that is requested."""
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
