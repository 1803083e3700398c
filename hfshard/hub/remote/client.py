"""Asks the Hugging Face Hub: which token is used, and what its answers mean in hfshard's errors."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeVar

from huggingface_hub import HfApi, constants, get_session, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hfshard.errors import (
    HfshardError,
    HubAccessError,
    HubConnectionError,
    HubError,
    HubNotFoundError,
    InvalidArgumentError,
)
from hfshard.hub.repo_tree import RemoteFile, RepoTree

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

ATTEMPTS: Final = 5
"""Times that a request is sent that may succeed the next time."""
_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_RETRY_AFTER: Final = 600.0
"""Seconds that a server may ask us to wait."""
_RETRIED: Final = frozenset({408, 429, 500, 502, 503, 504})

_TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SHOWN_CHARACTERS: Final = 4
"""Characters of a token in messages: enough to recognize it, too few to use it."""
_SHOWN_FROM: Final = 16
"""Characters of a token of which some are shown at all; the Hub's have 37."""
_NO_RIGHT: Final = (401, 403)
_BUSY: Final = (408, 429)
_SERVER_FAILED: Final = 500


def transport_errors() -> tuple[type[Exception], ...]:
    """The exceptions of huggingface_hub's HTTP library for a failed connection that may succeed the next time."""
    library = _http_library()
    return (library.TimeoutException, library.NetworkError, library.RemoteProtocolError, library.ProxyError)


def _http_library() -> Any:
    """httpx, or httpx2 from huggingface_hub 2.0 on."""
    package = next(kind.__module__.split(".")[0] for kind in type(get_session()).__mro__ if "httpx" in kind.__module__)
    return sys.modules[package]


def _check_token(token: str | bool | None) -> None:
    """Refuse what can't be sent as a token, before an error message quotes it."""
    if isinstance(token, str) and not (token.isascii() and token.isprintable() and token == token.strip() and token):
        raise HubAccessError(
            "The token that was passed is empty, or has blanks, a newline or other signs that no token has. "
            "Strip it where you read it."
        )


def describe_token(token: str | bool | None) -> str:
    """Say which token a call with this argument uses, without giving it away."""
    if isinstance(token, str):
        return f"the token {_masked(token)} that was passed"
    if token is False:
        return "no token, as token=False was passed"
    found = get_token()
    if found is None:
        return "no token, as none is saved or in HF_TOKEN"
    shown = _masked(found)
    for variable in _TOKEN_VARIABLES:
        if os.environ.get(variable, "").strip() == found:
            return f"the token {shown} of the environment variable {variable}"
    return f"the token {shown} that is saved in '{constants.HF_TOKEN_PATH}'"


def _masked(token: str) -> str:
    return f"'…{token[-_SHOWN_CHARACTERS:]}'" if len(token) >= _SHOWN_FROM else "'…'"


def without_token(text: str, token: str | bool | None) -> str:
    """Mask the token of a call wherever a text, such as a server's answer, quotes it."""
    used = token if isinstance(token, str) else None if token is False else get_token()
    return re.sub(rf"(?<![\w-]){re.escape(used)}(?![\w-])", "…", text) if used else text


def offline_variable() -> str:
    """The environment variable that turned offline mode on: huggingface_hub's, or transformers'."""
    theirs, ours = ("TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE")
    is_on = {
        name: os.environ.get(name, "").strip().upper() in constants.ENV_VARS_TRUE_VALUES for name in (theirs, ours)
    }
    return theirs if is_on[theirs] and not is_on[ours] else ours


