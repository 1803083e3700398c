"""What lies in a bucket, asked by plain requests and no code of hfshard's or of its clients'."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import xml.etree.ElementTree as ET
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

from tests.servers.asking import Answer, ask
from tests.servers.bucket.shards import FileRecipe, Term, file_shard, hash_text
from tests.servers.bucket.xorbs import plain_xorb
from tests.servers.stores.kinds import ACCOUNT, ACCOUNT_KEY, HUB_TOKEN

BUCKET = "hfshard-tests"
"""Where all tests have a folder of their own."""
HUB_BUCKET = f"org/{BUCKET}"


class Bucket(ABC):
    """A bucket of a service on loopback; names are whole keys.

    Args:
        url: Of the service.
        name: Of the bucket.
    """

    def __init__(self, url: str, name: str = BUCKET) -> None:
        self.url = url
        self.name = name

    def ask(
        self, method: str, key: str = "", query: Mapping[str, str] | None = None, body: bytes = b"", **headers: str
    ) -> Answer:
        """Send a request to the bucket, or to one of its objects.

        Raises:
            RuntimeError: It was refused.
        """
        target = f"{self.root}/{self.name}{'/' if key else ''}{quote(key)}"
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        answer = ask(self.url, method, self.signed(target, query or {}), body, {**self.credentials, **named})
        if answer.status >= 300:
            raise RuntimeError(f"{method} {target} {query}: {answer.status} {answer.body[:500]!r}")
        return answer

    root = ""
    credentials: Mapping[str, str] = {"Authorization": "AWS tests-key:unsigned"}  # moto asks for some, and checks none

    def signed(self, target: str, query: Mapping[str, str]) -> str:
        """A target with its query, and what the service wants to see of a user."""
        return f"{target}?{urlencode(query)}" if query else target

    @abstractmethod
    def create(self) -> None:
        """Make the bucket."""

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name the objects below a prefix, with their bytes."""

    @abstractmethod
    def unfinished(self, prefix: str = "") -> list[str]:
        """Name the objects of which only parts have been sent."""

    def read(self, key: str) -> bytes:
        """The bytes of an object."""
        return self.ask("GET", key).body

    def put(self, key: str, raw: bytes) -> None:
        """Put an object, as other tools do."""
        self.ask("PUT", key, body=raw)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self.ask("DELETE", key)

    def objects(self, prefix: str) -> dict[str, bytes]:
        """What lies below a prefix, which the names are without."""
        return {key.removeprefix(prefix).lstrip("/"): self.read(key) for key in self.sizes(f"{prefix}/")}

    def copy_to(self, prefix: str, directory: Path) -> Path:
        """Make a directory of what lies below a prefix, as a tool that synchronizes them does."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, raw in self.objects(prefix).items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(raw)
        return directory


class S3Bucket(Bucket):
    """A bucket of S3."""

    def create(self) -> None:
        self.ask("PUT")

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        query = {"list-type": "2", "prefix": prefix}
        while True:
            page = _without_namespaces(self.ask("GET", query=query).body)
            for entry in page.iter("Contents"):
                found[entry.findtext("Key", "")] = int(entry.findtext("Size", ""))
            token = page.findtext("NextContinuationToken")
            if not token:
                return found
            query["continuation-token"] = token

    def unfinished(self, prefix: str = "") -> list[str]:
        page = _without_namespaces(self.ask("GET", query={"uploads": "", "prefix": prefix}).body)
        return [entry.findtext("Key", "") for entry in page.iter("Upload")]


class GcsBucket(S3Bucket):
    """A bucket of GCS, by its XML API."""

    def create(self) -> None:
        body = json.dumps({"name": self.name}).encode()
        made = ask(self.url, "POST", "/storage/v1/b?project=tests", body, {"Content-Type": "application/json"})
        assert made.status == 200, made


class AzureBucket(Bucket):
    """A container of Azure."""

    root = f"/{ACCOUNT}"
    credentials: Mapping[str, str] = {}

    def signed(self, target: str, query: Mapping[str, str]) -> str:
        """With a shared access signature of the account."""
        fields = {"sp": "rwdlac", "ss": "b", "srt": "sco", "st": "", "se": "2100-01-01T00:00:00Z"}
        fields |= {"sip": "", "spr": "https,http", "sv": "2019-12-12"}
        text = "\n".join([ACCOUNT, *fields.values(), ""])
        signature = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256)
        given = {name: value for name, value in fields.items() if value}
        return f"{target}?{urlencode({**query, **given, 'sig': base64.b64encode(signature).decode()})}"

    def create(self) -> None:
        self.ask("PUT", query={"restype": "container"})

    def put(self, key: str, raw: bytes) -> None:
        self.ask("PUT", key, body=raw, x_ms_blob_type="BlockBlob")

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return self._list(prefix, "metadata")

    def unfinished(self, prefix: str = "") -> list[str]:
        finished = self.sizes(prefix)
        return [key for key in self._list(prefix, "uncommittedblobs") if key not in finished]

    def _list(self, prefix: str, include: str) -> dict[str, int]:
        found: dict[str, int] = {}
        query = {"restype": "container", "comp": "list", "prefix": prefix, "include": include}
        while True:
            page = _without_namespaces(self.ask("GET", query=query).body)
            for entry in page.iter("Blob"):
                found[entry.findtext("Name", "")] = int(entry.findtext("Properties/Content-Length", "0"))
            query["marker"] = page.findtext("NextMarker") or ""
            if not query["marker"]:
                return found


class HubBucket(Bucket):
    """A bucket of the Hub; see `Bucket`."""

    credentials: Mapping[str, str] = {"Authorization": f"Bearer {HUB_TOKEN}"}

    def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Ask the Hub about the bucket."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        answer = ask(self.url, method, path, body, {**self.credentials, **named})
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.body[:500]!r}")
        return answer

    def create(self) -> None:
        self.call("POST", f"/api/buckets/{HUB_BUCKET}", b"{}")

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        path = f"/api/buckets/{HUB_BUCKET}/tree/{quote(prefix, safe='')}?recursive=true"
        while path:
            answer = self.call("GET", path)
            found |= {entry["path"]: entry["size"] for entry in json.loads(answer.body)}
            link = answer.headers.get("link", "").partition(">")[0]
            path = "/" + "/".join(link.split("/")[3:]) if link else ""
        return found

    def unfinished(self, prefix: str = "") -> list[str]:
        return []  # what is sent has no name before it is whole

    def read(self, key: str) -> bytes:
        found = self.call("GET", f"/buckets/{HUB_BUCKET}/resolve/{quote(key, safe='')}")
        return self.call("GET", "/" + found.headers["location"].split("/", 3)[3]).body

    def put(self, key: str, raw: bytes) -> None:
        token = json.loads(self.call("GET", f"/api/buckets/{HUB_BUCKET}/xet-write-token").body)["accessToken"]
        file_hash = hash_text(hashlib.sha256(raw).digest())  # of its own kind: the server believes any
        xorb, chunks = plain_xorb(raw)
        terms = (Term(file_hash, 0, chunks, len(raw)),) if raw else ()
        if raw:
            self.call("POST", f"/v1/xorbs/default/{file_hash}", xorb, Authorization=f"Bearer {token}")
        shard = file_shard(FileRecipe(file_hash, terms, None))
        self.call("POST", "/v1/shards", shard, Authorization=f"Bearer {token}")
        self._batch({"type": "addFile", "path": key, "xetHash": file_hash, "mtime": 0})

    def delete(self, key: str) -> None:
        self._batch({"type": "deleteFile", "path": key})

    def _batch(self, operation: Mapping[str, object]) -> None:
        self.call(
            "POST",
            f"/api/buckets/{HUB_BUCKET}/batch",
            json.dumps(operation).encode(),
            Content_Type="application/x-ndjson",
        )


def _without_namespaces(raw: bytes) -> ET.Element:
    page = ET.fromstring(raw)
    for entry in page.iter():
        entry.tag = entry.tag.rpartition("}")[2]
    return page


BUCKETS: dict[str, type[Bucket]] = {"s3": S3Bucket, "gs": GcsBucket, "az": AzureBucket, "hf": HubBucket}
"""Scheme -> its buckets."""
