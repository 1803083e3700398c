"""What can be asked of a run without restoring it: its steps, its best one, and whether its files are whole."""

from __future__ import annotations

from typing import Literal

from hfshard._util.arguments import names_files
from hfshard.errors import CheckpointNotFoundError, HfshardError, InvalidArgumentError
from hfshard.training.run.finding import Level, checkpoint_of_step, current_problems, manifests_in, newest_whole
from hfshard.training.run.places.protocols import RunPlace
from hfshard.training.run.rotation import MetricMode, best_of
from hfshard.training.run.run_checkpoint import checkpoint_path
from hfshard.training.run_writer import RunWriter


class RunReader:
    """The questions that a `CheckpointManager` answers about its run; each waits for a save of this process."""

    root: str
    keep_best: str | None
    metric_mode: MetricMode
    progress: bool | None
    _writer: RunWriter
    _place: RunPlace

    @names_files("root")
    def latest_step(self, verify: Level | None = None) -> int | None:
        """Find the step of the checkpoint that was saved last.

            start = manager.latest_step() or 0

        Args:
            verify: Check its files as `restore` does, and pass over damaged checkpoints with a warning. None: only
                check that the save was finished.

        Returns:
            The step, or None where there is no checkpoint.

        Raises:
            DamagedCheckpointError: With `verify`, all checkpoints are damaged.
        """
        with self._writer.settled():
            if verify is not None:
                newest = newest_whole(self._place, verify, self.progress)
                return None if newest is None else newest[0].step
            return next((one.step for one in self._place.checkpoints() if one.is_finished), None)

    @names_files("root")
    def best_step(self) -> int | None:
        """Find the step of the checkpoint with the best value of the metric that `keep_best` names.

            manager.restore(state, manager.best_step())

        Returns:
            The step, or None where no checkpoint has the metric.

        Raises:
            InvalidArgumentError: The manager was made without `keep_best`.
        """
        if self.keep_best is None:
            raise InvalidArgumentError("The manager has no metric: CheckpointManager(..., keep_best='eval_loss').")
        with self._writer.settled():
            best = best_of(manifests_in(self._place), self.keep_best, self.metric_mode)
        return None if best is None else best.step

    @names_files("root")
    def all_steps(self) -> list[int]:
        """List the steps of all checkpoints whose saves were finished, in ascending order.

        for step in manager.all_steps():
            print(manager.path_of(step))
        """
        with self._writer.settled():
            return sorted(one.step for one in self._place.checkpoints() if one.is_finished)

    def path_of(self, step: int | Literal["best", "latest"]) -> str:
        """Return the directory or address of a step's checkpoint, whether it exists or not.

        Args:
            step: A step; or "best" or "latest", which must exist: see `best_step` and `latest_step`.

        Raises:
            CheckpointNotFoundError: There is no checkpoint, or none with the metric.
            InvalidArgumentError: "best", and the manager was made without `keep_best`.

        Example:
            hfshard.load_model(model, manager.path_of("best"))
        """
        return checkpoint_path(self.root, self._step_called(step) if isinstance(step, str) else step)

    def _step_called(self, word: str) -> int:
        """The step of the best or the latest checkpoint."""
        if word not in ("best", "latest"):
            raise InvalidArgumentError(f"step must be a number, 'best' or 'latest', got {word!r}.")
        step = self.best_step() if word == "best" else self.latest_step()
        if step is None:
            lacks = f"with the metric '{self.keep_best}' " if word == "best" else ""
            raise CheckpointNotFoundError(f"There is no checkpoint {lacks}in '{self.root}'.", path=self.root)
        return step

    @names_files("root")
    def verify(self, step: int | None = None, *, level: Level = "full") -> dict[int, list[HfshardError]]:
        """Check every file of one checkpoint, or of all; damage is reported, not raised.

            damaged = {step: errors for step, errors in manager.verify().items() if errors}

        Args:
            step: Which checkpoint; None: all of them.
            level: What `verify` is in `restore`.

        Returns:
            Step -> what is wrong with its checkpoint; the list of a whole checkpoint is empty. What another process
            removes meanwhile is left out.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of this step.
        """
        with self._writer.settled():
            checkpoints = self._place.checkpoints() if step is None else [checkpoint_of_step(self._place, step)]
            problems = {one.step: current_problems(one, level) for one in sorted(checkpoints, key=lambda one: one.step)}
            return {number: found for number, found in problems.items() if found is not None}
