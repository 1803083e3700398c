"""Paths as users give them."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import nn

import hfshard
from hfshard._util.arguments import (
    StoreAddress,
    absolute_path,
    checked_path_text,
    is_meant_as_address,
    is_store_address,
    parse_address,
    parse_size,
    reject_hub_arguments,
)
from hfshard.errors import HfshardError, InvalidArgumentError, InvalidPathError, InvalidSizeError, InvalidSizeTypeError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/a/b", "/a/b"),
        ("//a///./b/", "/a/b"),
        ("/a/../b", "/a/../b"),  # `a` may be a link
        ("/", "/"),
        (Path("/a b"), "/a b"),
        ("~", "/WORKING/~"),
        ("~/x", "/WORKING/~/x"),
        ("x", "/WORKING/x"),
        ("./x/", "/WORKING/x"),
        ("../x", "/WORKING/../x"),
        (".", "/WORKING"),
        ("./~", "/WORKING/~"),
        ("x\udcff", "/WORKING/x\udcff"),  # a name that is no UTF-8, as the system hands it over
    ],
)
def test_a_path_becomes_absolute(
    given: str | os.PathLike[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)

    assert absolute_path(given) == expected.replace("/WORKING", str(tmp_path))


@pytest.mark.parametrize("given", ["", b"out", "out\0", None, 3, ["out"], "\ud800"])
def test_what_is_no_path_is_one_clear_error(given: Any) -> None:
    for function in (absolute_path, checked_path_text):
        with pytest.raises(InvalidPathError, match=r"save_directory must be a str or os.PathLike path .*, got "):
            function(given, "save_directory")


def test_a_state_dict_in_the_place_of_a_path_is_shown_shortened() -> None:
    state_dict: Any = {f"layer.{number}.weight": number for number in range(1000)}

    with pytest.raises(InvalidPathError) as raised:
        checked_path_text(state_dict)

    assert len(str(raised.value)) < 400


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert absolute_path("/a/b") == "/a/b"
    with pytest.raises(
        InvalidPathError, match="src='x' is a relative path, but the working directory no longer exists"
    ):
        absolute_path("x", "src")


# The grammar of max_shard_size, value by value.


class Limit(enum.IntEnum):
    SMALL = 4096


class Text(str):
    pass


GOOD: list[tuple[int | str, int]] = [
    # an int is bytes
    (1, 1),
    (4096, 4096),
    (5_000_000_000, 5000000000),
    (2**63, 9223372036854775808),
    (Limit.SMALL, 4096),
    # powers of 1000
    ("1B", 1),
    ("200B", 200),
    ("1KB", 1000),
    ("1MB", 1000000),
    ("1GB", 1000000000),
    ("5GB", 5000000000),
    ("50GB", 50000000000),
    ("1TB", 1000000000000),
    ("1PB", 1000000000000000),
    # powers of 1024
    ("1KiB", 1024),
    ("1MiB", 1048576),
    ("20MiB", 20971520),
    ("1GiB", 1073741824),
    ("5GiB", 5368709120),
    ("1TiB", 1099511627776),
    ("1PiB", 1125899906842624),
    # any case; the lower-case b is a byte
    ("1b", 1),
    ("200kb", 200000),
    ("200Kb", 200000),
    ("200kB", 200000),
    ("5gb", 5000000000),
    ("5Gb", 5000000000),
    ("5gib", 5368709120),
    ("5GIB", 5368709120),
    ("5gIb", 5368709120),
    # blanks between digits and unit
    ("5 GB", 5000000000),
    ("5 gib", 5368709120),
    ("5   MB", 5000000),
    ("5\tMB", 5000000),
    # fractions, exactly
    ("1.5GB", 1500000000),
    ("0.5GB", 500000000),
    ("1.5 GiB", 1610612736),
    ("2.01GB", 2010000000),  # 2009999999 by way of a float
    ("8.20KB", 8200),
    ("0.001KB", 1),
    ("1.0B", 1),
    ("1.9B", 1),
    ("0.0009765625KiB", 1),
    ("0.1KiB", 102),
    # zeros in front, many digits
    ("005GB", 5000000000),
    ("00.5KB", 500),
    ("9223372036854775808B", 9223372036854775808),
    ("99999999PB", 99999999000000000000000),
    (Text("5GB"), 5000000000),
]

BAD_VALUES: list[int | str] = [
    # nothing, or less
    0,
    -1,
    -5_000_000_000,
    "0GB",
    "0.0GB",
    "0B",
    "0.5B",
    "0.0001KB",
    "-1GB",
    "-0GB",
    "+5GB",
    # no unit, no digits, no such unit
    "",
    " ",
    "GB",
    "5",
    "5000000000",
    "5.0",
    "5G",
    "5M",
    "5k",
    "5Gi",
    "5BB",
    "5iB",
    "5EB",
    "5XB",
    "5Gbit",
    "5 bytes",
    "5GBs",
    "5GB/s",
    "auto",
    "None",
    # other ways to write a number
    "nanGB",
    "infGB",
    "-infGB",
    "1e3MB",
    "1E3MB",
    "0x10MB",
    "1_000MB",
    "1,5GB",
    "1,000MB",
    ".5GB",
    "5.GB",
    "1.2.3GB",
    "1 .5GB",
    "1/2GB",
    # other scripts: Arabic, full-width, superscript digits; the Kelvin sign; a Cyrillic letter
    "\u0665GB",
    "\uff15GB",
    "5\u00b2GB",
    "5\u212aB",
    "5G\u0412",
    # blanks that are none, or in the wrong place
    "5\u00a0GB",
    "5\nGB",
    "5GB\n",
    " 5GB",
    "5GB ",
    "5G B",
    "5 0GB",
    "5GB\x00",
    # too long to be meant
    "9" * 5000 + "GB",
    "1" + "0" * 5000,
    -(10**5000),
]

BAD_TYPES: list[object] = [
    None,
    True,
    False,
    5.0,
    1.5,
    float("nan"),
    float("inf"),
    Decimal(5),
    Fraction(5, 2),
    5 + 0j,
    b"5GB",
    bytearray(b"5GB"),
    ["5GB"],
    ("5GB",),
    {"max_shard_size": "5GB"},
    pytest.param(object(), id="object"),
    Path("5GB"),
    numpy.float64(5e9),
    numpy.bool_(True),
]


def _short(value: object) -> str:
    try:
        return ascii(value)[:24]
    except ValueError:
        return "an int that Python does not print"


@pytest.mark.parametrize(("size", "expected_bytes"), GOOD, ids=[_short(size) for size, _ in GOOD])
def test_good_size_is_bytes(size: int | str, expected_bytes: int) -> None:
    size_bytes = parse_size(size)
    assert size_bytes == expected_bytes
    assert type(size_bytes) is int


@pytest.mark.parametrize("size", BAD_VALUES, ids=_short)
def test_bad_value_is_a_value_error_that_shows_it_and_the_grammar(size: int | str) -> None:
    with pytest.raises(InvalidSizeError) as caught:
        parse_size(size)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HfshardError)
    _assert_helpful(str(caught.value), size)


@pytest.mark.parametrize("size", BAD_TYPES, ids=_short)
def test_bad_type_is_a_type_error_that_shows_it_and_the_grammar(size: object) -> None:
    with pytest.raises(InvalidSizeTypeError) as caught:
        parse_size(size)  # type: ignore[arg-type]
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, HfshardError)
    assert f"of type {type(size).__name__}" in str(caught.value)
    _assert_helpful(str(caught.value), size)


def _assert_helpful(message: str, size: object) -> None:
    assert message.startswith("Invalid size ")
    assert "KiB, MiB, GiB" in message
    assert '"5GB"' in message
    assert len(message) < 500
    if len(_short(size)) < 24:
        assert repr(size) in message


def test_table_is_as_long_as_promised() -> None:
    assert len(GOOD) + len(BAD_VALUES) + len(BAD_TYPES) >= 120


@pytest.mark.parametrize("size", ["5GiBs", "", "0GB", -1, 0, True, 1.5, None, b"5GB"], ids=_short)
@pytest.mark.parametrize("directory", ["fresh", "existing"])
def test_bad_size_touches_nothing_on_disk(directory: str, size: object, tmp_path: Path) -> None:
    import torch

    import hfshard

    target = tmp_path / directory
    if directory == "existing":
        target.mkdir()
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"old")
    before = _snapshot(tmp_path)
    with pytest.raises((InvalidSizeError, InvalidSizeTypeError)):
        hfshard.save_state_dict({"weight": torch.ones(4)}, target, max_shard_size=size)  # type: ignore[arg-type]
    assert _snapshot(tmp_path) == before


def _snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Path -> inode, time of change in nanoseconds, bytes: of the directories too."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_ctime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [root, *sorted(root.rglob("*"))]
    }


# Store addresses: recognized, checked and split, and refused where there is no place for them.


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("s3://models", StoreAddress("s3", "models", ""), "s3://models"),
        ("s3://models/", StoreAddress("s3", "models", ""), "s3://models"),
        ("S3://models//llama/v 2/", StoreAddress("s3", "models", "llama/v 2"), "s3://models/llama/v 2"),
        ("gs://b/p", StoreAddress("gs", "b", "p"), "gs://b/p"),
        ("az://c/p/q", StoreAddress("az", "c", "p/q"), "az://c/p/q"),
        ("hf://buckets/org/name", StoreAddress("hf", "org/name", ""), "hf://buckets/org/name"),
        ("hf://buckets/org/name/a/b", StoreAddress("hf", "org/name", "a/b"), "hf://buckets/org/name/a/b"),
    ],
)
def test_an_address_is_split_and_shown_in_one_form(text: str, address: StoreAddress, shown: str) -> None:
    assert parse_address(text) == address
    assert str(address) == absolute_path(text) == shown


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("s3://", "has no bucket name"),
        ("s3:///prefix", "has no bucket name"),
        ("az://", "has no container name"),
        ("hf://buckets/org", "has no bucket name"),
        ("hf://org", "write org/name"),
        ("hf://org/name", "write 'org/name'"),
        ("s4://bucket/p", "has an unsupported scheme"),
        (
            "https://bucket/p",
            "has an unsupported scheme. .* For an S3-compatible service, set AWS_ENDPOINT_URL_S3 to its URL",
        ),
        ("s3a://bucket/p", "has an unsupported scheme. Write 's3://bucket/p'"),
        ("s3://bucket/../other", "is not a valid address"),
        ("s3://bucket/a\nb", "is not a valid address"),
        ("az://container/a\\b", "is not a valid address"),
    ],
)
def test_what_is_no_address_of_a_store_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidPathError, match=problem) as caught:
        absolute_path(text, "save_directory")
    assert f"save_directory={text!r}" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["s3://key:secret@bucket/p", "https://bucket/p?sig=secret", "s3://b?X-Amz=secret/p", "az://c/p?sv=1&sig=secret"],
)
def test_a_secret_in_an_address_is_not_repeated(text: str) -> None:
    with pytest.raises(InvalidPathError) as caught:
        absolute_path(text)
    assert "secret" not in f"{caught.value} {caught.value.path}"


@pytest.mark.parametrize("text", ["org/name", "/a/b", "file:///a", "a:b", "s3:/b", "C:\\x", 5])
def test_paths_and_names_are_no_addresses(text: object) -> None:
    assert not is_store_address(text)


@pytest.mark.parametrize(
    ("path", "is_meant"),
    [("s3://b/p", True), ("s3:/b/p", True), (Path("s3://b/p"), True), ("file:///a", False), ("a:b", False), (5, False)],
)
def test_an_address_that_lost_a_slash_is_meant_as_one(path: object, is_meant: bool) -> None:
    assert is_meant_as_address(path) == is_meant


def test_a_cache_is_on_a_disk() -> None:
    with pytest.raises(InvalidPathError, match=r"cache_dir='s3://b/cache' is a store address\. Pass a directory"):
        hfshard.load_state_dict("org/name", cache_dir="s3://b/cache")


class Plain(hfshard.ShardedModelMixin, nn.Linear):
    pass


class Bert(hfshard.ShardedModelMixin, transformers.BertModel):
    pass


CONFIG = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
WITH_HUB_ARGUMENTS: dict[str, Callable[..., object]] = {
    "load_state_dict": hfshard.load_state_dict,
    "load_model": lambda place, **given: hfshard.load_model(nn.Linear(1, 1), place, **given),
    "load_model of a class": lambda place, **given: hfshard.load_model(transformers.AutoModel, place, **given),
    "load a plain module": Plain.from_pretrained,
    "load a model": Bert.from_pretrained,
    "save a plain module": lambda place, **given: Plain(1, 1).save_pretrained(place, **given),
    "save a model": lambda place, **given: Bert(CONFIG).save_pretrained(place, **given),
    "re-shard": lambda place, **given: hfshard.reshard_checkpoint(place, "out", "1GB", **given),
    "push": lambda place, **given: hfshard.push_checkpoint("good", place, **given),
    "pull": lambda place, **given: hfshard.pull_checkpoint(place, "out", **given),
    "dcp reader": lambda place, **given: hfshard.distributed.StorageReader(place, **given).read_metadata(),
}
WITH_A_TOKEN: dict[str, Callable[..., object]] = {
    "restore": lambda place, **given: hfshard.CheckpointManager("run").restore(
        hfshard.training.TrainingState(model=nn.Linear(1, 1)), place, **given
    ),
    "diff": lambda place, **given: hfshard.diff_checkpoints(place, place, **given),
}


@pytest.mark.parametrize("act", WITH_HUB_ARGUMENTS | WITH_A_TOKEN)
def test_what_only_a_hub_has_is_refused_with_an_address_before_it_is_asked(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hfshard.save_state_dict({"a": torch.ones(2)}, "good")
    do = (WITH_HUB_ARGUMENTS | WITH_A_TOKEN)[act]
    for place in ("s3://models/bert", "hf://buckets/org/name/bert"):
        with pytest.raises(InvalidArgumentError, match=rf"token is for a hub: '{place}' is in a store.*Leave it out\."):
            do(place, token="hf_secret")
        if act in WITH_HUB_ARGUMENTS:
            with pytest.raises(InvalidArgumentError, match=rf"revision.* is for a hub: '{place}' .* Leave it"):
                do(place, revision="v1")


def test_defaults_are_no_arguments_of_a_hub() -> None:
    reject_hub_arguments("s3://models/bert", revision="main", token=False)
    reject_hub_arguments("hf://buckets/org/name", token=True)
    reject_hub_arguments("gs://models", revision="", token="")
    with pytest.raises(InvalidArgumentError, match="with the saved token: run 'hf auth login', or set HF_TOKEN"):
        reject_hub_arguments("hf://buckets/org/name", token=False)
    with pytest.raises(InvalidArgumentError, match="with its service's own settings"):
        reject_hub_arguments("az://models", token=True)
