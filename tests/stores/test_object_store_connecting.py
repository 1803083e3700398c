"""Where settings and credentials come from, and what is said where there are none."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hfshard.errors import StoreAccessError
from hfshard.stores.object_store import connection_to
from hfshard.stores.open_store import open_store


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("s3", "There are no credentials for s3://models. Run 'aws configure' or 'aws sso login', or set AWS_PROFILE"),
        ("gs", "There are no credentials for gs://models/bert. Run 'gcloud auth application-default login'"),
        ("az", "No storage account is set for az://models. Set AZURE_STORAGE_ACCOUNT and run 'az login'"),
    ],
)
def test_nobody_is_told_how_to_log_in(nobody: Path, scheme: str, words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(StoreAccessError) as raised:
        open_store(f"{scheme}://models/bert").list_objects()
    assert str(raised.value).startswith(words)
    assert time.monotonic() - begin < 60  # a service that is not there is asked for two minutes


def test_an_account_of_azure_without_a_login_is_told_how_to(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreAccessError, match="There are no credentials for az://models/bert"):
        open_store("az://models/bert").list_objects()


def test_a_profile_has_its_own_region_endpoint_and_keys(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nobody / ".aws").mkdir()
    (nobody / ".aws" / "config").write_text(
        "[profile lab]\nregion = eu-west-1\nservices = local\ns3 =\n  addressing_style = path\n"
        "[services local]\ns3 =\n  endpoint_url = http://store.example:9000\n"
    )
    (nobody / ".aws" / "credentials").write_text("[lab]\naws_access_key_id = a\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    config = dict(connection_to("s3", "models").quick.config)
    assert config["region"] == "eu-west-1"
    assert config["endpoint_url_s3"] == "http://store.example:9000"
    assert config["checksum_algorithm"] == "CRC64NVME"
    assert connection_to("s3", "models") is connection_to("s3", "models")

    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    config = dict(connection_to("s3", "models").quick.config)
    assert "checksum_algorithm" not in config
    assert config["unsigned_payload"] in (False, "false")

    monkeypatch.setenv("AWS_PROFILE", "nothing")
    with pytest.raises(StoreAccessError, match="nothing"):
        open_store("s3://models/bert")


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        ("AWS_ENDPOINT_URL", "store.example:9000", "settings"),
        ("AWS_CA_BUNDLE", "/no/such/bundle.pem", "settings"),
        ("AWS_CA_BUNDLE", __file__, "settings"),
        ("AWS_PROFILE", "nobody's", "credentials"),
    ],
)
def test_settings_of_s3_that_are_not_valid_are_refused(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, what: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv(variable, value)
    with pytest.raises(StoreAccessError, match=f"Cannot use the {what} for s3://models: "):
        open_store("s3://models/bert")


def test_azure_takes_its_settings_as_az_does(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nobody / ".azure").mkdir()
    (nobody / ".azure" / "config").write_text("[storage]\naccount = mine\nkey = c2VjcmV0\n")
    config = dict(connection_to("az", "models").quick.config)
    assert (config["account_name"], config["account_key"]) == ("mine", "c2VjcmV0")

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")
    config = dict(connection_to("az", "models").quick.config)
    assert config["account_name"] == "devstoreaccount1"
    assert config["endpoint"] == "http://127.0.0.1:10000/devstoreaccount1"

    text = "DefaultEndpointsProtocol=https;AccountName=theirs;EndpointSuffix=core.cn"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{text};SharedAccessSignature=?sv=1&sig=x%3D")
    config = dict(connection_to("az", "models").quick.config)
    assert config["endpoint"] == "https://theirs.blob.core.cn"
    assert "account_key" not in config

    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=theirs;AccountKey=not base 64!")
    with pytest.raises(StoreAccessError, match="is not valid") as raised:
        open_store("az://models")
    assert "not base 64" not in str(raised.value)


def test_googles_credentials_are_read_or_refused(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = nobody / "cloud"
    folder.mkdir()
    file = folder / "application_default_credentials.json"
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder))
    file.write_text(
        json.dumps({"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"})
    )
    assert dict(connection_to("gs", "models").quick.config)["application_credentials"] == str(file)

    other = nobody / "workload.json"
    other.write_text('{"type": "external_account"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(other))
    with pytest.raises(
        StoreAccessError, match=r"'external_account', which requires .* pip install google-auth requests"
    ):
        open_store("gs://models")

    other.write_text("nonsense")
    with pytest.raises(StoreAccessError, match=r"Cannot read the credentials file '.*workload.json'"):
        open_store("gs://models")


def test_where_googles_library_finds_nobody_objects_are_deleted_by_obstore(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GoogleAuthError(Exception):
        pass

    def provider() -> Any:
        raise GoogleAuthError  # DefaultCredentialsError, TransportError, RefreshError

    exceptions, auth = ModuleType("google.auth.exceptions"), ModuleType("obstore.auth.google")
    vars(exceptions)["GoogleAuthError"] = GoogleAuthError
    vars(auth)["GoogleCredentialProvider"] = lambda: provider
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.auth", ModuleType("google.auth"))
    monkeypatch.setitem(sys.modules, exceptions.__name__, exceptions)
    monkeypatch.setitem(sys.modules, auth.__name__, auth)
    delete_together = connection_to("gs", "models").delete_together
    assert delete_together is not None
    assert delete_together(["a", "b"]) is False


@pytest.mark.parametrize("endpoint", ["someone:hunter2@localhost:9000", "http://someone:hunter2@local host:9000"])
def test_an_endpoint_that_is_none_is_told_without_its_password(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    with pytest.raises(StoreAccessError, match="AWS_ENDPOINT_URL") as caught:
        open_store("s3://models/bert")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
