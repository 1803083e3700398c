"""Names of files, in literals; and names that must not be opened."""

from __future__ import annotations

import pytest

from hfshard.errors import InvalidArgumentError, UnsafePathError
from hfshard.format.file_names import (
    INDEX_FILE,
    WeightNames,
    check_file_name,
    names_of_entry,
    replaced_weights,
    suffix_of_shards,
)


def test_plain_names() -> None:
    names = WeightNames()
    assert (names.single, names.index) == ("model.safetensors", "model.safetensors.index.json")
    assert (names.bin_single, names.bin_index) == ("pytorch_model.bin", "pytorch_model.bin.index.json")
    assert names.shards(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names.shard(100_000, 100_001) == "model-100000-of-100001.safetensors"


def test_names_of_a_variant_are_those_of_transformers() -> None:
    names = WeightNames("fp16")
    assert (names.single, names.index) == ("model.fp16.safetensors", "model.safetensors.index.fp16.json")
    assert (names.bin_single, names.bin_index) == ("pytorch_model.fp16.bin", "pytorch_model.bin.index.fp16.json")
    assert names.shards(1) == ["model.fp16-00001-of-00001.safetensors"]


def test_names_of_a_commit_under_way() -> None:
    names = WeightNames()
    assert names.unique_single("0123456789abcdef99") == "model-hfshard-0123456789abcdef.safetensors"
    assert names.unique_index("0123456789abcdef99") == "model-hfshard-0123456789abcdef.safetensors.index.json"
    assert names.placeholder == "model-hfshard-placeholder.safetensors"
    for name in (names.placeholder, names.unique_single("a" * 16), names.unique_index("b" * 16)):
        assert names.is_commit_temporary(name)
    renamed = names.renamed_shard("model-00001-of-00002.safetensors", "0123456789abcdef99")
    assert renamed == "model-00001-of-00002-0123456789abcdef.safetensors"
    assert names.is_renamed_shard(renamed)


def test_names_of_files_that_were_synced_from_a_store() -> None:
    plain, half = WeightNames(), WeightNames("fp16")
    shards = ["model-00001-of-00002-00000007-00112233445566ff.safetensors"]
    shards.append("model.fp16-00001-of-00002-123456789012345-00112233445566ff.safetensors")
    indexes = ["model.safetensors.index-00000007-00112233445566ff.json"]
    indexes.append("model.safetensors.index.fp16-00000007-00112233445566ff.json")

    assert [plain.is_shard(name) for name in shards] == [True, False]
    assert [half.is_shard(name) for name in shards] == [False, True]
    assert [plain.is_stored_index(name) for name in indexes] == [True, False]
    assert [half.is_stored_index(name) for name in indexes] == [False, True]
    assert [INDEX_FILE.fullmatch(name) for name in indexes] == [None, None]
    assert not any(plain.has_standard_shard_name(name) or half.has_standard_shard_name(name) for name in shards)
    assert plain.is_shard("model-00001-of-00002-00112233445566ff.safetensors")
    assert plain.is_renamed_shard("model-00001-of-00002-00112233445566ff.safetensors")
    assert not plain.is_renamed_shard(shards[0])
    others = ["model-00001-of-00002-7-00112233445566ff.safetensors", "model.safetensors.index.json"]
    assert not any(plain.is_shard(name) or plain.is_stored_index(name) for name in others)


@pytest.mark.parametrize(
    "name",
    [
        "model_ema-00001-of-00002.safetensors", "model.fp16-00001-of-00002.safetensors", "model-1-of-2.safetensors",
        "model-00001-of-00002.safetensors.orig", "xmodel-00001-of-00002.safetensors", "model-00001-of-00002.bin",
        "model-hfshard-xyz.safetensors", "model.safetensors", "model-00001-of-00002.safetensors\n",
    ],
)  # fmt: skip
def test_names_that_are_not_ours(name: str) -> None:
    assert not WeightNames().is_shard(name)
    assert not WeightNames().is_commit_temporary(name)


@pytest.mark.parametrize("variant", ["", "../x", "a/b", "a b", ".hidden", "a\n", "-x"])
def test_a_variant_that_can_be_no_part_of_a_name_is_refused(variant: str) -> None:
    with pytest.raises(InvalidArgumentError):
        WeightNames(variant)


@pytest.mark.parametrize("name", ["model.safetensors", "sub/model.safetensors", "..x.safetensors", "größe.safetensors"])
def test_names_inside_the_directory_pass(name: str) -> None:
    assert check_file_name(name, index_path="i", suffix=".safetensors") == name


@pytest.mark.parametrize(
    "name",
    [
        "/etc/x.safetensors", "../x.safetensors", "a/../x.safetensors", "./x.safetensors", "a//x.safetensors",
        "C:x.safetensors", "C:\\x.safetensors", "\\\\host\\x.safetensors", "a\0.safetensors", "http://h/x.safetensors",
        "x.bin", "", 7, None, "a" * 2000 + ".safetensors", "~/../x.safetensors",
    ],
)  # fmt: skip
def test_names_outside_do_not(name: object) -> None:
    with pytest.raises(UnsafePathError, match=r"'i\.json'"):
        check_file_name(name, index_path="i.json", suffix=".safetensors")


@pytest.mark.parametrize(
    ("index_name", "suffix"),
    [
        ("model.safetensors.index.json", ".safetensors"),
        ("model.safetensors.index.fp16.json", ".safetensors"),
        ("model.safetensors.index.x.bin.index.json", ".safetensors"),
        ("pytorch_model.bin.index.json", ".bin"),
        ("pytorch_model.bin.index.fp16.json", ".bin"),
    ],
)
def test_the_name_of_an_index_tells_what_its_shards_end_in(index_name: str, suffix: str) -> None:
    assert suffix_of_shards(index_name) == suffix


SAVE = "-00000007-0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "variant", "base"),
    [
        ("model.safetensors", None, "model"),
        ("model.fp16.safetensors", "fp16", "model"),
        ("pytorch_model.bin", None, "model"),
        ("pytorch_model.bin.index.fp16.json", "fp16", "model"),
        ("model.safetensors.index.json", None, "model"),
        ("model.safetensors.index.fp16.json", "fp16", "model"),
        ("model.fp16.safetensors.index.json", "fp16", "model"),
        ("diffusion_pytorch_model.fp16.safetensors", "fp16", "diffusion_pytorch_model"),
    ],
)
def test_a_single_file_or_an_index_leads_to_a_checkpoint(name: str, variant: str | None, base: str) -> None:
    found = names_of_entry(name)

    assert found is not None and (found.variant, found.base) == (variant, base)


@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00002.safetensors",
        "model.fp16-00001-of-00002.safetensors",
        "model-hfshard-0123456789abcdef.safetensors",
        f"model.safetensors.index{SAVE}.json",
        f"model.safetensors.index.fp16{SAVE}.json",
        f"model.fp16-00001-of-00002{SAVE}.safetensors",
        "model.a b.safetensors",
        "vae.safetensors",
        "config.json",
    ],
)
def test_other_files_lead_to_none(name: str) -> None:
    assert names_of_entry(name) is None


def test_what_new_weights_in_a_folder_replace() -> None:
    replaced = {
        "unet/model.safetensors",
        "unet/pytorch_model.bin",
        f"unet/model-00001-of-00003{SAVE}.safetensors",
        f"unet/model.safetensors.index{SAVE}.json",
    }
    others = {"model.safetensors", "unet/config.json", "unet/model.ema.safetensors", "vae/model.safetensors"}
    new = {
        "unet/model.safetensors.index.json",
        "unet/model-00001-of-00002.safetensors",
        "vae/adapter_model.safetensors",
    }

    assert replaced_weights(replaced | others | new, new) == replaced
    assert replaced_weights(replaced | others, {"model.safetensors.index.json", "unet/README.md"}) == set()
