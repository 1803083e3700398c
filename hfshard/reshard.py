"""Re-shard a checkpoint: copy the bytes of its tensors, without decoding them, into files of another size."""

from __future__ import annotations

import os

import torch

from hfshard._util.arguments import checked_path_text, wraps_os_errors
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.format.index import CheckpointIndex, Checksum
from hfshard.places.place import place_to_save
from hfshard.places.source import CheckpointSource
from hfshard.saving.resharding import reshard_source
from hfshard.saving.save_request import SaveOptions
from hfshard.shards.shard_plan import Packing


@wraps_os_errors("dst")
def reshard_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    *,
    packing: Packing = "greedy",
    dtype: str | torch.dtype | None = None,
    low_disk: bool = False,
    drop_signature: bool = False,
    key: str | None = None,
    checksum: Checksum | None = "sha256",
    follow_links: bool = False,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    progress: bool | None = None,
) -> CheckpointIndex:
    """Save a checkpoint again in files of another size, durably and all or nothing; pickles become safetensors.

    The bytes of the tensors are copied through a few buffers and compared with the source's checksums of them. For a
    checkpoint that hfshard did not save, only the structure can be checked. In an empty directory, the files are, bit
    for bit, those that a save of the same tensors with the same arguments writes.

    The tensors keep the order of the source's files and of the bytes in them (in a pickle, that of its state dict).
    This is the order of the saved state dict, unless dtypes of several sizes are mixed, or a tensor was too large for
    its file. Tied names, complex tensors, and the metadata of index and files are kept; the `__metadata__` of a single
    file also goes into the index.

    config.json and generation_config.json go with the weights. Other files at the top level that are not weights and
    have at most 256 MiB are also copied into another directory: tokenizer, code, README (if `dst` has none). If `dst`
    has a different file with one of these names, nothing is written.

    Args:
        src: A directory, a repo of the Hub, a directory hub, or the address of a store ("s3://bucket/prefix"); or one
            file of weights, or an index, as in `load_state_dict`: then `dst` must be another place, and gets only the
            weights.
        dst: The directory or store address to write. If it is the same as `src`, the checkpoint is replaced in place;
            the old files load until the new ones are complete.
        max_shard_size, packing, checksum, progress: As in `save_state_dict`.
        dtype: Cast the floating tensors ("bfloat16", "float16", "float32", "float64"), block by block, and record it in
            config.json. Integers and complex numbers stay; a quantized checkpoint, such as fp8, is rejected.
        low_disk: Only in place, and only for sharded safetensors: work in groups of files, so that never more than one
            shard (of the old or the new size, whichever is larger) is on disk twice. Each group is committed
            separately: a killed run leaves a complete checkpoint, and another run continues. A new file consists of
            complete old ones, or of parts of one, so there may be a few more files than otherwise.
        drop_signature: Remove the `model.sig` of `dst` if it is no longer valid. Without this option, a signed
            checkpoint is rejected in place, since its signature could not be verified any more. A copy is created
            without the signature.
        key: As in `load_state_dict`.
        follow_links: Also copy files other than weights that are links to outside of `src`; without this option they
            are rejected, as in a push.
        variant: The variant of the source, and of the written checkpoint.
        use_safetensors: None: safetensors before pickles; True: only them; False: only pickles. Pickles of torch 1.5
            and older are read into memory completely.
        subfolder, revision, token, cache_dir, local_files_only: As in `load_state_dict`.

    Returns:
        The index of the written checkpoint.

    Raises:
        InvalidSizeError, InvalidArgumentError: Nothing was written: `dst` is inside `src`, `low_disk` with another
            directory, or an unsupported dtype.
        SignatureError: The checkpoint is signed, and would be replaced in place.
        SaveDirectoryError: `dst` has different files with the names of copied ones; or as in `save_state_dict`.
        IntegrityError: A tensor of the source is damaged; nothing was changed (with low_disk: nothing in its group).
        CheckpointChangedError: Another process saved over the source during the call; nothing was changed.
        Everything that `load_state_dict` and `save_state_dict` raise.

    Example:
        hfshard.reshard_checkpoint("out", "resharded", "200MB", dtype="bfloat16")
        hfshard.reshard_checkpoint("checkpoint.pth.tar", "converted", key="state_dict")
    """
    target = place_to_save(dst, "dst")
    query = CheckpointQuery(
        variant=variant,
        use_safetensors=use_safetensors,
        subfolder=subfolder,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
    )
    source = CheckpointSource(checked_path_text(src, "src"), query, takes_files=True)
    options = SaveOptions(
        max_shard_size=max_shard_size,
        variant=variant,
        packing=packing,
        checksum=checksum,
        drop_signature=drop_signature,
        progress=progress,
    )
    return reshard_source(
        source, target, options, dtype=dtype, low_disk=low_disk, key=key, follow_links=follow_links
    ).index
