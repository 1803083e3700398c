"""A commit whose steps fail: taken back whole, or carried so far that the error says who loads which checkpoint."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.commit.directory_commit import save_session
from hfshard.disk import fsops
from hfshard.disk.byte_source import BytesSource
from hfshard.errors import CommitUndoneError, CommitUnfinishedError, DamagedCheckpointError
from hfshard.format.file_names import WeightNames
from hfshard.places.place import place_to_save
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, SaveRequest
from tests.commit.test_commit_plan_guide import NEW, OLD, OLD_SHARD_BYTES, by_hub, by_transformers, config, state_dict

SHARDS, ONE_FILE = 1, 10**6
"""Limits: three files; one."""


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("**/*") if path.is_file()}


def save(folder: Path, value: float, limit: int, version: str = "same") -> None:
    """Save as a model with a config does."""
    options = SaveOptions(max_shard_size=limit)
    save_request(SaveRequest(tensors=state_dict(value), options=options, config=config(version)), place_to_save(folder))


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a system call fail for paths that a function chooses, as `chattr +i` or a sticky directory does."""

    def patch(call: str, chosen: Callable[..., bool], number: int = errno.EPERM) -> None:
        kept = getattr(os, call)

        def refused(*paths: Any, **keywords: Any) -> Any:
            if chosen(*map(str, paths)):
                raise OSError(number, os.strerror(number), paths[-1])
            return kept(*paths, **keywords)

        monkeypatch.setattr(os, call, refused)

    return patch


def is_single(path: str) -> bool:
    return os.path.basename(path) == "model.safetensors"


def test_a_single_file_that_cannot_be_removed_goes_on_loading_for_every_reader(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    save(tmp_path, OLD, ONE_FILE)
    before = listing(tmp_path)
    refuse("unlink", is_single)

    for _ in range(2):
        with pytest.raises(
            CommitUndoneError, match=r"failed at 'remove model.safetensors'.*rolled back.*is intact"
        ) as raised:
            save(tmp_path, NEW, SHARDS)

        assert raised.value.errno == errno.EPERM
        assert listing(tmp_path) == before
        assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("old", "old")


def test_a_save_that_waits_for_one_that_fails_makes_the_directory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fsops, "_SILENT_SECONDS", 0.0)
    folder = tmp_path / "new" / "out"
    failing = save_session(str(folder), WeightNames())
    failing.__enter__()
    monkeypatch.setattr(
        caplog.handler, "filters", [lambda _record: not failing.__exit__(OSError, OSError("full"), None)]
    )

    save(folder, NEW, SHARDS)

    assert (by_transformers(folder), by_hub(folder)) == ("new", "new")


def test_an_error_between_two_readers_says_who_loads_which(
    tmp_path: Path, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD, ONE_FILE)
    refuse("unlink", is_single)
    refuse("rename", lambda source, _: source.endswith(".kept"), errno.EIO)

    with pytest.raises(CommitUnfinishedError, match=r"huggingface_hub load the new checkpoint, other readers the old"):
        save(tmp_path, NEW, SHARDS)
    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("old", "new")

    monkeypatch.undo()
    save(tmp_path, NEW, SHARDS)
    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("new", "new")
    assert len(listing(tmp_path)) == 5  # config, index, three shards


def test_shards_stay_where_a_power_cut_may_bring_back_the_index_that_names_them(
    tmp_path: Path, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD, ONE_FILE)
    rename, fsync = os.rename, os.fsync
    undone: list[str] = []

    def renaming(source: str, target: str, **keywords: Any) -> None:
        rename(source, target, **keywords)
        if source.endswith(".kept"):
            undone.append(os.path.basename(target))

    def flushing(fd: int) -> None:
        if undone and os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "fsync", flushing)
    refuse("unlink", is_single)
    with pytest.raises(CommitUndoneError, match="rolled back"):
        save(tmp_path, NEW, SHARDS)

    assert undone == ["model.safetensors.index.json"]
    assert len([*tmp_path.glob("model-0000?-of-00003.safetensors")]) == 3
    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("old", "old")


@pytest.mark.parametrize(
    ("old_limit", "limit", "first"),
    [(OLD_SHARD_BYTES, SHARDS, 2), (OLD_SHARD_BYTES, ONE_FILE, 2), (ONE_FILE, SHARDS, 3)],
)
def test_no_reader_is_left_on_the_new_one_by_a_disk_that_fails_to_flush_from_then_on(
    old_limit: int, limit: int, first: int, tmp_path: Path, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD, old_limit, "old")
    flushes: list[str] = []

    def is_failing(fd: str) -> bool:
        """From the flush on that follows the step which moves the first kind of reader."""
        if os.path.samestat(os.fstat(int(fd)), os.stat(tmp_path)):
            flushes.append(fd)
            return len(flushes) >= first
        return False

    refuse("fsync", is_failing, errno.EIO)
    with pytest.raises(CommitUndoneError, match="rolled back"):
        save(tmp_path, NEW, limit, "new")
    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("old", "old")

    monkeypatch.undo()
    save(tmp_path, NEW, limit, "new")
    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("new", "new")
    assert len(listing(tmp_path)) == (2 if limit == ONE_FILE else 5)


