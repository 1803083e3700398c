"""`hfshard inspect`, `show`, `verify` and `sign`, on whole checkpoints, single files and every damage."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import shutil
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.cli.check_commands import default_output
from hfshard.cli.main import main, make_parser
from hfshard.errors import InvalidArgumentError, InvalidPathError
from hfshard.viewing.screenshot import find_chromium
from tests.cli.conftest import Run, check_reader_that_goes_away, rejected, save_example
from tests.helpers import processes
from tests.saving.helpers import flip
from tests.signing.conftest import write_pair

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_text_shows_shards_dtypes_tensors_tied_names_and_metadata(example: Path, run: Run) -> None:
    out = run.ok("inspect", example)
    digests = [hashlib.sha256((example / name).read_bytes()).hexdigest()[:12] for name in SHARDS]
    assert (
        out
        == f"""\
checkpoint  {example}
entry file  model.safetensors.index.json
weights     460.1 KB in 2 files
tensors     4 tensors, 115,051 parameters
checksums   yes

file                                  size                        tensors  checksum
model-00001-of-00002.safetensors  404.1 KB  ████████████████████        1  sha256 {digests[0]}…
model-00002-of-00002.safetensors   64.2 KB  ███▏                        3  sha256 {digests[1]}…

dtype  tensors  parameters      size
F32          2     115,000  460.0 KB  ████████████████████
BF16         1          50     100 B  ▏
I64          1           1       8 B  ▏

largest tensors  dtype  shape     parameters      size  file
embed            F32    1000×100     100,000  400.0 KB  model-00001-of-00002.safetensors
layer.weight     F32    150×100       15,000   60.0 KB  model-00002-of-00002.safetensors
layer.bias       BF16   50                50     100 B  model-00002-of-00002.safetensors
step             I64    scalar             1       8 B  model-00002-of-00002.safetensors

tied name  stored as
unembed    embed

