"""Asks the Hugging Face Hub: which token is used, and what its answers mean in hfshard's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from huggingface_hub import HfApi, constants
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
from hfshard.stores.hub_calls import (
    ATTEMPTS,
    check_settings,
    describe_token,
    hide_secrets,
    http_library,
    is_passing,
    offline_variable,
    shown_endpoint,
    status_of,
    wait_before,
    without_secrets,
)

_Answer = TypeVar("_Answer")

_NO_RIGHT: Final = (401, 403)
_BUSY: Final = (408, 429)
_SERVER_FAILED: Final = 500


@contextmanager
def translate_hub_errors(repo_id: str, token: str | bool | None, *, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises into hfshard's errors, which say which token was used and what to do.

    Raises:
        HubAccessError, HubNotFoundError, HubConnectionError, HubError: The Hub refused, or could not be reached.
        InvalidArgumentError: The repo_id is not a valid one.
    """
    check_settings(token, HubAccessError)
    failed = http_library().RequestError
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
        hide_secrets(error)
        raise HubConnectionError(
            f"'{repo_id}' can't be reached: offline mode is on. Unset {offline_variable()} to use the network.",
            path=repo_id,
        ) from error
    except HfHubHTTPError as error:
        hide_secrets(error)
        raise translate(error, repo_id, token, revision) from error
    except failed as error:
        hide_secrets(error)
        raise HubConnectionError(
            f"The connection to {shown_endpoint()} failed for '{repo_id}': "
            f"{without_secrets(str(error), token) or type(error).__name__}. "
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
            _path(item.rfilename): RemoteFile(
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
        hide_secrets(error)
        raise HubConnectionError(
            f"The answer of {shown_endpoint()} is not that of a Hub ({type(error).__name__}): it may come from a "
            "login page of the network or a proxy, or HF_ENDPOINT is wrong. Open the address in a browser.",
            path=repo_id,
        ) from error
    return RepoTree(info.sha or "", files)


def _path(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not a path")
    return name


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


def translate(error: HfHubHTTPError, repo_id: str, token: str | bool | None, revision: str | None) -> HubError:
    """Translate an error answer of the Hub."""
    status = status_of(error)
    used = describe_token(token)
    url = f"{shown_endpoint()}/{repo_id}"
    about: dict[str, Any] = {"path": repo_id, "actual": status}
    server_message = without_secrets(error.server_message or "", token)
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
            f"'{repo_id}' has no such file: {server_message or without_secrets(str(error), token)}", **about
        )
    if isinstance(error, RepositoryNotFoundError) and status != 403:
        kind = HubAccessError if status == 401 else HubNotFoundError
        return kind(
            f"There is no repo '{repo_id}' on {shown_endpoint()}, or it is private and may not be seen with {used}. "
            f"Check the name; to see whose token it is, run: hf auth whoami.{said}",
            **about,
        )
    if status in _NO_RIGHT:
        what = "does not know" if status == 401 else "does not allow that to"
        return HubAccessError(
            f"{shown_endpoint()} {what} {used} (HTTP {status}, for '{repo_id}').{said} "
            "Use a token that may read it, or has the right to write where you push; to save one, run: hf auth login",
            **about,
        )
    if status in _BUSY or status >= _SERVER_FAILED:
        return HubConnectionError(
            f"{shown_endpoint()} could not answer for '{repo_id}' (HTTP {status}).{said} Run it again later.", **about
        )
    said = said or f" {without_secrets(str(error), token)}"
    return HubError(f"{shown_endpoint()} answered HTTP {status} for '{repo_id}'.{said}", **about)
