"""diffusers: weights of its models by our verbs, and a pipeline whose text encoder is a model of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CLIPTextConfig, CLIPTextModel

import hfshard
from hfshard.errors import IntegrityError
from tests.programs.models import assert_ours, assert_same, flipped

pytestmark = pytest.mark.filterwarnings("ignore")

diffusers: Any = pytest.importorskip("diffusers", reason="pip install diffusers")


class TextEncoder(hfshard.ShardedModelMixin, CLIPTextModel):
    """As a user writes it."""


def unet() -> Any:
    return diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, add_attention=False,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def text_encoder(cls: type[CLIPTextModel]) -> Any:
    config = CLIPTextConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, projection_dim=8,
    )  # fmt: skip
    return cls(config)


def pipeline_class() -> Any:
    class Guided(diffusers.DiffusionPipeline):  # type: ignore[misc]  # diffusers is not checked
        """With a text encoder, and what it guides."""

        def __init__(self, unet: Any, text_encoder: Any, scheduler: Any) -> None:
            super().__init__()
            self.register_modules(unet=unet, text_encoder=text_encoder, scheduler=scheduler)

    return Guided


def test_weights_of_its_models_are_saved_sharded_and_loaded(tmp_path: Path) -> None:
    model = unet()
    hfshard.save_model(model, tmp_path / "ours", max_shard_size="20KB")

    assert_same(hfshard.load_model(unet(), tmp_path / "ours", verify="full"), model)
    assert_ours(tmp_path / "ours", shards=None)

    model.save_pretrained(tmp_path / "theirs")
    loaded = hfshard.load_model(unet(), tmp_path / "theirs" / "diffusion_pytorch_model.safetensors")
    assert_same(loaded, model)


def test_a_pipeline_saves_a_text_encoder_of_ours(tmp_path: Path) -> None:
    pipeline = pipeline_class()(unet(), text_encoder(TextEncoder), diffusers.DDPMScheduler())

    pipeline.save_pretrained(tmp_path, max_shard_size="6KB")

    assert_ours(tmp_path / "text_encoder", shards=None)
    assert (tmp_path / "text_encoder" / "model.safetensors.index.json").exists()
    assert json.loads((tmp_path / "model_index.json").read_text())["text_encoder"] == ["transformers", "CLIPTextModel"]
    stock = pipeline_class().from_pretrained(tmp_path)
    assert type(stock.text_encoder) is CLIPTextModel
    assert_same(stock.text_encoder, pipeline.text_encoder)
    assert_same(stock.unet, pipeline.unet)


def test_under_install_a_pipeline_goes_through_hfshard(tmp_path: Path) -> None:
    with hfshard.install():
        pipeline = pipeline_class()(unet(), text_encoder(CLIPTextModel), diffusers.DDPMScheduler())
        pipeline.save_pretrained(tmp_path)
        assert_ours(tmp_path / "text_encoder")
        assert_same(pipeline_class().from_pretrained(tmp_path).text_encoder, pipeline.text_encoder)

        with flipped(tmp_path / "text_encoder" / "model.safetensors"), pytest.raises(IntegrityError):
            hfshard.load_model(CLIPTextModel, tmp_path / "text_encoder", verify="full")
