"""What other libraries record of a model's class, to import it again: transformers' class, wherever it is used."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig
from transformers.utils.generic import find_labels

import hfshard

pytestmark = pytest.mark.compat

CONFIG = BertConfig(
    vocab_size=6, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
    max_position_embeddings=4,
)  # fmt: skip
MODELING = "transformers.models.bert.modeling_bert"


class Mine(hfshard.ShardedModelMixin, transformers.BertModel):
    """Under a name of the user's."""


class MoreOfMine(Mine):
    """A class of a class with the mixin."""


class Own(hfshard.ShardedModelMixin, transformers.BertPreTrainedModel):
    """A model of the user's, which is no model of transformers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(4, 4)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def _read_by_diffusers(model: Any) -> tuple[str, str]:
    """Source: diffusers `_fetch_class_library_tuple`."""
    return model.__module__, model.__class__.__name__


@pytest.mark.parametrize("model_class", [Mine, MoreOfMine], ids=["mine", "more"])
def test_a_model_shows_the_name_and_the_module_of_transformers_class(model_class: Any, tmp_path: Path) -> None:
    model = model_class(CONFIG)
    model.save_pretrained(tmp_path)
    pickled = [pickle.loads(pickle.dumps(model, protocol)) for protocol in (2, 5)]
    for one in (model, model_class.from_pretrained(tmp_path), copy.deepcopy(model), copy.copy(model), *pickled):
        assert type(one) is model_class
        assert _read_by_diffusers(one) == (MODELING, "BertModel")


def test_the_class_is_found_where_it_was_written() -> None:
    for model_class in (Mine, MoreOfMine, Own):
        assert pickle.loads(pickle.dumps(model_class)) is copy.deepcopy(model_class) is model_class
        assert model_class.__module__ == __name__
    assert repr(Mine) == f"<class '{__name__}.Mine'>"


def test_a_model_of_the_users_is_recorded_as_what_it_is() -> None:
    assert _read_by_diffusers(Own(CONFIG)) == (__name__, "Own")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_under_fsdp2_it_is_what_transformers_class_is() -> None:
    mesh = init_device_mesh("cpu", (1,))
    ours, theirs = Mine(CONFIG), transformers.BertModel(CONFIG)
    for model in (ours, theirs):
        fully_shard(model, mesh=mesh)

    assert isinstance(ours, Mine)
    assert type(ours).__name__ == type(theirs).__name__ == "FSDPBertModel"
    assert ours.__module__ == MODELING


def test_what_transformers_decides_by_the_name_is_the_same() -> None:
    class Answering(hfshard.ShardedModelMixin, transformers.BertForQuestionAnswering): ...

    class Filling(hfshard.ShardedModelMixin, transformers.BertForMaskedLM): ...

    assert find_labels(Answering) == ["start_positions", "end_positions"]
    assert Answering(CONFIG).loss_type == "ForQuestionAnswering"
    assert "BertForMaskedLM" in repr(Filling(CONFIG))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("is_imported_late", [False, True])
def test_an_adapter_without_a_task_type_loads_where_the_users_class_is_not(
    is_imported_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    Mine(CONFIG).save_pretrained(base)
    adapted = peft.get_peft_model(Mine.from_pretrained(base), peft.LoraConfig(r=2, target_modules=["query"]))
    if is_imported_late:  # as it is when nobody has wrapped its method
        asking = peft.PeftModel._get_base_model_class.__wrapped__
        monkeypatch.setattr(peft.PeftModel, "_get_base_model_class", asking)
    adapted.save_pretrained(adapter)

    recorded = json.loads((adapter / "adapter_config.json").read_text())["auto_mapping"]
    assert recorded == {"base_model_class": "BertModel", "parent_library": MODELING}
    assert type(peft.AutoPeftModel.from_pretrained(adapter).get_base_model()) is transformers.BertModel
    assert type(peft.PeftModel.from_pretrained(Mine.from_pretrained(base), adapter).get_base_model()) is Mine


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_records_other_classes_as_ever(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for model_class in (Own, type("Plain", (transformers.BertModel,), {"__module__": __name__})):
        target = "layer" if model_class is Own else "query"
        adapted = peft.get_peft_model(model_class(CONFIG), peft.LoraConfig(r=2, target_modules=[target]))
        adapted.save_pretrained(tmp_path)
        recorded = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
        assert recorded == {"base_model_class": model_class.__name__, "parent_library": __name__}


def test_a_pipeline_of_diffusers_loads_where_the_users_class_is_not(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")

    class Encoding(diffusers.DiffusionPipeline):  # type: ignore[misc, name-defined]
        def __init__(self, text_encoder: Any) -> None:
            super().__init__()
            self.register_modules(text_encoder=text_encoder)

    model: Any = Mine(CONFIG)
    Encoding(model).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["text_encoder"] == ["transformers", "BertModel"]
    loaded: Any = Encoding.from_pretrained(tmp_path).text_encoder
    assert torch.equal(loaded.pooler.dense.weight, model.pooler.dense.weight)
    assert type(loaded) is transformers.BertModel
    assert type(Encoding.from_pretrained(tmp_path, text_encoder=model).text_encoder) is Mine
