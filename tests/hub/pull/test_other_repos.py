"""Loads that need two repos: an adapter and its base, weights and another repo's config; and what stock shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import BertModel

from tests.helpers.tiny_bert import Bert, bert, value_of
from tests.hub.pull.pull_hub import PullHub
from tests.hub.server_fixture import new_repo_id
from tests.zoo.hub_cache import put_in_cache

pytestmark = pytest.mark.compat

SETUP = """
from huggingface_hub import constants
constants.HF_HUB_DISABLE_XET = True
base, lora, weights, config = {!r}, {!r}, {!r}, {!r}
import torch, hfshard
from transformers import AutoModel, BertModel
from tests.helpers.tiny_bert import Bert, bert, value_of
"""
ADAPTER = """
from peft import LoraConfig, get_peft_model
bert(1, cls=BertModel).push_to_hub(base)
tuned = get_peft_model(BertModel.from_pretrained(base), LoraConfig(target_modules=["query"], r=2))
with torch.no_grad():
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            weight.fill_(3)
tuned.push_to_hub(lora)
stock = BertModel.from_pretrained(lora).state_dict()
for ours in (Bert.from_pretrained(lora), hfshard.load_model(AutoModel, lora)):
    found = ours.state_dict()
    assert found.keys() == stock.keys() and any("lora_B" in name for name in found)
    assert all(torch.equal(found[name], stock[name]) for name in stock)
"""
CONFIG = """
bert(1).push_to_hub(weights)
bert(2).push_to_hub(config)
for options in ({}, {"revision": "main"}):
    assert value_of(Bert.from_pretrained(weights, config=config, **options)) == 1
    assert value_of(hfshard.load_model(AutoModel, weights, config=config, **options)) == 1
"""


@pytest.mark.parametrize("code", [ADAPTER, CONFIG], ids=["adapter", "config"])
def test_the_other_repo_is_asked_for_its_own_revision(code: str, hub: PullHub) -> None:
    hub.interpret(SETUP.format(*(new_repo_id() for _ in range(4))) + code)


def test_blobs_that_all_repos_of_a_cache_share_are_read(tmp_path: Path) -> None:
    bert(4, cls=BertModel).save_pretrained(tmp_path / "files")
    commit = "a" * 40
    snapshot = put_in_cache(tmp_path / "cache", tmp_path / "files", commit=commit, refs={"main": commit})
    shared = tmp_path / "cache" / "blobs"
    (shared / "ab").mkdir(parents=True)
    blob = (snapshot / "model.safetensors").resolve()
    os.rename(blob, shared / "ab" / "cdef")
    blob.symlink_to(os.path.relpath(shared / "ab" / "cdef", blob.parent))
    (shared / ".huggingface-shared-blobs").touch()
    assert value_of(Bert.from_pretrained("org/name", cache_dir=tmp_path / "cache")) == 4
