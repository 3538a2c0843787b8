"""Where a captured step's time goes, from a trace that `bench/rank.py --trace FILE` wrote.

    python bench/timeline.py FILE [--first newest_kernel]

A kernel counts from the end of the one before it to its own end: launched programmatically it begins long before, so
its own duration says little, and these numbers add up to the step. `early` is how long before the other's end it began.
Medians over steps of the commonest length; a step begins with the kernel whose name has `--first` in it.
"""

import argparse
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def steps_of(events: list[dict], first: str) -> list[list[dict]]:
    """The steps of a trace, each a list of what ran on the GPU in order of its start; all as long as most are.

    Raises ValueError where no two steps are whole.
    """
    ran = sorted((event for event in events if event.get("cat") in KINDS), key=lambda event: event["ts"])
    begins = [place for place, event in enumerate(ran) if first in event["name"]]
    steps = [ran[a:b] for a, b in pairwise(begins)]
    if not steps:
        raise ValueError(f"the trace has {len(begins)} kernels with {first!r} in their names; two make a step")
    length = Counter(map(len, steps)).most_common(1)[0][0]
    return [step for step in steps if len(step) == length]


def ends(step: list[dict]) -> list[float]:
    return [event["ts"] + event["dur"] for event in step]


def rows_of(steps: list[list[dict]]) -> list[tuple[str, int, float, float]]:
    """(name, times a step, us a step, mean us early) of each kernel, the longest first; the first one has none before
    it and is left out."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for place, event in enumerate(steps[0][1:], start=1):
        spent = median(ends(step)[place] - ends(step)[place - 1] for step in steps)
        early = median(ends(step)[place - 1] - step[place]["ts"] for step in steps)
        found[event["name"]].append((spent, early))
    rows = [
        (name, len(each), sum(a for a, _ in each), sum(b for _, b in each) / len(each)) for name, each in found.items()
    ]
    return sorted(rows, key=lambda row: -row[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--first", default="newest_kernel", help="part of the name of a step's first kernel")
    args = parser.parse_args()
    steps = steps_of(json.loads(args.trace.read_text())["traceEvents"], args.first)
    whole = median(ends(step)[-1] - step[0]["ts"] for step in steps)
    print(f"{len(steps)} steps of {len(steps[0])} kernels and copies, {whole:.1f} us from the first one's start")
    for name, times, spent, early in rows_of(steps):
        print(f"{spent:9.2f} us  {times:4d} x {spent / times:7.2f}  early {early:6.2f}  {name[:60]}")


if __name__ == "__main__":
    main()
