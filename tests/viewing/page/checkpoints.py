"""Checkpoints to make pages of, without their tensors: a small one, one that attacks, one of many tensors."""

from __future__ import annotations

from functools import cache

from hfshard.format.index import FileDigest
from hfshard.viewing.page.checkpoint_page import make_checkpoint_page
from hfshard.viewing.page.page import render_page
from hfshard.viewing.results import FileEntry, Inspection, TensorEntry
from hfshard.viewing.tensor_values import MOST_TENSORS, MeasuredValues, ValueSummary

HOSTILE_NAMES = (
    "</script><script>window.attacked=1</script>",
    "<img src=x onerror=window.attacked=1>.weight",
    '"\' onmouseover="window.attacked=1',
    "__proto__.attacked",
    "constructor.prototype.attacked",
    "hasOwnProperty.weight",
    "a\u202egnp.exe",
    "\u05e9\u05dc\u05d5\u05dd.weight",
    "line\u2028and\u2029line\n\x1b[31m",
    "{{ 7 * 7 }}{% raw %}",
    "&amp;<!--",
    "x" * 10_000,
    ".".join("d" * 5_000),
    "",
    "a",
    "a.b",
    "a..b",
)


def inspection_of(
    tensors: list[TensorEntry],
    *,
    tied_names: dict[str, str] | None = None,
    metadata: dict[str, object] | None = None,
    place: str = "/models/one",
    signature: str | None = None,
) -> Inspection:
    """What would be found in a checkpoint with these tensors."""
    files: dict[str, list[TensorEntry]] = {}
    for tensor in tensors:
        files.setdefault(tensor.file, []).append(tensor)
    digest = FileDigest(xxh3="0123456789abcdef")
    return Inspection(
        place=place,
        directory=place,
        entry="model.safetensors.index.json",
        files=tuple(
            FileEntry(name, 4096 + sum(tensor.nbytes for tensor in held), len(held), digest)
            for name, held in files.items()
        ),
        key=None,
        tensors=tuple(tensors),
        tied_names=tied_names or {},
        metadata=metadata or {},
        is_verifiable=True,
        signature=signature,
    )


def tensor(name: str, *shape: int, dtype: str = "F32", file: str = "model-00001-of-00002.safetensors") -> TensorEntry:
    """A tensor of 4 bytes an element, or 2 of BF16."""
    nbytes = 2 if dtype == "BF16" else 4
    for size in shape:
        nbytes *= size
    return TensorEntry(name, dtype, shape, nbytes, file)


def small_checkpoint() -> Inspection:
    """Twelve layers of 5,200 bytes, an embedding of 40,000 in another file, and a tied head."""
    layers = [
        entry
        for number in range(12)
        for entry in (
            tensor(f"model.layers.{number}.attn.weight", 20, 30, file="model-00002-of-00002.safetensors"),
            tensor(f"model.layers.{number}.mlp.weight", 35, 40, dtype="BF16", file="model-00002-of-00002.safetensors"),
        )
    ]
    return inspection_of(
        [tensor("model.embed.weight", 100, 100), *layers],
        tied_names={"lm_head.weight": "model.embed.weight"},
        metadata={"format": "pt", "note": {"by": "tests"}},
    )


def hostile_checkpoint() -> Inspection:
    """Every name that attacks, as the name of a tensor, of a tied name, of a file and in the metadata."""
    tensors = [
        tensor(name, 100 + number, file=name[:50] or "model.safetensors") for number, name in enumerate(HOSTILE_NAMES)
    ]
    return inspection_of(
        tensors,
        tied_names={f"{name}.tied": name for name in HOSTILE_NAMES},
        metadata={name[:50]: name for name in HOSTILE_NAMES},
        place="</title><script>window.attacked=1</script>",
    )


def large_checkpoint(layers: int) -> Inspection:
    """A thousand tensors a layer: 333 experts of three, and a norm."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
        for layer in range(layers)
        for expert in range(333)
        for kind in ("gate_proj", "up_proj", "down_proj")
    ]
    names += [f"model.layers.{layer}.input_layernorm.weight" for layer in range(layers)]
    return inspection_of(
        [
            tensor(name, 7168, 2048, dtype="BF16", file=f"model-{number // 250 + 1:05}-of-00400.safetensors")
            for number, name in enumerate(names)
        ]
    )


@cache
def large_page(layers: int) -> str:
    """Its page, with the numbers of as many tensors as are read; in each, every bin has a height."""
    found = large_checkpoint(layers)
    numbers = ValueSummary(
        elements=14_680_064,
        nan=1_234_567,
        inf=1_234_567,
        minimum=-1.23456e-30,
        maximum=1.23456e30,
        mean=-1.23456e-10,
        std=1.23456e-10,
        low=-1.23456e-30,
        high=1.23456e30,
        bins=tuple(range(1_000, 1_064)),
    )
    names = [tensor.name for tensor in found.largest(MOST_TENSORS)]
    measured = MeasuredValues(dict.fromkeys(names, numbers), len(found.tensors) - len(names), 0)
    return render_page(make_checkpoint_page(found, None, measured))
