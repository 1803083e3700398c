"""Signed checkpoints that went through a store: what is pulled from there says by itself whether it is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

import hfshard
from hfshard.errors import InvalidArgumentError, SignatureError
from tests.helpers.tiny_bert import SHARDED, bert
from tests.signing.conftest import write_pair


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
        hfshard.load_state_dict(store_address, public_key=public)
    with pytest.raises(InvalidArgumentError, match=r"hfshard pull s3://.* DIR"):
        hfshard.sign_checkpoint(store_address, private_key=private)
    hfshard.push_checkpoint(tmp_path / "out", store_address)
    bert(3).save_pretrained(store_address, max_shard_size=max_shard_size)
    assert "no longer holds" not in caplog.text  # nothing has changed
    bert(4).save_pretrained(store_address, max_shard_size=max_shard_size)
    assert "model.sig' no longer holds: the checkpoint beside it was replaced" in caplog.text
    hfshard.pull_checkpoint(store_address, tmp_path / "other")
    with pytest.raises(SignatureError, match=r"is not the file that was signed|not covered|is missing"):
        hfshard.load_state_dict(tmp_path / "other", public_key=public)
