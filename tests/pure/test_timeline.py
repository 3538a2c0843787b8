"""bench/timeline.py on traces whose times are known."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "bench" / "timeline.py"


def trace(path, steps):
    """Steps of (name, start, end), in us, out of order, among events that are not of a GPU."""
    events = [{"cat": "cpu_op", "name": "newest", "ts": 0, "dur": 1000}]
    for step in steps:
        events += [{"cat": "kernel", "name": name, "ts": a, "dur": b - a} for name, a, b in reversed(step)]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def step(at):
    """Kernels that begin before the one before them ends, and a copy behind a gap."""
    spans = [("newest_kernel", 0, 2), ("row", 1, 7), ("up", 3, 17), ("row", 12, 20), ("copy", 25, 26)]
    return [(name, at + a, at + b) for name, a, b in spans]


def run(*words):
    return subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True)


def test_kernels_count_from_the_end_of_the_one_before(tmp_path):
    short = step(500)[:2]  # a step of another kind
    made = run(trace(tmp_path / "trace.json", [step(0), step(100), step(200), short, step(600), step(700)]))
    assert made.returncode == 0, made.stderr
    lines = [" ".join(line.split()) for line in made.stdout.splitlines()]
    assert lines == [
        "4 steps of 5 kernels and copies, 26.0 us from the first one's start",
        "10.00 us 1 x 10.00 early 4.00 up",
        "8.00 us 2 x 4.00 early 3.00 row",
        "6.00 us 1 x 6.00 early -5.00 copy",
    ]


def test_a_trace_without_steps_says_so(tmp_path):
    made = run(trace(tmp_path / "trace.json", [step(0)]), "--first", "oldest")
    assert made.returncode != 0
    assert "0 kernels with 'oldest' in their names" in made.stderr
