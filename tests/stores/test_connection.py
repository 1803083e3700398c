"""Variables with blanks, newlines and other characters that no request can have; obstore's client panics on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import StoreAccessError, StoreNotFoundError
from hfshard.stores.connection import PlainVariables, client_settings
from hfshard.stores.object_store import connection_to
from hfshard.stores.open_store import open_store
from tests.stores.answering import answering
from tests.stores.test_open_store_refusals import log_in

NEWLINE_AT_THE_END = [
    ("s3", {"AWS_ACCESS_KEY_ID": "key\n"}),
    ("s3", {"AWS_SECRET_ACCESS_KEY": " secret\r\n"}),
    ("s3", {"AWS_SESSION_TOKEN": "token\n"}),
    ("s3", {"AWS_SECURITY_TOKEN": "token\n"}),
    ("s3", {"AWS_REGION": "eu-west-1\n"}),
    ("s3", {"AWS_DEFAULT_REGION": "eu-west-1\n"}),
    ("s3", {"AWS_SERVER_SIDE_ENCRYPTION": "aws:kms\n", "AWS_SSE_KMS_KEY_ID": "arn\n"}),
    ("gs", {}),
    ("az", {"AZURE_STORAGE_TOKEN": "token\n", "AZURE_STORAGE_ACCOUNT_NAME": "mine\n"}),
    ("az", {"AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0\n", "AZURE_STORAGE_ACCOUNT": "mine\n"}),
    ("az", {"AZURE_STORAGE_KEY": "c2VjcmV0\n", "AZURE_STORAGE_ACCOUNT": "mine\n"}),
    ("az", {"AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=x\n", "AZURE_STORAGE_ACCOUNT": "mine\n"}),
]


@pytest.mark.parametrize(("scheme", "variables"), NEWLINE_AT_THE_END)
def test_blanks_and_newlines_at_the_ends_of_variables_do_not_count(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, variables: dict[str, str]
) -> None:
    with answering(404, "<Error><Code>NoSuchBucket</Code></Error>") as url:
        if scheme == "az":
            monkeypatch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", f"{url}/mine\n")
        else:
            log_in(scheme, f"{url}\n", monkeypatch)
            monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

        store = open_store(f"{scheme}://models/bert")
        with pytest.raises(StoreNotFoundError):
            store.list_objects()
        with pytest.raises(StoreNotFoundError):
            store.put("large", bytes(2 << 20))
        if scheme == "s3":
            with pytest.raises(StoreNotFoundError):
                store.sweep_uploads(lambda name: True)  # by botocore's own client


def test_credentials_of_s3_are_sent_without_blanks(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret \n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "\ttoken\r\n")
    provider: Any = connection_to("s3", "models").quick.credential_provider
    given = provider()
    assert (given["access_key_id"], given["secret_access_key"], given["token"]) == ("key", "secret", "token")


@pytest.mark.parametrize(
    ("scheme", "variables"),
    [
        ("s3", {"AWS_ACCESS_KEY_ID": "k\ney"}),
        ("s3", {"AWS_SECRET_ACCESS_KEY": "sec\x7fret"}),
        ("s3", {"AWS_SESSION_TOKEN": "a\nb"}),
        ("s3", {"AWS_REGION": "eu\x01west"}),
        ("s3", {"AWS_ENDPOINT_URL": "http://local\nhost"}),
        ("s3", {"AWS_SSE_KMS_KEY_ID": "a\nb"}),
        ("gs", {"STORAGE_EMULATOR_HOST": "local\nhost:1"}),
        ("gs", {"GOOGLE_BEARER_TOKEN": "a\nb"}),
        ("az", {"AZURE_STORAGE_ACCOUNT": "mi\nne"}),
        ("az", {"AZURE_STORAGE_KEY": "c2Vj\ncmV0"}),
        ("az", {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=mine;AccountKey=c2Vj\x07cmV0"}),
        ("az", {"AZURE_STORAGE_TOKEN": "a\nb"}),
        ("az", {"IDENTITY_HEADER": "secret\n"}),
    ],
)
def test_other_control_characters_are_refused_by_the_variables_name_before_a_request(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, variables: dict[str, str]
) -> None:
    log_in(scheme, "http://127.0.0.1:1", monkeypatch)
    if scheme == "az":
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    for name, text in variables.items():
        monkeypatch.setenv(name, text)

    with pytest.raises(StoreAccessError, match=f" {name} has ") as raised:
        open_store(f"{scheme}://models/bert")
    assert text not in str(raised.value)


def test_a_multi_line_connection_string_is_taken(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=mine;\nAccountKey=c2VjcmV0;\n")
    config = dict(connection_to("az", "models").quick.config)
    assert (config["account_name"], config["account_key"]) == ("mine", "c2VjcmV0")


def test_credentials_of_a_command_are_checked_too(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nobody / ".aws").mkdir()
    answer = {"Version": 1, "AccessKeyId": "key", "SecretAccessKey": "secret", "SessionToken": "tok\nen"}
    (nobody / "answer.json").write_text(json.dumps(answer))
    (nobody / ".aws" / "config").write_text(f"[default]\ncredential_process = cat {nobody / 'answer.json'}\n")
    with pytest.raises(
        StoreAccessError, match=r"An S3 credential .*'custom-process'.* control character '\\n'"
    ) as told:
        open_store("s3://models/bert")
    assert "tok" not in str(told.value)


def test_a_variable_of_blanks_is_as_one_that_is_not_set_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", " \n")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    plain = PlainVariables()
    assert plain.get("AWS_ACCESS_KEY_ID") == ""
    assert plain.get("AWS_SESSION_TOKEN") is None

    monkeypatch.setenv("AZURE_STORAGE_TOKEN", "\n")
    with pytest.raises(StoreAccessError, match="AZURE_STORAGE_TOKEN has only blanks"):
        client_settings({"AZURE_STORAGE_TOKEN": "token"})
