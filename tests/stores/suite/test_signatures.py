"""Signed checkpoints in stores: compared there, and what is pulled says by itself whether it is as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hfshard
from hfshard.cli.main import main
from hfshard.errors import CheckpointChangedError, InvalidArgumentError, SignatureError
from hfshard.places.store_files import StoreFiles
from hfshard.signing.check_signature import SignedObjects
from tests.helpers.tiny_bert import SHARDED, bert
from tests.servers.stores.buckets import Bucket
from tests.signing.conftest import write_pair
from tests.signing.helpers import model_signing


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize("max_shard_size", [SHARDED, "1GB"])
def test_a_signature_goes_along_and_is_checked_on_the_disk(
    store_address: str, max_shard_size: int | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private, public = write_pair(tmp_path, "mine")
    bert(3).save_pretrained(tmp_path / "out", max_shard_size=max_shard_size)
    hfshard.sign_checkpoint(tmp_path / "out", private_key=private)

    hfshard.push_checkpoint(tmp_path / "out", store_address)
    hfshard.pull_checkpoint(store_address, tmp_path / "pulled")

    report = hfshard.verify_checkpoint(tmp_path / "pulled", public_key=public)
    assert report.ok, report.problems
    with pytest.raises(InvalidArgumentError, match=r"hfshard pull s3://.* DIR"):
        hfshard.sign_checkpoint(store_address, private_key=private)
    hfshard.push_checkpoint(tmp_path / "out", store_address)
    bert(3).save_pretrained(store_address, max_shard_size=max_shard_size)
    assert "is stale" not in caplog.text  # nothing has changed
    bert(4).save_pretrained(store_address, max_shard_size=max_shard_size)
    assert "model.sig' is stale: this save replaced the files it covers" in caplog.text
    hfshard.pull_checkpoint(store_address, tmp_path / "other")
    with pytest.raises(SignatureError, match=r"is not the file that was signed|not covered|is missing"):
        hfshard.load_state_dict(tmp_path / "other", public_key=public)


def signed_bert(folder: Path, max_shard_size: int | str = SHARDED) -> tuple[Path, Path]:
    """A signed BERT with code in a folder, and the public key."""
    private, public = write_pair(folder, "mine")
    bert(3).save_pretrained(folder / "out", max_shard_size=max_shard_size)
    (folder / "out" / "code").mkdir()
    (folder / "out" / "code" / "a.py").write_text("x = 1\n")
    hfshard.sign_checkpoint(folder / "out", private_key=private)
    return folder / "out", public


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One in a few shards, read-only by agreement."""
    return signed_bert(tmp_path_factory.mktemp("signed"))


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_what_was_pushed_is_compared_in_the_store(
    store_address: str, signed: tuple[Path, Path], tmp_path: Path
) -> None:
    directory, public = signed
    other = write_pair(tmp_path, "other")[1]
    hfshard.push_checkpoint(directory, store_address)

    report = hfshard.verify_checkpoint(store_address, public_key=public)

    assert report.ok, report.problems
    assert report.signed_by == f"the key of '{public}'"
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    small = sum((directory / name).stat().st_size for name in report.files if not name.endswith(".safetensors"))
    assert report.checked_bytes == weights + small  # no byte of a shard came twice
    lightly = hfshard.verify_checkpoint(store_address, public_key=public, level="structure")
    assert (lightly.ok, lightly.signed_by) == (True, None)
    assert lightly.warnings == ("7 signed files of weights were not compared: level='full' compares them.",)
    [problem] = hfshard.verify_checkpoint(store_address, public_key=other).problems
    assert problem.file == f"{store_address}/model.sig"
    assert "was not made by the key of" in problem.message
    assert main(["verify", store_address, "--public-key", str(public)]) == 0
    assert main(["verify", store_address, "--public-key", str(other)]) == 1


def upload(directory: Path, bucket: Bucket, prefix: str) -> None:
    """Put the files of a directory, as another tool does."""
    for path in directory.rglob("*.*"):
        bucket.put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize("max_shard_size", [SHARDED, "1GB"])
