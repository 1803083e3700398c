"""`hfshard sign`, and `hfshard verify` with a key."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run
from tests.signing.conftest import write_pair


def test_sign_and_verify(example: Path, tmp_path: Path, run: Run) -> None:
    private, public = write_pair(tmp_path, "mine")

    done = run("sign", example, "--private-key", private)
    looked_at = run("inspect", example)
    as_json = json.loads(run("inspect", example, "--format", "json").stdout)
    whole = run("verify", example, "--public-key", public)
    shown = json.loads(run("verify", example, "--public-key", public, "--format", "json").stdout)
    unread = run("verify", example, "--public-key", public, "--level", "structure")
    (example / "extra.py").write_text("x = 1\n")
    added = run("verify", example, "--public-key", public)
    unasked = run("verify", example)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{example}/model.sig: ")
    assert "by the sha256 of the save" in done.stdout
    assert "checksums   yes\nsignature   model.sig, not checked: hfshard verify --public-key KEY\n" in looked_at.stdout
    assert as_json["signature"] == "model.sig"
    assert (whole.returncode, whole.stderr) == (0, "")
    assert f"whole, and signed by the key of '{public}'" in whole.stdout
    assert shown["signed_by"] == f"the key of '{public}'"
    assert (unread.returncode, "signed by" in unread.stdout) == (0, False)
    assert "2 signed files of weights were not compared" in unread.stderr
    assert added.returncode == 1
    assert "extra.py' is not covered by the signature" in added.stdout
    assert (unasked.returncode, "signed" in unasked.stdout) == (0, False)


def test_passwords_come_from_the_environment(example: Path, tmp_path: Path, run: Run) -> None:
    private, public = write_pair(tmp_path, "locked", b"secret")

    without = run("sign", example, "--private-key", private)
    done = run("sign", example, "--private-key", private, HFSHARD_KEY_PASSWORD="secret")

    assert without.returncode == 2
    assert "has a password: put it into the environment variable HFSHARD_KEY_PASSWORD" in without.stderr
    assert done.returncode == 0, done.stderr
    assert run("verify", example, "--public-key", public).returncode == 0


def test_what_is_wrong_is_said(example: Path, tmp_path: Path, run: Run) -> None:
    _, public = write_pair(tmp_path, "mine")

    unsigned = run("verify", example, "--public-key", public)
    nobody = run("sign", example)
    both = run("verify", example, "--public-key", public, "--identity", "me@example.org")
    ambient = run("sign", example, "--private-key", public, "--use-staging")
    missing = run("sign", example, "--private-key", tmp_path / "none.pem")

    assert unsigned.returncode == 1
    assert f"'{example}' has no signature: there is no 'model.sig'" in unsigned.stdout
    assert "hfshard sign" in unsigned.stdout
    assert nobody.returncode == 2
    assert both.returncode == 2
    assert "one of public_key, certificate_chain, or identity with oidc_issuer" in both.stderr
    assert (ambient.returncode, "--use-staging is for --sigstore" in ambient.stderr) == (2, True)
    assert (missing.returncode, "private_key: there is no file" in missing.stderr) == (2, True)
