"""Where the system does not tell what is mapped, the bytes of a mapped file stay where they are."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from hfshard.pickles.read_pickle import find_mapped_file


def test_without_a_descriptor_for_the_list_of_mapped_files_the_place_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(64))
    storage = torch.UntypedStorage.from_file(str(path), False, 64)
    storages, records = {storage.data_ptr() + 16: 8}, {16: 8}
    assert find_mapped_file(storages, records, str(path)) == storage.data_ptr()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = find_mapped_file(storages, records, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found is None
