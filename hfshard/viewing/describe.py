"""Describe the differences between two checkpoints in one sentence: parts of the model, layers and names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from hfshard._util.text import count_of, format_size
from hfshard.viewing.module_tree import (
    HEADS,
    LayerStack,
    common_length,
    fold_names,
    fold_rows,
    is_number,
    layer_grid,
    number_ranges,
    split_name,
    without_numbers,
)
from hfshard.viewing.results import CheckpointDiff, DiffKind, TensorDiff

_FEW: Final = 10
"""A tenth of all: if at most that many are unchanged, the sentence names those instead of the changed ones."""


def headline(found: CheckpointDiff, since: str = "") -> str:
    """Describe in one sentence what differs, and where.

    Args:
        found: The result of `diff_checkpoints`.
        since: The beginning of the sentence, such as "From step 100 to step 200"; "": none.

    Returns:
        A sentence that contains names from the checkpoints, which must be escaped where it is shown.
    """
    text = _of_adapter(found, found.merged) if found.merged is not None else _differences(found)
    if not since:
        return text[:1].upper() + text[1:]
    return f"{since}, nothing changed: {text}" if found.is_same else f"{since}, {text}"


def _differences(found: CheckpointDiff) -> str:
    by_kind: dict[DiffKind, list[TensorDiff]] = {}
    for tensor in found.tensors:
        by_kind.setdefault(tensor.kind, []).append(tensor)
    if set(by_kind) <= {"only_in_a", "only_in_b"} and by_kind:
        return _nothing_in_common(by_kind)
    clauses = [clause(by_kind[kind], found) for kind, clause in _CLAUSES.items() if kind in by_kind]
    if found.retied:
        clauses.append(f"tied to other tensors: {_some(found.retied)}")
    if not clauses:
        if not found.tensors:
            return "both are empty."
        return f"the same {_tensors(len(found.tensors))}{_files_text(found)}."
    if set(by_kind) - {"same"} == {"renamed"} and len(clauses) == 1 and "same" not in by_kind:
        return f"the same {_tensors(len(found.tensors))} under other names: {_names_text(by_kind['renamed'])}."
    return f"{'; '.join(clauses)}{_ending(by_kind, clauses)}."


def _of_adapter(found: CheckpointDiff, merged: CheckpointDiff) -> str:
    """Say what an adapter changes in its base."""
    base, adapter = ("A", "B") if merged.a == found.a else ("B", "A")
    every = [tensor.name for tensor in merged.tensors if tensor.a is not None]
    changed = {tensor.name for tensor in merged.differing if tensor.a is not None}
    added = [tensor.name.removeprefix(PEFT_FRONT) for tensor in merged.differing if tensor.a is None]
    text = f"{adapter} is an adapter (LoRA) that changes nothing of {base}"
    if changed:
        where = describe_tensors(changed, every)
        count = f"{len(changed):,} of {_tensors(len(every))}"
        text = f"{adapter} is an adapter (LoRA) that changes {where} of {base}: {count}"
    return f"{text}; and adds {_some(added)}." if added else f"{text}."


def comparison_method(found: CheckpointDiff) -> str:
    """Say in one sentence how many tensors were read to compare, and what told the others."""
    if not found.read_bytes:
        return "Compared by names and digests; no tensor was read."
    count = f"{_tensors(found.read_tensors)} {'was' if found.read_tensors == 1 else 'were'} read"
    size = format_size(found.read_bytes)
    if found.merged is not None:
        return f"{count} with the adapter's factors: {size}."
    shared = sum(tensor.a is not None and tensor.b is not None for tensor in found.tensors)
    return f"{count}: {size}{'; digests told the others' if found.read_tensors < shared else ''}."


def zero_before(found: CheckpointDiff) -> str:
    """Say in one sentence which tensors were zero in a and nonzero in b: their changes have no relative norm.

    A sentence like `headline`'s; "" if there are no such tensors.
    """
    names = found.zero_in_a
    if not names:
        return ""
    where = _where(names, found)
    return f"{_tensors(len(names))} {'was' if len(names) == 1 else 'were'} zero in A and nonzero in B: {where}."


def _nothing_in_common(by_kind: dict[DiffKind, list[TensorDiff]]) -> str:
    texts = []
    for side, tensors in (("A", by_kind.get("only_in_a", [])), ("B", by_kind.get("only_in_b", []))):
        names = [tensor.name for tensor in tensors]
        if not names:
            continue
        adapter = describe_adapter(names, is_alone=True)
        count = _tensors(len(names))
        texts.append(f"{count} only in {side}" if adapter is None else f"{side} is an {adapter}: {count}")
    return f"no tensor in common; {'; '.join(texts)}."


def _changed(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    shared = [tensor for tensor in found.tensors if tensor.kind not in ("only_in_a", "only_in_b")]
    count = f"{len(tensors):,} of {_tensors(len(shared))}"
    names = {tensor.name for tensor in tensors}
    others = [tensor.name for tensor in shared if tensor.name not in names]
    if not others:
        one = "the only tensor" if len(found.tensors) == 1 else "the one tensor in both"
        return f"{one if len(shared) == 1 else f'all {_tensors(len(shared))}'} changed"
    every = [tensor.name for tensor in shared]
    if len(others) * _FEW <= len(shared) and len(others) == found.counts.get("same", 0):
        return f"all but {describe_tensors(others, every)} changed: {count}"
    adapter = describe_adapter(names, is_alone=False)
    where = describe_tensors(names, every) if adapter is None else f"the {adapter}"
    if all(map(_is_head, names)):
        where = f"the head ({where})"
    if len(others) == found.counts.get("same", 0):
        return f"only {where} changed: {count}"
    return f"{count} changed: {where}"


def _cast(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    dtypes = Counter((tensor.a.dtype, tensor.b.dtype) for tensor in tensors if tensor.a and tensor.b)
    text = join_phrases([f"from {abbreviate_name(a)} to {abbreviate_name(b)}" for (a, b), _ in dtypes.most_common(3)])
    sources = {a for a, _ in dtypes}
    has_uncast = any(one.kind == "same" and one.b and one.b.dtype in sources for one in found.tensors)
    if not has_uncast and len(tensors) + found.counts.get("same", 0) == len(found.tensors):
        return f"cast {text}"
    where = _where([tensor.name for tensor in tensors], found)
    return f"{len(tensors):,} of {_tensors(len(found.tensors))} cast {text} ({where})"


def _reshaped(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    return f"{_tensors(len(tensors))} in another shape ({_where([one.name for one in tensors], found)})"


def _renamed(tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    return f"{_tensors(len(tensors))} renamed: {_names_text(tensors)}"


def _only_in(side: str, tensors: Sequence[TensorDiff], found: CheckpointDiff) -> str:
    names = [tensor.name for tensor in tensors]
    adapter = describe_adapter(names, is_alone=True)
    if adapter is not None:
        return f"{side} has an {adapter}: {_tensors(len(names))}"
    return f"{_tensors(len(names))} only in {side} ({_where(names, found)})"


_CLAUSES: Final[dict[DiffKind, Callable[[Sequence[TensorDiff], CheckpointDiff], str]]] = {
    "changed": _changed,
    "cast": _cast,
    "reshaped": _reshaped,
    "renamed": _renamed,
    "only_in_a": partial(_only_in, "A"),
    "only_in_b": partial(_only_in, "B"),
}


def _ending(by_kind: dict[DiffKind, list[TensorDiff]], clauses: Sequence[str]) -> str:
    """Return the end of the sentence, about the rest of the tensors."""
    if len(clauses) > 1 or clauses[0].startswith(("only", "the o", "all")):
        return ""
    if clauses[0].startswith("cast "):
        return ", nothing else"
    return "; the rest is the same" if "same" in by_kind else ""


def _where(names: Sequence[str], found: CheckpointDiff) -> str:
    return describe_tensors(set(names), [tensor.name for tensor in found.tensors])


def _names_text(renamed: Sequence[TensorDiff]) -> str:
    pairs = [(tensor.a.name, tensor.b.name) for tensor in renamed if tensor.a and tensor.b]
    if is_wrapping(pairs):
        return "with PEFT's additions to names"
    if is_wrapping((old, new) for new, old in pairs):
        return "without PEFT's additions to names"
    rules = rename_rules(pairs)
    texts = [rule.as_text() for rule, _ in rules[:2]]
    more = len(rules) - len(texts)
    return "; ".join(texts) + (f"; and {more} more ways" if more else "")


def _files_text(found: CheckpointDiff) -> str:
    """Describe how files with the same tensors differ; "" if they do not."""
    files_a = {tensor.a.file for tensor in found.tensors if tensor.a}
    files_b = {tensor.b.file for tensor in found.tensors if tensor.b}
    if all(tensor.a and tensor.b and tensor.a.file == tensor.b.file for tensor in found.tensors):
        return ""
    if len(files_a) != len(files_b):
        return f", in {count_of(len(files_b), 'file')} instead of {len(files_a):,}"
    return ", in other files"


def _is_head(name: str) -> bool:
    """Return whether a tensor is in a head and in no layer."""
    parts = split_name(name)
    return not HEADS.isdisjoint(parts[:2]) and not any(map(is_number, parts[:2]))


def _some(names: Sequence[str]) -> str:
    shown = [abbreviate_name(name) for name in names[:3]]
    return join_phrases(shown if len(names) <= 3 else [*shown, f"{len(names) - 3:,} more"])


def _tensors(number: int) -> str:
    return count_of(number, "tensor")


# Renaming rules: how the names of one checkpoint's tensors change in another.


class RenameRule(NamedTuple):
    """Replacement of whole parts in names; a "*" represents a number."""

    old: str
    new: str
    is_in_front: bool
    """Whether the replaced parts are at the beginning of the names."""

    def as_text(self) -> str:
        """Describe the rule."""
        old, new = abbreviate_name(self.old), abbreviate_name(self.new)
        where = " in front" if self.is_in_front else ""
        if not old:
            return f"with '{new}.'{where}"
        if not new:
            return f"without '{old}.'{where}"
        return f"'{old}' is '{new}'"


def rename_rules(pairs: Iterable[tuple[str, str]]) -> list[tuple[RenameRule, int]]:
    """Find the replacements in names.

    Args:
        pairs: The old and the new name of each tensor.

    Returns:
        Rules with the number of pairs that each applies to, the most frequent first.

    Example:
        >>> rename_rules([("h.0.bias", "model.h.0.bias"), ("ln.bias", "model.ln.bias")])
        [(RenameRule(old='', new='model', is_in_front=True), 2)]
    """
    return Counter(_rule(split_name(old), split_name(new)) for old, new in pairs).most_common()


def _rule(old: list[str], new: list[str]) -> RenameRule:
    last = common_length(old[::-1], new[::-1])
    old, new = old[: len(old) - last], new[: len(new) - last]
    first = common_length(old, new)
    return RenameRule(without_numbers(old[first:]), without_numbers(new[first:]), first == 0)


# Short descriptions of the part of a model that some tensors form: "query and value of all 6 layers".


_MOST_KINDS: Final = 4
"""The most kinds of tensors in a layer that are named."""
_MOST_PLACES: Final = 3
"""The most modules outside the layers that are named."""
_MOST_LETTERS: Final = 40
"""The most characters of one name; the middle of a longer one is left out."""


def describe_tensors(chosen: Collection[str], every: Iterable[str], *, names_kinds: bool = False) -> str:
    """Describe the part of a model that some of its tensors form.

    Args:
        chosen: FQNs of tensors; at least one.
        every: All tensors of the model, these included.
        names_kinds: Whether to name kinds of tensors even if all of them are chosen.

    Example:
        >>> every = [f"h.{layer}.{kind}.weight" for layer in range(6) for kind in "qkv"]
        >>> describe_tensors({name for name in every if "q" in name}, every)
        'q of all 6 layers'
    """
    chosen = set(chosen)
    grid = layer_grid(every)
    texts = []
    for stack in grid.stacks:
        text = _in_stack(stack, chosen, names_kinds)
        if text:
            texts.append(f"{text} of {abbreviate_name(stack.name)}" if stack.name and len(grid.stacks) > 1 else text)
    if not chosen.isdisjoint(grid.others):
        texts.append(_in_others(chosen, grid.others))
    return join_phrases(texts)


def join_phrases(words: Sequence[str]) -> str:
    """Join words as in a sentence: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def abbreviate_name(name: str, most: int = _MOST_LETTERS) -> str:
    """Leave out the middle of a name that has more than `most` characters."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 + 1 :]}"


def _in_stack(stack: LayerStack, chosen: set[str], names_kinds: bool) -> str:
    """Describe the chosen layers and their chosen kinds; "" if none is chosen."""
    whole = {cell for cell, names in stack.cells.items() if chosen.issuperset(names)}
    partly = {cell for cell, names in stack.cells.items() if not chosen.isdisjoint(names)}
    if not partly:
        return ""
    layers = {layer for layer, _ in partly}
    kinds = {kind for _, kind in partly}
    where = _layers_text(layers, stack)
    if whole != {(layer, kind) for layer, kind in stack.cells if layer in layers and kind in kinds}:
        return f"parts of {where}"
    in_layers = {kind for layer, kind in stack.cells if layer in layers}
    return f"{_kinds_text(kinds, stack)} of {where}" if names_kinds or kinds != in_layers else where


def _layers_text(layers: set[int], stack: LayerStack) -> str:
    if len(layers) == len(stack.layers):
        return f"all {len(layers)} layers"
    return f"layer{'s' if len(layers) > 1 else ''} {number_ranges(layers)} of {len(stack.layers)}"


def _kinds_text(kinds: set[str], stack: LayerStack) -> str:
    """List fully chosen modules, and chosen tensors of others, each by the shortest unambiguous end of its name."""
    tensors: dict[str, set[str]] = {}
    for kind in stack.kinds:
        tensors.setdefault(kind.rpartition(".")[0] or kind, set()).add(kind)
    chosen: list[str] = []
    for module, held in tensors.items():
        if held <= kinds:
            chosen.append(_short_among(module, tensors))
        else:
            tail = (kind.removeprefix(module) for kind in stack.kinds if kind in held & kinds)
            chosen += [_short_among(module, tensors) + tensor for tensor in tail]
    if len(chosen) > _MOST_KINDS:
        return f"{len(kinds)} of {len(stack.kinds)} tensors"
    return join_phrases([abbreviate_name(name) for name in chosen])


def _short_among(module: str, modules: Collection[str]) -> str:
    """Return the shortest end of a module's name that no other of the modules ends with."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{tail}") for other in modules) == 1:
            return tail
    return module


