"""`ShardedModelMixin`: a transformers model that saves and loads itself with hfshard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import InvalidArgumentError
from hfshard.loading.options import LoadOptions
from hfshard.planning.plan import Packing
from hfshard.pretrained.build import load_through
from hfshard.pretrained.class_alias import (
    architecture_of,
    delegate_to_base,
    record_architecture,
    record_in_adapters,
    take_name,
)
from hfshard.pretrained.pusher import push_pretrained_model
from hfshard.pretrained.saver import save_through
from hfshard.saving.options import SaveOptions
from hfshard.storage.checkpoint.checkpoint import Verify
from hfshard.storage.format.integrity import Checksum
from hfshard.storage.weights.tensor_reader import ReadMode


def _untyped(method: Any) -> Any:
    """Hide the method from the type checker, to which transformers' wrapped method can't be overridden."""
    return method


def _refuse_other_model(model_class: type) -> None:
    """Refuse a class of another library (diffusers ...): its config would not be saved with the weights."""
    if not issubclass(model_class, PreTrainedModel):
        raise InvalidArgumentError(
            f"{model_class.__name__} is not a transformers model, and ShardedModelMixin knows no other config. Take "
            "the mixin away; save the weights with hfshard.save_model(model, directory), and load them into a module "
            "that you have built with hfshard.load_model(module, directory). Its config is saved by its own class."
        )


class ShardedModelMixin:
    """Put it before the model's class, and the model is saved sharded, verified and crash-safe.

        class Llama(ShardedModelMixin, LlamaForCausalLM): ...

        model = Llama.from_pretrained("org/repo")
        model.save_pretrained("out", max_shard_size="5GiB")

    What it writes loads in stock transformers, under transformers' class; it loads what stock transformers writes.
    Trainer, `pipeline`, PEFT and diffusers take the subclass for that class too: it has its `__name__`.
    """

    _is_hfshard_model: ClassVar[bool] = True

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
        progress: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model, durably and all or nothing; with the arguments of transformers, and a few more.

        Args:
            save_directory: Created if it is missing. The checkpoint that is there loads until the new one is complete.
            is_main_process: False saves nothing, unless every rank has a part of the model: then all must call.
            state_dict: What to save in place of the model's own; not mutated.
            push_to_hub: Push what was saved; `kwargs` may hold `repo_id` and other arguments of `push_to_hub`. Where
                each rank has a part of the model, all must ask for it.
            max_shard_size: Bytes, or "5GB", "500MiB" ...: the most that a file has, unless it holds one tensor.
            variant: Part of the files' names.
            token: For the Hub.
            save_peft_format, save_original_format, distributed_checkpoint: As in transformers.
            packing: "greedy" (as transformers) or "balanced" (fewer where it can, of similar size).
            checksum: "sha256", "xxh3" or None.
            progress: Whether to show a bar on stderr; None: only on a terminal.
            kwargs: `safe_serialization=True` and `save_function` of older code, and arguments of `push_to_hub`.

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
        _refuse_other_model(type(self))
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
        save_through(super(), self, save_directory, {**kwargs, **given}, options)  # type: ignore[arg-type]

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
        create_pr: bool = False,
        max_shard_size: int | str | None = DEFAULT_MAX_SHARD_SIZE,
        tags: list[str] | str | None = None,
        variant: str | None = None,
        path_in_repo: str = "",
        packing: Packing = "greedy",
        progress: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push the model as one Hub commit, straight from memory; with the arguments of transformers, and a few more.

        Files that the hub has are not sent; the same commit deletes the shards, indexes and pickles of the last push of
        this variant, everything else stays. Nothing is written to disk, except for a model that only transformers can
        save (offloaded, with adapters), that is spread over ranks, or whose class has a `save_pretrained` of its own:
        these go by way of a temporary directory. Where each rank has a part of the model, every rank must call, and
        rank 0 alone speaks to the hub.

        Args:
            repo_id: "org/name", created if it is missing; or a path or `file://` URL of a directory hub.
            commit_message, commit_description: Of the commit.
            private: Whether a repo that is created is private.
            token: None: the saved one.
            revision: A branch, created if it is missing, or "refs/pr/N". None: main.
            create_pr: Open a pull request on main in place of pushing; not together with another revision.
            max_shard_size: As in `save_pretrained`, and so are variant, packing and progress.
            tags: Of the model card, which is created if there is none.
            path_in_repo: Folder of the repo.

        Returns:
            huggingface_hub's CommitInfo; for a directory, a PushResult; None on a rank that saves nothing.

        Raises:
            RankFailedError: Another rank failed, died, or did not come.
            Everything that `hfshard.push_checkpoint` raises.

        Example:
            bert.push_to_hub("./hub/bert")  # or "org/name"
        """
        _refuse_other_model(type(self))
        saving = {"max_shard_size": max_shard_size, "variant": variant, "packing": packing, "progress": progress}
        pushing = {
            "commit_message": commit_message,
            "commit_description": commit_description,
            "private": private,
            "token": token,
            "revision": revision,
            "create_pr": create_pr,
            "path_in_repo": path_in_repo,
            "progress": progress,
        }
        return push_pretrained_model(self, repo_id, tags, saving, pushing, kwargs)  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        strict: bool | None = None,
        verify: Verify = "structure",
        read: ReadMode = "auto",
        progress: bool | None = None,
        parallelize: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Build the model from a checkpoint that is checked first; with the arguments of transformers, and a few more.

        Args:
            pretrained_model_name_or_path: A directory, or a repo of the Hub; None with `config` and `state_dict`.
            model_args: For the model's constructor.
            strict: True refuses missing, unexpected and mismatched names; None reports them, as transformers does.
                It is an error in either case if no name fits.
            verify: "none"; "structure" (names, sizes, headers, fingerprints); "full" or "sha256" (every byte).
            read: "auto", "mmap" or "pread": how the bytes come into memory (see `load_state_dict`).
            progress: Whether to show a bar on stderr while checksums are computed; None: only on a terminal.
            parallelize: A function that spreads the model over ranks (`fully_shard`, `parallelize_module` ...) and
                returns it. It is called before the model has data; then each rank reads its parts. What the
                checkpoint lacks is drawn on each rank: seed them alike. With it, or with a `distributed_config` of
                several ranks, every rank of the default process group must call, and all build the model or none.
            kwargs: Everything that transformers' `from_pretrained` takes, and an override of the class.

        Returns:
            The model, in evaluation mode; with `output_loading_info=True`, (model, info).

        Raises:
            CheckpointNotFoundError, DamagedCheckpointError, UnsafePathError, UnsafePickleError: Before it is built.
            RankFailedError: Another rank refused, failed, died, or did not come.
            InvalidArgumentError: `strict` or `verify` asks for a check, and an override builds the model by itself.
            StateDictMismatchError: No name fits, or `strict` and something differs.

        Example:
            bert = Bert.from_pretrained("bert", verify="full")
        """
        _refuse_other_model(cls)
        options = LoadOptions(
            strict=strict,
            verify=verify,
            read=read,
            disable_mmap=kwargs.get("disable_mmap"),
            progress=progress,
            parallelize=parallelize,
        )
        return load_through(super(), cls, pretrained_model_name_or_path, model_args, kwargs, options)  # type: ignore[arg-type]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse the wrong order of bases, in which transformers' own methods would come first; take the class's name.

        Raises:
            InvalidArgumentError: A transformers model stands before the mixin.
        """
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if PreTrainedModel in order and order.index(PreTrainedModel) < order.index(ShardedModelMixin):
            raise InvalidArgumentError(
                f"class {cls.__name__}: put ShardedModelMixin before the model's class, "
                "or transformers saves and loads it: class Mine(ShardedModelMixin, TheModel): ..."
            )
        take_name(cls)

    # Where transformers and others go by a class's name or module, they get those of transformers' class.

    def _get_name(self) -> str:
        # Trainer shifts labels for the names of causal language models, under FSDP2 too.
        return architecture_of(type(self)).__name__

    @classmethod
    def is_custom_code(cls) -> bool:
        """Whether transformers' class is custom code; that a subclass adds the mixin does not make it so."""
        return delegate_to_base(cls, ShardedModelMixin, "is_custom_code")

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return delegate_to_base(cls, ShardedModelMixin, "_can_set_attn_implementation")

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return delegate_to_base(cls, ShardedModelMixin, "_can_set_experts_implementation")

    def post_init(self) -> None:
        """Finish the model's constructor as transformers does, and let other libraries record transformers' class."""
        record_architecture(self)
        super().post_init()  # type: ignore[misc]

    @_untyped
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collect the tensors as torch does; PEFT, which may have been imported just now, asks for them on saving."""
        record_in_adapters()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]
