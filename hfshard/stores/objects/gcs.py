"""Google Cloud Storage: where its own tools find credentials and emulators, for obstore."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from obstore.store import GCSStore

from hfshard.errors import StoreAccessError, StoreError
from hfshard.stores.objects.connection import Connection, Service, make_clients
from hfshard.stores.objects.settings import stall_seconds

if TYPE_CHECKING:
    from obstore.store import GCSConfig

SERVICE: Final = Service(
    title="Google Cloud Storage",
    has_content_etags=True,
    has_generations=True,
    deletes_together=100,
    log_in="Run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a key file.",
    who_am_i="gcloud auth list",
    permissions="storage.objects.list, .get, .create and .delete (the role Storage Object User)",
    make_bucket="gcloud storage buckets create {0}",
)

EMULATOR_VARIABLE: Final = "STORAGE_EMULATOR_HOST"
"""Of Google's client libraries: the URL, or host and port, of an emulator."""
_ENDPOINT: Final = "https://storage.googleapis.com"
_KNOWN_TYPES: Final = frozenset({"service_account", "authorized_user"})
"""Types of credentials that obstore reads itself."""
_UPLOAD: Final = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)


def connect(bucket: str) -> Connection:
    """Make the clients of a bucket.

    Raises:
        StoreAccessError: There are credentials that can't be used.
    """
    address = f"gs://{bucket}"
    emulator = os.environ.get(EMULATOR_VARIABLE, "").strip()
    endpoint = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/") if emulator else ""
    settings: GCSConfig = {}
    token: Callable[[], str] | None = None
    provider: Any = None
    if endpoint:
        settings = {"base_url": endpoint, "bearer_token": "emulator"}
        token = _emulator_token
    else:
        file = _credentials_file()
        provider = _google_auth(file, address)
        if provider is not None:
            token = lambda: str(provider()["token"])  # noqa: E731
        elif file is not None:
            settings = {"application_credentials": str(file)}
    quick, uploads = make_clients(
        lambda options, retries: GCSStore(
            bucket, config=settings, client_options=options, retry_config=retries, credential_provider=provider
        ),
        SERVICE,
        address,
        allow_http=endpoint.startswith("http://"),
    )
    sweep = None
    if token is not None:
        sweep = _Uploads(bucket, endpoint or _ENDPOINT, token).sweep
    return Connection(service=SERVICE, address=address, bucket=bucket, quick=quick, uploads=uploads, sweep=sweep)


def _credentials_file() -> Path | None:
    """The file of Application Default Credentials, if there is one."""
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "").strip()
    if named:
        return Path(named)
    folder = os.environ.get("CLOUDSDK_CONFIG", "").strip() or "~/.config/gcloud"
    file = Path(folder).expanduser() / "application_default_credentials.json"
    return file if file.is_file() else None


def _google_auth(file: Path | None, address: str) -> Any:
    """Google's own library, where obstore alone could not use the credentials."""
    if file is None or _type_of(file) in _KNOWN_TYPES:
        return None
    try:
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError as error:
        raise StoreAccessError(
            f"The credentials for {address} in '{file}' are of the type {_type_of(file)!r}, which needs Google's own "
            "library: pip install google-auth requests",
            path=address,
        ) from error
    return GoogleCredentialProvider()


def _type_of(file: Path) -> str:
    try:
        kind = json.loads(file.read_bytes())["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreAccessError(
            f"The file of credentials '{file}' can't be read: {type(error).__name__}. {SERVICE.log_in}", path=str(file)
        ) from None
    return str(kind)


def _emulator_token() -> str:
    return "emulator"


class _Uploads:
    """The unfinished uploads of a bucket, by the two calls of the XML API that obstore lacks."""

    def __init__(self, bucket: str, endpoint: str, token: Callable[[], str]) -> None:
        self._bucket = bucket
        self._endpoint = endpoint
        self._token = token

    def sweep(self, prefix: str, is_left: Callable[[str], bool]) -> int:
        """Abort those below a prefix whose names say that they are left over."""
        swept = 0
        markers = {"": ""}
        while markers:
            query = {"uploads": "", "prefix": prefix, **{k: v for k, v in markers.items() if k}}
            page = self._ask("GET", f"?{urllib.parse.urlencode(query)}")
            for upload in _UPLOAD.findall(page):
                key = _text(upload, "Key")
                if is_left(key.removeprefix(prefix)):
                    swept += self._abort(key, _text(upload, "UploadId"))
            more = _text(page, "IsTruncated") == "true"
            markers = (
                {"key-marker": _text(page, "NextKeyMarker"), "upload-id-marker": _text(page, "NextUploadIdMarker")}
                if more
                else {}
            )
        return swept

    def _abort(self, key: str, upload: str) -> int:
        query = urllib.parse.urlencode({"uploadId": upload})
        self._ask("DELETE", f"/{urllib.parse.quote(key, safe='')}?{query}")
        return 1

    def _ask(self, method: str, rest: str) -> str:
        request = urllib.request.Request(
            f"{self._endpoint}/{self._bucket}{rest}",
            method=method,
            headers={"Authorization": f"Bearer {self._token()}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=stall_seconds() or 1) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if method == "DELETE" and error.code == 404:
                return ""
            raise self._failed(f"HTTP {error.code}") from None
        except OSError as error:
            raise self._failed(type(error).__name__) from None

    def _failed(self, how: str) -> StoreError:
        return StoreError(f"The unfinished uploads of gs://{self._bucket} can't be removed: {how}.")


def _text(xml: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", xml, re.DOTALL)
    return unescape(found.group(1)) if found else ""
