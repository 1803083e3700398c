"""Description of the machine, its disk and the versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")
"""File systems on which the disk cannot be measured."""
PACKAGES = ("torch", "transformers", "huggingface_hub", "safetensors", "xxhash")
OPTIONAL = ("fastsafetensors", "runai-model-streamer", "instanttensor")


def mount_of(path: Path) -> tuple[str, str, str]:
    """(file system type, mount options, device number) of a path."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            return right.split()[0], left.split()[5], number
    return "unknown", "", number


def describe(directory: Path, device: str = "cpu") -> dict[str, str]:
    """Lines of the table of the machine."""
    kind, options, number = mount_of(directory)
    memory = int(_field(Path("/proc/meminfo"), "MemTotal", "0 kB").split()[0]) * 1024
    lines = {
        "CPU": f"{_field(Path('/proc/cpuinfo'), 'model name', platform.machine())}, {_cores()} cores",
        "memory": f"{memory / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": f"{kind} ({options})",
        "disk": _disk(number),
        "Python": platform.python_version(),
    }
    lines |= {name: version(name) for name in PACKAGES}
    for name in OPTIONAL:
        try:
            lines[name] = version(name)
        except PackageNotFoundError:
            lines[name] = "not installed"
    if device != "cpu":
        import torch

        lines["GPU"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return lines


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _field(path: Path, name: str, default: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return default


def _disk(number: str) -> str:
    folder = Path("/sys/dev/block") / number
    if not folder.exists():
        return "unknown"
    folder = folder.resolve()
    if not (folder / "queue").exists():  # a partition
        folder = folder.parent
    model = folder / "device" / "model"
    if model.exists():
        return model.read_text().strip()
    return "virtio" if folder.name.startswith("vd") else folder.name
