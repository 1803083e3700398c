"""Azure Blob Storage: the settings of the az command line, for obstore."""

from __future__ import annotations

import configparser
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import urlsplit

from obstore.store import AzureStore

from hfshard.errors import StoreAccessError
from hfshard.stores.connection import Connection, Service, check_text, client_settings, make_clients, read_variable

if TYPE_CHECKING:
    from obstore.store import AzureConfig

SERVICE: Final = Service(
    title="Azure Blob Storage",
    deletes_together=256,
    log_in=(
        "Set AZURE_STORAGE_ACCOUNT and run 'az login', or set AZURE_STORAGE_KEY too; or set "
        "AZURE_STORAGE_CONNECTION_STRING."
    ),
    identity_hint="az account show",
    permissions="the role Storage Blob Data Contributor",
    make_bucket="az storage container create --name {1}",
)

_EMULATOR: Final = (
    "AccountName=devstoreaccount1;BlobEndpoint=http://127.0.0.1:10000/devstoreaccount1;AccountKey="
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Meaning of "UseDevelopmentStorage=true". The key is public and the same for every emulator."""
_OTHER_LOGINS: Final = (
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_MSI_ENDPOINT",
    "AZURE_IDENTITY_ENDPOINT",
    "AZURE_STORAGE_TOKEN",
    "AZURE_USE_AZURE_CLI",
    "AZURE_SKIP_SIGNATURE",
    "AZURE_CREDENTIAL_TYPE",
)
"""Variables that obstore uses to log in."""
_READ_BY_OBSTORE: Final = {
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_ACCESS_KEY": "account_key",
    "AZURE_STORAGE_MASTER_KEY": "account_key",
    "AZURE_STORAGE_SAS_KEY": "sas_key",
    "AZURE_STORAGE_TOKEN": "token",
    "AZURE_STORAGE_CLIENT_ID": "client_id",
    "AZURE_CLIENT_ID": "client_id",
    "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
    "AZURE_CLIENT_SECRET": "client_secret",
    "AZURE_STORAGE_TENANT_ID": "tenant_id",
    "AZURE_STORAGE_AUTHORITY_ID": "tenant_id",
    "AZURE_TENANT_ID": "tenant_id",
    "AZURE_AUTHORITY_ID": "tenant_id",
    "AZURE_STORAGE_AUTHORITY_HOST": "authority_host",
    "AZURE_AUTHORITY_HOST": "authority_host",
    "AZURE_STORAGE_ENDPOINT": "endpoint",
    "AZURE_ENDPOINT": "endpoint",
    "AZURE_MSI_ENDPOINT": "msi_endpoint",
    "AZURE_IDENTITY_ENDPOINT": "msi_endpoint",
    "AZURE_OBJECT_ID": "object_id",
    "AZURE_MSI_RESOURCE_ID": "msi_resource_id",
    "AZURE_FEDERATED_TOKEN_FILE": "federated_token_file",
    "AZURE_SKIP_SIGNATURE": "skip_signature",
    "AZURE_STORAGE_USE_EMULATOR": "use_emulator",
    "AZURE_USE_AZURE_CLI": "use_azure_cli",
}
"""Variables that obstore reads and az does not -> its setting. obstore panics on a header with a newline."""
_IDENTITY_HEADER: Final = "IDENTITY_HEADER"
"""Variable that obstore reads too, and for which it has no setting."""


def connect(container: str) -> Connection:
    """Create the clients of a container.

    Raises:
        StoreAccessError: No storage account is named, its key is not a valid one, or a variable is not valid.
    """
    address = f"az://{container}"
    settings = _settings(address)
    quick, uploads = make_clients(
        lambda options, retries: AzureStore(container, config=settings, client_options=options, retry_config=retries),
        SERVICE,
        address,
        allow_http=str(settings.get("endpoint", "")).startswith("http://"),
    )
    return Connection(service=SERVICE, address=address, bucket=container, quick=quick, uploads=uploads, sweep=None)


def _settings(address: str) -> AzureConfig:
    """Build the settings from the connection string, or from the separate variables if there is none."""
    if read_variable(_IDENTITY_HEADER) != os.environ.get(_IDENTITY_HEADER, ""):
        raise StoreAccessError(f"The environment variable {_IDENTITY_HEADER} has blanks at its ends. Remove them.")
    given = _connection_string(*_find("connection_string"))
    suffix = given.get("endpointsuffix", "core.windows.net")
    endpoint = given.get("blobendpoint", "") or _variable("service_endpoint")
    account = given.get("accountname", "") or _variable("account") or read_variable("AZURE_STORAGE_ACCOUNT_NAME")
    account = account or _account_of(endpoint)
    if not account and not os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
        raise StoreAccessError(f"No storage account is set for {address}. {SERVICE.log_in}", path=address)
    if not endpoint and "endpointsuffix" in given:
        endpoint = f"{given.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}"
    key = given.get("accountkey", "") or (_variable("key") if not given else "")
    signature = given.get("sharedaccesssignature", "") or (_variable("sas_token") if not given else "")
    settings: AzureConfig = {}
    if account:
        settings["account_name"] = account
    if endpoint:
        settings["endpoint"] = endpoint.rstrip("/")
    if key:
        settings["account_key"] = key
    elif signature:
        settings["sas_key"] = signature.removeprefix("?")
    elif shutil.which("az") and not any(os.environ.get(name) for name in _OTHER_LOGINS):
        settings["use_azure_cli"] = True
    return cast("AzureConfig", client_settings(_READ_BY_OBSTORE) | settings)


def _account_of(endpoint: str) -> str:
    """Return the account in an endpoint's host, such as mine.blob.core.windows.net.

    A connection string with a shared access signature names its account nowhere else.
    """
    account, _, rest = (urlsplit(endpoint).hostname or "").partition(".")
    return account if rest.startswith("blob.") else ""


def _connection_string(text: str, source: str) -> dict[str, str]:
    """Parse a connection string into its settings, with lower-case names."""
    parts = (part.partition("=") for part in text.split(";") if part.strip())
    found = {name.strip().lower(): value.strip() for name, _, value in parts}
    if found.get("usedevelopmentstorage", "").lower() == "true":
        return _connection_string(_EMULATOR, source)
    for name, value in found.items():
        check_text(value, f"The {name} of {source}")
    return found


def _variable(name: str) -> str:
    """Read and check a setting of az."""
    text, source = _find(name)
    check_text(text, source[:1].upper() + source[1:])
    return text


def _find(name: str) -> tuple[str, str]:
    """Find a setting of az and its source: an environment variable or az's configuration file."""
    variable = f"AZURE_STORAGE_{name.upper()}"
    text = os.environ.get(variable, "").strip()
    if text:
        return text, f"the environment variable {variable}"
    file = Path(read_variable("AZURE_CONFIG_DIR") or "~/.azure").expanduser() / "config"
    config = configparser.ConfigParser(interpolation=None)
    try:
        config.read(file)
    except (configparser.Error, UnicodeDecodeError):
        return "", ""  # az itself reports this; a variable can replace the file
    return config.get("storage", name, fallback="").strip(), f"the setting {name} in '{file}'"