metadata
note      for tests
"""
    )


def test_json_has_everything(example: Path, run: Run) -> None:
    found = json.loads(run.ok("inspect", example, "--format", "json"))
    files = found.pop("files")
    assert [(file["name"], file["tensors"]) for file in files] == [(SHARDS[0], 1), (SHARDS[1], 3)]
    for file in files:
        raw = (example / file["name"]).read_bytes()
        assert file["size"] == len(raw)
        assert file["sha256"] == hashlib.sha256(raw).hexdigest()
    tensors = found.pop("tensors")
    assert {
        tensor["name"]: (tensor["dtype"], tensor["shape"], tensor["nbytes"], tensor["file"]) for tensor in tensors
    } == {
        "embed": ("F32", [1000, 100], 400_000, SHARDS[0]),
        "layer.weight": ("F32", [150, 100], 60_000, SHARDS[1]),
        "layer.bias": ("BF16", [50], 100, SHARDS[1]),
        "step": ("I64", [], 8, SHARDS[1]),
    }
    assert found == {
        "directory": str(example),
        "entry": "model.safetensors.index.json",
        "key": None,
        "is_verifiable": True,
        "signature": None,
        "framework": None,
        "model": None,
        "total_size": 460_108,
        "total_parameters": 115_051,
        "dtypes": [
            {"dtype": "F32", "tensors": 2, "parameters": 115_000, "nbytes": 460_000},
            {"dtype": "BF16", "tensors": 1, "parameters": 50, "nbytes": 100},
            {"dtype": "I64", "tensors": 1, "parameters": 1, "nbytes": 8},
        ],
        "tied_names": {"unembed": "embed"},
        "metadata": {"note": "for tests"},
    }


def test_text_shows_five_tensors_and_all_when_asked(tmp_path: Path, run: Run) -> None:
    save_file({f"t{number}": torch.ones(number) for number in range(1, 9)}, tmp_path / "model.safetensors")
    few, all_of_them = run("inspect", tmp_path).stdout, run("inspect", tmp_path, "--tensors").stdout
    assert re.findall(r"^t\d", few, re.MULTILINE) == ["t8", "t7", "t6", "t5", "t4"]
    assert "largest tensors" in few
    assert sorted(re.findall(r"^t\d", all_of_them, re.MULTILINE)) == ["t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8"]
    assert "largest" not in all_of_them


def test_variant_is_a_checkpoint_of_its_own(example: Path, run: Run) -> None:
    save_example(example, variant="fp16", checksum="xxh3")
    out = run.ok("inspect", example, "--variant", "fp16")
    assert "model.safetensors.index.fp16.json" in out
    assert "model.fp16-00001-of-00002.safetensors" in out
    assert "xxh3 " in out
    assert "\nmodel-0000" not in out


def test_stock_single_file_is_shown_without_checksums(minilm: Path, run: Run) -> None:
    out = run.ok("inspect", minilm)
    assert "weights     90.9 MB in 1 file\n" in out
    assert "tensors     104 tensors, 22,713,728 parameters\n" in out
    assert "checksums   none: saved by another tool\n" in out
    line = "embeddings.word_embeddings.weight          F32    30522×384  11,720,448  46.9 MB  model.safetensors\n"
    assert line in out


def test_pickled_weights_are_shown(tmp_path: Path, run: Run) -> None:
    torch.save({"w": torch.ones(10, 10, dtype=torch.float16)}, tmp_path / "pytorch_model.bin")
    found = json.loads(run.ok("inspect", tmp_path, "--format", "json"))
    assert found["tensors"] == [
        {"name": "w", "dtype": "F16", "shape": [10, 10], "nbytes": 200, "file": "pytorch_model.bin"}
    ]
    assert found["entry"] == "pytorch_model.bin"


def test_damaged_checkpoint_is_one_message_on_stderr(example: Path, run: Run) -> None:
    (example / SHARDS[1]).unlink()
    err = run.fails(1, "inspect", example)
    assert err.startswith(f"hfshard: File '{example / SHARDS[1]}' is missing. ")
    assert err.count("\n") == 1


def test_names_that_would_move_the_cursor_are_escaped(tmp_path: Path, run: Run) -> None:
    save_file({"a\x1b[2Jb": torch.ones(1)}, tmp_path / "model.safetensors", {"note": "x\x1b]0;title\x07"})
    out = run.ok("inspect", tmp_path)
    assert "\x1b" not in out
    assert "a\\x1b[2Jb" in out


def test_output_in_a_poor_encoding_is_escaped(example: Path, run: Run) -> None:
    assert "\\u2588\\u2588" in run.ok("inspect", example, PYTHONIOENCODING="ascii")


def test_reader_that_goes_away_is_no_error(tmp_path: Path, child_environment: dict[str, str]) -> None:
    save_file({f"tensor.{number:05d}": torch.ones(1) for number in range(5000)}, tmp_path / "model.safetensors")
    check_reader_that_goes_away("checkpoint", child_environment, "inspect", tmp_path, "--tensors")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run's last checkpoint, with the weights and their average."""
    weights, average = ({"layer.weight": torch.ones(10, 10) / n, "layer.bias": torch.zeros(10)} for n in (1, 2))
    path = tmp_path / "old" / "checkpoint.pth.tar"
    path.parent.mkdir()
    torch.save({"epoch": 3, "model": weights, "model_ema": average, "optimizer": {"state": {}}}, path)
    return path


def test_several_sets_of_weights_are_listed_and_one_is_asked_for(old: Path, tmp_path: Path, run: Run) -> None:
    both = "'model' (2 tensors, 440 bytes), 'model_ema' (2 tensors, 440 bytes). Nothing was loaded. Pass one: "
    for command in (["inspect", old], ["convert", old, tmp_path / "new"]):
        err = run.fails(2, *command)
        assert both in err
        assert "--key model on the command line" in err
    assert not (tmp_path / "new").exists()

    text = run("inspect", old, "--key", "model_ema").stdout
    assert "entry file   checkpoint.pth.tar\nfound under  model_ema\n" in text
    found = json.loads(run("inspect", old, "--key", "model", "--format", "json").stdout)
    assert (found["key"], found["total_parameters"]) == ("model", 110)

    assert f"{old}: " in run.ok("convert", old, tmp_path / "new", "--key", "model_ema")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    assert hfshard.load_state_dict(tmp_path / "new", verify="full")["layer.weight"].unique().tolist() == [0.5]


