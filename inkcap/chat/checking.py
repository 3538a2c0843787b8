"""`python -m inkcap.chat.checking`: says of grammars whether they can be compiled. A process that may be lost.

Frames on stdin and stdout: four bytes of length, then msgpack. It ends when its stdin does.
"""

import resource
import struct
import sys
import time

import msgspec

from inkcap.base.matching import probe

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 2 << 30  # address space: a grammar that wants more ends the process, not the machine


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What is wrong with a grammar (empty: nothing), and the processor time that it took to see it."""

    error: str
    seconds: float


def main() -> None:
    """Answer one grammar after another."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    probe('start: "a"')  # what is made once is made now
    verdict = Verdict("", 0.0)
    while True:
        data = msgspec.msgpack.encode(verdict)
        sink.write(LENGTH.pack(len(data)) + data)
        sink.flush()
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        grammar = source.read(LENGTH.unpack(head)[0]).decode()
        began = time.process_time()
        error = probe(grammar)
        verdict = Verdict(error, time.process_time() - began)


if __name__ == "__main__":
    main()
