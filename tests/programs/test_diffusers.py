"""diffusers: weights of its models by our verbs, its models once hfshard is installed, and whole pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

import hfshard
from hfshard.errors import DamagedCheckpointError, HfshardError, IntegrityError, InvalidArgumentError
from tests.helpers import processes
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


NAME = "diffusion_pytorch_model"
SINGLE, INDEX = f"{NAME}.safetensors", f"{NAME}.safetensors.index.json"


def autoencoder() -> Any:
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1)


def transformer() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, num_layers=1, sample_size=4, patch_size=2,
        norm_num_groups=2, num_embeds_ada_norm=4,
    )  # fmt: skip


def assert_checked(directory: Path, cls: Any, file: str) -> None:
    """A flipped bit of a file that hfshard saved is found, in a load of every byte."""
    with flipped(directory / file), hfshard.install(verify="full", quiet=True), pytest.raises(IntegrityError):
        cls.from_pretrained(directory)


def files_of(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("build", "size", "variant"),
    [(unet, "8KB", None), (autoencoder, "8KB", None), (transformer, "8KB", None), (unet, "1GB", None),
     (unet, "8KB", "fp16")],
)  # fmt: skip
def test_under_install_its_models_are_saved_as_it_saves_them(
    build: Any, size: str, variant: str | None, tmp_path: Path
) -> None:
    model = build()
    model.save_pretrained(tmp_path / "stock", max_shard_size=size, variant=variant)

    with hfshard.install(quiet=True):
        model.save_pretrained(tmp_path / "own", max_shard_size=size, variant=variant)
        loaded = type(model).from_pretrained(tmp_path / "own", variant=variant)

    infix = "" if variant is None else f".{variant}"
    entry = f"{NAME}.safetensors.index{infix}.json" if size == "8KB" else f"{NAME}{infix}.safetensors"
    assert files_of(tmp_path / "own") == files_of(tmp_path / "stock") >= {entry, "config.json"}
    assert (tmp_path / "own" / "config.json").read_bytes() == (tmp_path / "stock" / "config.json").read_bytes()
    assert hfshard.verify_checkpoint(tmp_path / "own" / entry).ok
    assert_same(loaded, model)
    assert not loaded.training
    assert_same(type(model).from_pretrained(tmp_path / "own", variant=variant), model)


def test_a_save_replaces_the_whole_checkpoint_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    first, second = unet(), unet()
    with hfshard.install(quiet=True):
        first.save_pretrained(tmp_path, safe_serialization=False)
        first.save_pretrained(tmp_path, max_shard_size="20KB")
        assert_checked(tmp_path, type(first), sorted(path.name for path in tmp_path.glob("*.safetensors"))[0])
        second.save_pretrained(tmp_path)

        assert files_of(tmp_path) == {SINGLE, "config.json"}
        assert_same(type(first).from_pretrained(tmp_path), second)
        (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-4])
        with pytest.raises(DamagedCheckpointError, match=NAME):
            type(first).from_pretrained(tmp_path)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    model = unet()
    with hfshard.install(quiet=True):
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        broken = unet()
        broken.register_buffer("odd", torch.zeros(2).to_sparse())
        with pytest.raises(HfshardError):
            broken.save_pretrained(tmp_path)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_tied_weights_are_copied_since_it_ties_none(tmp_path: Path) -> None:
    model = unet()
    model.conv_norm_out.bias = model.conv_norm_out.weight

    with hfshard.install(quiet=True):
        model.save_pretrained(tmp_path)

    assert_same(type(model).from_pretrained(tmp_path), model)


def test_a_repo_in_the_cache_is_checked(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--unet"
    snapshot = repo / "snapshots" / ("0" * 40)
    model = unet()
    with hfshard.install(quiet=True):
        model.save_pretrained(snapshot / "unet", max_shard_size="20KB")
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(snapshot.name)
        given = {"subfolder": "unet", "cache_dir": tmp_path, "local_files_only": True}

        assert_same(type(model).from_pretrained("org/unet", **given), model)
        shard = sorted((snapshot / "unet").glob("*.safetensors"))[0]
        with flipped(shard), hfshard.install(verify="full", quiet=True), pytest.raises(IntegrityError):
            type(model).from_pretrained("org/unet", **given)


@pytest.mark.parametrize("first", ["hfshard", "diffusers"])
def test_it_is_patched_when_it_is_imported_and_never_imported_by_hfshard(
    first: str, child_environment: dict[str, str]
) -> None:
    install = "import sys, hfshard; hfshard.install(quiet=True); import transformers.modeling_utils"
    load = "from diffusers.models.modeling_utils import ModelMixin"
    lines = [install, "assert 'diffusers' not in sys.modules", load] if first == "hfshard" else [load, install]
    processes.run_fresh(
        ["-c", "\n".join([*lines, "assert hasattr(ModelMixin.save_pretrained, '_answers_for_hfshard')"])],
        env=child_environment,
        timeout=500,  # two large imports
        check=True,
    )


def test_an_address_is_refused() -> None:
    with hfshard.install(quiet=True), pytest.raises(InvalidArgumentError, match="are saved into directories"):
        unet().save_pretrained("s3://bucket/unet")
    with hfshard.install(quiet=True), pytest.raises(InvalidArgumentError, match="are saved into directories"):
        diffusers.UNet2DModel.from_pretrained("s3://bucket/unet")


def test_under_install_a_pipeline_goes_through_hfshard(tmp_path: Path) -> None:
    with hfshard.install(quiet=True):
        pipeline = pipeline_class()(unet(), text_encoder(CLIPTextModel), diffusers.DDPMScheduler())
        pipeline.save_pretrained(tmp_path, max_shard_size="20KB")
        loaded = pipeline_class().from_pretrained(tmp_path)

    assert_ours(tmp_path / "text_encoder")
    assert_checked(tmp_path / "unet", type(pipeline.unet), sorted((tmp_path / "unet").glob("*.safetensors"))[0].name)
    for each in (loaded, pipeline_class().from_pretrained(tmp_path)):
        assert_same(each.text_encoder, pipeline.text_encoder)
        assert_same(each.unet, pipeline.unet)
