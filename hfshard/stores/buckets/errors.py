"""What the answers of the Hub and of Xet storage about a bucket mean in hfshard's errors, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from huggingface_hub.errors import (
    BucketBatchError,
    BucketNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
)

from hfshard._util.addresses import StoreAddress
from hfshard._util.text import list_some
from hfshard.errors import (
    HfshardError,
    InvalidPathError,
    StoreAccessError,
    StoreConnectionError,
    StoreError,
    StoreNotFoundError,
)
from hfshard.stores.buckets.hub_calls import (
    check_settings,
    describe_token,
    hide_secrets,
    http_library,
    is_passing,
    offline_variable,
    shown_endpoint,
    status_of,
    without_secrets,
)
from hfshard.stores.buckets.xet import XetFailedError

_LOGIN: Final = "To use another token, run: hf auth login, or set HF_TOKEN."
_NO_RIGHT: Final = (401, 403)
_SHOWN: Final = 3
"""Failed files that an error lists."""


@contextmanager
def translate_bucket_errors(address: StoreAddress) -> Iterator[None]:
    """Turn what huggingface_hub and hf_xet raise into hfshard's errors.

    Raises:
        StoreAccessError, StoreNotFoundError, StoreConnectionError, StoreError: See `Store`.
        InvalidPathError: There can't be a bucket of that name.
    """
    check_settings(None, StoreAccessError)
    failed = http_library().RequestError
    try:
        yield
    except HfshardError:
        raise
    except HFValidationError as error:
        raise InvalidPathError(f"'{address}' can't be the address of a bucket: {error}", path=str(address)) from error
    except OfflineModeIsEnabled as error:
        hide_secrets(error)
        raise StoreConnectionError(
            f"'{address}' can't be reached: offline mode is on. Unset {offline_variable()} to use the network.",
            path=str(address),
        ) from error
    except HfHubHTTPError as error:
        hide_secrets(error)
        raise _of_answer(error, address) from error
    except failed as error:
        hide_secrets(error)
        raise _unreachable(address, str(error) or type(error).__name__) from error
    except XetFailedError as error:
        raise _of_storage(error, address) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        hide_secrets(error)
        raise StoreConnectionError(
            f"The answer of {shown_endpoint()} is not that of a Hub with buckets ({type(error).__name__}): it may "
            "come from a login page of the network or a proxy, or HF_ENDPOINT is wrong. Open the address in a browser.",
            path=str(address),
        ) from error


def _of_answer(error: HfHubHTTPError, address: StoreAddress) -> StoreError:
    status, used = status_of(error), describe_token(None)
    about: dict[str, Any] = {"path": str(address), "actual": status}
    said = _masked(error.server_message or "")
    said = f" The Hub said: {said}." if said else ""
    if isinstance(error, BucketBatchError) and error.failures:
        reasons = [f"'{failure.get('path')}': {_masked(str(failure.get('error')))}" for failure in error.failures]
        return StoreError(f"The Hub did not do all that '{address}' was to get: {list_some(reasons, _SHOWN)}.", **about)
    if isinstance(error, BucketNotFoundError):
        kind = StoreAccessError if status == _NO_RIGHT[0] else StoreNotFoundError
        return kind(
            f"There is no bucket '{address.bucket}' on {shown_endpoint()}, or it is private and may not be seen with "
            f"{used}. Check the address '{address}'; to make the bucket, run: hf buckets create {address.bucket}; to "
            f"see whose token it is: hf auth whoami.{said}",
            **about,
        )
    if status in _NO_RIGHT:
        what = "does not know" if status == _NO_RIGHT[0] else "does not allow that to"
        return StoreAccessError(
            f"{shown_endpoint()} {what} {used} (HTTP {status}, for '{address}').{said} {_LOGIN}", **about
        )
    if is_passing(error):
        return StoreConnectionError(
            f"{shown_endpoint()} could not answer for '{address}' (HTTP {status}).{said} Run it again later.", **about
        )
    return StoreError(
        f"{shown_endpoint()} answered HTTP {status} for '{address}'.{said or f' {_masked(str(error))}.'}", **about
    )


def _of_storage(error: XetFailedError, address: StoreAddress) -> StoreError:
    message = _masked(str(error))
    if error.kind == "access":
        return StoreAccessError(
            f"The Xet storage of '{address}' refused {describe_token(None)}: {message}. {_LOGIN}", path=str(address)
        )
    if error.kind == "connection":
        return _unreachable(address, message)
    return StoreError(f"The Xet storage of '{address}' failed: {message}. Run it again.", path=str(address))


def _unreachable(address: StoreAddress, problem: str) -> StoreConnectionError:
    return StoreConnectionError(
        f"The connection to {shown_endpoint()} or its storage failed for '{address}': {_masked(problem)}. "
        "Check the network, and run it again.",
        path=str(address),
    )


def _masked(text: str) -> str:
    """A text of others', for the middle of a message: without secrets, and without a full stop at its end."""
    return without_secrets(text, None).rstrip(". \n")
