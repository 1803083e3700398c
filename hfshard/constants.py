"""Names and numbers of the package and the checkpoint format, each with its reason."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
"""The version of hfshard."""

FORMAT_VERSION: Final = 1
"""The version of hfshard's additions to an index or to a file's metadata."""

DEFAULT_MAX_SHARD_SIZE: Final = "5GB"
"""Small enough for one Hub upload to be retried, large enough that a 70B model has a few dozen files."""

DATA_ALIGNMENT: Final = 4096
"""Bytes (one page): a file's tensor data begin at a multiple of it, so that direct I/O and mmap can be used."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that the safetensors library reads (its MAX_HEADER_SIZE)."""

MAX_INDEX_BYTES: Final = 512 * 1024 * 1024
"""The largest index that hfshard reads or writes: four million tensors with entries of 120 bytes."""

MAX_CONFIG_BYTES: Final = 64 * 1024 * 1024
"""The largest config.json that hfshard reads: the largest known one (label maps of 20k classes) is under 2 MB."""

MAX_DIMENSIONS: Final = 1024
"""The most dimensions of a tensor: torch needs a quarter of a second to inspect one with 10,000; models have six."""

MAX_JSON_DEPTH: Final = 128
"""The most levels of nesting in JSON; an index or a header has four, and the deepest training state about 90."""

LFS_POINTER_MARK: Final = b"version https://git-lfs"
"""The beginning of the small text file that git leaves in place of a file that git-lfs has not fetched."""

COPY_BYTES: Final = 4 * 1024 * 1024
"""Bytes written, read or hashed at once: large enough for the disk, and a few of them stay under 64 MiB."""

FILES_AT_ONCE: Final = 8
"""Files written or hashed at once, with a few MiB each: more than most machines need, so that all cores stay busy to
the end even if the number of files is not a multiple of theirs."""

FINGERPRINT_BYTES: Final = 4096
"""The most bytes of each tensor that go into a file's `fingerprint`."""

FINGERPRINT_TENSORS: Final = 1024
"""The most tensors of a file that go into its `fingerprint`, evenly chosen."""

MAX_COMPANION_BYTES: Final = 256 * 1024 * 1024
"""The largest companion file that goes along with a checkpoint's weights: tokenizers have up to 35 MB."""

SAFETENSORS_SUFFIX: Final = ".safetensors"
BIN_SUFFIX: Final = ".bin"
WEIGHTS_SUFFIXES: Final = (
    SAFETENSORS_SUFFIX, BIN_SUFFIX, ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack",
    ".tflite", ".ot", ".pkl", ".mlmodel", ".mlpackage", ".npz", ".llamafile", ".engine", ".distcp",
)  # fmt: skip
"""Suffixes of files of weights, of any library, parts of ranks included: these don't go along with other weights, are
not downloaded with them, and keep the config next to them."""
HUB_MARKER: Final = "hfshard-hub.json"
"""The file that marks a directory as a hub: a directory without it is never treated as one."""
CONFIG_NAME: Final = "config.json"
GENERATION_CONFIG_NAME: Final = "generation_config.json"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
MANIFEST_NAME: Final = "checkpoint.json"
"""The manifest of a run checkpoint."""
TRAINING_STATE_NAME: Final = "training_state.json"
TRAINING_FILES: Final = frozenset({MANIFEST_NAME, TRAINING_STATE_NAME})
"""Files that make a folder a training checkpoint; no model needs them, so that a pull of the model leaves them out."""
MARKS: Final = ".saves"
"""The folder with the marks of saves, in a run in a store."""
README: Final = "README.md"
SIGNATURE_NAME: Final = "model.sig"
"""The OpenSSF Model Signing signature, over all files of its directory."""
INDEX_SUFFIX: Final = ".index.json"
WEIGHTS_OVERRIDE_KEY: Final = "transformers_weights"
"""The key of config.json that names the weights file that transformers loads before all others."""

METADATA_KEY: Final = "hfshard"
"""hfshard's key in an index's `metadata` and in a safetensors file's `__metadata__`."""

STAGING_DIRECTORY: Final = ".cache/huggingface/hfshard"
"""The directory in which a save writes before it commits: `upload_folder` and `snapshot_download` leave
`.cache/huggingface` alone, and no tool that globs `*.safetensors` sees an unfinished file."""

REPLACED_RETRIES: Final = 400
"""The number of times that a reader starts again because a save replaced the checkpoint."""

REPLACED_WAIT_SECONDS: Final = 0.005
"""Seconds between two such attempts."""

MIXIN_MARK: Final = "_is_hfshard_model"
"""The attribute with which `ShardedModelMixin` marks its subclasses; transformers' classes lack it."""
