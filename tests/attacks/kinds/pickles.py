"""Attacks by pickle: code in a state dict, objects that are none, and tensors that lie about their storage."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tests.attacks.files import bases, raw
from tests.attacks.files.torchfile import (
    call,
    integer,
    legacy,
    mapping,
    named,
    pickled,
    several,
    state,
    tensor,
    text,
    wrapped,
    zipped,
)
from tests.attacks.registry import Expected, Place, attack, register

BIN = Expected(raw.BIN)
FORMS = ("zip", "legacy")
Payload = Callable[[Place], bytes]


def _touch(place: Place) -> bytes:
    return text(f"touch '{place.executed}'")


def _code(place: Place) -> bytes:
    return text(f"open({str(place.executed)!r}, 'w').close()")


def _script(place: Place) -> bytes:
    (place.checkpoint / "setup_weights.py").write_text(f"open({str(place.executed)!r}, 'w').close()\n")
    return text(str(place.checkpoint / "setup_weights.py"))


def _nested(place: Place) -> bytes:
    inner = pickled(call("os", "system", _touch(place)))
    return b"B" + len(inner).to_bytes(4, "little") + inner


def _second_file(place: Place) -> bytes:
    (place.outside / "second.bin").write_bytes(legacy(call("os", "system", _touch(place)), {}))
    return text(str(place.outside / "second.bin"))


PAYLOADS: dict[str, Payload] = {
    "os-system": lambda place: call("os", "system", _touch(place)),
    "posix-system": lambda place: call("posix", "system", _touch(place)),
    "nt-system": lambda place: call("nt", "system", _touch(place)),
    "builtins-exec": lambda place: call("builtins", "exec", _code(place)),
    "builtins-eval": lambda place: call("builtins", "eval", _code(place)),
    "python2-builtin-eval": lambda place: call("__builtin__", "eval", _code(place)),
    "builtins-compile": lambda place: call("builtins", "compile", _code(place), text("x"), text("exec")),
    "builtins-open": lambda place: call("builtins", "open", text(str(place.executed)), text("w")),
    "builtins-getattr": lambda place: call("builtins", "getattr", named("os", "path"), text("os")),
    "builtins-import": lambda place: call("builtins", "__import__", text("this")),
    "io-open": lambda place: call("io", "open", text(str(place.executed)), text("w")),
    "runpy-run-path": lambda place: call("runpy", "run_path", _script(place)),
    "runpy-run-code": lambda place: call("runpy", "_run_code", _code(place), b"}"),
    "subprocess-popen": lambda place: call("subprocess", "Popen", text("touch " + str(place.executed)), b"N"),
    "subprocess-output": lambda place: call(
        "subprocess", "check_output", several(text("touch"), text(str(place.executed)))
    ),
    "pty-spawn": lambda place: call("pty", "spawn", text("/bin/true")),
    "shutil-rmtree": lambda place: call("shutil", "rmtree", text(str(place.outside))),
    "os-remove": lambda place: call("os", "remove", text(str(place.outside / raw.SINGLE))),
    "webbrowser": lambda place: call("webbrowser", "open", text("https://example.invalid/")),
    "importlib": lambda place: call("importlib", "import_module", text("antigravity")),
    "ctypes-cdll": lambda place: call("ctypes", "CDLL", text("libc.so.6")),
    "codecs-decode": lambda place: call("codecs", "decode", _code(place), text("rot13")),
    "operator-attrgetter": lambda place: call("operator", "attrgetter", text("system")),
    "functools-partial": lambda place: call("functools", "partial", named("os", "system"), _touch(place)),
    "pickle-loads": lambda place: call("pickle", "loads", _nested(place)),
    "cpickle-loads": lambda place: call("_pickle", "loads", _nested(place)),
    "torch-load": lambda place: call("torch", "load", _second_file(place)),
    "torch-serialization-load": lambda place: call("torch.serialization", "load", _second_file(place)),
    "torch-storage-load-from-bytes": lambda place: call("torch.storage", "_load_from_bytes", _nested(place)),
    "torch-hub-load": lambda place: call("torch.hub", "load", text(str(place.checkpoint)), text("x")),
    "torch-jit-load": lambda place: call("torch.jit", "load", _second_file(place)),
    "torch-ops-load-library": lambda place: call("torch._ops", "_Ops.load_library", text("libc.so.6")),
    "numpy-load": lambda place: call("numpy", "load", _second_file(place), b"N", b"\x88"),
    "numpy-object-array": lambda place: call("numpy.core.multiarray", "_reconstruct", named("numpy", "ndarray")),
    "transformers-class": lambda place: call("transformers", "AutoModel.from_pretrained", text(str(place.outside))),
    "hfshard-own-function": lambda place: call("hfshard", "load_state_dict", text(str(place.outside))),
    "instance-of-popen": lambda place: b"(" + text("touch " + str(place.executed)) + b"isubprocess\nPopen\n",
    "build-on-ordered-dict": lambda place: (
        named("collections", "OrderedDict") + b")R" + mapping({"__class__": named("os", "system")}) + b"b"
    ),
    "extension-registry": lambda place: b"\x82\x01",
}


def _hostile(payload: Payload, form: str, place: Place) -> Expected:
    opcodes, storages = state(legacy=form == "legacy")
    opcodes["block.bias"] = payload(place)
    place.write({raw.CONFIG: raw.config(), raw.BIN: wrapped(mapping(opcodes), storages, form)})
    return BIN


for _form in FORMS:
    for _name, _payload in PAYLOADS.items():
        if _form == "zip" or _name in (
            "os-system",
            "builtins-exec",
            "runpy-run-path",
            "subprocess-popen",
            "torch-load",
        ):
            register(f"pickle-{_form}-{_name}", functools.partial(_hostile, _payload, _form))


@attack("pickle")
def in_the_second_shard(place: Place) -> Expected:
    """The first shard is honest."""
    name = "pytorch_model-00002-of-00003.bin"
    place.write(bases.stock_bin_sharded() | {name: zipped(call("os", "system", _touch(place)), {})})
    return Expected(name)


@attack("pickle")
def under_state_dict(place: Place) -> Expected:
    """A training checkpoint whose other entries run code."""
    opcodes, storages = state()
    body = mapping({"state_dict": mapping(opcodes), "callbacks": call("os", "system", _touch(place))})
    place.write({raw.CONFIG: raw.config(), raw.BIN: zipped(body, storages)})
    return BIN


@attack("pickle")
def beside_damaged_safetensors(place: Place) -> Expected:
    """Who falls back from damaged safetensors to the pickle beside them opens a door."""
    damaged = raw.stock_single()[raw.SINGLE][:-1]
    hostile = zipped(call("os", "system", _touch(place)), {})
    place.write({raw.CONFIG: raw.config(), raw.SINGLE: damaged, raw.BIN: hostile})
    return Expected(raw.SINGLE)


@attack("pickle")
def bare_pickle(place: Place) -> Expected:
    """Neither zip nor torch's magic: a plain pickle."""
    place.write({raw.CONFIG: raw.config(), raw.BIN: pickled(call("os", "system", _touch(place)))})
    return BIN


