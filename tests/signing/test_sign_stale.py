"""What becomes of a signature when the files that it covers are saved, re-sharded, copied or pushed again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import SignatureError
from tests.signing.conftest import Keys
from tests.signing.helpers import model_signing

OTHER = {name: torch.zeros(64) for name in "abc"}


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of, since it was last asked."""
    found = [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]
    log.clear()
    return found


def test_a_save_over_a_signed_checkpoint_says_that_the_signature_no_longer_holds(
    signed: Path, keys: Keys, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    hfshard.save_state_dict(tensors, signed, max_shard_size=500)
    assert warnings(caplog) == []  # the same files again
    assert hfshard.verify_checkpoint(signed, public_key=keys.public).ok

    hfshard.save_state_dict(OTHER, signed, max_shard_size=500)

    [said] = warnings(caplog)
    assert said.startswith(f"The signature '{signed}/model.sig' is stale: this save replaced the files it covers")
    assert f"hfshard sign {signed} --private-key KEY" in said
    assert not hfshard.verify_checkpoint(signed, public_key=keys.public).ok
    hfshard.sign_checkpoint(signed, private_key=keys.private)
    model_signing("verify", "key", signed, "--public_key", keys.public)


def test_a_variant_that_is_saved_beside_is_told_too(signed: Path, caplog: pytest.LogCaptureFixture) -> None:
    hfshard.save_state_dict(OTHER, signed, variant="ema")

    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("low_disk", [False, True])
def test_in_place_a_signed_checkpoint_is_refused_before_a_byte_is_written(
    signed: Path, low_disk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = {path.name: path.read_bytes() for path in signed.iterdir()}

    with pytest.raises(SignatureError, match=r"is signed, .*drop_signature=True \(--drop-signature\)"):
        hfshard.reshard_checkpoint(signed, signed, "1MB", low_disk=low_disk)
    assert {path.name: path.read_bytes() for path in signed.iterdir()} == before

    hfshard.reshard_checkpoint(signed, signed, 4800, low_disk=low_disk, drop_signature=True)

    assert not (signed / "model.sig").exists()
    assert hfshard.verify_checkpoint(signed).ok
    assert warnings(caplog) == []


def test_a_resharded_copy_is_not_signed(
    signed: Path, tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    hfshard.reshard_checkpoint(signed, tmp_path / "copy", "1MB")

    assert "is not copied: it does not cover the new files" in warnings(caplog)[0]
    assert not (tmp_path / "copy" / "model.sig").exists()
    hfshard.sign_checkpoint(tmp_path / "copy", private_key=keys.private)
    hfshard.reshard_checkpoint(signed, tmp_path / "copy", 500)
    assert any("is stale" in said for said in warnings(caplog))
    hfshard.sign_checkpoint(tmp_path / "copy", private_key=keys.private)
    hfshard.reshard_checkpoint(signed, tmp_path / "copy", "1MB", drop_signature=True)
    assert not (tmp_path / "copy" / "model.sig").exists()


def test_pushes_take_the_signature_along_and_tell_of_an_old_one(
    signed: Path, tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    hub = tmp_path / "hub"
    hfshard.push_checkpoint(signed, hub)
    assert hfshard.verify_checkpoint(hub, public_key=keys.public).ok

    hfshard.save_state_dict(OTHER, tmp_path / "other", max_shard_size=500)
    assert warnings(caplog) == []
    hfshard.push_checkpoint(tmp_path / "other", hub)
    assert "is stale: this push changed the files it covers" in warnings(caplog)[0]
    assert not hfshard.verify_checkpoint(hub, public_key=keys.public).ok

    hfshard.sign_checkpoint(tmp_path / "other", private_key=keys.private)
    (tmp_path / "README.md").write_text("x")
    hfshard.push_checkpoint(tmp_path / "other", hub)
    assert warnings(caplog) == []


def test_a_pull_brings_the_signature_of_what_it_brings(
    signed: Path, tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    hub, pulled = tmp_path / "hub", tmp_path / "pulled"
    hfshard.push_checkpoint(signed, hub)
    hfshard.pull_checkpoint(hub, pulled)
    model_signing("verify", "key", pulled, "--public_key", keys.public)

    hfshard.save_state_dict(OTHER, signed, max_shard_size=500)
    hfshard.sign_checkpoint(signed, private_key=keys.private)
    caplog.clear()
    hfshard.push_checkpoint(signed, hub)
    hfshard.pull_checkpoint(hub, pulled)

    assert warnings(caplog) == []
    assert hfshard.verify_checkpoint(pulled, public_key=keys.public).ok
