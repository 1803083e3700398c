"""What other tools do with a place in a store: upload into it, sync it down and up, copy it, edit what is in it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn
from transformers import BertModel

import hfshard
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers.tiny_bert import SHARDED, SINGLE, Bert, all_see, bert, read_by_all, value_of
from tests.stores.suite.conftest import Place, usual_name

s3 = pytest.mark.parametrize("scheme", ["s3"])

NUMBERED = re.compile(r"-\d{8}-[0-9a-f]{16}")


def _ones(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), value), "b": torch.full((3,), value)}


def _value(place: str | Path, **options: Any) -> float:
    loaded = hfshard.load_state_dict(place, **options)
    (value,) = {float(number) for tensor in loaded.values() for number in tensor}
    assert len(loaded) == 2
    return value


def _uploads(value: float) -> dict[str, dict[str, bytes]]:
    """Checkpoints as other tools make them."""
    shards = {name: save({name: tensor}) for name, tensor in _ones(value).items()}

    def sharded(names: dict[str, str]) -> dict[str, bytes]:
        index = json.dumps({"metadata": {}, "weight_map": names}).encode()
        return {file: shards[name] for name, file in names.items()} | {"model.safetensors.index.json": index}

    return {
        "single": {"model.safetensors": save(_ones(value))},
        "sharded": sharded({"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}),
        "odd names": sharded({"a": "first.safetensors", "b": "second.safetensors"}),
    }


def _numbered(names: Any) -> list[str]:
    return [name for name in names if NUMBERED.search(name)]


def _upload(directory: Path, place: Place, *, deletes: bool) -> None:
    """Do as `aws s3 sync DIR ADDRESS` does, with or without `--delete`."""
    assert place.bucket is not None
    prefix = place.path.partition(f"/{place.bucket.name}/")[2]
    local = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    for name, path in local.items():
        place.put(name, path.read_bytes())
    for name in place.files().keys() - local.keys() if deletes else ():
        place.bucket.delete(f"{prefix}/{name}")


@s3
@pytest.mark.parametrize("kind", ["single", "sharded", "odd names"])
def test_weights_that_are_uploaded_next_to_a_save_are_named_and_can_be_loaded(
    store: Place, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    hfshard.save_state_dict(_ones(1), store.path)
    assert _value(store.path) == 1
    assert caplog.text == ""
    for name, raw in _uploads(2)[kind].items():
        store.put(name, raw)

    assert _value(store.path) == 1
    [message] = [record.getMessage() for record in caplog.records]
    named = re.search(r"To load the uploaded ones, pass '([^']*)'", message)
    assert named is not None
    assert message.startswith(f"'{store.path}' contains weights that another tool uploaded (")
    assert _value(named[1]) == 2
    hfshard.reshard_checkpoint(named[1], store.folder / "uploaded", "1GB")
    assert _value(store.folder / "uploaded") == 2
    assert hfshard.verify_checkpoint(store.path).ok
    assert message in hfshard.verify_checkpoint(store.path).warnings

    caplog.clear()
    hfshard.save_state_dict(_ones(3), store.path)
    assert _value(store.path, verify="full") == 3
    assert caplog.text == ""
    assert store.names() == [
        "model-00001-of-00001-N.safetensors",
        "model.safetensors.index-N.json",
        "model.safetensors.index.json",
    ]


@s3
@pytest.mark.parametrize("kind", ["single", "sharded", "odd names"])
def test_weights_that_were_uploaded_before_any_save_count_and_are_replaced(
    store: Place, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, raw in _uploads(2)[kind].items():
        store.put(name, raw)
    assert _value(store.path) == 2

    hfshard.save_state_dict(_ones(3), store.path)

    assert _value(store.path, verify="full") == 3
    assert len(store.names()) == 3
    assert caplog.text == ""


@s3
def test_a_file_of_a_user_that_is_called_like_an_object_of_a_save_stays(store: Place, tmp_path: Path) -> None:
    store.put("data-20240101-0123456789abcdef.csv", b"1,2")
    for value in (1, 2):
        hfshard.save_state_dict(_ones(value), store.path)

    hfshard.pull_checkpoint(store.path, tmp_path / "pulled")
    hfshard.push_checkpoint(tmp_path / "pulled", f"{store.path}-2")
    hfshard.reshard_checkpoint(store.path, tmp_path / "resharded", "1GB")

    assert _value(store.path, verify="full") == 2
    assert len(store.files()) == 4
    for files in (store.files(), Place(f"{store.path}-2", store.bucket, tmp_path).files()):
        assert files["data-20240101-0123456789abcdef.csv"] == b"1,2"
    for folder in ("pulled", "resharded"):
        assert (tmp_path / folder / "data-20240101-0123456789abcdef.csv").read_bytes() == b"1,2"


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_a_directory_that_was_synced_down_loads_and_gets_usual_names(store: Place) -> None:
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)
    synced = store.synced()
    assert read_by_all(synced) == all_see(1)
    assert hfshard.verify_checkpoint(synced).ok
    assert len(_numbered(path.name for path in synced.iterdir())) == len(list(synced.glob("*.safetensors"))) + 1

    for limit, value in ((SHARDED, 2), (SINGLE, 3), (SHARDED, 3)):
        directory = shutil.copytree(store.synced(), store.folder / f"saved-{value}-{limit}")
        bert(value).save_pretrained(directory, max_shard_size=limit)

        assert read_by_all(directory) == all_see(value)
        assert _numbered(path.name for path in directory.rglob("*")) == []
        assert hfshard.verify_checkpoint(directory).ok
    hfshard.reshard_checkpoint(synced, synced, "1GB")
    assert sorted(path.name for path in synced.iterdir()) == ["config.json", "model.safetensors"]
    assert read_by_all(synced) == all_see(1)


@s3
def test_a_pull_and_a_reshard_with_little_disk_leave_usual_names_where_it_was_synced_to(
    store: Place, tmp_path: Path
) -> None:
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)
    synced = store.synced()
    hfshard.reshard_checkpoint(synced, synced, "1GB", low_disk=True)
    assert read_by_all(synced) == all_see(1)
    assert sorted(path.name for path in synced.iterdir()) == ["config.json", "model.safetensors"]

    for value in (1, 2):
        bert(value).save_pretrained(store.path, max_shard_size=SHARDED)
        shutil.copytree(store.synced(), tmp_path / "all", dirs_exist_ok=True)
    bert(3).save_pretrained(store.path, max_shard_size=SHARDED)
    hfshard.pull_checkpoint(store.path, tmp_path / "all")
    assert read_by_all(tmp_path / "all") == all_see(3)
    assert _numbered(path.name for path in (tmp_path / "all").iterdir()) == []


@s3
def test_what_several_syncs_have_brought_goes_with_the_next_save(store: Place, tmp_path: Path) -> None:
    for value in (1, 2):
        bert(value).save_pretrained(store.path, max_shard_size=SHARDED)
        shutil.copytree(store.synced(), tmp_path / "all", dirs_exist_ok=True)  # without --delete
    (tmp_path / "all" / "photo-20240101-0123456789abcdef.jpg").write_bytes(b"mine")
    assert read_by_all(tmp_path / "all") == all_see(2)

    bert(3).save_pretrained(tmp_path / "all", max_shard_size=SHARDED)

    assert read_by_all(tmp_path / "all") == all_see(3)
    assert _numbered(path.name for path in (tmp_path / "all").iterdir()) == ["photo-20240101-0123456789abcdef.jpg"]


@s3
def test_a_variant_that_was_synced_down_stays_when_another_one_is_saved(store: Place) -> None:
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)
    bert(2).save_pretrained(store.path, max_shard_size=SHARDED, variant="fp16")
    synced = store.synced()
    of_fp16 = {path.name for path in synced.iterdir() if "fp16" in path.name}

    bert(3).save_pretrained(synced, max_shard_size=SHARDED)

    assert value_of(Bert.from_pretrained(synced, verify="full")) == 3
    assert value_of(BertModel.from_pretrained(synced, variant="fp16")) == 2
    assert value_of(Bert.from_pretrained(synced, variant="fp16", verify="full")) == 2
    assert set(_numbered(path.name for path in synced.iterdir())) == of_fp16 - {"model.safetensors.index.fp16.json"}
    assert hfshard.verify_checkpoint(synced, variant="fp16").ok


@pytest.mark.parametrize("limit", [SHARDED, SINGLE])
@s3
def test_a_directory_that_is_synced_up_again_with_delete_is_the_checkpoint(
    store: Place, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)
    synced = store.synced()
    bert(2).save_pretrained(synced, max_shard_size=limit)

    _upload(synced, store, deletes=True)

    assert value_of(Bert.from_pretrained(store.path, verify="full")) == 2
    assert _numbered(store.files()) == []
    assert caplog.text == ""
    bert(3).save_pretrained(store.path, max_shard_size=SHARDED)
    assert value_of(Bert.from_pretrained(store.path, verify="full")) == 3
    assert read_by_all(store.synced()) == all_see(3)
    assert not [name for name in store.files() if name.endswith(".safetensors") and not NUMBERED.search(name)]


@pytest.mark.parametrize("limit", [SHARDED, SINGLE])
@s3
def test_a_directory_that_is_synced_up_without_delete_lies_next_to_the_checkpoint(
    store: Place, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)
    before = store.files()
    synced = store.synced()
    bert(2).save_pretrained(synced, max_shard_size=limit)

    _upload(synced, store, deletes=False)

    entry = "model.safetensors" if limit == SINGLE else "model.safetensors.index.json"
    assert value_of(Bert.from_pretrained(store.path)) == 1
    assert f"To load the uploaded ones, pass '{store.path}/{entry}'" in caplog.text
    assert value_of(Bert.from_pretrained(f"{store.path}/{entry}")) == 2
    assert _numbered(store.files()) == _numbered(before)
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)  # nothing new but for hfshard's readers
    assert read_by_all(store.synced()) == all_see(1)
    assert sorted(map(usual_name, store.files())) == sorted(map(usual_name, before))


@s3
def test_a_directory_synced_down_and_up_elsewhere_is_the_same_checkpoint(
    store: Place, caplog: pytest.LogCaptureFixture
) -> None:
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)
    other = Place(f"{store.path}-copy/deep", store.bucket, store.folder)

    _upload(store.synced(), other, deletes=False)  # a folder that is copied by hand is the same

    assert other.files() == store.files()
    assert value_of(Bert.from_pretrained(other.path, verify="full")) == 1
    assert hfshard.verify_checkpoint(other.path).warnings == ()
    bert(2).save_pretrained(other.path, max_shard_size=SHARDED)
    assert value_of(Bert.from_pretrained(other.path, verify="full")) == 2
    assert value_of(Bert.from_pretrained(store.path, verify="full")) == 1
    assert {name[-30:-22] for name in _numbered(other.files()) if name.endswith(".json")} == {"00000002"}
    assert caplog.text == ""


@s3
def test_copies_of_a_directory_that_was_synced_down_have_no_index_of_a_save(store: Place, tmp_path: Path) -> None:
    for value in (0, 0.5, 1):
        bert(value).save_pretrained(store.path, max_shard_size=SHARDED)
    synced = store.synced()
    push, reshard = f"{store.path}-push", f"{store.path}-reshard"

    hfshard.push_checkpoint(synced, push)
    hfshard.reshard_checkpoint(synced, reshard, "1GB")
    hfshard.reshard_checkpoint(synced, tmp_path / "resharded", "1GB")
    hfshard.push_checkpoint(synced, tmp_path / "hub")
    hfshard.pull_checkpoint(tmp_path / "hub", tmp_path / "pulled")

    for place in (push, reshard, tmp_path / "resharded", tmp_path / "hub", tmp_path / "pulled"):
        assert value_of(Bert.from_pretrained(str(place), verify="full")) == 1, place
    for place in (push, reshard):
        saves = {match[0] for name in Place(place, store.bucket, tmp_path).files() if (match := NUMBERED.search(name))}
        assert [name[1:9] for name in saves] == ["00000001"]
    assert sorted(path.name for path in (tmp_path / "resharded").iterdir()) == ["config.json", "model.safetensors"]
    left = [path.name for path in (tmp_path / "pulled").rglob("*.json") if NUMBERED.search(path.name)]
    assert left == []


@s3
def test_a_config_that_is_edited_in_the_store_counts_until_the_next_save(
    store: Place, caplog: pytest.LogCaptureFixture
) -> None:
    bert(1).save_pretrained(store.path, max_shard_size=SHARDED)
    plain = store.files()["config.json"]
    edited = plain.replace(b'"hidden_dropout_prob": 0.1', b'"hidden_dropout_prob": 0.7')
    store.put("config.json", edited)

    assert Bert.from_pretrained(store.path).config.hidden_dropout_prob == 0.7
    assert "/config.json' is not the file that was saved: its sha256 is" in caplog.text
    assert BertModel.from_pretrained(store.synced()).config.hidden_dropout_prob == 0.7
    hfshard.reshard_checkpoint(store.path, store.path, "1GB")  # keeps the config that counts
    caplog.clear()
    assert Bert.from_pretrained(store.path, verify="full").config.hidden_dropout_prob == 0.7
    assert caplog.text == ""

    bert(2).save_pretrained(store.path, max_shard_size=SHARDED)
    store.put("config.json", edited)  # an old copy by now
    assert Bert.from_pretrained(store.path, verify="full").config.hidden_dropout_prob == 0.1
    assert caplog.text == ""
    bert(2).save_pretrained(store.path, max_shard_size=SHARDED)
    assert json.loads(store.files()["config.json"]) == json.loads(plain)


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_a_config_of_more_than_a_mebibyte_is_an_object_of_its_save(store: Place, tmp_path: Path) -> None:
    def wide(value: float) -> Any:
        model = bert(value)
        model.config.id2label = {number: f"label {number} of many, by its full name" for number in range(15_000)}
        model.config.label2id = {label: number for number, label in model.config.id2label.items()}
        return model

    for value in (1, 2, 2):
        wide(value).save_pretrained(store.path)
        files = store.files()

        assert len(files["config.json"]) > 1 << 20
        assert store.names() == [
            "config-N.json",
            "config.json",
            "model-00001-of-00001-N.safetensors",
            "model.safetensors.index-N.json",
            "model.safetensors.index.json",
        ]
        loaded = Bert.from_pretrained(store.path, verify="full")
        assert (value_of(loaded), loaded.config.id2label[14_999]) == (value, "label 14999 of many, by its full name")
    assert {match[0][1:9] for name in files if (match := NUMBERED.search(name))} == {"00000002"}  # not saved again
    synced = store.synced()
    assert read_by_all(synced) == all_see(2)
    hfshard.pull_checkpoint(store.path, tmp_path / "pulled", verify="full")
    assert (tmp_path / "pulled" / "config.json").read_bytes().rstrip() == files["config.json"].rstrip()
    assert len(list((tmp_path / "pulled").iterdir())) == 2
    hfshard.push_checkpoint(synced, f"{store.path}-2")
    assert len(Place(f"{store.path}-2", store.bucket, tmp_path).files()) == 5
    hfshard.reshard_checkpoint(synced, tmp_path / "resharded", "1GB")
    assert len(list((tmp_path / "resharded").iterdir())) == 2
    wide(3).save_pretrained(synced)
    assert sorted(path.name for path in synced.iterdir()) == ["config.json", "model.safetensors"]
    bert(4).save_pretrained(store.path)  # a small one again
    assert len(store.names()) == 4
    assert value_of(Bert.from_pretrained(store.path, verify="full")) == 4


@s3
def test_two_variants_in_one_place_replace_only_their_own_saves(store: Place, tmp_path: Path) -> None:
    for value, variant in ((1, None), (2, "fp16"), (3, None), (4, "fp16"), (5, "fp16"), (6, None)):
        bert(value).save_pretrained(store.path, variant=variant, max_shard_size=SHARDED)

    assert value_of(Bert.from_pretrained(store.path, verify="full")) == 6
    assert value_of(Bert.from_pretrained(store.path, variant="fp16", verify="full")) == 5
    assert {(match[0][1:9], "fp16" in name) for name in store.files() if (match := NUMBERED.search(name))} == {
        ("00000005", True),
        ("00000006", False),
    }
    assert hfshard.verify_checkpoint(store.path).warnings == hfshard.verify_checkpoint(store.path, variant="fp16").warnings == ()  # noqa: E501  # fmt: skip
    hfshard.pull_checkpoint(store.path, tmp_path / "pulled", variant="fp16")
    assert value_of(Bert.from_pretrained(tmp_path / "pulled", variant="fp16", verify="full")) == 5
    hfshard.push_checkpoint(store.path, f"{store.path}-2")
    hfshard.push_checkpoint(store.path, tmp_path / "hub")
    for place in (f"{store.path}-2", str(tmp_path / "hub")):
        assert value_of(Bert.from_pretrained(place, verify="full")) == 6
        assert value_of(Bert.from_pretrained(place, variant="fp16", verify="full")) == 5


class Run:
    """A run whose weights are the number of the step."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.state = TrainingState(model=self.net, optimizer=self.optimizer)

    def save(self, place: str | Path, *steps: int) -> None:
        with CheckpointManager(place, max_to_keep=2) as manager:
            for step in steps:
                with torch.no_grad():
                    self.net.weight.fill_(step)
                manager.save(step, self.state)

    def restored(self, place: str | Path) -> tuple[int | None, float]:
        step = CheckpointManager(place).restore_latest(self.state)
        return step, self.net.weight[0, 0].item()


