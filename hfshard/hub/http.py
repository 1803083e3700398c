"""Requests to the Hub: tokens, error responses as hfshard's errors, and downloads that resume."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urljoin, urlsplit

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
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
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import sleep_unless_cancelled
from hfshard.errors import (
    HfshardError,
    HubAccessError,
    HubConnectionError,
    HubError,
    HubNotFoundError,
    InvalidArgumentError,
)
from hfshard.hub.repo import RemoteFile, RepoTree
from hfshard.stores.hub_calls import (
    answer_errors,
    check_settings,
    describe_token,
    hide_secrets,
    http_library,
    hub_retry,
    is_transient_error,
    offline_variable,
    seconds_asked,
    shown_endpoint,
    status_of,
    without_secrets,
)
from hfshard.stores.retry import retry_after

logger = logging.getLogger(__name__)

DOWNLOAD_ATTEMPTS: Final = 6
"""Attempts at a download without a byte in between; the waits before them are 0.5, 1, 2, 4 and 8 seconds."""

_BATCH_OBJECTS: Final = 256
"""Objects in one LFS request, as in huggingface_hub."""
_URL_TRIES: Final = 2
"""Failures in a row of a file's storage URLs that are accepted before it is requested as huggingface_hub does."""
_LFS_JSON: Final = "application/vnd.git-lfs+json"
_OK: Final = 200
_PARTIAL: Final = 206
_CLIENT_ERROR: Final = 400
_RANGE_REFUSED: Final = 416


