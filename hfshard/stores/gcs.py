"""Google Cloud Storage: credentials and emulators as its own tools find them, for obstore."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from xml.sax.saxutils import escape

from obstore.store import GCSStore

from hfshard.errors import StoreAccessError, StoreError
from hfshard.stores.connection import (
    Connection,
    Failure,
    RequestRetry,
    Service,
    client_settings,
    make_clients,
    read_variable,
    refusal,
)
from hfshard.stores.retry import idle_timeout

if TYPE_CHECKING:
    from obstore.store import GCSConfig

_LOG = logging.getLogger(__name__)

SERVICE: Final = Service(
    title="Google Cloud Storage",
    deletes_together=1000,
    log_in="Run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS to a key file.",
    identity_hint="gcloud auth list",
    permissions="storage.objects.list, .get, .create and .delete (the role Storage Object User)",
    make_bucket="gcloud storage buckets create {0}",
)

EMULATOR_VARIABLE: Final = "STORAGE_EMULATOR_HOST"
"""Variable of Google's client libraries: an emulator's URL, or its host and port."""
_READ_BY_OBSTORE: Final = {
    "GOOGLE_BEARER_TOKEN": "bearer_token",
    "GOOGLE_BASE_URL": "base_url",
    "GOOGLE_SERVICE_ACCOUNT": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_PATH": "service_account",
    "GOOGLE_SKIP_SIGNATURE": "skip_signature",
}
"""Variables that obstore reads by itself -> its setting. obstore panics on a header with a newline."""
_ENDPOINT: Final = "https://storage.googleapis.com"
_KNOWN_TYPES: Final = frozenset({"service_account", "authorized_user"})
"""Types of credentials that obstore reads itself."""
_EMULATOR_TOKEN: Final = "emulator"
"""Any word works."""
_TOKEN_LASTS_LONGER: Final = timedelta(minutes=5)
"""Time before its expiry at which a token is renewed."""
_UPLOAD: Final = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)
_DELETED: Final = re.compile(r"<Deleted>")


def connect(bucket: str) -> Connection:
    """Create the clients of a bucket.

    Raises:
        StoreAccessError: The credentials cannot be used, or a variable is not valid.
    """
    address = f"gs://{bucket}"
    emulator = read_variable(EMULATOR_VARIABLE)
    endpoint = (emulator if "://" in emulator else f"http://{emulator}").rstrip("/") if emulator else ""
    settings: GCSConfig = {}
    provider: Any = None
    if endpoint:
        settings = {"base_url": endpoint, "bearer_token": _EMULATOR_TOKEN}
    else:
        file = _credentials_file()
        if file is not None and _type_of(file) in _KNOWN_TYPES:
            settings = {"application_credentials": str(file)}
        elif file is not None:
            provider = _provider(file, address)
    settings = cast("GCSConfig", client_settings(_READ_BY_OBSTORE) | settings)
    quick, uploads = make_clients(
        lambda options, retries: GCSStore(
            bucket, config=settings, client_options=options, retry_config=retries, credential_provider=provider
        ),
        SERVICE,
        address,
        allow_http=endpoint.startswith("http://"),
    )
    calls = _XmlCalls(bucket, endpoint)
    return Connection(
        service=SERVICE,
        address=address,
        bucket=bucket,
        quick=quick,
        uploads=uploads,
        sweep=calls.sweep,
        delete_together=calls.delete_together,
    )


def _credentials_file() -> Path | None:
    """Find the file of Application Default Credentials, if there is one."""
    named = read_variable("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        return Path(named)
    folder = os.environ.get("CLOUDSDK_CONFIG", "").strip() or "~/.config/gcloud"
    file = Path(folder).expanduser() / "application_default_credentials.json"
    return file if file.is_file() else None


def _provider(file: Path, address: str) -> Any:
    """Return Google's own credential provider, which reads what obstore cannot, such as workload identity files."""
    try:
        from obstore.auth.google import GoogleCredentialProvider

        return GoogleCredentialProvider()
    except ImportError as error:
        raise StoreAccessError(
            f"The credentials for {address} in '{file}' are of the type {_type_of(file)!r}, which requires Google's "
            "own library. Run: pip install google-auth requests",
            path=address,
        ) from error


