"""The seam to model-signing: digests that are signed come back, and each refusal says what to do."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import InvalidArgumentError, SignatureError
from hfshard.signing.model_signing import SignedManifest, digests_by_library, sign_digests, signed_manifest
from hfshard.signing.signer import SignedBy
from tests.signing.conftest import Keys

OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""Of the bytes "abc": `printf abc | sha256sum`."""
OF_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def sign(directory: Path, digests: dict[str, str], key: Path) -> bytes:
    """Sign digests of files that need not exist; gives the signature."""
    target = directory / "model.sig"
    sign_digests(
        str(directory),
        str(target),
        digests,
        ["model.sig"],
        lambda config: config.use_elliptic_key_signer(private_key=key),
    )
    return target.read_bytes()


def read(directory: Path, raw: bytes, public_key: Path) -> SignedManifest:
    by = SignedBy(public_key=public_key)
    return signed_manifest(str(directory), str(directory / "model.sig"), by.choose, str(by), raw)


def test_signed_digests_come_back_and_no_file_of_the_model_is_read(tmp_path: Path, keys: Keys) -> None:
    raw = sign(tmp_path, {"b/c.txt": OF_NOTHING, "a.bin": OF_ABC}, keys.private)
    (tmp_path / "model.sig").write_text("replaced since its bytes were read")

    found = read(tmp_path, raw, keys.public)

    assert found.digests == {"a.bin": {"a.bin": OF_ABC}, "b/c.txt": {"b/c.txt": OF_NOTHING}}
    assert (found.is_plain, found.allows_links, found.ignored) == (True, False, ("model.sig",))


def test_another_signer_and_damage_are_refused_with_the_wanted_key(
    tmp_path: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = sign(tmp_path, {"a.bin": OF_ABC}, keys.private)
    wanted = f"the key of '{keys.other_public}'"

    with pytest.raises(SignatureError) as raised:
        read(tmp_path, raw, keys.other_public)
    assert str(raised.value).startswith(
        f"The signature '{tmp_path}/model.sig' was not made by {wanted}, or is damaged: "
    )
    assert (raised.value.path, raised.value.expected) == (str(tmp_path / "model.sig"), wanted)
    for damaged in (b"", b"{}", b"[1]", raw[:-10]):
        with pytest.raises(SignatureError, match="or is damaged: "):
            read(tmp_path, damaged, keys.public)
    with pytest.raises(SignatureError, match=r"model\.sig' is not a valid signature: it has more than 10000 values\."):
        read(tmp_path, b"[" + b"1," * 10_000 + b"1]", keys.public)
    assert capsys.readouterr().out == ""


def test_a_name_that_leads_outside_is_refused_though_it_is_signed(tmp_path: Path, keys: Keys) -> None:
    for name in ("../a.bin", "a/../../b"):
        raw = sign(tmp_path, {name: OF_ABC}, keys.private)
        with pytest.raises(SignatureError, match=r"model\.sig' names a file outside the checkpoint: "):
            read(tmp_path, raw, keys.public)


def test_what_is_no_key_is_refused_before_anything_is_written(tmp_path: Path, keys: Keys) -> None:
    with pytest.raises(SignatureError, match=f"^Cannot sign '{tmp_path}': .* must be an elliptic curve key in PEM"):
        sign(tmp_path, {"a.bin": OF_ABC}, keys.public)
    assert not (tmp_path / "model.sig").exists()
    raw = sign(tmp_path, {"a.bin": OF_ABC}, keys.private)
    with pytest.raises(
        InvalidArgumentError, match=r"^Cannot check a signature with the key of '.*': .* openssl ec -in KEY"
    ) as caught:
        read(tmp_path, raw, keys.private)
    assert "?. A public key must be" not in str(caught.value)


def test_files_are_hashed_as_a_signature_says_whole_or_in_parts(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    whole: dict[str, Any] = {"method": "files", "hash_type": "sha256"}
    blake = {**whole, "hash_type": "blake2b"}
    parts = {"method": "shards", "hash_type": "sha256", "shard_size": 2.0}

    assert digests_by_library(str(tmp_path), ["a.bin"], whole) == {"a.bin": OF_ABC}
    assert digests_by_library(str(tmp_path), ["a.bin"], blake) == {"a.bin": hashlib.blake2b(b"abc").hexdigest()}
    found = digests_by_library(str(tmp_path), ["a.bin"], parts)
    assert found == {
        "a.bin:0:2": hashlib.sha256(b"ab").hexdigest(),
        "a.bin:2:3": hashlib.sha256(b"c").hexdigest(),
    }
    with pytest.raises(SignatureError, match=rf"^The signature of '{tmp_path}' has digests that model-signing cannot"):
        digests_by_library(str(tmp_path), ["a.bin"], {**whole, "hash_type": "md5"})


def test_a_manifest_without_facts_is_not_taken_for_plain() -> None:
    assert SignedManifest({}, {"method": "files", "hash_type": "sha256"}).is_plain
    assert not SignedManifest({}, {"method": "files", "hash_type": "blake3"}).is_plain
    assert not SignedManifest({}, {"method": "shards", "hash_type": "sha256"}).is_plain
    assert not SignedManifest({}, {}).is_plain
    linked = SignedManifest({}, {"allow_symlinks": True, "ignore_paths": ["./model.sig", "a//b/"]})
    assert (linked.allows_links, linked.ignored) == (True, ("model.sig", "a/b"))
