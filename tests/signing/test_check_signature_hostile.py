"""Hostile signatures, keys of other kinds, and files that are written over while they are loaded."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

import hfshard
from hfshard.disk.safe_open import read_small
from hfshard.errors import (
    CheckpointChangedError,
    DamagedCheckpointError,
    HfshardError,
    InvalidArgumentError,
    SignatureError,
)
from hfshard.signing.check_signature import SignedFolder
from tests.signing.conftest import Keys
from tests.signing.helpers import model_signing, sign_payload

SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[" + b"[]," * 20_000 + b"[]]", "is not a valid signature: it has more than 10000 values"),
        (b"[" * 9_000 + b"]" * 9_000, "was not made by the key of .*, or is damaged: it is JSON of another kind"),
        (b"\xff\xfe", "or is damaged: UnicodeDecodeError"),
        (b"{", "or is damaged: JSONDecodeError"),
        (b"null", "or is damaged: it is JSON of another kind"),
        (b'"x"', "or is damaged: it is JSON of another kind"),
        (b'{"verificationMaterial": [1]}', "or is damaged: it is JSON of another kind"),
        (b'{"verificationMaterial": {"publicKey": {"hint": []}}}', "or is damaged: ValidationError"),
    ],
)
def test_what_is_no_signature_is_refused_by_name(signed: Path, keys: Keys, raw: bytes, words: str) -> None:
    (signed / "model.sig").write_bytes(raw)

    with pytest.raises(SignatureError, match=words) as caught:
        hfshard.load_state_dict(signed, public_key=keys.public)
    assert caught.value.path == str(signed / "model.sig")
    [problem] = hfshard.verify_checkpoint(signed, public_key=keys.public).problems
    assert problem.file == str(signed / "model.sig")


def test_a_signature_may_be_as_large_as_its_files_are_many(signed: Path, keys: Keys) -> None:
    (signed / "model.sig").write_bytes(b'"%s"' % (b"x" * (9 * 1024 * 1024)))
    with open(signed / "hole.onnx", "wb") as file:
        os.truncate(file.fileno(), 1024**4)  # that takes no room

    with pytest.raises(
        DamagedCheckpointError, match=r"model.sig' has 9437186 bytes, but such a file has at most 8\d{6}"
    ):
        hfshard.load_state_dict(signed, public_key=keys.public)
    [problem] = hfshard.verify_checkpoint(signed, public_key=keys.public).problems
    assert problem.file == str(signed / "model.sig")

    (signed / "more").mkdir()
    for number in range(256):
        (signed / "more" / f"{number}.onnx").touch()
    with pytest.raises(SignatureError, match="or is damaged: it is JSON of another kind"):
        hfshard.load_state_dict(signed, public_key=keys.public)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("signatures", []),
        ("signatures", [{"sig": ""}]),
        ("payload", 5),
        ("payload", "AAAA"),
        ("payloadType", "text/plain"),
    ],
)
def test_envelopes_are_not_believed(signed: Path, keys: Keys, where: str, value: Any) -> None:
    bundle = json.loads((signed / "model.sig").read_text())
    bundle["dsseEnvelope"][where] = value
    (signed / "model.sig").write_text(json.dumps(bundle))

    with pytest.raises(SignatureError, match=r"was not made by the key of .*, or is damaged"):
        hfshard.load_state_dict(signed, public_key=keys.public)


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
def test_a_signature_that_is_no_file_does_not_hang(signed: Path, keys: Keys, kind: str) -> None:
    path = signed / "model.sig"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")

    with pytest.raises(HfshardError, match=r"model.sig' .*is not a regular file"):
        hfshard.load_state_dict(signed, public_key=keys.public)


def test_the_signature_that_is_checked_is_the_one_that_was_read(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes its name meanwhile is not opened: it could be a pipe, and never end."""

    def replaced(path: str, *arguments: Any) -> Any:
        found = read_small(path, *arguments)
        os.unlink(path)
        os.mkfifo(path)
        return found

    monkeypatch.setattr("hfshard.signing.check_signature.read_small", replaced)
    assert sorted(hfshard.load_state_dict(signed, public_key=keys.public)) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "code/../../x"])
def test_names_that_lead_out_of_the_checkpoint_are_refused(signed: Path, keys: Keys, name: str) -> None:
    def lead_out(payload: dict[str, Any]) -> None:
        payload["predicate"]["resources"][0]["name"] = name

    sign_payload(signed, keys.private, lead_out)

    with pytest.raises(SignatureError, match="names a file outside the checkpoint"):
        hfshard.load_state_dict(signed, public_key=keys.public)


