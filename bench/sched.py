"""What the scheduler costs, and what memory the cache strands.

    python bench/sched.py steps      time of plan + apply for 256 running rows on one core, memory per row
    python bench/sched.py stranded   memory idle in one cache group while another refuses work, over a mixed load

Each prints a JSON line and a line for people. No torch, no model: results are made up, so only our own time counts.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import tracemalloc
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, quantiles
from time import thread_time_ns

from inkcap.base.config import CacheConfig, SchedConfig
from inkcap.base.request import GenerateRequest, SamplingParams
from inkcap.base.step import Chunk, RowResult, StepPlan, StepResult
from inkcap.cache.group import CacheGroup
from inkcap.cache.plan import Load, layout_of, plan_memory
from inkcap.sched.scheduler import Scheduler, build_scheduler

# Inkling in bf16 before sharding: 44 KiB a token in full, 220 MiB a live sequence in window, 8.1 MiB an sconv block
GROUPS = [
    CacheGroup("full", 64, 64 * 44 * 1024),
    CacheGroup("window", 64, 220 * 2**20 // 8, 512),
    CacheGroup("sconv", 4, int(8.1 * 2**20), 4, False),
]
VOCABULARY = 200_000


def commit() -> str:
    """The commit that is measured, marked if the tree differs from it."""
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "inkcap") else "")


def report(figures: dict[str, float | int | str], line: str) -> None:
    """One JSON line, one line for people."""
    where = {"python": platform.python_version(), "machine": platform.machine(), "commit": commit()}
    print(json.dumps({**figures, **where}))
    print(f"{line} (Python {where['python']}, commit {where['commit']})")


def answer(plan: StepPlan) -> StepResult:
    """Some token for every entry that samples; drafts are accepted half way."""
    rows = []
    for entry in plan.work:
        if isinstance(entry, Chunk):
            rows.append(RowResult(entry.row, [7] if entry.samples else []))
        else:
            rows.append(RowResult(entry.row, [7] * (1 + entry.drafts // 2)))
    return StepResult(step=plan.step, rows=rows)


def request(name: str, tokens: list[int], max_tokens: int, priority: int = 0) -> GenerateRequest:
    """Greedy, to its full length."""
    params = SamplingParams(ignore_eos=True)
    return GenerateRequest(
        request_id=name, token_ids=tokens, params=params, seed=0, max_tokens=max_tokens, priority=priority
    )


def full_house(rows: int, prompt: int, steps: int, drafts: int) -> Scheduler:
    """A scheduler with that many different prompts running, all of them decoding."""
    sched = SchedConfig(rows=rows, step_tokens=8192, chunk=2048)
    longest = prompt + (steps + 400) * (1 + drafts)
    need = {"full": rows * (longest // 64 + 2), "window": rows * 24 + 600, "sconv": rows * 16 + 200}
    layout = layout_of(GROUPS, 2 * sum(need[group.name] * group.block_bytes for group in GROUPS))
    lag, lookahead = (drafts - 1, drafts) if drafts else (0, 0)
    scheduler = build_scheduler(
        CacheConfig(),
        sched,
        GROUPS,
        layout.pools(),
        stop_ids=(1,),
        max_length=longest,
        drafts=drafts,
        lag=lag,
        lookahead=lookahead,
    )
    rng = Random(0)
    for i in range(rows):
        scheduler.add(request(str(i), rng.choices(range(2, VOCABULARY), k=prompt), longest - prompt))
    plan = scheduler.plan()
    while plan is not None and (scheduler.stats().waiting or any(isinstance(entry, Chunk) for entry in plan.work)):
        following = scheduler.plan()
        scheduler.apply(answer(plan))
        plan = following
    assert plan is not None, "nothing is left to run"
    scheduler.apply(answer(plan))
    return scheduler


def measure_steps(rows: int, prompt: int, steps: int, drafts: int) -> None:
    """Time `plan` and `apply` as the engine calls them, one plan ahead of the results, in CPU time of the thread."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    scheduler = full_house(rows, prompt, steps, drafts)
    gc.collect()
    memory_bytes = (tracemalloc.get_traced_memory()[0] - before) // rows
    tracemalloc.stop()
    # as the engine does after start: what lives as long as the process is not looked at again
    gc.freeze()
    plans: list[int] = []
    applies: list[int] = []
    waiting: deque[StepPlan] = deque()
    for _ in range(steps):
        began = thread_time_ns()
        plan = scheduler.plan()
        plans.append(thread_time_ns() - began)
        assert plan is not None and len(plan.work) == rows, "not all rows run"  # noqa: PT018
        waiting.append(plan)
        if len(waiting) > 1:
            result = answer(waiting.popleft())
            began = thread_time_ns()
            deltas = scheduler.apply(result)
            applies.append(thread_time_ns() - began)
            assert len(deltas) == rows, "a row has no token"
    both = [(a + b) / 1e6 for a, b in zip(plans[1:], applies, strict=True)]
    p99 = quantiles(both, n=100)[98]
    figures = {
        "bench": "sched.steps",
        "rows": rows,
        "prompt": prompt,
        "drafts": drafts,
        "steps": steps,
        "plan_ms": round(mean(plans) / 1e6, 4),
        "apply_ms": round(mean(applies) / 1e6, 4),
        "both_ms": round(mean(both), 4),
        "both_p99_ms": round(p99, 4),
        "row_bytes": memory_bytes,
    }
    report(
        figures,
        f"{rows} rows, prompts of {prompt}, {drafts} drafts: plan {figures['plan_ms']:.3f} ms + apply "
        f"{figures['apply_ms']:.3f} ms = {figures['both_ms']:.3f} ms CPU a step (p99 {p99:.3f}); "
        f"{memory_bytes / 1024:.1f} KiB a row, prompt included",
    )