@contextmanager
def translate_hub_errors(repo_id: str, token: str | bool | None, *, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises into hfshard's errors, which say which token was used and what to do.

    Raises:
        HubAccessError, HubNotFoundError, HubConnectionError, HubError: The Hub refused, or could not be reached.
        InvalidArgumentError: The repo_id is not a valid one.
    """
    _check_token(token)
    failed = _http_library().RequestError
    try:
        yield
    except HfshardError:
        raise
    except HFValidationError as error:
        raise InvalidArgumentError(
            f"'{repo_id}' is neither a repo_id nor a directory: {error}", path=repo_id
        ) from error
    except LocalTokenNotFoundError as error:
        raise HubAccessError(
            "token=True asks for a saved token, and there is none. Run: hf auth login", path=repo_id
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubConnectionError(
            f"'{repo_id}' can't be reached: offline mode is on. Unset {offline_variable()} to use the network.",
            path=repo_id,
        ) from error
    except HfHubHTTPError as error:
        raise translate(error, repo_id, token, revision) from error
    except failed as error:
        raise HubConnectionError(
            f"The connection to {constants.ENDPOINT} failed for '{repo_id}': "
            f"{without_token(str(error), token) or type(error).__name__}. "
            "Check the network, and run it again: what was transferred is not sent or fetched twice.",
            path=repo_id,
        ) from error


def tree_of(api: HfApi, repo_id: str, revision: str | None) -> RepoTree:
    """Ask for the commit of a revision and its files, by one request.

    Raises:
        HubConnectionError: The answer is not a Hub's, but that of a login page or a proxy.
        Whatever huggingface_hub raises; see `translate_hub_errors`.
    """
    try:
        info = api.model_info(
            repo_id, revision=revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        )
        files = {
            item.rfilename: RemoteFile(
                -1 if item.size is None else int(item.size),
                item.lfs.sha256 if item.lfs is not None else None,
                item.blob_id,
            )
            for item in info.siblings or []
        }
    except HFValidationError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, HfHubHTTPError):
            raise
        raise HubConnectionError(
            f"The answer of {constants.ENDPOINT} is not that of a Hub ({type(error).__name__}): it may come from a "
            "login page of the network or a proxy, or HF_ENDPOINT is wrong. Open the address in a browser.",
            path=repo_id,
        ) from error
    return RepoTree(info.sha or "", files)


def ask(
    repo_id: str, token: str | bool | None, question: Callable[[], _Answer], *, revision: str | None = None
) -> _Answer:
    """Ask the Hub something that is safe to repeat: it is asked again if it is busy or its answer is lost.

    Raises:
        HubError: What `translate_hub_errors` makes of a failure.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with translate_hub_errors(repo_id, token, revision=revision):
                return question()
        except HubConnectionError as error:
            cause = error.__cause__
            if attempt == ATTEMPTS or cause is None or not is_passing(cause):
                raise
            wait_before(attempt + 1, cause, f"'{repo_id}' could not be asked")
    raise AssertionError("unreachable")


def is_passing(error: BaseException) -> bool:
    """Whether a request may succeed the next time: the server was busy, or the connection failed."""
    if isinstance(error, HfHubHTTPError):
        return status_of(error) in _RETRIED
    return isinstance(error, transport_errors())


def wait_before(attempt: int, error: BaseException, what: str) -> None:
    """Say that something failed, and wait before it is tried again: longer each time, or as long as the Hub asks.

    Args:
        attempt: Number of the next attempt, from 2.
        error: Why the last one failed.
        what: What failed, for the log.
    """
    wait_seconds = _FIRST_WAIT_SECONDS * 2 ** (attempt - 2)
    if isinstance(error, HfHubHTTPError):
        wait_seconds = max(wait_seconds, retry_after(error.response) or 0.0)
    logger.warning("%s (%s); trying again in %g s, attempt %d of %d.", what, error, wait_seconds, attempt, ATTEMPTS)
    time.sleep(wait_seconds)


def translate(error: HfHubHTTPError, repo_id: str, token: str | bool | None, revision: str | None) -> HubError:
    """Translate an error answer of the Hub."""
    status = status_of(error)
    used = describe_token(token)
    url = f"{constants.ENDPOINT}/{repo_id}"
    about: dict[str, Any] = {"path": repo_id, "actual": status}
    server_message = without_token(error.server_message or "", token)
    said = f" The Hub said: {server_message}" if server_message else ""
    if isinstance(error, GatedRepoError):
        return HubAccessError(
            f"'{repo_id}' is gated, and the request had {used}. Accept its conditions on {url}, "
            f"then run: hf auth login.{said}",
            **about,
        )
    if isinstance(error, RevisionNotFoundError):
        return HubNotFoundError(
            f"'{repo_id}' has no revision '{revision}'. See its branches and tags on {url}/tree/main.", **about
        )
    if isinstance(error, EntryNotFoundError):
        return HubNotFoundError(
            f"'{repo_id}' has no such file: {server_message or without_token(str(error), token)}", **about
        )
    if isinstance(error, RepositoryNotFoundError) and status != 403:
        kind = HubAccessError if status == 401 else HubNotFoundError
        return kind(
            f"There is no repo '{repo_id}' on {constants.ENDPOINT}, or it is private and may not be seen with {used}. "
            f"Check the name; to see whose token it is, run: hf auth whoami.{said}",
            **about,
        )
    if status in _NO_RIGHT:
        what = "does not know" if status == 401 else "does not allow that to"
        return HubAccessError(
            f"{constants.ENDPOINT} {what} {used} (HTTP {status}, for '{repo_id}').{said} "
            "Use a token that may read it, or has the right to write where you push; to save one, run: hf auth login",
            **about,
        )
    if status in _BUSY or status >= _SERVER_FAILED:
        return HubConnectionError(
            f"{constants.ENDPOINT} could not answer for '{repo_id}' (HTTP {status}).{said} Run it again later.", **about
        )
    said = said or f" {without_token(str(error), token)}"
    return HubError(f"{constants.ENDPOINT} answered HTTP {status} for '{repo_id}'.{said}", **about)


def status_of(error: HfHubHTTPError) -> int:
    """The HTTP status of an answer."""
    return int(error.response.status_code)


def retry_after(response: Any) -> float | None:
    """Seconds that a server asks us to wait; None if it does not say."""
    value = response.headers.get("Retry-After")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)
