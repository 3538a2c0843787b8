"""A program: which kernels steps would compile on a Hopper, counted on paper; prints those that no trial step had.

    python tests/runner/compiling.py inkling|inkling2

No GPU and no compiler: tensors are meta tensors, and launches only note for what they would compile.
"""

import random
import sys
from itertools import pairwise
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import inkcap.ops  # noqa: F401  declares the implementations
from inkcap.base.formats import WeightFormat
from inkcap.cache.plan import groups_of
from inkcap.layers import formats
from inkcap.layers.formats import Stored
from inkcap.models.families import find_entry
from inkcap.models.inkling import demo as first
from inkcap.models.inkling2 import demo as second
from inkcap.models.registry import build
from inkcap.ops.dispatch import OPS
from inkcap.ops.experts import lanes, wide
from inkcap.ops.quantize.coded import Coded
from inkcap.parallel.comm import Comm
from inkcap.runner.trial import batch_of, spans_of_kinds

META = torch.device("meta")
ROWS, STEP_TOKENS, LONGEST, CAPTURED = 64, 8192, 262_144, 512
SIZES = {"hidden": 512, "heads": 8, "head_dim": 128, "window": 512, "extent": 1024, "expert_width": 128, "experts": 64}
DEMOS = {
    "inkling": (first, {"layers": 5, "kv_heads": 1, "chosen": 6}),
    "inkling2": (second, {"kv_heads": 2, "chosen": 8}),
}


def model_of(family: str):
    """A small model of that generation, its experts in codes."""
    demo, more = DEMOS[family]
    declared = demo.DemoShape(**SIZES, **more).config()
    entry = find_entry(declared)
    text = entry.generation.read(declared)
    stored = Stored(WeightFormat.NVFP4, WeightFormat.NVFP4)
    layers = range(text.num_hidden_layers)
    dense = getattr(text, "dense", lambda layer: False)
    model = build(entry, text, Comm.alone(), torch.bfloat16, META, {n: stored for n in layers if not dense(n)})
    model.unpack()
    return model


def coded(matrices: formats.Nvfp4Matrices) -> None:
    """As on a GPU, where codes stay; no number is read."""
    matrices.weights = Coded(matrices.codes, matrices.scales, matrices.amax, matrices.dtype)


def note_compiles() -> set[tuple[str, object]]:
    """From now on launches add what they would compile to this set."""
    noted: set[tuple[str, object]] = set()
    launch = JITFunction.run

    def noting(self, key, *rest):
        noted.add((self.__name__, key))
        self.device_caches[0][0][key] = made = SimpleNamespace()
        return made

    JITFunction._do_compile = noting
    JITFunction.run = lambda self, *args, grid, warmup, **options: launch(
        self, *args, grid=grid, warmup=True, **options
    )
    return noted


def random_spans(dice: random.Random):
    """A step beyond what is captured: a prompt beside rows that decode, or some prompts, of any lengths and depths."""
    tokens = dice.randint(CAPTURED + 1, STEP_TOKENS)
    rows = dice.randint(1, ROWS)
    cuts = sorted(dice.sample(range(1, tokens), rows - 1))
    edges = [0, *(range(1, rows) if dice.random() < 0.5 else cuts), tokens]
    deepest = dice.choice([0, 700, 3000, 20_000, 250_000])
    return tuple((a, b, row, dice.randint(0, deepest)) for row, (a, b) in enumerate(pairwise(edges)))


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            map_python_to_cpp_type=lambda of: of,
        )
    )
    wide.processors, lanes.able = (lambda device: 132), (lambda device: True)
    formats.Nvfp4Matrices.unpack = coded
    for op in OPS.values():
        if "triton" in op.implementations:
            op.function = op.implementations["triton"][0]
    noted, model, dice = note_compiles(), model_of(sys.argv[1]), random.Random(0)

    tables = {
        group.name: torch.zeros(ROWS + 1, LONGEST // group.block + 1, dtype=torch.int32, device=META)
        for group in groups_of(model.states)
    }

    def step(spans) -> None:
        batch = batch_of(model, spans, len(spans), META, tables)
        model.head(model.forward(batch)[batch.sampled])

    with torch.inference_mode():
        for spans in spans_of_kinds(ROWS, STEP_TOKENS, LONGEST):
            step(spans)
        tried = set(noted)
        for _ in range(40):
            spans = random_spans(dice)
            step(spans)
            for name, _ in noted - tried:
                print(name, len(spans), "sequences", spans[-1][1], "tokens")
            tried |= noted
    print(len(tried), "kernels")


if __name__ == "__main__":
    main()
