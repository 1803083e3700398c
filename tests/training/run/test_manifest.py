"""The last file of a checkpoint: what it says, and that every change of it, or of a file that it names, is seen."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hfshard.checkpoint.check_files import check_files
from hfshard.checkpoint.folder import LocalFolder
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, MissingShardError, UnsafePathError
from hfshard.format.index import FileDigest, sha256_of
from hfshard.format.strict_json import dump_json
from hfshard.training.run.manifest import (
    CheckpointManifest,
    RunCheckpoint,
    checked_step,
    plain_metrics,
    read_manifest,
    small_record,
)
from hfshard.training.state.step import RestoredStep

RAW = b'{"a": 1}\n'
RECORD = FileDigest(9, sha256="e8c628edc9968ef0c668f54e0ba2636b35503357eb1aca0ddc828aeace432f67")

EXPECTED = {
    "format": 1,
    "step": 1200,
    "save_number": 3,
    "metrics": {"loss": 0.5, "best": {"$type": "float", "value": "nan"}},
    "files": {"training_state.json": {"size": 9, "sha256": RECORD.sha256}},
}


def body() -> dict[str, Any]:
    return dict(json.loads(json.dumps(EXPECTED)))


def raw_of(changed: dict[str, Any]) -> bytes:
    """A manifest of anything, with its checksum."""
    return json.dumps({**changed, "checksum": sha256_of(dump_json(changed))}).encode()


def manifest() -> CheckpointManifest:
    return CheckpointManifest(1200, 3, {"loss": 0.5, "best": math.nan}, {"training_state.json": RECORD})


def test_a_manifest_says_what_it_is_of() -> None:
    raw = manifest().to_json()
    found = json.loads(raw)
    checksum = found.pop("checksum")
    assert found == EXPECTED
    assert checksum == sha256_of(dump_json(EXPECTED))
    assert len(raw) == 4096
    assert raw.endswith(b" \n")


def test_a_manifest_comes_back() -> None:
    found = CheckpointManifest.from_json(manifest().to_json(), "checkpoint.json")
    assert (found.step, found.save_number, found.files) == (1200, 3, {"training_state.json": RECORD})
    assert found.metrics["loss"] == 0.5
    assert math.isnan(found.metrics["best"])


def test_every_flipped_bit_of_a_manifest_is_seen_or_says_the_same() -> None:
    raw, same = manifest().to_json(), 0
    for position in range(len(raw.rstrip())):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[position] ^= 1 << bit
            try:
                found = CheckpointManifest.from_json(bytes(flipped), "checkpoint.json")
            except DamagedCheckpointError:
                continue
            assert found.to_json() == raw, (position, bit)
            same += 1
    assert same == 1  # "0.5 " became "0.50"


def test_every_cut_of_a_manifest_is_seen() -> None:
    raw = manifest().to_json()
    for length in range(len(raw.rstrip())):
        with pytest.raises(DamagedCheckpointError):
            CheckpointManifest.from_json(raw[:length], "checkpoint.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2), ("format", None), ("format", "1"), ("step", -1), ("step", 1.0), ("step", "1"), ("step", True),
        ("save_number", -1), ("save_number", None), ("metrics", []), ("metrics", None), ("metrics", {"a": 1}),
        ("metrics", {"a": "low"}), ("metrics", {"a": [0.5]}), ("metrics", {"$type": "device", "value": "toaster"}),
        ("files", []), ("files", {"a": {"size": -1}}), ("files", {"a": 5}), ("files", {"a": {"sha256": "x"}}),
        ("files", {"a": {"size": 9, "xxh3": 5}}),
    ],
)  # fmt: skip
def test_a_manifest_that_says_something_else_is_refused(key: str, value: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.json"):
        CheckpointManifest.from_json(raw_of({**body(), key: value}), "checkpoint.json")


@pytest.mark.parametrize("key", EXPECTED)
def test_a_manifest_that_lacks_something_is_refused(key: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.json"):
        CheckpointManifest.from_json(
            raw_of({name: value for name, value in body().items() if name != key}), "checkpoint.json"
        )


def test_a_manifest_of_a_later_format_says_what_to_do() -> None:
    with pytest.raises(DamagedCheckpointError, match=r"has format 2, but this version reads 1\. Run: pip install"):
        CheckpointManifest.from_json(raw_of({**body(), "format": 2}), "checkpoint.json")


def test_a_manifest_of_before_the_first_release_is_refused_by_name() -> None:
    old = {"sequence" if key == "save_number" else key: value for key, value in body().items()}
    with pytest.raises(
        DamagedCheckpointError, match=r"checkpoint\.json' was written by .* 'sequence'. Restore it with"
    ):
        CheckpointManifest.from_json(raw_of(old), "checkpoint.json")


def test_a_manifest_that_names_a_file_elsewhere_is_refused() -> None:
    with pytest.raises(UnsafePathError):
        CheckpointManifest.from_json(raw_of({**body(), "files": {"../x": {"size": 9}}}), "checkpoint.json")


def test_a_directory_without_a_manifest_was_never_finished(tmp_path: Path) -> None:
    with pytest.raises(MissingShardError, match=r"checkpoint\.json' is missing"):
        read_manifest(str(tmp_path))


def test_every_damaged_file_is_told_of(tmp_path: Path) -> None:
    names = ["a.json", "b.json", "c.json", "d.safetensors"]
    whole = CheckpointManifest(1, 1, {}, {name: small_record(RAW) for name in names})
    (tmp_path / "a.json").write_bytes(RAW)
    (tmp_path / "b.json").write_bytes(RAW.replace(b"1", b"2"))
    (tmp_path / "c.json").symlink_to("/etc/hostname")
    (tmp_path / "d.safetensors").symlink_to("/etc/hostname")
    problems: list[Exception] = []
    check_files(LocalFolder(str(tmp_path)), whole.files, "full", on_problem=problems.append)
    assert all(isinstance(problem, (DamagedCheckpointError, UnsafePathError)) for problem in problems)
    assert sorted(str(problem).split("'")[1] for problem in problems) == [str(tmp_path / name) for name in names[1:]]
    with pytest.raises(DamagedCheckpointError):
        check_files(LocalFolder(str(tmp_path)), whole.files, "structure")


SHARDS = {"model-00001-of-00002.safetensors": FileDigest(9, xxh3="aa"), "model-00002-of-00002.safetensors": RECORD}


@pytest.mark.parametrize(
    ("changed", "metrics"),
    [
        ({"state.safetensors": FileDigest(7, xxh3="cc")}, {"loss": 0.5}),
        ({"model-00001-of-00002.safetensors": FileDigest(9, xxh3="bb")}, {}),
        ({"model-00001-of-00002.safetensors": FileDigest(9, sha256="aa")}, {}),  # the manager's checksum is another one
        ({"model-00001-of-00002.safetensors": FileDigest(9)}, {}),
        ({"model.safetensors": RECORD}, {}),
    ],
)
def test_a_replaced_checkpoint_passes_its_metrics_to_the_same_weights(
    changed: dict[str, FileDigest], metrics: dict[str, float]
) -> None:
    before = CheckpointManifest(7, 1, {"loss": 0.5}).with_files(SHARDS, {"training_state.json": RAW})
    found = [RunCheckpoint.of("run/checkpoint-00000007", before)]

    saved = CheckpointManifest.begun(7, 2, None, lambda: found).with_files(SHARDS | changed, {})
    assert saved.metrics == metrics
    assert saved.replaced is None  # which would keep all earlier manifests in memory


@pytest.mark.parametrize("files", [{"state.safetensors": RECORD}, {"model.safetensors": FileDigest(9)}])
def test_metrics_are_not_passed_where_nothing_can_be_compared(files: dict[str, FileDigest]) -> None:
    found = [RunCheckpoint.of("run/checkpoint-00000007", CheckpointManifest(7, 1, {"loss": 0.5}, files))]

    assert CheckpointManifest.begun(7, 2, None, lambda: found).with_files(files, {}).metrics == {}


def test_metrics_are_numbers_by_name() -> None:
    assert plain_metrics(0.5, "loss") == {"loss": 0.5}
    assert plain_metrics(0.5, None) == {"metric": 0.5}
    assert plain_metrics({"a": 1, "b": math.inf}, "loss") == {"a": 1.0, "b": math.inf}
    with pytest.raises(InvalidArgumentError, match="The metric 'loss' must be a number, got 'low'"):
        plain_metrics("low", "loss")  # type: ignore[arg-type]


def test_a_slow_read_of_one_manifest_stalls_no_other_read() -> None:
    is_reading, may_end = threading.Event(), threading.Event()

    def read_slowly() -> CheckpointManifest:
        is_reading.set()
        may_end.wait(30)
        return manifest()

    slow = RunCheckpoint("slow", 1200, read_slowly)
    fast = RunCheckpoint("fast", 1200, manifest)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow.require_manifest)
        is_reading.wait(30)
        second = pool.submit(fast.require_manifest)
        try:
            found = second.result(timeout=10)
        finally:
            may_end.set()

    assert found.step == 1200
    assert first.result().step == 1200


# A step is an exact int, and fits into the name of a directory.


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        pytest.param(0, 0, id="the lowest"),
        pytest.param(999_999_999_999_999_999, 999_999_999_999_999_999, id="the highest"),
        pytest.param(np.int64(7), 7, id="numpy"),
        pytest.param(torch.tensor(8), 8, id="a tensor"),
        pytest.param(RestoredStep(9), 9, id="a restored step"),
    ],
)
def test_integers_of_any_library_become_plain_ones(step: object, expected: int) -> None:
    checked = checked_step(step)

    assert checked == expected
    assert type(checked) is int


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        pytest.param(-1, "-1", id="negative"),
        pytest.param(10**18, "1000000000000000000", id="19 digits"),
        pytest.param(1 << 20_000, "one of 20001 bits", id="more than Python prints"),
        pytest.param(True, "True", id="a truth"),
        pytest.param(3.0, "3.0", id="a float"),
        pytest.param("3", "'3'", id="a word"),
        pytest.param(None, "None", id="nothing"),
        pytest.param(torch.tensor([1, 2]), "tensor([1, 2])", id="two numbers"),
    ],
)
def test_what_is_no_step_is_refused_and_shown(step: object, shown: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked_step(step)

    assert str(caught.value) == f"step must be an integer from 0 to 999999999999999999, got {shown}."
