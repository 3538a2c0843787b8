"""A process of ours and its parent: setup over stdin, and death noticed on both sides by pipes that close.

The parent keeps the write end of the child's stdin open: end of file tells the child that its parent is gone. The child
holds the write end of the `alive` pipe: end of file tells the parent that the child is gone, however it died.
"""

import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from inkcap.base.config import engine_environment
from inkcap.base.log import logger

T = TypeVar("T")
ENGINE_PROGRAM = ("-m", "inkcap.engine.process")
ORPHANED = 3  # exit code of a child whose parent died
FAULT = 70  # exit code after a failed step
SETUP = 78  # exit code when the engine could not start
LENGTH = struct.Struct("<I")


class Child:
    """A running Python program. It leads its own session, so that Ctrl-C in the terminal reaches only the parent."""

    def __init__(self, program: Sequence[str]) -> None:
        """`program` is what follows `python`: ("-m", module). It reads its modules, then waits to be told its setup."""
        self.alive, child_end = os.pipe()  # readable when the child is dead
        try:
            self.process = subprocess.Popen(
                [sys.executable, *program],
                stdin=subprocess.PIPE,
                pass_fds=(child_end,),
                start_new_session=True,
                env=engine_environment(),
            )
        finally:
            os.close(child_end)

    def tell(self, setup: object) -> None:
        """Give it the setup that `read_setup` waits for."""
        payload = msgspec.msgpack.encode(setup)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(LENGTH.pack(len(payload)) + payload)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died already: `alive` says so

    def ended(self) -> str:
        """How it ended, in words, once `alive` is readable."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipes without ending"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def close(self, seconds: float) -> None:
        """Wait `seconds` for it to end by itself, then kill it. May be called again."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        if self.alive >= 0:
            self.process.stdin.close()
            os.close(self.alive)
            self.alive = -1


def read_setup(kind: type[T]) -> T:
    """The child's half: the value its parent sent. Raises EOFError when the parent is gone already."""
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return msgspec.msgpack.decode(_read(length), type=kind)


def end_with_parent(folder: str | None = None) -> None:
    """From now on this process ends when its parent does, whatever it is doing; `folder` is removed on the way."""
    threading.Thread(target=_watch, args=(os.getppid(), folder), name="parent-watch", daemon=True).start()


def _watch(parent: int, folder: str | None) -> None:
    # A forked copy of the parent would keep the pipe open: hence the second look at the parent's id.
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0] and not os.read(0, 1):
            break
    logger.warning("the process that started this one is gone; ending")
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHANED)


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise EOFError("the parent closed stdin before the setup was complete")
        data += part
    return data
