"""S3 and compatible services: settings and credentials as botocore finds them, for obstore."""

from __future__ import annotations

import base64
import binascii
import http.client
import logging
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import create_loader
from obstore.store import S3Store

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import run_in_threads
from hfshard.errors import HfshardError, StoreAccessError, StoreConnectionError, StoreError
from hfshard.stores.connection import (
    Connection,
    Failure,
    PlainVariables,
    Service,
    check_text,
    client_settings,
    make_clients,
    read_variable,
    refusal,
)
from hfshard.stores.retry import idle_timeout

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Credential

_LOG = logging.getLogger(__name__)

SERVICE: Final = Service(
    title="S3",
    deletes_together=1000,
    log_in=(
        "Run 'aws configure' or 'aws sso login', or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    ),
    identity_hint="aws sts get-caller-identity",
    permissions=(
        "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and "
        "s3:ListBucketMultipartUploads"
    ),
    make_bucket="aws s3 mb {0}",
    other_checksums=(
        "Set AWS_REQUEST_CHECKSUM_CALCULATION=when_required, or request_checksum_calculation in ~/.aws/config: then "
        "the signature has SHA-256 instead of CRC-64/NVME."
    ),
)

_LOADER: Final = create_loader()
"""Caches botocore's descriptions of S3, which take a tenth of a second to read."""
LARGEST_COPY: Final = 5 << 30
"""The most bytes that S3 copies in one request."""

COPIED_PART: Final = 1 << 30
"""Bytes of an object that one request of a copy in parts copies; at most 5 GiB."""
_COPIES_AT_ONCE: Final = 8
_READ_BY_OBSTORE: Final = {
    "AWS_SERVER_SIDE_ENCRYPTION": "server_side_encryption",
    "AWS_SSE_KMS_KEY_ID": "sse_kms_key_id",
    "AWS_SSE_BUCKET_KEY_ENABLED": "sse_bucket_key_enabled",
    "AWS_SSE_CUSTOMER_KEY_BASE64": "sse_customer_key_base64",
    "AWS_SKIP_SIGNATURE": "skip_signature",
}
"""Variables that obstore reads by itself -> its setting. obstore panics on a header with a newline."""
_CUSTOMER_KEY: Final = "sse-c"
"""obstore's word for encryption by a key of the user."""
_BY_KMS: Final = "aws:kms"
"""Beginning of the words for encryption by Amazon's key management."""
_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})
"""Words that obstore takes for true."""
_REGION: Final = re.compile(r"[a-z0-9-]{1,63}")
_CREDENTIALS_LAST: Final = timedelta(minutes=10)
"""Time after which botocore is asked again; it renews credentials by itself, long before they expire."""


class _Credentials:
    """Provider of botocore's current credentials."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __call__(self) -> S3Credential:
        frozen = self._found.get_frozen_credentials()
        for text in (frozen.access_key, frozen.secret_key, frozen.token or ""):
            check_text(text, f"An S3 credential that botocore found (by {self._found.method!r})")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }


def connect(bucket: str) -> Connection:
    """Create the clients of a bucket.

    Raises:
        StoreAccessError: botocore finds no credentials, or its configuration or a variable is not valid.
    """
    # As the aws command line does; botocore reads only the older variable.
    region = read_variable("AWS_REGION") or read_variable("AWS_DEFAULT_REGION") or None
    client, credentials, authority = _session_of(bucket, region)
    found = _connect(bucket, client, credentials, authority)

    def elsewhere(named: str) -> Connection | None:
        own = named or _region_of(client, bucket, authority)
        if own is None or own == client.meta.region_name:
            return None
        asked = client.meta.region_name
        _LOG.info("s3://%s is in %s, not in %s. Set AWS_REGION=%s to skip this lookup.", bucket, own, asked, own)
        return _connect(bucket, *_session_of(bucket, own))

    found.elsewhere = elsewhere
    return found


def _connect(bucket: str, client: Any, credentials: _Credentials | None, authority: bytes | None) -> Connection:
    """Create the clients of a bucket from botocore's."""
    address = f"s3://{bucket}"
    settings = _settings(bucket, client)
    encryption = _Encryption.from_environment()
    quick, uploads = make_clients(
        lambda options, retries: S3Store(
            bucket, config=settings, client_options=options, retry_config=retries, credential_provider=credentials
        ),
        SERVICE,
        address,
        allow_http=client.meta.endpoint_url.startswith("http://"),
        authority=authority,
    )
    return Connection(
        service=SERVICE,
        address=address,
        bucket=bucket,
        quick=quick,
        uploads=uploads,
        sweep=lambda prefix, is_left: _sweep(client, bucket, prefix, is_left),
        copy_pinned=lambda *which: _copy_pinned(client, encryption, bucket, *which),
    )


