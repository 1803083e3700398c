"""Loaders of others resume with the same batches and the same random numbers, or say why they can't."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, StateDictMismatchError
from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState
from hfshard.training.data.external_loader import LoaderTracker, track
from hfshard.training.state.nested import decode, encode
from hfshard.training.state.rng import rng_state, set_rng_state
from tests.helpers import processes

# torchdata 0.11 with torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EPOCHS = 2
SAMPLES = 7
BATCHES = 4
"""Of 2 samples each; the last one has 1."""


class Indexes(Dataset[Tensor]):
    def __init__(self, is_drawing: bool = False) -> None:
        self.is_drawing = is_drawing

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item() if self.is_drawing else 0.0], dtype=torch.float64)


class Stream(IterableDataset[Tensor]):
    """Counts and draws, and resumes by itself."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < SAMPLES:
            self.next += 1
            yield torch.tensor([float(self.next), torch.rand(()).item()], dtype=torch.float64)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Skipping(DataLoader[Tensor]):
    """What users write around torch's: it counts batches, and loads those before once more."""

    taken = 0

    def __iter__(self) -> Any:
        return Counted(super().__iter__(), self)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Counted:
    def __init__(self, batches: Iterator[Tensor], loader: Skipping) -> None:
        self.batches, self.loader = batches, loader
        for _ in range(loader.taken):
            next(batches)

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Tensor:
        try:
            batch = next(self.batches)
        except StopIteration:
            self.loader.taken = 0
            raise
        self.loader.taken += 1
        return batch


class Generating(Skipping):
    """The same as a generator, which does nothing at `iter()`."""

    def __iter__(self) -> Any:
        batches = DataLoader.__iter__(self)
        for _ in range(self.taken):
            next(batches)
        for batch in batches:
            self.taken += 1
            yield batch
        self.taken = 0