def test_what_other_tools_uploaded_is_compared_as_it_lies(
    bucket: Bucket, store_address: str, store_prefix: str, max_shard_size: int | str, tmp_path: Path
) -> None:
    directory, public = signed_bert(tmp_path, max_shard_size)
    upload(directory, bucket, store_prefix)

    report = hfshard.verify_checkpoint(store_address, public_key=public)

    assert report.ok, report.problems
    assert report.signed_by is not None


def edit(bucket: Bucket, prefix: str) -> None:
    bucket.put(f"{prefix}/config.json", bucket.read(f"{prefix}/config.json").replace(b'"bert"', b'"gpt2"'))


def add(bucket: Bucket, prefix: str) -> None:
    bucket.put(f"{prefix}/code/evil.py", b"raise SystemExit\n")


def remove(bucket: Bucket, prefix: str) -> None:
    bucket.delete(f"{prefix}/code/a.py")


def damage(bucket: Bucket, prefix: str) -> None:
    [key] = [key for key in bucket.sizes(prefix) if "model-00002-of-" in key]
    bucket.put(key, bucket.read(key)[:-1] + b"\x7f")


def unsign(bucket: Bucket, prefix: str) -> None:
    bucket.delete(f"{prefix}/model.sig")


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize(
    ("tamper", "file", "words"),
    [
        (edit, "config.json", "is not the file that was signed"),
        (add, "code/evil.py", "is not covered by the signature"),
        (remove, "code/a.py", "was signed, but is missing"),
        (damage, "model-00002-of-", "is not the file that was signed"),
        (unsign, "", "has no signature: there is no 'model.sig'"),
    ],
)
def test_what_differs_in_the_store_is_named(
    bucket: Bucket,
    store_address: str,
    store_prefix: str,
    tamper: Callable[[Bucket, str], None],
    file: str,
    words: str,
    signed: tuple[Path, Path],
) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)
    tamper(bucket, store_prefix)

    report = hfshard.verify_checkpoint(store_address, public_key=public)

    assert report.signed_by is None
    [problem] = [problem for problem in report.problems if words in problem.message]
    assert problem.file.startswith(f"{store_address}/{file}".rstrip("/"))


def load_tensors(address: str, public: Path) -> dict[str, torch.Tensor]:
    return hfshard.load_state_dict(address, public_key=public)


def load_module(address: str, public: Path) -> dict[str, torch.Tensor]:
    model = bert(5)
    hfshard.load_model(model, address, public_key=public)
    return dict(model.state_dict())


def build_by_auto(address: str, public: Path) -> dict[str, torch.Tensor]:
    return dict(hfshard.load_model(transformers.AutoModel, address, public_key=public).state_dict())


def build_by_mixin(address: str, public: Path) -> dict[str, torch.Tensor]:
    return dict(type(bert(5)).from_pretrained(address, public_key=public).state_dict())


LOADS = pytest.mark.parametrize("load", [load_tensors, load_module, build_by_auto, build_by_mixin])
Load = Callable[[str, Path], dict[str, torch.Tensor]]


@LOADS
@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf"])
def test_a_load_compares_what_it_reads(
    store_address: str, load: Load, signed: tuple[Path, Path], tmp_path: Path
) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)

    found = load(store_address, public)

    expected = hfshard.load_state_dict(directory)
    assert found.keys() >= expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(SignatureError, match="was not made by the key of"):
        load(store_address, write_pair(tmp_path, "other")[1])


@LOADS
@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (edit, "config.json' is not the file that was signed"),
        (damage, "model-00002-of-.* is not the file that was signed"),
        (unsign, "has no signature: there is no 'model.sig'"),
    ],
)
def test_a_load_refuses_what_differs(
    bucket: Bucket,
    store_address: str,
    store_prefix: str,
    load: Load,
    tamper: Callable[[Bucket, str], None],
    words: str,
    signed: tuple[Path, Path],
) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)
    tamper(bucket, store_prefix)

    with pytest.raises(SignatureError, match=words):
        load(store_address, public)