def test_a_file_is_verified(old: Path, run: Run) -> None:
    assert run.ok("verify", old).startswith(f"{old}: intact: 1 file, ")

    flip(old, old.read_bytes().index(b"/data/0") + 200)
    done = run("verify", old)
    assert done.returncode == 1
    assert done.stdout.startswith(f"DAMAGED  {old}\n")


def test_a_safetensors_file_is_shown_and_written_again(tmp_path: Path, run: Run) -> None:
    adapter = tmp_path / "adapter.safetensors"
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, adapter)
    assert "found under" not in run("inspect", adapter).stdout
    assert run("verify", adapter, "--level", "structure").returncode == 0
    assert run("reshard", adapter, tmp_path / "new", "--max-shard-size", "700B").returncode == 0
    assert hfshard.verify_checkpoint(tmp_path / "new").ok
    run.fails(2, "inspect", adapter, "--key", "a")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """What a program has saved of a run, with the arguments that it was called with."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "trained.pt"
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "object": slice(1)}
    torch.save(value, path)
    return path


def test_a_run_is_made_of_a_file_with_an_optimizer(trained: Path, tmp_path: Path, run: Run) -> None:
    made = tmp_path / "run" / "checkpoint-00000007"
    refused = run.fails(1, "convert", trained, tmp_path / "run")
    assert "has objects of 'builtins.slice', which cannot be read without running code (object)" in refused
    assert not (tmp_path / "run").exists()

    convert = ["convert", trained, tmp_path / "run", "--not-strict"]
    done = run(*convert)
    assert done.returncode == 0
    expected = [f"read     {trained}", f"written  {made}", "step     7", "parts    model, optimizer"]
    assert done.stdout.splitlines()[:4] == expected
    assert done.stderr.startswith(f"hfshard: note: 'object' in '{trained}' was left out: it is a 'builtins.slice'")
    assert run("verify", tmp_path / "run").returncode == 0
    assert f"'{made}' already exists" in run.fails(2, *convert)

    found = run(*convert, "--step", "8", "--format", "json").stdout
    assert json.loads(found)["step"] == 8
    bad = run("convert", trained, tmp_path / "run", "--part", "model")
    assert (bad.returncode, "'model' is not NAME=KEY" in bad.stderr) == (2, True)
    bad = run(*convert, "--part", "optimiser=optimizer")
    assert (bad.returncode, "keys names 'optimiser', which is not a known part" in bad.stderr) == (2, True)


def test_the_weights_of_a_run_are_taken_alone(trained: Path, tmp_path: Path, run: Run) -> None:
    value = torch.load(trained, weights_only=False)
    del value["object"]
    torch.save(value, trained)
    run.ok("convert", trained, tmp_path / "weights", "--weights")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]


def test_page_is_written_where_it_is_asked_for(example: Path, tmp_path: Path, run: Run) -> None:
    page = tmp_path / "page.html"

    assert run.ok("show", example, "-o", page) == f"{page}: {page.stat().st_size / 1000:.1f} KB\n"
    html = page.read_text(encoding="utf-8")
    assert "<title>example</title>" in html
    assert str(tmp_path) not in html
    assert "<dt>weights</dt><dd>460.1 KB" in html

    again = run("show", example / "model-00001-of-00002.safetensors", "-o", page, "--format", "json",
        "--max-shard-size", "200KB")  # fmt: skip

    assert json.loads(again.stdout) == {"page": str(page), "size": page.stat().st_size}
    html = page.read_text(encoding="utf-8")
    assert "<dt>weights</dt><dd>400.0 KB" in html
    assert '<th scope="col" class="wide">of 200.0 KB</th>' in html
    assert "<small>202 %</small>" in html


def test_paths_of_this_machine_are_on_pages_that_ask_for_them(example: Path, tmp_path: Path, run: Run) -> None:
    page = tmp_path / "page.html"
    run.ok("show", example, "-o", page, "--paths")
    html = page.read_text(encoding="utf-8").replace("<wbr>", "")
    assert "<title>example</title>" in html
    assert f'<p class="place name">{example}</p>' in html

    run.ok("show", example, "-o", page, "--paths", "--against", example)
    assert html_with(str(example), page)
    run.ok("show", example, "-o", page, "--against", example)
    assert not html_with(str(tmp_path), page)


def html_with(text: str, page: Path) -> bool:
    return text in page.read_text(encoding="utf-8").replace("<wbr>", "")


def test_weights_are_not_replaced_by_a_page(example: Path, run: Run) -> None:
    shard = example / "model-00001-of-00002.safetensors"

    assert "exists and is not a page of hfshard" in run.fails(2, "show", example, "-o", shard)
    assert hfshard.verify_checkpoint(example).ok


def test_nothing_is_written_where_there_are_no_weights(tmp_path: Path, run: Run) -> None:
    run.fails(1, "show", tmp_path, "-o", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
def test_only_a_picture_is_written_where_only_that_is_asked_for(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "out.png"

    code = main(["show", str(example), "--png", str(picture), "--png-size", "200x200", "--format", "json"])

    assert (code, json.loads(capsys.readouterr().out)) == (0, {"png": str(picture), "size": picture.stat().st_size})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["example", "out.png"]
    with pytest.raises(InvalidArgumentError, match=r"There is nothing to write\. Pass output="):
        hfshard.show_checkpoint(example)


def test_page_has_the_name_of_its_checkpoint() -> None:
    assert default_output("models/bert/") == "bert.html"
    assert default_output("org/name@v1") == "name@v1.html"
    assert default_output("s3://bucket/runs/bert?region=eu") == "bert.html"
    assert default_output("hf://buckets/org/name/") == "name.html"
    assert default_output(f"s3://bucket/{'é' * 150}") == f"{'é' * 125}.html"
    assert default_output("/") == "checkpoint.html"
    assert default_output(".") == f"{Path.cwd().name}.html"


def test_a_revision_of_a_directory_hub_is_shown(tmp_path: Path, example: Path) -> None:
    hfshard.push_checkpoint(example, f"{tmp_path}/hub")

    path = hfshard.show_checkpoint(f"{tmp_path}/hub@main", tmp_path / "page.html")

    assert "<title>hub@main</title>" in Path(path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": "B", "best": "loss"}, "best cannot be used with against="),
        ({"against": "B", "revision": "v1"}, "append a revision to its checkpoint: 'org/name@revision'"),
        ({"best": "loss"}, "best is for a run, not for one checkpoint"),
    ],
)
def test_an_argument_of_another_page_is_refused(
    tmp_path: Path, example: Path, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        hfshard.show_checkpoint(example, tmp_path / "page.html", **arguments)  # type: ignore[arg-type]

    assert not (tmp_path / "page.html").exists()


def test_key_and_subfolder_are_of_both_that_are_compared(tmp_path: Path) -> None:
    for name, number in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name / "sub").mkdir(parents=True)
        parts = {"model": {"in_model": torch.ones(3)}, "state_dict": {"in_state": torch.full((3,), number)}}
        torch.save(parts, tmp_path / name / "sub" / "pytorch_model.bin")

    path = hfshard.show_checkpoint(
        tmp_path / "b", tmp_path / "page.html", against=tmp_path / "a", subfolder="sub", key="state_dict"
    )

    html = Path(path).read_text(encoding="utf-8")
    assert "<dt>changed</dt><dd>1" in html
    assert "in_state" in html
    assert "in_model" not in html


def test_page_and_picture_are_two_files(tmp_path: Path, example: Path) -> None:
    with pytest.raises(InvalidPathError, match=r"page' cannot be both the page and its screenshot. Pass two files"):
        hfshard.show_checkpoint(example, tmp_path / "page", png=tmp_path / "page")


def test_sign_and_verify(example: Path, tmp_path: Path, run: Run) -> None:
    private, public = write_pair(tmp_path, "mine")
    verify = ["verify", example, "--public-key", public]

    done = run("sign", example, "--private-key", private)
    looked_at = run("inspect", example)
    as_json = json.loads(run("inspect", example, "--format", "json").stdout)
    whole = run.ok(*verify)
    shown = json.loads(run(*verify, "--format", "json").stdout)
    unread = run(*verify, "--level", "structure")
    (example / "extra.py").write_text("x = 1\n")
    added = run(*verify)
    unasked = run("verify", example)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{example}/model.sig: ")
    assert "covered by the save's sha256" in done.stdout
    assert "checksums   yes\nsignature   model.sig, not checked: hfshard verify --public-key KEY\n" in looked_at.stdout
    assert as_json["signature"] == "model.sig"
    assert f"intact, and signed by the key of '{public}'" in whole
    assert shown["signed_by"] == f"the key of '{public}'"
    assert (unread.returncode, "signed by" in unread.stdout) == (0, False)
    assert "2 signed files of weights were not compared" in unread.stderr
    assert added.returncode == 1
    assert "extra.py' is not covered by the signature" in added.stdout
    assert (unasked.returncode, "signed" in unasked.stdout) == (0, False)


def test_passwords_come_from_the_environment(example: Path, tmp_path: Path, run: Run) -> None:
    private, public = write_pair(tmp_path, "locked", b"secret")

    without = run("sign", example, "--private-key", private)
    done = run("sign", example, "--private-key", private, HFSHARD_KEY_PASSWORD="secret")

    assert without.returncode == 2
    assert "has a password. Set the environment variable HFSHARD_KEY_PASSWORD" in without.stderr
    assert done.returncode == 0, done.stderr
    assert run("verify", example, "--public-key", public).returncode == 0


def test_what_is_wrong_is_said(example: Path, tmp_path: Path, run: Run) -> None:
    _, public = write_pair(tmp_path, "mine")

    unsigned = run("verify", example, "--public-key", public)
    both = run("verify", example, "--public-key", public, "--identity", "me@example.org")
    ambient = run("sign", example, "--private-key", public, "--use-staging")
    missing = run("sign", example, "--private-key", tmp_path / "none.pem")

    assert unsigned.returncode == 1
    assert f"'{example}' has no signature: there is no 'model.sig'" in unsigned.stdout
    assert "hfshard sign" in unsigned.stdout
    assert run("sign", example).returncode == 2
    assert both.returncode == 2
    assert "in exactly one way: by a public key, by certificates, or by an identity and its OIDC issuer" in both.stderr
    assert (ambient.returncode, "--use-staging requires --sigstore" in ambient.stderr) == (2, True)
    assert (missing.returncode, "The private key '" in missing.stderr) == (2, True)


FIRST, SECOND = SHARDS
INDEX = "model.safetensors.index.json"


def test_whole_checkpoint_is_zero(example: Path, run: Run) -> None:
    # 404,096 + 64,204 bytes: the two shards with their headers of 4,096 bytes.
    assert run.ok("verify", example) == f"{example}: intact: 3 files, 468.3 KB compared with their checksums\n"


def test_json_of_a_whole_checkpoint(example: Path, run: Run) -> None:
    report = json.loads(run.ok("verify", example, "--format", "json"))
    assert (report["ok"], report["level"]) == (True, "full")
    assert report["problems"] == report["warnings"] == []
    assert report["checked_bytes"] == 404_096 + 64_204
    assert sorted(report["files"]) == [FIRST, SECOND, INDEX]


def put_a_directory_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
# What is done to the directory -> (file, tensor) that must be named.
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "flipped bit in the middle of a tensor": (lambda d: flip(d / FIRST, 300_000), FIRST, "embed"),
    "flipped bit in a small tensor": (lambda d: flip(d / SECOND, -1), SECOND, None),
    "flipped bit in a header": (lambda d: flip(d / SECOND, 20), SECOND, None),
    "flipped bit in the padding": (lambda d: flip(d / SECOND, 4090), SECOND, None),
    "truncated shard": (lambda d: os.truncate(d / FIRST, 10_000), FIRST, None),
    "empty shard": (lambda d: os.truncate(d / FIRST, 0), FIRST, None),
    "bytes after the end": (lambda d: os.truncate(d / SECOND, 100_000), SECOND, None),
    "missing shard": (lambda d: (d / SECOND).unlink(), SECOND, None),
    "shard that is a directory": (lambda d: put_a_directory_there(d / SECOND), SECOND, None),
    "shards swapped": (lambda d: shutil.copy(d / SECOND, d / FIRST), FIRST, "embed"),
    "git-lfs pointer": (lambda d: (d / FIRST).write_text(LFS_POINTER), FIRST, None),
    "index cut short": (lambda d: os.truncate(d / INDEX, 100), INDEX, None),
    "index that is a list": (lambda d: (d / INDEX).write_text("[]"), INDEX, None),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_one_and_names_file_and_tensor(kind: str, example: Path, run: Run) -> None:
    damage, file, tensor = DAMAGES[kind]
    damage(example)
    done = run("verify", example, "--format", "json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    named = {(Path(problem["file"]).name, problem["tensor"]) for problem in report["problems"]}
    assert {name for name, _ in named} == {file}
    if tensor is not None:
        assert (file, tensor) in named
    assert all(problem["message"] for problem in report["problems"])


def test_every_damaged_file_is_named_at_once(example: Path, run: Run) -> None:
    flip(example / FIRST, 300_000)
    os.truncate(example / SECOND, 10_000)
    out = run.ok("verify", example, code=1)
    assert f"DAMAGED  {example / FIRST}, tensor embed\n" in out
    assert f"DAMAGED  {example / SECOND}\n" in out
    assert f"\n{example}: DAMAGED: " in out
    assert out.endswith(" in 2 files\n")
    assert "10000" in out


def test_of_many_problems_in_a_file_the_first_five_are_shown_and_json_has_all(tmp_path: Path, run: Run) -> None:
    names = [f"layer.{number}" for number in range(8)]
    hfshard.save_state_dict({name: torch.full((64,), float(hash_)) for hash_, name in enumerate(names)}, tmp_path)
    raw = bytearray((tmp_path / "model.safetensors").read_bytes())
    for number in range(8):
        raw[-256 * number - 1] ^= 0x10
    (tmp_path / "model.safetensors").write_bytes(raw)

    lines = run("verify", tmp_path).stdout.splitlines()
    problems = json.loads(run("verify", tmp_path, "--format", "json").stdout)["problems"]

    file = tmp_path / "model.safetensors"
    assert lines[:10:2] == [f"DAMAGED  {file}, tensor {name}" for name in names[:5]]
    assert lines[10:] == [
        "         3 more problems in this file. To list all, pass --format json.",
        f"{tmp_path}: DAMAGED: 8 problems in 1 file",
    ]
    assert [problem["tensor"] for problem in problems] == names


def test_structure_reads_no_data(example: Path, run: Run) -> None:
    flip(example / FIRST, 300_000)  # beyond the 4 KiB of the tensor that its sample covers
    done = run("verify", example, "--level", "structure")
    assert done.returncode == 0
    assert done.stdout == f"{example}: intact: 3 files, structure only; no bytes were compared with checksums\n"


def test_structure_finds_a_shard_of_another_save(example: Path, run: Run, tmp_path: Path) -> None:
    state_dict = {"embed": torch.zeros(1000, 100), "layer.weight": torch.zeros(150, 100)}
    state_dict |= {"layer.bias": torch.ones(50, dtype=torch.bfloat16), "step": torch.tensor(8)}
    hfshard.save_state_dict(state_dict, tmp_path / "other", max_shard_size="100KB")
    (example / SECOND).write_bytes((tmp_path / "other" / SECOND).read_bytes())
    done = run("verify", example, "--level", "structure")
    assert done.returncode == 1
    assert SECOND in done.stdout
    assert FIRST not in done.stdout


def test_variant_is_verified_alone(example: Path, run: Run) -> None:
    save_example(example, variant="fp16")
    flip(example / FIRST, 300_000)
    assert run("verify", example, "--variant", "fp16").returncode == 0
    assert run("verify", example).returncode == 1


def test_stock_checkpoint_is_zero_with_a_warning(tmp_path: Path, run: Run) -> None:
    save_file({"w": torch.ones(10)}, tmp_path / "model.safetensors")
    done = run("verify", tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"{tmp_path}: intact: 1 file, structure only; no bytes were compared with checksums\n"
    assert done.stderr.startswith("hfshard: warning: ")
    assert "model.safetensors" in done.stderr


def test_directory_without_weights_is_one(tmp_path: Path, run: Run) -> None:
    assert run.fails(1, "verify", tmp_path).startswith(f"hfshard: There is no checkpoint in '{tmp_path}'")


@pytest.mark.parametrize("option", [None, "--no-progress"])
def test_bar_is_shown_on_a_terminal_unless_unwanted(
    option: str | None, example: Path, child_environment: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, 100))
    command = ["-m", "hfshard", "verify", example, *([option] if option else [])]
    done = processes.run(command, env=child_environment, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # EIO: the other end is closed
        while chunk := os.read(ours, 4096):
            shown += chunk
    os.close(ours)
    assert done.returncode == 0
    assert done.stdout.endswith("compared with their checksums\n")
    assert ("Verifying: " in shown.decode()) == (option is None)
    assert option is None or shown == b""


def lines_on_terminal(columns: int, environment: dict[str, str], *arguments: object) -> list[str]:
    """Run a command on a terminal of this width, and return what it prints there."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, columns))
    without_columns = {name: value for name, value in environment.items() if name != "COLUMNS"}

    done = processes.run(["-m", "hfshard", *arguments], env=without_columns, stdout=theirs)
    os.close(theirs)
    lines = os.read(ours, 65536).decode().splitlines()
    os.close(ours)

    assert done.returncode == 0
    return lines


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "model-00002-of-00002.safetensors   64.2 KB        3  sha256 "),
        (120, "model-00002-of-00002.safetensors   64.2 KB  ███▏                        3  sha256 "),
    ],
)
def test_files_are_one_line_each_on_a_terminal_of_80_columns(
    columns: int, shown: str, example: Path, child_environment: dict[str, str]
) -> None:
    lines = lines_on_terminal(columns, child_environment, "inspect", example)

    [line] = [line for line in lines if line.startswith("model-00002-of-00002.safetensors ")]
    assert line.startswith(shown)
    assert len(line) <= columns


