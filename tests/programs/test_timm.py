"""timm: its models by our verbs, in its own folders for the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hfshard
from tests.programs.models import assert_ours, assert_same

pytestmark = pytest.mark.filterwarnings("ignore")

timm: Any = pytest.importorskip("timm", reason="pip install timm")


def test_a_folder_of_timms_gets_weights_of_ours(tmp_path: Path) -> None:
    model = made()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    assert_same(hfshard.load_model(made(), tmp_path), model)

    trained = made()
    hfshard.save_model(trained, tmp_path)

    assert_ours(tmp_path)
    assert_same(timm.create_model(f"local-dir:{tmp_path}", pretrained=True), trained)
    assert_same(made(checkpoint_path=str(tmp_path / "model.safetensors")), trained)


def test_its_models_are_sharded_and_pushed(tmp_path: Path) -> None:
    model = made()
    hfshard.save_model(model, tmp_path / "out", max_shard_size="500KB")
    assert_ours(tmp_path / "out", shards=None)

    hfshard.push_checkpoint(tmp_path / "out", tmp_path / "hub")
    assert_same(hfshard.load_model(made(), tmp_path / "hub", verify="full"), model)


def made(**options: Any) -> Any:
    return timm.create_model("test_vit", num_classes=3, **options)
