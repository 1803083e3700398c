"""Who must have signed: exactly one kind of signer, whose files are found at once and named by absolute paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import InvalidArgumentError
from hfshard.signing.signer import SignedBy, existing_file

ONE_OF = (
    "Name the required signer in exactly one way: by a public key, by certificates, or by an identity and its OIDC "
    "issuer."
)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The absolute path of a file, "key.pub" in the working directory."""
    (tmp_path / "key.pub").write_text("a key")
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "key.pub")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"certificate_chain": []},
        {"public_key": "key.pub", "certificate_chain": ["key.pub"]},
        {"public_key": "key.pub", "identity": "me@example.org", "oidc_issuer": "https://issuer"},
        {"identity": "me@example.org"},
        {"oidc_issuer": "https://issuer"},
        {"public_key": "key.pub", "oidc_issuer": "https://issuer"},
    ],
    ids=lambda arguments: "+".join(arguments) or "nothing",
)
def test_none_or_two_signers_are_refused(key: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        SignedBy(**arguments)
    assert str(raised.value) == ONE_OF


def test_relative_paths_are_made_absolute_at_once(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_key = SignedBy(public_key="key.pub")
    by_chain = SignedBy(certificate_chain="key.pub")
    by_identity = SignedBy(identity="me", oidc_issuer="https://issuer", trust_config=Path("key.pub"))
    monkeypatch.chdir(tmp_path.parent)

    assert by_key.public_key == key
    assert by_chain.certificate_chain == (key,)  # one path is a chain of one, not of its characters
    assert by_identity.trust_config == key


@pytest.mark.parametrize("name", ["public_key", "certificate_chain", "trust_config"])
def test_a_missing_file_or_a_directory_is_an_error_that_says_what_it_is_for(
    key: str, tmp_path: Path, name: str
) -> None:
    others: dict[str, Any] = {"identity": "me", "oidc_issuer": "https://issuer"} if name == "trust_config" else {}
    word = name.replace("_", " ")
    for path, what in (("none.pem", f"'{tmp_path}/none.pem' does not exist."), (".", f"'{tmp_path}' is a directory")):
        given: Any = [key, path] if name == "certificate_chain" else path
        with pytest.raises(InvalidArgumentError) as raised:
            SignedBy(**others, **{name: given})
        assert str(raised.value).startswith(f"The {word} {what}")


def test_a_public_key_argument_is_a_path_or_a_signer(key: str) -> None:
    signer = SignedBy(identity="me", oidc_issuer="https://issuer")

    assert SignedBy.of(signer) is signer
    assert SignedBy.of(Path("key.pub")) == SignedBy(public_key=key)
    wrong: Any = b"-----BEGIN PUBLIC KEY-----"
    with pytest.raises(
        InvalidArgumentError, match=r"or a hfshard\.signing\.SignedBy, got b'-----BEGIN PUBLIC KEY-----'"
    ):
        SignedBy.of(wrong)


def test_messages_say_who_was_wanted(key: str) -> None:
    assert str(SignedBy(public_key=key)) == f"the key of '{key}'"
    assert str(SignedBy(certificate_chain=[key, "key.pub"])) == f"a certificate of '{key}', '{key}'"
    assert str(SignedBy(identity="me@example.org", oidc_issuer="https://issuer")) == (
        "'me@example.org' of 'https://issuer'"
    )
    assert existing_file("key.pub", "private_key") == key
