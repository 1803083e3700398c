"""Turning it on and off: in blocks, threads, forks and workers, in the middle of a call, beside others' wrappers."""

from __future__ import annotations

import functools
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, BertModel, EncoderDecoderModel, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import hfshard
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError
from hfshard.models.install_settings import current_settings
from tests.helpers import processes
from tests.helpers.tiny_bert import bert, value_of
from tests.zoo.compare import read_json

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("uninstalled")]


def is_ours(directory: Path) -> bool:
    """Whether hfshard has saved there, in shards."""
    return "hfshard" in read_json(directory / "model.safetensors.index.json")["metadata"]


def saved_by_hfshard(directory: Path, value: float = 1) -> bool:
    """Save a stock model in shards, and tell whether hfshard has done it."""
    bert(value, cls=BertModel).save_pretrained(directory, max_shard_size=1000)
    return is_ours(directory)


def test_the_last_word_counts_and_a_block_takes_its_own_back(tmp_path: Path) -> None:
    assert not saved_by_hfshard(tmp_path)

    hfshard.install(quiet=True)
    hfshard.install(quiet=True)
    assert saved_by_hfshard(tmp_path)
    hfshard.uninstall()
    assert not saved_by_hfshard(tmp_path)

    with hfshard.install(verify="full", quiet=True):
        with hfshard.install(verify="none", quiet=True):
            assert current_settings().verify == "none"  # type: ignore[union-attr]
        assert current_settings().verify == "full"  # type: ignore[union-attr]
    assert current_settings() is None and not saved_by_hfshard(tmp_path)
    hfshard.uninstall()

    hfshard.install(quiet=True)
    with pytest.raises(ZeroDivisionError), hfshard.install(verify="full", quiet=True):
        raise ZeroDivisionError
    assert current_settings().verify == "structure"  # type: ignore[union-attr]


def test_blocks_of_two_threads_may_overlap() -> None:
    first, second = hfshard.install(quiet=True), hfshard.install(verify="full", quiet=True)
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert current_settings().verify == "full"  # type: ignore[union-attr]
    second.__exit__()
    assert current_settings() is None

    with hfshard.install(quiet=True):
        hfshard.uninstall()
        assert current_settings() is None
    assert current_settings() is None


def test_a_value_that_is_not_allowed_installs_nothing() -> None:
    with pytest.raises(InvalidArgumentError, match="verify must be"):
        hfshard.install(verify="ful")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="checksum must be"):
        hfshard.install(checksum="md5")  # type: ignore[arg-type]
    assert current_settings() is None


def test_a_tree_of_processes_says_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFSHARD_ANNOUNCED", "")
    monkeypatch.setenv("RANK", "1")
    hfshard.install()
    monkeypatch.setenv("RANK", "0")
    hfshard.install(quiet=True)
    assert capsys.readouterr().err == ""
    hfshard.install()
    hfshard.install()
    assert capsys.readouterr().err == (
        "hfshard 0.1.0 is on: save_pretrained, push_to_hub and from_pretrained of transformers models are crash-safe "
        "and checked (hfshard.uninstall() turns it off)\n"
    )


