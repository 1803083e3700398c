"""Attacks by pickle: code in a state dict, objects that are none, and tensors that lie about their storage."""

from __future__ import annotations

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
from tests.attacks.registry import Build, Expected, Place, register, register_all

OPCODES, STORAGES = state()
OLD_OPCODES, OLD_STORAGES = state(legacy=True)
Payload = Callable[[Place], bytes]


def _bin(make: Payload, match: str = "") -> Build:
    """A checkpoint whose weights are one pickle."""
    return lambda place: place.write({raw.CONFIG: raw.config(), raw.BIN: make(place)}).expects(raw.BIN, match)


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


def _system(place: Place) -> bytes:
    return call("os", "system", _touch(place))


PAYLOADS: dict[str, Payload] = {
    "os-system": _system,
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
OF_BOTH_FORMS = ("os-system", "builtins-exec", "runpy-run-path", "subprocess-popen", "torch-load")


def _hostile(payload: Payload, form: str) -> Build:
    opcodes, storages = (OLD_OPCODES, OLD_STORAGES) if form == "legacy" else (OPCODES, STORAGES)
    return _bin(lambda place: wrapped(mapping({**opcodes, "block.bias": payload(place)}), storages, form))


register_all("pickle-zip", {name: _hostile(payload, "zip") for name, payload in PAYLOADS.items()})
register_all("pickle-legacy", {name: _hostile(PAYLOADS[name], "legacy") for name in OF_BOTH_FORMS})


def _second_shard(place: Place) -> Expected:
    """The first one is honest."""
    name = "pytorch_model-00002-of-00003.bin"
    return place.write(bases.stock_bin_sharded() | {name: zipped(_system(place), {})}).expects(name)


def _beside_safetensors(place: Place) -> Expected:
    """Who falls back from damaged safetensors to the pickle beside them opens a door."""
    files = {raw.CONFIG: raw.config(), raw.SINGLE: raw.stock_single()[raw.SINGLE][:-1]}
    return place.write(files | {raw.BIN: zipped(_system(place), {})}).expects(raw.SINGLE)


WHOLE: dict[str, Build] = {
    "in-the-second-shard": _second_shard,
    "beside-damaged-safetensors": _beside_safetensors,
    # A training checkpoint whose other entries run code.
    "under-state-dict": _bin(
        lambda place: zipped(mapping({"state_dict": mapping(OPCODES), "callbacks": _system(place)}), STORAGES)
    ),
    # Neither zip nor torch's magic: a plain pickle.
    "bare-pickle": _bin(lambda place: pickled(_system(place))),
    # The first of the five pickles of the older format, read before anything else.
    "in-the-magic-number": _bin(lambda place: pickled(_system(place)) + legacy(b"}", {})),
    # All opcodes but the last.
    "that-never-stops": _bin(lambda place: legacy(mapping(OLD_OPCODES), OLD_STORAGES).partition(b"embed.weight")[0]),
    # The list of storages in the file lacks one, and so does the file: torch returns what was in the memory.
    "legacy-storage-that-is-not-listed": _bin(
        lambda place: legacy(mapping(OLD_OPCODES), {key: one for key, one in OLD_STORAGES.items() if key != "1"}),
        "does not contain the bytes of all its tensors",
    ),
}
register_all("pickle", WHOLE)


def _bias(opcodes: bytes) -> bytes:
    """A state dict with this in the place of one tensor."""
    return mapping({**OPCODES, "block.bias": opcodes})


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
    "number-for-a-tensor": _bias(integer(3)),
    "text-for-a-tensor": _bias(text("hi")),
    "none-for-a-tensor": _bias(b"N"),
    "dict-for-a-tensor": _bias(mapping({"bias": integer(1)})),
    "list-for-a-tensor": _bias(b"]"),
    "number-for-a-name": b"}(" + integer(7) + tensor("0", (8, 4)) + b"u",
    "bytes-for-a-name": b"}(" + several(text("a")) + tensor("0", (8, 4)) + b"u",
    "state-dict-that-is-a-list": mapping({"state_dict": b"]"}),
    "state-dict-in-itself": b"}q\x00(" + text("state_dict") + b"h\x00u",
    "deep-tuples": b"N" + b"\x85" * 200_000,
    "deep-lists": b"]" * 20_000 + b"a" * 19_999,
    "deep-tuples-for-a-name": b"}(" + b")" + b"\x85" * 200_000 + tensor("0", (8, 4)) + b"u",
    "deep-tuples-in-a-set": mapping({**OPCODES, "a": call("builtins", "set", b"])" + b"\x85" * 200_000 + b"a")}),
    "bytearray-of-a-terabyte": mapping({**OPCODES, "a": call("builtins", "bytearray", integer(1 << 40))}),
    "circle": b"}q\x00(" + text("model") + b"h\x00" + text("ema") + b"h\x00u",
    "tensor-without-data": _bias(META),
    "sparse-tensor": _bias(SPARSE),
    "memory-that-nobody-filled": _bias(call("torch", "FloatTensor", integer(4))),
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
    "storage-missing-from-the-zip": _bias(tensor("404", (4,))),
    "storage-in-the-parent-folder": _bias(tensor("../version", (4,))),
    "numel-negative": _bias(tensor("1", (4,), numel=-4)),
    "shape-beyond-the-storage": _bias(tensor("1", (4000,), numel=4)),
    "offset-beyond-the-storage": _bias(tensor("1", (4,), numel=4, offset=2**40)),
    "offset-negative": _bias(tensor("1", (4,), numel=4, offset=-400)),
    "stride-beyond-the-storage": _bias(tensor("1", (4,), numel=4, stride=(2**40,))),
    "stride-negative": _bias(tensor("1", (4,), numel=4, stride=(-1,))),
    "shape-negative": _bias(tensor("1", (-4,), numel=4, stride=(1,))),
    "shape-that-wraps": _bias(tensor("1", (2**32, 2**32), numel=4)),
    "storage-of-objects": _bias(tensor("1", (4,), numel=4, kind="Tensor")),
}


