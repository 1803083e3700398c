"""A restored step is an int with what was saved along."""

from __future__ import annotations

from hfshard.training.state.step import RestoredStep


def test_a_restored_step_counts_on_as_a_plain_int() -> None:
    restored = RestoredStep(41)
    restored.metrics = {"eval_loss": 0.5}

    following = restored + 1

    assert following == 42
    assert type(following) is int
    assert restored.metrics == {"eval_loss": 0.5}
    assert f"checkpoint-{restored:08d}" == "checkpoint-00000041"


def test_only_a_step_of_another_program_lacks_anything() -> None:
    foreign = RestoredStep(3)
    foreign.lacking = ("the position in the data",)

    assert foreign.lacking == ("the position in the data",)
    assert RestoredStep(3).lacking == ()
    assert not hasattr(RestoredStep(3), "extra")
