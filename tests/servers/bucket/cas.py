"""Xet's content-addressable store: files made of chunks of xorbs, and what answers where their bytes lie."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.servers.bucket.shards import FileRecipe, Term, XorbListing, parse_shard
from tests.servers.bucket.xorbs import XorbStore


@dataclass(slots=True)
class CasCounts:
    """What was uploaded so far; with equal files and chunks, `file_bytes` grows and the others don't."""

    xorbs: int = 0
    """New ones."""
    xorb_bytes: int = 0
    """Of new xorbs, packed."""
    chunk_bytes: int = 0
    """Of new xorbs, unpacked."""
    file_bytes: int = 0
    """Of all files in all shards, whether they were known or not."""


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """Terms that hold a range of a file, and what is to be fetched for them."""

    offset: int
    """Bytes of the first term that lie before the range."""
    terms: list[Term]
    fetches: dict[str, list[tuple[int, int]]]
    """Xorb -> ranges of chunks, in order and apart from each other."""


class Cas:
    """All xorbs and files of a server, for all its buckets and repositories. Safe for threads."""

    def __init__(self, root: Path) -> None:
        self.xorbs = XorbStore(root)
        self.counts = CasCounts()
        self._lock = threading.Lock()
        self._recipes: dict[str, FileRecipe] = {}
        self._by_sha256: dict[str, FileRecipe] = {}
        self._listing_of_chunk: dict[str, XorbListing] = {}

    def add_xorb(self, xorb: str, pieces: Iterable[bytes]) -> bool:
        """Store a xorb; False: it was there.

        Raises:
            ValueError: It is none.
        """
        is_new = self.xorbs.add(xorb, pieces)
        if is_new:
            table = self.xorbs.table(xorb)
            with self._lock:
                self.counts.xorbs += 1
                self.counts.xorb_bytes += table.packed[-1]
                self.counts.chunk_bytes += table.unpacked[-1]
        return is_new

    def add_shard(self, raw: bytes) -> None:
        """Register the files and chunks of a shard; a second time changes nothing.

        Raises:
            ValueError: It is none, or speaks of xorbs or chunks that are not there.
        """
        recipes, listings = parse_shard(raw)
        for recipe in recipes:
            for term in recipe.terms:
                self._check(term)
        for listing in listings:
            if not self.xorbs.has(listing.hash):
                raise ValueError(f"The shard lists xorb {listing.hash}, which was not uploaded.")
        with self._lock:
            for listing in listings:
                self._listing_of_chunk.update(dict.fromkeys(listing.chunk_hashes, listing))
            for recipe in recipes:
                self._recipes[recipe.hash] = recipe
                if recipe.sha256 is not None:
                    self._by_sha256[recipe.sha256] = recipe
                self.counts.file_bytes += recipe.size

    def _check(self, term: Term) -> None:
        if not self.xorbs.has(term.xorb):
            raise ValueError(f"The shard has a file of xorb {term.xorb}, which was not uploaded.")
        unpacked = self.xorbs.table(term.xorb).unpacked
        if not 0 <= term.begin < term.end < len(unpacked):
            raise ValueError(f"Xorb {term.xorb} has no chunks {term.begin} to {term.end}.")
        if unpacked[term.end] - unpacked[term.begin] != term.size:
            raise ValueError(f"Chunks {term.begin} to {term.end} of xorb {term.xorb} have not {term.size} bytes.")

    def recipe(self, file_hash: str) -> FileRecipe | None:
        """How a file is made; None: nobody uploaded it."""
        return self._recipes.get(file_hash)

    def by_sha256(self, sha256: str) -> FileRecipe | None:
        """The file whose writer said that it has this digest."""
        return self._by_sha256.get(sha256)

    def listing_of_chunk(self, chunk: str) -> bytes | None:
        """What was listed of the xorb that holds a chunk; None: no xorb does."""
        with self._lock:
            listing = self._listing_of_chunk.get(chunk)
        return None if listing is None else listing.record

    def reconstruct(self, recipe: FileRecipe, begin: int, end: int) -> Reconstruction:
        """Find the chunks that hold the bytes from `begin` to before `end`, and no others."""
        found = [(term, start) for term, start, after in _with_bounds(recipe.terms) if start < end and after > begin]
        terms: list[Term] = []
        offset = 0
        for term, start in found:
            unpacked = self.xorbs.table(term.xorb).unpacked
            base = start - unpacked[term.begin]
            first, last = term.begin, term.end
            while base + unpacked[first + 1] <= begin:
                first += 1
            while base + unpacked[last - 1] >= end:
                last -= 1
            if not terms:
                offset = begin - (base + unpacked[first])
            terms.append(Term(term.xorb, first, last, unpacked[last] - unpacked[first]))
        return Reconstruction(offset, terms, _fetches(terms))

    def pieces(self, recipe: FileRecipe, begin: int, end: int) -> Iterator[bytes]:
        """Unpack the bytes of a file from `begin` to before `end`."""
        plan = self.reconstruct(recipe, begin, end)
        skip, left = plan.offset, end - begin
        for term in plan.terms:
            for chunk in range(term.begin, term.end):
                piece = self.xorbs.unpack(term.xorb, chunk, chunk + 1)[skip:][:left]
                skip, left = 0, left - len(piece)
                yield piece


def _with_bounds(terms: Iterable[Term]) -> Iterator[tuple[Term, int, int]]:
    start = 0
    for term in terms:
        yield term, start, start + term.size
        start += term.size


def _fetches(terms: list[Term]) -> dict[str, list[tuple[int, int]]]:
    fetches: dict[str, list[tuple[int, int]]] = {}
    for term in sorted(terms, key=lambda one: (one.xorb, one.begin)):
        ranges = fetches.setdefault(term.xorb, [])
        if ranges and term.begin <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], term.end))
        else:
            ranges.append((term.begin, term.end))
    return fetches
