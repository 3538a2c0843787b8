"""Times of attention on a GPU: `python bench/ops/attention.py [--out results.jsonl] [--ungated] [part of a name ...]`.

Each case is a CUDA graph of many calls over different pages, several times the L2 cache; the median of replays. A
decode call is two kernels. The floor is bytes of keys and values over 4.68 TB/s (read-only kernels reach that on an
H200), or operations of visible pairs over 800 TFLOP/s.
"""

import argparse
import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import gate
import torch
import triton

from inkcap.ops.attention.triton import attention_triton
from inkcap.ops.attn_prep.triton import attn_prep_triton
from inkcap.ops.values import GroupView, HeadWeights, Packing, Scores

D, STATES, BLOCK = 128, 16, 64
READ, DOTS = 4.68e12, 800e12


@dataclass(frozen=True)
class Case:
    name: str
    sequences: int
    count: int  # queries of each
    before: int  # tokens before them
    heads: int = 8
    kv: int = 1
    window: int | None = None
    extent: int = 1024
    bound: int = 0  # what the host believes lengths to be; 0: the truth
    bytes: int = 2  # of a number in the cache: bf16, or E4M3


CASES = [
    Case("decode 1K", 1, 1, 1023),
    Case("decode window", 1, 1, 8191, kv=2, window=512, extent=512),
    Case("decode 32K", 1, 1, 32767),
    Case("decode 131K", 1, 1, 131071),
    Case("decode 1M", 1, 1, (1 << 20) - 1),
    Case("decode 1K in a graph for 131K", 1, 1, 1023, bound=131072),
    Case("verify 8 at 131K", 1, 8, 131072 - 8),
    Case("verify 8 at 1K", 1, 8, 1024),
    Case("decode 8 x 1K", 8, 1, 1023),
    Case("decode 8 x window", 8, 1, 8191, kv=2, window=512, extent=512),
    Case("decode 8 x 32K", 8, 1, 32767),
    Case("decode 8 x 131K", 8, 1, 131071),
    Case("decode 64 x 8K", 64, 1, 8191),
    Case("decode 64 x window", 64, 1, 8191, kv=2, window=512, extent=512),
    Case("decode 12q/2kv 131K", 1, 1, 131071, heads=12, kv=2),
    Case("tool result 300 at 131K", 1, 300, 131072),
    Case("prefill 8K", 1, 8192, 0),
    Case("prefill 8K window", 1, 8192, 0, kv=2, window=512, extent=512),
    Case("prefill 8K at 24K", 1, 8192, 24576),
    Case("prefill 8K at 24K window", 1, 8192, 24576, kv=2, window=512, extent=512),
]


CODED = ("decode 1K", "decode window", "decode 32K", "decode 131K", "decode 1M", "verify 8 at 131K", "decode 8 x 1K",
         "decode 8 x window", "decode 8 x 131K", "decode 64 x 8K", "prefill 8K", "prefill 8K at 24K",
         "prefill 8K at 24K window")  # fmt: skip
CASES += [replace(case, name=f"{case.name}, fp8", bytes=1) for case in CASES if case.name in CODED]


def pairs(case: Case) -> int:
    """Visible pairs of a query and a key."""
    window = case.window or case.before + case.count
    return case.sequences * sum(min(case.before + i + 1, window) for i in range(case.count))


def visible(case: Case) -> int:
    """Keys that any query of a sequence sees, over all sequences."""
    keys = case.before + case.count
    return case.sequences * (keys if case.window is None else min(keys, case.window + case.count - 1))