@attack("pickle")
def in_the_magic_number(place: Place) -> Expected:
    """The first of the five pickles of the older format, read before anything else."""
    place.write({raw.CONFIG: raw.config(), raw.BIN: pickled(call("os", "system", _touch(place))) + legacy(b"}", {})})
    return BIN


META = call(
    "torch._utils", "_rebuild_meta_tensor_no_storage", named("torch", "float32"), several(integer(4)),
    several(integer(1)), b"\x89",
)  # fmt: skip
SPARSE = call(
    "torch._utils", "_rebuild_sparse_tensor", call("torch.serialization", "_get_layout", text("torch.sparse_coo")),
    several(tensor("2", (1, 1), kind="LongStorage"), tensor("1", (1,), numel=4), several(integer(4)), b"\x89"),
)  # fmt: skip
OBJECTS: dict[str, bytes] = {
    "none": b"N",
    "number": integer(7),
    "text": text("weights"),
    "list": b"](" + text("a") + b"e",
    "tuple": several(text("a"), integer(1)),
    "set": call("builtins", "set", b"]"),
    "a-tensor": tensor("0", (8, 4)),
    "number-for-a-tensor": mapping({**state()[0], "epoch": integer(3)}),
    "text-for-a-tensor": mapping({**state()[0], "note": text("hi")}),
    "none-for-a-tensor": mapping({**state()[0], "block.bias": b"N"}),
    "dict-for-a-tensor": mapping({**state()[0], "block": mapping({"bias": integer(1)})}),
    "list-for-a-tensor": mapping({**state()[0], "block.bias": b"]"}),
    "number-for-a-name": b"}(" + integer(7) + tensor("0", (8, 4)) + b"u",
    "bytes-for-a-name": b"}(" + several(text("a")) + tensor("0", (8, 4)) + b"u",
    "state-dict-that-is-a-list": mapping({"state_dict": b"]"}),
    "state-dict-in-itself": b"}q\x00(" + text("state_dict") + b"h\x00u",
    "deep-tuples": b"N" + b"\x85" * 200_000,
    "deep-lists": b"]" * 20_000 + b"a" * 19_999,
    "deep-tuples-for-a-name": b"}(" + b")" + b"\x85" * 200_000 + tensor("0", (8, 4)) + b"u",
    "deep-tuples-in-a-set": mapping({**state()[0], "a": call("builtins", "set", b"])" + b"\x85" * 200_000 + b"a")}),
    "bytearray-of-a-terabyte": mapping({**state()[0], "a": call("builtins", "bytearray", integer(1 << 40))}),
    "circle": b"}q\x00(" + text("model") + b"h\x00" + text("ema") + b"h\x00u",
    "tensor-without-data": mapping({**state()[0], "block.bias": META}),
    "sparse-tensor": mapping({**state()[0], "block.bias": SPARSE}),
    "memory-that-nobody-filled": mapping({**state()[0], "block.bias": call("torch", "FloatTensor", integer(4))}),
    "endless-memo": b"]q\x00" + b"h\x00a" * 1000,
    "text-of-4-gigabytes": b"X\xff\xff\xff\xffabc",
    "bytes-of-2-to-62": b"\x8e" + (2**62).to_bytes(8, "little"),
    "long-of-2-gigabytes": b"\x8b\xff\xff\xff\x7f",
    "memo-of-2-to-32": b"Nr\xff\xff\xff\xff",
    "frame-of-2-to-62": b"\x95" + (2**62).to_bytes(8, "little"),
    "pop-from-nothing": b"0000",
    "unknown-opcode": b"\xff",
    "persistent-id-text": text("0") + b"Q",
    "persistent-id-of-a-module": several(text("module"), text("a"), text("b"), text("c")) + b"Q",
    "storage-missing-from-the-zip": mapping({**state()[0], "block.bias": tensor("404", (4,))}),
    "storage-in-the-parent-folder": mapping({**state()[0], "block.bias": tensor("../version", (4,))}),
    "numel-negative": mapping({**state()[0], "block.bias": tensor("1", (4,), numel=-4)}),
    "shape-beyond-the-storage": mapping({**state()[0], "block.bias": tensor("1", (4000,), numel=4)}),
    "offset-beyond-the-storage": mapping({**state()[0], "block.bias": tensor("1", (4,), numel=4, offset=2**40)}),
    "offset-negative": mapping({**state()[0], "block.bias": tensor("1", (4,), numel=4, offset=-400)}),
    "stride-beyond-the-storage": mapping({**state()[0], "block.bias": tensor("1", (4,), numel=4, stride=(2**40,))}),
    "stride-negative": mapping({**state()[0], "block.bias": tensor("1", (4,), numel=4, stride=(-1,))}),
    "shape-negative": mapping({**state()[0], "block.bias": tensor("1", (-4,), numel=4, stride=(1,))}),
    "shape-that-wraps": mapping({**state()[0], "block.bias": tensor("1", (2**32, 2**32), numel=4)}),
    "storage-of-objects": mapping({**state()[0], "block.bias": tensor("1", (4,), numel=4, kind="Tensor")}),
}


