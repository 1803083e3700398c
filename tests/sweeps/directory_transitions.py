"""The table of transitions: what stands in a directory, and what is saved over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.sweeps.directory_models import Content
from tests.sweeps.directory_readers import Reader


@dataclass(frozen=True, slots=True)
class Save:
    """One save.

    Attributes:
        content: What is saved.
        layout: "single", "two", "three" or "many" files.
        by: "target" (who is under test), "transformers", or "bin" (torch.save, as before safetensors). Or no save of
            its own: hfshard's "reshard" of what stands there, its "regroup" (with little disk), or its
            "reshard-from" a directory elsewhere, "convert-dcp" or "convert-deepspeed", of what these saved in parts;
            "pull", of what was pushed to a hub in a directory. "stock-killed": shards of a stock save that did not get
            to its index.
        variant: The argument of `save_pretrained`.
        bare: A state dict without a model: no config.json.
        without_links: On a file system that has no hard links.
        killed_at: Not None: the save is killed there, from 0 (its first file-changing call) to 1 (its last).
    """

    content: Content
    layout: str
    by: str = "target"
    variant: str | None = None
    bare: bool = False
    without_links: bool = False
    killed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """A directory's history, the save that is stopped, and the save after it.

    Attributes:
        name: As `--transition` takes it.
        before: The saves that made the directory; none: it does not exist.
        new: The save that is stopped.
        bystanders: Files that no save may touch.
        lost_readers: Those that can't load what the save makes, by their own rules.
        is_made: The directory exists (empty but for the bystanders) before the first save.
        stock_only: Judged by stock readers alone (for the saves of transformers).
    """

    name: str
    before: tuple[Save, ...]
    new: Save
    bystanders: tuple[str, ...] = ("README.md", "vocab.txt", "model-card/notes.txt")
    lost_readers: tuple[str, ...] = ()
    is_made: bool = False
    stock_only: bool = False

    @property
    def next(self) -> Save:
        """The save after the stopped one: another generation in the same layout."""
        content = replace(self.new.content, generation=self.new.content.generation + 1)
        is_reshard = self.new.by in ("reshard", "regroup")
        return replace(self.new, content=content, by="target" if is_reshard else self.new.by)

    @property
    def needs_shards_of_a_plain_module(self) -> bool:
        """Whether huggingface_hub's mixin can't do it."""
        return self.new.content.arch == "net" and any(save.layout != "single" for save in (*self.before, self.new))

    @property
    def contents(self) -> tuple[Content, ...]:
        """All that a reader might see, each once."""
        saves = (*self.before, self.new, self.next)
        return tuple(dict.fromkeys(save.content for save in saves))

    @property
    def readers(self) -> tuple[Reader, ...]:
        """Who judges; the default and the variant are judged apart."""
        stock = "hub-mixin" if self.new.content.arch == "net" else "transformers"
        names = ["hfshard-weights", "hub"] if self.new.bare else ["hfshard", "hfshard-weights", stock, "hub"]
        if any(save.by == "bin" for save in self.before):
            names.append("hub-bin")
        if not any(save.variant for save in (*self.before, self.new)):
            names.append("hfshard-full")  # beside a variant it is right to fail: both record the one config.json
        names = [name for name in names if name not in self.lost_readers]
        if self.stock_only:
            names = [name for name in names if not name.startswith("hfshard")]
        found = [Reader(name) for name in names]
        variants = dict.fromkeys(save.variant for save in (*self.before, self.new) if save.variant)
        for variant in variants:
            found += [Reader(name, variant) for name in names if not name.startswith("hub")]
        return tuple(found)


FROM_ELSEWHERE = ("reshard-from", "convert-dcp", "convert-deepspeed", "pull")
"""Saves of what stands in another directory."""

WORDS = {"single": "single", "three": "sharded"}
"""Layout -> what it is called in the names of transitions."""

BERT = Content(1)
OTHER = Content(1, own_config=True)


def _shapes() -> Iterator[tuple[str, tuple[Save, ...], str]]:
    """(name, what was there, new layout) of the transitions that are done with and without a changed config."""
    single, three = Save(BERT, "single"), Save(BERT, "three")
    yield "single->single", (single,), "single"
    yield "single->sharded", (single,), "three"
    yield "sharded->single", (three,), "single"
    yield "sharded->sharded", (three,), "three"
    yield "sharded->fewer", (three,), "two"
    yield "sharded->more", (Save(BERT, "two"),), "three"
    yield "bin->single", (Save(BERT, "single", by="bin"),), "single"
    yield "bin->sharded", (Save(BERT, "single", by="bin"),), "three"
    yield "sharded-bin->single", (Save(BERT, "three", by="bin"),), "single"
    yield "sharded-bin->sharded", (Save(BERT, "three", by="bin"),), "three"
    yield "upstream-sharded->sharded", (Save(BERT, "three", by="transformers"),), "three"
    yield "upstream-sharded->single", (Save(BERT, "three", by="transformers"),), "single"
    yield "upstream-single->sharded", (Save(BERT, "single", by="transformers"),), "three"
    mess = (Save(BERT, "single", by="transformers"), Save(replace(BERT, generation=2), "three", by="transformers"))
    yield "mess->sharded", mess, "three"
    yield "mess->single", mess, "single"


def _with_configs() -> Iterator[Transition]:
    for name, before, layout in _shapes():
        new = Save(replace(BERT, generation=len(before) + 1), layout)
        yield Transition(name, before, new)
        changed = tuple(replace(save, content=replace(save.content, own_config=True)) for save in before)
        yield Transition(f"{name}+config", changed, replace(new, content=replace(new.content, own_config=True)))


def _fresh() -> Iterator[Transition]:
    for layout, word in WORDS.items():
        yield Transition(f"fresh->{word}", (), Save(BERT, layout), bystanders=())
        yield Transition(f"empty->{word}", (), Save(BERT, layout), bystanders=(), is_made=True)
        yield Transition(f"bystanders->{word}", (), Save(BERT, layout), is_made=True)


def _identical() -> Iterator[Transition]:
    for layout, word in WORDS.items():
        yield Transition(f"identical-{word}", (Save(OTHER, layout),), Save(OTHER, layout))


def _other_keys() -> Iterator[Transition]:
    deeper, wider = replace(OTHER, generation=2, layers=2), replace(OTHER, generation=2, hidden=12)
    for layout, word in WORDS.items():
        for new_layout, new_word in WORDS.items():
            yield Transition(f"{word}->{new_word}+keys", (Save(OTHER, layout),), Save(deeper, new_layout))
    yield Transition("sharded->sharded+shapes", (Save(OTHER, "three"),), Save(wider, "three"))
    deep, shallow = Save(replace(deeper, generation=1), "single"), Save(replace(OTHER, generation=2), "three")
    yield Transition("single->sharded+fewer-keys", (deep,), shallow)


def _variants() -> Iterator[Transition]:
    plain, half = replace(BERT, generation=2), replace(BERT, generation=2, half=True)
    old = Save(replace(BERT, generation=2), "three", variant="fp16")
    three = replace(BERT, generation=3)
    yield Transition("variant-sharded-beside-sharded", (Save(BERT, "three"),), Save(plain, "three", variant="fp16"))
    yield Transition("variant-single-beside-sharded", (Save(BERT, "three"),), Save(plain, "single", variant="fp16"))
    yield Transition("variant-half-beside-sharded", (Save(BERT, "three"),), Save(half, "three", variant="fp16"))
    yield Transition("variant-over-variant", (Save(BERT, "three"), old), Save(three, "three", variant="fp16"))
    yield Transition("variant-to-single", (Save(BERT, "three"), old), Save(three, "single", variant="fp16"))
    yield Transition("default-beside-variant", (Save(BERT, "three"), old), Save(three, "three"))
    # huggingface_hub refuses a directory with several *.safetensors and no index: upstream's own saves too
    single = Save(three, "single")
    yield Transition("default-to-single-beside-variant", (Save(BERT, "three"), old), single, lost_readers=("hub",))


def _wrecks() -> Iterator[Transition]:
    for name, layouts in (("sharded", ("three", "three")), ("single-to-sharded", ("single", "three"))):
        for percent in (30, 50, 60, 70, 80, 90, 95):
            old = Save(OTHER, layouts[0])
            killed = Save(replace(OTHER, generation=2), layouts[1], killed_at=percent / 100)
            new = Save(replace(OTHER, generation=3), layouts[1])
            yield Transition(f"wreck-{name}-{percent}", (old, killed), new)
    upstream = Save(OTHER, "three", by="transformers")
    for percent in (80, 90):
        killed = Save(replace(OTHER, generation=2), "three", killed_at=percent / 100)
        yield Transition(f"wreck-upstream-{percent}", (upstream, killed), Save(replace(OTHER, generation=3), "single"))
    killed = Save(OTHER, "three", killed_at=0.8)
    yield Transition("wreck-fresh", (killed,), Save(replace(OTHER, generation=2), "three"))


def _bare() -> Iterator[Transition]:
    two = replace(BERT, generation=2)
    for layout, word in WORDS.items():
        yield Transition(f"bare-fresh->{word}", (), Save(BERT, layout, bare=True), bystanders=())
        for old, old_word in WORDS.items():
            before = (Save(BERT, old, bare=True),)
            yield Transition(f"bare-{old_word}->{word}", before, Save(two, layout, bare=True))


def _without_links() -> Iterator[Transition]:
    for old, word in WORDS.items():
        new = Save(replace(OTHER, generation=2), "single", without_links=True)
        yield Transition(f"no-links-{word}->single+config", (Save(OTHER, old),), new)


def _with_generation_config() -> Iterator[Transition]:
    one, two = Content(1, arch="gpt2", own_config=True), Content(2, arch="gpt2", own_config=True)
    yield Transition("gpt2-sharded->sharded", (Save(one, "three"),), Save(two, "three"))
    yield Transition("gpt2-single->single", (Save(one, "single"),), Save(two, "single"))
    yield Transition("gpt2-single->sharded", (Save(one, "single"),), Save(two, "three"))
    strangers = ("README.md", "model_ema-00001-of-00002.safetensors", "models-1.bin", ".cache/huggingface/upload/x")
    yield Transition("strangers", (Save(BERT, "three"),), Save(replace(BERT, generation=2), "three"), strangers)


def _plain_modules() -> Iterator[Transition]:
    """Modules with the mixin that are not of transformers; huggingface_hub's own mixin reads them, too."""
    one, other = Content(1, arch="net"), Content(1, arch="net", own_config=True)
    for new, word in WORDS.items():
        yield Transition(f"net-fresh->{word}", (), Save(other, new), bystanders=())
        for by, writer in (("target", ""), ("transformers", "upstream-")):
            for old in WORDS if by == "target" else ("single",):
                name = f"net-{writer}{WORDS[old]}->{word}"
                same, changed = Save(one, old, by=by), Save(other, old, by=by)
                yield Transition(name, (same,), Save(replace(one, generation=2), new))
                yield Transition(f"{name}+config", (changed,), Save(replace(other, generation=2), new))
        without = replace(one, generation=2, no_config=True)
        for old, old_word in WORDS.items():
            yield Transition(f"net-{old_word}->{word}-config", (Save(other, old),), Save(without, new))
        wider = replace(other, generation=2, hidden=12)
        yield Transition(f"net-single->{word}+shapes", (Save(other, "single"),), Save(wider, new))
        for percent in (30, 40, 50, 60, 70, 80, 90, 95):
            killed = Save(replace(other, generation=2), new, killed_at=percent / 100)
            last = Save(replace(other, generation=3), "single")
            yield Transition(f"net-wreck-{word}-{percent}", (Save(other, "single"), killed), last)
    no_links = Save(replace(other, generation=2), "single", without_links=True)
    yield Transition("net-no-links", (Save(other, "three"),), no_links, lost_readers=("hub-mixin",))