def torchdata(dataset: Any, *arguments: Any, **more: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return module.StatefulDataLoader(dataset, *arguments, **more)


class Shuffled(Sampler[int]):
    """Draws its order from a generator of its own, which it holds in a list, at its first index."""

    def __init__(self, generator: Any) -> None:
        self.generators = [generator]

    def __len__(self) -> int:
        return len(Indexes())

    def __iter__(self) -> Iterator[int]:
        yield from self.order()

    def order(self) -> list[int]:
        order = list(range(len(self)))
        self.generators[0].shuffle(order)
        return order


class Early(Shuffled):
    """Draws it in `__iter__` itself."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())


class EarlyTorch(Early):
    def order(self) -> list[int]:
        return torch.randperm(len(self), generator=self.generators[0]).tolist()


class Noisy(Indexes):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.RandomState(5)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.noise.rand()


def _sampler(seed: int | None = None, num_samples: int | None = None) -> RandomSampler:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return RandomSampler(Indexes(), num_samples=num_samples, generator=generator)


class Drawn(Sampler[list[int]]):
    """Draws each batch from the global generator."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(BATCHES):
            yield torch.randint(SAMPLES, (2,)).tolist()


class Counting(Drawn):
    """Its iterator resumes by itself."""

    def __iter__(self) -> Iterator[list[int]]:
        return CountedIndexes()


class CountedIndexes(Iterator[list[int]]):
    """Has the names of torchdata's own iterators of batches, for what it counts."""

    samples_yielded = 0
    batch_size = 2

    def __next__(self) -> list[int]:
        first = self.samples_yielded
        if first == SAMPLES:
            raise StopIteration
        self.samples_yielded = min(first + self.batch_size, SAMPLES)
        return list(range(first, self.samples_yielded))

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples_yielded = state["samples"]


KINDS: dict[str, Callable[[], Any]] = {
    "a user's": lambda: Skipping(Indexes(True), 2, True),
    "a user's, with a generator": lambda: Generating(Indexes(), 2, True),
    "torchdata": lambda: torchdata(Indexes(True), 2, True),
    "torchdata, in order": lambda: torchdata(Indexes(True), 2),
    "torchdata, a sampler of torch": lambda: torchdata(Indexes(), 2, sampler=RandomSampler(Indexes())),
    "torchdata, a generator": lambda: torchdata(Indexes(True), 2, True, generator=torch.Generator().manual_seed(5)),
    "torchdata, a generator of numpy": lambda: torchdata(Indexes(), 2, sampler=Shuffled(np.random.default_rng(5))),
    "torchdata, a sampler's generator": lambda: torchdata(Indexes(True), 2, sampler=_sampler(seed=5)),
    "torchdata, batches": lambda: torchdata(Indexes(True), batch_sampler=BatchSampler(_sampler(), 2, False)),
    "torchdata, batches, a generator": lambda: torchdata(
        Indexes(True), batch_sampler=BatchSampler(_sampler(seed=5), 2, False)
    ),
    "torchdata, batches of one's own": lambda: torchdata(Indexes(True), batch_sampler=Drawn()),
    "torchdata, batches that count themselves": lambda: torchdata(Indexes(True), batch_sampler=Counting()),
    "torchdata, single samples": lambda: torchdata(Indexes(True), None, sampler=_sampler(num_samples=BATCHES)),
    "a user's, a generator of Python": lambda: Skipping(Indexes(), 2, sampler=Shuffled(random.Random(5))),
    "a user's, a generator in its dataset": lambda: Skipping(Noisy(), 2, True),
    "torchdata, 2 workers": lambda: torchdata(Indexes(), 2, True, num_workers=2),
    "torchdata, a stream": lambda: torchdata(Stream(), 2),
}


class Run:
    """A training loop over a loader, which draws for itself and can be saved in every place."""

    def __init__(self, make: Callable[[], Any], seed: int, saved: dict[str, Any] | None = None) -> None:
        torch.manual_seed(seed)
        self.tracker: LoaderTracker = track(make())
        self.seen: list[list[float]] = []
        self.saved: list[dict[str, Any]] = []
        self.first_epoch = 0
        if saved is not None:
            self.first_epoch = saved["epoch"]
            self.tracker.check_state_dict(saved["loader"])
            self.tracker.load_state_dict(saved["loader"])
            restore = functools.partial(set_rng_state, saved["rng"])
            restore()
            self.tracker.reset(restore)

    def save(self, epoch: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            state = {"loader": self.tracker.state_dict(), "rng": rng_state(), "epoch": epoch}
        tensors: dict[str, Tensor] = {}
        packed = encode(state, "state", tensors)
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        self.saved.append({"step": len(self.seen), **decode(copy.deepcopy(packed), kept, "file")})

    def go(self, *, is_saving: bool) -> list[list[float]]:
        for epoch in range(self.first_epoch, EPOCHS):
            for batch in self.tracker.loader:
                self.seen.append([*batch.flatten().tolist(), torch.rand(()).item()])
                if is_saving:
                    self.save(epoch)
            self.seen.append([-1.0, torch.rand(()).item()])  # at the end of each epoch
            if is_saving:
                self.save(epoch + 1)
        return self.seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_from_every_place_is_exact(kind: str) -> None:
    straight = Run(KINDS[kind], 1).go(is_saving=False)
    assert len(straight) == EPOCHS * (BATCHES + 1)
    saving = Run(KINDS[kind], 1)
    saving.save(0)
    assert saving.go(is_saving=True) == straight
    assert [saved["step"] for saved in saving.saved] == list(range(len(straight) + 1))
    for saved in saving.saved[:: 4 if "workers" in kind else 1]:
        torch.manual_seed(saved["step"])
        # Before its first iter(), torchdata's loader takes the seed that it is built with from the script.
        resumed = Run(KINDS[kind], 1 if saved["step"] == 0 else 7, saved)
        assert resumed.go(is_saving=False) == straight[saved["step"] :], f"from step {saved['step']}"


def test_a_stream_in_a_worker_that_begins_again_by_itself_resumes_after_its_epoch() -> None:
    loader, again = (torchdata(Stream(), 2, num_workers=1) for _ in range(2))
    tracker, resumed = track(loader), track(again)
    assert len(list(loader)) == BATCHES
    resumed.load_state_dict(tracker.state_dict())

    epochs = [[batch[:, 0].tolist() for batch in again] for _ in range(2)]

    assert epochs == [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0]]] * 2


