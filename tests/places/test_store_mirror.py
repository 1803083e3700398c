"""Small files of a store's checkpoint in a temporary directory: its name, what is in it, and when it goes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.errors import InvalidArgumentError
from hfshard.places.store_mirror import SmallFilesMirror, locate_in_store
from tests.stores.saving.memory_store import MemoryStore


def mirror_of(place: str, subfolder: str = "", has_code: bool = False) -> SmallFilesMirror:
    return SmallFilesMirror(StoreFolder(MemoryStore(), place), subfolder, has_code=has_code)


def files_of(mirror: SmallFilesMirror) -> dict[str, bytes]:
    root = Path(mirror.directory)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("place", "subfolder", "expected"),
    [
        ("s3://models/bert-v1.5", "", "bert-v1.5"),
        ("s3://models/bert/unet", "/unet/", "bert/unet"),
        ("s3://models/a/b/c", "b/c", "a/b/c"),
        ("s3://models/..hidden", "", "hidden"),
        ("s3://models/größe 2", "", "gr__e_2"),
        ("s3://models/...", "", "_"),
    ],
)
def test_a_directory_has_the_name_of_its_folder_each_time(place: str, subfolder: str, expected: str) -> None:
    mirrors = [mirror_of(place, subfolder) for _ in range(2)]

    for mirror in mirrors:
        parent = os.path.dirname(mirror.path)
        assert os.path.relpath(mirror.directory, parent) == expected
        assert os.path.isdir(mirror.directory)
    assert mirrors[0].path != mirrors[1].path


def test_long_names_are_cut_and_told_apart_by_their_digest() -> None:
    first, again, other = (mirror_of(f"s3://models/{'x' * 300}{end}") for end in "aab")
    names = [os.path.basename(mirror.path) for mirror in (first, again, other)]

    assert [len(name) for name in names] == [255, 255, 255]
    assert names[0] == names[1] != names[2]
    dots = os.path.basename(mirror_of(f"s3://models/{'.x' * 60}").path)  # transformers writes "_dot_" for each dot
    assert len(dots.replace(".", "_dot_")) <= 255


def test_small_files_follow_the_folder_and_code_comes_only_when_it_may_be_run() -> None:
    config = b'{"auto_map": {"AutoModel": "code/modeling.Mine", "AutoConfig": "org/other--conf.C"}}'
    store = MemoryStore(
        {"config.json": config, "generation_config.json": b"{}", "top.py": b"1", "tokenizer.json": b"{}"}
    )
    store.objects |= {"code/modeling.py": b"2", "elsewhere/x.py": b"3", "model.safetensors": b"weights"}
    folder = StoreFolder(store, "s3://models/bert")
    plain, with_code = (SmallFilesMirror(folder, "", has_code=has_code) for has_code in (False, True))

    plain.refresh()
    assert files_of(plain) == {}  # nothing before the files are asked for
    plain.fill()
    with_code.fill()
    assert files_of(plain) == {"config.json": config, "generation_config.json": b"{}"}
    assert files_of(with_code) == {**files_of(plain), "code/modeling.py": b"2", "top.py": b"1"}

    store.objects["config.json"] = b'{"new": 1}'
    del store.objects["generation_config.json"]
    folder.refresh()  # the listing that has filled it counts for the opening of the checkpoint
    plain.refresh()
    assert sorted(files_of(plain)) == ["config.json", "generation_config.json"]
    folder.refresh()
    plain.refresh()
    assert files_of(plain) == {"config.json": b'{"new": 1}'}


def test_the_directory_goes_with_its_mirror() -> None:
    mirror = mirror_of("s3://models/bert", "")
    parent = os.path.dirname(mirror.path)
    Path(mirror.directory, "config.json").write_text("{}")
    del mirror
    gc.collect()

    assert not os.path.exists(parent)


def test_what_this_machine_can_not_do_is_refused() -> None:
    long = "ä" * 128
    mirror = mirror_of(f"s3://models/bert/{long}", long)
    with pytest.raises(InvalidArgumentError) as raised:
        mirror.fill()
    assert str(raised.value) == (
        "subfolder has a part of 256 bytes, but a directory's name on this machine has at most 255. Make it part of "
        f"the address: 's3://models/bert/{long}'."
    )
    with pytest.raises(InvalidArgumentError) as raised:
        locate_in_store("s3://models/bert", CheckpointQuery(local_files_only=True), takes_files=True)
    assert str(raised.value) == "local_files_only=True, but 's3://models/bert' is not on this machine. Leave it out."
