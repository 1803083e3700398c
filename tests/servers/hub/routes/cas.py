"""Xet's store over the wire: upload xorbs and shards, ask how files are made, and fetch parts of xorbs.

Source: xet-core, openapi/cas.openapi.yaml and xet_client/src/cas_client/remote_client.rs.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from typing import Any

from tests.servers.bucket.cas import Reconstruction
from tests.servers.bucket.shards import FileRecipe, dedup_shard
from tests.servers.hub.hub import Hub
from tests.servers.hub.routes.resolve import range_of
from tests.servers.objects import pieces_of
from tests.servers.wire import Exchange, HubError, StorageError

# How long clients may keep what they were told about other people's chunks.
DEDUP_SECONDS = 3600
MAX_SHARD_BYTES = 64 * 1024 * 1024
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


def put_xorb(hub: Hub, exchange: Exchange, xorb: str) -> None:
    """Store a xorb. Its hash is believed: there is no blake3 here."""
    hub.check_xet_token(exchange, "write")
    try:
        was_inserted = hub.cas.add_xorb(xorb, exchange.body.pieces())
    except ValueError as error:
        raise HubError(400, str(error)) from None
    exchange.reply_json({"was_inserted": was_inserted})


def no_grants(hub: Hub, exchange: Exchange) -> None:
    """Say that xorbs come here, and not to signed URLs of another storage."""
    raise HubError(404, "This store gives no grants.")


def put_shard(hub: Hub, exchange: Exchange, version: str) -> None:
    """Register files; the second version of the call answers in lines of JSON, the last of which says how it went."""
    hub.check_xet_token(exchange, "write")
    try:
        hub.cas.add_shard(exchange.body.read(MAX_SHARD_BYTES))
    except ValueError as error:
        raise HubError(400, str(error)) from None
    if version == "1":
        exchange.reply_json({"result": 1})
    else:
        exchange.reply(200, b'{"type": "result"}\n', {"Content-Type": "application/x-ndjson"})


def query_chunk(hub: Hub, exchange: Exchange, chunk: str) -> None:
    """Answer which xorb holds a chunk, with all else that it holds."""
    hub.check_xet_token(exchange, "read")
    record = hub.cas.listing_of_chunk(chunk)
    if record is None:
        raise HubError(404, "No xorb is known to hold this chunk.")
    exchange.reply(200, dedup_shard([record], int(time.time()) + DEDUP_SECONDS))


def reconstruction(hub: Hub, exchange: Exchange, version: str, file_hash: str) -> None:
    """Answer what a file, or a range of it, is made of, and where to fetch that."""
    hub.check_xet_token(exchange, "read")
    recipe = hub.cas.recipe(file_hash)
    if recipe is None:
        raise HubError(404, "No such file was uploaded.")
    begin, end = _asked(exchange, recipe)
    plan = hub.cas.reconstruct(recipe, begin, end)
    answer = {
        "offset_into_first_range": plan.offset,
        "terms": [
            {"hash": one.xorb, "unpacked_length": one.size, "range": {"start": one.begin, "end": one.end}}
            for one in plan.terms
        ],
    }
    fetches = _fetches_1(hub, plan) if version == "1" else _fetches_2(hub, plan)
    exchange.reply_json(answer | {"fetch_info" if version == "1" else "xorbs": fetches})


def _asked(exchange: Exchange, recipe: FileRecipe) -> tuple[int, int]:
    match = _RANGE.fullmatch(exchange.record.range or "")
    if match is None:
        return 0, recipe.size
    begin, last = int(match[1]), int(match[2])
    if begin >= recipe.size or last < begin:
        raise HubError(416, f"The file has {recipe.size} bytes.")
    return begin, min(last + 1, recipe.size)


def _descriptors(hub: Hub, plan: Reconstruction) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for xorb, ranges in plan.fetches.items():
        packed = hub.cas.xorbs.table(xorb).packed
        yield (
            xorb,
            [
                {"chunks": {"start": begin, "end": end}, "bytes": {"start": packed[begin], "end": packed[end] - 1}}
                for begin, end in ranges
            ],
        )


def _fetches_1(hub: Hub, plan: Reconstruction) -> dict[str, Any]:
    return {
        xorb: [
            {"range": one["chunks"], "url": _url(hub, xorb, [one]), "url_range": one["bytes"]} for one in descriptors
        ]
        for xorb, descriptors in _descriptors(hub, plan)
    }


def _fetches_2(hub: Hub, plan: Reconstruction) -> dict[str, Any]:
    return {
        xorb: [{"url": _url(hub, xorb, descriptors), "ranges": descriptors}]
        for xorb, descriptors in _descriptors(hub, plan)
    }


def _url(hub: Hub, xorb: str, descriptors: list[dict[str, Any]]) -> str:
    ranges = ",".join(f"{one['bytes']['start']}-{one['bytes']['end']}" for one in descriptors)
    return hub.sign(f"/xorbs/{xorb}", "GET", ranges=ranges)


def get_xorb(hub: Hub, exchange: Exchange, xorb: str) -> None:
    """Send the parts of a xorb that a signed URL was made for."""
    hub.signer.check(exchange)
    wanted = (exchange.record.range or "").removeprefix("bytes=").split(",")
    signed = exchange.query("ranges")
    if not set(wanted) <= set(signed.split(",")):
        raise StorageError(403, "AccessDenied", f"The URL is for the ranges {signed}, not for {exchange.record.range}.")
    if not hub.cas.xorbs.has(xorb):
        raise StorageError(404, "NoSuchKey", "The specified key does not exist.")
    path = hub.cas.xorbs.path(xorb)
    ranges = [(int(first), int(last)) for first, last in (one.split("-") for one in wanted)]
    size = path.stat().st_size
    if len(ranges) == 1:
        first, last = ranges[0]
        headers = {"Content-Type": "application/octet-stream", "Content-Range": f"bytes {first}-{last}/{size}"}
        exchange.stream(206, pieces_of(path, first, last + 1 - first), last + 1 - first, headers)
        return
    boundary = secrets.token_hex(16)
    heads = [
        f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n"
        f"Content-Range: bytes {first}-{last}/{size}\r\n\r\n".encode()
        for first, last in ranges
    ]
    tail = f"\r\n--{boundary}--\r\n".encode()
    length = sum(map(len, heads)) + sum(last + 1 - first for first, last in ranges) + len(tail)

    def parts() -> Iterator[bytes]:
        for head, (first, last) in zip(heads, ranges, strict=True):
            yield head
            yield from pieces_of(path, first, last + 1 - first)
        yield tail

    exchange.stream(206, parts(), length, {"Content-Type": f"multipart/byteranges; boundary={boundary}"})


def get_file(hub: Hub, exchange: Exchange, file_hash: str) -> None:
    """Send a file, or a range of it, to clients that know nothing of Xet."""
    hub.signer.check(exchange)
    recipe = hub.cas.recipe(file_hash)
    if recipe is None:
        raise StorageError(404, "NoSuchKey", "The specified key does not exist.")
    begin, end, status, headers = range_of(exchange, recipe.size)
    headers |= {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": f'"{file_hash}"'}
    exchange.stream(status, hub.cas.pieces(recipe, begin, end), end - begin, headers)


def telemetry(hub: Hub, exchange: Exchange) -> None:
    """Hear how a transfer went."""
    hub.check_xet_token(exchange, "read")
    exchange.body.drain()
    exchange.reply(200)
