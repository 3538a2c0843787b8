"""Ops whose tokens do not meet, as functions of an implementation and of which tokens it gets."""

import torch
from ops.shapes import coded

from inkcap.ops.values import Activated, Caps, Gates, Normed, Norms, Routed

EPS = 1e-5


def cases(device, dtype, tokens, *, channels, units, experts=5, bits=16, rows=70):
    """Name of an op to a function (implementation, slice of the tokens) -> tensors [tokens, ...]."""

    def normal(*shape, dtype=dtype, scale=1.0):
        return torch.randn(shape, device=device).mul_(scale).to(dtype)

    def matrices(number, outputs, inputs):
        if bits == 16:
            return normal(number, outputs, inputs, scale=inputs**-0.5)
        return coded(bits, number, outputs, inputs, device, dtype)

    top, shared, near = 3, 2, channels**-0.5
    x, norm = normal(tokens, channels), torch.rand(channels, device=device) + 0.5
    weight, router = normal(rows, channels, scale=near), normal(experts + shared, channels, scale=near)
    bias, scale = normal(experts, dtype=torch.float32, scale=0.1), torch.ones(1, device=device)
    w13, w2 = matrices(experts, 2 * units, channels), matrices(experts, channels, units)
    shared_w13 = normal(shared, 2 * units, channels, scale=near)
    shared_w2 = normal(channels, shared, units, scale=units**-0.5)
    inputs, widths = [x, x.flip(1), x.roll(1, 1)], (rows - 30, 20, 10)
    choice = torch.rand(tokens, experts, device=device).topk(top, 1).indices
    chances, gammas = torch.rand(tokens, top, device=device), torch.rand(tokens, shared, device=device)
    act, shared_act = normal(tokens, top, units), normal(tokens, shared, units)
    sources = [normal(tokens, channels) for _ in range(4)] + [normal(tokens, channels, dtype=torch.float32)]
    senders, shares = sources[2:], [torch.rand(tokens, 3, device=device) for _ in range(3)]
    queries = normal(3, channels, dtype=torch.float32)
    gates = Gates(
        normal(3, 4, 2 * channels, scale=(2 * channels) ** -0.5),
        *(normal(3, channels, 4, scale=0.5) for _ in range(2)),
    )
    norms, caps = Norms(norm[None], EPS, dtype), Caps(4.0, 25.0)

    def normed(here):
        return Normed(x[here], norm, EPS)

    def routed(here):
        return Routed(choice[here], chances[here], gammas[here])

    def decided(route):
        return [route.choice, route.weights, route.gammas]

    def experts_up(f, here):
        made = f(normed(here), routed(here), w13, shared_w13)
        return [made.routed, made.shared]

    def gated(f, here):
        parts = [[each[here] for each in group] for group in (sources, senders, shares)]
        return [one.tensor() for one in f(parts[0], queries, EPS, parts[1], parts[2], gates, norms)]

    return {
        "project": lambda f, here: [f(normed(here), weight)],
        "product": lambda f, here: [f(x[here], weight)],
        "project_each": lambda f, here: list(f([Normed(each[here], norm, EPS) for each in inputs], weight, widths)),
        "logits": lambda f, here: [f(x[here], weight, 0.5, 30.0)],
        "rms_norm": lambda f, here: [f(x[here], norm, EPS)],
        "swiglu": lambda f, here: [f(act[here], chances[here])],
        "swiglu_capped": lambda f, here: [f(act[here], caps)],
        "route_sink": lambda f, here: decided(f(normed(here), router, bias, scale, top_k=top, route_scale=2.0)),
        "route_sigmoid": lambda f, here: decided(f(normed(here), router[:experts], bias, top_k=top, route_scale=2.0)),
        "experts_up": experts_up,
        "experts_down": lambda f, here: [f(Activated(act[here], shared_act[here], routed(here)), w2, shared_w2)],
        "routed_up": lambda f, here: [f(normed(here), routed(here), w13, caps)],
        "routed_down": lambda f, here: [f(act[here], routed(here), w2)],
        "mix": lambda f, here: [f([each[here] for each in sources], queries, EPS).transpose(0, 1)],
        "mix_shares": lambda f, here: [f([each[here] for each in senders], queries, EPS).transpose(0, 1)],
        "message_gate": gated,
    }


NAMES = tuple(cases(torch.device("cpu"), torch.float32, 1, channels=8, units=4))