def _session_of(bucket: str, region: str | None) -> tuple[Any, _Credentials | None, bytes | None]:
    """Create botocore's client for a region, and find its credentials and the certificates to trust.

    Raises:
        StoreAccessError: There are no credentials, or the configuration or a variable is not valid.
    """
    address = f"s3://{bucket}"
    try:
        session = botocore.session.Session()
        session.register_component("data_loader", _LOADER)
        is_public = read_variable("AWS_SKIP_SIGNATURE").lower() in {"1", "true"}
        credentials = None if is_public else _credentials(session, address)
        stall = idle_timeout() or 1
        client = session.create_client(
            "s3",
            region_name=region,
            endpoint_url=_endpoint(session),
            config=Config(
                connect_timeout=min(stall, 10),
                read_timeout=stall,
                retries={"total_max_attempts": 5},
                signature_version=UNSIGNED if is_public else None,
            ),
        )
        return client, credentials, _authority(session)
    except HfshardError:
        raise
    except BotoCoreError as error:
        raise StoreAccessError(
            f"Cannot use the credentials for {address}: {_said(error)}. {SERVICE.log_in}", path=address
        ) from None
    except (ValueError, OSError) as error:  # an endpoint without "https://", a missing bundle
        raise StoreAccessError(
            f"Cannot use the settings for {address}: {_said(error)}. Check AWS_ENDPOINT_URL, AWS_CA_BUNDLE and the "
            "configuration of the aws command line.",
            path=address,
        ) from None


def _region_of(client: Any, bucket: str, authority: bytes | None) -> str | None:
    """Look up a bucket's region, which S3 returns to anyone; None if the service returns none.

    This does not use botocore, which loops forever if a HEAD is redirected without naming a region.
    """
    request = urllib.request.Request(f"{client.meta.endpoint_url}/{bucket}", method="HEAD")
    context = ssl.create_default_context(cadata=authority.decode(errors="ignore")) if authority else None
    try:
        with urllib.request.urlopen(request, timeout=idle_timeout() or 1, context=context) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (OSError, http.client.HTTPException):
        return None
    region = headers.get("x-amz-bucket-region") or ""
    return region if _REGION.fullmatch(region) else None


def _endpoint(session: Any) -> str | None:
    """Return the environment's endpoint without blanks at its ends, which botocore rejects; None: botocore finds it."""
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    return read_variable("AWS_ENDPOINT_URL_S3") or read_variable("AWS_ENDPOINT_URL") or None


def _authority(session: Any) -> bytes | None:
    """Read the certificates of AWS_CA_BUNDLE or the configuration."""
    bundle = session.get_config_variable("ca_bundle")
    return Path(bundle).read_bytes() if bundle else None


def _credentials(session: Any, address: str) -> _Credentials:
    session.get_component("credential_provider").get_provider("env").environ = PlainVariables()
    found = session.get_credentials()
    if found is None:
        raise StoreAccessError(f"There are no credentials for {address}. {SERVICE.log_in}", path=address)
    credentials = _Credentials(found)
    credentials()  # report an expired login here, before any request
    return credentials


def _said(error: BaseException) -> str:
    """Return botocore's message without the user and password of an endpoint or proxy, and without queries."""
    return without_url_secrets(str(error)).rstrip(".")


def _settings(bucket: str, client: Any) -> S3Config:
    """Convert what botocore resolved to obstore's settings. Each key is set, so that no variable is read twice."""
    region = client.meta.region_name
    endpoint = client.meta.endpoint_url
    virtual = (client.meta.config.s3 or {}).get("addressing_style") == "virtual"
    if virtual:
        scheme, _, host = endpoint.partition("://")
        endpoint = f"{scheme}://{bucket}.{host}"
    # CRC-64/NVME costs a tenth of SHA-256; a service without checksums gets the latter in the signature.
    checksums = client.meta.config.request_checksum_calculation != "when_required"
    settings: S3Config = {
        "region": region if region and region != "aws-global" else "us-east-1",
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,
        "virtual_hosted_style_request": virtual,
        "unsigned_payload": checksums,
    }
    if checksums:
        settings["checksum_algorithm"] = "CRC64NVME"
    return cast("S3Config", settings | client_settings(_READ_BY_OBSTORE))


@dataclass(frozen=True, slots=True)
class _Encryption:
    """botocore's arguments by which copies are encrypted as obstore's puts are; copies inherit nothing."""

    of_object: Mapping[str, Any] = field(default_factory=dict)
    """For an object that is created."""
    of_part: Mapping[str, Any] = field(default_factory=dict)
    """For each part of it: the customer's key."""
    of_source: Mapping[str, Any] = field(default_factory=dict)
    """For the object that is copied: the customer's key."""

    @classmethod
    def from_environment(cls) -> _Encryption:
        """Read the variables that obstore reads.

        Raises:
            StoreAccessError: A variable has a control character, or the key is not in base64.
        """
        kind = read_variable("AWS_SERVER_SIDE_ENCRYPTION")
        if kind == _CUSTOMER_KEY:
            key = _decoded_key(read_variable("AWS_SSE_CUSTOMER_KEY_BASE64"))
            own: dict[str, Any] = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
            return cls(own, own, {f"CopySource{name}": value for name, value in own.items()})
        if not kind.startswith(_BY_KMS):
            return cls({"ServerSideEncryption": kind} if kind else {})
        managed: dict[str, Any] = {"ServerSideEncryption": kind}
        key_id = read_variable("AWS_SSE_KMS_KEY_ID")
        if key_id:
            managed["SSEKMSKeyId"] = key_id
        if read_variable("AWS_SSE_BUCKET_KEY_ENABLED").lower() in _TRUE:
            managed["BucketKeyEnabled"] = True
        return cls(managed)


