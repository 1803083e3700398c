"""Signing: what model-signing's own command line makes of it, and of what it signs itself."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import CheckpointNotFoundError, IntegrityError, InvalidArgumentError, SignatureError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.viewing.screenshot import find_chromium
from tests.signing.conftest import Keys, write_pair
from tests.signing.helpers import model_signing, payload_of


def test_model_signing_accepts_what_was_signed(checkpoint: Path, keys: Keys) -> None:
    result = hfshard.sign_checkpoint(checkpoint, private_key=keys.private)

    shards = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    small = ["README.md", "config.json", "model.safetensors.index.json", "modeling_mine.py", "tokenizer.json"]
    assert result.signature == str(checkpoint / "model.sig")
    assert result.files == (*small[:2], *shards, *small[2:])
    assert result.recorded_bytes == sum((checkpoint / name).stat().st_size for name in shards)
    assert result.read_bytes == sum((checkpoint / name).stat().st_size for name in small)
    model_signing("verify", "key", checkpoint, "--public_key", keys.public)


def test_hfshard_accepts_what_model_signing_signed(checkpoint: Path, keys: Keys) -> None:
    model_signing("sign", "key", checkpoint, "--private_key", keys.private)

    report = hfshard.verify_checkpoint(checkpoint, public_key=keys.public)
    loaded = hfshard.load_state_dict(checkpoint, public_key=keys.public)

    assert report.ok, report.problems
    assert sorted(loaded) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("shards", {"hashing_algorithm": "sha256", "shard_size": 300}),
        ("files", {"hashing_algorithm": "blake3"}),
        ("files", {"hashing_algorithm": "blake2"}),
        ("shards", {"hashing_algorithm": "blake2"}),
    ],
)
def test_other_digests_of_the_library_are_taken_too(
    checkpoint: Path, keys: Keys, method: str, options: dict[str, Any]
) -> None:
    from model_signing import hashing, signing

    config = hashing.Config()
    (config.use_shard_serialization if method == "shards" else config.use_file_serialization)(**options)
    config.set_ignored_paths(paths=["model.sig"])
    signer = signing.Config().set_hashing_config(config).use_elliptic_key_signer(private_key=keys.private)
    signer.sign(checkpoint, checkpoint / "model.sig")

    assert hfshard.verify_checkpoint(checkpoint, public_key=keys.public).ok
    assert sorted(hfshard.load_state_dict(checkpoint, public_key=keys.public)) == ["a", "b", "c"]

    shard = checkpoint / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(SignatureError, match=r"00002-of-00003.safetensors' is not the file that was signed"):
        hfshard.load_state_dict(checkpoint, public_key=keys.public)


def test_a_just_saved_checkpoint_is_signed_without_reading_its_shards(
    checkpoint: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, int] = {}
    plain = os.read

    def counted(fd: int, count: int) -> bytes:
        found = plain(fd, count)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        read[name] = read.get(name, 0) + len(found)
        return found

    monkeypatch.setattr(os, "read", counted)
    hfshard.sign_checkpoint(checkpoint, private_key=keys.private)

    headers = 4096  # what is read of a shard to check it: its header, and the fingerprint by other calls
    assert max(count for name, count in read.items() if "-of-" in name) <= 2 * headers
    recorded = json.loads((checkpoint / "model.safetensors.index.json").read_text())["metadata"]["hfshard"]["files"]
    resources = {one["name"]: one["digest"] for one in payload_of(checkpoint)["predicate"]["resources"]}
    assert {name: resources[name] for name in recorded} == {name: one["sha256"] for name, one in recorded.items()}


def test_a_damaged_checkpoint_is_not_signed(checkpoint: Path, keys: Keys) -> None:
    shard = checkpoint / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")

    with pytest.raises(IntegrityError, match="00001-of-00003"):
        hfshard.sign_checkpoint(checkpoint, private_key=keys.private)

    assert not (checkpoint / "model.sig").exists()


def test_a_single_file_and_what_others_saved_is_read_and_signed(tmp_path: Path, keys: Keys) -> None:
    from safetensors.torch import save_file

    hfshard.save_state_dict({"a": torch.ones(4)}, tmp_path / "one")
    (tmp_path / "theirs").mkdir()
    save_file({"a": torch.ones(4)}, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "pickle").mkdir()
    torch.save({"a": torch.ones(4)}, tmp_path / "pickle" / "pytorch_model.bin")

    for name in ("one", "theirs", "pickle"):
        directory = tmp_path / name
        result = hfshard.sign_checkpoint(directory, private_key=keys.private)
        model_signing("verify", "key", directory, "--public_key", keys.public)

        assert (result.recorded_bytes, len(result.files)) == (0, 1)
        assert hfshard.verify_checkpoint(directory, public_key=keys.public).ok
        assert torch.equal(hfshard.load_state_dict(directory, public_key=keys.public)["a"], torch.ones(4))
        other = directory / result.files[0]
        other.write_bytes(other.read_bytes().replace(b"\x80\x3f", b"\x00\x40", 1))
        with pytest.raises((SignatureError, IntegrityError), match=result.files[0]):
            hfshard.load_state_dict(directory, public_key=keys.public, verify="none")


def test_what_git_and_the_hub_keep_is_not_signed(checkpoint: Path, keys: Keys) -> None:
    for name in (".git/HEAD", ".cache/huggingface/x.metadata", ".gitattributes", "code/__pycache__/a.pyc"):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text("x")
    (checkpoint / "code" / "a.py").write_text("x = 1\n")

    result = hfshard.sign_checkpoint(checkpoint, private_key=keys.private)

    assert [name for name in result.files if "/" in name] == ["code/a.py"]
    model_signing("verify", "key", checkpoint, "--public_key", keys.public)
    assert hfshard.verify_checkpoint(checkpoint, public_key=keys.public).ok


def test_what_the_library_signs_beyond_that_is_compared_too(checkpoint: Path, keys: Keys) -> None:
    for name in (".cache/huggingface/x.metadata", ".gitattributes", "code/__pycache__/a.pyc", ".DS_Store"):
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_text("x")
    model_signing("sign", "key", checkpoint, "--private_key", keys.private, "--no-ignore-git-paths")

    assert hfshard.verify_checkpoint(checkpoint, public_key=keys.public).ok
    assert sorted(hfshard.load_state_dict(checkpoint, public_key=keys.public)) == ["a", "b", "c"]
    (checkpoint / "code/__pycache__/a.pyc").write_text("y")
    (checkpoint / ".gitattributes").unlink()
    problems = hfshard.verify_checkpoint(checkpoint, public_key=keys.public).problems
    assert {Path(problem.file).name for problem in problems} == {"a.pyc", ".gitattributes"}


def test_a_signed_file_that_became_a_link_is_named_as_by_the_library(signed: Path, keys: Keys, tmp_path: Path) -> None:
    (signed / "config.json").rename(tmp_path / "config.json")
    (signed / "config.json").symlink_to(tmp_path / "config.json")

    model_signing("verify", "key", signed, "--public_key", keys.public, exit_code=1)
    report = hfshard.verify_checkpoint(signed, public_key=keys.public)

    assert [(Path(problem.file).name, "is now a link" in problem.message) for problem in report.problems] == [
        ("config.json", True)
    ]


def test_a_signature_that_became_a_link_is_named_as_by_the_library(signed: Path, keys: Keys) -> None:
    (signed / ".cache").mkdir()
    (signed / "model.sig").rename(signed / ".cache" / "model.sig")
    (signed / "model.sig").symlink_to(signed / ".cache" / "model.sig")

    model_signing("verify", "key", signed, "--public_key", keys.public, exit_code=1)
    report = hfshard.verify_checkpoint(signed, public_key=keys.public)

    assert [(Path(problem.file).name, "is now a link" in problem.message) for problem in report.problems] == [
        ("model.sig", True)
    ]


def test_debris_that_was_added_is_named_as_by_the_library(checkpoint: Path, keys: Keys) -> None:
    (checkpoint / "code" / "__pycache__").mkdir(parents=True)
    (checkpoint / "code" / "a.py").write_text("x = 1\n")
    hfshard.sign_checkpoint(checkpoint, private_key=keys.private)
    (checkpoint / "code" / "__pycache__" / "a.pyc").write_text("left out when it was signed")
    model_signing("verify", "key", checkpoint, "--public_key", keys.public)
    assert hfshard.verify_checkpoint(checkpoint, public_key=keys.public).ok

    (checkpoint / "__pycache__").mkdir()
    (checkpoint / "__pycache__" / "b.pyc").write_text("x")
    model_signing("verify", "key", checkpoint, "--public_key", keys.public, exit_code=1)
    report = hfshard.verify_checkpoint(checkpoint, public_key=keys.public)

    assert [(Path(problem.file).name, "was added" in problem.message) for problem in report.problems] == [
        ("b.pyc", True)
    ]
    assert sorted(hfshard.load_state_dict(checkpoint, public_key=keys.public)) == ["a", "b", "c"]


def test_a_folder_that_can_not_be_listed_is_refused(
    checkpoint: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature without its files would not be over every file."""
    (checkpoint / "code").mkdir()
    (checkpoint / "code" / "a.py").write_text("x = 1\n")
    plain = os.scandir

    def scandir(path: str) -> Any:
        if os.path.basename(path) == "code":
            raise PermissionError(13, "Permission denied", path)
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(SignatureError, match=r"Cannot list '.*code': Permission denied"):
        hfshard.sign_checkpoint(checkpoint, private_key=keys.private)
    assert not (checkpoint / "model.sig").exists()


