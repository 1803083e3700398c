"""Tokens for Xet storage: asked for once, again before they expire, and never sent along with the user's own."""

from __future__ import annotations

import time

import pytest
from huggingface_hub.errors import HfHubHTTPError

from hfshard._util.threads import run_in_threads
from hfshard.stores.hub_calls import XetTokens, bucket_token_url, repo_token_url
from tests.servers.hub import hub as hub_module
from tests.servers.hub.hub_server import HubServer
from tests.stores.conftest import SERVER_BUCKET as BUCKET


def requests_of(hub: HubServer) -> list[tuple[str, str, int]]:
    return [(request.method, request.path, request.status) for request in hub.log]


ASKED = ("GET", "/api/buckets/org/models/xet-read-token", 200)


def test_a_token_is_asked_for_once_by_all_threads_and_again_when_it_was_forgotten(hub: HubServer) -> None:
    tokens = XetTokens(bucket_token_url(BUCKET, "read"))
    assert requests_of(hub) == []

    first, *others = run_in_threads(lambda _item, _number: tokens.current(), list(range(8)), 8)
    assert requests_of(hub) == [ASKED]
    assert all(other is first for other in others)
    assert first.ends > time.time() + 120
    assert first.endpoint in repr(first)
    assert first.secret not in repr(first)

    tokens.forget()
    assert tokens.current().secret != first.secret
    assert requests_of(hub) == [ASKED, ASKED]


@pytest.mark.parametrize(("seconds", "count"), [(110, 2), (600, 1)])
def test_a_token_that_expires_within_two_minutes_is_replaced(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, seconds: int, count: int
) -> None:
    monkeypatch.setattr(hub_module, "XET_TOKEN_SECONDS", seconds)
    tokens = XetTokens(bucket_token_url(BUCKET, "read"))
    tokens.current()
    tokens.current()

    assert requests_of(hub) == [ASKED] * count


def test_a_refusal_is_false_at_a_try_and_an_error_when_a_token_is_needed(hub: HubServer) -> None:
    for tokens, status in (
        (XetTokens(bucket_token_url("org/none", "read")), 404),
        (XetTokens(bucket_token_url(BUCKET, "write"), "hf_read"), 403),
    ):
        assert not tokens.try_once()
        with pytest.raises(HfHubHTTPError) as raised:
            tokens.current()
        assert raised.value.response.status_code == status

    hub.clear_log()
    tokens = XetTokens(bucket_token_url(BUCKET, "write"))
    assert tokens.try_once()
    tokens.current()
    assert len(hub.log) == 1  # what the try has got is kept


def test_the_token_of_the_user_goes_to_the_hub_alone(hub: HubServer) -> None:
    url = bucket_token_url(BUCKET, "write")
    arguments = XetTokens(url, "hf_write").arguments()

    assert arguments["token_refresh_url"] == f"{hub.endpoint}/api/buckets/org/models/xet-write-token" == url
    assert arguments["token_refresh_headers"]["authorization"] == "Bearer hf_write"
    assert "user-agent" in arguments["custom_headers"]
    del arguments["token_refresh_headers"]
    assert "hf_write" not in str(arguments)


def test_a_revision_is_one_part_of_its_address(hub: HubServer) -> None:
    assert repo_token_url("org/m", "read", "refs/pr/1") == (
        f"{hub.endpoint}/api/models/org/m/xet-read-token/refs%2Fpr%2F1"
    )