@LOADS
@pytest.mark.parametrize("scheme", ["s3"])
def test_a_load_refuses_a_save_over_what_was_signed(store_address: str, load: Load, signed: tuple[Path, Path]) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)
    bert(4).save_pretrained(store_address, max_shard_size=SHARDED)

    with pytest.raises(SignatureError, match=r"model.*' is not the file that was signed"):
        load(store_address, public)


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize(
    ("tamper", "words"),
    [(add, "code/evil.py' is not covered by the signature"), (remove, "code/a.py' was signed, but is missing")],
)
def test_code_that_may_run_must_be_signed(
    bucket: Bucket,
    store_address: str,
    store_prefix: str,
    tamper: Callable[[Bucket, str], None],
    words: str,
    tmp_path: Path,
    modules_cache: Path,
) -> None:
    private, public = write_pair(tmp_path, "mine")
    bert(3).save_pretrained(tmp_path / "out", max_shard_size=SHARDED)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "code/a.Model"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    (tmp_path / "out" / "code").mkdir()
    (tmp_path / "out" / "code" / "a.py").write_text("raise SystemExit\n")
    hfshard.sign_checkpoint(tmp_path / "out", private_key=private)
    hfshard.push_checkpoint(tmp_path / "out", store_address)
    tamper(bucket, store_prefix)

    with pytest.raises(SignatureError, match=words):
        hfshard.load_model(transformers.AutoModel, store_address, public_key=public, trust_remote_code=True)