def _type_of(file: Path) -> str:
    try:
        kind = json.loads(file.read_bytes())["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreAccessError(
            f"Cannot read the credentials file '{file}': {type(error).__name__}. {SERVICE.log_in}", path=str(file)
        ) from None
    return str(kind)


class _XmlCalls:
    """XML API calls that obstore lacks: sweeping a bucket's unfinished uploads, and deleting many objects at once.

    obstore does not expose its token, so they get one from Google's own library. Without that library, nothing is swept
    (the bucket's lifecycle rule AbortIncompleteMultipartUpload does it), and obstore deletes.
    """

    def __init__(self, bucket: str, emulator: str) -> None:
        self._bucket = bucket
        self._emulator = emulator
        self._token = ""
        self._renewed = datetime.min.replace(tzinfo=UTC)
        """Time from which the token is too old."""

    def _log_in(self) -> bool:
        """Get a token, unless the current one is valid for a while; return False if Google's library is missing."""
        if self._emulator:
            self._token = _EMULATOR_TOKEN
        elif datetime.now(UTC) >= self._renewed:
            try:
                from google.auth.exceptions import GoogleAuthError
                from obstore.auth.google import GoogleCredentialProvider
            except ImportError as error:
                _LOG.info("Not searching gs://%s for unfinished uploads: %s", self._bucket, error)
                return False
            try:
                given = GoogleCredentialProvider()()
            except GoogleAuthError as error:
                raise StoreAccessError(
                    f"There are no credentials for gs://{self._bucket} ({type(error).__name__}). {SERVICE.log_in}"
                ) from None
            self._token = str(given["token"])
            self._renewed = (given["expires_at"] or datetime.now(UTC)) - _TOKEN_LASTS_LONGER
        return True

    def delete_together(self, keys: list[str]) -> bool:
        """Delete at most 1,000 objects by one request; return False if not all were deleted, or it is unknown."""
        objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
        body = f"<Delete><Quiet>false</Quiet>{objects}</Delete>".encode()
        try:
            if not self._log_in():
                return False
            answer = self._ask("POST", "?delete", body)
        except StoreError as error:  # obstore has a token of its own
            _LOG.info("Deleting objects in gs://%s one by one: %s", self._bucket, error)
            return False
        return len(_DELETED.findall(answer)) == len(keys)

    def sweep(self, prefix: str, is_left: Callable[[str], bool]) -> int:
        """Abort the unfinished uploads below a prefix whose names mark them as leftovers."""
        if not self._log_in():
            return 0
        swept = 0
        query = {"uploads": "", "prefix": prefix}
        markers: dict[str, str] = {}
        while True:
            page = self._ask("GET", f"?{urllib.parse.urlencode(query | markers)}")
            for upload in _UPLOAD.findall(page):
                key = _text(upload, "Key")
                if is_left(key.removeprefix(prefix)):
                    swept += self._abort(key, _text(upload, "UploadId"))
            if _text(page, "IsTruncated") != "true":
                return swept
            found = {"key-marker": _text(page, "NextKeyMarker"), "upload-id-marker": _text(page, "NextUploadIdMarker")}
            markers = {name: value for name, value in found.items() if value}

    def _abort(self, key: str, upload: str) -> int:
        query = urllib.parse.urlencode({"uploadId": upload})
        self._ask("DELETE", f"/{urllib.parse.quote(key, safe='')}?{query}")
        return 1

    def _ask(self, method: str, rest: str, body: bytes | None = None) -> str:
        """Send a request, with retries; it is not an error if an upload to abort is gone."""
        url = f"{self._emulator or _ENDPOINT}/{self._bucket}{rest}"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/xml"}
        request = urllib.request.Request(url, body, headers, method=method)
        retry = RequestRetry()
        while True:
            try:
                with urllib.request.urlopen(request, timeout=idle_timeout() or 1) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as error:
                failure = Failure(status=error.code)
            except (OSError, http.client.HTTPException) as error:
                failure = Failure(transport=type(error).__name__)
            if method == "DELETE" and failure.status == 404:
                return ""
            if not retry.wait_after(failure):
                where = f"gs://{self._bucket}"
                raise refusal(SERVICE, where, where, failure)


def _text(xml: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", xml, re.DOTALL)
    return unescape(found.group(1)) if found else ""