def _strays() -> Iterator[Transition]:
    """Shards that a stock save left which was killed: it writes them one by one, and the index last."""
    same, other = replace(BERT, generation=2), replace(OTHER, generation=2)
    strays = Save(replace(BERT, generation=3), "two", by="stock-killed")
    for new, word in WORDS.items():
        for old, old_word in WORDS.items():
            before = (Save(BERT, old), strays)
            # huggingface_hub finds nothing among several files without an index, and more while the save goes on
            lost = ("hub",) if old == "single" else ()
            yield Transition(f"strays-beside-{old_word}->{word}", before, Save(same, new), lost_readers=lost)
            yield Transition(f"strays-beside-{old_word}->{word}+config", before, Save(other, new), lost_readers=lost)


def _reshards() -> Iterator[Transition]:
    for old, new in (
        ("three", "single"),
        ("single", "three"),
        ("many", "three"),
        ("three", "three"),
        ("three", "many"),
    ):
        name = f"{WORDS.get(old, old)}->{WORDS.get(new, new)}"
        yield Transition(f"reshard-{name}", (Save(OTHER, old),), Save(OTHER, new, by="reshard"))
    for old, new in (("many", "two"), ("two", "many"), ("three", "two"), ("many", "single"), ("single", "many")):
        before, save = Save(OTHER, old), Save(OTHER, new, by="regroup")
        yield Transition(f"regroup-{old}->{new}", (before,), save)
    before, save = Save(OTHER, "many", by="transformers"), Save(OTHER, "two", by="regroup")
    yield Transition("regroup-upstream-many->two", (before,), save)
    half_done = Save(OTHER, "two", by="regroup", killed_at=0.6)
    yield Transition("wreck-regroup", (Save(OTHER, "many"), half_done), Save(OTHER, "two", by="regroup"))
    yield Transition("regroup-bare", (Save(BERT, "many", bare=True),), Save(BERT, "two", by="regroup", bare=True))
    for layout, word in (("single", "bin"), ("three", "sharded-bin")):
        before = Save(OTHER, layout, by="bin")
        yield Transition(f"convert-{word}->single", (before,), Save(OTHER, "single", by="reshard"))
        yield Transition(f"convert-{word}->sharded", (before,), Save(OTHER, "three", by="reshard"))
    two = replace(OTHER, generation=2)
    yield Transition("reshard-into-fresh", (), Save(OTHER, "three", by="reshard-from"), bystanders=())
    yield Transition("reshard-over-single", (Save(OTHER, "single"),), Save(two, "three", by="reshard-from"))
    yield Transition("reshard-over-sharded", (Save(OTHER, "three"),), Save(two, "three", by="reshard-from"))
    yield Transition("reshard-over-sharded-to-single", (Save(OTHER, "three"),), Save(two, "single", by="reshard-from"))
    for by in ("convert-dcp", "convert-deepspeed"):
        yield Transition(f"{by}-into-fresh", (), Save(OTHER, "three", by=by), bystanders=())
        yield Transition(f"{by}-over-single", (Save(OTHER, "single"),), Save(two, "three", by=by))
        yield Transition(f"{by}-over-sharded", (Save(OTHER, "three"),), Save(two, "two", by=by))


def _pulls() -> Iterator[Transition]:
    two, three = replace(OTHER, generation=2), replace(OTHER, generation=3)
    for layout, word in WORDS.items():
        yield Transition(f"pull-into-fresh->{word}", (), Save(OTHER, layout, by="pull"), bystanders=())
        for old, old_word in WORDS.items():
            before = Save(OTHER, old, by="pull")
            yield Transition(f"pull-{old_word}->{word}", (before,), Save(two, layout, by="pull"))
    yield Transition("pull-over-save", (Save(OTHER, "three"),), Save(two, "three", by="pull"))
    for percent in (30, 50, 70, 80, 90):
        killed = Save(two, "three", by="pull", killed_at=percent / 100)
        pulls = (Save(OTHER, "three", by="pull"), killed)
        yield Transition(f"wreck-pull-{percent}", pulls, Save(three, "single", by="pull"))


def all_transitions() -> tuple[Transition, ...]:
    """Every transition, in the order of the table."""
    plain = (_fresh, _with_configs, _identical, _other_keys)
    special = (_variants, _wrecks, _strays, _bare, _without_links, _with_generation_config, _plain_modules)
    makers = (*plain, *special, _reshards, _pulls)
    return tuple(transition for make in makers for transition in make())
