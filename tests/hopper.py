"""Runs programs that compile kernels for a GPU that is not there.

Each runs in a fork of one process that has read torch, Triton and our kernels, which takes longer than what they do.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]


class Hopper:
    """The process, started with the first program."""

    def __init__(self) -> None:
        self.process = None

    def run(self, program: str, *words, **environment: str) -> SimpleNamespace:
        """returncode, stdout and stderr of a program with these arguments."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from tests.hopper import serve; serve()"],
                cwd=ROOT,
                env={**os.environ, "TRITON_INTERPRET": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        print(json.dumps([program, [str(word) for word in words], environment]), file=self.process.stdin, flush=True)
        return SimpleNamespace(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()  # it ends when there is nothing more to read


def serve() -> None:
    """Answers a line that asks for a program with a line that says how it went."""
    import inkcap.ops  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os._exit(execute(*json.loads(line)))
            _, status = os.waitpid(child, 0)
            texts = [file.seek(0) or file.read() for file in (out, err)]
        answer = {"returncode": os.waitstatus_to_exitcode(status), "stdout": texts[0], "stderr": texts[1]}
        print(json.dumps(answer), flush=True)


def execute(program: str, words: list[str], environment: dict[str, str]) -> int:
    signal.alarm(300)  # seconds
    os.environ.update(environment)
    sys.argv[1:] = words
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
