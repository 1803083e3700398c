"""Attacks by the directories of other frameworks: code in their pickles, and pieces that are not where they say."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.attacks.files import raw
from tests.attacks.files.torchfile import call, mapping, pickled, text, zipped
from tests.attacks.registry import Build, Expected, Place, register_all
from tests.attacks.target import truth
from tests.foreign.dcp_files import Box, halves, save_dcp

METADATA, ITEMS = ".metadata", "__1_0.distcp"
OPTIMIZER = "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "global_step1/mp_rank_00_model_states.pt"


def parts(place: Place) -> Metadata:
    """Save the weights as torch.distributed.checkpoint does, each matrix in two parts by columns."""
    tensors = {f"model.{name}": tensor for name, tensor in truth().items()}
    chunks: dict[str, list[Box]] = {
        name: halves(one.shape, 1) for name, one in tensors.items() if one.dim() > 1 and one.shape[1] > 1
    }
    metadata = save_dcp(place.checkpoint, tensors, chunks)
    place.write({raw.CONFIG: raw.config()})
    return metadata


def _system(place: Place) -> bytes:
    return call("os", "system", text(f"touch '{place.executed}'"))


def _changed(change: Callable[[Metadata], object], match: str = "") -> Build:
    """Metadata that say something else."""

    def build(place: Place) -> Expected:
        metadata = parts(place)
        change(metadata)
        return place.write({METADATA: pickle.dumps(metadata, protocol=4)}).expects("", match)

    return build


def _with_file(name: str, content: Callable[[Place], bytes], match: str = "") -> Build:
    """One file that is another."""

    def build(place: Place) -> Expected:
        parts(place)
        return place.write({name: content(place)}).expects(name, match)

    return build


def _each_place(**values: Any) -> Callable[[Metadata], object]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            for name, value in values.items():
                setattr(info, name, value)

    return change


def _hostile_item(place: Place) -> Expected:
    """An item that runs code, at the place of an honest one."""
    metadata = parts(place)
    item = zipped(_system(place), {})
    (place.checkpoint / ITEMS).write_bytes(item)
    _each_place(relative_path=ITEMS, offset=0, length=len(item))(metadata)
    return place.write({METADATA: pickle.dumps(metadata, protocol=4)}).expects(ITEMS, "asks for 'os.system'")


def _huge_tensor(metadata: Metadata) -> None:
    for described in metadata.state_dict_metadata.values():
        vars(described)["size"] = torch.Size((1 << 40, 1 << 20))
        vars(described)["chunks"] = []


def _zero(payload: Callable[[Place], bytes], file: str) -> Build:
    """A directory of DeepSpeed, one file of which runs code."""

    def build(place: Place) -> Expected:
        place.write({raw.CONFIG: raw.config(), "latest": b"global_step1"})
        honest = zipped(mapping({}), {})
        return place.write({MODEL: honest, OPTIMIZER: honest} | {file: payload(place)}).expects(file.split("/")[0])

    return build


def _bomb(place: Place) -> bytes:
    """A pickle that takes a thousandth of its bytes."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", pickled(mapping({})) + bytes(1 << 24))
    return archive.getvalue()


def _latest(content: bytes) -> Build:
    def build(place: Place) -> Expected:
        honest = zipped(mapping({}), {})
        return place.write({raw.CONFIG: raw.config(), MODEL: honest, "latest": content}).expects("latest")

    return build


register_all(
    "parts",
    {
        "metadata-code": _with_file(METADATA, lambda place: pickled(_system(place)), "asks for 'os.system'"),
        "metadata-getattr": _with_file(
            METADATA, lambda place: pickled(call("builtins", "getattr", call("builtins", "__import__", text("os")))), ""
        ),
        "metadata-endless": _with_file(METADATA, lambda place: b"\x80\x04" + b"(" * 1_000_000),
        "metadata-truncated": _changed(lambda metadata: vars(metadata).pop("storage_data")),
        "items-outside": _changed(_each_place(relative_path="../outside/model.safetensors"), "outside"),
        "items-absolute": _changed(_each_place(relative_path="/etc/passwd"), "outside"),
        "items-of-a-directory": _changed(_each_place(relative_path=".")),
        "items-huge": _changed(_each_place(length=1 << 61)),
        "items-negative": _changed(_each_place(offset=-1)),
        "items-all-one": _changed(_each_place(offset=0)),
        "item-code": _hostile_item,
        "tensor-huge": _changed(_huge_tensor),
        "items-truncated": _with_file(
            ITEMS, lambda place: (place.checkpoint / ITEMS).read_bytes()[:-100], "truncated|end"
        ),
        "items-empty": _with_file(ITEMS, lambda place: b""),
        "zero-optimizer-code": _zero(lambda place: zipped(_system(place), {}), OPTIMIZER),
        "zero-model-code": _zero(lambda place: zipped(_system(place), {}), MODEL),
        "zero-optimizer-bomb": _zero(_bomb, OPTIMIZER),
        "zero-model-bomb": _zero(_bomb, MODEL),
        "zero-latest-outside": _latest(b"../outside"),
        "zero-latest-absolute": _latest(b"/etc"),
    },
)
