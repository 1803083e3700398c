"""A class with the mixin is to transformers and other libraries what its own class is, and users' overrides run."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    CLIPVisionModel,
    LlamaForTokenClassification,
    MixtralForCausalLM,
    PreTrainedModel,
    ViTModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.bert.modeling_bert import BertPreTrainedModel
from transformers.models.glm_image.modeling_glm_image import GlmImageVQVAE
from transformers.utils.generic import find_labels

import hfshard
from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnknownArgumentError
from hfshard.models import model_builder, model_classes
from hfshard.models.model_classes import architecture_of
from tests.helpers import processes
from tests.models.conftest import SHARDS, Saves
from tests.zoo.compare import raw_tensors, read_json
from tests.zoo.hub_cache import REPO, put_in_cache
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat


def test_a_users_own_constructor_and_methods_are_used(saves: Saves) -> None:
    class Counting(hfshard.ShardedModelMixin, BertModel):
        def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
            super().__init__(config, add_pooling_layer)
            self.was_built_here = True

        def answer(self) -> int:
            return 42

    model = Counting.from_pretrained(saves.stock("bert"))

    assert type(model) is Counting and model.was_built_here and model.answer() == 42


def test_a_class_of_a_class_with_the_mixin_names_the_same_architecture(saves: Saves, tmp_path: Path) -> None:
    class Vision(with_mixin(ViTModel)):  # type: ignore[misc]
        pass

    Vision.from_pretrained(saves.stock("vit")).save_pretrained(tmp_path)

    assert raw_tensors(tmp_path) == raw_tensors(saves.stock("vit"))
    assert type(Vision.from_pretrained(tmp_path)) is Vision
    assert '"ViTModel"' in (tmp_path / "config.json").read_text()


def test_a_model_written_on_the_mixin_is_its_own_architecture() -> None:
    class Net(hfshard.ShardedModelMixin, BertPreTrainedModel):
        def forward(self) -> None: ...

    class Headless(hfshard.ShardedModelMixin, GlmImageVQVAE):
        """The stock class has no forward either."""

    assert architecture_of(Net) is Net
    assert architecture_of(type("Named", (Net,), {})) is not BertPreTrainedModel
    assert architecture_of(Headless) is GlmImageVQVAE
    assert architecture_of(BertModel) is BertModel


@pytest.mark.parametrize("stock_class", [MixtralForCausalLM, ViTModel, CLIPVisionModel])
def test_it_is_no_custom_code(stock_class: type) -> None:
    assert not with_mixin(stock_class).is_custom_code()


def test_a_model_made_from_a_config_has_the_loss_of_its_stock_class() -> None:
    config = ZOO["llama_untied"].make_config()

    assert with_mixin(LlamaForTokenClassification)(config).loss_type == "ForTokenClassification"


@pytest.mark.parametrize("name", ["mixtral", "bert", "gpt2"])
def test_it_chooses_the_same_attention_and_experts(name: str) -> None:
    ours, theirs = ZOO[name].build(with_mixin(ZOO[name].stock_class)), ZOO[name].build()

    for what in ("_attn_implementation", "_experts_implementation"):
        assert getattr(ours.config, what) == getattr(theirs.config, what)
    ours.set_attn_implementation("eager")
    assert ours.config._attn_implementation == "eager"


def test_adapters_see_the_conversions_of_the_stock_class() -> None:
    model = ZOO["mixtral"].build(with_mixin(MixtralForCausalLM))

    assert get_model_conversion_mapping(model, add_legacy=False)


def test_an_offloaded_model_is_saved_under_its_stock_class(saves: Saves, tmp_path: Path) -> None:
    specimen = ZOO["llama_untied"]
    places = {"model": "cpu", "lm_head": "disk"}
    for who, model_class in (("theirs", specimen.stock_class), ("ours", with_mixin(specimen.stock_class))):
        folder = tmp_path / f"{who}-offloaded"
        model = model_class.from_pretrained(saves.stock("llama_untied"), device_map=places, offload_folder=folder)
        with pytest.warns(UserWarning, match="offloaded modules"):
            model.save_pretrained(tmp_path / who, max_shard_size=SHARDS)

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert raw_tensors(ours) == raw_tensors(theirs) == raw_tensors(saves.stock("llama_untied"))
    assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()


def test_two_classes_of_one_name_do_not_disturb_each_other(saves: Saves) -> None:
    for name in ("vit", "mixtral", "vit", "clip_vision"):
        mine = with_mixin(ZOO[name].stock_class)
        assert saves.differences(mine, saves.stock(name, SHARDS), name, SHARDS) == []


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "mamba", "t5", "whisper", "vision_encoder_decoder"])
def test_it_generates_what_the_stock_class_generates(name: str, saves: Saves) -> None:
    inputs = {"whisper": torch.ones(1, 8, 24), "vision_encoder_decoder": torch.ones(1, 3, 16, 16)}
    given = inputs.get(name, torch.tensor([[1, 5, 9]]))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
    if name == "vision_encoder_decoder":
        options["decoder_start_token_id"] = 1
    classes: tuple[Any, Any] = (ZOO[name].stock_class, with_mixin(ZOO[name].stock_class))

    ours, theirs = (each.from_pretrained(saves.stock(name)).generate(given, **options) for each in classes)

    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_process_that_is_forked_beside_a_load_does_not_wait_for_it() -> None:
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with model_classes._alias_lock.held(), model_builder.building_lock.held():
            is_held.set()
            is_over.wait(120)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert is_held.wait(60)

    def take_locks() -> None:
        model_classes.alias_class(with_mixin(BertModel))
        with model_builder.building_lock.held():
            pass

    status = processes.exit_of_fork(take_locks)
    is_over.set()
    thread.join()
    assert status == 0


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8}
TINY = BertConfig(**SIZES)  # type: ignore[arg-type]
MODELING = "transformers.models.bert.modeling_bert"


class Mine(hfshard.ShardedModelMixin, BertModel):
    """Under a name of the user's."""