class _TryAgainError(Exception):
    """A response that may be different the next time."""

    def __init__(self, problem: str, *, retry_after: float | None = None, first_seconds: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after, self.first_seconds = retry_after, first_seconds


class HubReader:
    """Reader of one commit's files, from LFS storage URLs if the server offers them, else as huggingface_hub does."""

    def __init__(
        self, repo_id: str, tree: RepoTree, token: str | bool | None, cancelled: threading.Event | None = None
    ) -> None:
        """Send nothing yet; `cancelled` ends all transfers when it is set."""
        self.repo_id = repo_id
        self.tree = tree
        self.token = token
        self.cancelled = cancelled or threading.Event()
        self._urls: dict[str, tuple[str, dict[str, str]]] = {}
        self._announced: dict[str, int] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    def prefetch_urls(self, paths: Collection[str]) -> None:
        """Announce files that will be read, so that their storage URLs are requested together."""
        with self._lock:
            for path in paths:
                file = self.tree.files[path]
                if file.sha256 is not None:
                    self._announced[file.sha256] = file.size

    def read(
        self, path: str, start: int, end: int, *, remedy: Callable[[int], str] = lambda at: "Try again."
    ) -> Iterator[bytes]:
        """Read bytes `start` to `end`, exclusive, of a file, in order and each once, even if connections break.

        Args:
            path, start, end: The path in the repo, and the range.
            remedy: Builds the last sentence of the error from the position in the file that was reached.

        Raises:
            HubConnectionError: The connection failed repeatedly without a byte in between.
            HubAccessError, HubNotFoundError, HubError: The server refused.
            InterruptedError: The transfer was cancelled.
        """
        at = start
        retry = hub_retry(attempts=DOWNLOAD_ATTEMPTS, cancelled=self.cancelled)
        by_range = True
        failures: tuple[type[Exception], ...] = (_TryAgainError, *answer_errors())
        while at < end:
            sleep_unless_cancelled(0, self.cancelled)
            try:
                begin, last = (at, end) if by_range else (0, self.tree.files[path].size)
                with self._opened(path, begin, last, retry.failures) as (response, offset):
                    for block in response.iter_bytes():
                        fresh = block[max(0, at - offset) : end - offset]
                        offset += len(block)
                        if fresh:
                            at += len(fresh)
                            retry.reset()
                            yield fresh
                        if at >= end:
                            break
                        sleep_unless_cancelled(0, self.cancelled)
                if at < end:
                    raise _TryAgainError("the response ended too early")
            except _RangeRefusedError as error:
                if not by_range:
                    raise HubError(f"The server refused '{path}' of '{self.repo_id}' (HTTP 416).", path=path) from error
                by_range = False
            except failures as error:
                hide_secrets(error)
                problem = str(error) or type(error).__name__
                logger.info(
                    "The download of '%s' of '%s' failed at byte %d of %d: %s", path, self.repo_id, at, end, problem
                )
                asked = error if isinstance(error, _TryAgainError) else _TryAgainError(problem)
                if not retry.wait(retry_after=asked.retry_after, first_seconds=asked.first_seconds):
                    raise HubConnectionError(
                        f"'{path}' of '{self.repo_id}' could not be downloaded: the connection failed "
                        f"{retry.failures + 1} times in a row, the last time with: {problem}. {remedy(at)}",
                        path=path,
                        expected=end,
                        actual=at,
                    ) from error

    def read_all(self, path: str) -> bytes:
        """Read a complete small file; its hash is not checked."""
        return b"".join(self.read(path, 0, self.tree.files[path].size))

    @contextmanager
    def _opened(self, path: str, start: int, end: int, failures: int) -> Iterator[tuple[Any, int]]:
        """Request bytes of a file; yield the response, and the position in the file where it starts."""
        file = self.tree.files[path]
        storage = self._storage_url(file.sha256, file.size, failures) if file.sha256 is not None else None
        headers = {"Accept-Encoding": "identity"}
        if storage is None:
            url = hf_hub_url(self.repo_id, path, revision=self.tree.commit)
            headers |= build_hf_headers(token=self.token)
        else:
            url = storage[0]
            headers |= {**build_hf_headers(token=False), **storage[1]}
        if start > 0 or end < file.size:
            headers["Range"] = f"bytes={start}-{end - 1}" if end < file.size else f"bytes={start}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            self._check(response, file.sha256, is_direct=storage is not None)
            yield response, _first_byte(response, start)

    def _check(self, response: Any, oid: str | None, *, is_direct: bool) -> None:
        status = response.status_code
        if status in (_OK, _PARTIAL):
            return
        if status == _RANGE_REFUSED:
            raise _RangeRefusedError
        problem = f"HTTP {status} from {response.url.host}"
        if _may_pass(status):
            raise _TryAgainError(problem, retry_after=retry_after(response))
        if status >= _CLIENT_ERROR and (is_direct or not _is_endpoint(response.url)):
            with self._lock:
                self._urls.pop(oid or "", None)  # it has expired: a new one is requested
            raise _TryAgainError(f"{problem}, the URL has expired", first_seconds=0.0)
        with translate_hub_errors(self.repo_id, self.token, revision=self.tree.commit):
            response.read()
            hf_raise_for_status(response)
        raise HubError(f"{problem}, which is neither a file nor a known error.", path=self.repo_id)

    def _storage_url(self, oid: str, size: int, failures: int) -> tuple[str, dict[str, str]] | None:
        """Return an object's storage URL and its headers; None if the server gives none, or they failed too often."""
        with self._lock:
            if failures > _URL_TRIES:
                self._refused.add(oid)
            if oid in self._refused:
                return None
            if oid not in self._urls:
                batch = dict(list(({oid: size} | self._announced).items())[:_BATCH_OBJECTS])
                self._urls |= self._ask(batch)
                self._refused |= batch.keys() - self._urls.keys()
                self._announced = {other: n for other, n in self._announced.items() if other not in batch}
            return self._urls.get(oid)

    def _ask(self, objects: dict[str, int]) -> dict[str, tuple[str, dict[str, str]]]:
        """Ask the LFS batch API for sha256 -> URL and headers, of the objects that the server knows.

        Source: git-lfs, docs/api/batch.md.
        """
        url = f"{constants.ENDPOINT}/{self.repo_id}.git/info/lfs/objects/batch"
        headers = {**build_hf_headers(token=self.token), "Accept": _LFS_JSON, "Content-Type": _LFS_JSON}
        body = {
            "operation": "download",
            "transfers": ["basic"],
            "hash_algo": "sha256",
            "objects": [{"oid": oid, "size": size} for oid, size in objects.items()],
        }
        response = get_session().post(url, headers=headers, json=body, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        if _may_pass(response.status_code):
            raise _TryAgainError(f"HTTP {response.status_code}", retry_after=retry_after(response))
        if response.status_code != _OK:
            shown = without_url_secrets(url)
            logger.debug("%s returned HTTP %d: requesting the files one by one.", shown, response.status_code)
            return {}
        try:
            return dict(_instructions(response.json(), url))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.debug("%s sent a response that is not valid LFS: %s", without_url_secrets(url), error)
            return {}


class _RangeRefusedError(Exception):
    """Refusal of a range; the whole file is requested instead."""


def _instructions(answer: Any, url: str) -> Iterator[tuple[str, tuple[str, dict[str, str]]]]:
    for item in answer["objects"]:
        action = item.get("actions", {}).get("download")
        if action is None:
            continue
        href, header = urljoin(url, action["href"]), action.get("header") or {}
        if urlsplit(href).scheme in ("http", "https"):
            yield str(item["oid"]), (href, {str(name): str(value) for name, value in header.items()})


def _is_endpoint(url: Any) -> bool:
    here, there = urlsplit(str(url)), urlsplit(constants.ENDPOINT)
    return (here.scheme, here.netloc) == (there.scheme, there.netloc)


def _first_byte(response: Any, asked: int) -> int:
    """Return the position in the file where a response starts."""
    if response.status_code == _OK:
        return 0
    stated = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    if stated.isdecimal() and int(stated) <= asked:
        return int(stated)
    raise _RangeRefusedError


# Questions to the Hugging Face Hub, and its error responses as hfshard's errors.


_Answer = TypeVar("_Answer")

_NO_RIGHT: Final = (401, 403)
_BUSY: Final = (408, 429)
_SERVER_FAILED: Final = 500


@contextmanager
def translate_hub_errors(repo_id: str, token: str | bool | None, *, revision: str | None = None) -> Iterator[None]:
    """Translate huggingface_hub's exceptions into hfshard's errors, which name the token used and what to do.

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
            f"'{repo_id}' is neither a directory nor a repo_id: {error}", path=repo_id
        ) from error
    except LocalTokenNotFoundError as error:
        raise HubAccessError(
            "token=True requires a saved token, but there is none. Run: hf auth login", path=repo_id
        ) from error
    except OfflineModeIsEnabled as error:
        hide_secrets(error)
        raise HubConnectionError(
            f"Cannot reach '{repo_id}': offline mode is on. Unset {offline_variable()} to use the network.",
            path=repo_id,
        ) from error
    except HfHubHTTPError as error:
        hide_secrets(error)
        raise translate(error, repo_id, token, revision) from error
    except failed as error:
        hide_secrets(error)
        raise HubConnectionError(
            f"The connection to {shown_endpoint()} failed for '{repo_id}': "
            f"{without_secrets(str(error), token) or type(error).__name__}. Check the network and try again: nothing "
            "is sent or fetched twice.",
            path=repo_id,
        ) from error


def tree_of(api: HfApi, repo_id: str, revision: str | None) -> RepoTree:
    """Fetch the commit of a revision and its file list, in one request.

    Raises:
        HubConnectionError: The response does not come from a Hub, but from a login page or a proxy.
        Every exception of huggingface_hub; see `translate_hub_errors`.
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
            f"The response of {shown_endpoint()} is not that of a Hub ({type(error).__name__}): it may come from a "
            "login page of the network or a proxy, or HF_ENDPOINT is wrong. Open the address in a browser.",
            path=repo_id,
        ) from error
    return RepoTree(info.sha or "", files)


def _path(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not a path")
    return name


def _may_pass(status: int) -> bool:
    """Return whether a server that sent this status may handle the same request later."""
    return status in _BUSY or status >= _SERVER_FAILED


def send_request(
    repo_id: str, token: str | bool | None, question: Callable[[], _Answer], *, revision: str | None = None
) -> _Answer:
    """Send a request that is safe to repeat, and retry it if the Hub is busy or its response is lost.

    Raises:
        HubError: The failure, as `translate_hub_errors` translates it.
    """
    retry = hub_retry(f"The request for '{repo_id}' failed")
    while True:
        try:
            with translate_hub_errors(repo_id, token, revision=revision):
                return question()
        except HubConnectionError as error:
            cause = error.__cause__
            if cause is None or not is_transient_error(cause):
                raise
            if not retry.wait(cause, retry_after=seconds_asked(cause)):
                raise


def translate(error: HfHubHTTPError, repo_id: str, token: str | bool | None, revision: str | None) -> HubError:
    """Translate an error response of the Hub."""
    status = status_of(error)
    used = describe_token(token)
    url = f"{shown_endpoint()}/{repo_id}"
    about: dict[str, Any] = {"path": repo_id, "actual": status}
    server_message = without_secrets(error.server_message or "", token)
    said = f" The response was: {server_message}" if server_message else ""
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
            f"There is no repo '{repo_id}' on {shown_endpoint()}, or it is private and not visible with {used}. "
            f"Check the name; to see whose token it is, run: hf auth whoami.{said}",
            **about,
        )
    if status in _NO_RIGHT:
        what = "did not authenticate the request with" if status == 401 else "denied the request with"
        return HubAccessError(
            f"{shown_endpoint()} {what} {used} (HTTP {status}, for '{repo_id}').{said} Use a token with read access, "
            "or with write access for a push; to save one, run: hf auth login",
            **about,
        )
    if _may_pass(status):
        return HubConnectionError(
            f"{shown_endpoint()} could not handle the request for '{repo_id}' (HTTP {status}).{said} Try again later.",
            **about,
        )
    said = said or f" {without_secrets(str(error), token)}"
    return HubError(f"{shown_endpoint()} returned HTTP {status} for '{repo_id}'.{said}", **about)
