"""Names and numbers of the package and of the checkpoint format, each with its reason."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
"""Of hfshard."""

FORMAT_VERSION: Final = 1
"""The version of what hfshard adds to an index or to a file's metadata."""

DEFAULT_MAX_SHARD_SIZE: Final = "5GB"
"""Small enough for one Hub upload to be retried, large enough that a 70B model has a few dozen files."""

DATA_ALIGNMENT: Final = 4096
"""Bytes: the tensor data of a file begin at a multiple of it, a page, so that direct I/O and mmap can be used."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that the safetensors library reads (its MAX_HEADER_SIZE)."""

MAX_INDEX_BYTES: Final = 512 * 1024 * 1024
"""The largest index that we read or write: four million tensors of 120 bytes an entry."""

MAX_CONFIG_BYTES: Final = 64 * 1024 * 1024
"""The largest config.json that we read: the largest known (label maps of 20k classes) is under 2 MB."""

MAX_DIMENSIONS: Final = 1024
"""Dimensions of a tensor: torch needs a quarter of a second to look at one with 10,000, and models have six."""

MAX_JSON_DEPTH: Final = 64
"""Levels of nesting that an index or header may have; real ones have four."""

LFS_POINTER_MARK: Final = b"version https://git-lfs"
"""The beginning of the small text file that git leaves in place of a file that git-lfs did not fetch."""

COPY_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are written, read or hashed at once: large for the disk, and a few of them stay under 64 MiB."""

FILES_AT_ONCE: Final = 8
"""Files that are written or hashed at once, with a few MiB each. More than most machines need to be busy, so that the
cores are busy to the end if the number of files is not a multiple of theirs."""

FINGERPRINT_BYTES: Final = 4096
"""Bytes of each tensor that go into a file's `fingerprint`."""

FINGERPRINT_TENSORS: Final = 1024
"""The most tensors of a file that go into its `fingerprint`, evenly chosen."""

MAX_COMPANION_BYTES: Final = 256 * 1024 * 1024
"""The largest file beside the weights that goes along with a checkpoint: tokenizers have up to 35 MB."""

SAFETENSORS_SUFFIX: Final = ".safetensors"
BIN_SUFFIX: Final = ".bin"
WEIGHTS_SUFFIXES: Final = (
    SAFETENSORS_SUFFIX, BIN_SUFFIX, ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack",
    ".tflite", ".ot", ".pkl", ".mlmodel", ".mlpackage", ".npz", ".llamafile", ".engine",
)  # fmt: skip
"""Suffixes of files that hold weights, of any library."""
HUB_MARKER: Final = "hfshard-hub.json"
"""The file that marks a directory as a hub: a directory without it is never taken for one."""
CONFIG_NAME: Final = "config.json"
GENERATION_CONFIG_NAME: Final = "generation_config.json"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
MANIFEST_NAME: Final = "checkpoint.json"
"""The manifest of a checkpoint of a run."""
MARKS: Final = ".saves"
"""The folder of a run in a store that has the marks of saves."""
README: Final = "README.md"
SIGNATURE_NAME: Final = "model.sig"
"""The file of an OpenSSF Model Signing signature, over all files of the directory that it lies in."""
INDEX_SUFFIX: Final = ".index.json"
WEIGHTS_OVERRIDE_KEY: Final = "transformers_weights"
"""The key of config.json by which transformers is told which weights file to load before all others."""

METADATA_KEY: Final = "hfshard"
"""Our key in an index's `metadata` and in a safetensors file's `__metadata__`."""

STAGING_DIRECTORY: Final = ".cache/huggingface/hfshard"
"""Where a save writes before it commits: `upload_folder` and `snapshot_download` leave `.cache/huggingface` alone,
and no tool that globs `*.safetensors` sees an unfinished file."""

CHANGED_RETRIES: Final = 400
"""Times that a reader starts again when a save replaces the checkpoint meanwhile."""

CHANGED_WAIT_SECONDS: Final = 0.005
"""Seconds between two such tries."""

MIXIN_MARK: Final = "_is_hfshard_model"
"""The attribute by which `ShardedModelMixin` marks its subclasses; transformers' classes lack it."""
