"""Open the store that an address names."""

from __future__ import annotations

from hfshard._util.arguments import StoreAddress, parse_address
from hfshard.errors import StoreError
from hfshard.stores.store import Store


def open_store(address: str | StoreAddress) -> Store:
    """Open the store that an address names, without network access except to find credentials.

    Args:
        address: An address such as "s3://bucket/prefix".

    Raises:
        InvalidPathError: The text is not an address.
        StoreAccessError: There are no credentials for the store.
        StoreError: A package that the service needs is not installed.

    Example:
        store = open_store("s3://models/bert")
        print(store.list_objects())
    """
    place = parse_address(address) if isinstance(address, str) else address
    try:
        if place.scheme == "hf":
            from hfshard.stores.bucket import BucketStore

            return BucketStore(place)
        from hfshard.stores.object_store import ObjectStore
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "hfshard":
            raise
        raise StoreError(
            f"{place} requires the package {error.name!r}, which is not installed. Run: pip install 'hfshard[stores]'",
            path=str(place),
        ) from error
    return ObjectStore(place)