@pytest.mark.parametrize("limit", [SHARDS, ONE_FILE])
@pytest.mark.parametrize("old_limit", [OLD_SHARD_BYTES, ONE_FILE])
@pytest.mark.parametrize("version", ["same", "new"])
def test_an_index_that_cannot_be_replaced_leaves_all_as_it_was(
    version: str, old_limit: int, limit: int, tmp_path: Path, refuse: Callable[..., None]
) -> None:
    save(tmp_path, OLD, old_limit, "same" if version == "same" else "old")
    before = listing(tmp_path)
    calls: list[str] = []

    def is_second_index_or_index(source: str, target: str) -> bool:
        """The last rename of the index up to the commit; where an index protects the old file first, the second."""
        if not target.endswith("model.safetensors.index.json") or source.endswith(".kept"):
            return False
        calls.append(target)
        return len(calls) == (2 if old_limit == ONE_FILE else 1)

    refuse("rename", is_second_index_or_index, errno.EIO)
    if (version, old_limit, limit) == ("same", ONE_FILE, ONE_FILE):
        save(tmp_path, NEW, limit, version)  # one rename of the file itself: no index is needed
        assert by_transformers(tmp_path) == "new"
        return
    with pytest.raises(CommitUndoneError, match="rolled back"):
        save(tmp_path, NEW, limit, version)

    assert listing(tmp_path) == before
    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("old", "old")


def test_after_the_commit_every_reader_loads_the_new_one_and_tries_leave_no_more_shards(
    tmp_path: Path, refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OLD, ONE_FILE, "old")
    refuse("unlink", is_single)

    for value, name in ((NEW, "new"), (OLD, "old"), (NEW, "new")):
        with pytest.raises(
            CommitUnfinishedError, match="was saved and every reader loads it, but cleaning up failed at"
        ):
            save(tmp_path, value, SHARDS, name)

        assert (by_transformers(tmp_path), by_hub(tmp_path)) == (name, name)
        assert len(list(tmp_path.glob("model-0*"))) in (3, 4)  # as many as the index names, whose names were free

    monkeypatch.undo()
    save(tmp_path, NEW, SHARDS, "new")
    assert len(listing(tmp_path)) == 5


def test_old_shards_go_though_one_of_them_cannot(tmp_path: Path, refuse: Callable[..., None]) -> None:
    save(tmp_path, OLD, OLD_SHARD_BYTES)
    refuse("unlink", lambda path: path.endswith("00001-of-00002.safetensors"))

    with pytest.raises(CommitUnfinishedError, match="every reader loads it"):
        save(tmp_path, NEW, SHARDS)

    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("new", "new")
    assert sorted(path.name for path in tmp_path.glob("*-of-00002.safetensors")) == ["model-00001-of-00002.safetensors"]


STRAYS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model-00001-of-00009.safetensors")
OTHERS = (
    "model-00003-of-00002.safetensors",  # no such shard
    "model-1-of-2.safetensors",
    "model-00001-of-00002.safetensors.part",
    "model.fp16-00001-of-00002.safetensors",  # another variant
    "model_ema-00001-of-00002.safetensors",
    "pytorch_model-00001-of-00002.bin",
)


