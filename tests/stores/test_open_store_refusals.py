"""What services refuse, in their own words, becomes one error that says what to do and holds no secret."""

from __future__ import annotations

import logging
import time
import traceback
from pathlib import Path

import pytest

from hfshard.errors import StoreAccessError, StoreConnectionError, StoreError, StoreNotFoundError
from hfshard.stores import retry
from hfshard.stores.open_store import open_store
from tests.servers.stores.kinds import ACCOUNT, ACCOUNT_KEY
from tests.stores.answering import answering

SECRET = "wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY"
SIGNATURE = "4bXeSECRETsIGNATUREx9aQ"
STRING = f"AWS4-HMAC-SHA256 {SECRET}"

REFUSALS = {
    "no such bucket": (
        "s3",
        404,
        "<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>",
        StoreNotFoundError,
        "There is no s3://models, or it is not visible with these credentials. Check the name, or create it with "
        "'aws s3 mb s3://models'.",
    ),
    "no permission": (
        "s3",
        403,
        "<Error><Code>AccessDenied</Code><Message>User: arn:aws:iam::1:user/me is not authorized to perform: "
        "s3:ListBucket</Message></Error>",
        StoreAccessError,
        "S3 denied the request for s3://models/bert (403, AccessDenied, User: arn:aws:iam::1:user/me is not "
        "authorized to perform: s3:ListBucket). Loading and saving require s3:ListBucket,",
    ),
    "unknown key": (
        "s3",
        403,
        "<Error><Code>SignatureDoesNotMatch</Code><Message>The request signature does not match.</Message>"
        f"<StringToSign>{STRING}</StringToSign><SignatureProvided>{SIGNATURE}</SignatureProvided></Error>",
        StoreAccessError,
        "S3 did not accept the credentials for s3://models/bert (403, SignatureDoesNotMatch, The request signature "
        "does not match). Check whose they are with 'aws sts get-caller-identity'.",
    ),
    "expired": (
        "s3",
        400,
        f"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message><Token-0>{SECRET}"
        "</Token-0></Error>",
        StoreAccessError,
        "The credentials for s3://models/bert have expired. Run 'aws configure' or 'aws sso login'",
    ),
    "clock": (
        "s3",
        403,
        "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request time and the current time "
        "is too large.</Message></Error>",
        StoreAccessError,
        "S3 refused the request for s3://models/bert: this machine's clock is too far off. Set it, for example with "
        "'timedatectl set-ntp true'.",
    ),
    "region": (
        "s3",
        301,
        "<Error><Code>PermanentRedirect</Code><Message>Use another endpoint.</Message></Error>",
        StoreError,
        "s3://models is in another region. Set AWS_REGION to its own ('aws s3api head-bucket' shows it).",
    ),
    "failing": (
        "s3",
        500,
        "<Error><Code>InternalError</Code><Message>We failed.</Message></Error>",
        StoreError,
        "S3 failed for s3://models/bert: 500, InternalError, We failed. Try again later.",
    ),
    "a condition that the service does not know": (
        "s3",
        501,
        "<Error><Code>NotImplemented</Code><Message>A header you provided implies functionality that is not implemented"
        "</Message></Error>",
        StoreError,
        "The service of s3://models/bert does not support this request (501, NotImplemented, A header you provided "
        "implies functionality that is not implemented), so retrying will not help. Check that its endpoint "
        "supports S3; then update the service, or use another one.",
    ),
    "a checksum that the service does not know": (
        "s3",
        400,
        "<Error><Code>InvalidRequest</Code><Message>Unsupported checksum algorithm</Message></Error>",
        StoreError,
        "The service of s3://models/bert does not support the checksum that hfshard sends (400, InvalidRequest, "
        "Unsupported checksum algorithm). Set AWS_REQUEST_CHECKSUM_CALCULATION=when_required, or "
        "request_checksum_calculation in ~/.aws/config: then the signature has SHA-256 instead of CRC-64/NVME.",
    ),
    "a header of checksums that the service does not know": (
        "s3",
        501,
        "<Error><Code>NotImplemented</Code><Message>Header 'x-amz-checksum-algorithm' with value 'CRC64NVME' not "
        "implemented</Message></Error>",
        StoreError,
        "does not support the checksum that hfshard sends (501, NotImplemented, Header 'x-amz-checksum-algorithm' with "
        "value 'CRC64NVME' not implemented). Set AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
    ),
    "bytes that were damaged before they arrived": (
        "s3",
        400,
        "<Error><Code>BadDigest</Code><Message>The CRC64NVME you specified did not match the calculated checksum."
        "</Message></Error>",
        StoreError,
        "S3 failed for s3://models/bert: 400, BadDigest, The CRC64NVME you specified did not match the calculated "
        "checksum. Try again later.",
    ),
    "google, no permission": (
        "gs",
        403,
        "<Error><Code>AccessDenied</Code><Message>Access denied.</Message><Details>me@x</Details></Error>",
        StoreAccessError,
        "Google Cloud Storage denied the request for gs://models/bert (403, AccessDenied, Access denied). "
        "Loading and saving require storage.objects.list",
    ),
    "google, unknown": (
        "gs",
        401,
        "<Error><Code>AuthenticationRequired</Code><Message>Authentication required.</Message></Error>",
        StoreAccessError,
        "Run 'gcloud auth application-default login', or set GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "azure, no container": (
        "az",
        404,
        "<Error><Code>ContainerNotFound</Code><Message>The specified container does not exist.\nT</Message></Error>",
        StoreNotFoundError,
        "There is no az://models, or it is not visible with these credentials. Check the name, or create it with "
        "'az storage container create --name models'.",
    ),
    "azure, unknown header": (
        "az",
        400,
        "<Error><Code>UnsupportedHeader</Code><Message>One of the HTTP headers specified in the request is not "
        "supported.</Message></Error>",
        StoreError,
        "The service of az://models/bert does not support this request (400, UnsupportedHeader, One of the HTTP "
        "headers specified in the request is not supported), so retrying will not help. Check that its endpoint "
        "supports Azure Blob Storage;",
    ),
    "azure, key": (
        "az",
        403,
        "<Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate.\nTime:1</Message>"
        f"<AuthenticationErrorDetail>'{SIGNATURE}' is not the same</AuthenticationErrorDetail></Error>",
        StoreAccessError,
        "Azure Blob Storage did not accept the credentials for az://models/bert (403, AuthenticationFailed, Server "
        "failed to authenticate). Check whose they are with 'az account show'.",
    ),
    "azure, clock": (
        "az",
        403,
        "<Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate.</Message>"
        "<AuthenticationErrorDetail>Request date header too old: 'Mon'</AuthenticationErrorDetail></Error>",
        StoreAccessError,
        "Azure Blob Storage refused the request for az://models/bert: this machine's clock is too far off.",
    ),
}