def test_a_stream_in_a_persistent_worker_that_begins_again_by_itself_is_refused() -> None:
    loader, again = (torchdata(Stream(), 2, num_workers=1, persistent_workers=True) for _ in range(2))
    tracker = track(loader)
    assert len(list(loader)) == BATCHES

    with pytest.raises(StateDictMismatchError, match=r"now returns more batches.*or without persistent_workers"):
        track(again).load_state_dict(tracker.state_dict())


RESTORED = {
    "hfshard": lambda: ResumableDataLoader(Indexes(), 2, shuffle=True),
    **{name: KINDS[name] for name in ("torchdata", "torchdata, a sampler's generator", "torchdata, a stream")},
    "a user's": KINDS["a user's"],
}


class Refusing:
    """An object that is larger than a loader, and refuses its state."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": torch.zeros(10_000)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        raise ValueError("not for me")


def used(make: Callable[[], Any], count: int) -> tuple[Any, Iterator[Tensor]]:
    """Return a loader that has given some batches, and its iterator."""
    torch.manual_seed(3)
    loader = make()
    iterator = iter(loader) if count else iter([])
    for _ in range(count):
        next(iterator, None)
    return loader, iterator


@pytest.mark.parametrize("saved_at", [0, 2, BATCHES + 1])
@pytest.mark.parametrize("kind", RESTORED)
def test_a_refused_restore_leaves_loaders_and_their_iterators_where_they_were(
    tmp_path: Path, kind: str, saved_at: int
) -> None:
    make, refusing = RESTORED[kind], Refusing()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(loader=used(make, saved_at)[0], refusing=refusing))

        for is_left, count in ((False, 0), (False, 2), (True, 2), (True, BATCHES + 1)):
            found = []
            for is_refused in (False, True):
                loader, iterator = used(make, count)
                state = TrainingState(loader=loader, refusing=refusing)
                if is_refused:
                    with pytest.raises(StateDictMismatchError, match="not for me"):
                        manager.restore(state)
                batches = [*([] if is_left else iterator), *loader]
                found.append([[batch.tolist() for batch in batches], torch.rand(1).item()])

            assert found[1] == found[0], (is_left, count)


def train(directory: Path, kind: str, stop: int | None) -> None:
    """Resume what is there, note what is seen, and save after each batch and epoch; at the stop, die of SIGKILL."""
    os.setpgrp()
    warnings.simplefilter("ignore", UserWarning)
    torch.manual_seed(1 if stop is not None else 7)
    loader = KINDS[kind]()
    state = TrainingState(loader=loader)
    manager = CheckpointManager(directory / "run", max_to_keep=2)
    start = manager.restore_latest(state)
    seen, epoch = (start.extra["seen"], start.extra["epoch"]) if start is not None else ([], 0)

    def save() -> None:
        manager.save(len(seen), state, extra={"seen": seen, "epoch": epoch})
        if len(seen) == stop:
            os.killpg(0, signal.SIGKILL)

    while epoch < EPOCHS:
        for batch in loader:
            seen.append([*batch.flatten().tolist(), torch.rand(()).item()])
            save()
        seen.append([-1.0, torch.rand(()).item()])
        epoch += 1
        save()
    torch.save(seen, directory / "seen.pt")


@pytest.mark.parametrize(("kind", "stop"), [("a user's", 2), ("torchdata", 3), ("torchdata, 2 workers", 6)])
def test_killed_and_resumed_by_the_manager_is_exact(tmp_path: Path, kind: str, stop: int) -> None:
    KINDS[kind]()  # skips here where torchdata is not installed
    straight = Run(KINDS[kind], 1).go(is_saving=False)
    end = processes.end_of(tmp_path / "words", train, tmp_path, kind, stop)
    assert end.status == -signal.SIGKILL, end.words
    end = processes.end_of(tmp_path / "words", train, tmp_path, kind, None)
    assert end.status == 0, end.words
    assert torch.load(tmp_path / "seen.pt") == straight


@pytest.mark.parametrize("kind", ["a user's", "torchdata"])
def test_a_save_after_a_restore_and_before_iter_is_the_same_checkpoint(kind: str) -> None:
    saving = Run(KINDS[kind], 1)
    straight = saving.go(is_saving=True)
    for saved in saving.saved:
        again = Run(KINDS[kind], 7, saved)
        again.save(saved["epoch"])
        resumed = Run(KINDS[kind], 8, again.saved[0])
        assert resumed.go(is_saving=False) == straight[saved["step"] :]


class Drawing(Skipping):
    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "drawn": [random.random(), np.random.rand(), torch.rand(()).item()]}


def test_a_save_draws_from_no_rng_whatever_the_loader_does() -> None:
    tracker = track(Drawing(Indexes(), 2))
    first = tracker.state_dict()["loader"]["drawn"]
    assert tracker.state_dict()["loader"]["drawn"] == first


def test_torchdata_says_whether_its_epoch_is_over() -> None:
    loader = torchdata(Indexes(), 2)
    for _ in loader:
        assert loader.state_dict()["_iterator_finished"] is False
    assert loader.state_dict()["_iterator_finished"] is True
    assert torchdata(Indexes(), 2)._iterator is None


def test_workers_are_a_warning_within_an_epoch() -> None:
    tracker = track(torchdata(Indexes(), 2, num_workers=1))
    iterator = iter(tracker.loader)
    next(iterator)
    with pytest.warns(UserWarning, match="The StatefulDataLoader has worker processes.* a resume in the middle"):
        tracker.state_dict()
    tracker.state_dict()  # once is enough
    list(iterator)


def test_drawing_in_a_generator_is_a_warning_within_an_epoch() -> None:
    tracker = track(Generating(Indexes(True), 2, True))
    iterator = iter(tracker.loader)
    next(iterator)
    tracker.state_dict()  # it is seen from the second batch on: the first one may draw an order
    next(iterator)
    with pytest.warns(UserWarning, match="The Generating draws random numbers while it fetches batches"):
        tracker.state_dict()


@pytest.mark.parametrize("kind", [Early, EarlyTorch])
def test_drawing_when_a_sampler_is_asked_for_an_iterator_is_a_warning_within_an_epoch(kind: Any) -> None:
    generator = torch.Generator().manual_seed(5) if kind is EarlyTorch else random.Random(5)
    tracker = track(torchdata(Indexes(), 2, sampler=kind(generator)))
    tracker.state_dict()
    iterator = iter(tracker.loader)
    next(iterator)
    with pytest.warns(UserWarning, match=r"draws from 'sampler.generators\[0\]' there"):
        tracker.state_dict()


def test_a_resumed_loader_that_skips_what_was_used_is_no_warning() -> None:
    tracker, again = (track(torchdata(Indexes(), 2, sampler=_sampler(seed=5))) for _ in range(2))
    next(iter(tracker.loader))
    again.load_state_dict(tracker.state_dict())
    again.reset(lambda: None)
    next(iter(again.loader))

    again.state_dict()


def test_a_generator_without_a_state_is_a_warning() -> None:
    tracker = track(Skipping(Indexes(), 2, sampler=Shuffled(random.SystemRandom())))
    with pytest.warns(UserWarning, match=r"holds 'sampler.generators\[0\]', which has no state to store"):
        tracker.state_dict()


class Made(Shuffled):
    """Makes its generator in `__iter__`, as the epoch goes on."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generators = [np.random.default_rng(self.epoch)]
        self.epoch += 1
        return iter(self.order())


