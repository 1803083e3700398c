"""Which tests are run: of whose sources, which files, which names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Of transformers' common tests: those that save, load, tie, cast or initialize. The others only run a model.
_MODEL_TESTS: Final = (
    "all_tensors_are_parameter_or_buffer",
    "attn_implementation_composite_models",
    "base_model_prefix_loads_base_weights",
    "bc_torch_dtype",
    "can_be_initialized_on_meta",
    "can_init_all_missing_weights",
    "can_load_from_already_mapped_keys",
    "can_load_ignoring_mismatched_shapes",
    "can_load_with_device_context_manager",
    "can_load_with_global_device_set",
    "can_use_safetensors",
    "cannot_load_with_meta_device_context_manager",
    "correct_missing_keys",
    "cpu_offload",
    "disk_offload_bin",
    "disk_offload_safetensors",
    "from_pretrained_no_checkpoint",
    "init_weights_can_init_buffers",
    "internal_model_config_and_subconfig_are_same",
    "keep_in_fp32_modules",
    "keep_in_fp32_modules_exist",
    "load_contiguous_weights",
    "load_save_without_tied_weights",
    "load_with_mismatched_shapes",
    "model_weights_reload_no_missing_tied_weights",
    "reverse_loading_mapping",
    "save_load",
    "save_load_keys_to_ignore_on_save",
    "sdpa_can_dispatch_composite_models",
    "sdpa_can_dispatch_non_composite_models",
    "tied_weights_keys",
    "torch_save_load",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One set of tests, of one package's sources or our own."""

    name: str
    title: str
    """What the table calls it."""
    package: str | None
    """Whose source archive is unpacked; None: nobody's."""
    files: tuple[str, ...]
    """Of tests, below the sources; "own/..." are ours."""
    keep: str = ""
    """Regular expression of the ids that are run."""
    drop: str = ""
    """Regular expression of the ids that are not."""
    needs: tuple[str, ...] = ()
    """Packages that the tests import, beside hfshard's own requirements, as pip calls them."""
    our_mixin: bool = False
    """Whether hfshard's mixin stands in the place of huggingface_hub's, too."""
    has_hub: bool = False
    """Whether the tests get a Hub on loopback, with tiny random models under the names that they ask for."""


# Of PEFT's tests: those that load a model of transformers and save, merge or convert it. Each file has its names.
_PEFT_TESTS: Final = "|".join(
    (
        r"(low_level_api|mixed|other|helpers|integrations|hub_features|trainable_tokens|target_parameters|auto)\.py::",
        r"(decoder_models|feature_extraction_models|seq_classifier)\.py.*::test_"
        r"((save_pretrained|merge_layers|unload_adapter|get_base_model_state_dict|peft_model_device_map)"
        r"\[(LoraConfig|IA3Config)-|merge_and|load_model|save_pretrained_targeting)",
        r"initialization\.py.*(offline|low_cpu_mem|targets_head_and|warning_name|missing_keys)",
        r"tuners_utils\.py.*(tied|transformers|all_linear|automodel|realistic)",
    )
)
_PEFT_FILES: Final = (
    "auto",
    "decoder_models",
    "encoder_decoder_models",
    "feature_extraction_models",
    "helpers",
    "hub_features",
    "initialization",
    "integrations",
    "low_level_api",
    "mixed",
    "other",
    "seq_classifier",
    "target_parameters",
    "trainable_tokens",
    "tuners_utils",
)

SUITES: Final = {
    suite.name: suite
    for suite in (
        Suite(
            name="models",
            title="transformers' common tests of models, for 27 architectures",
            package="transformers",
            files=("own/architectures.py",),
            keep=f"::test_({'|'.join(_MODEL_TESTS)})$",
            needs=("parameterized",),
        ),
        Suite(
            name="modeling",
            title="what transformers' tests of `PreTrainedModel` check, written anew",
            package=None,
            files=("own/modeling_files.py", "own/modeling_models.py", "own/modeling_reports.py"),
        ),
        Suite(
            name="hub",
            title="what they check of pushing models and loading them from the Hub, written anew",
            package=None,
            files=("own/hub.py",),
            has_hub=True,
        ),
        Suite(
            name="trainer",
            title="what transformers' tests of Trainer's checkpoints check, written anew",
            package=None,
            files=("own/trainer.py",),
        ),
        Suite(
            name="peft",
            title="PEFT's tests on models of transformers",
            package="peft",
            files=tuple(f"tests/test_{name}.py" for name in _PEFT_FILES),
            keep=_PEFT_TESTS,
            drop="tiny-Llama4ForCausalLM-",  # a model that the Hub of these tests does not have
            needs=("parameterized", "diffusers", "datasets", "scipy", "attrs"),
            has_hub=True,
        ),
        Suite(
            name="accelerate",
            title="Accelerate's tests of loading, offloading and saving",
            package="accelerate",
            files=("tests/test_modeling_utils.py", "tests/test_big_modeling.py", "tests/test_accelerator.py"),
            keep="load|save|dispatch|offload|state_dict",
            needs=("parameterized", "torchdata"),
            has_hub=True,
        ),
        Suite(
            name="accelerate_loading",
            title="Accelerate loads what `save_pretrained` wrote, our own tests",
            package=None,
            files=("own/accelerate_loading.py",),
        ),
        Suite(
            name="hub_mixin",
            title="huggingface_hub's tests of `PyTorchModelHubMixin`, with `ShardedModelMixin` in its place",
            package="huggingface_hub",
            files=("tests/test_hub_mixin_pytorch.py",),
            needs=("pytest-mock",),
            our_mixin=True,
            has_hub=True,
        ),
    )
}
