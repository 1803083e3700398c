"""Where a mapped file of torch.save lies in memory, and whether its storages are its records."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from hfshard.storage.weights.pickles.zip_check import damaged_pickle


def find_mapped_file(storages: Mapping[int, int], records: Mapping[int, int], path: str) -> int | None:
    """Find the address of a mapped file's first byte, and check that each storage of its tensors is one of its records.

    torch trusts the number of elements that the pickle says, and makes tensors that are not in the file at all when the
    pickle asks for them, of memory that nobody has filled: what a file that was freed left there, or a password.

    Args:
        storages: Address of each that has bytes -> its bytes.
        records: Where each record of tensors' bytes begins in the file -> its bytes.
        path: Of the file, for messages.

    Returns:
        None where the system does not tell it, or there is no storage.

    Raises:
        DamagedCheckpointError: A storage is not in the file, or longer or shorter than its record.
    """
    if not storages:
        return None
    first = min(storages)
    areas = _areas()
    if areas is None:  # then it is one of the addresses from which all storages are as far as records are in the file
        guesses = [first - at for at in records if (first - at) % mmap.PAGESIZE == 0]
        begins = [begin for begin in guesses if all(address - begin in records for address in storages)]
    else:
        # No other memory lies in between: where the others are at records of the same file, they are in the file, too.
        begins = [start - offset for start, end, offset in areas if start <= first < end]
    if not begins or not all(address - begins[0] in records for address in storages):
        raise damaged_pickle(path, "it does not hold the bytes of all its tensors")
    for address, nbytes in storages.items():
        if records[address - begins[0]] != nbytes:
            raise damaged_pickle(
                path, f"a record of {records[address - begins[0]]} bytes holds a storage of {nbytes} bytes"
            )
    return None if areas is None else begins[0]


def _areas() -> list[tuple[int, int, int]] | None:
    """Stretches of this process's memory that are mapped files: first address, end, and the byte of the file there.

    None where the system does not list them.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            split = [line.split(maxsplit=5) for line in lines]
    except OSError:  # there is none, it may not be read, or no more files may be opened
        return None
    areas = []
    for addresses, _rights, offset, _device, _inode, *name in split:
        if name and name[0].startswith("/"):  # others are called [heap], [anon:...], or nothing
            start, end = (int(address, 16) for address in addresses.split("-"))
            areas.append((start, end, int(offset, 16)))
    return areas
