"""Directories of Trainer, converted into runs without building the model in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, Trainer

import hfshard
from hfshard.cli.main import main
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError
from hfshard.training import TrainingState
from hfshard.training.integrations.trainer_names import reorder_by_model
from hfshard.training.interop.convert_run import convert_foreign
from hfshard.training.interop.foreign_checkpoint import ForeignRequest
from hfshard.training.interop.foreign_readers import read_trainer_directory
from tests.training.interop.accelerate_runs import Parts, save_by_accelerate
from tests.training.interop.trainer_runs import SAVED_AT, everything_of, parts_of, restore, train

pytestmark = pytest.mark.compat


def test_it_is_converted_with_the_names_of_its_parameters(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = parts_of(tmp_path)
    restore(expected, saved)
    place = expected.components["loader"].state_dict()
    train(expected, SAVED_AT)

    assert main(["convert", str(saved), str(tmp_path / "run"), "--format", "json"]) == 0
    converted = json.loads(capsys.readouterr().out)
    state = parts_of(tmp_path)
    torch.manual_seed(99)
    manager = hfshard.CheckpointManager(tmp_path / "run")
    restored = manager.restore_latest(state)
    state.components["loader"].load_state_dict(place)
    train(state, SAVED_AT)

    assert (converted["step"], restored, converted["differences"]) == (9, 9, [])
    assert converted["lacking"] == ["the position in the data"]
    assert manager.verify() == {9: []}
    assert everything_of(state) == everything_of(expected)
    assert BertForSequenceClassification.from_pretrained(converted["path"]).config.vocab_size == 30


def test_tied_weights_have_the_name_by_which_a_run_knows_them(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))  # type: ignore[arg-type]
    with_decay = Trainer.get_decay_parameter_names(cast(Any, None), model)
    named = [*model.named_parameters()]
    groups = [{"params": [one for name, one in named if (name in with_decay) is is_in]} for is_in in (True, False)]
    optimizer = torch.optim.AdamW(groups)
    for number, (_, one) in enumerate(named):
        one.grad = torch.full_like(one, float(number))
    optimizer.step()
    saved = tmp_path / "checkpoint-3"
    model.save_pretrained(saved)
    torch.save(optimizer.state_dict(), saved / "optimizer.pt")
    (saved / "trainer_state.json").write_text('{"global_step": 3}')
    before = optimizer.state_dict()

    convert_foreign(str(saved), tmp_path / "run", in_order=reorder_by_model)
    optimizer.load_state_dict({**before, "state": {}})
    hfshard.CheckpointManager(tmp_path / "run").restore(TrainingState(model, optimizer), 3)

    assert [slots["exp_avg"].tolist() for slots in optimizer.state_dict()["state"].values()] == [
        slots["exp_avg"].tolist() for slots in before["state"].values()
    ]


def test_states_of_accelerate_are_converted_where_one_model_is_trained(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    parts = Parts(accelerator, models=1)
    parts.train(0, SAVED_AT)
    accelerator.save_state(str(tmp_path / "saved"), safe_serialization=False)

    part = {"count": "custom_checkpoint_0"}
    converted = convert_foreign(str(tmp_path / "saved"), tmp_path / "run", step=9, keys=part)
    fresh = Parts(models=1)
    restored = hfshard.CheckpointManager(tmp_path / "run").restore(fresh.state(), 9)

    assert restored.lacking == converted.lacking == ("the number of steps (0 is taken)", "the position in the data")
    assert fresh.everything() == parts.everything()


def test_states_of_several_models_are_not_converted(tmp_path: Path) -> None:
    place = save_by_accelerate(tmp_path / "saved", safe_serialization=False)

    with pytest.raises(InvalidArgumentError, match=r"'optimizer' cannot be matched.* several optimizers and models"):
        convert_foreign(str(place), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_a_config_it_is_not_known_whose_state_is_whose(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").unlink()

    with pytest.raises(InvalidArgumentError, match="cannot be matched to parameters"):
        convert_foreign(str(checkpoint), tmp_path / "run", in_order=reorder_by_model)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_other_shapes_gets_no_names(checkpoint: Path) -> None:
    optimizer = torch.load(checkpoint / "optimizer.pt")
    optimizer["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(optimizer, checkpoint / "optimizer.pt")

    foreign = reorder_by_model(read_trainer_directory(str(checkpoint), ForeignRequest()))
    assert foreign.has_order and "param_names" not in foreign.components["optimizer"]["param_groups"][0]

    torch.save({**optimizer, "state": {0: 5}}, checkpoint / "optimizer.pt")
    with pytest.raises(DamagedCheckpointError, match="a parameter's state is not a dict"):
        reorder_by_model(read_trainer_directory(str(checkpoint), ForeignRequest()))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"architectures": ["Trainer"]},
        {"architectures": ["BertModel"]},
        {"hidden_size": "many"},
        {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "unheard of"},
    ],
    ids=str,
)
def test_a_config_of_another_model_names_nothing(change: dict[str, Any], checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **change}))
    foreign = read_trainer_directory(str(checkpoint), ForeignRequest())

    assert reorder_by_model(foreign) is foreign
