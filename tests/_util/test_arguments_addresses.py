from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import hfshard
from hfshard._util.arguments import (
    StoreAddress,
    absolute_path,
    is_meant_as_address,
    is_store_address,
    parse_address,
    reject_hub_arguments,
)
from hfshard.errors import InvalidArgumentError, InvalidPathError


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
