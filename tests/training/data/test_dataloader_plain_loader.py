"""The plain loader of a ResumableDataLoader gives its batches to Accelerate, and ours those of a collator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hfshard.training import ResumableDataLoader
from hfshard.training.data.dataloader import plain_loader
from tests.training.data.loader_child import BATCHES, SAMPLES, make
from tests.training.data.samples import FORK, PERSISTENT, are_equal, rng_states


@pytest.fixture(scope="module")
def epochs() -> list[list[Tensor]]:
    loader = make()
    return [list(loader) for _ in range(3)]


@pytest.mark.parametrize("arguments", [{}, FORK, PERSISTENT], ids=["no workers", "2 workers", "persistent workers"])
def test_a_plain_loader_gives_the_same_batches(epochs: list[list[Tensor]], arguments: dict[str, Any]) -> None:
    plain = plain_loader(make(**arguments))
    assert type(plain) is DataLoader
    assert (len(plain), len(plain.dataset)) == (BATCHES, SAMPLES)  # type: ignore[arg-type]
    before = rng_states()
    for epoch in epochs:
        assert are_equal(list(plain), epoch)
    assert rng_states() == before


def test_it_begins_with_the_epoch_of_its_loader(epochs: list[list[Tensor]]) -> None:
    loader = make()
    loader.set_epoch(1)
    assert are_equal(list(plain_loader(loader)), epochs[1])


@pytest.mark.compat
def test_accelerate_prepares_and_skips_it(epochs: list[list[Tensor]]) -> None:
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(plain_loader(make()))
    before = rng_states()
    for epoch in epochs[:2]:
        assert are_equal(list(prepared), epoch)
    assert rng_states() == before
    again = accelerator.prepare(plain_loader(make(**FORK)))
    again.set_epoch(1)
    assert are_equal(list(skip_first_batches(again, 4)), epochs[1][4:])
    again.set_epoch(2)
    assert are_equal(list(again), epochs[2])


@pytest.mark.compat
def test_accelerate_shards_it_by_whole_batches(epochs: list[list[Tensor]]) -> None:
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    plain = plain_loader(make())
    halves: list[list[Tensor]] = []
    for rank in range(2):
        half = prepare_data_loader(plain, num_processes=2, process_index=rank)
        half.set_epoch(1)
        halves.append(list(half))
        half.set_epoch(1)
        assert are_equal(list(skip_first_batches(half, 1)), halves[-1][1:])
    assert are_equal(halves[0], epochs[1][0::2])
    assert are_equal(halves[1], epochs[1][1::2])
    assert torch.equal(halves[1][2], epochs[1][5])


class Sentences(Dataset[dict[str, list[int]]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [3 + (index + place) % 20 for place in range(16)]}


@pytest.mark.compat
def test_the_masks_of_a_collator_of_transformers_are_the_same_again() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[MASK]", *map(str, range(20))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)

    def make_masked(**arguments: Any) -> ResumableDataLoader[Any]:
        return ResumableDataLoader(Sentences(), 4, True, collate_fn=collator, **arguments)

    loader = make_masked()
    iterator = iter(loader)
    first, state, rest = next(iterator), loader.state_dict(), list(iterator)
    assert (first["input_ids"] == words["[MASK]"]).any()
    torch.manual_seed(5)
    resumed = make_masked(**FORK)
    resumed.load_state_dict(state)
    again = list(resumed)
    assert len(again) == len(rest) == 2
    for one, other in zip(again, rest):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])
