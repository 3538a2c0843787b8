"""Connections that speak at the same time: a few are heard in each round of the event loop, and none is forgotten."""

import asyncio
import contextlib
import socket

import pytest

from inkcap.server import protocol
from inkcap.server.protocol import HEARD_AT_ONCE, Turnstile

REQUEST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Speaker:
    def __init__(self, name, said, gone=False):
        self.name, self.said, self.gone = name, said, gone

    def speak(self):
        if not self.gone:
            self.said.append(self.name)
        return not self.gone


def test_a_crowd_is_heard_in_order_a_few_in_each_round():
    said = []

    async def crowd():
        turnstile = Turnstile()
        for name in range(20):
            speaker = Speaker(name, said, gone=name in (7, 8, 9, 10, 11))
            if turnstile.enter(speaker):
                said.append(name)
        for _ in range(10):
            said.append("round")
            await asyncio.sleep(0)
        assert not turnstile.waiting
        assert turnstile.enter(Speaker(20, said)), "and once all were heard, whoever comes is"

    asyncio.run(crowd())
    names = [name for name in said if name != "round"]
    assert names == [name for name in range(20) if not 7 <= name <= 11]
    rounds = [len(part.split()) for part in " ".join(map(str, said)).split("round")]
    assert rounds[:4] == [HEARD_AT_ONCE] * 3 + [3]


@pytest.fixture
def clients(site):
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(("127.0.0.1", site.port))) for _ in range(12)]
        for client in made:
            client.settimeout(20)
        yield made


def answer_to(client):
    """All that comes until the server hangs up."""
    return b"".join(iter(lambda: client.recv(65_536), b""))


def test_whoever_has_to_wait_is_answered_and_whoever_leaves_is_not(site, clients, monkeypatch):
    monkeypatch.setattr(protocol, "HEARD_AT_ONCE", 1)

    def speak_together():
        """Send on all connections within one round of the server's loop."""
        for client in clients:
            client.sendall(REQUEST)
        clients.pop(5).close()

    site.do(speak_together)
    for client in clients:
        assert answer_to(client).startswith(b"HTTP/1.1 200 ")


def test_a_request_in_pieces_that_wait_is_whole(clients, monkeypatch):
    monkeypatch.setattr(protocol, "HEARD_AT_ONCE", 1)
    body = b'{"prompt": "' + b"word " * 20_000 + b'"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    for client in clients:
        client.sendall(head + body[:1000])
    for start in range(1000, len(body), 10_000):
        for client in clients:
            client.sendall(body[start : start + 10_000])
    for client in clients:
        answer = answer_to(client)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b'"count":20' in answer
