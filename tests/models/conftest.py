"""Directories that stock transformers and hfshard saved of the zoo, made once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import hfshard
from tests.zoo.compare import Facts, Loaded, differences, facts_of_load, load
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

WHOLE, SHARDS = "5GB", "20KB"


class Saves:
    """The zoo on disk, and as it was loaded from there. Nobody writes into these directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stock = cache(self._stock)
        self.ours = cache(self._ours)
        self.stock_facts = cache(self._stock_facts)
        self.load_of_stock = cache(self._load_of_stock)
        self._models: dict[Path, Any] = {}

    def _stock(self, name: str, size: str = WHOLE) -> Path:
        return self._saved(name, size, "stock", ZOO[name].stock_class)

    def _ours(self, name: str, size: str = WHOLE) -> Path:
        return self._saved(name, size, "ours", with_mixin(ZOO[name].stock_class))

    def _saved(self, name: str, size: str, who: str, model_class: type[PreTrainedModel]) -> Path:
        directory = self.root / f"{name}-{size}-{who}"
        with torch.device("cpu"):  # whatever the test that asks first has for its default
            self._models[directory] = ZOO[name].build(model_class)
            self._models[directory].save_pretrained(directory, max_shard_size=size)
        return directory

    def model_in(self, directory: Path) -> Any:
        """The model that was saved there, as the save left it."""
        return self._models[directory]

    def _load_of_stock(self, who: str, name: str, size: str = WHOLE) -> tuple[Loaded, Facts]:
        """What "stock" transformers or "ours" loads of what stock transformers saved, and what was seen of it then."""
        directory, stock_class = self.stock(name, size), ZOO[name].stock_class
        loaded = load(stock_class if who == "stock" else with_mixin(stock_class), directory)
        return loaded, facts_of_load(loaded, directory)

    def _stock_facts(self, name: str, size: str = WHOLE, class_name: str | None = None) -> Facts:
        """What stock transformers sees of what stock transformers saved, as its class or as another."""
        if class_name in (None, ZOO[name].class_name):
            return self.load_of_stock("stock", name, size)[1]
        directory = self.stock(name, size)
        return facts_of_load(load(getattr(transformers, class_name or ""), directory), directory)

    def differences(self, model_class: Any, directory: Path, *of_stock: str) -> list[str]:
        """How what a class loads from a directory differs from `stock_facts`."""
        return differences(facts_of_load(load(model_class, directory), directory), self.stock_facts(*of_stock))


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session", autouse=True)
def own_modules_cache(modules_cache: Path) -> None:
    """Custom code is copied into a directory of the session's own before it is imported."""


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """Transformers' bars over shards and weights tell a test nothing."""
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """Whatever a test installs is gone when it ends."""
    hfshard.uninstall()
    yield
    hfshard.uninstall()


@pytest.fixture
def installed() -> None:
    """Hfshard is on."""
    hfshard.install(quiet=True)
