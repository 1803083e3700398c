"""Saves into a directory: plan, write, index, commit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from hfshard._util.addresses import is_address
from hfshard._util.arguments import absolute_path
from hfshard._util.progress import bytes_bar
from hfshard.commit.commit_plan import plan_commit
from hfshard.commit.directory_commit import save_session
from hfshard.commit.transaction import OwnShardWriter, ShardWriter
from hfshard.format.index import CheckpointIndex
from hfshard.saving.prepare import avoid_taken_names, needs_new_names, plan_request, with_free_names, write_staged
from hfshard.saving.request import SaveRequest
from hfshard.saving.to_store import save_to_store
from hfshard.shards.shard_plan import with_one_more_shard
from hfshard.shards.write_shards import writer_threads

logger = logging.getLogger(__name__)


def save_request(
    request: SaveRequest,
    save_directory: str | os.PathLike[str],
    check: Callable[[], None] = lambda: None,
    writer: ShardWriter | None = None,
) -> CheckpointIndex:
    """Save what a request holds, durably and all or nothing.

    Args:
        request: What to save, and how.
        save_directory: Made when it is missing; or the address of a place in a store (see `save_to_store`).
        check: Called when the directory is locked, and just before the commit.
        writer: Writes the files; None: this process does.

    Raises:
        Everything that `hfshard.save_state_dict` raises.
    """
    directory = absolute_path(save_directory, "save_directory")
    if is_address(directory):
        return save_to_store(request, directory, check, writer)
    names = request.options.names
    writer = writer or OwnShardWriter()
    writer_threads()  # raises where the environment asks for more than there is
    plan = plan_request(request)
    with save_session(directory, names) as session:
        session.drops_signature = request.options.drop_signature
        check()
        plan = with_free_names(plan, session, request, writer)
        need_bytes = plan.total_size + sum(file.size for file in request.companion_files.values())
        session.make_folders({*request.companion_files, *request.small_files})
        session.check_space(need_bytes)
        with bytes_bar("Saving", need_bytes, request.options.progress) as progress_callback:
            new, index = write_staged(plan, session, request, writer, progress_callback)
            if needs_new_names(plan, new, index, session):
                session.empty_staging()
                plan = avoid_taken_names(with_one_more_shard(plan, names), session, names)
                new, index = write_staged(plan, session, request, writer, None)
        check()
        writer.confirm()
        session.commit(plan_commit(session.state, new))
    logger.info("Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), plan.total_size, directory)
    return index