def _in_others(chosen: set[str], others: Sequence[str]) -> str:
    tree = fold_names({name: "chosen" if name in chosen else "" for name in others})
    rows = fold_rows(tree, hidden="", most=_MOST_PLACES)
    if any(set(row.marks) != {"chosen"} for row in rows):
        count = sum(row.marks["chosen"] for row in rows)
        return f"{count} of {len(others)} tensors outside the layers"
    return join_phrases([abbreviate_name(row.path) for row in rows])


# PEFT's names: descriptions of an adapter and the modules that are saved with it.


_LORA = ".lora_"
"""The beginning of the name parts that PEFT adds to a module."""
PEFT_FRONT: Final = "base_model.model."
"""The prefix of all names of a model that PEFT wraps."""
_SAVED = ".modules_to_save."
"""Follows the name of a module that is trained as a whole; an adapter-only file leaves it out."""
_WRAPPED = (".base_layer", ".original_module")
"""Follow the name of a module that has an adapter, or a trained module in its place."""


def describe_adapter(names: Collection[str], *, is_alone: bool) -> str | None:
    """Describe the modules that an adapter is for, and the modules that are trained with it.

    Args:
        names: FQNs; at least one.
        is_alone: Whether they may be from an adapter file, in which a trained module keeps its own name.

    Returns:
        The description, or None if these are not the tensors of an adapter.

    Example:
        >>> names = [f"base_model.model.{name}" for name in ("q.lora_A.weight", "q.lora_B.weight", "head.bias")]
        >>> describe_adapter(names, is_alone=True)
        'adapter (LoRA) for q, with head'
    """
    adapted = {f"{name.removeprefix(PEFT_FRONT).split(_LORA)[0]}.weight" for name in names if _LORA in name}
    others = [name for name in names if _LORA not in name]
    if not adapted or not all(_is_trained_with(name, is_alone=is_alone) for name in others):
        return None
    text = f"adapter (LoRA) for {describe_tensors(adapted, adapted, names_kinds=True)}"
    if others:
        trained = {_trained_name(name) for name in others}
        text = f"{text}, with {describe_tensors(trained, trained, names_kinds=True)}"
    return text


def is_wrapping(pairs: Iterable[tuple[str, str]]) -> bool:
    """Return whether PEFT's wrapping turns each first name into the second, and wraps a module for at least one."""
    wraps = False
    for plain, wrapped in pairs:
        bare = wrapped.removeprefix(PEFT_FRONT)
        for part in _WRAPPED:
            bare = f"{bare}.".replace(f"{part}.", ".").removesuffix(".")
        if bare != plain or bare == wrapped:
            return False
        wraps = wraps or f"{PEFT_FRONT}{bare}" != wrapped
    return wraps


def _is_trained_with(name: str, *, is_alone: bool) -> bool:
    if _SAVED in name:
        return True
    return is_alone and name.startswith(PEFT_FRONT) and not any(f"{part}." in name for part in _WRAPPED)


def _trained_name(name: str) -> str:
    module, found, rest = name.removeprefix(PEFT_FRONT).partition(_SAVED)
    return f"{module}.{rest.partition('.')[2]}" if found else module
