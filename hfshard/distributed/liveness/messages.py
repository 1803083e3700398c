"""What ranks write into the store: several values as one, and what went wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from hfshard._util.text import error_words, list_some
from hfshard.errors import RankFailedError, RankMissingError

_OUTCOME_UNKNOWN: Final = (
    "Nobody has told the outcome: what this call was to do is done as a whole, or not at all. Look what is there, by "
    "'hfshard verify'."
)

_SHOWN_RANKS: Final = 8
"""How many ranks a message lists."""


def with_unknown_outcome(words: str) -> str:
    """Words about a failure, and that what the ranks were about may be done nevertheless."""
    return words if _OUTCOME_UNKNOWN in words else f"{words} {_OUTCOME_UNKNOWN}"


def failure_record(error: BaseException, rank: int, *, may_be_done: bool = False) -> bytes:
    """What a rank tells the others about its failure; one that another rank caused is that rank's.

    Args:
        error: The failure.
        rank: Who tells it.
        may_be_done: Whether what the ranks are about may be done nevertheless.
    """
    record = {"kind": type(error).__name__, "rank": rank, "words": error_words(error)}
    record["may_be_done"] = may_be_done
    if isinstance(error, RankFailedError):
        record |= {"rank": error.rank, "words": str(error)}
    return json.dumps(record).encode()


def final_record(record: bytes) -> bytes:
    """What the leader makes of a record when it gives up: nothing comes after it."""
    return json.dumps(json.loads(record) | {"is_final": True}).encode()


def is_final(record: bytes) -> bool:
    """Whether the leader has given up, too."""
    return "is_final" in json.loads(record)


def told_error(record: bytes) -> RankFailedError:
    """The error to raise for what another rank has told."""
    told: Mapping[str, Any] = json.loads(record)
    if told["kind"] in ("RankFailedError", "RankMissingError"):
        kind = RankMissingError if told["kind"] == "RankMissingError" else RankFailedError
        return kind(told["words"], rank=told["rank"])
    said = told["words"].removesuffix(".")
    advice = "Call" if told["kind"] == "CheckpointChangedError" else "Mend that, and call"
    words = f"Rank {told['rank']} failed, so the other ranks gave up, too: {said}. {advice} again on every rank."
    return RankFailedError(with_unknown_outcome(words) if told["may_be_done"] else words, rank=told["rank"])


def death_error(rank: int, silent_seconds: float) -> RankFailedError:
    """The error to raise for a rank that is silent, for ever where its process has ended."""
    if silent_seconds == math.inf:
        words = f"Rank {rank} has given no sign of life: its process has ended."
        return RankFailedError(f"{words} Look at its output, and start the job again.", rank=rank)
    return RankFailedError(
        f"Rank {rank} has given no sign of life for {silent_seconds:.0f} s: it was killed, was stopped, or can't be "
        "reached. Look at its output, and start the job again.",
        rank=rank,
    )


def missing_word(rank: int, missing: Collection[int], place: str, seconds: float, patience_seconds: float) -> str:
    """What a rank that waits for others says meanwhile."""
    others = list_some(list(map(str, sorted(missing))), _SHOWN_RANKS)
    return (
        f"Rank {rank} has waited {seconds:.0f} s for rank {others} to make the same call, about {place!r}, "
        f"and gives up after {patience_seconds:g} s (as long as collectives wait: init_process_group(timeout=...)). "
        "Every rank has to call."
    )


def missing_error(door: Mapping[str, list[int]], place: str, patience_seconds: float) -> RankMissingError:
    """The error to raise on all ranks that have come where others are needed.

    Args:
        door: Which ranks are "absent", and of these "declined" or "dead".
        place: What the operation is about.
        patience_seconds: For how long they were waited for.
    """
    absent = sorted(door["absent"], key=lambda rank: (rank not in door["dead"], rank))
    why = f"did not come within {patience_seconds:g} s"
    if absent[0] in door["dead"]:
        why = "gave no sign of life before, and did not come"
    elif absent[0] in door["declined"]:
        why = "was called with is_main_process=False and without a part of a tensor"
    others = f", nor did rank {', '.join(map(str, absent[1:]))}" if absent[1:] else ""
    return RankMissingError(
        f"Rank {absent[0]} {why}{others}, and this call about {place!r} needs every rank. Make it on every rank, "
        "outside of `if rank == 0:`; or, of a model that only some ranks have, with process_group= of those.",
        rank=absent[0],
        path=place,
    )


def pack(values: Mapping[int, bytes]) -> bytes:
    """Numbered values as one: a line of JSON with their lengths, and then themselves."""
    head = json.dumps({number: len(value) for number, value in values.items()}).encode()
    return b"\n".join([head, b"".join(values.values())])


def unpack(packed: bytes) -> dict[int, bytes]:
    """What `pack` was given."""
    head, _, rest = packed.partition(b"\n")
    values = {}
    start = 0
    for number, length in json.loads(head).items():
        values[int(number)] = rest[start : start + length]
        start += length
    return values
