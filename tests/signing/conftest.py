"""Keys and signed checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import hfshard


@dataclass(frozen=True)
class Keys:
    """Files of two key pairs: the signer's, and another's."""

    private: Path
    public: Path
    other_private: Path
    other_public: Path


def write_pair(folder: Path, name: str, password: bytes | None = None) -> tuple[Path, Path]:
    """Make a pair of P-256 keys."""
    key = ec.generate_private_key(ec.SECP256R1())
    how = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    return Keys(*write_pair(folder, "mine"), *write_pair(folder, "other"))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Three tensors that a save with max_shard_size=500 puts into three files."""
    return {name: torch.full((64,), float(value)) for value, name in enumerate("abc")}


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of three shards, with a config, a tokenizer and code beside it; not signed."""
    directory = tmp_path / "out"
    hfshard.save_state_dict(tensors, directory, max_shard_size=500)
    (directory / "config.json").write_text('{"model_type": "bert"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "modeling_mine.py").write_text("x = 1\n")
    (directory / "README.md").write_text("# Mine\n")
    return directory


@pytest.fixture
def signed(checkpoint: Path, keys: Keys) -> Path:
    """The same, signed."""
    hfshard.sign_checkpoint(checkpoint, private_key=keys.private)
    return checkpoint
