"""Directories that stock transformers and hfshard saved of the zoo, made once for the whole session."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedModel

from tests.zoo.compare import Facts, facts_of_load, load
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

WHOLE, SHARDS = "5GB", "20KB"


class Saves:
    """The zoo on disk. Nobody writes into these directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stock = cache(self._stock)
        self.ours = cache(self._ours)
        self.stock_facts = cache(self._stock_facts)

    def _stock(self, name: str, size: str = WHOLE) -> Path:
        return self._saved(name, size, "stock", ZOO[name].stock_class)

    def _ours(self, name: str, size: str = WHOLE) -> Path:
        return self._saved(name, size, "ours", with_mixin(ZOO[name].stock_class))

    def _saved(self, name: str, size: str, who: str, model_class: type[PreTrainedModel]) -> Path:
        directory = self.root / f"{name}-{size}-{who}"
        ZOO[name].build(model_class).save_pretrained(directory, max_shard_size=size)
        return directory

    def _stock_facts(self, name: str, size: str = WHOLE, class_name: str | None = None) -> Facts:
        """What stock transformers sees of what stock transformers saved, as its class or as another."""
        directory = self.stock(name, size)
        stock_class = getattr(transformers, class_name or ZOO[name].class_name)
        return facts_of_load(load(stock_class, directory), directory)


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