def test_an_adapter_is_signed(tmp_path: Path, keys: Keys) -> None:
    from safetensors.torch import save_file

    (tmp_path / "lora").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        hfshard.sign_checkpoint(tmp_path / "lora", private_key=keys.private)
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    save_file({"a": torch.ones(4)}, tmp_path / "lora" / "adapter_model.safetensors")

    result = hfshard.sign_checkpoint(tmp_path / "lora", private_key=keys.private)

    assert result.files == ("adapter_config.json", "adapter_model.safetensors")
    model_signing("verify", "key", tmp_path / "lora", "--public_key", keys.public)
    report = hfshard.verify_checkpoint(tmp_path / "lora", public_key=keys.public)
    assert report.ok, report.problems
    assert report.signed_by is not None
    (tmp_path / "lora" / "adapter_config.json").write_text("[]")
    [problem] = hfshard.verify_checkpoint(tmp_path / "lora", public_key=keys.public).problems
    assert "adapter_config.json' is not the file that was signed" in problem.message
    with pytest.raises(CheckpointNotFoundError):
        hfshard.verify_checkpoint(tmp_path / "lora")


def test_an_encrypted_key_takes_its_password(checkpoint: Path, tmp_path: Path) -> None:
    private, public = write_pair(tmp_path, "locked", b"secret")

    with pytest.raises(SignatureError, match="Cannot sign '"):
        hfshard.sign_checkpoint(checkpoint, private_key=private, password="wrong")
    hfshard.sign_checkpoint(checkpoint, private_key=private, password="secret")

    assert hfshard.verify_checkpoint(checkpoint, public_key=public).ok
    assert os.listdir(checkpoint).count("model.sig") == 1
    assert not (checkpoint / "model.sig.new").exists()


