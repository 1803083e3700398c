"""Azure's settings: from az's variables, its configuration file or a connection string, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import StoreAccessError
from hfshard.stores.azure import connect

KEY = "c2VjcmV0"
"""Of a storage account: "secret" in base64."""
EMULATOR = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "endpoint": "http://127.0.0.1:10000/devstoreaccount1",
}


def settings(container: str = "models") -> dict[str, Any]:
    """What obstore's client was told."""
    connection = connect(container)
    found: dict[str, Any] = {**connection.quick.config}
    assert found == {**connection.uploads.config}
    assert found.pop("container_name") == container
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"DefaultEndpointsProtocol=http;AccountName=their;AccountKey={KEY};EndpointSuffix=local",
            {"account_name": "their", "account_key": KEY, "endpoint": "http://their.blob.local"},
        ),
        (
            " accountname = their ;; BLOBENDPOINT=https://blobs/;SharedAccessSignature=?sv=1&sig=a%3D",
            {"account_name": "their", "sas_key": "sv=1&sig=a%3D", "endpoint": "https://blobs"},
        ),
        (
            "BlobEndpoint=https://their.blob.core.windows.net/;SharedAccessSignature=sv=1&sig=a%3D",
            {"account_name": "mine", "sas_key": "sv=1&sig=a%3D", "endpoint": "https://their.blob.core.windows.net"},
        ),
        ("UseDevelopmentStorage=true", EMULATOR),
    ],
)
def test_a_connection_string_outranks_the_separate_variables(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, str]
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "b3RoZXI=")
    assert settings() == {"account_name": "mine", "account_key": "b3RoZXI="}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)

    assert settings() == expected
    options: dict[str, Any] = {**(connect("models").quick.client_options or {})}
    assert options["allow_http"] == ("true" if expected["endpoint"].startswith("http://") else "false")


def test_the_file_of_az_is_read_after_the_variables(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, account in ((nobody / ".azure", "of_home"), (nobody / "conf", "of_folder")):
        folder.mkdir()
        (folder / "config").write_text(
            f"[storage]\naccount = {account}\nsas_token = ?sv=%%1&sig=x\n[cloud]\nname = x\n"
        )

    assert settings() == {"account_name": "of_home", "sas_key": "sv=%%1&sig=x"}
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(nobody / "conf"))
    assert settings()["account_name"] == "of_folder"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", " mine\n")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)  # a key outranks a signature
    assert settings() == {"account_name": "mine", "account_key": KEY}


def test_without_a_key_the_login_of_az_is_used_if_it_is_there(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    assert settings() == {"account_name": "mine"}

    az = nobody / "az"
    az.write_text("#!/bin/sh\n")
    az.chmod(0o755)
    monkeypatch.setenv("PATH", str(nobody))
    assert settings() == {"account_name": "mine", "use_azure_cli": "true"}
    monkeypatch.setenv("AZURE_STORAGE_TOKEN", "token")
    assert "use_azure_cli" not in settings()


def test_no_account_is_an_error_with_advice_even_if_the_file_of_az_is_damaged(nobody: Path) -> None:
    (nobody / ".azure").mkdir()
    (nobody / ".azure" / "config").write_bytes(b"[storage\naccount = \xff")
    with pytest.raises(StoreAccessError) as raised:
        connect("models")
    assert str(raised.value) == (
        "No storage account is set for az://models. Set AZURE_STORAGE_ACCOUNT and run 'az login', or set "
        "AZURE_STORAGE_KEY too; or set AZURE_STORAGE_CONNECTION_STRING."
    )
    assert raised.value.path == "az://models"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("AZURE_STORAGE_KEY", "no base64!", "Cannot use the settings for az://models: a key, an endpoint or a"),
        ("AZURE_STORAGE_KEY", "SEC\nRET", r"The environment variable AZURE_STORAGE_KEY has the control character '\n'"),
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "AccountName=a;AccountKey=SEC\tRET",
            "The accountkey of the environment variable AZURE_STORAGE_CONNECTION_STRING has the control character "
            r"'\t' (character 4 of 7)",
        ),
        ("IDENTITY_HEADER", "SECRET ", "The environment variable IDENTITY_HEADER has blanks at its ends. Remove them."),
    ],
)
def test_what_no_request_can_have_is_refused_without_being_shown(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv(variable, text)
    with pytest.raises(StoreAccessError) as raised:
        connect("models")
    assert str(raised.value).startswith(message)
    assert "SEC" not in str(raised.value) and "base64!" not in str(raised.value)


def test_the_host_names_the_account_where_nothing_else_does(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = "SharedAccessSignature=sv=1&sig=a%3D"
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", f"BlobEndpoint=https://their.blob.core.windows.net/;{signature}"
    )
    assert settings()["account_name"] == "their"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"BlobEndpoint=https://blobs.example.com/;{signature}")
    with pytest.raises(StoreAccessError, match="No storage account is set for az://models"):
        connect("models")
