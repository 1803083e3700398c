"""The requests that hfshard makes itself are those of huggingface_hub's own bucket calls."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import XetTokenType
from huggingface_hub.utils._xet import xet_connection_info_refresh_url

from hfshard.stores.bucket import BucketCalls, BucketStore
from hfshard.stores.hub_calls import bucket_token_url, repo_token_url
from tests.servers.hub.hub_server import HubServer
from tests.stores.conftest import SERVER_BUCKET as BUCKET

pytestmark = pytest.mark.compat


def test_addresses_of_tokens_are_those_of_huggingface_hub(hub: HubServer) -> None:
    for kind in XetTokenType:
        theirs = xet_connection_info_refresh_url(
            token_type=kind, repo_id=BUCKET, repo_type="bucket", endpoint=hub.endpoint
        )
        assert bucket_token_url(BUCKET, kind.value) == theirs
        theirs = xet_connection_info_refresh_url(
            token_type=kind, repo_id="org/m", repo_type="model", revision="main", endpoint=hub.endpoint
        )
        assert repo_token_url("org/m", kind.value, "main") == theirs
    of_pull = xet_connection_info_refresh_url(
        token_type=XetTokenType.WRITE, repo_id="org/m", repo_type="model", revision=None, endpoint=hub.endpoint
    )
    assert repo_token_url("org/m", "write", "None") == of_pull


def test_bucket_calls_are_those_of_huggingface_hub(store: BucketStore, hub: HubServer) -> None:
    put, prefix = store.put("a b", b"1"), store.address.prefix
    api, ours = HfApi(), BucketCalls(store.address)
    path, copied = f"{prefix}/a b", f"{prefix}/c"
    pairs = [
        (lambda: list(api.list_bucket_tree(BUCKET, prefix, recursive=True)), lambda: ours.files(prefix)),
        (lambda: list(api.get_bucket_paths_info(BUCKET, [path])), lambda: ours.find([path])),
        (
            lambda: api.batch_bucket_files(BUCKET, copy=[("bucket", BUCKET, put.etag, copied)]),
            lambda: ours.copy(put.etag, copied),
        ),
        (lambda: api.batch_bucket_files(BUCKET, delete=[copied]), lambda: ours.delete([copied])),
    ]
    for theirs, mine in pairs:
        sent = []
        for call in (theirs, mine):
            hub.clear_log()
            call()
            sent.append(
                [(request.method, request.path.replace("=True", "=true"), request.bytes_up) for request in hub.log]
            )
        assert sent[0] == sent[1]
