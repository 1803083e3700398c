"""Calls to the Hub: which failures pass, how long a retry waits, and what a message says of tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from hfshard.errors import HfshardError, StoreAccessError
from hfshard.stores import hub_calls
from hfshard.stores.hub_calls import (
    answer_errors,
    check_settings,
    describe_token,
    hide_secrets,
    http_library,
    hub_retry,
    is_transient_error,
    seconds_asked,
)

TOKEN = "hf_abcdefghijklmnop"


def refusal(status: int, message: str = "no", **headers: str) -> HfHubHTTPError:
    """What huggingface_hub raises for a response of this status."""
    library = http_library()
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    response: Any = library.Response(status, headers=named, request=library.Request("GET", "https://hub/api"))
    return HfHubHTTPError(message, response=response)


def test_a_busy_server_or_a_lost_connection_may_pass_and_a_refusal_does_not() -> None:
    passing = [status for status in range(400, 600) if is_transient_error(refusal(status))]

    assert passing == [408, 429, 500, 502, 503, 504]
    library = http_library()
    assert is_transient_error(library.ConnectError("refused")) and is_transient_error(library.ReadTimeout("silent"))
    assert not is_transient_error(OSError("a disk")) and not is_transient_error(library.InvalidURL("no host"))
    assert issubclass(library.InvalidURL, answer_errors()) and issubclass(library.TooManyRedirects, answer_errors())


def test_a_retry_waits_twice_as_long_each_time_or_as_long_as_the_hub_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_calls, "_FIRST_WAIT_SECONDS", 0.001)
    retry = hub_retry("Listing failed")
    lost, busy = OSError("GET https://me:pw@hub/a?sig=x failed"), refusal(503, "busy")
    limited = refusal(429, "slow", Retry_After="0.02")
    with caplog.at_level(logging.WARNING, "hfshard.stores.retry"):
        goes_on = [retry.wait(error, retry_after=seconds_asked(error)) for error in (lost, busy, limited, busy, busy)]

    assert goes_on == [True, True, True, True, False]
    assert [record.getMessage() for record in caplog.records] == [
        "Listing failed (GET https://hub/a?… failed); retrying in 0.001 s, attempt 2 of 5.",
        "Listing failed (busy); retrying in 0.002 s, attempt 3 of 5.",
        "Listing failed (slow); retrying in 0.02 s, attempt 4 of 5.",
        "Listing failed (busy); retrying in 0.008 s, attempt 5 of 5.",
    ]


def test_a_token_is_described_by_its_source_and_last_four_characters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))

    assert describe_token(TOKEN) == "the token '…mnop' that was passed"
    assert describe_token(False) == "no token, because token=False was passed"
    assert describe_token(None) == "no token, because none is saved or in HF_TOKEN"
    (tmp_path / "token").write_text(TOKEN)
    assert describe_token(True) == f"the token '…mnop' saved in '{tmp_path}/token'"
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", f" {TOKEN[:-1]}q\r\n")
    assert describe_token(None) == "the token '…mnoq' from the environment variable HUGGING_FACE_HUB_TOKEN"


def test_settings_that_no_request_can_have_are_refused_unquoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")
    check_settings(None, StoreAccessError)  # a newline at its end does not count
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}é")
    check_settings(False, StoreAccessError)
    with pytest.raises(StoreAccessError, match=r"^The environment variable HF_TOKEN has a control character") as raised:
        check_settings(True, StoreAccessError)
    assert TOKEN not in str(raised.value)

    for endpoint in ("huggingface.co", "https://hub\n", "https://my hub"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(StoreAccessError, match=r"^The environment variable HF_ENDPOINT is not a valid URL"):
            check_settings(TOKEN, StoreAccessError)


def test_secrets_go_from_all_causes_even_if_they_are_a_circle() -> None:
    cause, context = OSError(5, "https://me:pw@hub/a?sig=x"), ValueError("https://hub/b?sig=y")
    error = HfshardError("https://hub/c?sig=z")
    error.__cause__, cause.__context__, context.__cause__ = cause, context, error

    hide_secrets(error)

    assert (cause.args, context.args) == ((5, "https://hub/a?…"), ("https://hub/b?…",))
    assert error.args == ("https://hub/c?sig=z",)  # hfshard's own have none to begin with
