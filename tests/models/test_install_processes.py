"""Turned on before transformers is imported, in threads, in forked processes, and when its module is reloaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, BertModel, EncoderDecoderModel, GPT2Config, GPT2LMHeadModel

import hfshard
from hfshard.errors import DamagedCheckpointError
from tests.helpers import forkserver
from tests.helpers.tiny_bert import bert, value_of
from tests.zoo.compare import read_json

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("uninstalled")]


def is_ours(directory: Path) -> bool:
    """Whether hfshard has saved there, in shards."""
    return "hfshard" in read_json(directory / "model.safetensors.index.json")["metadata"]


def test_to_install_imports_neither_torch_nor_transformers(child_environment: dict[str, str]) -> None:
    code = (
        "import sys, hfshard\nwith hfshard.install(): pass\nhfshard.install()\nhfshard.uninstall()\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy', 'tqdm'} & set(sys.modules)))"
    )
    child_environment.pop("HFSHARD_ANNOUNCED", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert done.stderr.startswith("hfshard 0.1.0 is on: ") and done.stderr.count("\n") == 1


class Saving(Dataset[bool]):
    """Saves a stock model for each of its items, and says whether hfshard did."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        directory = self.directory / str(index)
        bert(index, cls=BertModel).save_pretrained(directory, max_shard_size=1000)
        return is_ours(directory) and value_of(AutoModel.from_pretrained(directory)) == index


def in_workers(directory: Path) -> None:
    """Let forked workers of a DataLoader save."""
    with hfshard.install(quiet=True):
        loader = DataLoader(Saving(directory), num_workers=2, multiprocessing_context="fork", batch_size=None)
        assert list(loader) == [True, True]


def reloading(directory: Path) -> None:
    """Reload the module of PreTrainedModel: classes from before, and of the new one, are hfshard's."""
    import importlib

    import transformers.modeling_utils

    old = transformers.modeling_utils.PreTrainedModel
    hfshard.install(quiet=True)
    importlib.reload(transformers.modeling_utils)
    new: Any = transformers.modeling_utils.PreTrainedModel
    assert new is not old
    for base in (old, new):
        assert hasattr(vars(base)["save_pretrained"], "_answers_for_hfshard")
    bert(3, cls=BertModel).save_pretrained(directory, max_shard_size=1000)
    assert is_ours(directory)


@pytest.mark.parametrize("task", [in_workers, reloading])
def test_in_a_process_of_its_own(task: Any, tmp_path: Path) -> None:
    with open(tmp_path / "said", "w+") as said:
        child = forkserver.call(task, tmp_path / "out", stdout=said.fileno(), stderr=subprocess.STDOUT)
        assert child.wait(120) == 0, (tmp_path / "said").read_text()


def test_many_threads_save_and_load_at_once_while_others_turn_it_on_and_off(tmp_path: Path, installed: None) -> None:
    berts = [bert(number, cls=BertModel) for number in range(4)]
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10, n_positions=8))
    memory: Any = {"device_map": "auto", "max_memory": {"cpu": 10**9}}  # which transformers loads by itself

    def save_and_load(number: int) -> None:
        for turn in range(3):
            directory = tmp_path / f"{number}-{turn}"
            if number % 2:
                berts[number].save_pretrained(directory, max_shard_size=1000)
                assert value_of(AutoModel.from_pretrained(directory)) == number
            else:
                gpt.save_pretrained(directory)
                loaded = GPT2LMHeadModel.from_pretrained(directory, **(memory if turn else {}))
                assert loaded.lm_head.weight is loaded.transformer.wte.weight
                assert torch.equal(loaded.lm_head.weight, gpt.lm_head.weight)

    def turn_on_and_off() -> None:
        for _ in range(200):
            with hfshard.install(verify="full", quiet=True):
                hfshard.install(quiet=True)

    with ThreadPoolExecutor(6) as pool:
        for future in [*(pool.submit(save_and_load, number) for number in range(4)), pool.submit(turn_on_and_off)]:
            future.result()


class Composed(BertModel):
    """A model with a part of its own directory, which it saves and loads with its own methods."""

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        model = super().from_pretrained(path, *args, **kwargs)
        model.part = AutoModel.from_pretrained(Path(path) / "part")
        return model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        part: Any = self._modules.pop("part")
        super().save_pretrained(save_directory, *args, **kwargs)
        part.save_pretrained(Path(save_directory) / "part", *args, **kwargs)
        self.part = part


@pytest.fixture
def composed() -> Iterator[Any]:
    """A model filled with ones, with a part filled with twos."""
    model = bert(1, cls=Composed)
    model.part = bert(2, cls=BertModel)
    yield model


def test_models_in_models_are_saved_loaded_and_pushed(composed: Any, installed: None, tmp_path: Path) -> None:
    composed.save_pretrained(tmp_path / "out", max_shard_size=1000)
    assert is_ours(tmp_path / "out") and is_ours(tmp_path / "out" / "part")
    loaded: Any = Composed.from_pretrained(tmp_path / "out")
    assert value_of(loaded.part) == 2 and type(loaded) is Composed

    composed.push_to_hub(str(tmp_path / "hub"), max_shard_size=1000)
    pulled = hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "pulled", allow_patterns="part/*")
    again: Any = Composed.from_pretrained(str(tmp_path / "pulled"))
    assert value_of(again.part) == 2, pulled


def test_a_composite_loads_its_parts_with_checks(installed: None, tmp_path: Path) -> None:
    parts = [str(tmp_path / "encoder"), str(tmp_path / "decoder")]
    for number, part in enumerate(parts, start=1):
        bert(number, cls=BertModel).save_pretrained(part)
    build: Any = EncoderDecoderModel.from_encoder_decoder_pretrained
    both = build(*parts)
    assert value_of(both.encoder) == 1
    both.save_pretrained(tmp_path / "both")
    loaded: Any = EncoderDecoderModel.from_pretrained(tmp_path / "both")
    assert value_of(loaded.encoder) == 1

    weights = tmp_path / "decoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(DamagedCheckpointError, match="decoder"):
        build(*parts)
