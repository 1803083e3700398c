"""Loads that demand a signature: what is not as it was signed is refused by name, before a tensor is returned."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.reports import VerifyReport
from hfshard.errors import CheckpointChangedError, HfshardError, InvalidArgumentError, SignatureError
from hfshard.signing.check_signature import with_signature
from tests.signing.conftest import Keys
from tests.signing.helpers import model_signing

SHARD = "model-00002-of-00003.safetensors"


def flip_last_byte(path: Path) -> None:
    """Change a tensor and nothing else."""
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


def tamper_with_shard(directory: Path) -> None:
    flip_last_byte(directory / SHARD)


def tamper_with_shard_and_index(directory: Path) -> None:
    """What somebody does who knows the checksums: save other weights, with an index that fits."""
    hfshard.save_state_dict({name: torch.zeros(64) for name in "abc"}, directory, max_shard_size=500)


def add_code(directory: Path) -> None:
    (directory / "modeling_evil.py").write_text("raise SystemExit\n")


def add_nested_code(directory: Path) -> None:
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text("raise SystemExit\n")


def edit_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "gpt2"}')


def edit_code(directory: Path) -> None:
    (directory / "modeling_mine.py").write_text("x = 2\n")


def add_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{}")


def remove_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def remove_shard(directory: Path) -> None:
    (directory / SHARD).unlink()


def replace_by_single_file(directory: Path) -> None:
    """An unsigned file that transformers takes before the signed index."""
    hfshard.save_state_dict({"a": torch.zeros(64)}, directory.parent / "single")
    shutil.copy(directory.parent / "single" / "model.safetensors", directory)


def link_shard_elsewhere(directory: Path) -> None:
    """A link is followed; what it leads to is compared."""
    other = directory.parent / "elsewhere.safetensors"
    (directory / SHARD).rename(other)
    flip_last_byte(other)
    (directory / SHARD).symlink_to(other)


def remove_signature(directory: Path) -> None:
    (directory / "model.sig").unlink()


def garble_signature(directory: Path) -> None:
    (directory / "model.sig").write_text('{"verificationMaterial": {}}')


def empty_signature(directory: Path) -> None:
    (directory / "model.sig").write_bytes(b"")


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (tamper_with_shard, r"00002-of-00003.safetensors' is not the file that was signed \(tensor 'b'\)"),
        (tamper_with_shard_and_index, "is not covered by the signature|is not the file that was signed"),
        (add_code, "modeling_evil.py' is not covered by the signature"),
        (add_nested_code, "custom_generate/generate.py' is not covered by the signature"),
        (edit_config, "config.json' is not the file that was signed"),
        (edit_code, "modeling_mine.py' is not the file that was signed"),
        (add_generation_config, "generation_config.json' is not covered by the signature"),
        (remove_config, "config.json' was signed, but is missing"),
        (remove_shard, "00002-of-00003.safetensors' is missing"),
        (replace_by_single_file, "model.safetensors' is not covered by the signature"),
        (link_shard_elsewhere, "00002-of-00003.safetensors' is not the file that was signed"),
        (remove_signature, "has no signature: there is no 'model.sig'"),
        (garble_signature, "was not made by the key of .*, or is damaged"),
        (empty_signature, "was not made by the key of .*, or is damaged"),
    ],
)
def test_what_is_not_as_it_was_signed_is_refused_by_name(
    signed: Path, keys: Keys, tamper: Callable[[Path], None], words: str
) -> None:
    tamper(signed)
    module = nn.ParameterDict({name: torch.full((64,), -1.0) for name in "abc"})

    with pytest.raises(HfshardError, match=words):
        hfshard.load_state_dict(signed, public_key=keys.public, verify="none")
    with pytest.raises(HfshardError, match=words):
        hfshard.load_model(module, signed, public_key=keys.public)

    assert all(torch.equal(tensor, torch.full((64,), -1.0)) for tensor in module.values())
    report = hfshard.verify_checkpoint(signed, public_key=keys.public)
    assert not report.ok


def test_a_signed_checkpoint_loads(signed: Path, keys: Keys, tensors: dict[str, torch.Tensor]) -> None:
    loaded = hfshard.load_state_dict(signed, public_key=keys.public)
    some = hfshard.load_state_dict(signed, public_key=keys.public, keys=["b"])
    one = hfshard.load_state_dict(signed / SHARD, public_key=keys.public)
    module = nn.ParameterDict({name: torch.zeros(64) for name in "abc"})
    hfshard.load_model(module, signed, public_key=keys.public, verify="full")

    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(some["b"], tensors["b"])
    assert list(one) == ["b"]
    assert all(torch.equal(module[name], tensor) for name, tensor in tensors.items())


def test_keys_and_people_are_told_apart(signed: Path, checkpoint: Path, tmp_path: Path, keys: Keys) -> None:
    with pytest.raises(SignatureError, match=r"was not made by the key of '.*other.pub'"):
        hfshard.load_state_dict(signed, public_key=keys.other_public)
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        hfshard.load_state_dict(signed, public_key=tmp_path / "none.pub")
    with pytest.raises(InvalidArgumentError, match=r"Cannot check a signature with"):
        hfshard.load_state_dict(signed, public_key=signed / "config.json")
    with pytest.raises(InvalidArgumentError, match=r"^Name the required signer in exactly one way"):
        hfshard.signing.SignedBy()
    with pytest.raises(InvalidArgumentError, match="must be a public key file"):
        hfshard.load_state_dict(signed, public_key=b"key")  # type: ignore[arg-type]


def test_the_signature_of_another_checkpoint_is_refused(signed: Path, tmp_path: Path, keys: Keys) -> None:
    hfshard.save_state_dict({name: torch.full((64,), 5.0) for name in "abc"}, tmp_path / "two", max_shard_size=500)
    hfshard.sign_checkpoint(tmp_path / "two", private_key=keys.private)
    shutil.copy(tmp_path / "two" / "model.sig", signed)

    with pytest.raises(SignatureError, match="is not covered by the signature"):
        hfshard.load_state_dict(signed, public_key=keys.public)
    problems = hfshard.verify_checkpoint(signed, public_key=keys.public).problems
    assert {Path(problem.file).name for problem in problems} >= {"config.json", SHARD}


def test_documents_may_be_edited_and_other_weights_lie_beside(signed: Path, keys: Keys) -> None:
    (signed / "README.md").write_text("# Better\n")
    hfshard.save_state_dict({"a": torch.zeros(64)}, signed, variant="ema")
    (signed / ".hidden").write_text("x")

    assert sorted(hfshard.load_state_dict(signed, public_key=keys.public)) == ["a", "b", "c"]
    with pytest.raises(SignatureError, match=r"model.ema.safetensors' is not covered by the signature"):
        hfshard.load_state_dict(signed, public_key=keys.public, variant="ema")
    names = [Path(problem.file).name for problem in hfshard.verify_checkpoint(signed, public_key=keys.public).problems]
    assert names == [".hidden", "model.ema.safetensors", "README.md"]


def test_a_file_that_is_replaced_while_it_is_compared_is_not_loaded(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that were compared are those of the open file, whatever gets its name meanwhile."""
    from hfshard.signing.check_signature import SignedFolder

    plain = SignedFolder.check_opened

    def swap_first(self: SignedFolder, *arguments: Any) -> None:
        other = signed.parent / "other.safetensors"
        shutil.copy(signed / SHARD, other)
        flip_last_byte(other)
        other.rename(signed / SHARD)
        plain(self, *arguments)

    monkeypatch.setattr(SignedFolder, "check_opened", swap_first)
    loaded = hfshard.load_state_dict(signed, public_key=keys.public)

    assert torch.equal(loaded["b"], torch.full((64,), 1.0))  # that of the file that was open, and was compared
    with pytest.raises(SignatureError, match=f"{SHARD}' is not the file that was signed"):
        hfshard.load_state_dict(signed, public_key=keys.public)


