"""What work takes of memory beyond what was there before."""

from __future__ import annotations

import threading
from collections.abc import Callable

KIB = 1024
MIB = 1024 * KIB


def anonymous_bytes() -> int:
    """Memory that no file stands behind, private or shared."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * KIB for line in status if line.startswith(("RssAnon", "RssShmem")))


def resident_bytes() -> int:
    """All memory of the process, the pages of mapped files that it touched included."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * KIB for line in status if line.startswith("VmRSS"))


def file_mapped_at(address: int) -> str:
    """The path of the file that this process has mapped there; empty if its memory is its own."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, *_, path = line.rstrip("\n").split(" ", 5)
            begin, end = (int(bound, 16) for bound in span.split("-"))
            if begin <= address < end:
                return path.strip() if "/" in path else ""  # else it is "[heap]", or has no name
    return ""


def peak_during(action: Callable[[], object], measure: Callable[[], int] = anonymous_bytes) -> int:
    """The most memory above that of before, sampled each millisecond."""
    highest, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.001):
            highest = max(highest, measure())

    before = measure()
    thread = threading.Thread(target=watch)
    thread.start()
    action()
    highest = max(highest, measure())
    stop.set()
    thread.join()
    return highest - before