@pytest.mark.parametrize("name", [SHARD, "config.json", "model.safetensors.index.json", "modeling_mine.py"])
def test_what_was_left_out_of_a_signature_on_purpose_is_refused_where_loads_take_it(
    checkpoint: Path, keys: Keys, name: str
) -> None:
    ignored = ("--ignore-paths", checkpoint / name)
    model_signing("sign", "key", checkpoint, "--private_key", keys.private, *ignored)
    model_signing("verify", "key", checkpoint, "--public_key", keys.public)

    with pytest.raises(SignatureError, match=f"{name}' is not covered by the signature: the signer left it out"):
        hfshard.load_state_dict(checkpoint, public_key=keys.public)
    report = hfshard.verify_checkpoint(checkpoint, public_key=keys.public)
    assert [Path(problem.file).name for problem in report.problems] == [name]
    assert report.signed_by is None


def test_what_no_load_takes_may_be_left_out_on_purpose(checkpoint: Path, keys: Keys) -> None:
    (checkpoint / "log.dat").write_text("x")
    for name in ("log.dat", "README.md"):
        model_signing("sign", "key", checkpoint, "--private_key", keys.private, "--ignore-paths", checkpoint / name)
        report = hfshard.verify_checkpoint(checkpoint, public_key=keys.public)

        assert report.ok, report.problems
        assert report.warnings == (
            f"'{name}': left out of the signature on purpose by the signer; no load accepts such files.",
        )
        assert sorted(hfshard.load_state_dict(checkpoint, public_key=keys.public)) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["Config.json", "m\u043edel.safetensors", "model.safetensors.index.json "])
def test_names_that_look_alike_are_others(signed: Path, keys: Keys, name: str) -> None:
    shutil.copy(signed / "config.json", signed / name)

    with pytest.raises(SignatureError, match="is not covered by the signature: it was added"):
        hfshard.load_state_dict(signed, public_key=keys.public)


TOUCHED = "was changed after its signature was checked, so what was loaded"
NOT_SIGNED = "was changed after its signature was checked, so what was read may not be what was signed"