@pytest.mark.parametrize("limit", [SHARDS, ONE_FILE])
@pytest.mark.parametrize("old_limit", [None, OLD_SHARD_BYTES, ONE_FILE])
@pytest.mark.parametrize("version", ["same", "new"])
def test_shards_that_a_killed_stock_save_left_go_after_the_commit(
    version: str, old_limit: int | None, limit: int, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    if old_limit is not None:
        save(tmp_path, OLD, old_limit)
    strays = [name for name in STRAYS if not (tmp_path / name).exists()]
    for name in (*strays, *OTHERS):
        save_file({"b": torch.zeros(2)}, tmp_path / name)
    (tmp_path / strays[-1]).write_bytes(b"cut off")

    save(tmp_path, NEW, limit, version)

    here = {path.name for path in tmp_path.iterdir()}
    assert set(OTHERS) <= here
    assert not set(strays) & here
    assert by_transformers(tmp_path) == "new"
    for name in OTHERS:
        (tmp_path / name).unlink()
    assert by_hub(tmp_path) == "new"
    assert len(listing(tmp_path)) == (5 if limit == SHARDS else 2)


def test_shards_that_a_save_is_to_delete_stay_if_it_is_killed_before_its_commit(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    from safetensors.torch import save_file

    save(tmp_path, OLD, ONE_FILE)
    save_file({"b": torch.zeros(2)}, tmp_path / STRAYS[0])
    before = by_transformers(tmp_path)
    child = os.fork()
    if child == 0:
        refuse("rename", lambda _, target: is_single(target) and os._exit(9))
        save(tmp_path, NEW, ONE_FILE)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (tmp_path / "model.safetensors.index.json").exists()  # a first rename is done

    refuse("rename", lambda source, target: is_single(target) and not source.endswith(".kept"), errno.EIO)
    with pytest.raises(CommitUndoneError):
        save(tmp_path, NEW, ONE_FILE)

    assert (tmp_path / STRAYS[0]).exists()
    assert by_transformers(tmp_path) == before == "old"


def test_old_shards_of_any_name_go_though_the_save_was_killed_before_it_removed_them(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    from safetensors.torch import save_file

    shards = ("part-1.safetensors", "part-2.safetensors")
    for name in shards:
        save_file({name: torch.ones(2)}, tmp_path / name, metadata={"format": "pt"})
    weight_map = {name: name for name in shards}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    child = os.fork()
    if child == 0:
        refuse("unlink", lambda path: path.endswith("part-1.safetensors") and os._exit(9))
        save(tmp_path, OLD, SHARDS)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert set(shards) <= set(listing(tmp_path))

    save(tmp_path, NEW, SHARDS)

    assert not set(shards) & set(listing(tmp_path))
    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("new", "new")


def test_shards_that_an_index_names_or_a_damaged_one_may_name_stay(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name in STRAYS[:2]:
        save_file({"b": torch.zeros(2)}, tmp_path / name)
    index = '{"metadata": {}, "weight_map": {"b": "model-00001-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.fp16.json").write_text(index)
    save(tmp_path, OLD, ONE_FILE)
    assert [path.name for path in tmp_path.glob("model-0*")] == [STRAYS[0]]

    (tmp_path / "model.safetensors.index.fp16.json").write_text("{")
    save(tmp_path, NEW, SHARDS)
    assert (tmp_path / STRAYS[0]).exists()


def test_weights_of_others_that_were_replaced_before_the_commit_are_restored(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "dense.safetensors").write_bytes(b"mine")
    refuse("rename", lambda _, target: is_single(target), errno.EIO)
    dense = {"2_Dense/dense.safetensors": BytesSource(b"theirs")}
    request = SaveRequest(tensors=state_dict(NEW), options=SaveOptions(), companion_files=dense)

    with pytest.raises(CommitUndoneError, match="rolled back"):
        save_request(request, place_to_save(tmp_path))

    assert listing(tmp_path) == {"2_Dense/dense.safetensors": b"mine"}


def test_a_stale_signature_that_cannot_be_removed_is_no_failed_save(
    tmp_path: Path, refuse: Callable[..., None]
) -> None:
    save(tmp_path, OLD, ONE_FILE)
    (tmp_path / "model.sig").write_text("{}")
    refuse("unlink", lambda path: path.endswith("model.sig"))
    options = SaveOptions(drop_signature=True)

    with pytest.raises(CommitUnfinishedError, match=r"was saved and every reader loads it, but its 'model.sig' may be"):
        save_request(SaveRequest(tensors=state_dict(NEW), options=options), place_to_save(tmp_path))

    assert (by_transformers(tmp_path), by_hub(tmp_path)) == ("new", "new")


@pytest.mark.parametrize("damaged", [b"\0" * 40, b"", b'{"a": 1'], ids=["zero bytes", "empty", "cut off"])
@pytest.mark.parametrize("limit", [SHARDS, ONE_FILE], ids=["shards", "one file"])
def test_a_damaged_config_is_replaced_by_a_save_of_a_model_and_refused_by_one_of_tensors(
    limit: int, damaged: bytes, tmp_path: Path
) -> None:
    save(tmp_path, OLD, limit)
    (tmp_path / "config.json").write_bytes(damaged)
    before = listing(tmp_path)
    tensors = SaveRequest(tensors=state_dict(NEW), options=SaveOptions(max_shard_size=limit))

    with pytest.raises(DamagedCheckpointError, match=r"Nothing was written\. Delete it, or save the model, which"):
        save_request(tensors, place_to_save(tmp_path))
    assert listing(tmp_path) == before

    save(tmp_path, NEW, limit)
    assert by_transformers(tmp_path) == by_hub(tmp_path) == "new"


@pytest.mark.parametrize("damaged", [b"\0" * 40, b'{"a": 1'], ids=["zero bytes", "cut off"])
def test_a_damaged_config_goes_with_a_model_that_has_none(damaged: bytes, tmp_path: Path) -> None:
    save(tmp_path, OLD, ONE_FILE)
    (tmp_path / "config.json").write_bytes(damaged)
    request = SaveRequest(tensors=state_dict(NEW), options=SaveOptions(), drops_config=True, hides_single=True)

    save_request(request, place_to_save(tmp_path))

    assert sorted(listing(tmp_path)) == ["model.safetensors"]
