"""Random sequences of saves into one directory: each leaves exactly the last one, and what belongs to others."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import save_file

import hfshard
from hfshard.places.place import place_to_save
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveOptions, SaveRequest
from tests.helpers.tensor_bytes import assert_same

STRANGERS = {
    "README.md": b"# mine\n",
    "tokenizer.json": b"{}",
    "model_ema-00001-of-00002.safetensors": b"somebody else's average",
    "model-backup-00001-of-00002.safetensors": b"a copy that somebody made",
    "pytorch_model.ema.bin": b"another variant's",
    "adapter_model.safetensors": b"an adapter",
}
"""Files that look like ours to a glob, and are not."""

LIMITS = (1, 4096 + 40, 4096 + 100, 10**6)


def weights(generation: int, count: int) -> dict[str, torch.Tensor]:
    """Tensors of which some are the same in every generation, so that shards of two saves can be the same."""
    tensors = {f"layer.{i}.weight": torch.full((5,), float(i if i % 2 else 100 * generation)) for i in range(count)}
    return tensors | {"tied": tensors["layer.0.weight"]}


class SavesIntoOneDirectory(RuleBasedStateMachine):
    """Each rule is one save; the invariant looks at the directory after it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.last: dict[str | None, tuple[dict[str, torch.Tensor], set[str]]] = {}
        self.config: bytes | None = None
        self.configs: dict[str | None, bytes | None] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(before=st.sampled_from(("nothing", "stock single", "stock sharded", "bin")))
    def begin(self, before: str) -> None:
        for name, content in STRANGERS.items():
            (self.folder / name).write_bytes(content)
        a, b = {"a": torch.zeros(3)}, {"b": torch.ones(3)}
        if before == "stock single":
            save_file(a | b, self.folder / "model.safetensors", metadata={"format": "pt"})
        elif before == "stock sharded":
            files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
            save_file(a, self.folder / files[0], metadata={"format": "pt"})
            save_file(b, self.folder / files[1], metadata={"format": "pt"})
            index = {"metadata": {"total_size": 24}, "weight_map": {"a": files[0], "b": files[1]}}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        elif before == "bin":
            torch.save(a | b, self.folder / "pytorch_model.bin")

    @rule(
        generation=st.integers(0, 3),
        count=st.integers(1, 5),
        limit=st.sampled_from(LIMITS),
        packing=st.sampled_from(("greedy", "balanced")),
        checksum=st.sampled_from(("sha256", "xxh3", None)),
        config=st.sampled_from((None, b'{"n": 1}\n', b'{"n": 2}\n')),
    )
    def save(self, generation: int, count: int, limit: int, packing: str, checksum: str | None, config: bytes) -> None:
        self._save(None, weights(generation, count), limit, packing, checksum, config)

    @precondition(lambda self: self.last)
    @rule(generation=st.integers(0, 3), limit=st.sampled_from(LIMITS))
    def save_a_variant(self, generation: int, limit: int) -> None:
        self._save("fp16", weights(generation, 3), limit, "greedy", "sha256", self.config)

    @precondition(lambda self: None in self.last)
    @rule(limit=st.sampled_from(LIMITS))
    def save_the_same_again(self, limit: int) -> None:
        self._save(None, self.last[None][0], limit, "greedy", "sha256", self.config)

    @precondition(lambda self: None in self.last)
    @rule(index=st.booleans())
    def a_killed_save_left_wrecks(self, index: bool) -> None:
        name = "model-hfshard-0123456789abcdef.safetensors" + (".index.json" if index else "")
        (self.folder / name).write_bytes(b"cut sh")
        staging = self.folder / ".cache/huggingface/hfshard"
        staging.mkdir(parents=True, exist_ok=True)
        (staging / "00000.weights").write_bytes(b"cut short")
        self._save(None, *self._again())

    def _again(self) -> tuple[dict[str, torch.Tensor], int, str, str, bytes | None]:
        return self.last[None][0], 4096 + 40, "balanced", "sha256", self.config

    def _save(
        self,
        variant: str | None,
        state_dict: dict[str, torch.Tensor],
        limit: int,
        packing: str,
        checksum: str | None,
        config: bytes | None,
    ) -> None:
        options = SaveOptions(max_shard_size=limit, variant=variant, packing=packing, checksum=checksum)  # type: ignore[arg-type]
        kept = {name: tensor for name, tensor in state_dict.items() if name != "tied"}
        tied_names = {"tied": "layer.0.weight"}
        request = SaveRequest(tensors=kept, options=options, tied_names=tied_names, config=config)
        index = save_request(request, place_to_save(self.folder))
        files = set(index.weight_map.values())
        planned = {name for name in index.files if name.endswith(".safetensors")}
        self.last[variant] = (state_dict, files | planned | ({options.names.index} if len(planned) > 1 else set()))
        self.configs[variant] = config
        self.config = config if config is not None else self.config

    @invariant()
    def the_directory_holds_the_last_saves_and_what_others_put_there(self) -> None:
        if None not in self.last:
            return
        expected = set(STRANGERS) | {name for _, files in self.last.values() for name in files}
        assert {path.name for path in self.folder.iterdir()} == expected | ({"config.json"} if self.config else set())
        for name, content in STRANGERS.items():
            assert (self.folder / name).read_bytes() == content
        if self.config:
            assert (self.folder / "config.json").read_bytes() == self.config
        for variant, (state_dict, _) in self.last.items():
            loaded = hfshard.load_state_dict(self.folder, variant=variant)
            assert_same(loaded, state_dict)
            assert loaded["tied"] is loaded["layer.0.weight"]
            problems = hfshard.verify_checkpoint(self.folder, variant=variant, level="full").problems
            # A save of the weights beside these may have changed it: right, while that save's own record stands.
            changed = self.configs[variant] is not None and self.config not in self.configs.values()
            assert {Path(problem.file).name for problem in problems} == ({"config.json"} if changed else set())


SavesIntoOneDirectory.TestCase.settings = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=12,
    stateful_step_count=10,
    suppress_health_check=list(HealthCheck),
)
TestSavesIntoOneDirectory = SavesIntoOneDirectory.TestCase