def _steps(names: Any) -> dict[str, bool]:
    """The steps of a run -> whether any of their files is named by a save into a store."""
    steps = sorted({name.partition("/")[0] for name in names if not name.startswith(".")})
    return {step[-1]: bool(_numbered(name for name in names if name.startswith(step))) for step in steps}


@s3
def test_a_run_that_was_synced_down_goes_on_there(store: Place) -> None:
    run = Run()
    run.save(store.path, 1, 2, 3)
    synced = store.synced()
    assert run.restored(synced) == (3, 3)
    assert hfshard.verify_checkpoint(synced).ok

    run.save(synced, 3, 4)
    names = [path.relative_to(synced).as_posix() for path in synced.rglob("*") if path.is_file()]
    assert _steps(names) == {"3": False, "4": False}
    assert _numbered(names) == []
    assert run.restored(synced) == (4, 4)
    assert hfshard.verify_checkpoint(synced).ok


@pytest.mark.parametrize("deletes", [False, True])
@s3
def test_a_run_that_is_synced_up_again_goes_on_in_the_store(store: Place, *, deletes: bool) -> None:
    run = Run()
    run.save(store.path, 1, 2)
    synced = store.synced()
    run.save(synced, 3)

    _upload(synced, store, deletes=deletes)

    assert run.restored(store.path) == (3, 3)
    run.save(store.path, 4)
    assert run.restored(store.path) == (4, 4)
    assert _steps(store.files()) == {"3": False, "4": True}
    assert hfshard.verify_checkpoint(store.path).ok
    run.save(store.path, 5, 6)
    assert run.restored(store.path) == (6, 6)
    assert _steps(store.files()) == {"5": True, "6": True}