class MoreOfMine(Mine):
    """A class of a class with the mixin."""


class Own(hfshard.ShardedModelMixin, BertPreTrainedModel):
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
    model = model_class(TINY)
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
    assert _read_by_diffusers(Own(TINY)) == (__name__, "Own")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_under_fsdp2_it_is_what_transformers_class_is(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    ours, theirs = Mine(TINY), BertModel(TINY)
    for model in (ours, theirs):
        fully_shard(model, mesh=mesh)

    assert isinstance(ours, Mine)
    assert type(ours).__name__ == type(theirs).__name__ == "FSDPBertModel"
    assert ours.__module__ == MODELING


def test_what_transformers_decides_by_the_name_is_the_same() -> None:
    class Answering(hfshard.ShardedModelMixin, transformers.BertForQuestionAnswering): ...

    class Filling(hfshard.ShardedModelMixin, transformers.BertForMaskedLM): ...

    assert find_labels(Answering) == ["start_positions", "end_positions"]
    assert Answering(TINY).loss_type == "ForQuestionAnswering"
    assert "BertForMaskedLM" in repr(Filling(TINY))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("is_imported_late", [False, True])
def test_an_adapter_without_a_task_type_loads_where_the_users_class_is_not(
    is_imported_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    Mine(TINY).save_pretrained(base)
    adapted = peft.get_peft_model(Mine.from_pretrained(base), peft.LoraConfig(r=2, target_modules=["query"]))
    if is_imported_late:  # as it is when nobody has wrapped its method
        asking = peft.PeftModel._get_base_model_class.__wrapped__
        monkeypatch.setattr(peft.PeftModel, "_get_base_model_class", asking)
    adapted.save_pretrained(adapter)

    recorded = json.loads((adapter / "adapter_config.json").read_text())["auto_mapping"]
    assert recorded == {"base_model_class": "BertModel", "parent_library": MODELING}
    assert type(peft.AutoPeftModel.from_pretrained(adapter).get_base_model()) is BertModel
    assert type(peft.PeftModel.from_pretrained(Mine.from_pretrained(base), adapter).get_base_model()) is Mine


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_records_other_classes_as_ever(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for model_class in (Own, type("Plain", (BertModel,), {"__module__": __name__})):
        target = "layer" if model_class is Own else "query"
        adapted = peft.get_peft_model(model_class(TINY), peft.LoraConfig(r=2, target_modules=[target]))
        adapted.save_pretrained(tmp_path)
        recorded = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
        assert recorded == {"base_model_class": model_class.__name__, "parent_library": __name__}


def test_a_pipeline_of_diffusers_loads_where_the_users_class_is_not(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")

    class Encoding(diffusers.DiffusionPipeline):  # type: ignore[misc, name-defined]
        def __init__(self, text_encoder: Any) -> None:
            super().__init__()
            self.register_modules(text_encoder=text_encoder)

    model: Any = Mine(TINY)
    Encoding(model).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["text_encoder"] == ["transformers", "BertModel"]
    loaded: Any = Encoding.from_pretrained(tmp_path).text_encoder
    assert torch.equal(loaded.pooler.dense.weight, model.pooler.dense.weight)
    assert type(loaded) is BertModel
    assert type(Encoding.from_pretrained(tmp_path, text_encoder=model).text_encoder) is Mine


HEAD = "head.pt"
COMMIT = "d" * 40

calls: list[dict[str, Any]] = []
"""What the overrides were called with."""


class HeadMixin:
    """Keeps a tensor in a file of its own; what a user adds to a model's class or puts beside it."""

    head = torch.ones(2)

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, scale: int = 1, **kwargs: Any) -> Any:
        calls.append({"name": cls.__name__, "path": path, **kwargs})
        loaded = super().from_pretrained(path, *args, **kwargs)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        assert isinstance(model, cls)
        if os.path.isdir(path):
            model.head = torch.load(os.path.join(path, HEAD), weights_only=True) * scale
        return loaded

    def save_pretrained(self, save_directory: Any, *args: Any, note: str = "", **kwargs: Any) -> None:
        calls.append({"name": type(self).__name__, "path": save_directory, "note": note, **kwargs})
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        torch.save(self.head, os.path.join(save_directory, HEAD))


class Stock(HeadMixin, BertModel):  # type: ignore[misc]
    """As upstream: without hfshard's mixin."""


class Beside(hfshard.ShardedModelMixin, HeadMixin, BertModel):
    """The override stands between the mixin and the model's class."""


class Below(hfshard.ShardedModelMixin, Stock):
    """The override is the model's own."""


class Above(HeadMixin, hfshard.ShardedModelMixin, BertModel):  # type: ignore[misc]
    """The override calls the mixin."""


CLASSES = [Above, Beside, Below]
WITH_FUNCTIONS = [*CLASSES, Stock]
"""`load_model` and `save_model` take any class."""


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    make(Below).save_pretrained(directory)
    return directory


def make(model_class: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(BertConfig(**SIZES))  # type: ignore[arg-type]
    model.head = torch.tensor([2.0, 3.0])
    return model


@pytest.mark.parametrize("model_class", CLASSES)
def test_an_override_is_called_with_what_the_user_gave(model_class: Any, saved: Path) -> None:
    model = model_class.from_pretrained(saved, scale=10, dtype="float32", attn_implementation="eager")

    assert type(model) is model_class
    assert torch.equal(model.head, torch.tensor([20.0, 30.0]))
    assert calls == [{"name": model_class.__name__, "path": saved, "dtype": "float32", "attn_implementation": "eager"}]
    assert model.name_or_path == str(saved) and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("model_class", WITH_FUNCTIONS)
def test_load_model_calls_the_override_and_checks_at_its_bottom(model_class: Any, saved: Path, tmp_path: Path) -> None:
    model = hfshard.load_model(model_class, saved, scale=10)

    assert type(model) is model_class
    assert torch.equal(model.head, torch.tensor([20.0, 30.0]))
    assert calls == [{"name": model_class.__name__, "path": saved}]
    hfshard.save_state_dict({**model.state_dict(), "more": torch.zeros(1)}, tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(StateDictMismatchError, match="more"):
        hfshard.load_model(model_class, tmp_path, strict=True)


@pytest.mark.parametrize("model_class", CLASSES)
def test_an_override_returns_what_it_returned(model_class: Any, saved: Path) -> None:
    model, info = model_class.from_pretrained(saved, output_loading_info=True)

    assert type(model) is model_class and model.head[0] == 2
    assert info["missing_keys"] == set() or info["missing_keys"] == []

    class Wrapped(model_class):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"model": super().from_pretrained(*args, **kwargs), "note": 7}

    result: Any = Wrapped.from_pretrained(saved)
    assert type(result["model"]) is Wrapped and result["note"] == 7


@pytest.mark.parametrize("how", ["method", "function", "push"])
@pytest.mark.parametrize("model_class", WITH_FUNCTIONS)
def test_an_override_of_save_pretrained_writes_its_part(model_class: Any, how: str, tmp_path: Path) -> None:
    model = make(model_class)
    if how == "method":
        model.save_pretrained(tmp_path / "out", max_shard_size="2KB", note="mine")
    elif how == "function":
        index = hfshard.save_model(model, tmp_path / "out", max_shard_size="2KB", checksum="xxh3")
        assert index is not None
        assert all(record.xxh3 for name, record in index.files.items() if name.endswith(".safetensors"))
    elif model_class is Stock:
        pytest.skip("push_to_hub of a class without the mixin is transformers'")
    else:
        model.push_to_hub(tmp_path / "hub", max_shard_size="2KB")
        hfshard.pull_checkpoint(str(tmp_path / "hub"), tmp_path / "out", allow_patterns=HEAD)

    assert len(calls) == 1 and calls[0]["max_shard_size"] == "2KB" and calls[0]["name"] == model_class.__name__
    assert calls[0]["note"] == ("mine" if how == "method" else "")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {HEAD, "config.json", "model.safetensors.index.json"} <= names
    loaded = Stock.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.head, model.head)
    assert torch.equal(loaded.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)


def test_an_override_gets_the_name_of_a_repo_and_its_token(saved: Path, tmp_path: Path) -> None:
    put_in_cache(tmp_path, saved, commit=COMMIT, refs={"main": COMMIT})
    for load_it in (Below.from_pretrained, lambda *args, **kwargs: hfshard.load_model(Stock, *args, **kwargs)):
        model: Any = load_it(REPO, cache_dir=tmp_path, token="hf_mine")

        assert calls.pop() == {"name": type(model).__name__, "path": REPO, "cache_dir": tmp_path, "token": "hf_mine"}
        assert model.name_or_path == REPO


def test_an_override_may_change_the_path_and_load_other_models(saved: Path, tmp_path: Path) -> None:
    make(BertModel).save_pretrained(tmp_path)

    class Pair(BertModel):
        @classmethod
        def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            model: Any = super().from_pretrained({"mine": saved}[name], *args, **kwargs)
            model.stock = BertModel.from_pretrained(tmp_path)
            model.ours = Below.from_pretrained(saved)
            model.again = super().from_pretrained(tmp_path)
            return model

    class Mine(hfshard.ShardedModelMixin, Pair): ...

    for load_it in (Mine.from_pretrained, lambda name: hfshard.load_model(Pair, name)):
        model: Any = load_it("mine")
        assert [type(part) for part in (model.stock, model.ours, model.again)] == [BertModel, Below, type(model)]
        assert model.name_or_path == str(saved) and model.again.name_or_path == str(tmp_path)
        assert torch.equal(model.ours.head, torch.tensor([2.0, 3.0]))


def test_an_override_that_builds_by_itself_is_not_said_to_be_checked(saved: Path) -> None:
    class Making(BertModel):
        @classmethod
        def from_pretrained(cls, source: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return cls(source)

    class Mine(hfshard.ShardedModelMixin, Making): ...

    assert type(Mine.from_pretrained(TINY)) is Mine
    assert type(hfshard.load_model(Making, TINY)) is Making
    assert type(hfshard.load_model(Above, saved, strict=True, verify="full")) is Above
    for call in (Mine.from_pretrained, lambda *args, **kwargs: hfshard.load_model(Making, *args, **kwargs)):
        with pytest.raises(InvalidArgumentError, match="strict, verify, public_key and parallelize had no effect"):
            call(TINY, verify="full")


def test_errors_come_through_and_leave_nothing_behind(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(hfshard.HfshardError):
        Below.from_pretrained(tmp_path)
    with pytest.raises(UnknownArgumentError, match="max_shard_size"):
        make(Below).save_pretrained(tmp_path / "out", max_shard_sizes="1GB")
    with pytest.raises(hfshard.HfshardError):
        make(Below).save_pretrained(tmp_path / "out", max_shard_size="much")

    assert not (tmp_path / "out").exists()
    assert type(Stock.from_pretrained(saved)) is Stock
    make(Stock).save_pretrained(tmp_path / "stock")
    assert "hfshard" not in _metadata(tmp_path / "stock")


def test_transformers_own_calls_in_other_threads_stay_its_own(saved: Path, tmp_path: Path) -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(BertModel):
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
            inside.set()
            assert done.wait(60)
            super().save_pretrained(*args, **kwargs)

    model = make(Slow)
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(hfshard.save_model, model, tmp_path / "ours")
        assert inside.wait(60)
        BertModel.save_pretrained(model, tmp_path / "theirs")
        loaded = BertModel.from_pretrained(saved)
        done.set()
        index = ours.result(60)

    assert type(loaded) is BertModel
    assert index is not None and "hfshard" in _metadata(tmp_path / "ours")
    assert "hfshard" not in _metadata(tmp_path / "theirs")


def _metadata(directory: Path) -> str:
    return (directory / "model.safetensors").read_bytes()[:2000].decode("latin-1")


def test_models_of_overriding_classes_are_loaded_by_threads_at_once(saved: Path) -> None:
    loads: list[Callable[[], Any]] = [
        lambda: Below.from_pretrained(saved),
        lambda: hfshard.load_model(Stock, saved),
        lambda: Stock.from_pretrained(saved),
    ]
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(lambda number: loads[number % 2](), range(6)))

    assert [type(model) for model in models] == [Below, Stock] * 3
    assert all(torch.equal(model.head, torch.tensor([2.0, 3.0])) for model in models)


def test_an_auto_class_gives_the_override_the_config_as_transformers_does(saved: Path, tmp_path: Path) -> None:
    class TinyConfig(BertConfig):
        model_type = "hfshard-tiny"

    class Tiny(BertModel):
        config_class = TinyConfig

        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            calls.append({"path": path, **kwargs})
            return super().from_pretrained(path, *args, **kwargs)

    AutoConfig.register("hfshard-tiny", TinyConfig, exist_ok=True)
    AutoModel.register(TinyConfig, Tiny, exist_ok=True)
    torch.manual_seed(0)
    Tiny(TinyConfig(**SIZES)).save_pretrained(tmp_path)  # type: ignore[arg-type]

    theirs = AutoModel.from_pretrained(tmp_path)
    ours = hfshard.load_model(AutoModel, tmp_path)

    assert type(ours) is type(theirs) is Tiny
    assert type(calls[0]["config"]) is type(calls[1]["config"]) is TinyConfig
    assert calls[0].keys() - calls[1].keys() <= {"adapter_kwargs", "trust_remote_code", "revision"}
    assert ours.config.to_dict() == theirs.config.to_dict()


def test_the_first_call_of_a_process_and_one_after_another_library_are_hfshards(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: dict[str, Any] = {}
    for name in ("save_pretrained", "from_pretrained"):
        current = vars(PreTrainedModel)[name]
        theirs[name] = inspect.unwrap(getattr(current, "__func__", current))
    plain: Any = type("Plain", (hfshard.ShardedModelMixin, BertModel), {})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", theirs["save_pretrained"])
    make(plain).save_pretrained(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(theirs["from_pretrained"]))
    model = plain.from_pretrained(tmp_path, verify="full")

    assert type(model) is plain and "hfshard" in _metadata(tmp_path)
    assert read_json(tmp_path / "config.json")["architectures"] == ["BertModel"]
    assert PreTrainedModel.save_pretrained.__doc__ == theirs["save_pretrained"].__doc__