@pytest.mark.parametrize(
    ("columns", "head", "shown"),
    [
        (80, "dtype  shape  size", "F32    2×3    24 B"),
        (90, "dtype  shape  size  file", "F32    2×3    24 B  model.safetensors"),
        (
            120,
            "dtype  shape  parameters  size  file",
            "F32    2×3             6  24 B  model.safetensors",
        ),
    ],
)
def test_tensors_are_one_line_each_on_a_narrow_terminal(
    columns: int, head: str, shown: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    name = "base_model.model.layers.0.self_attn.q_proj.weight"
    hfshard.save_state_dict({name: torch.ones(2, 3)}, tmp_path)

    lines = lines_on_terminal(columns, child_environment, "inspect", tmp_path)

    at = next(number for number, line in enumerate(lines) if line.startswith("largest tensors"))
    assert lines[at] == f"{'largest tensors':<49}  {head}"
    assert lines[at + 1] == f"{name}  {shown}"


def test_what_is_signed_with_is_exactly_one_of_key_and_sigstore(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser().parse_args(["sign", "here", "--private-key", "k.pem"]).private_key == "k.pem"

    assert "one of the arguments --private-key --sigstore is required" in rejected(capsys, "sign", "here")
    both = rejected(capsys, "sign", "here", "--private-key", "k.pem", "--sigstore")
    assert "argument --sigstore: not allowed with argument --private-key" in both