@dataclass
class Mix:
    """A load: kinds of requests with their weights."""

    name: str
    kinds: list[tuple[float, tuple[int, int], tuple[int, int]]]  # weight, prompt from..to, answer from..to
    stem: int = 0  # tokens all prompts share


MIXES = [
    Mix("chat", [(1.0, (100, 4000), (50, 800))], stem=1500),
    Mix(
        "mixed", [(0.7, (100, 4000), (50, 800)), (0.25, (4000, 30000), (200, 1500)), (0.05, (60000, 120000), (50, 500))]
    ),
    Mix("long", [(1.0, (30000, 120000), (200, 1000))]),
]


def measure_stranded(mix: Mix, budget_gib: int, rows: int, count: int) -> None:
    """Run a load that always has requests waiting; in each step, how many bytes are idle while work is refused.

    Idle are the bytes that no row holds, those of boundaries which a later request may resume from among them.
    """
    load = Load(rows=rows, step_tokens=8192, chunk=4096, keep_every=4096)
    plan = plan_memory(GROUPS, budget_gib << 30, load, max_length=131072)
    layout = plan.layout
    scheduler = build_scheduler(
        CacheConfig(keep_every=load.keep_every),
        SchedConfig(rows=rows, step_tokens=load.step_tokens, chunk=load.chunk, waiting=count),
        GROUPS,
        layout.pools(),
        stop_ids=(1,),
        max_length=plan.longest,
    )
    rng = Random(1)
    stem = rng.choices(range(2, VOCABULARY), k=mix.stem)
    for i in range(count):
        (_, prompt, reply) = rng.choices(mix.kinds, [kind[0] for kind in mix.kinds])[0]
        tokens = stem + rng.choices(range(2, VOCABULARY), k=rng.randint(*prompt))
        scheduler.add(request(str(i), tokens, rng.randint(*reply)))
    manager = scheduler.manager
    steps = refusing = 0
    stranded: list[float] = []
    flights: deque[StepPlan] = deque()
    while True:
        stats = scheduler.stats()
        if not stats.waiting:  # the tail says nothing about a busy server
            break
        plan = scheduler.plan()
        steps += 1
        # work was refused: rows are free and sequences wait, but the cache had no room
        if (
            plan is not None
            and scheduler._free_rows
            and len(scheduler._waiting)
            and _budget_left(plan, load.step_tokens)
        ):
            refusing += 1
            stranded.append(1.0 - sum(manager.usage.values()))
        else:
            stranded.append(0.0)
        if plan is not None:
            flights.append(plan)
        if flights and (len(flights) > 1 or plan is None):
            scheduler.apply(answer(flights.popleft()))
    stats = scheduler.stats()
    average = sum(stranded) / len(stranded)
    while_refusing = sum(stranded) / refusing if refusing else 0.0
    figures = {
        "bench": "sched.stranded",
        "mix": mix.name,
        "budget_gib": budget_gib,
        "rows": rows,
        "steps": steps,
        "refusing": round(refusing / steps, 4),
        "stranded": round(average, 4),
        "stranded_while_refusing": round(while_refusing, 4),
        "preemptions": stats.preemptions,
        "hit_rate": round(stats.prefix_hits / max(1, stats.prefix_queries), 4),
    }
    report(
        figures,
        f"{mix.name:<6} {budget_gib} GiB, {rows} rows: work is refused in {refusing / steps:.1%} of {steps} steps; "
        f"{while_refusing:.1%} of the memory is idle then, {average:.1%} over all steps; "
        f"{stats.preemptions} preemptions",
    )


def _budget_left(plan: StepPlan, step_tokens: int) -> bool:
    spent = sum(e.stop - e.start if isinstance(e, Chunk) else 1 + e.drafts for e in plan.work)
    return spent < step_tokens


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["steps", "stranded"])
    parser.add_argument("--rows", type=int, help="running rows (steps: 256, stranded: 64)")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt (steps)")
    parser.add_argument("--steps", type=int, default=2000, help="steps to time")
    parser.add_argument("--drafts", type=int, default=0, help="drafted tokens a step (steps)")
    parser.add_argument("--budget-gib", type=int, default=60, help="bytes for the cache (stranded)")
    parser.add_argument("--count", type=int, default=300, help="requests (stranded)")
    args = parser.parse_args()
    if args.mode == "steps":
        measure_steps(args.rows or 256, args.prompt, args.steps, args.drafts)
    else:
        for mix in MIXES:
            measure_stranded(mix, args.budget_gib, args.rows or 64, args.count)


if __name__ == "__main__":
    sys.exit(main())
