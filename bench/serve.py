"""Serves a demo checkpoint, drives it with `inkcap bench serve`, and prints what a streamed token costs as a JSON line.

    python bench/serve.py [--concurrency 64] [--requests 256] [--prompt-tokens 64] [--output-tokens 128] [--api chat]

CPU time is user + system time from /proc, taken before and after the load (100 ticks a second: let it run for seconds).
Server: all of the server process, which does HTTP, text and parsing. Engine core: the main thread of the engine process
and ZeroMQ's threads; with one rank the model runs in another thread of that process, and operators start their own, so
what these two use is scheduling, messages and bookkeeping, no model. `in_steps` is the part of the time in which a step
was under way: what is missing from 1 is what the server costs in output, at full load. With --no-model, `no_model.py`
stands in for the model: it draws random tokens after a pause, so that on a small machine the model does not take the
cores away.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvloop

from inkcap.bench.serve import PATHS, Load, drive, table
from inkcap.bench.workload import Lengths, Shape
from inkcap.terminal.chat import free_port

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
START_SECONDS = 300.0


def commit() -> str:
    """The commit that is measured, marked if the tree differs from it."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def cpu_seconds(stat: Path) -> float:
    """User and system time of a process or a thread."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def child_of(parent: int) -> int:
    """The process that `parent` started: the engine."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if stat.read_text().rpartition(")")[2].split()[1] == str(parent):
                return int(stat.parent.name)
    raise SystemExit("the server has no engine process")


def core_seconds(engine: int) -> float:
    """CPU time of the engine core outside the model; see the top of this file."""
    total = 0.0
    for task in Path(f"/proc/{engine}/task").iterdir():
        if task.name == str(engine) or (task / "comm").read_text().startswith("ZMQ"):
            total += cpu_seconds(task / "stat")
    return total


@contextlib.contextmanager
def serving(program: list[str], model: str, flags: list[str]) -> Iterator[tuple[str, int]]:
    """A server for `model`: its address and process id, once it is ready."""
    port = free_port()
    words = [sys.executable, *program, model, "--port", str(port), *flags]
    process = subprocess.Popen(words)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(url + "/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def make_demo(folder: str) -> str:
    """A demo checkpoint in `folder`."""
    model = str(Path(folder) / "demo")
    subprocess.run([sys.executable, "-m", "inkcap", "demo-checkpoint", model], check=True, stdout=sys.stderr)
    return model


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def engine_counters(url: str) -> dict[str, float]:
    """Of now: the engine's counters, and the second they were taken."""
    with urllib.request.urlopen(url + "/page/live", timeout=30) as response:
        live = json.load(response)
    return {"time": live["time"], **{name: live["stats"][name] for name in ("steps", "step_seconds")}}


def measure(url: str, server: int, load: Load) -> dict[str, object]:
    """The load's figures and the CPU time it took."""
    engine = child_of(server)
    warm = replace(load, shape=replace(load.shape, requests=load.concurrency, output_tokens=Lengths(8, 8)), warmup=0)
    uvloop.run(drive(warm))
    before = cpu_seconds(Path(f"/proc/{server}/stat")), cpu_seconds(Path(f"/proc/{engine}/stat")), core_seconds(engine)
    early_counters = engine_counters(url)
    result = uvloop.run(drive(load))
    late_counters = engine_counters(url)
    after = cpu_seconds(Path(f"/proc/{server}/stat")), cpu_seconds(Path(f"/proc/{engine}/stat")), core_seconds(engine)
    server_s, engine_s, core_s = (late - early for early, late in zip(before, after, strict=True))
    tokens = int(str(result["output_tokens"]))
    spent = {name: late - early_counters[name] for name, late in late_counters.items()}
    print(table(result), file=sys.stderr)
    return {
        "bench": "serve",
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **result,
        "server_us_per_token": round(server_s / tokens * 1e6, 1),
        "engine_core_us_per_token": round(core_s / tokens * 1e6, 1),
        "engine_process_us_per_token": round(engine_s / tokens * 1e6, 1),
        "in_steps": round(spent["step_seconds"] / spent["time"], 4),
        "step_ms": round(spent["step_seconds"] / max(1.0, spent["steps"]) * 1e3, 3),
        "tokens_per_chunk": round(tokens / max(1, int(str(result["chunks"]))), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint; default: a demo checkpoint made for this run")
    parser.add_argument("--no-model", action="store_true", help="random tokens every 20 ms instead of a model")
    parser.add_argument("--api", choices=sorted(PATHS), default="chat")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    args, flags = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        model = args.model
        if model is None:
            model = make_demo(stack.enter_context(tempfile.TemporaryDirectory()))
        program = [str(Path(__file__).with_name("no_model.py"))] if args.no_model else ["-m", "inkcap", "serve"]
        url, server = stack.enter_context(serving(program, model, flags))
        load = Load(
            url=url,
            api=args.api,
            concurrency=args.concurrency,
            shape=Shape(
                requests=args.requests,
                prompt_tokens=Lengths(args.prompt_tokens, args.prompt_tokens),
                output_tokens=Lengths(args.output_tokens, args.output_tokens),
            ),
        )
        result = measure(url, server, load)
    print(json.dumps({**result, "no_model": args.no_model}))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
