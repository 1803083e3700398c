"""`ShardedModelMixin`: transformers models and plain modules that save and load themselves with hfshard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin

from hfshard._util.call_ranks import among
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.format.index import Checksum, Verify
from hfshard.models.patching import is_pretrained_class
from hfshard.models.plain_load import build_module, load_plain
from hfshard.models.plain_save import handle_plain_save, is_overridden, push_plain, reject_other_model, save_plain
from hfshard.places.source import CheckpointSource
from hfshard.saving.save_request import SaveOptions
from hfshard.shards.read_tensors import ReadMode
from hfshard.shards.shard_plan import Packing
from hfshard.signing.check_signature import required_signature
from hfshard.signing.signer import SignedBy


def _untyped(method: Any) -> Any:
    """Hide a method from the type checker, which forbids overriding upstream's methods with more arguments."""
    return method


class _TransformersOnly:
    """A method that the mixin adds to transformers models only; a plain module keeps its own, if it has one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if not is_pretrained_class(owner):
            return getattr(super(ShardedModelMixin, owner if instance is None else instance), self._name)
        from hfshard.models.transformers_methods import TransformersMethods

        method = vars(TransformersMethods)[self._name]
        if isinstance(method, classmethod):
            return MethodType(method.__func__, owner)
        return method if instance is None else MethodType(method, instance)


class ShardedModelMixin(PyTorchModelHubMixin):
    """Mixin for sharded, verified and crash-safe saves and loads; put it before the model's class.

        class Llama(ShardedModelMixin, LlamaForCausalLM): ...

        model = Llama.from_pretrained("org/repo")
        model.save_pretrained("out", max_shard_size="5GiB")

    Stock transformers loads what it writes, under transformers' class, and it loads what stock transformers writes.
    Trainer, `pipeline`, PEFT and diffusers also treat the subclass as that class, since it has the same `__name__`.

    A module of your own is saved as by huggingface_hub's `PyTorchModelHubMixin`, with the constructor's arguments in
    config.json and a model card. Class arguments (`library_name=`, `tags=`, `license=`, `repo_url=`, `coders=` ...) and
    overrides of `_save_pretrained` and `_from_pretrained` work the same. Each mixin loads what the other wrote, but the
    stock one reads single files only:

        class Net(ShardedModelMixin, nn.Module, license="mit"):
            def __init__(self, width: int = 8):
                super().__init__()
                self.layer = nn.Linear(width, width)

        Net(width=16).save_pretrained("net", max_shard_size="5GB")
        net = Net.from_pretrained("net")
    """

    _is_hfshard_model: ClassVar[bool] = True

    @_untyped
    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        *,
        packing: Packing = "greedy",
        checksum: Checksum | None = "sha256",
        process_group: dist.ProcessGroup | None = None,
        progress: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model durably, all or nothing, with transformers' arguments and a few more.

        Args:
            save_directory: A directory, created if missing, or a store address such as "s3://bucket/prefix". The
                existing checkpoint loads until the new one is complete.
            is_main_process: False saves nothing, unless every rank has a part of the model: then all must call.
            state_dict: Tensors to save instead of the model's own; not mutated.
            push_to_hub: Push the saved files; `kwargs` may contain `repo_id` and other arguments of `push_to_hub`. If
                each rank has a part of the model, all ranks must pass it.
            max_shard_size: Bytes, or "5GB", "500MiB" ...: the largest size of a file with more than one tensor.
            variant: Part of the files' names.
            token: For the Hub.
            save_peft_format, save_original_format, distributed_checkpoint: As in transformers; for its models only.
            packing: "greedy" (as transformers) or "balanced" (fewer files if possible, of similar size).
            checksum: "sha256", "xxh3" or None.
            process_group: The group whose ranks have parts of the model and call; None: the default group. See
                `save_state_dict`.
            progress: Whether to show a bar on stderr; None: only on a terminal.
            kwargs: `safe_serialization=True` and `save_function` of older code, and arguments of `push_to_hub`. For a
                plain module also `config` (a dict or dataclass, in place of the constructor's arguments) and
                `model_card_kwargs` (for the card's template; an existing README.md is kept).

        Returns:
            None; the Hub commit if a plain module is pushed.

        Raises:
            UnknownArgumentError: An unknown keyword; the message names the nearest one.
            Everything that `hfshard.save_model` raises.

        Example:
            bert.save_pretrained("out", max_shard_size="5GB")
        """
        options = SaveOptions(
            max_shard_size=max_shard_size,
            variant=variant,
            packing=packing,
            save_original_format=save_original_format,
            checksum=checksum,
            progress=progress,
        )
        given = {
            "is_main_process": is_main_process,
            "state_dict": state_dict,
            "push_to_hub": push_to_hub,
            "max_shard_size": max_shard_size,
            "variant": variant,
            "token": token,
            "save_peft_format": save_peft_format,
            "save_original_format": save_original_format,
            "distributed_checkpoint": distributed_checkpoint,
        }
        if is_pretrained_class(type(self)):
            from hfshard.models.saver import save_with_overrides
            from hfshard.models.transformers_methods import without_mixin

            with among(process_group):
                save_with_overrides(without_mixin(self), self, save_directory, {**kwargs, **given}, options)  # type: ignore[arg-type]
            return None
        reject_other_model(type(self), ShardedModelMixin)
        is_own = is_overridden(self, "_save_pretrained", ShardedModelMixin)
        with among(process_group):
            return save_plain(self, save_directory, options, given, kwargs, is_overridden=is_own)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Save a plain module's weights and what `save_pretrained` adds to them; an override may call it."""
        handle_plain_save(self, save_directory)

    @_untyped
    def push_to_hub(
        self,
        repo_id: str | os.PathLike[str],
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool | None = False,
        max_shard_size: int | str | None = DEFAULT_MAX_SHARD_SIZE,
        tags: list[str] | str | None = None,
        variant: str | None = None,
        path_in_repo: str = "",
        packing: Packing = "greedy",
        process_group: dist.ProcessGroup | None = None,
        card_picture: bool = False,
        progress: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push the model as one Hub commit, straight from memory, with transformers' arguments and a few more.

        Files that the hub already has are not sent. The same commit deletes the shards, indexes and pickles of the last
        push of this variant; everything else stays. Weights are written to disk, in a temporary directory, only for a
        model that only transformers can save (offloaded, with adapters), that is spread over ranks, or whose class has
        its own `save_pretrained` or `_save_pretrained`. If each rank has a part of the model, every rank must call, and
        only the first one contacts the hub.

        Args:
            repo_id: "org/name", created if missing, or the path or `file://` URL of a directory hub.
            commit_message, commit_description: For the commit.
            private: Whether a new repo is private.
            token: For the Hub; None: the saved one.
            revision: A branch, created if missing, or "refs/pr/N". None: main.
            create_pr: Open a pull request on main instead of pushing; cannot be combined with another revision.
            max_shard_size: As in `save_pretrained`, like variant, packing, process_group and progress.
            tags: For the model card, which is created if there is none.
            path_in_repo: Folder in the repo.
            card_picture: Show the checkpoint in the model card, as `hfshard.push_checkpoint` does.
            kwargs: For a plain module, as in huggingface_hub: `config`, `model_card_kwargs`, and `branch`, another name
                of `revision`.

        Returns:
            huggingface_hub's CommitInfo; for a directory, a PushResult; None on a rank that saves nothing.

        Raises:
            RankFailedError: Another rank failed, died, or never joined.
            Everything that `hfshard.push_checkpoint` raises.

        Example:
            bert.push_to_hub("./hub/bert")  # or "org/name"
        """
        saving = {"max_shard_size": max_shard_size, "variant": variant, "packing": packing, "progress": progress}
        pushing = {
            "commit_message": commit_message,
            "commit_description": commit_description,
            "private": private,
            "token": token,
            "revision": revision,
            "create_pr": bool(create_pr),
            "path_in_repo": path_in_repo,
            "card_picture": card_picture,
            "progress": progress,
        }
        if is_pretrained_class(type(self)):
            from hfshard.models.saver import push_pretrained_model

            with among(process_group):
                return push_pretrained_model(self, repo_id, tags, saving, pushing, kwargs)  # type: ignore[arg-type]
        reject_other_model(type(self), ShardedModelMixin)
        own = any(is_overridden(self, name, ShardedModelMixin) for name in ("save_pretrained", "_save_pretrained"))
        with among(process_group):
            return push_plain(self, repo_id, tags, saving, pushing, kwargs, is_overridden=own)

    @classmethod
    @_untyped
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        strict: bool | None = None,
        verify: Verify = "structure",
        public_key: str | os.PathLike[str] | SignedBy | None = None,
        read: ReadMode = "auto",
        progress: bool | None = None,
        parallelize: Callable[[Any], Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> Any:
        """Build the model from a checkpoint that is checked first, with transformers' arguments and a few more.

        Args:
            pretrained_model_name_or_path: A directory, a repo of the Hub, a store address, or one file of weights with
                the config next to it; None with `config` and `state_dict`.
            model_args: For the constructor of a transformers model.
            strict: True rejects missing, unexpected and mismatched names; None reports them, as transformers does.
                Either way it is an error if no name fits or, for a plain module, if a shape differs.
            verify: "none"; "structure" (names, sizes, headers, fingerprints); "full" or "sha256" (every byte).
            public_key: The file of a public key, or a `hfshard.signing.SignedBy`. Its owner must have signed every
                file that is read, including code and config (see `load_state_dict`).
            read: "auto", "mmap" or "pread": how bytes are read into memory (see `load_state_dict`).
            progress: Whether to show a bar on stderr while checksums are computed; None: only on a terminal.
            parallelize: A function that spreads the model over ranks (`fully_shard`, `parallelize_module` ...) and
                returns it. It is called before the model has data; then each rank reads its parts. Each rank
                initializes randomly what the checkpoint lacks: seed all ranks alike. With it, or with a
                `distributed_config` of several ranks, every rank of the default process group must call, and either
                all build the model or none. For transformers models only.
            process_group: The group whose ranks must call, instead of the default process group; with `parallelize`.
            kwargs: Everything that transformers' `from_pretrained` or an override of the class takes. For a plain
                module: revision, token, cache_dir, local_files_only, force_download, variant, subfolder, map_location,
                and constructor arguments in place of those in config.json. If the constructor has a parameter named
                verify, public_key, read, progress, parallelize, process_group, variant or subfolder, it gets the
                value.

        Returns:
            The model, in evaluation mode; with `output_loading_info=True`, (model, info).

        Raises:
            CheckpointNotFoundError, DamagedCheckpointError, UnsafePathError, UnsafePickleError: Before it is built.
            SignatureError: As in `load_state_dict`; no code of the checkpoint was run.
            RankFailedError: Another rank refused, failed, died, or never joined.
            InvalidArgumentError: `strict`, `verify` or `public_key` asks for a check, but an override builds the model
                by itself.
            StateDictMismatchError: No name fits, or `strict` and something differs.

        Example:
            bert = Bert.from_pretrained("bert", verify="full")
        """
        own: dict[str, Any] = {"verify": verify, "read": read, "progress": progress, "parallelize": parallelize}
        if not is_pretrained_class(cls):
            reject_other_model(cls, ShardedModelMixin)
            is_own = is_overridden(cls, "_from_pretrained", ShardedModelMixin)
            own |= {"strict": strict, "public_key": public_key, "process_group": process_group}
            path = pretrained_model_name_or_path
            return load_plain(cls, super(), path, model_args, kwargs, own, is_overridden=is_own)
        from hfshard.models.build import load_with_overrides
        from hfshard.models.transformers_methods import without_mixin

        own["signature"] = None if public_key is None else required_signature(public_key)
        options = LoadOptions(strict=strict, disable_mmap=kwargs.get("disable_mmap"), **own)
        start = without_mixin(cls)
        with among(process_group):
            return load_with_overrides(start, cls, pretrained_model_name_or_path, model_args, kwargs, options)  # type: ignore[arg-type]

    @classmethod
    @_untyped
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | os.PathLike[str] | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        map_location: str = "cpu",
        strict: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Build a plain module and load its weights; an override may call it."""
        query = CheckpointQuery(
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
        )
        return build_module(cls, CheckpointSource(model_id, query), model_kwargs, map_location, strict=strict)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Record a plain module's class arguments, or give a subclass of a transformers model that model's name.

        Raises:
            InvalidArgumentError: A transformers model comes before the mixin.
        """
        if not is_pretrained_class(cls):
            super().__init_subclass__(**kwargs)
            return
        from hfshard.models.transformers_methods import prepare_class, without_mixin

        without_mixin(cls).__init_subclass__(**kwargs)
        prepare_class(cls, ShardedModelMixin)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Record a plain module's constructor arguments for its config.json."""
        if not is_pretrained_class(cls):
            return super().__new__(cls, *args, **kwargs)
        from hfshard.models.transformers_methods import without_mixin

        make: Any = without_mixin(cls).__new__
        return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)

    if not TYPE_CHECKING:  # a type checker uses the module's
        _get_name = _TransformersOnly()
        is_custom_code = _TransformersOnly()
        _can_set_attn_implementation = _TransformersOnly()
        _can_set_experts_implementation = _TransformersOnly()
        post_init = _TransformersOnly()
        state_dict = _TransformersOnly()
