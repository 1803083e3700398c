"""What transformers' own tests check of models on the Hub (test_modeling_utils.py, test_offline.py), written anew.

They push to a Hub on this machine and load from it.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants
from transformers import AutoModel, AutoModelForCausalLM, BertModel, GPT2LMHeadModel

from tests.zoo.models import ZOO
from upstream.own.tiny_bert import bert, same

__all__ = ["bert"]  # the fixture

GPT2 = "hf-internal-testing/tiny-random-gpt2"


@pytest.fixture
def repo_id() -> str:
    return f"alice/{uuid.uuid4().hex}"


def files(repo_id: str, revision: str | None = None) -> set[str]:
    return set(HfApi().list_repo_files(repo_id, revision=revision)) - {".gitattributes"}


def test_push_a_model(bert: Any, repo_id: str) -> None:
    info = bert.push_to_hub(repo_id)

    assert files(repo_id) == {"config.json", "model.safetensors", "README.md"}
    assert info.oid == HfApi().model_info(repo_id).sha
    assert same(BertModel.from_pretrained(repo_id), bert)


def test_push_by_saving(bert: Any, repo_id: str, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path, repo_id=repo_id, push_to_hub=True)

    assert {"config.json", "model.safetensors"} <= files(repo_id)
    assert same(BertModel.from_pretrained(repo_id), bert)


def test_push_by_saving_into_a_folder_of_the_name(bert: Any, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    bert.save_pretrained(tmp_path / name, push_to_hub=True)

    assert same(BertModel.from_pretrained(f"alice/{name}"), bert)


def test_push_without_a_namespace(bert: Any) -> None:
    name = uuid.uuid4().hex
    bert.push_to_hub(name)

    assert same(BertModel.from_pretrained(f"alice/{name}"), bert)


def test_push_to_an_organization(bert: Any) -> None:
    repo_id = f"org/{uuid.uuid4().hex}"
    bert.push_to_hub(repo_id)

    assert same(BertModel.from_pretrained(repo_id), bert)


def test_push_with_the_arguments_of_a_commit(bert: Any, repo_id: str) -> None:
    bert.push_to_hub(repo_id, commit_message="a message", commit_description="more of it", private=True)

    newest = HfApi().list_repo_commits(repo_id)[0]
    assert newest.title == "a message"
    assert HfApi().model_info(repo_id).private is True


def test_push_in_shards_and_again_whole(bert: Any, repo_id: str) -> None:
    bert.push_to_hub(repo_id, max_shard_size="20KB")
    assert "model.safetensors.index.json" in files(repo_id)
    assert same(BertModel.from_pretrained(repo_id), bert)

    bert.push_to_hub(repo_id)
    assert same(BertModel.from_pretrained(repo_id), bert)


def test_push_to_a_branch(bert: Any, repo_id: str) -> None:
    HfApi().create_repo(repo_id)
    bert.push_to_hub(repo_id, revision="side")

    assert "model.safetensors" in files(repo_id, "side")
    assert "model.safetensors" not in files(repo_id)
    assert same(BertModel.from_pretrained(repo_id, revision="side"), bert)


def test_push_as_a_pull_request(bert: Any, repo_id: str) -> None:
    HfApi().create_repo(repo_id)
    info = bert.push_to_hub(repo_id, create_pr=True)

    assert info.pr_revision == "refs/pr/1"
    assert "model.safetensors" not in files(repo_id)
    assert same(BertModel.from_pretrained(repo_id, revision="refs/pr/1"), bert)


def test_push_with_tags(bert: Any, repo_id: str) -> None:
    bert.add_model_tags(["tag-1", "tag-2"])
    bert.push_to_hub(repo_id)

    assert {"tag-1", "tag-2"} <= set(ModelCard.load(repo_id).data.tags)


def test_push_a_generation_config(repo_id: str) -> None:
    model = ZOO["llama_generation"].build()
    model.push_to_hub(repo_id)

    assert "generation_config.json" in files(repo_id)
    found: Any = AutoModelForCausalLM.from_pretrained(repo_id)
    assert found.generation_config.top_k == 7


def test_push_a_tied_model(repo_id: str) -> None:
    model = ZOO["gpt2"].build()
    model.push_to_hub(repo_id)

    found: Any = GPT2LMHeadModel.from_pretrained(repo_id)
    assert found.lm_head.weight is found.transformer.wte.weight
    assert same(found, model)


def test_a_file_that_somebody_added_stays(bert: Any, repo_id: str) -> None:
    HfApi().create_repo(repo_id)
    HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id=repo_id)
    bert.push_to_hub(repo_id)

    assert "notes.txt" in files(repo_id)


def test_a_card_that_is_there_stays(bert: Any, repo_id: str) -> None:
    HfApi().create_repo(repo_id)
    HfApi().upload_file(path_or_fileobj=b"---\nlicense: mit\n---\n# Mine\n", path_in_repo="README.md", repo_id=repo_id)
    bert.push_to_hub(repo_id)

    assert "# Mine" in ModelCard.load(repo_id).text


def test_load_by_a_commit_a_tag_and_a_branch(bert: Any, repo_id: str) -> None:
    first = bert.push_to_hub(repo_id).oid
    HfApi().create_tag(repo_id, tag="v1")
    with torch.no_grad():
        bert.embeddings.word_embeddings.weight.zero_()
    bert.push_to_hub(repo_id)

    old = [BertModel.from_pretrained(repo_id, revision=revision) for revision in (first, "v1", first)]
    assert all(same(model, old[0]) for model in old)
    assert same(BertModel.from_pretrained(repo_id), bert)
    assert not same(old[0], bert)


def test_load_from_a_folder_of_the_repo(bert: Any, repo_id: str, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "inner", max_shard_size="20KB")
    HfApi().create_repo(repo_id)
    HfApi().upload_folder(repo_id=repo_id, folder_path=tmp_path)

    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(repo_id)
    assert same(BertModel.from_pretrained(repo_id, subfolder="inner"), bert)


def test_load_what_is_not_there(bert: Any, repo_id: str) -> None:
    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(repo_id)
    bert.push_to_hub(repo_id)
    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(repo_id, revision="nowhere")


def test_load_what_is_private_with_a_token(bert: Any, repo_id: str) -> None:
    bert.push_to_hub(repo_id, private=True)

    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(repo_id, token=False)
    assert same(BertModel.from_pretrained(repo_id, token="hf_write"), bert)


def test_load_into_another_cache(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(GPT2, cache_dir=tmp_path)

    assert (tmp_path / f"models--{GPT2.replace('/', '--')}" / "snapshots").is_dir()


def test_load_only_what_is_cached(repo_id: str, bert: Any, tmp_path: Path) -> None:
    bert.push_to_hub(repo_id)
    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(repo_id, cache_dir=tmp_path, local_files_only=True)
    BertModel.from_pretrained(repo_id, cache_dir=tmp_path)

    assert same(BertModel.from_pretrained(repo_id, cache_dir=tmp_path, local_files_only=True), bert)


@pytest.mark.parametrize("size", ["10MB", "20KB"])
def test_load_offline_after_it_was_loaded(bert: Any, repo_id: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bert.push_to_hub(repo_id, max_shard_size=size)
    AutoModel.from_pretrained(repo_id)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert same(AutoModel.from_pretrained(repo_id), bert)
    assert same(BertModel.from_pretrained(repo_id), bert)


def test_load_when_the_hub_is_gone(bert: Any, repo_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bert.push_to_hub(repo_id)
    BertModel.from_pretrained(repo_id)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    )

    assert same(BertModel.from_pretrained(repo_id), bert)


def test_load_pickles_of_a_repo(bert: Any, repo_id: str, tmp_path: Path) -> None:
    bert.config.save_pretrained(tmp_path)
    torch.save(bert.state_dict(), tmp_path / "pytorch_model.bin")
    HfApi().create_repo(repo_id)
    HfApi().upload_folder(repo_id=repo_id, folder_path=tmp_path)

    assert same(BertModel.from_pretrained(repo_id), bert)
    assert same(BertModel.from_pretrained(repo_id, use_safetensors=False), bert)
    with pytest.raises(OSError, match=r"."):
        BertModel.from_pretrained(repo_id, use_safetensors=True)


def test_load_with_a_forced_download(bert: Any, repo_id: str) -> None:
    bert.push_to_hub(repo_id)
    BertModel.from_pretrained(repo_id)

    assert same(BertModel.from_pretrained(repo_id, force_download=True), bert)


def test_a_saved_model_of_the_hub_loads_from_the_directory(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(GPT2)
    model.save_pretrained(tmp_path)

    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(found, model)
    assert found.config.name_or_path == str(tmp_path)
