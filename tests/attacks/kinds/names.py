"""Attacks with names: files that an index, a table or a config names outside the checkpoint, or that are none."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Callable

from tests.attacks.files import bases, raw
from tests.attacks.registry import Expected, Place, register

S = raw.SECOND
BIN_SHARD = "pytorch_model-00002-of-00003.bin"

NAMES: dict[str, str] = {
    "parent": "../outside/" + S,
    "parent-of-a-folder": "sub/../../outside/" + S,
    "parent-in-the-middle": "sub/../" + S,
    "parent-with-backslashes": "..\\outside\\" + S,
    "parent-mixed-slashes": "..\\../outside/" + S,
    "parent-percent-encoded": "%2e%2e/outside/" + S,
    "parent-alone": "..",
    "here": ".",
    "here-before-the-name": "./" + S,
    "empty": "",
    "blank": " ",
    "slash": "/",
    "trailing-slash": S + "/",
    "double-slash": "sub//" + S,
    "absolute-etc": "/etc/passwd",
    "absolute-with-the-suffix": "/etc/passwd.safetensors",
    "absolute-double": "//outside/" + S,
    "home": "~/" + S,
    "drive": "C:\\" + S,
    "drive-with-slash": "C:/" + S,
    "drive-relative": "C:" + S,
    "unc": "\\\\server\\share\\" + S,
    "unc-slashes": "//server/share/" + S,
    "device-namespace": "\\\\.\\PhysicalDrive0.safetensors",
    "alternate-stream": S + ":hidden.safetensors",
    "url-https": "https://example.invalid/" + S,
    "url-file": "file:///etc/passwd.safetensors",
    "url-hub": "hf://org/repo/" + S,
    "nul": S[:-12] + "\0.safetensors",
    "nul-before-the-suffix": "/etc/passwd\0.safetensors",
    "newline": "model\n.safetensors",
    "escape-code": "\x1b[2Jmodel.safetensors",
    "bidi-override": "model\u202esrotcnes.safetensors",
    "lone-surrogate": "model-\udc80.safetensors",
    "long-component": "m" * 300 + ".safetensors",
    "long-path": "/".join(["d" * 60] * 90) + ".safetensors",
    "a-megabyte": "m" * 1_000_000 + ".safetensors",
    "proc-self": "/proc/self/environ",
    "dev-zero": "/dev/zero",
    "bin": "pytorch_model.bin",
    "pickle": "weights.pkl",
    "python": "modeling.py",
    "index-json": raw.INDEX,
    "no-suffix": "model",
    "suffix-in-capitals": "model-00002-of-00003.SAFETENSORS",
}
MISSING = {"home": "~/" + S, "parent-percent-encoded": "%2e%2e", "long-component": "mmm", "long-path": "ddd"}
"""Names that are odd, and stay inside: a shard of this name is missing. All others are refused with the index."""


def _named(name: str, place: Place, file: str = raw.INDEX) -> Expected:
    index = raw.index(names={"block.bias": name, "block.weight": name})
    return place.write(raw.stock_sharded() | {raw.INDEX: index}).expects(file)


for _name, _value in NAMES.items():
    register(f"name-{_name}", functools.partial(_named, _value, file=MISSING.get(_name, raw.INDEX)))
register("name-absolute-to-weights", lambda place: _named(str(place.outside / S), place))
register("name-absolute-to-itself", lambda place: _named(str(place.checkpoint / S), place))
register("name-relative-through-the-root", lambda place: _named("../" * 30 + str(place.outside / S)[1:], place))


def _bin_index(names: dict[str, str], place: Place) -> Expected:
    files = bases.stock_bin_sharded()
    index = json.loads(files[raw.BIN_INDEX])
    index["weight_map"].update(names)
    (place.outside / BIN_SHARD).write_bytes(files[BIN_SHARD])
    return place.write(files | {raw.BIN_INDEX: json.dumps(index).encode()}).expects(raw.BIN_INDEX)


# The same door in the index of pickles, and one that points to something else.
register("name-bin-index-climbs-out", functools.partial(_bin_index, {"block.bias": f"../outside/{BIN_SHARD}"}))
register(
    "name-bin-index-names-safetensors",
    lambda place: _bin_index({"block.bias": S, "block.weight": S}, place.write({S: raw.shard(raw.of_shard(S))})),
)


def _link_to_text(path: str) -> None:
    folder = os.path.join(os.path.dirname(os.path.dirname(path)), "hub")
    os.mkdir(folder)
    with open(os.path.join(folder, "text"), "w", encoding="utf-8") as file:
        file.write("root:x:0:0:root:/root:/bin/sh\n")
    os.symlink("../hub/text", path)


KINDS: dict[str, Callable[[str], object]] = {
    "directory": os.mkdir,
    "fifo": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "dangling-link": lambda path: os.symlink("nowhere.safetensors", path),
    "link-loop": lambda path: os.symlink(os.path.basename(path), path),
    "link-to-dev-zero": lambda path: os.symlink("/dev/zero", path),
    "link-to-dev-tty": lambda path: os.symlink("/dev/tty", path),
    "link-to-proc": lambda path: os.symlink("/proc/self/mem", path),
    "link-to-text": _link_to_text,
    "hard-link-to-the-config": lambda path: os.link(os.path.join(os.path.dirname(path), raw.CONFIG), path),
}
if os.geteuid() == 0:
    KINDS["device"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
PLACES: dict[str, tuple[str, Callable[[], raw.Files]]] = {
    "shard": (S, raw.stock_sharded),
    "single": (raw.SINGLE, raw.stock_single),
    "index": (raw.INDEX, raw.stock_sharded),
    "bin": (raw.BIN, bases.stock_bin),
    "bin-shard": (BIN_SHARD, bases.stock_bin_sharded),
}


def _in_place(base: Callable[[], raw.Files], file: str, make: Callable[[str], object], place: Place) -> Expected:
    files = base()
    del files[file]
    place.write(files)
    make(str(place.checkpoint / file))
    return Expected(file)


for _kind, _make in KINDS.items():
    for _name, (_file, _base) in PLACES.items():
        register(f"kind-{_name}-is-{_kind}", functools.partial(_in_place, _base, _file, _make))
    if _kind not in ("hard-link-to-the-config", "dangling-link", "directory", "device"):
        register(
            f"kind-config-is-{_kind}",
            functools.partial(_in_place, raw.stock_sharded, raw.CONFIG, _make),
            entries=("pretrained",),
        )
# The name is plain, the folder in it is a link.
register(
    "kind-link-to-a-folder-outside",
    lambda place: (
        place.link("sub", "../outside")
        .write(raw.stock_sharded() | {raw.INDEX: raw.index(names=dict.fromkeys(raw.LAYOUT[S], "sub/" + S))})
        .expects(S)
    ),
)