def log_in(scheme: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tools of a service find one at a URL, with credentials."""
    if scheme == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_SESSION_TOKEN", SIGNATURE)
    elif scheme == "gs":
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url.removeprefix("http://"))
    else:
        account = f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};BlobEndpoint={url}/{ACCOUNT}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account)


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_what_to_do_and_no_secret(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    scheme, status, body, kind, words = REFUSALS[case]
    caplog.set_level(logging.DEBUG, "hfshard")
    with answering(status, body) as url:
        log_in(scheme, url, monkeypatch)
        store = open_store(f"{scheme}://models/bert")
        with pytest.raises(kind) as raised:
            store.list_objects()
        writer = store.open_writer("shard", 9 << 20)
        with pytest.raises(kind):
            writer.write(memoryview(bytes(9 << 20)))
            writer.finish()

    assert words in str(raised.value)
    shown = "".join(traceback.format_exception(raised.value)) + repr(store) + repr(vars(store)) + caplog.text
    for secret in (SECRET, SIGNATURE, ACCOUNT_KEY, "Authorization"):
        assert secret not in shown


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_service_that_is_not_there_is_told(nobody: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    log_in(scheme, "http://127.0.0.1:1", monkeypatch)
    with pytest.raises(StoreConnectionError, match=f"could not be reached during a request for {scheme}://models/bert"):
        open_store(f"{scheme}://models/bert").list_objects()


def test_what_a_service_does_not_know_is_asked_for_once_and_was_not_done(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "60")
    monkeypatch.setattr(retry, "_FIRST_WAIT", 10.0)
    begin = time.monotonic()
    with answering(501, "<Error><Code>NotImplemented</Code><Message>If-None-Match</Message></Error>") as url:
        log_in("s3", url, monkeypatch)
        with pytest.raises(StoreError) as raised:
            open_store("s3://models/bert").put("index", b"{}")
    assert str(raised.value).startswith("The service of s3://models/bert/index does not support this request")
    assert time.monotonic() - begin < 10
