"""What transformers' own tests check (test_modeling_utils.py) of files: shards, variants, pickles, names, damage.

Written anew: the source archive lacks that file, and it loads models from the Hub; these make tiny ones.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, PreTrainedModel

from tests.saving.helpers import write_bins
from upstream.own.tiny_bert import bert, bert_config, names, same, with_info

__all__ = ["bert"]  # the fixture

KB = 1000


@pytest.mark.parametrize("sizes", [(20, 60, 40), (60, 20, 10_000)])
def test_another_size_in_the_same_directory_replaces_the_shards(
    bert: BertModel, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    for size in sizes:
        bert.save_pretrained(tmp_path, max_shard_size=size * KB)

        found = names(tmp_path)
        if size < 1000:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert set(index["weight_map"].values()) == found
            assert "model.safetensors" not in found
            for name in found:
                tensors = load_file(tmp_path / name)
                assert sum(value.nbytes for value in tensors.values()) <= size * KB or len(tensors) == 1
        else:
            assert found == {"model.safetensors"}
        assert same(BertModel.from_pretrained(tmp_path), bert)


def test_the_index_counts_bytes_and_parameters(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")

    metadata = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
    assert metadata["total_size"] == sum(value.nbytes for value in bert.state_dict().values())
    assert metadata["total_parameters"] == bert.num_parameters()


@pytest.mark.parametrize("size", ["10MB", "20KB"])
def test_a_variant_has_its_own_files_and_loads_only_by_its_name(bert: BertModel, tmp_path: Path, size: str) -> None:
    bert.save_pretrained(tmp_path, variant="v2", max_shard_size=size)

    assert all(".v2" in name for name in names(tmp_path))
    assert (tmp_path / "model.safetensors.index.v2.json").exists() is (size == "20KB")
    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(tmp_path)
    assert same(BertModel.from_pretrained(tmp_path, variant="v2"), bert)


def test_a_variant_and_the_plain_weights_live_beside_each_other(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, variant="v2")
    other: Any = copy.deepcopy(bert)
    nn.init.ones_(other.pooler.dense.weight)
    other.save_pretrained(tmp_path)

    assert names(tmp_path) == {"model.safetensors", "model.v2.safetensors"}
    assert same(BertModel.from_pretrained(tmp_path), other)
    assert same(BertModel.from_pretrained(tmp_path, variant="v2"), bert)


@pytest.mark.parametrize("size", ["10MB", "20KB"])
def test_only_safetensors_are_there(bert: BertModel, tmp_path: Path, size: str) -> None:
    bert.save_pretrained(tmp_path, max_shard_size=size)

    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(tmp_path, use_safetensors=False)
    assert same(BertModel.from_pretrained(tmp_path, use_safetensors=True), bert)


def _save_pickle(model: PreTrainedModel, directory: Path, is_sharded: bool = False) -> None:
    model.config.save_pretrained(directory)
    write_bins(directory, model.state_dict(), files=2 if is_sharded else 1)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_only_pickles_are_there(bert: BertModel, tmp_path: Path, is_sharded: bool) -> None:
    _save_pickle(bert, tmp_path, is_sharded)

    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(tmp_path, use_safetensors=True)
    assert same(BertModel.from_pretrained(tmp_path, use_safetensors=False), bert)
    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_safetensors_win_over_pickles(bert: BertModel, tmp_path: Path) -> None:
    other: Any = copy.deepcopy(bert)
    nn.init.ones_(other.pooler.dense.weight)
    bert.save_pretrained(tmp_path)
    _save_pickle(other, tmp_path)

    assert same(BertModel.from_pretrained(tmp_path), bert)
    assert same(BertModel.from_pretrained(tmp_path, use_safetensors=False), other)


@pytest.mark.parametrize("size", ["10MB", "20KB"])
def test_a_subfolder(bert: BertModel, tmp_path: Path, size: str) -> None:
    bert.save_pretrained(tmp_path / "inner" / "most", max_shard_size=size)

    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(tmp_path)
    assert same(BertModel.from_pretrained(tmp_path, subfolder="inner/most"), bert)
    assert same(AutoModel.from_pretrained(tmp_path, subfolder="inner/most"), bert)


def test_unexpected_and_missing_names_are_reported(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["pooler.dense.bias"]
    save_file({**state, "added": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found, info = with_info(BertModel, tmp_path)
    assert set(info["missing_keys"]) == {"pooler.dense.bias"}
    assert set(info["unexpected_keys"]) == {"added"}
    assert found.pooler.dense.bias.device.type == "cpu"


def test_a_file_of_no_known_name_loads_and_reports_all(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    save_file({"placeholder": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found, info = with_info(BertModel, tmp_path)
    assert len(info["missing_keys"]) == len(list(found.state_dict()))


def test_a_state_dict_of_the_caller_is_what_is_saved(bert: BertModel, tmp_path: Path) -> None:
    other = {name: torch.ones_like(value) for name, value in bert.state_dict().items()}
    bert.save_pretrained(tmp_path, state_dict=other)

    assert all((value == 1).all() for value in BertModel.from_pretrained(tmp_path).state_dict().values())


def test_a_process_that_is_not_the_main_one_saves_no_weights(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "out", is_main_process=False)

    assert not (tmp_path / "out" / "config.json").exists()


def test_a_file_in_the_place_of_the_directory(bert: BertModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")

    bert.save_pretrained(tmp_path / "file")  # logs an error, and saves nothing
    assert (tmp_path / "file").read_text() == "here"


def test_a_model_on_meta_is_not_saved_as_garbage(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = BertModel(bert_config())

    with pytest.raises((RuntimeError, NotImplementedError, ValueError), match=r"."):
        model.save_pretrained(tmp_path)
    assert names(tmp_path) == set()


def test_old_names_gamma_and_beta(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found, info = with_info(BertModel, tmp_path)
    assert not info["missing_keys"]
    assert same(found, bert)


def test_key_mapping(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    state = {name.replace("encoder.", "tower."): value for name, value in bert.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})

    found, info = with_info(BertModel, tmp_path, key_mapping={r"^tower\.": "encoder."})
    assert not info["missing_keys"]
    assert same(found, bert)


def test_the_file_without_metadata_of_its_format(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    save_file({name: value.clone() for name, value in bert.state_dict().items()}, tmp_path / "model.safetensors")

    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_an_mlx_file(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in bert.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "mlx"})

    assert same(BertModel.from_pretrained(tmp_path), bert)


def test_a_directory_without_weights(bert: BertModel, tmp_path: Path) -> None:
    bert.config.save_pretrained(tmp_path)

    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(tmp_path / "nowhere")


def test_an_index_that_names_a_missing_shard(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, max_shard_size="20KB")
    min(tmp_path.glob("*.safetensors")).unlink()

    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(tmp_path)


def test_a_damaged_file_is_an_error(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])

    with pytest.raises(Exception, match=r"."):
        BertModel.from_pretrained(tmp_path)


def test_custom_code_is_saved_beside_the_weights(bert: BertModel, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    bert.save_pretrained(tmp_path / "out")

    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_ignored_keys_are_not_saved(tmp_path: Path) -> None:
    class Ignoring(BertForMaskedLM):
        _keys_to_ignore_on_save = ["cls.predictions.transform.dense.bias"]

    Ignoring(bert_config()).save_pretrained(tmp_path)

    assert "cls.predictions.transform.dense.bias" not in load_file(tmp_path / "model.safetensors")


def test_two_views_of_one_storage_are_saved_whole(tmp_path: Path) -> None:
    class Views(BertModel):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            both = torch.arange(8.0)
            self.first = nn.Parameter(both[:4])
            self.second = nn.Parameter(both[4:])

    Views(bert_config()).save_pretrained(tmp_path)

    state = load_file(tmp_path / "model.safetensors")
    assert state["first"].tolist() == [0, 1, 2, 3]
    assert state["second"].tolist() == [4, 5, 6, 7]


def test_two_names_that_nobody_declares_tied_are_refused(tmp_path: Path) -> None:
    class Shared(BertModel):
        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight

    with pytest.raises(RuntimeError, match="shared tensors"):
        Shared(bert_config()).save_pretrained(tmp_path)


def test_save_arguments_of_older_code_are_taken(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, safe_serialization=True)
    bert.save_pretrained(tmp_path, save_function=torch.save)
    bert.save_pretrained(tmp_path, some_argument_of_a_subclass=1)

    assert same(BertModel.from_pretrained(tmp_path, low_cpu_mem_usage=True), bert)
    assert same(BertModel.from_pretrained(tmp_path, torch_dtype=torch.float32), bert)


def test_no_pickle_is_written_whatever_is_asked(bert: BertModel, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, safe_serialization=False)

    assert names(tmp_path, ".bin") == set()
    assert same(BertModel.from_pretrained(tmp_path), bert)
