from __future__ import annotations

import pytest

import hfshard
from hfshard._util.addresses import StoreAddress, is_address, parse_address
from hfshard._util.paths import absolute_path
from hfshard.errors import InvalidPathError


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
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("az://", "names no container"),
        ("hf://buckets/org", "names no bucket"),
        ("hf://org", "write org/name"),
        ("hf://org/name", "write 'org/name'"),
        ("s4://bucket/p", "does not know"),
        ("https://bucket/p", "does not know. .* For a service that speaks S3, set AWS_ENDPOINT_URL_S3 to its URL"),
        ("s3a://bucket/p", "does not know. Write 's3://bucket/p'"),
        ("s3://bucket/../other", "no plain address"),
        ("s3://bucket/a\nb", "no plain address"),
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
    assert not is_address(text)


def test_a_cache_is_on_a_disk() -> None:
    with pytest.raises(InvalidPathError, match="cache_dir='s3://b/cache' is the address of a store: give a directory"):
        hfshard.load_state_dict("org/name", cache_dir="s3://b/cache")