@pytest.mark.filterwarnings("ignore:.*draws from a generator:UserWarning")
def test_a_generator_that_is_made_in_iter_needs_not_be_there() -> None:
    loader = Skipping(Indexes(), 2, sampler=Made())
    tracker = track(loader)
    batches = iter(loader)
    next(batches)
    saved = tracker.state_dict()
    expected = [batch.tolist() for batch in batches]

    again = Skipping(Indexes(), 2, sampler=Made())
    fresh = track(again)
    with pytest.warns(UserWarning, match=r"'sampler.generators\[0\]' that .* Unless `__iter__` creates it, build"):
        fresh.load_state_dict(saved)
    fresh.reset(lambda: None)
    assert [batch.tolist() for batch in again] == expected


def test_generators_that_the_loader_does_not_hold_are_a_warning() -> None:
    saved = track(Skipping(Indexes(), 2, True, generator=torch.Generator())).state_dict()
    tracker = track(Skipping(Indexes(), 2, True))
    with pytest.warns(UserWarning, match="no longer has the random number generator 'generator' that"):
        tracker.check_state_dict(saved)


def test_the_state_of_a_generator_of_another_kind_is_damage() -> None:
    saved = track(Skipping(Indexes(), 2, True)).state_dict()
    other = track(Skipping(Indexes(), 2, sampler=Shuffled(np.random.default_rng(1))))
    state = {**saved, "generators": {"sampler.generators[0]": torch.zeros(3)}}
    before = repr(other.loader.sampler.generators[0].bit_generator.state)
    with pytest.raises(DamagedCheckpointError, match=r"random number generator 'sampler.*is not valid"):
        other.check_state_dict(state)
    assert repr(other.loader.sampler.generators[0].bit_generator.state) == before


