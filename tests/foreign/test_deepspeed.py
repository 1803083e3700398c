"""DeepSpeed's directories as tables: what is joined, what is refused, and which tag is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    InvalidArgumentError,
    MissingShardError,
    UnsafePathError,
)
from hfshard.foreign.byte_runs import ForeignTable
from hfshard.foreign.deepspeed import find_tag
from hfshard.foreign.find_foreign import find_foreign, open_foreign
from tests.foreign.like_deepspeed import (
    BUFFERS,
    FROZEN,
    SHARED,
    TRAINED,
    ZeroStageEnum,
    contents,
    expected,
    state_of_model,
    universal,
    values,
    write,
    zero_partitions,
)
from tests.helpers.tensor_bytes import assert_same

RANK_0 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
RANK_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
MODEL_0 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
GAPS = [[1, 0], [0], [0]]
LONG = [[10**5000, 0], [0], [0]]
HUGE = [{"a": (2**62, 2**62), "b": (1,)}, {"c": (1,)}, {"d": (1,)}]
MODEL_1 = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def read(directory: Path, key: str | None = None) -> ForeignTable:
    with closing(open_foreign(str(directory), find_foreign(str(directory)), key)) as shard:
        return shard.table


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_are_joined_and_the_rest_is_as_it_was_saved(stage: int, ranks: int, tmp_path: Path) -> None:
    write(tmp_path / "global_step2", contents(stage, ranks))

    table = read(tmp_path)

    assert_same(values(table), expected())
    assert table.aliases == SHARED
    assert table.framework == f"DeepSpeed ZeRO-{stage}, {ranks} rank{'s' * (ranks > 1)}"


def test_runs_are_where_the_partitions_are(tmp_path: Path) -> None:
    write(tmp_path, contents(1, 2, [{"embed": torch.arange(3.0), "b": torch.arange(4.0).view(2, 2)}]))

    table = read(tmp_path)

    # 7 elements are padded to 8: rank 0 has the 3 of `embed` and one of `b`, rank 1 has three of `b`.
    assert [(run.file, run.size, run.start) for run in table.tensors["embed"].runs] == [(RANK_0, 12, 0)]
    assert [(run.file, run.size, run.start) for run in table.tensors["b"].runs] == [(RANK_0, 4, 0), (RANK_1, 12, 4)]
    assert table.tensors["b"].runs[0].offset == table.tensors["embed"].runs[0].offset + 12
    assert table.sizes == {name: (tmp_path / name).stat().st_size for name in (MODEL, RANK_0, RANK_1)}


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_as_trained_are_read_where_there_are_any(stage: int, tmp_path: Path) -> None:
    write(tmp_path, {MODEL: contents(stage, 2)[MODEL]})  # no other file is needed

    table = read(tmp_path, "module")

    assert_same(values(table), expected(masters=False))
    assert table.framework == "DeepSpeed ZeRO without masters"


def test_weights_as_trained_are_not_in_files_of_zero_3(tmp_path: Path) -> None:
    write(tmp_path, contents(3, 2))

    with pytest.raises(InvalidArgumentError, match="has no weights as they were trained: DeepSpeed"):
        read(tmp_path, "module")


def test_a_folder_that_may_not_be_listed_has_no_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("os.listdir", refuse)

    assert find_tag(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {"keeps_padding": True}),
        (2, {"alignment": 1}),
        (2, {"alignment": 1, "keeps_padding": True}),
        (1, {"gap": 3}),
        (2, {"gap": 1, "keeps_padding": True}),
        (3, {"sub_group": 3}),
        (3, {"sub_group": 1}),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_other_paddings_and_sub_groups(stage: int, options: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    write(tmp_path, contents(stage, ranks, **options))

    assert_same(values(read(tmp_path)), expected())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensors_without_dimensions_or_elements_and_empty_groups(stage: int, ranks: int, tmp_path: Path) -> None:
    """Versions before 0.9 allow all of them."""
    embed = TRAINED[0]["embed"]  # the tied one
    groups = [{"scalar": torch.tensor(-3.5), "embed": embed}, {}, {"nothing": torch.empty(0, 3)}, {"b": torch.ones(1)}]
    write(tmp_path, contents(stage, ranks, groups))

    assert_same(values(read(tmp_path)), expected(groups=groups))


def test_bf16_optimizer_has_no_stage(tmp_path: Path) -> None:
    files = {MODEL: contents(1, 3)[MODEL]} | zero_partitions(None, 3, TRAINED, keeps_padding=True)
    write(tmp_path, files)

    table = read(tmp_path)

    assert_same(values(table), expected())
    assert table.framework == "DeepSpeed BF16_Optimizer, 3 ranks"


def test_order_is_that_of_the_flat_group_and_names_are_in_that_of_the_model(tmp_path: Path) -> None:
    group = {"up": torch.arange(4.0), "embed": torch.arange(6.0)}  # round robin
    files = contents(2, 2, [group])
    weights = files[MODEL]["module"]
    for name in ("up", "head"):
        weights.move_to_end(name)
    files[MODEL]["ds_config"] = {"zero_optimization": {"round_robin_gradients": True}}
    slices = _optimizer(files, RANK_0)["param_slice_mappings"][0]
    slices["up"].start, slices["embed"].start = slices["embed"].start, slices["up"].start  # which DeepSpeed gets wrong
    write(tmp_path, files)

    table = read(tmp_path)

    assert values(table)["up"].equal(group["up"])
    assert values(table)["embed"].equal(group["embed"])
    assert list(table.tensors) == [*BUFFERS, "embed", *FROZEN, "up"]


def test_ranks_with_other_orders_of_a_group_are_refused(tmp_path: Path) -> None:
    files = contents(3, 2)
    first = files[MODEL_1]["param_shapes"][0]
    files[MODEL_1]["param_shapes"][0] = dict(reversed(list(first.items())))
    write(tmp_path, files)

    with pytest.raises(DamagedCheckpointError, match="parameters of different shapes"):
        read(tmp_path)


def test_frozen_parameters_that_were_left_out_are_no_error(tmp_path: Path) -> None:
    files = contents(3, 2)
    for name in (MODEL_0, MODEL_1):
        del files[name]["module"]["fixed"]
        files[name]["module"]["alias"] = torch.zeros(0)
        files[name] |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    files[MODEL_0]["shared_params"]["alias"] = "fixed"
    write(tmp_path, files)

    table = read(tmp_path)

    assert "fixed" not in table.tensors
    assert table.aliases == SHARED


@pytest.mark.parametrize("stage", [1, 2])
def test_names_of_a_left_out_tensor_and_empty_ones_are_not_tied(stage: int, tmp_path: Path) -> None:
    files = contents(stage, 2)
    state = files[MODEL]
    weights = state["module"]
    weights |= {"alias": weights.pop("fixed"), "first": torch.zeros(0, 3), "second": torch.zeros(2, 0)}
    state["shared_params"] |= {"alias": "fixed", "second": "first"}  # as empty tensors have the same address
    write(tmp_path, files)

    table = read(tmp_path)

    assert table.aliases == SHARED
    assert values(table)["alias"].equal(FROZEN["fixed"])
    assert [table.tensors[name].shape for name in ("first", "second")] == [(0, 3), (2, 0)]


@pytest.mark.parametrize("stage", [1, 2])
def test_names_that_the_file_takes_for_tied_are_tied_only_if_their_bytes_are_equal(stage: int, tmp_path: Path) -> None:
    files = contents(stage, 2)
    state = files[MODEL]
    state["module"] |= {"copy": FROZEN["fixed"].clone(), "other": FROZEN["fixed"] * 2}
    state["shared_params"] |= {"copy": "fixed", "other": "fixed"}
    write(tmp_path, files)

    table = read(tmp_path)

    assert table.aliases == {**SHARED, "copy": "fixed"}
    assert values(table)["other"].equal(FROZEN["fixed"] * 2)


def test_without_zero_ties_are_those_of_the_file(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    weights = {"a": weight, "b": weight, "c": weight.view(3, 2), "d": weight.clone()}
    write(tmp_path, {MODEL: state_of_model(None, weights)})

    table = read(tmp_path)

    assert_same(values(table), weights)
    assert table.aliases == {"b": "a"}
    assert table.framework == "DeepSpeed without ZeRO"


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_different_steps_are_refused(stage: int, is_tensor: bool, tmp_path: Path) -> None:
    """A killed save over an older one leaves files of both, and all of them fit together."""
    files = contents(stage, 2)
    for step, (name, content) in enumerate(sorted(files.items())):
        if "optim" in name:
            state = content["optimizer_state_dict"]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            state["state"][0] = {"step": torch.tensor(float(step)) if is_tensor else step}
    write(tmp_path, files)

    with pytest.raises(DamagedCheckpointError, match="are of different optimizer steps"):
        read(tmp_path)


class TestTags:
    """Choice of the folder that is read."""

    def test_folder_itself_the_latest_or_the_only_one(self, tmp_path: Path) -> None:
        for name in ("old", "new"):
            write(tmp_path / name, {MODEL: {}})
        (tmp_path / "other").mkdir()

        assert find_tag(str(tmp_path / "new")) == ""
        assert find_tag(str(tmp_path / "other")) is None
        assert find_tag(str(tmp_path / "none")) is None
        (tmp_path / "latest_universal").write_text("old")
        assert find_tag(str(tmp_path)) == "old"
        (tmp_path / "latest").write_text("new\n")
        assert find_tag(str(tmp_path)) == "new"

    def test_several_without_a_latest_one_are_named(self, tmp_path: Path) -> None:
        for name in ("global_step1", "global_step2"):
            write(tmp_path / name, {MODEL: {}})

        message = f"Pass one: '{tmp_path}/global_step1', '{tmp_path}/global_step2'."
        with pytest.raises(AmbiguousWeightsError, match=re.escape(message)):
            read(tmp_path)

    @pytest.mark.parametrize("latest", ["../elsewhere", "/etc", "..", "a/b", "", "global\x00"])
    def test_latest_one_is_a_plain_name(self, latest: str, tmp_path: Path) -> None:
        write(tmp_path / "tag", {MODEL: {}})
        (tmp_path / "latest").write_text(latest)

        with pytest.raises((UnsafePathError, DamagedCheckpointError)):
            read(tmp_path)

    def test_latest_one_that_is_missing(self, tmp_path: Path) -> None:
        write(tmp_path / "tag", {MODEL: {}})
        (tmp_path / "latest").write_text("global_step9")

        with pytest.raises(CheckpointNotFoundError, match=r"names 'global_step9', but .* another one: .*tag"):
            read(tmp_path)

    def test_folder_that_is_a_link_to_outside_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "elsewhere", contents(1, 1))
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "tag").symlink_to(tmp_path / "elsewhere")

        with pytest.raises(UnsafePathError):
            read(tmp_path / "run")


Files = dict[str, Any]


def _optimizer(files: Files, name: str) -> dict[str, Any]:
    state: dict[str, Any] = files[name]["optimizer_state_dict"]
    return state


def _without(*names: str) -> Callable[[Files], object]:
    return lambda files: [files.pop(name) for name in names]


def _copied(name: str, to: str) -> Callable[[Files], object]:
    return lambda files: files.update({to: files[name]})


def _leave_of_larger_run(files: Files) -> None:
    files |= zero_partitions(1, 4, TRAINED) | files


def _count(number: Any) -> Callable[[Files], object]:
    return lambda files: [_optimizer(files, name).update(partition_count=number) for name in (RANK_0, RANK_1)]


def _settings(**settings: Any) -> Callable[[Files], object]:
    def change(files: Files) -> None:
        for name in files:
            if "model_states" in name:
                files[name]["ds_config"] = {"zero_optimization": settings}

    return change


def _settings_of_slices(files: Files) -> None:
    for name in (MODEL_0, MODEL_1):
        files[name]["checkpoint_parallel_dimensions"]["tp_degree"] = 2


def _slice(files: Files) -> None:
    _optimizer(files, RANK_1)["param_slice_mappings"][0]["up"].start += 1


def _unknown_slice(files: Files) -> None:
    slices = _optimizer(files, RANK_1)["param_slice_mappings"][0]
    slices["other"] = slices["up"]


def _masters(name: str, number: int, value: torch.Tensor) -> Callable[[Files], object]:
    def change(files: Files) -> None:
        state = _optimizer(files, name)
        state["single_partition_of_fp32_groups" if "param_slice_mappings" in state else "fp32_flat_groups"][number] = (
            value
        )

    return change


def _state(name: str, **values: Any) -> Callable[[Files], object]:
    return lambda files: files[name].update(values)


def _optimizer_state(name: str, **values: Any) -> Callable[[Files], object]:
    return lambda files: _optimizer(files, name).update(values)


def _weight(name: str, value: Any) -> Callable[[Files], object]:
    return lambda files: files[next(one for one in (MODEL, MODEL_0) if one in files)]["module"].update({name: value})


@pytest.mark.parametrize(
    ("stage", "change", "error", "message"),
    [
        (1, _without(RANK_0), MissingShardError, f"optimizer files of ranks 1 of 2: that of rank 0 ('{RANK_0}')"),
        (3, _without(RANK_1), MissingShardError, f"optimizer files of ranks 0 of 2: that of rank 1 ('{RANK_1}')"),
        (3, _without(MODEL_1), MissingShardError, f"model files of ranks 0 of 2: that of rank 1 ('{MODEL_1}')"),
        (3, _without(RANK_0, RANK_1), MissingShardError, "lacks the file of rank 0's masters"),
        (1, _without(MODEL), MissingShardError, f"lacks the file of the weights ('{MODEL}')"),
        (1, _leave_of_larger_run, DamagedCheckpointError, "was saved by 2 ranks, and 'bf16_zero_pp_rank_2_mp_rank_00"),
        (1, _copied(RANK_1, RANK_1.replace("rank_1", "rank_2")), DamagedCheckpointError, "leftovers of a larger run"),
        (3, _copied(MODEL_1, MODEL_1.replace("rank_1", "rank_2")), DamagedCheckpointError, "leftovers of a larger run"),
        (1, _copied(RANK_1, RANK_1[5:]), DamagedCheckpointError, "are two files of one rank"),
        (3, _copied(MODEL_0, MODEL), DamagedCheckpointError, "it has files of two runs, with ZeRO-3 and without it"),
        (1, _copied(MODEL, MODEL_0), DamagedCheckpointError, "it has files of two runs, with ZeRO-3 and without it"),
        (1, _state(RANK_1, ds_version="0.9"), DamagedCheckpointError, "by DeepSpeed 0.19.8, and"),
        (3, _state(MODEL_1, ds_version="0.9"), DamagedCheckpointError, "by 0.9: one of them is a leftover"),
        (3, _state(MODEL_1, param_shapes=[{}]), DamagedCheckpointError, "have parameters of different shapes"),
        (1, _state(MODEL, param_shapes=[{"a": (1,)}] * 3), DamagedCheckpointError, "parameter 'a' is in two groups"),
        (1, _state(MODEL, param_shapes=[{"a": (1,)}]), DamagedCheckpointError, "has other groups than"),
        (1, _state(MODEL, param_shapes=[{"a": (-1,)}]), DamagedCheckpointError, "not as DeepSpeed writes it"),
        (1, _state(MODEL, param_shapes=[{"a": (2**62,) * 2, "b": (1,)}]), DamagedCheckpointError, "has other groups"),
        (1, _state(MODEL, param_shapes=HUGE), DamagedCheckpointError, "elements of a group"),
        (1, _state(MODEL, param_shapes=[{}, {}, {}]), DamagedCheckpointError, "has other paddings than one"),
        (1, _state(MODEL, module=[1]), DamagedCheckpointError, "a list in place of a dict"),
        (1, _state(MODEL, shared_params={"x": 1}), DamagedCheckpointError, "a int in place of text"),
        (1, _copied(MODEL, "mp_rank_01_model_states.pt"), InvalidArgumentError, "tensor parallel slices (2) without"),
        (1, _state(MODEL, mp_world_size=4), InvalidArgumentError, "tensor parallel slices (4) without a rule"),
        (1, _state(MODEL, mp_world_size=10**5000), DamagedCheckpointError, "not as DeepSpeed writes it"),
        (3, _settings_of_slices, InvalidArgumentError, "tensor parallel slices (2) without a rule"),
        (1, _copied(MODEL, "layer_3_expert_0_mp_rank_00_model_states.pt"), InvalidArgumentError, "has experts in"),
        (1, _copied(MODEL, "expp_rank_0_mp_rank_00_optim_states.pt"), InvalidArgumentError, "has experts in parts"),
        (1, _count([2, 1, 2]), InvalidArgumentError, "has experts in parts, whose groups have fewer ranks"),
        (1, _count([]), DamagedCheckpointError, "has no groups"),
        (1, _count([10**15] * 3), MissingShardError, "that of rank 2"),
        (1, _count([-1] * 3), DamagedCheckpointError, "not as DeepSpeed writes it"),
        (3, _optimizer_state(RANK_0, ds_zero_partition_groups=[{}]), InvalidArgumentError, "has experts in parts"),
        (3, _settings(offload_optimizer={"device": "nvme"}), InvalidArgumentError, "optimizer states on NVMe"),
        (3, _settings(offload_param={"device": "nvme"}), InvalidArgumentError, "optimizer states on NVMe"),
        (3, _copied(MODEL_0, "offloaded_tensors/rank0/x.pt"), InvalidArgumentError, "optimizer states on NVMe"),
        (3, _settings(mics_shard_size=2), InvalidArgumentError, "within groups of ranks (MiCS)"),
        (3, _settings(mics_shard_size=10**5000), InvalidArgumentError, "within groups of ranks (MiCS)"),
        (3, _settings(zero_quantized_nontrainable_weights=True), InvalidArgumentError, "quantized frozen weights"),
        (1, _masters(RANK_0, 0, torch.zeros(11)), DamagedCheckpointError, "peers have 11, 10 elements of a group of "),
        (1, _masters(RANK_1, 0, torch.zeros(9)), DamagedCheckpointError, "peers have 12, 9 elements of a group of "),
        (1, _masters(RANK_1, 0, torch.zeros(13)), DamagedCheckpointError, "peers have 12, 13 elements of a group of "),
        (1, _masters(RANK_1, 0, torch.zeros(2, 5)), DamagedCheckpointError, "is not flat"),
        (1, _masters(RANK_1, 0, torch.zeros(10).half()), DamagedCheckpointError, "parts of different dtypes"),
        (3, _masters(RANK_1, 0, torch.zeros(11)), DamagedCheckpointError, "has 15 elements of parameters that need 16"),
        (3, _masters(RANK_1, 0, torch.zeros(12).half()), DamagedCheckpointError, "parts of different dtypes"),
        (1, _slice, DamagedCheckpointError, "has parameter 'up' in another place than its shape says"),
        (1, _unknown_slice, DamagedCheckpointError, "has parameter 'other' in another place than its shape says"),
        (1, _optimizer_state(RANK_1, param_alignment_paddings=[]), DamagedCheckpointError, "other paddings than one"),
        (1, _optimizer_state(RANK_0, param_alignment_paddings=LONG), DamagedCheckpointError, "other paddings than one"),
        (1, _optimizer_state(RANK_1, param_alignment_paddings=GAPS), DamagedCheckpointError, "different paddings"),
        (1, _optimizer_state(RANK_1, zero_stage=ZeroStageEnum.gradients), DamagedCheckpointError, "different groups"),
        (1, _optimizer_state(RANK_0, zero_stage=7), DamagedCheckpointError, "stage 7 of ZeRO"),
        (1, _optimizer_state(RANK_0, single_partition_of_fp32_groups=[]), DamagedCheckpointError, "numbers of groups"),
        (1, _weight("up", torch.zeros(2)), DamagedCheckpointError, "has two shapes of parameter 'up'"),
        (1, _weight("extra", None), DamagedCheckpointError, "its entry 'extra' is not a dense tensor"),
        (1, _weight("extra", torch.zeros(2, 3).T), InvalidArgumentError, "'extra' in another order than row-major"),
        (3, _weight("extra", torch.zeros(0)), DamagedCheckpointError, "of parameter 'extra', and none is tied to it"),
        (3, _state(MODEL_1, frozen_param_fragments={}), DamagedCheckpointError, "lacks its part of the frozen"),
        (
            3,
            _state(MODEL_1, frozen_param_fragments={"fixed": torch.zeros(4)}),
            DamagedCheckpointError,
            "lacks its part of the frozen parameter 'fixed'",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(
    stage: int, change: Callable[[Files], object], error: type[HfshardError], message: str, tmp_path: Path
) -> None:
    files = contents(stage, 2)
    change(files)
    write(tmp_path, files)

    with pytest.raises(error, match=re.escape(message)) as raised:
        read(tmp_path)

    assert type(raised.value) is error


class TestUniversal:
    """Checkpoints of ds_to_universal."""

    def test_only_trained_parameters_are_read_from_their_folders(self, tmp_path: Path) -> None:
        trained = {"embed": torch.arange(6.0).view(2, 3) + 0.1, "up": torch.arange(3.0)}
        weights = {**{name: one.bfloat16() for name, one in trained.items()}, **BUFFERS, **FROZEN}
        write(tmp_path / "step", universal(weights, trained))
        (tmp_path / "latest_universal").write_text("step")

        table = read(tmp_path)

        assert_same(values(table), {**trained, **BUFFERS, **FROZEN})
        assert table.framework == "DeepSpeed universal checkpoint"
        assert_same(values(read(tmp_path, "module")), weights)

    def test_values_that_were_cut_in_another_order_are_refused(self, tmp_path: Path) -> None:
        files = universal({"up": torch.zeros(3)}, {"up": torch.zeros(3)})
        files[MODEL]["ds_config"] = {"zero_optimization": {"round_robin_gradients": True}}
        write(tmp_path, files)

        with pytest.raises(DamagedCheckpointError, match=r"wrong values of runs with round_robin.* Load the save that"):
            read(tmp_path)

    @pytest.mark.parametrize("is_bare", [False, True])
    def test_zero_3_has_frozen_ones_in_parts(self, is_bare: bool, tmp_path: Path) -> None:
        files = {name: one for name, one in contents(3, 2).items() if "model" in name}
        trained = {name: one for group in TRAINED for name, one in group.items()}
        parameters = {name: one.flatten() if is_bare else {"param": one} for name, one in trained.items()}
        write(tmp_path, {f"zero/{name}/fp32.pt": one for name, one in parameters.items()} | files)

        assert_same(values(read(tmp_path)), expected())

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (_without("zero/up/fp32.pt"), MissingShardError, "zero/up/fp32.pt"),
            (_state("zero/up/fp32.pt", param=torch.zeros(2)), DamagedCheckpointError, "have different shapes"),
            (_state(MODEL, param_shapes=[{"../up": (3,)}]), UnsafePathError, "outside of"),
            (_without(MODEL), CheckpointNotFoundError, "no weights of another framework"),
            (_copied(MODEL, "mp_rank_01_model_states.pt"), InvalidArgumentError, "tensor parallel slices (2)"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, change: Callable[[Files], object], error: type[HfshardError], message: str, tmp_path: Path
    ) -> None:
        files = universal({"up": torch.zeros(3), "scale": torch.zeros(1)}, {"up": torch.zeros(3)})
        change(files)
        write(tmp_path, files)

        with pytest.raises(error, match=re.escape(message)):
            read(tmp_path)

    def test_padding_of_a_vocabulary_was_cut_off(self, tmp_path: Path) -> None:
        files = universal({"embed": torch.zeros(4, 2)}, {"embed": torch.zeros(4, 2)})
        files["zero/embed/fp32.pt"] |= {"param": torch.ones(3, 2), "vocab_tensor": True}
        write(tmp_path, files)

        assert_same(values(read(tmp_path)), {"embed": torch.ones(3, 2)})


STAGES = (
    {"tied_modules.words.weight": torch.arange(6.0).view(3, 2), "1.weight": torch.arange(5.0) + 0.1},
    {"2.weight": torch.arange(3.0) + 0.2, "tied_modules.words.weight": torch.arange(6.0).view(3, 2)},
)
"""Parameters of two stages; layers 0 and 3 are the tied ones."""


def _pipeline(*, has_masters: bool) -> Files:
    layers = {
        0: {"weight": torch.arange(6.0).view(3, 2).bfloat16()},
        1: {"weight": (torch.arange(5.0) + 0.1).bfloat16(), "steps": torch.tensor(4)},
        2: {"weight": (torch.arange(3.0) + 0.2).bfloat16()},
    }
    files: Files = {f"layer_{number:02d}-model_00-model_states.pt": one for number, one in layers.items()}
    for rank, trained in enumerate(STAGES):
        state = state_of_model([trained] if has_masters else None, None, mp_world_size=2, shared_params={})
        files[f"mp_rank_{rank:02d}_model_states.pt"] = state
        if has_masters:
            files |= zero_partitions(1, 2, [trained], model_rank=rank)
    return files


class TestPipeline:
    """Files for each layer of a pipeline."""

    def test_masters_and_what_only_layers_have(self, tmp_path: Path) -> None:
        write(tmp_path, _pipeline(has_masters=True))

        table = read(tmp_path)

        words = STAGES[0]["tied_modules.words.weight"]
        rest = {"0.weight": words, "1.steps": torch.tensor(4)}
        assert_same(values(table), {**STAGES[0], **STAGES[1], **rest})
        assert table.aliases == {"0.weight": "tied_modules.words.weight"}
        assert table.framework == "DeepSpeed ZeRO-1, 2 ranks, 2 pipeline stages"

    def test_a_frozen_layer_of_the_shape_of_a_tied_one_keeps_its_values(self, tmp_path: Path) -> None:
        files = _pipeline(has_masters=True)
        frozen = torch.full((3, 2), 7.0).bfloat16()
        files["layer_04-model_00-model_states.pt"] = {"weight": frozen}
        write(tmp_path, files)

        found = values(read(tmp_path))

        assert found["4.weight"].equal(frozen)
        assert found["0.weight"].equal(STAGES[0]["tied_modules.words.weight"].bfloat16())

    def test_layers_that_are_tied_have_one_tensor(self, tmp_path: Path) -> None:
        files = _pipeline(has_masters=True)
        files["layer_03-model_00-model_states.pt"] = files["layer_00-model_00-model_states.pt"]
        write(tmp_path, files)

        table = read(tmp_path)

        assert table.aliases == dict.fromkeys(("0.weight", "3.weight"), "tied_modules.words.weight")

    @pytest.mark.parametrize("has_masters", [False, True])
    def test_weights_as_trained(self, has_masters: bool, tmp_path: Path) -> None:
        write(tmp_path, _pipeline(has_masters=has_masters))

        table = read(tmp_path, "module")

        assert sorted(table.tensors) == ["0.weight", "1.steps", "1.weight", "2.weight"]
        assert values(table)["2.weight"].equal((torch.arange(3.0) + 0.2).bfloat16())

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (_without("mp_rank_01_model_states.pt"), MissingShardError, "lacks the file of pipeline stage 1"),
            (
                _without(*(f"layer_0{number}-model_00-model_states.pt" for number in range(3))),
                MissingShardError,
                "lacks the files of the pipeline's layers",
            ),
            (
                _without(*(f"bf16_zero_pp_rank_{rank}_mp_rank_01_optim_states.pt" for rank in range(2))),
                MissingShardError,
                "lacks the file of rank 0's masters ('zero_pp_rank_0_mp_rank_01_optim_states.pt')",
            ),
            (
                _without("layer_01-model_00-model_states.pt"),
                MissingShardError,
                "lacks the file of the pipeline's layer 1 ('layer_01-model_00-model_states.pt')",
            ),
            (
                _copied("layer_01-model_00-model_states.pt", "layer_01-model_01-model_states.pt"),
                InvalidArgumentError,
                "tensor parallel slices",
            ),
        ],
    )
    def test_what_is_missing_is_named(
        self, change: Callable[[Files], object], error: type[HfshardError], message: str, tmp_path: Path
    ) -> None:
        files = _pipeline(has_masters=True)
        change(files)
        write(tmp_path, files)

        with pytest.raises(error, match=re.escape(message)):
            read(tmp_path)
