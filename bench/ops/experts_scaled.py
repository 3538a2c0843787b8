"""Time of experts whose weights are NVFP4 or MXFP8 codes, per launch in a CUDA graph, beside what their bytes cost.

    python bench/ops/experts_scaled.py [--tokens 1 8 64 8192] [--bits 4 8] [--out results.jsonl] [--ungated]

Sizes, floor and graphs as in products.py: one layer of one of eight ranks, random codes, uniform routing. `routed` rows
have no shared experts. Device tests run first.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests")]

import gate
from ops.shapes import EXPERTS, HIDDEN, SHARED, TOP, UNITS, coded, normal
from products import GPU, Bench, Row

from inkcap.ops.dispatch import bind
from inkcap.ops.experts.ref import experts_settle, experts_up, routed_settle, routed_up
from inkcap.ops.values import Activated, Caps, Normed, Routed


class CodedBench(Bench):
    """Rows for one number of tokens and one format."""

    def rows_of(self, bits: int) -> list[Row]:
        made: list[Row] = []
        layers = 6 if self.tokens <= 64 else 2
        w13 = [coded(bits, EXPERTS, 2 * UNITS, HIDDEN, GPU, torch.bfloat16) for _ in range(layers)]
        w2 = [coded(bits, EXPERTS, HIDDEN, UNITS, GPU, torch.bfloat16) for _ in range(layers)]
        shared_w13 = [normal(SHARED, 2 * UNITS, HIDDEN, device=GPU, scale=HIDDEN**-0.5) for _ in range(layers)]
        shared_w2 = [normal(HIDDEN, SHARED, UNITS, device=GPU, scale=UNITS**-0.5) for _ in range(layers)]
        number = 24 if self.tokens <= 64 else 2
        choices = [torch.rand(self.tokens, EXPERTS, device=GPU).topk(TOP, 1).indices for _ in range(number)]
        distinct = sum(len(choice.unique()) for choice in choices) / number
        weights, gammas = (torch.ones(self.tokens, n, device=GPU) for n in (TOP, SHARED))
        matrix = UNITS * HIDDEN * (bits / 8 + (1 / 16 if bits == 4 else 1 / 32))  # bytes of one expert's w2
        dense = 2 * UNITS * HIDDEN
        operations = 2 * UNITS * HIDDEN
        act = normal(self.tokens, TOP, UNITS, device=GPU)
        shared_act = normal(self.tokens, SHARED, UNITS, device=GPU)
        where = (self.residual, self.taps, self.view, self.packing)

        def each(call: Callable[[int, Normed, Routed], object]) -> list[Callable[[], object]]:
            return [
                lambda i=i, c=c: call(i % layers, Normed(self.rows, self.norm, 1e-6), Routed(c, weights, gammas))
                for i, c in enumerate(choices)
            ]

        name, caps = f"{bits} bits ({distinct:.0f})", Caps(10.0, 10.0)
        both = 2 * matrix * distinct + 2 * dense * SHARED
        alone = 2 * matrix * distinct
        made += [
            self.row(
                f"experts_up {name}",
                each(lambda i, rows, route: experts_up(rows, route, w13[i], shared_w13[i])),
                both,
                2 * operations * (TOP + SHARED),
            ),
            self.row(
                f"routed_up {name}",
                each(lambda i, rows, route: routed_up(rows, route, w13[i], caps)),
                alone,
                2 * operations * TOP,
            ),
            self.row(
                f"experts_settle {name}",
                each(
                    lambda i, rows, route: experts_settle(
                        Activated(act, shared_act, route), w2[i], shared_w2[i], *where, plane=1
                    )
                ),
                both / 2,
                operations * (TOP + SHARED),
            ),
            self.row(
                f"routed_settle {name}",
                each(lambda i, rows, route: routed_settle(act, route, w2[i], *where, plane=1)),
                alone / 2,
                operations * TOP,
            ),
        ]
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 8192])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    parser.add_argument("--ungated", action="store_true", help="skip the tests, for work on a kernel")
    options = parser.parse_args()
    if not options.ungated:
        gate.require("test_experts_scaled.py")
    torch.manual_seed(0)
    bind(GPU)
    print(f"{'op':<28} {'tokens':>6} {'us':>10} {'floor':>9} {'ratio':>6}")
    made: list[Row] = []
    with torch.inference_mode():
        for tokens in options.tokens:
            for bits in options.bits:
                made += CodedBench(tokens).rows_of(bits)
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
        with options.out.open("a") as file:
            file.writelines(json.dumps({**row.__dict__, **about}) + "\n" for row in made)


if __name__ == "__main__":
    main()
