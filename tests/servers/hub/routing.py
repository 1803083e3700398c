"""What answers which request of the test Hub."""

from __future__ import annotations

import re

from tests.servers.hub.routes import api, buckets, cas, commits, lfs, resolve
from tests.servers.origin import Found, Route
from tests.servers.wire import Headers

_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_MODEL = rf"/api/models/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"
_NAME = r"(?P<name>[^/]+)"
_BUCKET = r"/api/buckets/(?P<bucket_id>[^/]+/[^/]+)"
_XET = r"[0-9a-f]{64}"

ROUTES: dict[str, list[tuple[str, str, str, Route]]] = {
    "api": [
        ("GET", r"/api/whoami-v2", "whoami", api.whoami),
        ("POST", r"/api/repos/create", "create_repo", api.create_repo),
        ("DELETE", r"/api/repos/delete", "delete_repo", api.delete_repo),
        ("POST", r"/api/validate-yaml", "validate_yaml", api.validate_yaml),
        ("GET", r"/api/agent-harnesses", "harnesses", api.harnesses),
        ("GET", rf"{_MODEL}", "info", api.info),
        ("GET", rf"{_MODEL}/revision/{_REVISION}", "info", api.info),
        ("GET", rf"{_MODEL}/tree/{_REVISION}(?:/(?P<path>.*))?", "tree", api.tree),
        ("POST", rf"{_MODEL}/paths-info/{_REVISION}", "paths-info", api.paths_info),
        ("GET", rf"{_MODEL}/commits/{_REVISION}", "commits", api.commits),
        ("GET", rf"{_MODEL}/refs", "refs", api.refs),
        ("POST", rf"{_MODEL}/branch/{_NAME}", "branch", api.create_branch),
        ("POST", rf"{_MODEL}/tag/{_NAME}", "tag", api.create_tag),
        ("GET", rf"{_MODEL}/discussions", "discussion", api.discussions),
        ("GET", rf"{_MODEL}/xet-(?P<scope>read|write)-token/.*", "xet_token", api.xet_token),
        ("POST", rf"{_MODEL}/preupload/{_REVISION}", "preupload", commits.preupload),
        ("POST", rf"{_MODEL}/commit/{_REVISION}", "commit", commits.commit),
        ("POST", r"/api/complete_multipart/(?P<repo_id>[^/]+/[^/]+)/(?P<sha256>\w+)", "lfs_complete", lfs.complete),
        ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch", lfs.batch),
        ("POST", rf"/{_REPO}\.git/info/lfs/objects/verify", "lfs_verify", lfs.verify),
        ("POST", _BUCKET, "bucket_create", buckets.create),
        ("GET", _BUCKET, "bucket_info", buckets.info),
        ("GET", rf"{_BUCKET}/tree(?:/(?P<path>.*))?", "bucket_tree", buckets.tree),
        ("POST", rf"{_BUCKET}/paths-info", "bucket_paths", buckets.paths_info),
        ("POST", rf"{_BUCKET}/batch", "bucket_batch", buckets.batch),
        ("GET", rf"{_BUCKET}/xet-(?P<scope>read|write)-token", "xet_token", buckets.xet_token),
        ("HEAD", r"/buckets/(?P<bucket_id>[^/]+/[^/]+)/resolve/(?P<path>.+)", "bucket_head", buckets.resolve),
        ("GET", r"/buckets/(?P<bucket_id>[^/]+/[^/]+)/resolve/(?P<path>.+)", "bucket_get", buckets.resolve),
        ("HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve_head", resolve.resolve),
        ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve_get", resolve.resolve),
    ],
    "storage": [
        ("POST", rf"/v1/xorbs/default/(?P<xorb>{_XET})", "xorb_put", cas.put_xorb),
        ("POST", rf"/v1/xorb-grants/default/{_XET}", "xorb_grant", cas.no_grants),
        ("POST", r"/v(?P<version>[12])/shards", "shard_put", cas.put_shard),
        ("GET", rf"/v1/chunks/default(?:-merkledb)?/(?P<chunk>{_XET})", "chunk_query", cas.query_chunk),
        ("GET", rf"/v(?P<version>[12])/reconstructions/(?P<file_hash>{_XET})", "reconstruction", cas.reconstruction),
        ("POST", r"/v1/telemetry", "telemetry", cas.telemetry),
        ("GET", rf"/xorbs/(?P<xorb>{_XET})", "xorb_get", cas.get_xorb),
        ("GET", rf"/xet-bridge/(?P<file_hash>{_XET})", "bridge_get", cas.get_file),
        ("HEAD", rf"/xet-bridge/(?P<file_hash>{_XET})", "bridge_head", cas.get_file),
        ("GET", rf"/{_REPO}/(?P<sha256>\w+)", "storage_get", resolve.storage_get),
        ("HEAD", rf"/{_REPO}/(?P<sha256>\w+)", "storage_head", resolve.storage_get),
        ("PUT", rf"/{_REPO}/(?P<sha256>\w+)", "lfs_put", lfs.storage_put),
    ],
}


def find_route(origins: tuple[str, ...], method: str, target: str, headers: Headers | None = None) -> Found:
    """Find what answers a request on the port of one origin or of more."""
    path, _, query = target.partition("?")
    for origin in origins:
        for route_method, pattern, kind, route in ROUTES[origin]:
            if route_method == method and (match := re.fullmatch(pattern, path)):
                kind = "lfs_part" if kind == "lfs_put" and "partNumber=" in query else kind
                parts = {name: part for name, part in match.groupdict().items() if part is not None}
                return Found(kind, route, parts, origin)
    return Found("other", None, origin=origins[0])