class Slotted:
    """Its objects can't have another class."""

    __slots__ = ("__dict__", "__weakref__")

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        return {}


def test_a_loader_that_can_not_be_followed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(Slotted):
        def __setattr__(self, name: str, value: Any) -> None:
            raise TypeError(name)

    with pytest.warns(UserWarning, match="The Fixed cannot be followed"):
        track(Fixed()).state_dict()


def test_a_loader_has_one_tracker() -> None:
    loader = Skipping(Indexes(), 2)
    tracker = track(loader)

    assert track(loader) is tracker
    assert track(tracker) is tracker
    assert tracker.loader is loader


def test_a_tracked_loader_looks_as_it_did() -> None:
    loader = Skipping(Indexes(), 2)
    track(loader)

    assert isinstance(loader, Skipping)
    assert (type(loader).__name__, type(loader).__module__) == ("Skipping", __name__)
    assert (loader.batch_size, len(loader)) == (2, BATCHES)
    assert iter(loader).loader is loader


def test_a_copy_of_a_tracked_loader_is_not_tracked() -> None:
    loader = Skipping(Indexes(), 2)
    track(loader)

    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert type(other) is Skipping


def test_the_newest_iterator_of_a_tracked_loader_says_whether_an_epoch_is_under_way() -> None:
    loader = Skipping(Indexes(), 2)
    tracker = track(loader)

    iterator = iter(loader)
    next(iterator)
    assert tracker.state_dict()["is_within"]

    list(iter(loader))
    list(iterator)
    assert not tracker.state_dict()["is_within"]


def resume_within(loader: Any, restore_rng: Callable[[], None]) -> None:
    """Restore a loader amid an epoch, as a manager does."""
    tracker = track(loader)
    tracker.load_state_dict({"loader": None, "is_within": True})
    tracker.reset(restore_rng)


def test_rng_is_put_back_after_the_next_iter_and_no_other() -> None:
    loader = Skipping(Indexes(), 2)
    calls: list[int] = []
    resume_within(loader, lambda: calls.append(1))
    assert calls == []
    iter(loader)
    assert calls == [1]
    iter(loader)
    assert calls == [1]
    generating = Generating(Indexes(), 2)
    resume_within(generating, lambda: calls.append(2))
    iterator = iter(generating)
    assert calls == [1]
    next(iterator), next(iterator)
    assert calls == [1, 2]


def test_a_resumable_loader_needs_no_tracker() -> None:
    loader = ResumableDataLoader(Indexes(), 2)
    assert track(loader) is loader
    assert len(list(loader)) == BATCHES
    nothing = object()
    assert track(nothing) is nothing


def test_the_state_of_another_kind_of_loader_is_refused() -> None:
    tracker = track(Skipping(Indexes(), 2))
    with pytest.raises(StateDictMismatchError, match="is a Skipping, but the checkpoint has the state of another kind"):
        tracker.check_state_dict(ResumableDataLoader(Indexes(), 2).state_dict())
    ours = ResumableDataLoader(Indexes(), 2)
    with pytest.raises(StateDictMismatchError, match="not a ResumableDataLoader's state"):
        ours.check_state_dict(tracker.state_dict())


@pytest.mark.compat
def test_a_loader_of_accelerate_is_refused() -> None:
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(DataLoader(Indexes(), 2))
    with pytest.raises(InvalidArgumentError, match=r"Accelerate's DataLoaderShard.*plain_loader"):
        track(prepared)
