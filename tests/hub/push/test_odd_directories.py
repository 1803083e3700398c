"""Odd directories and odd repos: a push does what it says with them, or says why not before it sends anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.hub.models import contents, digest_of_seed, make_model, saved
from tests.hub.push.conftest import FOUR, SINGLE, PushHub, differences, index_of


def put(path: Path, raw: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)


@pytest.mark.compat
def test_names_of_any_kind_arrive_as_they_are(hub: PushHub, repo: str, single: Path) -> None:
    names = ("ünï cödé.json", "100%25.txt", "a b/c+d?e#f.json", "語/模型.bin", "[x]{y}&z=1.txt", "'q\".txt", "-of-.txt")
    for number, name in enumerate(names):
        put(single / name, b"%d" % number)
    hub.lands(single, repo)
    hub.push(single, repo)
    assert hub.kinds() == {"create_repo": 1, "info": 1}


def test_worktree_of_git_is_pushed_without_the_file_that_makes_it_one(hub: PushHub, repo: str, single: Path) -> None:
    expected = contents(single)
    (single / ".git").write_text("gitdir: ../elsewhere\n")
    hub.push(single, repo)
    assert differences(hub, repo, expected) == {}


@pytest.mark.parametrize("name", ["a\\b.txt", "a\nb.txt", "folder\\x/c.txt"])
def test_name_that_no_pull_takes_is_refused_before_anything_is_asked(
    hub: PushHub, repo: str, single: Path, name: str
) -> None:
    expected = contents(single)
    put(single / name, b"1")
    outcome = hub.refused("push", single, repo)
    assert outcome.error == "InvalidArgumentError" and f"{name!r} in '{single}' has a backslash" in outcome.message
    assert hub.server.count() == 0

    hub.push(single, repo, ignore_patterns=["*.txt"])
    assert differences(hub, repo, expected) == {}


@pytest.mark.parametrize(
    "index",
    [
        index_of("../../secret.safetensors", "model-00001-of-00001.safetensors"),
        index_of("/etc/passwd.safetensors"),
        b"\xff\xfe garbage",
        b"[]",
        b"",
        b"{" * 100_000,
    ],
    ids=["outside", "absolute", "garbage", "list", "empty", "deep"],
)
@pytest.mark.parametrize("path", ["model.safetensors.index.json", "ema.safetensors.index.json"])
def test_hostile_index_on_the_hub_deletes_nothing_and_stops_nothing(
    hub: PushHub, repo: str, single: Path, path: str, index: bytes
) -> None:
    own = {"secret.safetensors": b"secret", "README.md": b"# Mine"}
    hub.server.create_repo(repo).commit({**own, path: index, "model-00001-of-00001.safetensors": b"stale"}, "odd")
    outcome = hub.push(single, repo)
    # Whose the old shard is, only the index could tell that belongs to somebody else.
    kept = own | ({path: index, "model-00001-of-00001.safetensors": b"stale"} if path.startswith("ema") else {})
    assert differences(hub, repo, contents(single) | kept) == {}
    assert any("cannot be read, so the files that it may name are kept" in line for line in outcome.log)
    assert hub.loads(repo) == digest_of_seed(1)


@pytest.mark.compat
def test_files_that_change_their_kind_are_pushed_and_recognised(hub: PushHub, repo: str, single: Path) -> None:
    for grow in (b"small", b"grown" * 4000, b"small again", b""):  # the Hub of the tests has LFS above 10,000 bytes
        (single / "vocab.txt").write_bytes(grow)
        hub.lands(single, repo)
        assert hub.view(repo).files()["vocab.txt"].is_lfs == (len(grow) > 10_000)
        assert hub.push(single, repo).result["is_new"] is False
    # a file of the same bytes that somebody made LFS, and the reverse, is left as it is
    hub.view(repo).commit({"note.bin": b"same"}, "by LFS")
    (single / "note.bin").write_bytes(b"same")
    assert hub.push(single, repo).result["is_new"] is False


@pytest.mark.compat
def test_same_bytes_under_several_names_are_sent_once(hub: PushHub, repo: str, single: Path) -> None:
    weights = (single / "model.safetensors").read_bytes()
    copies = {"copy.safetensors": weights, "sub/copy.safetensors": weights, "empty.json": b"", "void.json": b""}
    for name, raw in (copies | {"copy.json": (single / "config.json").read_bytes()}).items():
        put(single / name, raw)
    hub.lands(single, repo)
    assert hub.server.bytes_up("lfs_put") == len(weights)


@pytest.mark.compat
def test_snapshot_of_the_cache_is_pushed_as_the_files_it_links_to(
    hub: PushHub, repo: str, folder: Path, tmp_path: Path
) -> None:
    hub.push(folder, repo)
    hub.done("load_stock", repo, tmp_path / "cache")
    (snapshot,) = (tmp_path / "cache").glob("models--*/snapshots/*")
    assert (snapshot / "config.json").is_symlink()
    hub.push(snapshot, f"{repo}-copy")
    assert differences(hub, f"{repo}-copy", contents(folder)) == {}


def test_links_to_nowhere_and_to_folders_and_pipes_are_left_out_aloud(
    hub: PushHub, repo: str, single: Path, tmp_path: Path
) -> None:
    expected = contents(single)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/private.json").write_text("{}")
    (single / "linked").symlink_to(tmp_path / "other")
    (single / "dangling.json").symlink_to(tmp_path / "nothing")
    os.mkfifo(single / "pipe")
    outcome = hub.push(single, repo)
    assert differences(hub, repo, expected) == {}
    assert [name for name in ("dangling.json", "linked", "pipe") if not any(name in line for line in outcome.log)] == []


@pytest.mark.compat
def test_pickles_are_pushed_and_replace_safetensors(hub: PushHub, repo: str, folder: Path, tmp_path: Path) -> None:
    model = make_model(2, stock=True)
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    hub.push(folder, repo)
    hub.lands(tmp_path / "bin", repo)
    assert hub.loads(repo) == digest_of_seed(2)


def test_patterns_choose_files_and_never_break_a_checkpoint(hub: PushHub, repo: str, folder: Path) -> None:
    whole = contents(folder)
    put(folder / "notes/a.txt", b"a")
    put(folder / "log.txt", b"log")
    hub.push(folder, repo, ignore_patterns=["*.txt", "notes/*"])
    assert differences(hub, repo, whole) == {}
    hub.push(folder, repo, ignore_patterns="log.txt")
    assert differences(hub, repo, whole | {"notes/a.txt": b"a"}) == {}
    assert hub.refused("push", folder, repo, allow_patterns="*.txt").error == "InvalidArgumentError"


@pytest.mark.parametrize(
    ("options", "named"),
    [({"path_in_repo": path}, repr(path)) for path in ("../up", "a/../../b", ".git", "a/.GIT/b", "a\\b")]
    + [({"ignore_patterns": pattern}, "model") for pattern in ("*00002-of*", "*.index.json")],
    ids=str,
)
def test_folder_that_no_repo_has_and_half_a_checkpoint_are_refused_before_anything_is_asked(
    hub: PushHub, repo: str, folder: Path, options: dict[str, str], named: str
) -> None:
    outcome = hub.refused("push", folder, repo, **options)
    assert outcome.error == "InvalidArgumentError" and named in outcome.message
    assert hub.server.count() == 0


def test_name_that_is_no_utf8_is_an_error_that_shows_it(hub: PushHub, repo: str, single: Path) -> None:
    Path(os.fsdecode(os.fsencode(single) + b"/\xff.json")).touch()
    outcome = hub.refused("push", single, repo)
    assert outcome.error == "InvalidArgumentError" and "\\udcff.json" in outcome.message
    assert hub.server.count() == 0


@pytest.mark.parametrize("name", ["", "nothing"])
def test_directory_without_checkpoint_is_refused_before_anything_is_asked(
    hub: PushHub, repo: str, tmp_path: Path, name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.refused("push", tmp_path / name, repo).error == "CheckpointNotFoundError"
    assert hub.server.count() == 0


def test_variant_that_patterns_leave_out_stays_on_the_hub(hub: PushHub, repo: str, tmp_path: Path) -> None:
    first, second = (saved(saved(tmp_path / str(seed), seed, FOUR, variant="fp16"), seed, SINGLE) for seed in (1, 2))
    hub.push(first, repo)
    hub.push(second, repo, ignore_patterns="*fp16*")
    fp16 = {name: raw for name, raw in contents(first).items() if "fp16" in name}
    assert len(fp16) == 5
    assert differences(hub, repo, {n: raw for n, raw in contents(second).items() if "fp16" not in n} | fp16) == {}


@pytest.mark.compat
def test_gitignore_in_the_directory_leaves_out_no_shard(hub: PushHub, repo: str, folder: Path) -> None:
    (folder / ".gitignore").write_text("*.safetensors\n")
    assert "Remove the line from the .gitignore" in hub.refused("push", folder, repo).message
    assert (hub.kinds()["lfs_put"], hub.kinds()["commit"]) == (0, 0)


@pytest.mark.compat
def test_very_many_small_files_need_few_open_files(hub: PushHub, repo: str, single: Path) -> None:
    for number in range(600):
        put(single / f"parts/{number}.json", b"{%d}" % number)
    hub.lands(single, repo, open_files=128)


def test_strays_of_a_killed_save_stay_at_home(hub: PushHub, repo: str, folder: Path) -> None:
    whole = contents(folder)
    strays = ["model-00001-of-00009.safetensors", "pytorch_model.bin"]
    for name in strays:
        put(folder / name, b"stray")
    outcome = hub.push(folder, repo)
    assert differences(hub, repo, whole) == {}
    assert sorted(line.split("'")[1] for line in outcome.log if "belongs to no checkpoint" in line) == strays


@pytest.mark.compat
def test_file_that_can_not_be_read_is_an_error_before_the_commit(hub: PushHub, repo: str, single: Path) -> None:
    (single / "tokenizer.json").symlink_to("/proc/self/mem")  # opens, and can't be read, not even by root
    assert hub.start("push", single, repo, follow_links=True).outcome().error is not None
    assert len(hub.view(repo).commits()) == 1


@pytest.mark.parametrize("damage", ["truncate", "mix", "lose"])
def test_damaged_checkpoints_are_refused_before_anything_is_asked(
    hub: PushHub, repo: str, folder: Path, tmp_path: Path, damage: str
) -> None:
    shard = folder / "model-00002-of-00004.safetensors"
    raw = (
        shard.read_bytes()[:-1] if damage == "truncate" else (saved(tmp_path / "2", 2, FOUR) / shard.name).read_bytes()
    )
    shard.unlink()
    if damage != "lose":
        shard.write_bytes(raw)
    outcome = hub.refused("push", folder, repo)
    assert outcome.error in ("DamagedCheckpointError", "TruncatedShardError", "IntegrityError", "MissingShardError")
    assert "0000" in outcome.message
    assert hub.server.count() == 0


@pytest.mark.compat
@pytest.mark.parametrize("card", [b"\xff\xfe no text", b"\0", b"---\n: : [\n---\ntext"], ids=["utf8", "zero", "yaml"])
def test_card_that_can_not_be_read_is_left_alone_or_an_error(hub: PushHub, repo: str, card: bytes) -> None:
    hub.server.create_repo(repo).commit({"README.md": card}, "card")
    outcome = hub.refused("push_model", 1, repo, tags=["a"])
    assert outcome.error == "InvalidArgumentError" and "push without tags" in outcome.message
    assert hub.files(repo) == {"README.md"}
    hub.done("push_model", 1, repo)
    assert hub.view(repo).read("README.md") == card


def test_save_that_pushes_is_not_stopped_by_another_variant(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR, variant="fp16")
    (folder / "model.fp16-00001-of-00004.safetensors").write_bytes(b"damaged")
    hub.done("save_and_push", 2, folder, repo_id=repo)
    assert hub.files(repo) == {"README.md", "config.json", "model.safetensors"}
    assert hub.loads(repo) == digest_of_seed(2)


@pytest.mark.compat
def test_repo_whose_file_is_a_folder_of_ours_is_an_error(hub: PushHub, repo: str, single: Path) -> None:
    hub.server.create_repo(repo).commit({"config.json/x": b"1"}, "odd")
    outcome = hub.refused("push", single, repo)
    assert outcome.error == "HubError" and "can't be a file and a folder" in outcome.message
    assert hub.files(repo) == {"config.json/x"}


@pytest.mark.compat
def test_weights_that_config_names_are_pushed_and_nothing_outranks_them(
    hub: PushHub, repo: str, single: Path, tmp_path: Path
) -> None:
    hub.push(saved(tmp_path / "old", 5, FOUR), repo)
    (single / "model.safetensors").rename(single / "custom.safetensors")
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"transformers_weights": "custom.safetensors"}))
    hub.push(single, repo)
    assert hub.files(repo) == {"config.json", "custom.safetensors"}
    assert hub.loads(repo) == digest_of_seed(1)


@pytest.mark.compat
def test_repo_or_branch_that_is_deleted_meanwhile_is_an_error_that_says_so(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    hub.push(saved(tmp_path / "old", 1), repo, revision="dev")
    view = hub.view(repo)
    hub.fail("POST commit", "race", action=lambda: view._repo.set_ref("branches", "dev", None))
    outcome = hub.refused("push", saved(tmp_path / "new", 2), repo, revision="dev")
    assert outcome.error == "HubNotFoundError" and "no revision 'dev'" in outcome.message
    assert "dev" not in view.branches
