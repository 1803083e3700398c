"""What several questions share: the checkpoint that is read, and the look at what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.harness.models import make_model, total_bytes, write_specs
from bench.harness.question import Context


def make_specs(context: Context) -> None:
    """Write the names and shapes, once."""
    if not context.specs.exists():
        write_specs(context.size, context.specs)


def make_source(context: Context, checksum: str = "sha256") -> None:
    """Save the checkpoint that is read, once; with xxh3 beside it where asked for."""
    make_specs(context)
    where = source_of(context, checksum)
    if where.exists():
        return
    import hfshard

    model = make_model(context.size, context.specs)
    hfshard.save_model(
        model,
        where,
        max_shard_size=context.size.shard_size,
        checksum="xxh3" if checksum == "xxh3" else "sha256",
        progress=False,
    )


def source_of(context: Context, checksum: str = "sha256") -> Path:
    """The directory of that checkpoint."""
    return context.source if checksum == "sha256" else context.directory / f"source-{checksum}"


def shards_of(directory: Path) -> list[Path]:
    """The weights' files in order."""
    return sorted(directory.glob("*.safetensors"))


def sized(paths: list[Path]) -> list[tuple[Path, int]]:
    """The files with their sizes."""
    return [(path, path.stat().st_size) for path in paths]


def written(context: Context, copies: int = 1) -> dict[str, Any]:
    """What is in the target, in bytes.

    Args:
        context: Its target is where something was to be saved.
        copies: How many times the tensors' bytes must be there at least.

    Raises:
        RuntimeError: There are fewer, so that it was not a whole save.
    """
    found = sum(path.stat().st_size for path in context.target.rglob("*") if path.is_file())
    if found < copies * total_bytes(context.specs):
        raise RuntimeError(f"only {found} bytes were saved")
    return {"bytes": found}