def test_a_config_that_is_replaced_after_it_was_compared_is_noticed(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hfshard.signing.check_signature import SignedFolder

    plain = SignedFolder.confirm

    def edit_first(self: SignedFolder) -> None:
        edit_code(signed)
        plain(self)

    monkeypatch.setattr(SignedFolder, "confirm", edit_first)
    with pytest.raises(SignatureError, match=r"modeling_mine.py' is not the file that was signed"):
        hfshard.load_state_dict(signed, public_key=keys.public)


def test_a_config_that_was_swapped_and_put_back_is_noticed(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read in between need not be what was signed."""
    from hfshard.signing.check_signature import SignedFolder

    plain = SignedFolder.confirm

    def swap_first(self: SignedFolder) -> None:
        aside = (signed / "config.json").rename(signed.parent / "aside.json")
        aside.rename(signed / "config.json")
        plain(self)

    monkeypatch.setattr(SignedFolder, "confirm", swap_first)
    with pytest.raises(CheckpointChangedError, match=r"config.json' was replaced while the checkpoint was loaded"):
        hfshard.load_state_dict(signed, public_key=keys.public)


def test_a_file_that_came_while_the_load_went_on_is_noticed(
    signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a class of transformers downloads by itself what no list of files to read names."""
    from hfshard.signing.check_signature import SignedFolder

    plain = SignedFolder.confirm

    def add_first(self: SignedFolder) -> None:
        (signed / "extra.pt").write_bytes(b"x")
        plain(self)

    monkeypatch.setattr(SignedFolder, "confirm", add_first)
    with pytest.raises(SignatureError, match=r"extra.pt' is not covered by the signature"):
        hfshard.load_state_dict(signed, public_key=keys.public)


@pytest.mark.parametrize("method", ["sha256", "blake3"])
def test_an_index_that_was_swapped_and_put_back_is_noticed(
    signed: Path, keys: Keys, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that were read are compared, not those that have the name, inode and times by then."""
    from model_signing import hashing, signing

    if method != "sha256":
        hashes = hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        hashes.set_ignored_paths(paths=["model.sig"])
        signer = signing.Config().set_hashing_config(hashes).use_elliptic_key_signer(private_key=keys.private)
        signer.sign(signed, signed / "model.sig")
    plain = LocalFolder.read_small

    def swapped(self: LocalFolder, name: str, limit: int) -> bytes:
        raw = plain(self, name, limit)
        return raw.replace(b'"b": ', b'"b":  ') if name.endswith(".index.json") else raw

    monkeypatch.setattr(LocalFolder, "read_small", swapped)
    with pytest.raises(SignatureError, match=r"index.json' is not the file that was signed"):
        hfshard.load_state_dict(signed, public_key=keys.public)


def test_shards_are_named_where_the_checksums_beside_them_are_forged_too(signed: Path, keys: Keys) -> None:
    """As in a checkpoint of a run whose manifest was written again, which finds nothing wrong with the shard."""
    names = tuple(path.name for path in signed.iterdir() if path.name != "model.sig")
    fitting = VerifyReport(str(signed), names, (), (), 0)
    tamper_with_shard(signed)
    edit_config(signed)

    by = hfshard.signing.SignedBy(public_key=keys.public)
    report = with_signature(fitting, by, str(signed), level="full", progress=False)

    assert [Path(problem.file).name for problem in report.problems] == ["config.json", SHARD]
    assert report.signed_by is None


def test_two_threads_may_check_signatures_at_once(signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither leaves sys.stdout as it was while the other one was checking."""
    from model_signing import verifying

    plain, before = verifying.Config.verify, sys.stdout
    is_first, is_second, first_is_done = Event(), Event(), Event()

    def overlapping(*arguments: Any) -> None:
        if not is_first.is_set():
            is_first.set()
            assert is_second.wait(60)
        else:
            is_second.set()
            assert first_is_done.wait(60)
        plain(*arguments)

    monkeypatch.setattr(verifying.Config, "verify", overlapping)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(hfshard.load_state_dict, signed, public_key=keys.public)
        assert is_first.wait(60)
        second = pool.submit(hfshard.load_state_dict, signed, public_key=keys.public)
        assert sorted(first.result()) == ["a", "b", "c"]
        first_is_done.set()
        assert sorted(second.result()) == ["a", "b", "c"]

    assert sys.stdout is before


def test_what_the_library_prints_does_not_go_to_stdout(
    signed: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning of signatures that do not name their key, which would be in the middle of JSON."""
    bundle = json.loads((signed / "model.sig").read_text())
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    (signed / "model.sig").write_text(json.dumps(bundle))

    assert sorted(hfshard.load_state_dict(signed, public_key=keys.public)) == ["a", "b", "c"]

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "older verification material format" in printed.err


def test_ranges_are_refused(keys: Keys) -> None:
    with pytest.raises(InvalidArgumentError, match="a signature covers complete files"):
        hfshard.load_state_dict("org/name", public_key=keys.public, ranges=True)


def test_certificates(checkpoint: Path, tmp_path: Path) -> None:
    from tests.signing.certificates import Authority

    root, other = Authority("root"), Authority("other")
    root_file, other_file = root.write(tmp_path), other.write(tmp_path)
    key, certificate = root.issue(tmp_path, "signer")
    hfshard.sign_checkpoint(checkpoint, private_key=key, signing_certificate=certificate)

    by = hfshard.signing.SignedBy(certificate_chain=[root_file])
    assert hfshard.verify_checkpoint(checkpoint, public_key=by).ok
    assert sorted(hfshard.load_state_dict(checkpoint, public_key=by)) == ["a", "b", "c"]
    model_signing("verify", "certificate", checkpoint, "--certificate_chain", root_file)
    with pytest.raises(SignatureError, match=r"was not made by a certificate of .*other.pem"):
        hfshard.load_state_dict(checkpoint, public_key=hfshard.signing.SignedBy(certificate_chain=[other_file]))

    pair = ("--private_key", key, "--signing_certificate", certificate, "--certificate_chain", root_file)
    model_signing("sign", "certificate", checkpoint, *pair)
    assert hfshard.verify_checkpoint(checkpoint, public_key=by).ok


def test_certificates_are_judged_as_by_the_library(checkpoint: Path, tmp_path: Path) -> None:
    """One that has expired since is accepted, as it held when it began to; one that is for no signing is not."""
    from tests.signing.certificates import Authority

    root = Authority("root")
    by = hfshard.signing.SignedBy(certificate_chain=[root.write(tmp_path)])
    key, certificate = root.issue(tmp_path, "expired", days=-0.5)
    hfshard.sign_checkpoint(checkpoint, private_key=key, signing_certificate=certificate)
    assert hfshard.verify_checkpoint(checkpoint, public_key=by).ok
    model_signing("verify", "certificate", checkpoint, "--certificate_chain", tmp_path / "root.pem")

    key, certificate = root.issue(tmp_path, "other", is_for_signing=False)
    hfshard.sign_checkpoint(checkpoint, private_key=key, signing_certificate=certificate)
    with pytest.raises(SignatureError, match="was not made by a certificate of"):
        hfshard.load_state_dict(checkpoint, public_key=by)


def test_pickled_weights_that_are_not_those_that_were_signed_are_refused(tmp_path: Path, keys: Keys) -> None:
    path = tmp_path / "out" / "pytorch_model.bin"
    path.parent.mkdir()
    torch.save({"a": torch.ones(4)}, path)
    hfshard.sign_checkpoint(path.parent, private_key=keys.private)
    assert hfshard.load_state_dict(path.parent, public_key=keys.public)["a"].tolist() == [1, 1, 1, 1]
    torch.save({"a": torch.zeros(4)}, path)

    with pytest.raises(SignatureError, match=r"pytorch_model\.bin' is not the file that was signed"):
        hfshard.load_state_dict(path.parent, public_key=keys.public)
