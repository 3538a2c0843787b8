"""Checks grammars in a process of its own, with a deadline: what takes too long or crashes it is refused.

Compiling cannot be interrupted, and its limits do not cover all of it: optional properties by the thousand take
seconds. So a thread would not do.
"""

import asyncio
import contextlib
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from inkcap.base.errors import Overloaded
from inkcap.base.log import logger
from inkcap.chat.checking import LENGTH, Verdict

PROGRAM = ("-m", "inkcap.chat.checking")
START_SECONDS = 20.0  # to start the process
GRAMMAR_SECONDS = 0.5  # for one grammar
REQUEST_SECONDS = 0.6  # for all grammars of one request
WAITING = 32  # requests that may wait for the process
KEPT = 4096  # verdicts


class Grammars:
    """Verdicts on grammars. Belongs to one event loop; the process starts with the first grammar."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._waiting = 0
        self.rejected = 0  # grammars that requests came with in vain

    async def errors(self, grammars: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Grammars that cannot be compiled, and why. `grammars`: each with the field it comes from.

        Raises Overloaded when too many requests wait for this.
        """
        found: dict[str, str] = {}
        unknown: list[str] = []
        for grammar, _ in grammars:
            verdict = self._verdicts.get(_key(grammar))
            if verdict is None:
                unknown.append(grammar)
            elif verdict:
                found[grammar] = verdict
        if unknown:
            if self._waiting >= WAITING:
                raise Overloaded(f"{self._waiting} requests wait for their grammars to be checked; try again soon")
            self._waiting += 1
            try:
                async with self._lock:
                    found |= await self._check(dict.fromkeys(unknown))
            finally:
                self._waiting -= 1
        self.rejected += len(found)
        return found

    async def close(self) -> None:
        """End the process. May be called again."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _check(self, grammars: dict[str, None]) -> dict[str, str]:
        errors: dict[str, str] = {}
        left = REQUEST_SECONDS
        for grammar in grammars:
            if left <= 0:
                errors[grammar] = f"the grammars of the request take longer than {REQUEST_SECONDS:g} s to compile"
                continue
            process = await self._running()
            began = time.monotonic()
            error = await self._ask(process, grammar, min(left, GRAMMAR_SECONDS))
            left -= time.monotonic() - began
            self._verdicts[_key(grammar)] = error
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
            if error:
                errors[grammar] = error
        return errors

    async def _ask(self, process: asyncio.subprocess.Process, grammar: str, seconds: float) -> str:
        assert process.stdin is not None, "the process has pipes"
        data = grammar.encode()
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(LENGTH.pack(len(data)) + data)
                await process.stdin.drain()
                return (await _verdict(process)).error
        except TimeoutError:
            await self.close()
            return f"it takes longer than {seconds:.1f} s to compile; make it simpler"
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return "it is too complex to compile; make it simpler"
        except asyncio.CancelledError:
            await self.close()  # its answer would be taken for another's
            raise

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *PROGRAM, stdin=pipe, stdout=pipe, start_new_session=True
            )
            try:
                async with asyncio.timeout(START_SECONDS):
                    await _verdict(self._process)
            except BaseException:
                logger.error("the process that checks grammars did not start")
                await self.close()
                raise
        return self._process


async def _verdict(process: asyncio.subprocess.Process) -> Verdict:
    assert process.stdout is not None, "the process has pipes"
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Verdict)


def _key(grammar: str) -> bytes:
    return sha256(grammar.encode()).digest()
