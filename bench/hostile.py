"""What hostile requests do to a stream that runs beside them: gaps between its tokens, and how soon they are refused.

    python bench/hostile.py [--seconds 5] [--attack NAME ...]

A server with random tokens every 20 ms for a model (`no_model.py`), one stream read here, and the requests of an attack
sent ten a second by another process (the crowd: all at once). One JSON line an attack; `moved_ms` is what the
p99 of the gaps moved by, against the same stream alone.
"""

import argparse
import asyncio
import http.client
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

from serve import commit, make_demo, processor, serving

BYTES = 10_000_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
CROWD = 2000
PACE_S = 0.1  # from one request to the next: what is measured is who is held up, not how two cores are shared


def schema(value: object) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}
    return json.dumps({**ASK, "response_format": form}).encode()


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


def tools(count: int) -> bytes:
    shape = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5)}}
    declared = [{"type": "function", "function": {"name": f"f{i}", "parameters": shape}} for i in range(count)]
    return json.dumps({**ASK, "tools": declared, "tool_choice": "required"}).encode()


def filled(piece: bytes, end: bytes, size: int = BYTES) -> bytes:
    """A message of an array of pieces, each with its comma."""
    return b'{"messages":[{"role":"user","content":[' + piece * (size // len(piece)) + end + b"]}]}"


def keys() -> bytes:
    return b'{"messages":[{' + b",".join(b'"k%d":1' % i for i in range(BYTES // 12)) + b"}]}"


ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "pattern": (CHAT, lambda: schema({"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99}b?)+$"})),
    "branches": (CHAT, lambda: schema({"allOf": [{"anyOf": [{"minLength": i}, {"pattern": "a"}]} for i in range(40)]})),
    "properties": (CHAT, lambda: schema({"properties": {f"p{i}": {"type": "string"} for i in range(4000)}})),
    "schema of 10 MB": (CHAT, lambda: schema({"enum": [f"{i:010}" for i in range(BYTES // 14)]})),
    "10,000 tools": (CHAT, lambda: tools(10_000)),
    "1,000 tools": (CHAT, lambda: tools(1_000)),
    "empty messages": (CHAT, lambda: b'{"messages":[' + b"{}," * 119_000 + b"{}]}"),
    "fewer objects": (CHAT, lambda: filled(b'{"a":[0]},', b"0", 1_190_000)),
    "a million ids": (TEXT, lambda: b'{"prompt":[' + b"123," * 1_090_000 + b"1]}"),
    "depth 100,000": (CHAT, lambda: b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "schema 100 deep": (CHAT, lambda: schema(nested(50))),
    "lists": (CHAT, lambda: filled(b"[],", b"[]")),
    "objects": (CHAT, lambda: filled(b'{"a":[0]},', b"0")),
    "keys": (CHAT, keys),
    "prompt of 10 MB": (CHAT, lambda: b'{"messages":[{"role":"user","content":"' + b"ab " * (BYTES // 3) + b'"}]}'),
    "ids of 10 MB": (TEXT, lambda: b'{"prompt":[' + b"12345," * (BYTES // 6) + b"1]}"),
    "crowd of 2,000": (CHAT, lambda: json.dumps({**ASK, "max_tokens": 1}).encode()),
}  # fmt: skip


class Listener(threading.Thread):
    """Reads one long stream and notes when something came."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        place = urlsplit(url)
        self.times: list[float] = []
        body = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        self.socket = socket.create_connection((place.hostname, place.port))
        head = (
            f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + data)
        self.start()

    def run(self) -> None:
        while self.socket.recv(1 << 16):
            self.times.append(time.monotonic())

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.join()

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between what came from `begin` to `end`."""
        times = [t for t in self.times if begin <= t <= end]
        return [(b - a) * 1e3 for a, b in pairwise(times)]


def attack(url: str, name: str, seconds: float) -> tuple[dict[str, int], float, float, float]:
    """Send requests for a while, in a process of its own. Replies by status, the slowest one (s), begin and end."""
    path, make = ATTACKS[name]
    body = make()
    if name.startswith("crowd"):
        return asyncio.run(crowd(url, path, body))
    statuses: Counter[str] = Counter()
    slowest = 0.0
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        began = time.monotonic()
        connection.request("POST", path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        slowest = max(slowest, time.monotonic() - began)
        statuses[str(reply.status)] += 1
        connection.close()
        time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
    return dict(statuses), slowest, begin, time.monotonic()


async def crowd(url: str, path: str, body: bytes) -> tuple[dict[str, int], float, float, float]:
    place = urlsplit(url)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def one() -> tuple[str, float]:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(request)
        status = (await reader.read()).split(b" ", 2)[1].decode()
        writer.close()
        return status, time.monotonic() - began

    begin = time.monotonic()
    answers = await asyncio.gather(*(one() for _ in range(CROWD)))
    return dict(Counter(s for s, _ in answers)), max(took for _, took in answers), begin, time.monotonic()


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint; default: a demo checkpoint made for this run")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack, and of the stream alone")
    parser.add_argument("--attack", choices=list(ATTACKS), nargs="*", default=list(ATTACKS))
    args, flags = parser.parse_known_args()
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, pool:
        model = args.model or make_demo(folder)
        with serving([str(Path(__file__).with_name("no_model.py"))], model, flags) as (url, _):
            pool.submit(attack, url, "pattern", 0.1).result()  # processes start with the first request
            listener = Listener(url)
            time.sleep(1)
            begin = time.monotonic()
            time.sleep(args.seconds)
            alone = p99(listener.gaps_ms(begin, time.monotonic()))
            for name in args.attack:
                statuses, slowest, begin, end = pool.submit(attack, url, name, args.seconds).result()
                time.sleep(0.5)
                gaps = listener.gaps_ms(begin - 0.1, end + 0.3)
                moved = p99(gaps) - alone
                worst = max(worst, moved)
                figures = {
                    "requests": statuses,
                    "slowest_reply_s": round(slowest, 3),
                    "alone_p99_ms": round(alone, 1),
                    "p99_ms": round(p99(gaps), 1),
                    "max_ms": round(max(gaps), 1),
                    "moved_ms": round(moved, 1),
                }
                where = {"commit": commit(), "cpu": processor(), "python": sys.version.split()[0]}
                print(json.dumps({"bench": "hostile", "attack": name, **figures, **where}), flush=True)
            listener.close()
    print(f"p99 between tokens moved by at most {worst:.1f} ms", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
