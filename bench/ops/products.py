"""Time of products, routers and experts on a GPU, per launch in a CUDA graph, beside what bytes or operations cost.

    python bench/ops/products.py [--tokens 1 8 64 8192] [--out results.jsonl] [--ungated]

Widths are those of one of eight ranks of Inkling. A graph calls one op many times over different weights, several times
the L2 cache in all, each launch depending on the one before only by order. Random weights, uniform routing. The floor
is bytes / 4.68 TB/s (a read-only kernel on an H200) or operations / 800 TFLOP/s, whichever is more. Device tests run
first.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests")]

import gate
from ops.shapes import (
    EXPERTS,
    HEAD,
    HIDDEN,
    PRODUCTS,
    SETTLED,
    SHARED,
    TOP,
    UNITS,
    convolved,
    expert_weights,
    normal,
)

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.ops.dispatch import bind
from inkcap.ops.experts.ref import experts_settle, experts_up
from inkcap.ops.linear.ref import logits, project, settle
from inkcap.ops.norm.ref import rms_norm
from inkcap.ops.router.ref import route_sink
from inkcap.ops.sconv.ref import sconv
from inkcap.ops.values import Activated, Normed, Routed

BANDWIDTH, OPERATIONS = 4.68e12, 800e12
COVERED = 600e6  # bytes of different weights in one graph
GPU = torch.device("cuda")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    op: str
    tokens: int
    microseconds: float
    floor: float

    def show(self) -> str:
        ratio = self.microseconds / self.floor
        return f"{self.op:<28} {self.tokens:>6} {self.microseconds:>10.2f} {self.floor:>9.2f} {ratio:>6.2f}"


def timed(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one call, in a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            stream.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def floor(read: float, operations: float) -> float:
    return max(read / BANDWIDTH, operations / OPERATIONS) * 1e6


def copies(size: float) -> int:
    return max(2, min(60, int(COVERED / size)))


class Bench:
    """All rows for one number of tokens, each of its own sequence up to 64 and one sequence beyond."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        steps = [tuple((row, 1) for row in range(min(tokens, 4)))] if tokens <= 64 else [((1, 40),)]
        ((self.view, self.packing, _),) = convolved(HIDDEN, steps, torch.bfloat16, GPU)
        self.repeat()
        self.norm = torch.ones(HIDDEN, device=GPU)
        self.taps = normal(4, HIDDEN, device=GPU, dtype=torch.float32, scale=0.3).t()
        self.rows = normal(tokens, HIDDEN, device=GPU)
        self.residual = normal(tokens, HIDDEN, device=GPU)

    def repeat(self) -> None:
        """Stretch the small step to all tokens; what is stored where does not matter to its time."""
        packing, view, tokens = self.packing, self.view, self.tokens
        times = -(-tokens // len(packing.positions))
        stretched = {
            name: getattr(packing, name).repeat(times)[:tokens] for name in ("rows", "first", "row_of", "positions")
        }
        if tokens > 64:
            stretched["positions"] = torch.arange(tokens, device=GPU)
        spans = ((0, 1, 0, 0),) if tokens <= 64 else ((0, tokens, 0, 0),)
        self.packing = type(packing)(starts=packing.starts, spans=spans, **stretched)
        slots = torch.where(torch.arange(tokens, device=GPU) < len(view.slots), view.slots.repeat(times)[:tokens], -1)
        table = view.table.repeat(1, 1 + tokens // 64)
        self.view = type(view)(view.block, table, slots, view.planes)

    def row(self, op: str, calls: list[Callable[[], object]], read: float, operations: float = 0.0) -> Row:
        made = Row(op, self.tokens, timed(calls), floor(read, operations * self.tokens))
        print(made.show(), flush=True)
        return made

    def products(self) -> list[Row]:
        """Dense products, ours and the library's."""
        made = []
        normed = lambda: Normed(self.rows, self.norm, 1e-6)  # noqa: E731
        for name, (n, k) in PRODUCTS.items():
            ws = [normal(n, k, device=GPU, scale=k**-0.5) for _ in range(copies(2 * n * k))]
            made.append(
                self.row(f"project {name}", [lambda w=w: project(normed(), w) for w in ws], 2 * n * k, 2 * n * k)
            )
            made.append(
                self.row("  library alone", [lambda w=w: F.linear(self.rows, w) for w in ws], 2 * n * k, 2 * n * k)
            )
        for name, (n, k) in SETTLED.items():
            ws = [normal(n, k, device=GPU, scale=k**-0.5) for _ in range(copies(2 * n * k))]
            heads = normal(self.tokens, k, device=GPU)
            calls = [
                lambda w=w, x=heads: settle(x, w, self.residual, self.taps, self.view, self.packing, plane=1)
                for w in ws
            ]
            made.append(self.row(f"settle {name}", calls, 2 * n * k, 2 * n * k))
            made.append(
                self.row("  library alone", [lambda w=w, x=heads: F.linear(x, w) for w in ws], 2 * n * k, 2 * n * k)
            )
        if self.tokens <= 64:
            ws = [normal(*HEAD, device=GPU, scale=0.02) for _ in range(2)]
            size = 2 * HEAD[0] * HEAD[1]
            made.append(self.row("logits", [lambda w=w: logits(self.rows, w, 1 / 24) for w in ws * 4], size, size))
        size = 4 * self.tokens * HIDDEN
        made.append(self.row("rms_norm", [lambda: rms_norm(self.rows, self.norm, 1e-6)] * 50, size))
        calls = [lambda: sconv(self.rows, self.taps, self.view, self.packing, plane=1, residual=self.residual)] * 50
        made.append(self.row("sconv", calls, 3 * size / 2))
        return made

    def experts(self) -> list[Row]:
        """Router and experts over three layers' weights, alone and in a chain."""
        made, layers = [], [expert_weights(GPU) for _ in range(3)]
        choices = [
            torch.rand(self.tokens, EXPERTS, device=GPU).topk(TOP, 1).indices
            for _ in range(12 if self.tokens <= 64 else 3)
        ]
        distinct = sum(len(choice.unique()) for choice in choices) / len(choices)
        weights = torch.full((self.tokens, TOP), 1.0, device=GPU)
        gammas = torch.full((self.tokens, SHARED), 1.0, device=GPU)
        used = [(layers[i % 3], choice) for i, choice in enumerate(choices)]
        fresh = lambda choice: Routed(choice, weights, gammas)  # noqa: E731

        def routed(layer):
            rows = Normed(self.rows, self.norm, 1e-6)
            return rows, route_sink(rows, layer.router, layer.bias, layer.scale, top_k=TOP, route_scale=8.0)

        size = 2 * (EXPERTS + SHARED) * HIDDEN
        made.append(self.row("route_sink", [lambda w=w: routed(w) for w in layers * 8], size, size))
        matrix = 2 * UNITS * HIDDEN  # bytes of one expert's w2; w13 has twice that
        rows = lambda: Normed(self.rows, self.norm, 1e-6)  # noqa: E731
        calls = [lambda w=w, c=c: experts_up(rows(), fresh(c), w.w13, w.shared_w13) for w, c in used]
        made.append(
            self.row(
                f"experts_up ({distinct:.0f})", calls, 2 * matrix * (distinct + SHARED), 2 * matrix * (TOP + SHARED)
            )
        )
        act = (normal(self.tokens, TOP, UNITS, device=GPU), normal(self.tokens, SHARED, UNITS, device=GPU))
        calls = [
            lambda w=w, c=c: experts_settle(
                Activated(*act, fresh(c)), w.w2, w.shared_w2, self.residual, self.taps, self.view, self.packing, plane=1
            )
            for w, c in used
        ]
        made.append(
            self.row(f"experts_settle ({distinct:.0f})", calls, matrix * (distinct + SHARED), matrix * (TOP + SHARED))
        )

        def layer(w):
            rows, route = routed(w)
            act = experts_up(rows, route, w.w13, w.shared_w13)
            experts_settle(act, w.w2, w.shared_w2, self.residual, self.taps, self.view, self.packing, plane=1)

        size += 3 * matrix * (distinct + SHARED)
        calls = [lambda w=w: layer(w) for w in layers * (1 if self.tokens > 64 else 4)]
        made.append(self.row("route, up, settle", calls, size, 3 * matrix * (TOP + SHARED)))
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 8192])
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--ungated", action="store_true", help="skip the tests, for work on a kernel")
    options = parser.parse_args()
    if not options.ungated:
        gate.require("test_products.py")
    torch.manual_seed(0)
    bind(GPU)
    print(f"{'op':<28} {'tokens':>6} {'us':>10} {'floor':>9} {'ratio':>6}")
    made = []
    with torch.inference_mode():
        for tokens in options.tokens:
            bench = Bench(tokens)
            made += bench.products() + bench.experts()
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
        with options.out.open("a") as file:
            file.writelines(json.dumps({**row.__dict__, **about}) + "\n" for row in made)


if __name__ == "__main__":
    main()
