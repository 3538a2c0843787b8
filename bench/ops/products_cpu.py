"""How fast products of few rows read weights on a CPU, by every way torch offers, beside a plain read.

    python bench/ops/products_cpu.py [--threads 1 2] [--rows 1 2 3 4 8] [--passes 3]

Weights are those of a decode step of bench/cpu.py in size: 576 matrices [512, 512] in fp32, 604 MB, read in turn, so
that none is in a cache when it is used again. Packed ways have packed their weights before. A pass reads all of them;
the best pass counts. Prints a JSON line per number of threads and way, in GB/s by rows.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COUNT, WIDTH = 576, 512
GROUP = 8  # matrices of one batched product
TALL = 128  # rows of a matrix in a batched product over parts of it

Way = tuple[Callable[[Tensor, int], Any], Callable[[Tensor, Any], object]]  # prepare [COUNT, N, K]; multiply all


def each(multiply: Callable[[Tensor, Tensor], object], x: Tensor, weights: list[Tensor]) -> None:
    """One product after another."""
    for weight in weights:
        multiply(x, weight)


def grouped(x: Tensor, weights: Tensor) -> None:
    """One call for 32 experts, of which each has as many rows."""
    ends = torch.arange(1, 33, dtype=torch.int32) * len(x)
    for part in weights.split(32):
        F.grouped_mm(x.repeat(32, 1), part.transpose(1, 2), offs=ends)


def batched(x: Tensor, weights: Tensor) -> None:
    """One call for GROUP matrices."""
    for part in weights.split(GROUP):
        torch.bmm(x.expand(len(part), -1, -1), part.transpose(1, 2))


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """A batched product over parts of one matrix."""
    parts = weight.unflatten(0, (-1, TALL)).transpose(1, 2)
    return torch.bmm(x.expand(len(parts), -1, -1), parts)


def packed_onednn(weights: Tensor, rows: int) -> list[Tensor]:
    """In the library's own layout for so many rows."""
    return [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]


def multiply_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """By oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def packed_mkl(weights: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    """The same of MKL, which wants the matrix itself, too."""
    return [(weight, torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)) for weight in weights]


def multiply_mkl(x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> None:
    """By MKL."""
    for weight, packed in weights:
        torch.ops.mkl._mkl_linear(x, packed, weight, None, len(x))


WAYS: dict[str, Way] = {
    "read": (lambda weights, _: weights, lambda _, weights: weights.sum()),
    "linear": (lambda weights, _: list(weights), partial(each, F.linear)),
    "grouped_mm": (lambda weights, _: weights, grouped),
    "bmm of 8": (lambda weights, _: weights, batched),
    "bmm of parts": (lambda weights, _: list(weights), partial(each, in_parts)),
    "x @ stored transposed": (lambda weights, _: list(weights.mT.contiguous()), partial(each, torch.mm)),
    "weight @ x.T": (lambda weights, _: list(weights), partial(each, lambda x, weight: weight @ x.t())),
    "oneDNN packed": (packed_onednn, partial(each, multiply_onednn)),
    "MKL packed": (packed_mkl, multiply_mkl),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    weights = torch.randn(COUNT, WIDTH, WIDTH)
    size = weights.numel() * weights.element_size()
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in options.ways:
            prepare, multiply = WAYS[name]
            speeds = {}
            for rows in options.rows[: 1 if name == "read" else None]:
                x, held = torch.randn(rows, WIDTH), prepare(weights, rows)
                best = float("inf")
                with torch.inference_mode():
                    for _ in range(options.passes + 1):
                        began = time.perf_counter()
                        multiply(x, held)
                        best = min(best, time.perf_counter() - began)
                speeds[rows] = round(size / best / 1e9, 1)
            where = {"load": round(os.getloadavg()[0], 1), "torch": torch.__version__, "machine": platform.machine()}
            print(json.dumps({"bench": "products_cpu", "threads": threads, "way": name, "gb_s": speeds, **where}))


if __name__ == "__main__":
    main()
