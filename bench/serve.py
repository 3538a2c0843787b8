"""Serves a demo checkpoint, drives it with `inkcap bench serve`, and prints what a streamed token costs as JSON lines.

    python bench/serve.py [--load "--concurrency 64 --requests 256 --prompt-tokens 64 --output-tokens 128"] ...
    python bench/serve.py --model DIRECTORY --load "..." --load "--dataset agent --warmup 0 ..." [flags of the server]

Each load is flags of `inkcap bench serve`; one server takes them one after another, and each gives a line. On a GPU,
`rank_checkpoint.py` writes a checkpoint to serve.

CPU time is user + system time from /proc, taken before and after the load (100 ticks a second: let it run for seconds).
Server: all of the server process, which does HTTP, text and parsing. Engine core: the main thread of the engine process
and ZeroMQ's threads; with one rank the model runs in another thread of that process, and operators start their own, so
what these two use is scheduling, messages and bookkeeping, no model. `in_steps` is the part of the time in which a step
was under way: what is missing from 1 is what the server costs in output, at full load, and `predicted_tokens_per_s`
what steps alone would give. `ready_s` and `first_token_s` count from the start of the server's process. With
--no-model, `no_model.py` stands in for the model: it draws random tokens after a pause, so that on a small machine the
model does not take the cores away.
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
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

from inkcap.bench.serve import Load, add_flags, drive, load_of, table
from inkcap.bench.workload import Lengths
from inkcap.terminal.chat import free_port

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
START_SECONDS = 300.0
LOAD = "--concurrency 64 --requests 256 --prompt-tokens 64 --output-tokens 128"


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


def first_token(url: str) -> None:
    """Wait for one token."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body, headers), timeout=60) as got:
        got.read()


def load_from(words: str, url: str) -> Load:
    """The load that flags of `inkcap bench serve` describe."""
    parser = argparse.ArgumentParser(prog="--load")
    add_flags(parser)
    return load_of(parser.parse_args([*shlex.split(words), "--url", url]))


def engine_counters(url: str) -> dict[str, float]:
    """Of now: the engine's counters, and the second they were taken."""
    with urllib.request.urlopen(url + "/page/live", timeout=30) as response:
        live = json.load(response)
    return {"time": live["time"], **{name: live["stats"][name] for name in ("steps", "step_seconds")}}


def measure(url: str, server: int, load: Load) -> dict[str, object]:
    """The load's figures and the CPU time it took."""
    engine = child_of(server)
    if load.warmup:  # with other texts: those of the load are not to be in the cache
        shape = replace(load.shape, requests=load.concurrency, output_tokens=Lengths(8, 8))
        uvloop.run(drive(replace(load, shape=shape, warmup=0, seed=load.seed + 1)))
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
        "predicted_tokens_per_s": round(tokens / max(1e-9, spent["step_seconds"]), 2),
        "step_ms": round(spent["step_seconds"] / max(1.0, spent["steps"]) * 1e3, 3),
        "tokens_per_chunk": round(tokens / max(1, int(str(result["chunks"]))), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint; default: a demo checkpoint made for this run")
    parser.add_argument("--no-model", action="store_true", help="random tokens every 20 ms instead of a model")
    parser.add_argument("--load", action="append", metavar="FLAGS", help=f"may be given again; default: {LOAD}")
    args, flags = parser.parse_known_args()
    failed = False
    with contextlib.ExitStack() as stack:
        model = args.model
        if model is None:
            model = make_demo(stack.enter_context(tempfile.TemporaryDirectory()))
        program = [str(Path(__file__).with_name("no_model.py"))] if args.no_model else ["-m", "inkcap", "serve"]
        began = time.monotonic()
        url, server = stack.enter_context(serving(program, model, flags))
        ready = time.monotonic() - began
        first_token(url)
        start = {"ready_s": round(ready, 2), "first_token_s": round(time.monotonic() - began, 2)}
        for words in args.load or [LOAD]:
            result = measure(url, server, load_from(words, url))
            print(json.dumps({**result, **start, "load": words, "no_model": args.no_model}), flush=True)
            failed = failed or bool(result["failed"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