@pytest.mark.parametrize(("read", "words"), [("auto", TOUCHED), ("mmap", TOUCHED), ("pread", NOT_SIGNED)])
def test_weights_that_are_written_over_after_their_check_are_noticed(
    signed: Path, keys: Keys, read: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the very file that is open, with the times that it had."""
    plain = SignedFolder.check_opened

    def write_after(self: SignedFolder, *arguments: Any) -> None:
        plain(self, *arguments)
        status = os.stat(signed / SHARD)
        with open(signed / SHARD, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\x7f")
        os.utime(signed / SHARD, ns=(status.st_atime_ns, status.st_mtime_ns))

    monkeypatch.setattr(SignedFolder, "check_opened", write_after)
    with pytest.raises(CheckpointChangedError, match=f"{SHARD}' {words}"):
        hfshard.load_state_dict(signed, public_key=keys.public, read=read)


def test_a_pickle_that_is_written_over_before_its_check_is_noticed(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "pytorch_model.bin"
    path.parent.mkdir()
    torch.save({"a": torch.ones(4), "b": torch.zeros(4)}, path)
    hfshard.sign_checkpoint(path.parent, private_key=keys.private)
    signed = path.read_bytes()
    torch.save({"b": torch.ones(4), "a": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    path.write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    status, plain = path.stat(), SignedFolder.check_opened

    def written_over(self: SignedFolder, *arguments: Any) -> None:
        with path.open("r+b") as file:
            file.write(signed)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        plain(self, *arguments)

    monkeypatch.setattr(SignedFolder, "check_opened", written_over)
    with pytest.raises(CheckpointChangedError, match=r"pytorch_model.bin' was changed after it was opened and before"):
        hfshard.load_state_dict(path.parent, public_key=keys.public)


@pytest.mark.parametrize(("read", "words"), [("auto", TOUCHED), ("mmap", TOUCHED), ("pread", NOT_SIGNED)])
def test_weights_that_are_put_back_before_the_end_of_the_load_are_noticed(
    signed: Path, keys: Keys, read: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes stand there while tensors are read, and the signed ones, with their times, before and after."""
    checked, confirmed = SignedFolder.check_opened, SignedFolder.confirm
    raw, status = (signed / SHARD).read_bytes(), os.stat(signed / SHARD)

    def write(contents: bytes) -> None:
        with open(signed / SHARD, "r+b") as file:
            file.write(contents)
        os.utime(signed / SHARD, ns=(status.st_atime_ns, status.st_mtime_ns))

    def write_after(self: SignedFolder, *arguments: Any) -> None:
        checked(self, *arguments)
        write(raw[:-4] + b"\0\0\0\x7f")
        monkeypatch.setattr(SignedFolder, "confirm", put_back)

    def put_back(self: SignedFolder) -> None:
        write(raw)
        confirmed(self)

    monkeypatch.setattr(SignedFolder, "check_opened", write_after)
    with pytest.raises(CheckpointChangedError, match=f"{SHARD}' {words}"):
        hfshard.load_state_dict(signed, public_key=keys.public, read=read)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory")
@pytest.mark.parametrize("keys_wanted", [None, ["c"], ["a", "b"]])
def test_what_a_mapping_changes_and_puts_back_without_a_trace_is_not_loaded(
    signed: Path, keys: Keys, keys_wanted: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system in memory, a write through a shared mapping changes no time of the file."""
    checked, confirmed = SignedFolder.check_opened, SignedFolder.confirm
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        there = shutil.copytree(signed, Path(folder) / "out")
        path = there / "model-00003-of-00003.safetensors"
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        mapping[-1:] = signed_byte = mapping[-1:]  # the first fault is one that the file system notices
        changed_ns = path.stat().st_ctime_ns

        def write_after(self: SignedFolder, *arguments: Any) -> None:
            checked(self, *arguments)
            mapping[-1:] = b"\x7f"

        def put_back(self: SignedFolder) -> None:
            mapping[-1:] = signed_byte
            confirmed(self)

        monkeypatch.setattr(SignedFolder, "check_opened", write_after)
        monkeypatch.setattr(SignedFolder, "confirm", put_back)
        load = partial(hfshard.load_state_dict, there, keys=keys_wanted, public_key=keys.public, read="pread")
        with pytest.raises(CheckpointChangedError, match=NOT_SIGNED) if keys_wanted != ["a", "b"] else nullcontext():
            assert sorted(load()) == ["a", "b"]
        assert path.stat().st_ctime_ns == changed_ns
        mapping.close()


def test_weights_that_get_another_name_after_their_check_are_refused(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell it from bytes that were written over and put back; the same load again is fine."""
    plain = SignedFolder.check_opened

    def link_after(self: SignedFolder, *arguments: Any) -> None:
        plain(self, *arguments)
        os.link(signed / SHARD, signed.parent / "linked.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(SignedFolder, "check_opened", link_after)
        with pytest.raises(CheckpointChangedError, match="Retry when nothing changes it"):
            hfshard.load_state_dict(signed, public_key=keys.public)

    assert sorted(hfshard.load_state_dict(signed, public_key=keys.public)) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "p224", "private", "empty"])
def test_keys_of_other_kinds_are_refused(signed: Path, keys: Keys, tmp_path: Path, kind: str) -> None:
    made: dict[str, Any] = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ed25519": ed25519.Ed25519PrivateKey.generate,
        "p224": lambda: ec.generate_private_key(ec.SECP224R1()),
    }
    public, private = tmp_path / "key.pub", tmp_path / "key.pem"
    public.write_bytes(keys.private.read_bytes() if kind == "private" else b"")
    private.write_bytes(keys.public.read_bytes() if kind == "private" else b"")
    if kind in made:
        key = made[kind]()
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
        how = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *how))
    before = (signed / "model.sig").read_bytes()

    with pytest.raises(
        InvalidArgumentError, match=r"Cannot check a signature with .*key.pub': .*: openssl ec -in KEY -pubout"
    ) as caught:
        hfshard.load_state_dict(signed, public_key=public)
    assert "attribute" not in str(caught.value)
    with pytest.raises(SignatureError, match=r"Cannot sign '.*': .* must be an elliptic curve key") as refused:
        hfshard.sign_checkpoint(signed, private_key=private)
    assert "attribute" not in str(refused.value)
    assert (signed / "model.sig").read_bytes() == before


def test_a_directory_is_no_key(signed: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"The public key '.*' is a directory, not a file"):
        hfshard.verify_checkpoint(signed, public_key=tmp_path)