def test_what_can_not_be_signed_is_refused_by_name(checkpoint: Path, tmp_path: Path, keys: Keys) -> None:
    sign = hfshard.sign_checkpoint
    with pytest.raises(InvalidArgumentError, match=r"Name the signer in exactly one way: by a private key"):
        sign(checkpoint)
    with pytest.raises(InvalidArgumentError, match="is a file, but only directories can be signed"):
        sign(checkpoint / "config.json", private_key=keys.private)
    with pytest.raises(InvalidArgumentError, match="hfshard pull s3://bucket/run DIR"):
        sign("s3://bucket/run", private_key=keys.private)
    with pytest.raises(InvalidArgumentError, match=r"The private key '.*' does not exist\."):
        sign(checkpoint, private_key=tmp_path / "none.pem")
    with pytest.raises(CheckpointNotFoundError):
        sign(tmp_path / "missing", private_key=keys.private)
    with pytest.raises(SignatureError, match="must be an elliptic curve key"):
        sign(checkpoint, private_key=checkpoint / "config.json")
    (checkpoint / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    (tmp_path / "elsewhere.txt").write_text("x")
    with pytest.raises(SignatureError, match=r"has links \('link.txt'\)"):
        sign(checkpoint, private_key=keys.private)
    assert not (checkpoint / "model.sig").exists()


def test_a_directory_hub_is_not_signed_in_place(checkpoint: Path, tmp_path: Path, keys: Keys) -> None:
    hfshard.push_checkpoint(checkpoint, tmp_path / "hub")

    with pytest.raises(InvalidArgumentError, match="whose commits do not change"):
        hfshard.sign_checkpoint(tmp_path / "hub", private_key=keys.private)


def test_the_payload_is_the_standard_one(signed: Path) -> None:
    payload = payload_of(signed)

    assert payload["predicateType"] == "https://model_signing/signature/v1.0"
    assert payload["predicate"]["serialization"] == {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": [".cache", ".git", ".gitattributes", ".github", ".gitignore", "model.sig"],
    }
    assert json.loads((signed / "model.sig").read_text())["mediaType"].startswith("application/vnd.dev.sigstore.bundle")
    assert base64.b64decode(json.loads((signed / "model.sig").read_text())["dsseEnvelope"]["signatures"][0]["sig"])


def test_a_run_of_signed_checkpoints_is_checked_with_their_signatures(tmp_path: Path, keys: Keys) -> None:
    model = torch.nn.Linear(4, 4)
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, TrainingState(model=model))
            hfshard.sign_checkpoint(manager.path_of(step), private_key=keys.private)

    whole = hfshard.verify_checkpoint(tmp_path / "run", public_key=keys.public)
    (tmp_path / "run" / "checkpoint-00000002" / "model.sig").unlink()
    unsigned = hfshard.verify_checkpoint(tmp_path / "run", public_key=keys.public)

    assert (whole.ok, whole.signed_by) == (True, f"the key of '{keys.public}'")
    assert [one.signed_by for one in unsigned.checkpoints] == [whole.signed_by, None]
    assert unsigned.signed_by is None
    assert len(unsigned.problems) == 1
    assert "checkpoint-00000002' has no signature" in unsigned.problems[0].message


@pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
def test_a_card_is_put_in_before_signing_and_verifies_after_a_push_and_a_pull(
    checkpoint: Path, keys: Keys, tmp_path: Path
) -> None:
    (checkpoint / "config.json").write_text("{}")
    result = hfshard.sign_checkpoint(checkpoint, private_key=keys.private, card_picture=True)

    assert result.files[:3] == ("README.md", "config.json", "hfshard-card.png")
    assert (checkpoint / "hfshard-card.png").read_bytes().startswith(b"\x89PNG")
    readme = (checkpoint / "README.md").read_text()
    assert readme.startswith("# Mine\n\n<!-- hfshard:card -->\n![Modules by bytes](hfshard-card.png)\n")
    assert "\n| signature | model.sig |\n<!-- /hfshard:card -->\n" in readme
    model_signing("verify", "key", checkpoint, "--public_key", keys.public)
    hfshard.push_checkpoint(checkpoint, tmp_path / "hub" / "mine")
    hfshard.pull_checkpoint(tmp_path / "hub" / "mine", tmp_path / "pulled")
    report = hfshard.verify_checkpoint(tmp_path / "pulled", public_key=keys.public)
    assert report.ok, report.problems
    assert not (checkpoint / "model.sig.new").exists()


@pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
def test_a_card_is_taken_back_where_signing_fails(checkpoint: Path, tmp_path: Path) -> None:
    private, _ = write_pair(tmp_path, "locked", b"secret")

    with pytest.raises(SignatureError):
        hfshard.sign_checkpoint(checkpoint, private_key=private, password="wrong", card_picture=True)

    assert (checkpoint / "README.md").read_text() == "# Mine\n"
    assert not (checkpoint / "hfshard-card.png").exists()
    assert not (checkpoint / "model.sig").exists()
