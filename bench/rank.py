"""Time per decode step and prefill rate of a model with the widths that one rank of a large one holds, on one GPU.

    python bench/rank.py [--shape inkling-tp8] [--weights bf16] [--decode 1x1024 8x1024] [--prefill 32768]

The model is made on the device, without a checkpoint and without a tokenizer: random weights of a size that keeps
activations near one. It runs through the engine: scheduler, worker, sampler. TPOT is (time of 129 tokens - time of 1)
/ 128, read off one run: from when every sequence has its first token until 128 steps later. `gap_ms` is the mean time
between later steps of the same run.

Decode rows of more than `--real` tokens do not run their prompts: the scheduler plans them and the worker prepares
them, but the layers are skipped and the cache holds random numbers. All others run everything. Each result is a JSON
line, also appended to `--out`.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from random import Random

import torch
from shapes import (
    RIVAL,
    RIVAL_MS,
    RIVAL_PREFILL,
    SHAPES,
    fewer_layers,
    floor_seconds,
    make_model,
    measured_peak,
    prefill_operations,
)
from torch import Tensor

from inkcap.base.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from inkcap.base.errors import EngineFault
from inkcap.base.formats import Numerics
from inkcap.base.log import start_logging
from inkcap.base.request import EngineInfo, GenerateRequest, SamplingParams, TokenDelta
from inkcap.base.sampling import TokenRules
from inkcap.cache.arena import Arena
from inkcap.cache.plan import groups_of, layout_of
from inkcap.engine.core import Core, Port, build_core
from inkcap.engine.executor import DeviceExecutor, LocalExecutor
from inkcap.engine.local import LocalEngine
from inkcap.engine.rank import Rank
from inkcap.layers.batch import Batch
from inkcap.layers.mlp import GatedMlp
from inkcap.models.inkling.model import Inkling
from inkcap.models.inkling2.layer import LoopedLayer
from inkcap.models.inkling2.model import Inkling2
from inkcap.ops.dispatch import bind, table
from inkcap.ops.router.ref import route_sigmoid, route_sigmoid_rounded, route_sink
from inkcap.ops.values import GroupView, Packing
from inkcap.parallel.comm import Comm
from inkcap.runner.worker import Worker

STEPS = 128  # that are timed
WARM_STEPS = 8  # before them


@dataclass(frozen=True)
class Sample:
    """What a run gave: seconds per step, and when each step's tokens came."""

    tpot_seconds: float  # mean over the first STEPS steps in which every sequence has its first token
    gap_seconds: float  # mean over steps behind the first WARM_STEPS of these
    slowest_seconds: float
    first_seconds: float  # until every sequence had its first token


class Furnished:
    """A model that skips prompts: chunks of more than one token give zeros. Single tokens run all layers."""

    def __init__(self, model: Inkling | Inkling2, channels: int) -> None:
        self.inner, self.channels = model, channels
        self.family, self.vocab_size = model.family, model.vocab_size
        self.max_length, self.states = model.max_length, model.states
        self.head, self.slots, self.unpack = model.head, model.slots, model.unpack

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, D]."""
        if batch.packing.widest > 1:
            return self.inner.embed.table.new_zeros(len(batch.ids), self.channels)
        return self.inner.forward(batch)


class LocalSum:
    """Stands for the ranks that a sum would be taken over, so that the model takes the path of several ranks."""

    rank, size = 0, 2

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum, were there other ranks."""
        return x


def cut(model: Inkling | Inkling2) -> None:
    """Part products from the convolutions behind them, where the sum over ranks stands."""
    for layer in model.layers:
        own = layer.layer if isinstance(layer, LoopedLayer) else layer
        own.attn_out.comm = LocalSum()
        (own.mlp.w2 if isinstance(own.mlp, GatedMlp) else own.mlp).comm = LocalSum()


def experts_touched(model: Inkling | Inkling2, batch: int, device: torch.device) -> float:
    """Distinct experts a visit of a layer, on average over visits, of `batch` random tokens at position 0."""
    found: list[int] = []

    def counted(plain: Callable) -> Callable:
        def route(*args, **kwargs):
            made = plain(*args, **kwargs)
            found.append(len((made[0] if isinstance(made, tuple) else made).choice.unique()))
            return made

        return route

    routers = {router: router.function for router in (route_sink, route_sigmoid, route_sigmoid_rounded)}

    ids = torch.randint(0, model.vocab_size, (batch,), device=device, generator=torch.Generator(device).manual_seed(1))
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    first = torch.zeros_like(rows)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    spans = tuple((n, n + 1, n, 0) for n in range(batch))
    packing = Packing(starts, rows, first, rows, first.long(), spans)
    groups = {state.group: state.block for state in model.states}
    views = {
        group: GroupView(
            block,
            torch.zeros(batch, 1, dtype=torch.int32, device=device),
            torch.full((batch,), -1, dtype=torch.int64, device=device),
        )
        for group, block in groups.items()
    }
    planes = Arena(model.states, layout_of(groups_of(model.states), 0).size_bytes, device).planes
    for router, plain in routers.items():
        router.function = counted(plain)
    try:
        with torch.inference_mode():
            model.forward(Batch(ids, packing, rows.long(), views, planes))
    finally:
        for router, plain in routers.items():
            router.function = plain
    return sum(found) / len(found)


