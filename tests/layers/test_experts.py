"""Layers of experts on one rank and on several: the same activations and sums, in every format and numerics."""

import pytest
import torch
from packed import packed
from ranks import on_ranks
from steps import World

from inkcap.base.errors import ConfigInvalid
from inkcap.base.formats import Numerics, WeightFormat
from inkcap.cache.state import LayerState, Plane
from inkcap.layers.experts import Experts, RoundedExperts, RoundedRoutedExperts, RoutedExperts
from inkcap.layers.formats import Stored
from inkcap.layers.router import SigmoidRouter, SinkRouter
from inkcap.layers.sconv import ShortConv
from inkcap.ops.act.ref import swiglu, swiglu_capped
from inkcap.ops.values import Caps, Normed
from inkcap.parallel.comm import Comm
from inkcap.parallel.share import Share

CPU = torch.device("cpu")
CHANNELS, UNITS, EXPERTS, SHARED, TOP_K, TOKENS = 64, 128, 4, 2, 2, 6
CAPS = Caps(4.0, 25.0)
FORMATS = list(WeightFormat)


def tensors_of(form):
    """Every tensor of a layer by slot name, and the exact expert matrices."""
    draw = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=draw)

    tensors = {
        "router.weight": noise(EXPERTS + SHARED, CHANNELS) / 8,
        "router.bias": noise(EXPERTS) / 8,
        "router.global_scale": torch.tensor([0.7]),
        "shared.w13": noise(SHARED, 2 * UNITS, CHANNELS) / 8,
        "shared.w2": noise(SHARED, CHANNELS, UNITS) / 8,
    }
    exact = {}
    for name, shape in (("w13", (2 * UNITS, CHANNELS)), ("w2", (CHANNELS, UNITS))):
        # columns of very different sizes, so that ranks see different maxima
        whole = noise(EXPERTS, *shape) / 8 * torch.linspace(0.1, 3, shape[1])
        parts, exact[name] = packed(whole, form)
        tensors |= {f"experts.{name}{ending}": part for ending, part in parts.items()}
    if form is WeightFormat.NVFP4_SCALE2:
        tensors["experts.w2.input_amax"] = torch.tensor([200.0])
    return tensors, exact


def build(kind, form, numerics, comm):
    """A filled layer."""
    stored = Stored(form, form, numerics)
    if issubclass(kind, Experts):
        router = SinkRouter(CHANNELS, EXPERTS, SHARED, TOP_K, 2.0, torch.float32, CPU)
        layer = kind(router, CHANNELS, EXPERTS, SHARED, UNITS, comm, torch.float32, CPU, stored)
    else:
        router = SigmoidRouter(CHANNELS, EXPERTS, TOP_K, 2.0, torch.float32, CPU)
        layer = kind(router, CHANNELS, EXPERTS, UNITS, CAPS, comm, torch.float32, CPU, stored)
    tensors, _ = tensors_of(form)
    for name, slot in layer.slots().items():
        slot.fill(tensors[name][: slot.whole[0]] if name == "router.weight" else tensors[name])
    layer.routed.unpack()
    return layer


def rows():
    draw = torch.Generator().manual_seed(5)
    return Normed(torch.randn(TOKENS, CHANNELS, generator=draw), torch.ones(CHANNELS), 1e-6)


def run(kind, form, numerics, comm):
    """Routed activations [T, K, this rank's units], and what the layer adds to a residual of noise."""
    layer = build(kind, form, numerics, comm)
    made = layer(rows())
    conv = ShortConv(Share(0, CHANNELS, CHANNELS), 4, 0, CPU)
    conv.slots()["weight"].fill(torch.full((CHANNELS, 1, 4), 0.25))
    state = LayerState("sconv", 0, (Plane("x", (CHANNELS,), "float32"),), 4, 4, False)
    batch = World([state], length=16).batch([(1, 0, [0] * TOKENS)]).at(0)
    settled, _ = layer.settle(made, torch.ones(TOKENS, CHANNELS), conv, batch)
    return (made.routed if isinstance(layer, Experts) else made[0]), settled


KINDS = [
    (Experts, Numerics.W4A16),
    (RoundedExperts, Numerics.REFERENCE),
    (RoutedExperts, Numerics.W4A16),
    (RoundedRoutedExperts, Numerics.REFERENCE),
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("kind", "numerics"), KINDS)
def test_ranks_compute_what_one_does(kind, numerics, form):
    with torch.inference_mode():
        act, settled = run(kind, form, numerics, Comm.alone())
    for size in (2, 4):
        results = on_ranks(size, lambda comm: run(kind, form, numerics, comm))
        torch.testing.assert_close(torch.cat([part for part, _ in results], 2), act, rtol=1e-5, atol=1e-6)
        for _, other in results:
            torch.testing.assert_close(other, settled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", [Experts, RoutedExperts])
def test_weights_are_the_exact_ones(kind, form):
    """Against every token and expert written out."""
    with torch.inference_mode():
        layer = build(kind, form, Numerics.W4A16, Comm.alone())
        act, _ = run(kind, form, Numerics.W4A16, Comm.alone())
        choice = layer.router(rows()).choice
    exact = tensors_of(form)[1]
    for token, x in enumerate(rows().tensor()):
        for place, expert in enumerate(choice[token].tolist()):
            up = exact["w13"][expert] @ x
            want = swiglu(up) if kind is Experts else swiglu_capped(up, CAPS)
            torch.testing.assert_close(act[token, place], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("plain", "rounded"), [(Experts, RoundedExperts), (RoutedExperts, RoundedRoutedExperts)])
@pytest.mark.parametrize("form", FORMATS)
def test_reference_numerics_differ_where_experts_are_quantised(plain, rounded, form):
    assert Stored(form, form, Numerics.REFERENCE).rounds_inputs == (form is not WeightFormat.DENSE)
    with torch.inference_mode():
        exact = run(plain, form, Numerics.W4A16, Comm.alone())[1]
        other = run(rounded, form, Numerics.REFERENCE, Comm.alone())[1]
    error = ((other - exact).square().mean() / (exact - 1).square().mean()).sqrt()
    assert error < 1e-6 if form is WeightFormat.DENSE else 0.01 < error < 0.2


def test_slots_have_the_published_shapes():
    layer = build(Experts, WeightFormat.DENSE, Numerics.W4A16, Comm(1, 2, object()))
    slots = layer.slots()
    assert {name: (slot.whole, slot.dim, slot.start) for name, slot in slots.items() if "router" not in name} == {
        "experts.w13": ((EXPERTS, 2 * UNITS, CHANNELS), 1, UNITS),
        "experts.w2": ((EXPERTS, CHANNELS, UNITS), 2, UNITS // 2),
        "shared.w13": ((SHARED, 2 * UNITS, CHANNELS), 1, UNITS),
        "shared.w2": ((SHARED, CHANNELS, UNITS), 2, UNITS // 2),
    }


def test_ranks_that_cannot_share_the_width():
    with pytest.raises(ConfigInvalid, match="width of an expert is 128, which 3 ranks"):
        build(RoutedExperts, WeightFormat.DENSE, Numerics.W4A16, Comm(0, 3, object()))
    with pytest.raises(ConfigInvalid, match="would hold 8 of an expert's 128 columns, which scales of 16"):
        build(RoutedExperts, WeightFormat.NVFP4, Numerics.W4A16, Comm(0, 16, object()))
