"""The mutants: plausible bugs, one for each of seventy-six guarantees, and the tests that should fail with each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    name: str
    meaning: str
    """The guarantee that it breaks, in a line."""
    old: str
    """Text that occurs once in the package, wherever it is moved."""
    new: str
    """The same with the bug."""
    tests: tuple[str, ...]
    """Files of tests, or node ids, that should notice it: the likeliest first."""


MUTANTS: Final = (
    # _util
    Mutant(
        "interrupt-not-delayed",
        "Ctrl-C is held back while the steps of a commit run",
        "    signal.signal(signal.SIGINT, lambda _signum, frame: interrupts.append(frame))",
        "    signal.signal(signal.SIGINT, signal.default_int_handler)",
        (
            "tests/saving/test_pipeline_to_store.py::test_ctrl_c_before_the_index_leaves_the_old_checkpoint_and_after_it_the_rest_is_done",
        ),
    ),
    Mutant(
        "size-zero",
        "a limit of zero bytes is refused",
        "    if size_bytes <= 0:",
        "    if size_bytes < 0:",
        ("tests/_util/test_arguments.py",),
    ),
    # disk
    Mutant(
        "no-fsync",
        "what is flushed reaches the disk",
        "    os.fsync(fd)",
        "    os.fstat(fd)",
        ("tests/sweeps/test_power.py::test_every_save_flushes_bytes_before_names_and_names_before_removals",),
    ),
    Mutant(
        "last-block-lost",
        "the end of a file that is written past the page cache is written too, however short it is",
        "        if whole < len(last):  # the end of the file",
        "        if 0 < whole < len(last):  # the end of the file",
        ("tests/disk/test_direct_io.py",),
    ),
    Mutant(
        "sibling-folder-is-inside",
        "a link to a folder whose name only begins like the checkpoint's leads outside",
        '    return real == real_root or real.startswith(real_root.rstrip("/") + "/")',
        '    return real == real_root or real.startswith(real_root.rstrip("/"))',
        ("tests/disk/test_safe_open.py", "tests/attacks/test_links.py"),
    ),
    # tensors
    Mutant(
        "tied-whatever-strides",
        "tensors of one memory that are seen in different orders are not tied",
        "        tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1),\n",
        "",
        ("tests/tensors/test_tied.py",),
    ),
    Mutant(
        "negated-bytes",
        "a tensor that is negated by a bit of its view is saved with the values that it shows",
        "    if tensor.is_conj() or tensor.is_neg() or tensor.dtype in COMPLEX_AS_REAL_DTYPES:",
        "    if tensor.is_conj() or tensor.dtype in COMPLEX_AS_REAL_DTYPES:",
        ("tests/tensors/test_stored_tensor.py",),
    ),
    Mutant(
        "unexpected-names-pass",
        "a strict load refuses a checkpoint that has more tensors than the model",
        "        if not (nothing or self.mismatched or (strict and (self.missing or self.unexpected))):",
        "        if not (nothing or self.mismatched or (strict and self.missing)):",
        ("tests/test_load.py",),
    ),
    # format
    Mutant(
        "gap-in-data",
        "a header whose tensors leave bytes between them is refused",
        "        if info.begin != at:",
        "        if info.begin < at:",
        ("tests/format/test_header.py",),
    ),
    Mutant(
        "drive-in-a-name",
        "an index cannot name a file on another drive",
        '    return "\\\\" not in name and ":" not in name and _NO_NAMES',
        '    return "\\\\" not in name and _NO_NAMES',
        ("tests/format/test_file_names.py", "tests/format/test_index.py"),
    ),
    Mutant(
        "late-index-is-a-save",
        "a lone index that arrives after its objects were deleted is no finished save",
        "if counts[one] > 1}",
        "if counts[one] >= 1}",
        (
            "tests/stores/runs/test_faults.py::test_a_manifest_that_comes_when_its_shards_are_deleted_is_no_checkpoint",
            "tests/stores/runs/test_faults.py",
        ),
    ),
    # checkpoint
    Mutant(
        "total-size-too-small",
        "an index whose total size is not that of its shards is damaged",
        "    if index.files and index.total_size is not None and index.total_size != actual:",
        "    if index.files and index.total_size is not None and index.total_size > actual:",
        ("tests/checkpoint/test_check_files.py",),
    ),
    Mutant(
        "tensor-in-another-shard",
        "a shard of another save, with a tensor that the index lists elsewhere, is not loaded",
        "            if name not in seen and weight_map.get(name) == file:",
        "            if name not in seen and name in weight_map:",
        ("tests/checkpoint/test_check_files.py",),
    ),
    Mutant(
        "edited-config-is-intact",
        "a full verification reports a config.json that was changed",
        '            if isinstance(error, IntegrityError) and self.level != "full":',
        "            if isinstance(error, IntegrityError):",
        ("tests/checkpoint/test_verifier.py", "tests/test_verify.py", "tests/cli/test_check_commands.py"),
    ),
    # shards
    Mutant(
        "xxh3-not-compared",
        "contents are compared with the checksum that was recorded, of either kind",
        "            if found != expected:",
        '            if found != expected and kind == "sha256":',
        ("tests/test_verify.py", "tests/checkpoint/test_verifier.py", "tests/flows/test_whole_systems.py"),
    ),
    Mutant(
        "shard-at-the-limit",
        "a shard may have exactly as many bytes as the limit",
        "file_bytes <= self.max_shard_bytes",
        "file_bytes < self.max_shard_bytes",
        ("tests/shards/test_shard_plan.py", "tests/flows/test_whole_properties.py"),
    ),
    Mutant(
        "shard-not-flushed",
        "a shard is on disk before its name is",
        "            write_all(fd, header)\n        copy_mode(fd, job.like)\n        sync(fd, job.path)\n",
        "            write_all(fd, header)\n        copy_mode(fd, job.like)\n",
        ("tests/sweeps/test_power.py::test_every_save_flushes_bytes_before_names_and_names_before_removals",),
    ),
    Mutant(
        "range-not-compared",
        "a tensor that is read by ranges is compared with its digest at every level but none",
        "            if digest.is_whole and digest.hexdigest() != self._expected[name]:",
        "            if self._is_full and digest.is_whole and digest.hexdigest() != self._expected[name]:",
        ("tests/shards/test_ranged_shard.py",),
    ),
    # commit
    Mutant(
        "names-not-flushed",
        "the names of a step are on disk before the next step begins",
        "            self.changed_folders.clear()\n            fsops.sync_directory(self.directory)\n",
        "            self.changed_folders.clear()\n",
        ("tests/sweeps/test_power.py::test_every_save_flushes_bytes_before_names_and_names_before_removals",),
    ),
    Mutant(
        "index-with-its-shards",
        "shards are durable before the index that names them",
        "    plan.rename(new.shards)\n    plan.sync()\n\n    # Commit: the index.",
        "    plan.rename(new.shards)\n\n    # Commit: the index.",
        ("tests/commit/test_commit_plan.py", "tests/commit/test_commit_plan_guide.py"),
    ),
    Mutant(
        "stale-shards-stay",
        "shards of another program that a killed save was to delete are deleted by the next one",
        "            if name in noted\n            or names.is_renamed_shard(name)",
        "            if names.is_renamed_shard(name)",
        ("tests/commit/test_directory_state.py",),
    ),
    Mutant(
        "stale-shards-before-the-commit",
        "shards that a save is to delete stay if it is killed before its commit",
        '            if step.kind == "rename":\n                decisive = step.source',
        '            if step.kind == "rename" and not decisive:\n                decisive = step.source',
        (
            "tests/commit/test_directory_commit.py::test_shards_that_a_save_is_to_delete_stay_if_it_is_killed_before_its_commit",
        ),
    ),
    Mutant(
        "damaged-file-is-linked",
        "a file that was damaged on disk is not linked into the next checkpoint",
        "            shard.check_contents(file.digest)  # also on disk",
        "            shard.check_size_and_fingerprint(file.digest, with_fingerprint=True)  # also on disk",
        ("tests/commit/test_transaction.py",),
    ),
    Mutant(
        "undone-without-flushes",
        "what a rollback puts back is on disk before it removes what was in its place",
        "            return self._flush  # what",
        "            return lambda: None  # what",
        (
            "tests/places/test_fetch.py::test_a_pull_that_is_undone_flushes_what_it_puts_back_before_it_removes_what_replaced_it",
        ),
    ),
    Mutant(
        "undone-where-a-cut-may-redo",
        "a rollback leaves the shards of an index that a power cut may bring back",
        "            if last.moves and not self._flush():",
        "            if last.moves and self._flush() is None:",
        (
            "tests/commit/test_directory_commit.py::test_shards_stay_where_a_power_cut_may_bring_back_the_index_that_names_them",
        ),
    ),
    Mutant(
        "undone-past-a-lost-file",
        "a rollback that cannot restore a file leaves what the file in its place needs",
        "                if moved or last.is_restoring:",
        "                if moved:",
        (
            "tests/places/test_fetch.py::test_a_pull_that_cannot_restore_the_old_index_keeps_the_shards_that_the_new_one_names",
        ),
    ),
    Mutant(
        "folder-before-the-commit",
        "a file in a folder is replaced after the commit, like any other",
        "        return os.path.lexists(_at(self.directory, name))",
        "        return name in self.listing",
        ("tests/commit/test_commit_plan.py::test_a_file_in_a_folder_is_replaced_after_the_commit_like_any_other",),
    ),
    Mutant(
        "neither-copied-nor-sent",
        "a shard that a store does not copy is sent",
        "            except (CheckpointChangedError, StoreError) as error:  # replaced",
        "            except CheckpointChangedError as error:  # replaced",
        ("tests/stores/saving/test_late_and_lost.py::test_a_shard_that_can_not_be_copied_is_sent",),
    ),
    Mutant(
        "copy-replaced-meanwhile",
        "a plain copy that is replaced while it is compared is put again",
        "store.read(found)) == raw\n    except CheckpointChangedError:\n        return False",
        "store.read(found)) == raw\n    except CheckpointChangedError:\n        return True",
        (
            "tests/stores/saving/test_late_and_lost.py::test_a_plain_copy_that_is_replaced_while_it_is_compared_is_put_again",
        ),
    ),
    # pickles
    Mutant(
        "zip-records-overlap",
        "a zip whose records overlap is refused",
        "            if record.header_offset + used > end:",
        "            if record.header_offset > end:",
        ("tests/pickles/test_pickle_zip.py",),
    ),
    Mutant(
        "zip-name-in-capitals",
        "a zip with two records whose names differ in their case alone is refused, as torch takes them for one",
        "        if len({_name(record) for record in records}) != len(records):",
        "        if len({record.filename for record in records}) != len(records):",
        ("tests/pickles/test_pickle_zip.py",),
    ),
    # stores
    Mutant(
        "budget-exceeded-by-one",
        "parts that are uploaded together stay within the memory that is allowed",
        "        return sum(count for count, _ in taken) + nbytes > limit_bytes",
        "        return sum(count for count, _ in taken) > limit_bytes",
        ("tests/stores/test_byte_budget.py", "tests/stores/test_object_store_parts.py"),
    ),
    Mutant(
        "short-token-is-shown",
        "messages show no part of a short token",
        "if len(token) >= _SHOWN_FROM else",
        "if token else",
        ("tests/stores/test_hub_calls.py", "tests/hub/test_http_client.py"),
    ),
    Mutant(
        "copy-under-another-key",
        "a copy in S3 is encrypted as what is put there",
        "                **encryption.of_object,\n                **encryption.of_source,",
        "                **encryption.of_source,",
        ("tests/stores/test_object_store.py::test_a_copy_is_encrypted_as_what_is_put",),
    ),
    Mutant(
        "unknown-index-refused",
        "an index that a bucket may have given its name is not called refused",
        "            error.may_be_done = True  # hug",
        "            error.may_be_done = isinstance(error, StoreConnectionError)  # hug",
        (
            "tests/stores/saving/test_late_and_lost.py::test_an_index_that_may_have_a_name_in_a_bucket_is_not_called_refused",
        ),
    ),
    # hub
    Mutant(
        "one-retry-less",
        "a download is tried again as often as documented",
        "        if self._attempts is not None and self.failures + 1 >= self._attempts:",
        "        if self._attempts is not None and self.failures + 2 >= self._attempts:",
        ("tests/hub/pull/test_faults.py::test_what_keeps_failing_is_given_up_and_what_came_is_kept",),
    ),
    Mutant(
        "stale-file-on-the-hub",
        "a push that only deletes files of the old checkpoint is made",
        "        return not self.adds and not self.deletes",
        "        return not self.adds",
        (
            "tests/hub/test_push_files.py",
            "tests/hub/push/test_push.py::test_push_clears_what_the_old_index_names_whatever_it_is_called",
            "tests/hub/push/test_push.py",
        ),
    ),
    # hub/directory
    Mutant(
        "manifest-of-another-commit",
        "the manifest of a commit in a directory hub has the commit's hash",
        "    if (actual := commit_id(raw)) != commit:",
        "    if (actual := commit_id(raw)) != commit and not raw:",
        ("tests/hub/directory/test_commit_graph.py", "tests/hub/directory/test_directory_hub.py"),
    ),
    Mutant(
        "stale-parent",
        "a commit is refused if its branch has moved on",
        "    if current != parent and (current is not None or ",
        "    if current is None and parent is not None and (",
        ("tests/hub/directory/test_directory_hub.py", "tests/hub/directory/test_hub_writer_processes.py"),
    ),
    # places
    Mutant(
        "pull-over-a-checkpoint",
        "a pull never replaces shards that a checkpoint in the target needs",
        "    old = [name for name in taken if name not in strays]",
        "    old = [name for name in taken if name not in strays and (not overwrite or _can_rename(session, taken))]",
        ("tests/places/test_fetch.py", "tests/test_pull.py", "tests/hub/pull/test_directories.py"),
    ),
    Mutant(
        "old-code-of-a-store",
        "a model's code that was replaced in a store is read again",
        "            if self._written.get(name) != raw:",
        "            if name not in self._written:",
        ("tests/places/test_store_mirror.py",),
    ),
    Mutant(
        "late-stray-replaced",
        "a pull without overwrite leaves a shard that came since it looked for such files",
        "    if (strays and not overwrite) or (old and",
        "    if (old and",
        ("tests/places/test_fetch.py::test_a_shard_that_comes_between_the_checks_of_a_pull_stays",),
    ),
    Mutant(
        "outranked-by-others",
        "a pull of files that are all there removes other weights that readers prefer to them",
        "        if not has_others and all(_has_same_bytes",
        "        if all(_has_same_bytes",
        ("tests/places/test_fetch.py::test_a_pull_of_what_is_there_removes_the_weights_that_outrank_it",),
    ),
    # signing
    Mutant(
        "pickles-not-signed",
        "pickled weights are compared with the signature",
        "        if digests != self.manifest.digests[name] or seen[:-1] != file.identity:",
        "        if seen[:-1] != file.identity:",
        (
            "tests/signing/test_check_signature_load.py::test_pickled_weights_that_are_not_those_that_were_signed_are_refused",
            "tests/signing/test_check_signature_load.py",
        ),
    ),
    Mutant(
        "signed-file-outside",
        "a signature cannot name a file above the checkpoint",
        '        if name.startswith("/") or ".." in name.split("/"):',
        '        if name.startswith("/"):',
        ("tests/signing/test_model_signing.py", "tests/signing/test_check_signature_hostile.py"),
    ),
    Mutant(
        "weights-of-code-not-signed",
        "weights in subfolders, which a model's code may read, must be signed",
        "        return not is_own and (has_code or (not folders and last.endswith(_READ_WEIGHTS)))",
        "        return not is_own and not folders and last.endswith(_READ_WEIGHTS)",
        (
            "tests/signing/test_check_signature_models.py",
            "tests/signing/test_check_signature_hostile.py",
            "tests/stores/suite/test_signatures.py",
        ),
    ),
    # saving
    Mutant(
        "overtaken-unnoticed",
        "a save that another process has overtaken in a store says so",
        "                if highest > self._objects.save_id:",
        "                if highest < self._objects.save_id:",
        (
            "tests/commit/test_store_commit_writers.py",
            "tests/commit/test_store_commit_overlaps.py",
        ),
    ),
    Mutant(
        "readme-replaced",
        "a copy does not replace the user's README in the target",
        "            replaces_readme=first.replaces_readme,",
        "            replaces_readme=not first.replaces_readme,",
        ("tests/saving/test_resharding.py", "tests/saving/test_copy_checkpoint.py", "tests/test_reshard.py"),
    ),
    # removal
    Mutant(
        "index-before-shards",
        "a removal takes the index last, so that no reader takes the last shard for the checkpoint",
        "    return 6 if INDEX_FILE.fullmatch(name) else OTHER_FILES",
        "    return 2 if INDEX_FILE.fullmatch(name) else OTHER_FILES",
        ("tests/commit/test_removal_plan.py", "tests/commit/test_removal.py"),
    ),
    Mutant(
        "removal-of-other-contents",
        "nothing is removed if a file was replaced after it was listed",
        "        if now.found != self.found:",
        "        if now.found.keys() != self.found.keys():",
        ("tests/commit/test_removal_plan.py",),
    ),
    # distributed
    Mutant(
        "overlapping-chunks",
        "chunks of a tensor that overlap are refused",
        "if missing < 0 or _do_overlap(shape, parts) else None",
        "if missing < 0 else None",
        ("tests/distributed/test_dcp_chunks.py",),
    ),
    Mutant(
        "uneven-chunks",
        "a dimension that the ranks do not divide evenly is split as torch.chunk does",
        "    length = -(-size // parts)",
        "    length = size // parts",
        ("tests/distributed/test_layout.py", "tests/distributed/test_spread_tensor.py"),
    ),
    Mutant(
        "rank-at-another-call",
        "ranks that make different calls are told so",
        "            if said[0].decode() not in (name, ANY_PLACE) and name != ANY_PLACE:",
        "            if not said[0].decode():",
        ("tests/distributed/test_rendezvous_status.py::test_ranks_hear_each_other_and_who_failed",),
    ),
    # models
    Mutant(
        "tie-dropped",
        "the names that a model ties are recorded",
        "    return {name: value for name, value in saved.items() if name not in ties}, ties",
        "    return {name: value for name, value in saved.items() if name not in ties}, {}",
        ("tests/models/test_model_builder_checks.py::test_a_tie_is_kept_with_and_without_the_head",),
    ),
    Mutant(
        "nothing-fits",
        "a checkpoint of which no tensor fits the model is refused",
        "        if (self.options.strict and differs) or (nothing and not self.options.is_lenient):",
        "        if self.options.strict and differs:",
        (
            "tests/models/test_model_builder_directories.py",
            "tests/models/test_model_builder_checks.py",
        ),
    ),
    # training
    Mutant(
        "rotation-keeps-one-less",
        "as many checkpoints stay as were asked for",
        "counted[: -self.max_to_keep]",
        "counted[: len(counted) + 1 - self.max_to_keep]",
        ("tests/training/test_manager_rotation.py",),
    ),
    Mutant(
        "manifest-without-checksum",
        "a manifest of a run whose checksum is missing is damaged",
        "        if checksum != _checksum_of(body):",
        "        if checksum is not None and checksum != _checksum_of(body):",
        ("tests/training/run/test_manifest.py", "tests/training/run/test_run_storage.py"),
    ),
    Mutant(
        "removed-while-pushed",
        "rotation leaves a checkpoint that is being pushed",
        "for one in self._rotation(own) if one.step not in in_use])",
        "for one in self._rotation(own)])",
        (
            "tests/training/run/test_push_run_directory_hubs.py::test_saves_go_on_beside_a_push_and_the_newest_is_pushed_next",
            "tests/training/run/test_push_run.py::test_saves_are_pushed_as_they_are_made",
            "tests/training/run/test_run_writer.py",
        ),
    ),
    Mutant(
        "device-state-misplaced",
        "the random state of the process's own device goes to its device of now, and to no other",
        "if number not in {*places, *taken}}",
        "if number not in taken}",
        ("tests/training/state/test_rng.py",),
    ),
    Mutant(
        "optimizer-dtype-lost",
        "an optimizer's state keeps the dtype in which it was saved",
        "                slots = exact(optimizer.state[parameter], kept, held.get(parameter))",
        "                slots = optimizer.state[parameter]",
        ("tests/training/state/test_optimizer_tensors.py",),
    ),
    Mutant(
        "last-full-batch-lost",
        "drop_last leaves out only a batch that is not full",
        "    ends = range((start + 1) * size, len(order) + (1 if drop_last else size), size)",
        "    ends = range((start + 1) * size, len(order) + (0 if drop_last else size), size)",
        ("tests/training/data/test_sampling.py",),
    ),
    Mutant(
        "ambiguous-owners",
        "an optimizer's states are given to no parameters if several assignments fit",
        "    if first != last[::-1]:",
        "    if len(first) != len(last):",
        (
            "tests/training/interop/test_foreign_optimizer_orders.py",
            "tests/training/interop/test_resume_foreign.py",
            "tests/training/interop/test_convert_run.py",
        ),
    ),
    Mutant(
        "weights-changed-before-backward",
        "a recomputation with weights that were changed since the forward pass is refused",
        "            if version_of(tensor) != version:",
        "            if version is None:",
        (
            "tests/training/test_gradient_checkpointing_recomputation.py",
            "tests/training/test_gradient_checkpointing.py",
        ),
    ),
    Mutant(
        "seeds-of-fewer-ranks",
        "ranks that are fewer than before are seeded anew, not given some of the old states",
        "    if saved_ranks == session.world_size:",
        "    if saved_ranks >= session.world_size:",
        ("tests/training/test_run_ranks.py::test_another_number_of_ranks_is_seeded_anew_the_same_way_each_time",),
    ),
    Mutant(
        "save-before-the-epoch-ends",
        "a save of the Trainer at an epoch's last step comes after the epoch",
        "        if control.should_save and state.epoch == int(state.epoch):",
        "        if control.should_save and state.epoch > int(state.epoch):",
        (
            "tests/flows/test_resume.py::test_a_killed_run_resumes_to_the_bit"
            "[Trainer: at an epoch's last step, evaluated after it]",
        ),
    ),
    Mutant(
        "optimizers-compared-by-shape",
        "each rank gets its own optimizer back where the values in the ranks' optimizers differ",
        "        return samples\n    size = flat",
        "        return samples[:0]\n    size = flat",
        (
            "tests/training/test_run_ranks_replicas_on_ranks.py::test_momentum_of_the_same_parameters_comes_back_on_each_rank_as_it_was",
        ),
    ),
    Mutant(
        "optimizer-of-another-rank",
        "ranks of another number take no optimizer that was one rank's own",
        "    return set() if is_same_number else optimizers",
        "    return set()",
        (
            "tests/training/test_run_ranks_replicas_on_ranks.py::test_optimizers_that_differ_come_back_on_each_rank_and_nowhere_else",
        ),
    ),
    Mutant(
        "batches-in-another-order",
        "a loader of torchdata with a plain sampler of batches resumes in its order",
        "    if isinstance(iterator._sampler_iter, itertools.islice):",
        "    if isinstance(iterator._sampler_iter, list):",
        ("tests/training/data/test_external_loader.py::test_a_resume_from_every_place_is_exact",),
    ),
    Mutant(
        "end-of-other-samplers",
        "a resume looks for the end of torchdata's own samplers, and of no other",
        '    if _is_torchdata(used) and hasattr(used, "sampler_iter") and used.samples_yielded % used.batch_size:',
        '    if getattr(used, "samples_yielded", 0) % getattr(used, "batch_size", 1):',
        ("tests/training/data/test_external_loader.py::test_a_resume_from_every_place_is_exact",),
    ),
    # viewing
    Mutant(
        "digests-trusted",
        "a comparison that is to read everything relies on no digest",
        "        options.trust_digests and (a.places & b.places or (has_digests and a.digest == b.digest))",
        "        a.places & b.places or (has_digests and a.digest == b.digest)",
        (
            "tests/viewing/test_diff_checkpoints_places.py::test_digests_that_lie_are_found_by_full",
            "tests/viewing/test_diff_checkpoints_places.py",
        ),
    ),
    Mutant(
        "damaged-is-the-latest",
        "the latest checkpoint of a run is the last one that is intact",
        "    whole = [one.manifest for one in found if one.manifest is not None and not problems[one.path]]",
        "    whole = [one.manifest for one in found if one.manifest is not None]",
        (
            "tests/cli/test_rewrite_commands.py::test_damaged_byte_is_shown_by_verification_and_is_one",
            "tests/viewing/test_run_listing.py",
        ),
    ),
    # cli
    Mutant(
        "verify-exits-with-zero",
        "the command line reports a damaged checkpoint by its exit code",
        "    return 0 if report.ok else 1",
        "    return 0 if report.files else 1",
        ("tests/cli/test_check_commands.py",),
    ),
    Mutant(
        "dashes-go-to-the-program",
        "the two dashes that end hfshard's own options are no word of the program",
        "            return list(words[:end]), list(words[end + 1 :])",
        "            return list(words[:end]), list(words[end:])",
        ("tests/cli/test_run_command.py", "tests/cli/test_main.py"),
    ),
    # top
    Mutant(
        "dry-run-removes",
        "a dry run removes nothing",
        "    if not dry_run:\n        removal.carry_out()",
        "    if not removal.report.is_empty:\n        removal.carry_out()",
        ("tests/test_remove.py", "tests/commit/test_removal.py"),
    ),
    Mutant(
        "signature-ignored-by-ranges",
        "reading ranges with a required signature is refused, not done without it",
        "    if ranges and signature is not None:",
        "    if ranges and signature is not None and key is not None:",
        ("tests/signing/test_check_signature_load.py", "tests/test_load.py"),
    ),
    # foreign
    Mutant(
        "missing-part-unnoticed",
        "each byte of a tensor that another framework saved in parts has a place in its files",
        '    return None if found == nbytes else f"has {found:,} of its {nbytes:,} bytes"',
        '    return None if found <= nbytes else f"has {found:,} of its {nbytes:,} bytes"',
        ("tests/foreign/test_byte_runs.py",),
    ),
)