def scatter(plane: Tensor) -> None:
    """Fill with normal numbers; codes, which have no such call, a GiB at a time.

    Planes lie over one another, so codes come last: their bytes are finite in bf16, not the other way.
    """
    if plane.dtype is not torch.float8_e4m3fn:
        plane.normal_()
        return
    for part in plane.split(max(1, (1 << 28) // plane[0].numel())):
        part.copy_(torch.randn(part.shape, device=plane.device))


@contextmanager
def engine_of(
    config: EngineConfig, model: Inkling | Inkling2 | Furnished, device: torch.device
) -> Iterator[LocalEngine]:
    """An engine over a built model, its cache full of random numbers."""

    def load() -> Rank:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        worker = Worker(config, model, Comm.alone(), device=device, dtype=dtype, rules=TokenRules())
        planes = [plane for groups in worker.arena.planes for group in groups.values() for plane in group]
        for plane in sorted(planes, key=lambda plane: -plane.itemsize):
            scatter(plane)
        return Rank(worker)

    def build(config: EngineConfig, port: Port) -> tuple[Core, EngineInfo]:
        executor = DeviceExecutor(load) if device.type == "cuda" else LocalExecutor(load)
        return build_core(config, port, executor, executor.facts)

    engine = LocalEngine(config, build)
    try:
        yield engine
    finally:
        engine.close()


def generate(engine: LocalEngine, prompts: list[list[int]], count: int, params: SamplingParams) -> Sample:
    """Run prompts to `count` tokens each; times of the steps in which all of them decode, RuntimeError if none do."""
    arrived: SimpleQueue[tuple[float, list[TokenDelta] | EngineFault]] = SimpleQueue()

    def sink(deltas: list[TokenDelta] | EngineFault) -> None:
        arrived.put((time.perf_counter(), deltas))

    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(request_id=f"{begin}-{number}", token_ids=prompt, params=params, seed=number,
                                      max_tokens=count), sink)  # fmt: skip
    left, started, first_at = len(prompts), set(), None
    times: list[float] = []  # of steps in which every sequence has its first token and none has ended
    while left:
        at, deltas = arrived.get()
        if isinstance(deltas, EngineFault):
            raise deltas
        started |= {delta.request_id for delta in deltas if delta.tokens}
        ended = sum(delta.finish is not None for delta in deltas)
        if first_at is None and len(started) == len(prompts):
            first_at = at
        if first_at is not None and left == len(prompts) and not ended:
            times.append(at)
        left -= ended
    assert first_at is not None, "a prompt ended without a token"
    gaps = [b - a for a, b in pairwise(times)]
    first, later = gaps[:STEPS], gaps[WARM_STEPS:]
    if not later and count > WARM_STEPS + 2:
        raise RuntimeError(f"{len(prompts)} sequences never ran at once for {WARM_STEPS} steps; some wait for room")
    return Sample(
        sum(first) / max(1, len(first)), sum(later) / max(1, len(later)), max(later, default=0.0), first_at - begin
    )


def generate_mixed(
    engine: LocalEngine, prompts: list[list[int]], own: list[list[int]], params: SamplingParams
) -> tuple[list[float], list[float]]:
    """Decode `prompts` while each of `own` comes in between, one after another: seconds of steps without and with one.

    A step with one ends when that prompt's only token arrives, some steps after it was submitted.
    """
    arrived: SimpleQueue[tuple[float, list[TokenDelta] | EngineFault]] = SimpleQueue()

    def sink(deltas: list[TokenDelta] | EngineFault) -> None:
        arrived.put((time.perf_counter(), deltas))

    def submit(name: str, prompt: list[int], count: int) -> None:
        engine.submit(GenerateRequest(request_id=name, token_ids=prompt, params=params, seed=1, max_tokens=count), sink)

    many = 8 * len(own) + 64
    for number, prompt in enumerate(prompts):
        submit(f"row {number}", prompt, many)
    plain: list[float] = []
    mixed: list[float] = []
    waiting, left, started, last, quiet = list(own), len(prompts), set(), 0.0, 0
    while left:
        at, deltas = arrived.get()
        if isinstance(deltas, EngineFault):
            raise deltas
        names = {delta.request_id for delta in deltas if delta.tokens}
        started |= names
        left -= sum(delta.finish is not None for delta in deltas if delta.request_id.startswith("row"))
        if left == len(prompts) and len(started) >= len(prompts):
            came = any(name.startswith("own") for name in names)
            quiet = 0 if came else quiet + 1
            if came:
                mixed.append(at - last)
            elif quiet > 2:
                plain.append(at - last)
            if quiet == 4 and waiting:
                submit(f"own {len(waiting)}", waiting.pop(), 1)
        last = at
    return plain, mixed


def prompts_of(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    random = Random(length)
    return [random.choices(range(vocabulary), k=length) for _ in range(batch)]


def config_of(rows: int, longest: int, step_tokens: int, args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path="random",
            max_length=-(-longest // 64) * 64,
            device=args.device,
            graphs=not args.eager,
            mixed_graphs=args.mixed_graphs,
            deterministic=args.deterministic,
        ),
        cache=CacheConfig(prefix=False),
        sched=SchedConfig(rows=rows, step_tokens=step_tokens, chunk=step_tokens),
        ops=dict(pair.split("=") for pair in args.ops),
    )


def trace(path: Path, work: Callable[[], object]) -> dict[str, float]:
    """Profile a run into a file for a trace viewer.

    Returns the share of the time in which something ran on the GPU, the longest gap, and how long before a step's first
    kernel ran the host had queued it, as a median: while that is positive the host is not the limit.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    spans = spans[len(spans) // 4 :]  # the first part has the prompt in it
    if not spans:
        return {}
    busy, gap, end = 0.0, 0.0, spans[0][0]
    for a, b in spans:
        gap = max(gap, a - end)
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    queued = sorted(e["ts"] + e["dur"] for e in events if e.get("name") == "cudaGraphLaunch")
    begun = sorted(e["ts"] for e in events if e.get("cat") == "kernel" and "newest" in e["name"])
    lead = [at - before[-1] for at in begun if (before := [q for q in queued if q <= at])]
    return {
        "gpu_busy": round(busy / (end - spans[0][0]), 4),
        "longest_gap_us": round(gap, 1),
        "lead_us": round(sorted(lead)[len(lead) // 2], 1) if lead else 0.0,
    }


def facts(device: torch.device) -> dict[str, object]:
    """Where and on what a result was measured."""
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    try:
        triton = __import__("triton").__version__
    except ImportError:
        triton = None
    return {
        "commit": commit.stdout.strip() or None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "triton": triton,
        "ops": {name: chosen for name, chosen, _ in table() if chosen != "ref"},
    }


def prefill_facts(operations: float, seconds: float, peak: float | None) -> dict[str, object]:
    """Operations a second, and where the library's own rate is known, the floor in seconds and the share of it."""
    found: dict[str, object] = {"tflop_per_s": round(operations / seconds / 1e12, 1)}
    if peak is not None:
        found |= {
            "peak_tflop_per_s": round(peak / 1e12, 1),
            "floor_s": round(operations / peak, 4),
            "of_peak": round(operations / seconds / peak, 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="inkling-tp8")
    parser.add_argument("--weights", choices=("bf16", "nvfp4"), default="bf16", help="nvfp4: as published")
    parser.add_argument("--numerics", choices=list(Numerics), type=Numerics, default=Numerics.W4A16)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--decode", nargs="*", default=["1x1024"], metavar="BATCHxCONTEXT")
    parser.add_argument("--prefill", nargs="*", type=int, default=[], metavar="TOKENS")
    parser.add_argument("--mixed", nargs="*", default=[], metavar="BATCHxCONTEXT+TOKENS", help="a prompt beside rows")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one prefill step")
    parser.add_argument("--real", type=int, default=32768, help="most tokens of all prompts of a decode row that run")
    parser.add_argument("--cut", action="store_true", help="as one of several ranks, the sum over them left out")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in any company")
    parser.add_argument("--mixed-graphs", action="store_true", help="capture mixed steps too")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--logprobs", type=int, default=None)
    parser.add_argument("--presence", type=float, default=0.0, help="presence penalty")
    parser.add_argument("--longest", type=int, help="max_length of the engine; default what a row needs")
    parser.add_argument("--trace", type=Path, help="profile the last decode row into this file")
    parser.add_argument("--ops", nargs="*", default=[], metavar="NAME=IMPLEMENTATION")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rank.jsonl")
    args = parser.parse_args()
    start_logging("bench", "info")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    shape = SHAPES[args.shape]
    if args.layers:
        shape = fewer_layers(shape, args.layers)
    bind(device, dict(pair.split("=") for pair in args.ops))
    begin = time.perf_counter()
    kv_dtype = torch.float8_e4m3fn if args.kv_cache_dtype == "fp8" else None
    model, sizes = make_model(shape, args.weights, device, args.numerics, kv_dtype)
    if args.cut:
        cut(model)
    print(f"model: {sum(sizes.values()) / 1e9:.2f} GB in {time.perf_counter() - begin:.1f} s", flush=True)
    common = {
        "bench": "rank",
        "shape": args.shape,
        "layers": shape.num_hidden_layers,
        "weights": args.weights,
        "numerics": args.numerics,
        "kv_cache": args.kv_cache_dtype,
        "cut": args.cut,
        "deterministic": args.deterministic,
    }
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        logprobs=args.logprobs,
        presence_penalty=args.presence,
        ignore_eos=True,
        max_tokens=None,
    )
    results = []

    def record(result: dict[str, object]) -> None:
        line = json.dumps(common | result | facts(device))
        results.append(line)
        print(line, flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(line + "\n")

    furnished = Furnished(model, shape.hidden_size)
    for pair in args.decode:
        batch, context = map(int, pair.split("x"))
        count = 2 + WARM_STEPS + STEPS
        step_tokens = max(args.chunk, batch)
        count += -(-batch * context // step_tokens) + 1  # sequences do not begin at the same step
        if context + count > model.max_length:
            parser.error(
                f"--decode {pair}: {count} tokens are timed behind {context:,}; the model has {model.max_length:,} in "
                f"all, so at most {model.max_length - count:,} of context"
            )
        config = config_of(batch, args.longest or context + count, step_tokens, args)
        experts = experts_touched(model, batch, device)
        rival = RIVAL_MS.get((args.shape, batch, context))
        floor = floor_seconds(shape, model, sizes, batch, context, experts)
        begin = time.perf_counter()
        real = batch * context <= args.real
        with engine_of(config, model if real else furnished, device) as engine:
            ready = time.perf_counter() - begin
            prompts = prompts_of(batch, context, model.vocab_size)
            sample = generate(engine, prompts, count, params)
            extra = {}
            if args.trace is not None and pair == args.decode[-1]:
                extra = trace(args.trace, partial(generate, engine, prompts, count - STEPS + 24, params))
        record(
            {
                "row": "decode",
                "batch": batch,
                "context": context,
                "tpot_ms": round(sample.tpot_seconds * 1e3, 4),
                "gap_ms": round(sample.gap_seconds * 1e3, 4),
                "slowest_ms": round(sample.slowest_seconds * 1e3, 4),
                "floor_ms": round(floor * 1e3, 4),
                "experts_touched": round(experts, 1),
                **({"rival_ms": rival, "rival": RIVAL} if rival is not None else {}),
                "first_token_s": round(sample.first_seconds, 3),
                "ready_s": round(ready, 2),
                "memory_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2) if device.type == "cuda" else None,
                "cache": "real prompt" if real else "random",
                "graphs": not args.eager,
                "sampling": {
                    "temperature": args.temperature,
                    "top_p": args.top_p,
                    "logprobs": args.logprobs,
                    "presence": args.presence,
                },
                **extra,
            }
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    peak = measured_peak(device) if args.prefill and device.type == "cuda" else None
    for length in args.prefill:
        config = config_of(1, length + 2, args.chunk, args)
        with engine_of(config, model, device) as engine:
            spent = [
                generate(engine, prompts_of(1, length, model.vocab_size), 1, params).first_seconds for _ in range(3)
            ]
        record(
            {
                "row": "prefill",
                "tokens": length,
                "chunk": args.chunk,
                "tokens_per_s": round(length / min(spent)),
                **prefill_facts(prefill_operations(shape, model, sizes, length), min(spent), peak),
                **(
                    {"rival_tokens_per_s": RIVAL_PREFILL[args.shape], "rival": RIVAL}
                    if args.shape in RIVAL_PREFILL
                    else {}
                ),
                "seconds": [round(s, 4) for s in spent],
            }
        )
    for spelled in args.mixed:
        pair, _, own = spelled.partition("+")
        batch, context = map(int, pair.split("x"))
        config = config_of(batch + 1, context + 512, args.chunk, args)
        with engine_of(config, model, device) as engine:
            prompts = prompts_of(batch, context, model.vocab_size)
            plain, mixed = generate_mixed(engine, prompts, prompts_of(24, int(own), model.vocab_size), params)
        record(
            {
                "row": "mixed",
                "batch": batch,
                "context": context,
                "tokens": int(own),
                "graphs": args.mixed_graphs,
                "without_ms": round(sorted(plain)[len(plain) // 2] * 1e3, 3),
                "with_ms": round(sorted(mixed)[len(mixed) // 2] * 1e3, 3),
                "steps": [len(plain), len(mixed)],
            }
        )


if __name__ == "__main__":
    main()
