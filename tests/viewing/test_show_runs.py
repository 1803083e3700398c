"""Pages of a run and of its steps, in a directory and in a store: what they say in HTML."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import hfshard
from hfshard._util.text import format_size
from hfshard.checkpoint.reports import Problem
from hfshard.errors import InvalidArgumentError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.viewing.page.page import render_page
from hfshard.viewing.page.run_page import StepChange, make_run_page
from hfshard.viewing.run_listing import ListedCheckpoint, checkpoints_of, list_checkpoints
from hfshard.viewing.show import outline_of_run, page_of_run, show_checkpoint, step_changes
from tests.servers.stores.buckets import Bucket


def save_run(root: Path | str) -> None:
    """Steps 10 and 20: the first layer is frozen, and no random number was drawn between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters())
    with CheckpointManager(root) as manager:
        for step in (10, 20):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            manager.save(step, TrainingState(model=model, optimizer=optimizer), metric={"loss": 1 / step})


def page_of(place: Path | str, directory: Path) -> str:
    return Path(show_checkpoint(place, directory / "page.html")).read_text(encoding="utf-8")


def facts_in(html: str) -> dict[str, list[str]]:
    """Label -> value and note."""
    found = re.findall(r"<dt>(.*?)</dt>\s*<dd>(.*?)</dd>", html, re.DOTALL)
    return {label: re.sub(r"<[^>]*>", "\n", text).split("\n")[:2] for label, text in found}


def parts_in(html: str) -> list[tuple[str, str, int]]:
    """Part, size and number of files in the table of a step."""
    table = re.search(r'<table id="parts" class="sortable">(.*?)</table>', html, re.DOTALL)
    assert table is not None
    rows = re.findall(
        r'<td>(\w+)</td><td class="number" data-value="\d+">([^<]*)</td>.*?<td class="number">(\d+)</td>',
        table[1],
        re.DOTALL,
    )
    return [(part, size, int(files)) for part, size, files in rows]


def test_the_page_of_a_step_has_what_is_not_the_model(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    step = tmp_path / "run" / "checkpoint-00000020"
    sizes = {path.name: path.stat().st_size for path in step.iterdir()}
    others = ("checkpoint.json", "training_state.json")
    model = [name for name in sizes if name.startswith("model")]

    html = page_of(step, tmp_path)

    assert facts_in(html)["step of a run"] == ["20", "loss 0.05"]
    expected = [
        ("model", sum(sizes[name] for name in model), len(model)),
        ("state", sizes["state.safetensors"], 1),
        ("other", sum(sizes[name] for name in others), 2),
        ("optimizer", sizes["optimizer.safetensors"], 1),
    ]
    assert sum(size for _, size, _ in expected) == sum(sizes.values())
    by_size = sorted(expected, key=lambda row: -row[1])
    assert parts_in(html) == [(part, format_size(size), files) for part, size, files in by_size]
    assert f"{format_size(sum(sizes.values()))} in all" in html
    (step / "checkpoint.json").write_text('{"format": "<b>"}')
    html = page_of(step, tmp_path)
    assert "has format &#39;&lt;b&gt;&#39;" in html
    assert "step of a run" not in facts_in(html)
    os.remove(step / "checkpoint.json")
    assert "<h2>The whole checkpoint" not in page_of(step, tmp_path)


@pytest.mark.parametrize("name", ["variant", "key", "subfolder", "revision", "max_shard_size"])
def test_what_is_for_one_checkpoint_is_refused_for_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / "checkpoint-00000010").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-00000010" / "checkpoint.json").write_text("{}")

    with pytest.raises(InvalidArgumentError, match=rf"^{name} is for one checkpoint, not for a run\.$"):
        show_checkpoint(tmp_path / "run", tmp_path / "page.html", **{name: "1GB"})  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_run_in_a_store(bucket: Bucket, store_address: str, tmp_path: Path) -> None:
    root = f"{store_address}/run"
    save_run(root)

    html = page_of(root, tmp_path)

    assert "<title>run</title>" in html
    assert f'<p class="place name">{root}</p>' in html.replace("<wbr>", "")
    facts = facts_in(html)
    assert facts["checkpoints"] == ["2", "steps 10 to 20"]
    assert facts["latest"][0] == "step 20"
    assert facts["damaged"] == ["none"]
    assert re.fullmatch(r"[\d.]+ KB unchanged: copied there", facts["in the store"][1])
    assert "unchanged: copied from one before" in html
    assert "From step 10 to step 20, only layer 1 of 2 changed: 2 of 4 tensors." in html
    assert re.search(r"<title>step 20: [\d.]+ KB written, [\d.]+ KB copied", html)
    prefix = root.partition(f"/{bucket.name}/")[2]
    [optimizer] = [
        key for key in bucket.sizes(f"{prefix}/checkpoint-00000020/optimizer-") if key.endswith(".safetensors")
    ]
    bucket.delete(optimizer)
    html = page_of(root, tmp_path)
    assert (facts_in(html)["damaged"], facts_in(html)["latest"][0]) == (["1"], "step 10")
    name = optimizer.rpartition("/")[2]
    assert f"{root}/checkpoint-00000020/{name}&#39; is missing" in html
    parts = parts_in(page_of(f"{root}/checkpoint-20", tmp_path))
    assert sorted(part for part, _, _ in parts) == ["model", "optimizer", "other", "state"]