def _object(body: bytes, form: str, place: Place) -> Expected:
    storages = state()[1]
    place.write({raw.CONFIG: raw.config(), raw.BIN: wrapped(body, storages, form)})
    return BIN


for _name, _body in OBJECTS.items():
    register(f"pickle-object-{_name}", functools.partial(_object, _body, "zip"))
for _name in ("none", "list", "text-of-4-gigabytes", "memo-of-2-to-32", "unknown-opcode"):
    register(f"pickle-legacy-object-{_name}", functools.partial(_object, OBJECTS[_name], "legacy"))


@attack("pickle", entries=("module", "pretrained"))
def object_empty_dict(place: Place) -> Expected:
    """Whole, and no key of the model is in it."""
    _object(b"}", "zip", place)
    return Expected("", "missing")


@attack("pickle", entries=("state_dict", "module", "pretrained"))
def two_sets_of_weights(place: Place) -> Expected:
    """Both whole, and none is the weights by itself."""
    weights = mapping(state()[0])
    _object(mapping({"model": weights, "model_ema": weights}), "zip", place)
    return Expected(raw.BIN, "several sets of weights")


@attack("pickle")
def that_never_stops(place: Place) -> Expected:
    """All opcodes but the last."""
    opcodes, storages = state(legacy=True)
    whole = legacy(mapping(opcodes), storages)
    place.write({raw.CONFIG: raw.config(), raw.BIN: whole[: whole.index(b"embed.weight")]})
    return BIN


LEGACY_COUNTS: dict[str, int] = {"2-to-33": 2**33, "2-to-62": 2**62, "negative": -1, "one-less": 3, "one-more": 5}


def _legacy_count(count: int, in_pickle: bool, place: Place) -> Expected:
    opcodes, storages = state(legacy=True)
    if in_pickle:
        opcodes["block.bias"] = tensor("1", (4,), numel=count, legacy=True)
    body = legacy(mapping(opcodes), storages, counts={"1": count})
    place.write({raw.CONFIG: raw.config(), raw.BIN: body})
    return BIN


for _name, _count in LEGACY_COUNTS.items():
    register(f"pickle-legacy-storage-count-{_name}", functools.partial(_legacy_count, _count, False))
for _name in ("2-to-33", "2-to-62", "negative"):
    register(f"pickle-legacy-numel-{_name}", functools.partial(_legacy_count, LEGACY_COUNTS[_name], True))


@attack("pickle")
def legacy_storage_that_is_not_listed(place: Place) -> Expected:
    """The list of storages in the file lacks one, and so does the file: torch returns what was in the memory."""
    opcodes, storages = state(legacy=True)
    del storages["1"]
    place.write({raw.CONFIG: raw.config(), raw.BIN: legacy(mapping(opcodes), storages)})
    return Expected(raw.BIN, "does not hold the bytes of all its tensors")