@s3
def test_a_step_that_was_copied_by_hand_restores_and_loads_alone(store: Place) -> None:
    run = Run()
    run.save(store.path, 1, 2)
    other = Place(f"{store.path}-other/checkpoint-00000002", store.bucket, store.folder)
    for name, raw in store.files().items():
        if name.startswith("checkpoint-00000002/"):
            other.put(name.partition("/")[2], raw)

    assert run.restored(f"{store.path}-other") == (2, 2)
    assert hfshard.verify_checkpoint(f"{store.path}-other").ok
    for place in (other.path, other.synced()):
        assert hfshard.load_state_dict(place, verify="full")["weight"][0, 0] == 2
    run.save(f"{store.path}-other", 3)
    assert run.restored(f"{store.path}-other") == (3, 3)
    assert run.restored(store.path) == (2, 2)


@s3
def test_cards_are_files_of_users_and_go_along(store: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bert(1).save_pretrained(store.path)
    assert "README.md" not in store.files()
    store.put("README.md", b"# Mine\n")

    before = store.files()
    bert(1).save_pretrained(store.path)
    assert store.files() == before
    bert(2).save_pretrained(store.path)
    hfshard.pull_checkpoint(store.path, tmp_path / "pulled")
    hfshard.push_checkpoint(store.path, f"{store.path}-2")
    hfshard.reshard_checkpoint(store.path, f"{store.path}-3", "1GB")

    assert store.files()["README.md"] == b"# Mine\n"
    assert (tmp_path / "pulled" / "README.md").read_bytes() == b"# Mine\n"
    for place in (f"{store.path}-2", f"{store.path}-3"):
        assert Place(place, store.bucket, tmp_path).files()["README.md"] == b"# Mine\n"
    assert caplog.text == ""


@s3
def test_checkpoints_in_folders_of_a_place_go_along_with_it(store: Place, tmp_path: Path) -> None:
    hfshard.save_state_dict(_ones(1), store.path)
    hfshard.save_state_dict(_ones(2), f"{store.path}/unet")
    copied, shown = f"{store.path}-2", Place(f"{store.path}-2", store.bucket, tmp_path)
    for value in (5, 6):
        hfshard.save_state_dict(_ones(value), f"{copied}/unet")  # which the copy replaces

    hfshard.pull_checkpoint(store.path, tmp_path / "pulled")
    hfshard.push_checkpoint(store.path, copied)
    hfshard.push_checkpoint(store.path, tmp_path / "hub")

    for place in (store.path, copied, tmp_path / "pulled"):
        assert (_value(str(place), verify="full"), _value(f"{place}/unet", verify="full")) == (1, 2)
    assert _value(tmp_path / "hub", verify="full") == _value(tmp_path / "hub", subfolder="unet") - 1 == 1
    assert len([name for name in shown.files() if name.startswith("unet/")]) == 3
    hfshard.save_state_dict(_ones(7), tmp_path / "pulled" / "unet")
    assert [path.name for path in (tmp_path / "pulled" / "unet").iterdir()] == ["model.safetensors"]
    hfshard.push_checkpoint(tmp_path / "pulled", copied)
    assert (_value(copied, verify="full"), _value(f"{copied}/unet")) == (1, 7)
    assert [name for name in shown.files() if name.startswith("unet/")] == ["unet/model.safetensors"]


@s3
def test_weights_in_a_folder_are_replaced_whole_and_others_stay(store: Place, tmp_path: Path) -> None:
    local, hub = tmp_path / "local", f"{tmp_path}/hub/bert"
    hfshard.save_state_dict(_ones(1), local)
    hfshard.save_state_dict(_ones(3), f"{store.path}/unet", variant="ema")
    for value, size in ((1, "1GB"), (2, 12)):
        hfshard.save_state_dict(_ones(value), local / "unet", max_shard_size=size)
        hfshard.push_checkpoint(local, store.path)
        hfshard.push_checkpoint(local, hub)
        assert (_value(f"{store.path}/unet"), _value(hub, subfolder="unet")) == (value, value)
    assert "unet/model.safetensors" not in store.files() and "unet/model-00002-of-00002.safetensors" in store.files()
    assert _value(f"{store.path}/unet", variant="ema") == 3
