"""Attacks with names: files that an index, a table or a config names outside the checkpoint, or that are none."""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Callable

from tests.attacks.files import bases, raw
from tests.attacks.registry import Expected, Place, attack, edit_stock, register

S = raw.SECOND

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


def _named(name: str, files: raw.Files) -> None:
    files[raw.INDEX] = raw.index(names={"block.bias": name, "block.weight": name})


for _name, _value in NAMES.items():
    register(f"name-{_name}", edit_stock(functools.partial(_named, _value), Expected(MISSING.get(_name, raw.INDEX))))


def _absolute(place: Place, name: str) -> Expected:
    place.write(raw.stock_sharded() | {raw.INDEX: raw.index(names={"block.bias": name, "block.weight": name})})
    return Expected(raw.INDEX)


register("name-absolute-to-weights", lambda place: _absolute(place, str(place.outside / S)))
register("name-absolute-to-itself", lambda place: _absolute(place, str(place.checkpoint / S)))
register("name-relative-through-the-root", lambda place: _absolute(place, "../" * 30 + str(place.outside / S)[1:]))


@attack("name")
def bin_index_climbs_out(place: Place) -> Expected:
    """The same door in the index of pickles."""
    files = bases.stock_bin_sharded()
    index = json.loads(files[raw.BIN_INDEX])
    index["weight_map"]["block.bias"] = "../outside/pytorch_model-00002-of-00003.bin"
    (place.outside / "pytorch_model-00002-of-00003.bin").write_bytes(files["pytorch_model-00002-of-00003.bin"])
    place.write(files | {raw.BIN_INDEX: json.dumps(index).encode()})
    return Expected(raw.BIN_INDEX)


@attack("name")
def bin_index_names_safetensors(place: Place) -> Expected:
    """An index of pickles that points to something else."""
    files = bases.stock_bin_sharded()
    index = json.loads(files[raw.BIN_INDEX])
    index["weight_map"]["block.bias"] = index["weight_map"]["block.weight"] = S
    place.write(files | {raw.BIN_INDEX: json.dumps(index).encode(), S: raw.shard(raw.of_shard(S))})
    return Expected(raw.BIN_INDEX)


def _directory(path: str) -> None:
    os.mkdir(path)


def _socket(path: str) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _link(target: str) -> Callable[[str], None]:
    return lambda path: os.symlink(target, path)


def _link_to_text(path: str) -> None:
    folder = os.path.join(os.path.dirname(os.path.dirname(path)), "hub")
    os.mkdir(folder)
    with open(os.path.join(folder, "text"), "w", encoding="utf-8") as file:
        file.write("root:x:0:0:root:/root:/bin/sh\n")
    os.symlink("../hub/text", path)


def _loop(path: str) -> None:
    os.symlink(os.path.basename(path), path)


def _device(path: str) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def _unreadable_hard_link(path: str) -> None:
    os.link(os.path.join(os.path.dirname(path), raw.CONFIG), path)


KINDS: dict[str, Callable[[str], None]] = {
    "directory": _directory,
    "fifo": os.mkfifo,
    "socket": _socket,
    "dangling-link": _link("nowhere.safetensors"),
    "link-loop": _loop,
    "link-to-dev-zero": _link("/dev/zero"),
    "link-to-dev-tty": _link("/dev/tty"),
    "link-to-proc": _link("/proc/self/mem"),
    "link-to-text": _link_to_text,
    "hard-link-to-the-config": _unreadable_hard_link,
}
PLACES: dict[str, Callable[[], raw.Files]] = {
    S: raw.stock_sharded,
    raw.SINGLE: raw.stock_single,
    raw.INDEX: raw.stock_sharded,
    raw.BIN: bases.stock_bin,
    "pytorch_model-00002-of-00003.bin": bases.stock_bin_sharded,
}
SHORT = dict(zip(PLACES, ("shard", "single", "index", "bin", "bin-shard"), strict=True))


def _in_place(base: Callable[[], raw.Files], file: str, make: Callable[[str], None], place: Place) -> Expected:
    files = base()
    del files[file]
    place.write(files)
    make(str(place.checkpoint / file))
    return Expected(file)


for _file, _base in PLACES.items():
    for _kind, _make in KINDS.items():
        register(f"kind-{SHORT[_file]}-is-{_kind}", functools.partial(_in_place, _base, _file, _make))
    if os.geteuid() == 0:
        register(f"kind-{SHORT[_file]}-is-device", functools.partial(_in_place, _base, _file, _device))


for _kind, _make in KINDS.items():
    if _kind not in ("hard-link-to-the-config", "dangling-link", "directory"):
        register(
            f"kind-config-is-{_kind}",
            functools.partial(_in_place, raw.stock_sharded, raw.CONFIG, _make),
            entries=("pretrained",),
        )


@attack("kind")
def link_to_a_folder_outside(place: Place) -> Expected:
    """The name is plain, the folder in it is a link."""
    os.symlink("../outside", place.checkpoint / "sub")
    place.write(raw.stock_sharded() | {raw.INDEX: raw.index(names=dict.fromkeys(raw.LAYOUT[S], "sub/" + S))})
    return Expected(S)
