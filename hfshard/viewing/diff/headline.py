"""What differs between two checkpoints, in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from hfshard.viewing.adapters_in_words import adapter_in_words, is_wrapping
from hfshard.viewing.diff.renames import rename_rules
from hfshard.viewing.diff.report import CheckpointDiff, DiffKind, TensorDiff
from hfshard.viewing.layers import is_number, split_name
from hfshard.viewing.parts_in_words import describe_tensors, join_words, short_name

_HEADS: Final = frozenset(
    {"classification_head", "classifier", "cls", "embed_out", "fc", "head", "heads", "lm_head", "logits"}
    | {"output_projection", "qa_outputs", "score"}
)
"""What architectures call the part that is made for a task."""
_FEW: Final = 10
"""A tenth of all: if less than that has not changed, the sentence names it in place of what has."""


def headline(found: CheckpointDiff) -> str:
    """Say in one sentence what differs, and where.

    Args:
        found: By `diff_checkpoints`.

    Returns:
        A sentence with names from the checkpoints in it, which are to be escaped where it is shown.
    """
    by_kind: dict[DiffKind, list[TensorDiff]] = {}
    for tensor in found.tensors:
        by_kind.setdefault(tensor.kind, []).append(tensor)
    if set(by_kind) <= {"only_in_a", "only_in_b"} and by_kind:
        return _capitalized(_nothing_in_common(by_kind))
    clauses = [clause(by_kind[kind], found) for kind, clause in _CLAUSES.items() if kind in by_kind]
    if found.retied:
        clauses.append(f"tied to other tensors: {_some(found.retied)}")
    if not clauses:
        if not found.tensors:
            return "Both are empty."
        return f"The same {_count(len(found.tensors))}{_files_text(found)}."
    if set(by_kind) - {"same"} == {"renamed"} and len(clauses) == 1 and "same" not in by_kind:
        return f"The same {_count(len(found.tensors))} under other names: {_names_text(by_kind['renamed'])}."
    ending = _ending(by_kind, clauses)
    return f"{_capitalized('; '.join(clauses))}{ending}."


def _nothing_in_common(by_kind: dict[DiffKind, list[TensorDiff]]) -> str:
    texts = []
    for side, tensors in (("A", by_kind.get("only_in_a", [])), ("B", by_kind.get("only_in_b", []))):
        names = [tensor.name for tensor in tensors]
        if not names:
            continue
        adapter = adapter_in_words(names, is_alone=True)
        count = _count(len(names))
        texts.append(f"{count} only in {side}" if adapter is None else f"{side} is an {adapter}: {count}")
    return f"no tensor in common; {'; '.join(texts)}."


def _changed(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    shared = [tensor for tensor in found.tensors if tensor.kind not in ("only_in_a", "only_in_b")]
    count = f"{len(tensors):,} of {_count(len(shared))}"
    names = {tensor.name for tensor in tensors}
    others = [tensor.name for tensor in shared if tensor.name not in names]
    if not others:
        one = "the only tensor" if len(found.tensors) == 1 else "the one tensor in both"
        return f"{one if len(shared) == 1 else f'all {_count(len(shared))}'} changed"
    every = [tensor.name for tensor in shared]
    if len(others) * _FEW <= len(shared) and len(others) == found.counts.get("same", 0):
        return f"all but {describe_tensors(others, every)} changed: {count}"
    adapter = adapter_in_words(names, is_alone=False)
    where = describe_tensors(names, every) if adapter is None else f"the {adapter}"
    if all(map(_is_head, names)):
        where = f"the head ({where})"
    if len(others) == found.counts.get("same", 0):
        return f"only {where} changed: {count}"
    return f"{count} changed: {where}"


def _cast(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    dtypes = Counter((tensor.a.dtype, tensor.b.dtype) for tensor in tensors if tensor.a and tensor.b)
    text = join_words([f"from {short_name(a)} to {short_name(b)}" for (a, b), _ in dtypes.most_common(3)])
    left = [
        tensor for tensor in found.tensors if tensor.kind == "same" and tensor.b and tensor.b.dtype in _sources(dtypes)
    ]
    if not left and len(tensors) + found.counts.get("same", 0) == len(found.tensors):
        return f"cast {text}"
    every = [tensor.name for tensor in found.tensors]
    where = describe_tensors({tensor.name for tensor in tensors}, every)
    return f"{len(tensors):,} of {_count(len(every))} cast {text} ({where})"


def _sources(dtypes: Counter[tuple[str, str]]) -> set[str]:
    return {a for a, _ in dtypes}


def _reshaped(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    return f"{_count(len(tensors))} in another shape ({_where(tensors, found)})"


def _renamed(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    return f"{_count(len(tensors))} renamed: {_names_text(tensors)}"


def _only_in_a(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    return _only_in("A", tensors, found)


def _only_in_b(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    return _only_in("B", tensors, found)


def _only_in(side: str, tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    adapter = adapter_in_words([tensor.name for tensor in tensors], is_alone=True)
    if adapter is not None:
        return f"{side} has an {adapter}: {_count(len(tensors))}"
    return f"{_count(len(tensors))} only in {side} ({_where(tensors, found)})"


_CLAUSES: Final[dict[DiffKind, Callable[[Sequence[TensorDiff], CheckpointDiff], str]]] = {
    "changed": _changed,
    "cast": _cast,
    "reshaped": _reshaped,
    "renamed": _renamed,
    "only_in_a": _only_in_a,
    "only_in_b": _only_in_b,
}


def _ending(by_kind: dict[DiffKind, list[TensorDiff]], clauses: Sequence[str]) -> str:
    """What is true of the rest."""
    if len(clauses) > 1 or clauses[0].startswith(("only", "the o", "all")):
        return ""
    if clauses[0].startswith("cast "):
        return ", nothing else"
    return "; the rest is the same" if "same" in by_kind else ""


def _where(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    return describe_tensors({tensor.name for tensor in tensors}, [tensor.name for tensor in found.tensors])


def _names_text(renamed: Sequence[TensorDiff]) -> str:
    pairs = [(tensor.a.name, tensor.b.name) for tensor in renamed if tensor.a and tensor.b]
    if is_wrapping(pairs):
        return "with what PEFT puts into names"
    if is_wrapping((old, new) for new, old in pairs):
        return "without what PEFT puts into names"
    rules = rename_rules(pairs)
    texts = [rule.as_text() for rule, _ in rules[:2]]
    more = len(rules) - len(texts)
    return "; ".join(texts) + (f"; and {more} more ways" if more else "")


def _files_text(found: CheckpointDiff) -> str:
    """How the files differ that hold the same tensors; "" where they don't."""
    files_a = {tensor.a.file for tensor in found.tensors if tensor.a}
    files_b = {tensor.b.file for tensor in found.tensors if tensor.b}
    if all(tensor.a and tensor.b and tensor.a.file == tensor.b.file for tensor in found.tensors):
        return ""
    if len(files_a) != len(files_b):
        return f", in {_count(len(files_b), 'file')} instead of {len(files_a):,}"
    return ", in other files"


def _is_head(name: str) -> bool:
    """Whether a tensor lies in a head, and in no layer."""
    parts = split_name(name)
    return not _HEADS.isdisjoint(parts[:2]) and not any(map(is_number, parts[:2]))


def _some(names: Sequence[str]) -> str:
    shown = [short_name(name) for name in names[:3]]
    return join_words(shown if len(names) <= 3 else [*shown, f"{len(names) - 3:,} more"])


def _count(number: int, noun: str = "tensor") -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
