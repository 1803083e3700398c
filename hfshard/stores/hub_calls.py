"""What calls of huggingface_hub have in common: tokens that no message gives away, and failures that may pass."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from email.utils import parsedate_to_datetime
from typing import Any, Final

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import pause
from hfshard.errors import HfshardError

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 5
"""Times that a request is sent that may succeed the next time."""
_FIRST_WAIT_SECONDS: Final = 0.5
_LONGEST_RETRY_AFTER: Final = 600.0
"""Seconds that a server may ask us to wait."""
_RETRIED: Final = frozenset({408, 429, 500, 502, 503, 504})

_TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_ENDPOINT_USER: Final = re.compile(r"(?<=://).*@", re.DOTALL)
_SHOWN_CHARACTERS: Final = 4
"""Characters of a token in messages: enough to recognize it, too few to use it."""
_SHOWN_FROM: Final = 16
"""Characters of a token of which some are shown at all; the Hub's have 37."""


def transport_errors() -> tuple[type[Exception], ...]:
    """The exceptions of huggingface_hub's HTTP library for a failed connection that may succeed the next time."""
    library = http_library()
    return (library.TimeoutException, library.NetworkError, library.RemoteProtocolError, library.ProxyError)


def answer_errors() -> tuple[type[Exception], ...]:
    """All that huggingface_hub's HTTP library raises, too, for an answer or an address that makes no sense.

    It may come from a proxy: a loop of redirects, a body that can't be unpacked, an address that no host can have.
    """
    library = http_library()
    return (library.RequestError, library.InvalidURL, UnicodeError)


def http_library() -> Any:
    """httpx, or httpx2 from huggingface_hub 2.0 on."""
    package = next(kind.__module__.split(".")[0] for kind in type(get_session()).__mro__ if "httpx" in kind.__module__)
    return sys.modules[package]


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
        if _clean(os.environ.get(variable, "")) == found:
            return f"the token {shown} of the environment variable {variable}"
    return f"the token {shown} that is saved in '{constants.HF_TOKEN_PATH}'"


def check_settings(token: str | bool | None, access_error: type[HfshardError]) -> None:
    """Refuse a token or an HF_ENDPOINT that no request can have, before a message quotes it.

    huggingface_hub drops newlines from the tokens of the environment, and nothing else.

    Args:
        token: Of the call.
        access_error: What to raise.

    Raises:
        HfshardError: Of that class.
    """
    if isinstance(token, str) and (_is_no_token(token) or token != token.strip()):
        raise access_error(
            "The token that was passed is empty, or has blanks, a newline or other signs that no token has. "
            "Strip it where you read it."
        )
    if token is not False and not isinstance(token, str):
        variable = next((name for name in _TOKEN_VARIABLES if os.environ.get(name)), None)
        if variable is not None and (kept := _clean(os.environ[variable])) and _is_no_token(kept):
            raise access_error(
                f"The environment variable {variable} has a control character or a letter that is not ASCII, as no "
                "token has. Set it to the plain token."
            )
    endpoint = constants.ENDPOINT
    if any(sign.isspace() or not sign.isprintable() for sign in endpoint) or "://" not in endpoint:
        raise access_error(
            "The environment variable HF_ENDPOINT is no plain URL: it has blanks or a newline, or no http:// or "
            "https:// before its host. Set it to one such as https://huggingface.co before Python starts."
        )


def _is_no_token(token: str) -> bool:
    return not (token and token.isascii() and token.isprintable())


def _clean(token: str) -> str:
    """A token of the environment as huggingface_hub takes it."""
    return token.replace("\r", "").replace("\n", "").strip()


def _masked(token: str) -> str:
    return f"'…{token[-_SHOWN_CHARACTERS:]}'" if len(token) >= _SHOWN_FROM else "'…'"


def shown_endpoint() -> str:
    """The Hub's endpoint for messages: without a user and password, which that of a mirror may have."""
    return _ENDPOINT_USER.sub("", constants.ENDPOINT)


def without_secrets(text: str, token: str | bool | None) -> str:
    """Mask the token of a call wherever a text, such as a server's answer, quotes it; and what its URLs hold."""
    used = token if isinstance(token, str) else None if token is False else get_token()
    text = without_url_secrets(text)
    return re.sub(rf"(?<![\w-]){re.escape(used)}(?![\w-])", "…", text) if used else text


def hide_secrets(error: BaseException) -> None:
    """Take URLs' secrets out of an error of others and its causes, which a traceback shows above hfshard's own."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if not isinstance(found, HfshardError):
            found.args = tuple(without_url_secrets(part) if isinstance(part, str) else part for part in found.args)
        found = found.__cause__ or found.__context__


def offline_variable() -> str:
    """The environment variable that turned offline mode on: huggingface_hub's, or transformers'."""
    theirs, ours = ("TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE")
    is_on = {
        name: os.environ.get(name, "").strip().upper() in constants.ENV_VARS_TRUE_VALUES for name in (theirs, ours)
    }
    return theirs if is_on[theirs] and not is_on[ours] else ours


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
    problem = without_url_secrets(str(error))
    logger.warning("%s (%s); trying again in %g s, attempt %d of %d.", what, problem, wait_seconds, attempt, ATTEMPTS)
    pause(wait_seconds)


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
