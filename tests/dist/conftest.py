"""Runs one script as several ranks, each a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory):
    """`run_ranks(script, size, *args)` starts `script rank size store *args` for each rank and gives their JSON."""

    def run(script: str, size: int, *args: object) -> list:
        store = tmp_path_factory.mktemp("ranks") / "store"
        started = [
            subprocess.Popen(
                [sys.executable, "-W", "error", HERE / script, str(rank), str(size), store, *map(str, args)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            ended = [process.communicate(timeout=60) for process in started]
        finally:
            for process in started:
                process.kill()
        for rank, (process, (_, errors)) in enumerate(zip(started, ended, strict=True)):
            assert process.returncode == 0, f"rank {rank} of {script}:\n{errors}"
        return [json.loads(out) for out, _ in ended]

    return run
