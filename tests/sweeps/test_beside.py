"""Writers that race in processes of their own, and a reader beside a writer of many saves: never a mixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.processes import Child
from tests.servers.stores import running
from tests.servers.stores.kinds import SERVICES
from tests.sweeps.engine import write_files
from tests.sweeps.store_child import PIPES, Meeting, finish, read_many, stock_verdicts, write_many
from tests.sweeps.store_places import StorePlace, litter

_SECONDS = 300.0
SCHEMES = ["s3", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("gs", "az", "hf"))]


@pytest.fixture
def place(scheme: str) -> StorePlace:
    """Where nothing lies yet."""
    if lacks := SERVICES[scheme].lacks():
        pytest.skip(lacks)
    return StorePlace(scheme, running.url_of(scheme), "sweep").with_objects({})


def counts_of(process: Child) -> dict[str, int]:
    counts: dict[str, int] = json.loads(finish(process, _SECONDS))
    return counts


def assert_whole(place: StorePlace, copy: Path) -> None:
    objects = place.objects()
    verdicts = stock_verdicts(write_files(objects, copy))
    assert [verdict.kind for verdict in verdicts] == ["whole"] * 3, verdicts
    assert len({verdict.generation for verdict in verdicts}) == 1
    assert litter(objects, {"config.json"}) == ""
    assert place.bucket.unfinished(place.prefix) == []


@pytest.mark.parametrize("saves", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_reader_beside_a_writer_finds_whole_checkpoints(place: StorePlace, tmp_path: Path, saves: int) -> None:
    counts_of(processes.call(write_many, place, 0, 1, **PIPES))
    stop = tmp_path / "stop"
    reader = processes.call(read_many, place, stop, Meeting(tmp_path, "reader"), **PIPES)
    beside = Meeting(tmp_path, "writer", ("reader",))
    written = counts_of(processes.call(write_many, place, 1, saves, beside, **PIPES))
    stop.touch()
    read = counts_of(reader)

    assert written == {"saved": saves}
    assert set(read) <= {"whole", "changed"}, read
    assert read["whole"] > 0
    assert_whole(place, tmp_path / "copy")


@pytest.mark.parametrize("saves", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_of_two_writers_each_save_is_whole_or_lost(place: StorePlace, tmp_path: Path, saves: int) -> None:
    stop = tmp_path / "stop"
    counts_of(processes.call(write_many, place, 0, 1, **PIPES))
    reader = processes.call(read_many, place, stop, Meeting(tmp_path, "reader"), **PIPES)
    meetings = [Meeting(tmp_path, *names) for names in (("a", ("b", "reader")), ("b", ("a", "reader")))]
    writers = [
        processes.call(write_many, place, first, saves, meeting, **PIPES)
        for first, meeting in zip((1, 3), meetings, strict=True)
    ]
    written = [counts_of(writer) for writer in writers]
    stop.touch()
    read = counts_of(reader)

    assert [sum(one.values()) for one in written] == [saves, saves]
    assert sum(one.get("saved", 0) for one in written) >= saves  # of two that meet, one wins at least
    assert set(read) <= {"whole", "changed"}, read
    counts_of(processes.call(write_many, place, 2, 1, **PIPES))
    assert_whole(place, tmp_path / "copy")
