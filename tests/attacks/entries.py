"""The ways into hfshard, and stock transformers' own, that an attacked checkpoint is loaded by."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

import hfshard
from hfshard.cli.main import main
from hfshard.format.index import Verify
from tests.attacks.target import TinyConfig, TinyGenerating, TinyModule, TinyPretrained, same, truth
from tests.attacks.watch import where

Result = dict[str, Any]


def _state_dict(path: Path, verify: Verify) -> Result:
    found = hfshard.load_state_dict(path, verify=verify)
    total = sum(tensor.float().abs().sum().item() for tensor in found.values())  # every byte is touched
    return {"truth": same(found, truth()), "total": total}


def _module(path: Path, verify: Verify) -> Result:
    module = TinyModule()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.fill_(number + 0.5)
    before = {name: (tensor, tensor.clone(), tensor.data_ptr()) for name, tensor in module.state_dict().items()}
    try:
        hfshard.load_model(module, path, verify=verify)
    except BaseException:
        after = module.state_dict()
        for name, (_, value, address) in before.items():
            if after[name].data_ptr() != address or not torch.equal(after[name], value):
                raise AssertionError(f"'{name}' was assigned before the load failed") from None
        raise
    return {"truth": same(module.state_dict(), truth())}


def _pretrained(kind: type[TinyPretrained], path: Path, verify: Verify) -> Result:
    return {"truth": same(hfshard.load_model(kind, path, verify=verify).state_dict(), truth())}


def _verify(path: Path, verify: Verify) -> Result:
    report = hfshard.verify_checkpoint(path, level="full" if verify == "full" else "structure")
    problems = [[str(problem.file), str(problem.message)] for problem in report.problems]
    return {"ok": report.ok, "problems": problems, "truth": True}


def _stock(path: Path, verify: Verify) -> Result:
    model: PreTrainedModel = TinyPretrained.from_pretrained(path)
    return {"truth": same(model.state_dict(), truth())}


def _save(path: Path, verify: Verify) -> Result:
    model = TinyPretrained(TinyConfig())
    model.load_state_dict(truth(3))
    hfshard.save_model(model, path, max_shard_size=4096 + 128)
    loaded = hfshard.load_model(TinyPretrained, path, verify="full")
    return {"truth": same(loaded.state_dict(), truth(3))}


def _reshard(path: Path, verify: Verify) -> Result:
    target = path.parent / "resharded"
    try:
        hfshard.reshard_checkpoint(path, target, 4096 + 128, follow_links=True)  # what all attacks could use
    except BaseException:
        if target.exists():
            raise AssertionError("something was written before the source was refused") from None
        raise
    return {"truth": same(hfshard.load_state_dict(target, verify="full"), truth())}


def _cli(path: Path, verify: Verify) -> Result:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        codes = [main(["inspect", "--tensors", str(path)]), main(["verify", str(path)])]
    return {"truth": False, "codes": codes, "text": out.getvalue()[-20_000:]}


def _careless(path: Path, verify: Verify) -> Result:
    """All that a load must never do, for the test of those who watch."""
    with safe_open(path / "../outside/model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    Path("/etc/hostname").read_bytes()
    os.system(f"touch {path.parent}/outside/executed")
    bytearray(b"x" * (300 << 20))
    return {"truth": same(found, truth())}


CALLS: dict[str, Callable[[Path, Verify], Result]] = {
    "state_dict": _state_dict,
    "module": _module,
    "pretrained": functools.partial(_pretrained, TinyPretrained),
    "generating": functools.partial(_pretrained, TinyGenerating),
    "verify": _verify,
    "stock": _stock,
    "save": _save,
    "reshard": _reshard,
    "cli": _cli,
    "careless": _careless,
}


def enter(entry: str, path: Path, verify: Verify) -> Result:
    """Load a checkpoint one way, and say in plain data what came of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"outcome": "returned", **CALLS[entry](path, verify)}
    except BaseException as error:
        ours = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "hfshard.errors"]
        return {
            "outcome": "raised",
            "type": type(error).__name__,
            "ours": ours,
            "message": str(error)[:20_000],
            "where": where(error),
        }
