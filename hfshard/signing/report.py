"""What differs from what was signed, added to the report of a check."""

from __future__ import annotations

import os
from collections.abc import Collection, Set
from dataclasses import replace
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard._util.text import list_some
from hfshard.checkpoint.verifier import Problem, VerifyReport
from hfshard.constants import MAX_INDEX_BYTES, SIGNATURE_NAME, WEIGHTS_SUFFIXES
from hfshard.disk.safe_open import read_small
from hfshard.errors import HfshardError, InvalidArgumentError
from hfshard.format.digests import sha256_of
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import CheckpointIndex
from hfshard.signing.check import SignedPlace
from hfshard.signing.files import may_be_signed
from hfshard.signing.required import RequiredSignature
from hfshard.signing.signed_by import SignedBy

_SHOWN: Final = 5
"""Names in a message."""


def with_signature(
    report: VerifyReport, by: SignedBy, directory: str, subfolder: str = "", *, level: str, progress: bool | None
) -> VerifyReport:
    """Add to a report what is wrong with the signature of a directory, and which files differ from it.

    Shards whose recorded sha256 was compared with their bytes for the report are not read again.

    Args:
        report: Of the checkpoint there.
        by: Who must have signed.
        directory: With the subfolder.
        subfolder: The end of that path; see `RequiredSignature.find`.
        level: "full"; or "structure": weights are not read, only what is recorded of them is compared.
        progress: Whether to show a bar.
    """
    try:
        place = RequiredSignature(by).find_all(directory, subfolder)
        there = place.names_there(takes_debris=True)
        names, errors = place.compare_names(there)
        errors += filter(None, map(place.became_link, [SIGNATURE_NAME, *sorted(names)]))
        recorded = _recorded(place, names) if place.manifest.is_plain else {}
        damaged = {os.path.realpath(problem.file) for problem in report.problems}
        compared = {os.path.abspath(os.path.join(report.directory, name)) for name in report.files}
        known = {
            name: digest
            for name, digest in recorded.items()
            if level == "structure" or os.path.normpath(os.path.join(place.root, name)) in compared
            if os.path.realpath(os.path.join(place.root, name)) not in damaged
        }
        left = [name for name in sorted(names - known.keys()) if level == "full" or not name.endswith(WEIGHTS_SUFFIXES)]
        total = sum(os.path.getsize(os.path.join(place.root, name)) for name in left)
        with bytes_bar("Verifying", total, progress) as progress_callback:
            hashed = place.hashed(left, progress_callback)
        differing = {name for name in left if hashed[name][0] != place.manifest.digests[name]}
        if level == "full" and any(os.path.normpath(os.path.join(place.root, name)) in compared for name in differing):
            # What the report compared shards with may itself be forged, such as the manifest of a run's checkpoint.
            again = place.hashed(sorted(known))
            known = {name: found[name] for name, (found, _) in again.items()}
        differing |= {name for name, digest in known.items() if place.manifest.digests[name] != {name: digest}}
        errors += [place.differs(name) for name in sorted(differing)]
    except HfshardError as error:
        if isinstance(error, InvalidArgumentError):
            raise
        return with_problems(report, [error])
    unread = 0 if level == "full" else len(names) - len(left)
    warnings = [f"{unread} signed files of weights were not compared: level='full' reads them."] if unread else []
    warnings += left_out_warnings(place, {name for name in there if may_be_signed(name)})
    files = tuple(dict.fromkeys((*report.files, *sorted(names))))
    report = replace(report, files=files, warnings=(*report.warnings, *warnings))
    report = replace(with_problems(report, errors), checked_bytes=report.checked_bytes + total)
    return replace(report, signed_by=str(by)) if report.ok and not unread else report


def left_out_warnings(place: SignedPlace, there: Set[str]) -> list[str]:
    """Say which files nobody signed, on purpose."""
    left_out = place.left_out(there)
    if not left_out:
        return []
    return [
        f"{list_some(left_out, _SHOWN, quote=True)}: left out of the signature on purpose by who signed; no load takes "
        "such files."
    ]


def with_problems(report: VerifyReport, errors: Collection[HfshardError]) -> VerifyReport:
    """Add errors to the problems of a report."""
    found = [Problem(error.path or report.directory, None, error.message) for error in errors]
    return replace(report, problems=(*report.problems, *found))


def _recorded(place: SignedPlace, names: Collection[str]) -> dict[str, str]:
    """The sha256 of shards in the indexes that are as they were signed."""
    found: dict[str, str] = {}
    for name in names:
        if not INDEX_FILE.fullmatch(name):
            continue
        raw, _ = read_small(os.path.join(place.root, name), place.root, MAX_INDEX_BYTES)
        if place.manifest.digests[name] != {name: sha256_of(raw)}:
            continue
        folder = os.path.dirname(name)
        for shard, digest in CheckpointIndex.from_json(raw, name).files.items():
            path = os.path.join(folder, shard)
            if digest.sha256 is not None and path in names and not path.endswith(".json"):
                found[path] = digest.sha256
    return found