def _decoded_key(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise StoreAccessError("The environment variable AWS_SSE_CUSTOMER_KEY_BASE64 is not in base64.") from None


def _copy_pinned(
    client: Any, encryption: _Encryption, bucket: str, key: str, etag: str, size: int, target: str
) -> str | None:
    """Copy an object on the server if it still has an ETag.

    Returns:
        The copy's ETag; None if the object has another ETag or is gone.
    """
    try:
        if size > LARGEST_COPY:
            made = _copy_in_parts(client, encryption, bucket, key, etag, size, target)
        else:
            answer = client.copy_object(
                Bucket=bucket,
                Key=target,
                CopySource={"Bucket": bucket, "Key": key},
                CopySourceIfMatch=f'"{etag}"',
                **encryption.of_object,
                **encryption.of_source,
            )
            made = answer["CopyObjectResult"]["ETag"]
    except ClientError as error:
        if error.response["Error"].get("Code") in {"PreconditionFailed", "NoSuchKey", "412", "404"}:
            return None
        raise _refused(bucket, key, error) from None
    except BotoCoreError as error:
        raise StoreConnectionError(f"The copy of s3://{bucket}/{key} failed: {_said(error)}") from None
    return made.strip('"')


def _copy_in_parts(
    client: Any, encryption: _Encryption, bucket: str, key: str, etag: str, size: int, target: str
) -> str:
    """Copy an object that is too large for one request; see `_copy_pinned`."""
    copied = {"Bucket": bucket, "Key": target}

    def copy_part(number: int, cancelled: threading.Event) -> dict[str, Any]:
        if cancelled.is_set():
            raise InterruptedError("another part failed, or Ctrl-C was pressed")
        begin = (number - 1) * COPIED_PART
        made = client.upload_part_copy(
            **copied,
            UploadId=upload,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": key},
            CopySourceIfMatch=f'"{etag}"',
            CopySourceRange=f"bytes={begin}-{min(begin + COPIED_PART, size) - 1}",
            **encryption.of_part,
            **encryption.of_source,
        )
        return {"PartNumber": number, "ETag": made["CopyPartResult"]["ETag"]}

    upload = client.create_multipart_upload(**copied, **encryption.of_object)["UploadId"]
    try:
        parts = run_in_threads(copy_part, range(1, -(-size // COPIED_PART) + 1), _COPIES_AT_ONCE)
        answer = client.complete_multipart_upload(**copied, UploadId=upload, MultipartUpload={"Parts": parts})
    except BaseException:
        try:
            client.abort_multipart_upload(**copied, UploadId=upload)
        except (ClientError, BotoCoreError) as error:  # the first error is more useful
            _LOG.warning("The unfinished copy s3://%s/%s could not be deleted: %s", bucket, target, _said(error))
        raise
    return str(answer["ETag"])


def _sweep(client: Any, bucket: str, prefix: str, is_left: Callable[[str], bool]) -> int:
    """Abort the unfinished uploads below a prefix whose names mark them as leftovers."""
    swept = 0
    try:
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        for page in pages:
            for upload in page.get("Uploads", ()):
                if is_left(upload["Key"].removeprefix(prefix)):
                    swept += _abort(client, bucket, upload)
    except ClientError as error:
        raise _refused(bucket, prefix, error) from None
    except BotoCoreError as error:
        raise StoreError(f"Cannot list the unfinished uploads of s3://{bucket}/{prefix}: {_said(error)}") from None
    return swept


def _abort(client: Any, bucket: str, upload: Any) -> int:
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except ClientError as error:
        if error.response["Error"].get("Code") != "NoSuchUpload":
            raise
        return 0
    return 1


def _refused(bucket: str, prefix: str, error: ClientError) -> StoreError:
    said = error.response["Error"]
    failure = Failure(
        status=error.response.get("ResponseMetadata", {}).get("HTTPStatusCode"),
        code=said.get("Code", ""),
        message=said.get("Message", ""),
        clock_is_off=said.get("Code", "") == "RequestTimeTooSkewed",
    )
    return refusal(SERVICE, f"s3://{bucket}", f"s3://{bucket}/{prefix}", failure)