@pytest.mark.parametrize("scheme", ["s3"])
def test_code_that_is_signed_runs(store_address: str, tmp_path: Path, modules_cache: Path) -> None:
    private, public = write_pair(tmp_path, "mine")
    model = bert(3)
    model.config.auto_map = {"AutoModel": "signed_module.Own"}
    model.save_pretrained(tmp_path / "out", max_shard_size=SHARDED)
    code = "from transformers import BertModel\nclass Own(BertModel):\n    pass\n"
    (tmp_path / "out" / "signed_module.py").write_text(code)
    (tmp_path / "out" / "scripts").mkdir()
    (tmp_path / "out" / "scripts" / "convert.py").write_text("raise SystemExit\n")  # no load takes it
    hfshard.sign_checkpoint(tmp_path / "out", private_key=private)
    hfshard.push_checkpoint(tmp_path / "out", store_address)

    loaded = hfshard.load_model(transformers.AutoModel, store_address, public_key=public, trust_remote_code=True)

    assert type(loaded).__name__ == "Own"


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_load_that_can_only_be_compared_on_a_disk_says_so(store_address: str, tmp_path: Path) -> None:
    directory, public = signed_bert(tmp_path, "1GB")
    hfshard.push_checkpoint(directory, store_address)

    with pytest.raises(InvalidArgumentError, match=r"signed as one file, 'model.safetensors'.* hfshard pull s3://.*"):
        hfshard.load_state_dict(store_address, public_key=public)


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_load_refuses_weights_that_were_added_beside_an_upload(
    bucket: Bucket, store_address: str, store_prefix: str, signed: tuple[Path, Path]
) -> None:
    directory, public = signed
    upload(directory, bucket, store_prefix)
    shard = next(directory.glob("model-00001-of-*"))
    bucket.put(f"{store_prefix}/model.safetensors", shard.read_bytes())

    with pytest.raises(SignatureError, match=r"model.safetensors' is not covered by the signature"):
        hfshard.load_state_dict(f"{store_address}/model.safetensors", public_key=public)


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_config_that_is_replaced_after_it_was_compared_is_not_read(
    bucket: Bucket, store_address: str, store_prefix: str, signed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)
    plain = SignedObjects.check_beside

    def check_then_edit(self: SignedObjects) -> None:
        plain(self)
        edit(bucket, store_prefix)

    monkeypatch.setattr(SignedObjects, "check_beside", check_then_edit)

    with suppress(CheckpointChangedError):
        model = hfshard.load_model(transformers.AutoModel, store_address, public_key=public)
        assert model.config.model_type == "bert"


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_shard_that_is_replaced_after_it_was_compared_is_not_read(
    bucket: Bucket, store_address: str, store_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = write_pair(tmp_path, "mine")
    wide = {f"layer.{number}": torch.full((2000, 1000), float(number)) for number in range(3)}  # not read with a header
    hfshard.save_state_dict(wide, tmp_path / "out", max_shard_size="8MB")
    hfshard.sign_checkpoint(tmp_path / "out", private_key=private)
    hfshard.push_checkpoint(tmp_path / "out", store_address)
    plain = SignedObjects.check_opened

    def check_then_damage(self: SignedObjects, *rest: Any) -> None:
        plain(self, *rest)
        damage(bucket, store_prefix)

    monkeypatch.setattr(SignedObjects, "check_opened", check_then_damage)

    with pytest.raises((CheckpointChangedError, SignatureError)):
        hfshard.load_state_dict(store_address, public_key=public)


@pytest.mark.parametrize("scheme", ["s3"])
def test_signatures_and_indexes_that_are_too_large_are_not_brought_into_memory(
    bucket: Bucket, store_address: str, store_prefix: str, signed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)
    before = hfshard.verify_checkpoint(store_address, public_key=public)

    monkeypatch.setattr("hfshard.saving.signed_store.MAX_INDEX_BYTES", 10)
    report = hfshard.verify_checkpoint(store_address, public_key=public)
    assert report.ok and report.signed_by is not None
    assert report.checked_bytes > before.checked_bytes  # shards are read again, not compared with the index

    bucket.put(f"{store_prefix}/model.sig", b'"%s"' % (b"x" * (9 * 1024 * 1024)))
    [problem] = hfshard.verify_checkpoint(store_address, public_key=public).problems
    assert "model.sig' has 9437186 bytes, but a signature of such files has at most 84" in problem.message


@pytest.mark.parametrize("scheme", ["s3"])
def test_other_weights_under_the_signature_are_named(store_address: str, signed: tuple[Path, Path]) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)
    bert(4).save_pretrained(store_address, max_shard_size=SHARDED)

    assert hfshard.verify_checkpoint(store_address).ok
    report = hfshard.verify_checkpoint(store_address, public_key=public)

    named = {problem.file.removeprefix(f"{store_address}/").partition("-of-")[0] for problem in report.problems}
    assert named >= {"model-00001", "model-00007", "model.safetensors.index.json"}
    assert report.signed_by is None


@pytest.mark.parametrize("scheme", ["s3"])
def test_what_can_only_be_compared_on_a_disk_says_so(store_address: str, tmp_path: Path) -> None:
    directory, public = signed_bert(tmp_path, "1GB")
    hfshard.push_checkpoint(directory, store_address)

    with pytest.raises(
        InvalidArgumentError, match=r"signed as one file, 'model.safetensors'.* hfshard pull s3://.* DIR"
    ):
        hfshard.verify_checkpoint(store_address, public_key=public)

    hfshard.pull_checkpoint(store_address, tmp_path / "pulled")
    assert hfshard.verify_checkpoint(tmp_path / "pulled", public_key=public).ok
    model_signing("verify", "key", tmp_path / "pulled", "--public_key", public)


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_checkpoint_that_is_saved_while_it_is_compared_is_not_called_signed(
    bucket: Bucket, store_address: str, store_prefix: str, signed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, public = signed
    hfshard.push_checkpoint(directory, store_address)
    plain = StoreFiles.is_unchanged

    def edited(self: StoreFiles) -> bool:
        edit(bucket, store_prefix)
        return plain(self)

    monkeypatch.setattr(StoreFiles, "is_unchanged", edited)
    with pytest.raises(CheckpointChangedError, match="was replaced while it was being checked"):
        hfshard.verify_checkpoint(store_address, public_key=public)
