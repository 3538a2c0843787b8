"""Implementations for deterministic mode: as right as the references, and on a CPU the same bits in any company."""

import pytest
import torch
from ops import test_attention_triton, tokenwise
from steps import World

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.cache.state import LayerState, Plane
from inkcap.ops import paged
from inkcap.ops.attention import fixed, splits
from inkcap.ops.dispatch import OPS, bind
from inkcap.ops.experts import triton as experts
from inkcap.ops.linear import fixed as products
from inkcap.ops.mix import fixed as mixtures
from inkcap.ops.values import Scores

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def small():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    bind(CPU)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_every_op_has_one(device):
    bind(device, deterministic=True)
    assert all(each.chosen in each.tokenwise for each in OPS.values())
    bind(device)
    assert not any(each.chosen in each.spare for each in OPS.values())


@pytest.mark.parametrize("name", tokenwise.NAMES)
def test_one_by_one_on_a_cpu(name):
    run, tokens = tokenwise.cases(CPU, torch.float32, 9, channels=72, units=24)[name], range(9)
    want = run(OPS[name].reference, slice(None))
    bind(CPU, deterministic=True)
    got = run(OPS[name], slice(None))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    alone = [run(OPS[name], slice(t, t + 1)) for t in tokens]
    pairs = [run(OPS[name], slice(t, t + 2)) for t in tokens[:-1:2]]
    for place, whole in enumerate(got):
        assert torch.equal(torch.cat([each[place] for each in alone]), whole)
        assert torch.equal(torch.cat([each[place] for each in pairs]), whole[:8])


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("name", [n for n in tokenwise.NAMES if "fixed" in OPS[n].implementations])
def test_kernels(name, tokens, monkeypatch):
    """Under the interpreter; that they give the same bits in any company is for a device to show."""
    monkeypatch.setattr(products, "FEW", 4)  # tokens in parts
    monkeypatch.setattr(experts, "FEW", 4)  # tokens without lists
    monkeypatch.setattr(mixtures, "FEW", 4)  # tokens whose states are made at once
    run = tokenwise.cases(CPU, torch.float32, tokens, channels=72, units=24)[name]
    got = run(OPS[name].implementations["fixed"][0], slice(None))
    torch.testing.assert_close(got, run(OPS[name].reference, slice(None)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["alone", "fixed"])
@pytest.mark.parametrize("geometry", ["full", "full_one_kv_head", "window_past_the_extent"])
def test_attention_of_each_token_alone(name, geometry, monkeypatch):
    """What a step stores is there before its attention, as it is in a model."""
    monkeypatch.setattr(splits, "KEYS", 16)
    monkeypatch.setattr(splits, "PROGRAMS", 2)
    monkeypatch.setattr(splits, "FEW", 2)
    monkeypatch.setattr(fixed, "PARTS", 64)  # of several launches
    heads, kv, size, states, window, extent, scaling, block = test_attention_triton.GEOMETRIES[geometry]
    scores = Scores(1 / size, window, torch.randn(states, extent), scaling)
    planes = tuple(Plane(plane, (kv, size), "float32") for plane in "kv")
    place, cursor = World([LayerState("kv", 0, planes, window, block, True)], length=96, seed=9), [0, 0]
    for step in [(18, 0), (1, 2)]:
        who = [i for i in (1, 0) if step[i]]
        batch = place.batch([(2 - i, cursor[i], [0] * step[i]) for i in who]).at(0)
        view, n = batch.view("kv"), len(batch.ids)
        q, k, v = (2 * torch.randn(n, each, size) for each in (heads, kv, kv))
        r, sinks, gate = torch.randn(n, heads, states), torch.randn(n, heads), torch.randn(n, heads * size)
        paged.store(view, 0, k)
        paged.store(view, 1, v)
        case = (q, k, v, r, scores, view, batch.packing, sinks, gate)
        got = OPS["attention"].implementations[name][0](*case)
        torch.testing.assert_close(got, OPS["attention"].reference(*case), rtol=2e-5, atol=2e-5)
        cursor = [a + b for a, b in zip(cursor, step, strict=True)]
