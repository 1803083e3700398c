"""Load a checkpoint as a state dict or into a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hfshard._util.arguments import checked_path_text, reject_unknown_arguments, wraps_os_errors
from hfshard._util.call_ranks import among, check_process_group
from hfshard.checkpoint.load_options import LoadOptions, checked_device, files_with_keys, read_tensors
from hfshard.checkpoint.locate import CheckpointQuery, FilesOf
from hfshard.distributed.load_on_ranks import (
    check_like,
    files_of_names,
    has_spread_state,
    load_into_spread_module,
    load_like,
    load_opened,
)
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import Verify
from hfshard.models.patching import is_plain_class
from hfshard.places.source import CheckpointSource, open_source_by_ranges, use_checkpoint
from hfshard.shards.read_tensors import ReadMode
from hfshard.signing.check_signature import required_signature
from hfshard.signing.signer import SignedBy
from hfshard.tensors.parameter_names import KeySelection
from hfshard.tensors.zero3 import refresh_masters

_QUERY_ARGUMENTS: Final = frozenset(
    ("variant", "subfolder", "use_safetensors", "revision", "token", "cache_dir", "local_files_only")
)
"""Keyword arguments that `load_model` accepts for a module in addition to its named ones."""


@wraps_os_errors("path")
def load_state_dict(
    path: str | os.PathLike[str],
    *,
    keys: KeySelection | None = None,
    key: str | None = None,
    like: Mapping[str, torch.Tensor] | None = None,
    device: str | torch.device = "cpu",
    variant: str | None = None,
    use_safetensors: bool | None = None,
    verify: Verify = "structure",
    public_key: str | os.PathLike[str] | SignedBy | None = None,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    disable_mmap: bool | None = None,
    read: ReadMode = "auto",
    ranges: bool = False,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
) -> dict[str, torch.Tensor]:
    """Load a state dict from a checkpoint of hfshard, transformers, huggingface_hub or torch.save.

    Args:
        path: A directory, an address of a store ("s3://bucket/prefix"), or a repo of the Hub ("org/name"); or one file:
            safetensors, one of torch.save (.pt, .pth, .pth.tar, .ckpt, .bin), or an index. A file is loaded regardless
            of other files next to it. A directory may also have the parts that DeepSpeed or
            torch.distributed.checkpoint (FSDP) saved on each rank: of these, float32 masters come first.
        keys: The names to load: names, globs ("*.bias"), or a function of the name. None: all. Only these tensors are
            loaded, and only their shards are downloaded, opened and checked.
        key: The key of the weights in a file of torch.save that has more than weights, or in a directory of
            torch.distributed.checkpoint: "model_state_dict", or "ema.state_dict" for a nested one. None: they are
            found, if there is only one candidate.
        like: A state dict: its names are loaded, as new tensors of its shapes, dtypes and devices. For a DTensor, the
            new one has the same mesh and placements, and each rank reads its part; then every rank of the default
            process group must call, and all load or none.
        device: The device of the tensors; with `like`, only of those whose counterpart is a plain meta tensor.
        variant, subfolder, revision, token, cache_dir, local_files_only: As in transformers' `from_pretrained`.
        use_safetensors: None: safetensors before pickles; True: only them; False: only pickles.
        verify: "none": only what reading needs; "structure": names, sizes, headers and fingerprints; "full" (or
            "sha256"): every byte against its checksum, which hfshard writes, and torch.save since 1.6; files without
            one are rejected. From a store, each tensor is compared with its own, at every level except "none". Weights
            of DeepSpeed's ZeRO 1 and 2 must then be the casts of their masters, as in `verify_checkpoint`.
        public_key: The file of a public key, or a `hfshard.signing.SignedBy`: its holder must have signed every file
            that is read (`model.sig`, of `sign_checkpoint` or OpenSSF Model Signing). Every byte of the weights is
            hashed, regardless of `verify`; in a store, each shard is read once more for that. Not with `ranges`.
        disable_mmap: As in transformers: True is read="pread".
        read: "auto": on the CPU the tensors are mapped (a page is read when it is touched), and pages that are not in
            the page cache are read ahead; for a GPU, and from network file systems, several threads read them at once.
            "mmap" or "pread": always that one. With `like`, a part that is not one run of a file, or has another dtype,
            is read at once. From a store, ranges of files are read in parallel, straight into the tensors.
        ranges: From the Hub, download only headers and the bytes of the tensors, not complete shards, and write nothing
            into the cache. Each tensor is compared with its own checksum, which hfshard writes; "full" rejects tensors
            without one.
        process_group: For `like` with DTensors: the group whose ranks load together; None: the default process group.
        progress: Whether to show a bar on stderr while files are downloaded and checksums computed; None: only on a
            terminal.

    Returns:
        FQN -> tensor. Names that shared a tensor when they were saved are the same tensor again.

    Raises:
        CheckpointNotFoundError: There are no weights.
        AmbiguousWeightsError: A file of torch.save has several sets of weights, and `key` does not select one.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: Before any tensor is returned.
        SignatureError: There is no such signature; or a file differs, is missing, or was added. Nothing was returned.
        CheckpointChangedError: It was replaced in a store on every attempt.
        StoreError: The store refused, or cannot be reached.
        StateDictMismatchError: `keys` or `like` names a missing tensor, or one with another shape than in `like`, or
            with a dtype that cannot be cast to the one in `like` (`torch.can_cast`).
        RankFailedError: Another rank refused, failed, died, or did not call.

    Example:
        biases = hfshard.load_state_dict("out", keys="*bias", verify="full")
        average = hfshard.load_state_dict("checkpoint.pth.tar", key="model_ema")
        sharded = hfshard.load_state_dict("out", like=model.state_dict())  # on every rank
    """
    device = checked_device(device)
    if like is not None:
        check_like(like)
        if keys is not None or ranges:
            raise InvalidArgumentError("Cannot combine like= with keys= or ranges=True: it selects what is loaded.")
    if ranges and key is not None:
        raise InvalidArgumentError("Cannot combine key= with ranges=True: key= is for one file of torch.save.")
    signature = None if public_key is None else required_signature(public_key)
    if ranges and signature is not None:
        raise InvalidArgumentError("Cannot combine public_key with ranges=True: a signature covers complete files.")
    query = CheckpointQuery(
        variant=variant,
        use_safetensors=use_safetensors,
        subfolder=subfolder,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        files_of=_files_of(keys, like),
        needs_signature=signature is not None,
    )
    options = LoadOptions(
        verify=verify, read=read, disable_mmap=disable_mmap, progress=progress, key=key, signature=signature
    )
    source = CheckpointSource(checked_path_text(path), query, takes_files=True)
    if like is not None:
        with among(process_group):
            return load_like(source, like, device, options)
    if process_group is not None:
        check_process_group(process_group)
    local = source.find_local() if ranges and not local_files_only else None
    if ranges and not local_files_only and local is None:
        with open_source_by_ranges(source, options) as checkpoint:
            return read_tensors(checkpoint, keys, device, "pread")
    use = partial(read_tensors, keys=keys, device=device, read=options.read)
    return use_checkpoint(source, options, use, local)


def load_model(
    model: Any,
    path: str | os.PathLike[str],
    *model_args: Any,
    key: str | None = None,
    strict: bool | None = None,
    verify: Verify = "structure",
    public_key: str | os.PathLike[str] | SignedBy | None = None,
    read: ReadMode = "auto",
    progress: bool | None = None,
    output_loading_info: bool = False,
    parallelize: Callable[[Any], Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint into a module, or build a transformers model from it.

    Args:
        model: An `nn.Module` to load into, in place (also inside wrappers); or a class to build: one of transformers,
            concrete or Auto, or a plain module's class with the mixin. For a module with DTensors (fully_shard,
            parallelize_module), each rank reads its part: every rank of the default process group must call, and all
            load or none.
        path: A directory, a store, a repo of the Hub, or one file, as in `load_state_dict`. A class reads its config
            from the directory of the file, or from `config=`.
        key: As in `load_state_dict`.
        model_args: For a class: passed to its `from_pretrained`.
        strict: For a module, True (the default) rejects missing and unexpected names, False ignores them; shapes must
            agree, and at least one name must. For a class, None does as transformers, True rejects any difference. Two
            different tensors that a module ties are always rejected; a class unties them, as transformers does.
        verify, public_key, read: As in `load_state_dict`. With a public key, the checkpoint's code and config must be
            signed too, and are compared before they are read.
        progress: As in `load_state_dict`.
        output_loading_info: Return (model, {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"}).
        parallelize: For a class: a function that spreads the model over ranks (`fully_shard` ...) and returns it. It is
            called before the model has data; then each rank reads its parts. Weights that the checkpoint lacks are
            drawn on each rank: use the same seed. Every rank of the default process group must call, and all build the
            model or none.
        process_group: The group whose ranks must call; None: the default process group.
        kwargs: For a module: variant, subfolder, use_safetensors, revision, token, cache_dir, local_files_only. For a
            class: everything that its `from_pretrained` accepts.

    Returns:
        The model, or (model, info). For a class, names that shared a tensor when they were saved are one parameter. A
        module keeps its own parameters: those that it ties are one, and the others get a copy each.

    Raises:
        StateDictMismatchError: Names or shapes do not fit; nothing was assigned.
        RankFailedError: Another rank refused, failed, died, or did not call.
        Everything that `load_state_dict` raises. A module that is filled from a store, or spread over ranks, is half
        loaded if a read fails late or returns other bytes than were saved: load it again.

    Example:
        hfshard.load_model(model, "out")
        bert = hfshard.load_model(transformers.AutoModel, "bert")
    """
    if is_plain_class(model):
        if output_loading_info or key is not None:
            raise InvalidArgumentError(
                f"output_loading_info and key are not for {model.__name__}, a plain module. Build it, and load the "
                "weights into it: hfshard.load_model(module, path)."
            )
        given = {
            "strict": strict,
            "verify": verify,
            "public_key": public_key,
            "read": read,
            "progress": progress,
            "parallelize": parallelize,
            "process_group": process_group,
        }
        return model.from_pretrained(path, *model_args, **given, **kwargs)
    signature = None if public_key is None else required_signature(public_key)
    if not isinstance(model, nn.Module):
        from hfshard.models.build import load_class

        options = LoadOptions(
            strict=strict,
            verify=verify,
            read=read,
            disable_mmap=kwargs.get("disable_mmap"),
            progress=progress,
            parallelize=parallelize,
            key=key,
            signature=signature,
        )
        if output_loading_info:  # some classes check whether the argument is present, not whether it is true
            kwargs["output_loading_info"] = True
        with among(process_group):
            return load_class(model, path, model_args, kwargs, options)
    options = LoadOptions(strict=strict, verify=verify, read=read, progress=progress, key=key, signature=signature)
    if parallelize is not None:
        raise InvalidArgumentError(
            "parallelize is for a model class. Call the function with the module first: "
            "load_model(parallelize(module), path)."
        )
    if model_args:
        raise InvalidArgumentError("Positional arguments after the path are for a model class, not for a module.")
    reject_unknown_arguments(kwargs, _QUERY_ARGUMENTS, "load_model")
    query = CheckpointQuery(**kwargs, needs_signature=signature is not None)
    source = CheckpointSource(checked_path_text(path), query, takes_files=True)
    with among(process_group):
        info = _load_module(model, source, options)
    return (model, info) if output_loading_info else model


@wraps_os_errors("path")
def _load_module(model: nn.Module, source: CheckpointSource, options: LoadOptions) -> dict[str, Any]:
    if has_spread_state(model):
        return load_into_spread_module(model, source, options)
    info = use_checkpoint(source, options, partial(load_opened, model, options=options))
    refresh_masters(model)
    return info


def _files_of(keys: KeySelection | None, like: Mapping[str, torch.Tensor] | None) -> FilesOf | None:
    if like is not None:
        return lambda index: files_of_names(index, like.keys())
    return None if keys is None else lambda index: files_with_keys(index, keys)