def graph_us(calls, budget_ms: float = 4.0) -> float:
    """Median microseconds of one of `calls`, run in turn in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    times = []
    with torch.cuda.stream(stream):
        for call in calls:  # each once: some make what a graph must not
            call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[0]()
        end.record()
        torch.cuda.synchronize()
        n = max(len(calls) if len(calls) < 100 else 100, min(100, int(budget_ms / begin.elapsed_time(end))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(n):
                calls[i % len(calls)]()
        for _ in range(7):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / n)
    return sorted(times)[len(times) // 2]


def inputs(case: Case, arena: torch.Tensor, turns: int):
    """Arguments of attention, one set a turn, over different pages."""
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    n = case.sequences * case.count
    if case.bytes == 1:
        arena = arena.to(torch.float8_e4m3fn)
    planes = tuple(arena[:, i * BLOCK * D : (i + 1) * BLOCK * D] for i in range(2))
    if case.kv > 1:
        wide = arena.view(-1, case.kv * arena.shape[1])
        size = case.kv * BLOCK * D
        planes = tuple(wide[:, i * size : (i + 1) * size] for i in range(2))
    planes = tuple(plane.unflatten(1, (BLOCK, case.kv, D)) for plane in planes)
    pages = -(-(case.before + case.count) // BLOCK)
    starts = torch.arange(case.sequences + 1, dtype=torch.int32, device="cuda") * case.count
    rows = torch.arange(case.sequences, dtype=torch.int32, device="cuda")
    packing = Packing(
        starts=starts,
        rows=rows,
        first=torch.full_like(rows, case.before),
        row_of=rows.repeat_interleave(case.count),
        positions=(case.before + torch.arange(case.count, device="cuda")).repeat(case.sequences),
        spans=tuple(
            (i * case.count, (i + 1) * case.count, i, max(case.before, case.bound - case.count))
            for i in range(case.sequences)
        ),
    )
    q, k, v, r = 4 * make(n, case.heads, D), make(n, case.kv, D), make(n, case.kv, D), make(n, case.heads, STATES)
    v_scale = None
    if case.bytes == 1:
        q, k, v, v_scale = q.half(), k.half(), v.half(), torch.ones(case.kv, device="cuda")
    scores = Scores(1 / D, case.window, 0.3 * make(STATES, case.extent), None)
    slots = torch.full((n,), -1, device="cuda")
    sets = []
    for _ in range(turns):
        need, blocks = case.sequences * pages, len(planes[0]) - 1
        ids = torch.cat([torch.randperm(blocks, device="cuda") + 1 for _ in range(-(-need // blocks))])[:need]
        table = ids.view(case.sequences, pages).to(torch.int32)
        view = GroupView(BLOCK, table, slots, planes)
        sets.append((q, k, v, r, scores, view, packing, None, None, v_scale))
    return sets


def prep(tokens: int) -> dict[str, object]:
    """The launch before attention, for heads of the window layers."""
    kv, heads = 2, 8
    product = torch.randn(tokens, (heads + 2 * kv) * D, device="cuda", dtype=torch.bfloat16)
    parts = product.split([heads * D, kv * D, kv * D], 1)
    conv = torch.zeros(16, 2, 4 * kv * D, device="cuda", dtype=torch.bfloat16)
    state = torch.zeros(2 + tokens // BLOCK, 2, BLOCK * kv * D, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(tokens, device="cuda")
    conv_slots = torch.where(positions >= tokens - 4, 4 + positions % 4, -1)
    of_conv = GroupView(
        4, torch.ones(1, 1 + tokens // 4, dtype=torch.int32, device="cuda"), conv_slots,
        tuple(conv[:, i].unflatten(1, (4, kv * D)) for i in range(2)),
    )  # fmt: skip
    of_kv = GroupView(
        BLOCK, torch.arange(1, 2 + tokens // BLOCK, dtype=torch.int32, device="cuda")[None], positions + BLOCK,
        tuple(state[:, i].unflatten(1, (BLOCK, kv, D)) for i in range(2)),
    )  # fmt: skip
    zero = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    packing = Packing(
        torch.tensor([0, tokens], dtype=torch.int32, device="cuda"), zero[:1], zero[:1], zero, positions,
        ((0, tokens, 0, 0),),
    )  # fmt: skip
    taps, norms = torch.randn(2, kv * D, 4, device="cuda"), torch.rand(2, D, device="cuda")
    weights = HeadWeights(taps[0], taps[1], norms[0], norms[1], 1e-6)
    us = graph_us([lambda: attn_prep_triton(*parts, weights, of_conv, of_kv, packing, None)])
    moved = product.nbytes * 2 + 2 * tokens * kv * D * 2
    return {"case": f"prep {tokens}", "us": round(us, 2), "floor_us": round(moved / 4.24e12 * 1e6, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--ungated", action="store_true", help="skip the tests, for work on a kernel")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if not options.ungated:
        gate.require("test_attention.py")
    torch.manual_seed(0)
    arena = torch.randn(40000, 2 * BLOCK * D, device="cuda", dtype=torch.bfloat16)  # 1.3 GB
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.strip(),
    }
    lines = []
    for case in CASES:
        if options.names and not any(part in case.name for part in options.names):
            continue
        moved = visible(case) * case.kv * 2 * D * case.bytes
        turns = max(1, min(100, int(4e8 // moved)))
        sets = inputs(case, arena, turns)
        us = graph_us([lambda each=each: attention_triton(*each) for each in sets])
        work = pairs(case) * case.heads * 4 * D
        floor = max(moved / READ, work / DOTS) * 1e6
        lines.append({
            "case": case.name, "us": round(us, 2), "floor_us": round(floor, 2),
            "tb_s": round(moved / us / 1e6, 2), "tflop_s": round(work / us / 1e6, 1),
        })  # fmt: skip
        print(
            "{case:<34} {us:>9.2f} us  floor {floor_us:>8.2f}  {tb_s:>5.2f} TB/s {tflop_s:>7.1f} TFLOP/s".format(
                **lines[-1]
            )
        )
    for tokens in (1, 8, 64, 8192):
        if not options.names or any(part in f"prep {tokens}" for part in options.names):
            lines.append(prep(tokens))
            print("{case:<34} {us:>9.2f} us  floor {floor_us:>8.2f}".format(**lines[-1]))
    if options.out:
        with Path(options.out).open("a") as file:
            for line in lines:
                file.write(json.dumps({**line, **about}) + "\n")


if __name__ == "__main__":
    main()