def test_no_path_of_this_machine_is_on_the_pages_of_a_run(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    step = tmp_path / "run" / "checkpoint-00000020"
    (step / "optimizer.safetensors").write_bytes(b"damaged")
    (step / "checkpoint.json").write_text('{"format": 0}')

    pages = [page_of(place, tmp_path).replace("<wbr>", "") for place in (tmp_path / "run", step)]

    assert not any(str(tmp_path) in html for html in pages)
    assert "&#39;run/checkpoint-00000020/checkpoint.json&#39;" in pages[0]
    assert "&#39;checkpoint-00000020/checkpoint.json&#39;" in pages[1]
    path = show_checkpoint(tmp_path / "run", tmp_path / "page.html", paths=True)
    assert f"&#39;{step}/checkpoint.json&#39;" in Path(path).read_text(encoding="utf-8").replace("<wbr>", "")


def test_columns_that_say_the_same_are_folded_into_a_sentence(tmp_path: Path) -> None:
    save_run(tmp_path / "run")

    html = page_of(tmp_path / "run", tmp_path)

    head = re.search(r'<table id="checkpoints".*?</thead>', html, re.DOTALL)
    assert head is not None
    assert "model</th>" not in head[0]
    assert "loss</th>" in head[0]
    sentence = re.search(r'id="constants">(.*?)</p>', html, re.DOTALL)
    assert sentence is not None
    model = sum(path.stat().st_size for path in (tmp_path / "run" / "checkpoint-00000020").glob("model*"))
    assert f'<span class="name">model</span> <b>{format_size(model)}</b>' in sentence[1]


def test_what_changed_is_found_by_digests_or_left_out(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    steps = [str(tmp_path / "run" / f"checkpoint-000000{step}") for step in (10, 20)]

    assert step_changes(steps) == {steps[1]: StepChange(2, 4, "Only layer 1 of 2 changed: 2 of 4 tensors.")}
    assert step_changes([steps[0], str(tmp_path / "missing"), steps[1]]) == step_changes(steps)
    for name, scale in (("a", 1), ("b", 2)):
        hfshard.save_state_dict({"weight": torch.ones(4) * scale}, tmp_path / name, checksum=None)
    assert step_changes([str(tmp_path / "a"), str(tmp_path / "b")]) == {}


def test_the_page_of_a_run_says_what_model_it_trains_and_what_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=2, num_attention_heads=1, intermediate_size=4)
    model = BertModel(config)
    parameters = dict(model.named_parameters())
    with CheckpointManager(tmp_path / "run") as manager:
        for step, loss in ((1000, 3.0), (2000, 1.0), (3000, 2.0)):
            with torch.no_grad():
                parameters["encoder.layer.1.output.dense.bias"].add_(1)
                if step == 3000:
                    parameters["pooler.dense.bias"].add_(1)
            manager.save(step, TrainingState(model=model), metric={"loss": loss})

    page = page_of_run(str(tmp_path / "run"), "loss", "min")

    assert page.about == ("BertModel (bert)", "2 layers × 4", "vocabulary 8", "float32")
    assert page.view["sentences"] == [
        "Step 2,000 is the best: loss 1 is the lowest of 3 checkpoints; "
        "the latest, step 3,000, has 2 (100.0 % higher).",
        "From step 1,000 to step 2,000, only output.dense.bias of layer 1 of 2 changed: 1 of 39 tensors.",
    ]
    assert page_of_run(str(tmp_path / "run"), None, "min").view["sentences"] == [
        "From step 1,000 to step 3,000, only output.dense.bias of layer 1 of 2 and pooler.dense.bias changed: "
        "2 of 39 tensors.",
    ]
    of_first = page_of_run(str(tmp_path / "run"), "loss", "max").view["sentences"]
    assert of_first[1].startswith("From step 1,000 to step 3,000, only ")


def test_what_training_changed_is_left_out_where_digests_do_not_tell(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    listed = list_checkpoints(checkpoints_of(str(tmp_path / "run")))
    assert outline_of_run(listed) == (None, "From step 10 to step 20, only layer 1 of 2 changed: 2 of 4 tensors.")
    assert outline_of_run(listed[:1]) == (None, "")

    gone = replace(listed[0], path=str(tmp_path / "missing"), step=5)
    assert outline_of_run([gone, *listed, gone])[1].startswith("From step 10 to step 20, only layer 1 ")
    same = replace(listed[1], step=30)
    assert outline_of_run([listed[1], same])[1] == "From step 20 to step 30, nothing changed: the same 4 tensors."
    for name, tensors in (("a", {"w": 1}), ("b", {"w": 2}), ("c", {"w": 1, "x": 1})):
        state_dict = {fqn: torch.full((4,), float(value)) for fqn, value in tensors.items()}
        hfshard.save_state_dict(state_dict, tmp_path / name, checksum=None)
    of = {name: replace(listed[0], path=str(tmp_path / name)) for name in "abc"}
    assert outline_of_run([of["a"], of["b"]]) == (None, "")
    assert outline_of_run([of["a"], of["c"]]) == (None, "")


def test_changes_are_for_runs_alone(tmp_path: Path) -> None:
    hfshard.save_state_dict({"weight": torch.ones(4)}, tmp_path / "one")

    with pytest.raises(InvalidArgumentError, match=r"^diff is for a run, not for one checkpoint\.$"):
        show_checkpoint(tmp_path / "one", tmp_path / "page.html", diff=True)


def test_a_checkpoint_with_many_problems_and_metrics_stays_a_row_of_a_page() -> None:
    problems = tuple(Problem(f"/run/step/{number}", None, f"File {number} is missing. " * 500) for number in range(90))
    metrics = {f"metric_{number}": number / 7 for number in range(40)}
    listed = [ListedCheckpoint(f"/run/{step}", step, problems, is_verified=True, metrics=metrics) for step in range(50)]

    html = render_page(make_run_page("/run", listed, {}))

    assert len(html) < 2_000_000
    assert html.count("and 85 more: hfshard verify lists them") == 50
    assert "and 32 more metrics, in the table" in html
    assert "step 3: metric_1 0.142857 (damaged)</title>" in html
    assert "<dt>best</dt>" not in html