def _object(body: bytes, form: str = "zip", match: str = "") -> Build:
    return _bin(lambda place: wrapped(body, STORAGES, form), match)


register_all("pickle-object", {name: _object(body) for name, body in OBJECTS.items()})
OLD_OBJECTS = ("none", "list", "text-of-4-gigabytes", "memo-of-2-to-32", "unknown-opcode")
register_all("pickle-legacy-object", {name: _object(OBJECTS[name], "legacy") for name in OLD_OBJECTS})
# Whole, and no key of the model is in it.
register(
    "pickle-object-empty-dict",
    lambda place: place.write({raw.CONFIG: raw.config(), raw.BIN: zipped(b"}", STORAGES)}).expects("", "missing"),
    entries=("module", "pretrained"),
)
# Both whole, and none is the weights by itself.
TWO_SETS = mapping(dict.fromkeys(("model", "model_ema"), mapping(OPCODES)))
register(
    "pickle-two-sets-of-weights",
    _object(TWO_SETS, match="several sets of weights"),
    entries=("state_dict", "module", "pretrained"),
)

LEGACY_COUNTS: dict[str, int] = {"2-to-33": 2**33, "2-to-62": 2**62, "negative": -1, "one-less": 3, "one-more": 5}


def _legacy_count(count: int, opcodes: dict[str, bytes]) -> Build:
    return _bin(lambda place: legacy(mapping(opcodes), OLD_STORAGES, counts={"1": count}))


for _name, _count in LEGACY_COUNTS.items():
    register(f"pickle-legacy-storage-count-{_name}", _legacy_count(_count, OLD_OPCODES))
    if _name in ("2-to-33", "2-to-62", "negative"):
        _lie = {**OLD_OPCODES, "block.bias": tensor("1", (4,), numel=_count, legacy=True)}
        register(f"pickle-legacy-numel-{_name}", _legacy_count(_count, _lie))
