"""Parts of flat parameters, as torch keeps them: these tests fail when its private names move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.fsdp1 import flat_members, flat_parameters, has_flat_parameters
from hfshard.tensors.state_dict import collect_state_dict, count_parameters, parameter_names
from tests.distributed.gloo import check_ranks
from tests.foreign.producers.models import Norm, build
from tests.tensors.fsdp1_models import gathered, train, trained_by, wrapped


def look_at(rank: int, way: str) -> None:
    plain = build("nasty")
    names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    flat_names = {name for name in names if way != "flat" or not name.startswith("frozen.")}
    built = wrapped(way)
    held = {name: one.tensor for name, one in flat_members(built).items()}
    assert set(held) == flat_names
    for name, tensor in held.items():  # before torch prepares anything for the first pass
        start, stop = tensor.flat.held(tensor.numel(), rank)
        assert tensor.local.equal(plain.state_dict()[name].reshape(-1)[start:stop]), name
    assert held["head.weight"] is held["embed.weight"]
    assert sum(tensor.local.numel() == 0 for tensor in held.values())  # one element is not on both ranks

    train(built, trained_by(built, way))
    with torch.no_grad():
        built(torch.zeros(2, dtype=torch.long))  # leaves the complete parameters of the outermost unit
    whole = gathered(built)
    inner: Any = built.module
    for name, member in flat_members(inner).items():  # from a module inside
        tensor = member.tensor
        start, stop = tensor.flat.held(tensor.numel(), rank)
        assert tensor.local.equal(whole[name].reshape(-1)[start:stop]), name
    assert has_flat_parameters(inner.norm)
    assert count_parameters(built) == sum(one.numel() for one in plain.parameters())

    in_order = [name for name in collect_state_dict(built) if name in names]
    assert sorted(in_order) == sorted(names)
    assert in_order[:3] == ["gain", "unused", "embed.weight"]
    known = parameter_names(built)
    for flat in flat_parameters(built):
        for member in flat.members:
            assert known[id(member.parameter)].endswith(member.name)


def replace_data(rank: int) -> None:
    """What a program has put in place of a part is the part, and a load replaces it."""
    built = wrapped("parts", nn.Linear(3, 2))
    for parameter in built.parameters():
        parameter.data = torch.full_like(parameter.data, 7.0)
    parts = flat_members(built)
    assert all(one.tensor.local.eq(7).all() for one in parts.values())
    for one in parts.values():
        one.load(torch.zeros(tuple(one.tensor.shape)))
    assert all(one.eq(0).all() for one in gathered(built).values())


def refuse(rank: int) -> None:
    image = nn.Conv2d(2, 3, 2)
    image.weight.data = image.weight.data.contiguous(memory_format=torch.channels_last)
    with pytest.raises(UnstorableTensorError, match=r"Cannot read '0\.weight': .* in another order"):
        flat_members(wrapped("parts", nn.Sequential(image)))
    layer = nn.Linear(4, 2)
    wrapped("parts", layer)
    with pytest.raises(UnstorableTensorError, match="that wrapper does not exist any more"):
        flat_members(layer)


def refuse_child(rank: int, place: Path) -> None:
    """A child that has views of a flat parameter around it cannot be saved or loaded alone; others can."""
    for way in ("flat", "flat and full", "parts"):
        built: Any = wrapped(way, nn.Sequential(nn.Linear(4, 2), nn.Sequential(Norm(2)), nn.ReLU()))
        child, wrapped_inside, empty = built.module
        for name in ("new", "trained"):
            path = place / way / name
            if way == "parts":
                hfshard.save_model(child, path)
                assert hfshard.load_state_dict(path).keys() == {"weight", "bias"}
            else:
                for call in (hfshard.save_model, hfshard.load_model):
                    with pytest.raises(
                        UnstorableTensorError, match=r"of Linear: .* or wrap it with use_orig_params=True"
                    ):
                        call(child, path)
                with pytest.raises(UnstorableTensorError, match=r"of Sequential: .* Pass the wrapped root"):
                    hfshard.save_model(nn.Sequential(child), path)
                assert not path.exists()
            built(torch.ones(3, 4)).sum().backward()
        hfshard.save_model(wrapped_inside, place / way / "inside")
        names = {"0.weight", "0.bias", "0.running_mean", "0.running_var", "0.num_batches_tracked"}
        assert hfshard.load_state_dict(place / way / "inside").keys() == names
        assert not has_flat_parameters(empty)
        if way != "parts":
            empty.seen = child.weight  # a module may keep what it has seen of another
            assert not has_flat_parameters(empty)
        hfshard.save_model(built, place / way / "root")
        assert {"0.weight", "0.bias"} < hfshard.load_state_dict(place / way / "root").keys()


def look(rank: int, place: Path) -> None:
    for way in ("parts", "flat"):
        look_at(rank, way)
    replace_data(rank)
    refuse(rank)
    refuse_child(rank, place)


def test_each_rank_has_its_interval_of_each_parameter(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, look, tmp_path)