@pytest.mark.parametrize("wraps", [functools.wraps, lambda _: lambda function: function])
def test_wrappers_of_others_stay_and_are_called_once(
    wraps: Any, installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    ours: Any = vars(PreTrainedModel)["save_pretrained"]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(args)
        ours(self, *args, **kwargs)

    wrapper = wraps(ours)(theirs)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", wrapper)

    hfshard.install(quiet=True)
    assert saved_by_hfshard(tmp_path) and calls == [(tmp_path,)]
    hfshard.save_model(bert(1), tmp_path / "more")
    bert(1).save_pretrained(tmp_path / "mixin")
    hfshard.uninstall()
    assert vars(PreTrainedModel)["save_pretrained"] is wrapper
    assert not saved_by_hfshard(tmp_path) and calls[-1] == (tmp_path,)


class Slow(BertModel):
    """A model that loads a part of itself while its constructor runs."""

    begun, may_go_on = threading.Event(), threading.Event()

    def __init__(self, config: Any, part: Path) -> None:
        super().__init__(config)
        self.begun.set()
        assert self.may_go_on.wait(60)
        with torch.device("cpu"):  # transformers builds on the meta device, and refuses to load anything under it
            BertModel.from_pretrained(part)


def test_a_call_under_way_ends_as_it_began(installed: None, tmp_path: Path) -> None:
    assert saved_by_hfshard(tmp_path / "part") and saved_by_hfshard(tmp_path / "whole")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(Slow.from_pretrained, tmp_path / "whole", part=tmp_path / "part")
        assert Slow.begun.wait(60)
        hfshard.uninstall()
        next((tmp_path / "part").glob("model-00001-of-*")).write_bytes(b"")
        Slow.may_go_on.set()

        with pytest.raises(DamagedCheckpointError, match="part/model-00001-of-"):
            loading.result()
    with pytest.raises(SafetensorError):
        BertModel.from_pretrained(tmp_path / "part")


def by_join(load: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(load()))
    thread.start()
    thread.join()
    return results[0]


def by_result(load: Any) -> Any:
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(load), pool.submit(load)]
        return [future.result() for future in futures].pop()


def by_way_of_another(load: Any) -> Any:
    return by_join(functools.partial(by_result, load))


def by_itself(load: Any) -> Any:
    with torch.device("cpu"):
        return load()


class InThreads(BertModel):
    """A model whose constructor loads parts of it in threads, as the meta device of its own thread is not theirs."""

    def __init__(self, config: Any, part: Path | None = None, how: Any = None) -> None:
        super().__init__(config)
        if part is not None:
            self.part = how(functools.partial(InThreads.from_pretrained, part, dtype="bfloat16"))


@pytest.mark.parametrize("how", [by_join, by_result, by_way_of_another, by_itself])
def test_a_constructor_may_wait_for_threads_that_load_parts(how: Any, installed: None, tmp_path: Path) -> None:
    bert(1, cls=BertModel).save_pretrained(tmp_path / "whole")
    part = bert(2, cls=BertModel)
    part.save_pretrained(tmp_path / "part")
    loaded: list[Any] = []

    def load() -> None:
        loaded.append(InThreads.from_pretrained(tmp_path / "whole", part=tmp_path / "part", how=how))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(100)

    assert not thread.is_alive()
    assert torch.get_default_dtype() is torch.float32
    assert loaded[0].dtype is torch.float32
    assert torch.equal(loaded[0].part.pooler.dense.weight, part.pooler.dense.weight.bfloat16())


def test_to_install_imports_neither_torch_nor_transformers(child_environment: dict[str, str]) -> None:
    code = (
        "import sys, hfshard\nwith hfshard.install(): pass\nhfshard.install()\nhfshard.uninstall()\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy', 'tqdm'} & set(sys.modules)))"
    )
    child_environment.pop("HFSHARD_ANNOUNCED", None)
    done = processes.run_fresh(["-c", code], env=child_environment, check=True)
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
        return saved_by_hfshard(directory, index) and value_of(AutoModel.from_pretrained(directory)) == index


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
    assert saved_by_hfshard(directory)


@pytest.mark.parametrize("task", [in_workers, reloading])
def test_in_a_process_of_its_own(task: Any, tmp_path: Path) -> None:
    with open(tmp_path / "said", "w+") as said:
        child = processes.call(task, tmp_path / "out", stdout=said.fileno(), stderr=subprocess.STDOUT)
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


def test_models_in_models_are_saved_loaded_and_pushed(installed: None, tmp_path: Path) -> None:
    composed = bert(1, cls=Composed)
    composed.part = bert(2, cls=BertModel)

    composed.save_pretrained(tmp_path / "out", max_shard_size=1000)
    assert is_ours(tmp_path / "out") and is_ours(tmp_path / "out" / "part")
    loaded: Any = Composed.from_pretrained(tmp_path / "out")
    assert value_of(loaded.part) == 2 and type(loaded) is Composed

    composed.push_to_hub(str(tmp_path / "hub"), max_shard_size=1000)
    hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "pulled", allow_patterns="part/*")
    again: Any = Composed.from_pretrained(str(tmp_path / "pulled"))
    assert value_of(again.part) == 2


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
