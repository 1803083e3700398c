"""Checksums by published values, what a fingerprint samples, and how a file's own digests are blanked."""

from __future__ import annotations

from typing import Any

import pytest

from hfshard.errors import InvalidArgumentError
from hfshard.format.index import (
    HASHERS,
    check_checksum,
    check_verify_level,
    fingerprint_positions,
    md5_of,
    new_fingerprint,
    sha256_of,
    tensor_digest,
    tensor_digest_of_bytes,
    with_zeroed_digests,
)

SHA256_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
XXH3_64_ABC = "78af5f94892f3950"
XXH3_128_ABC = "06b05ab6733a618578af5f94892f3950"


def test_each_kind_of_checksum_is_the_algorithm_of_its_name() -> None:
    found = {}
    for kind, new_hasher in HASHERS.items():
        hasher = new_hasher()
        hasher.update(b"abc")
        found[kind] = hasher.hexdigest()
    fingerprint = new_fingerprint()
    fingerprint.update(b"abc")

    assert found == {"sha256": SHA256_ABC, "xxh3": XXH3_128_ABC}
    assert fingerprint.hexdigest() == XXH3_128_ABC
    assert sha256_of(b"abc") == SHA256_ABC
    assert md5_of(b"abc") == "900150983cd24fb0d6963f7d28e17f72"


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [([], "2d06800538d394c2"), ([b"abc"], XXH3_64_ABC), ([b"a", b"", memoryview(b"bc")], XXH3_64_ABC)],
)
def test_a_tensor_has_the_same_digest_in_any_blocks(blocks: list[Any], expected: str) -> None:
    assert tensor_digest(blocks) == expected
    assert tensor_digest_of_bytes(b"".join(blocks)) == expected


def test_an_unknown_checksum_or_level_is_refused_even_if_it_is_no_text() -> None:
    for kind in ("sha256", "xxh3", None):
        check_checksum(kind)
    for level in ("none", "structure", "full", "sha256"):
        check_verify_level(level)
    no_text: Any = ["sha256"]

    with pytest.raises(InvalidArgumentError, match=r"^checksum must be 'sha256', 'xxh3' or None, got 'SHA256'\.$"):
        check_checksum("SHA256")
    with pytest.raises(InvalidArgumentError, match=r"got \['sha256'\]"):
        check_checksum(no_text)
    with pytest.raises(InvalidArgumentError, match=r"^verify must be .* \(or 'sha256'\), got 'xxh3'\.$"):
        check_verify_level("xxh3")


def test_up_to_1024_tensors_are_all_in_the_fingerprint() -> None:
    assert list(fingerprint_positions(0)) == []
    assert list(fingerprint_positions(3)) == [0, 1, 2]
    assert list(fingerprint_positions(1024)) == list(range(1024))


def test_of_more_tensors_1024_are_chosen_evenly() -> None:
    one_and_a_half, a_million = fingerprint_positions(1536), fingerprint_positions(1 << 20)

    assert list(one_and_a_half[:6]) == [0, 1, 3, 4, 6, 7]
    assert (len(one_and_a_half), one_and_a_half[-1]) == (1024, 1534)
    assert (len(a_million), a_million[1], a_million[-1]) == (1024, 1024, 1_047_552)


def test_the_digests_that_a_file_states_are_blanked_and_nothing_else() -> None:
    header = rb'{"__metadata__":{"hfshard":"{\"sha256\":\"ab12\",\"xxh3\":\"ab12\"}","note":"ab12"}}'

    blank = with_zeroed_digests(header, [("sha256", "ab12"), ("fingerprint", "ab12"), ("xxh3", "cd34")])

    assert blank == rb'{"__metadata__":{"hfshard":"{\"sha256\":\"0000\",\"xxh3\":\"ab12\"}","note":"ab12"}}'


def test_of_a_digest_that_is_stated_twice_the_first_is_blanked() -> None:
    stated = rb"\"xxh3\":\"ff\""

    assert with_zeroed_digests(stated + b"," + stated, [("xxh3", "ff")]) == rb"\"xxh3\":\"00\"" + b"," + stated
