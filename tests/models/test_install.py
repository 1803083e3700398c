"""Turning it on and off: in blocks, in threads, in forks, in the middle of a call, and beside others' wrappers."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import BertModel, PreTrainedModel

import hfshard
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError
from hfshard.models.install_settings import current_settings
from tests.helpers.tiny_bert import bert
from tests.zoo.compare import read_json

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("uninstalled")]


def saved_by_hfshard(directory: Path) -> bool:
    """Save a stock model in shards, and tell whether hfshard has done it."""
    bert(1, cls=BertModel).save_pretrained(directory, max_shard_size=1000)
    return "hfshard" in read_json(directory / "model.safetensors.index.json")["metadata"]


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


def test_one_line_on_stderr_in_a_tree_of_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
