"""A client and its engine process: streams, limits, aborts, death on either side."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from conftest import DEADLINE, config, outcome, run, settled, until
from fakes import ENGINE, token_at

from inkcap.base.errors import BadRequest, CheckpointMismatch, Draining, EngineFault, Overloaded, QueueFull
from inkcap.base.request import Finish, GenerateRequest, SamplingParams
from inkcap.engine.child import FAULT, ORPHANED
from inkcap.engine.client import EngineClient


def request(name, prompt=(1, 2, 3), max_tokens=8, seed=5):
    return GenerateRequest(
        request_id=name, token_ids=list(prompt), params=SamplingParams(), seed=seed, max_tokens=max_tokens
    )


def expected(prompt_length, count, seed=5):
    return [token_at(seed, prompt_length + i) for i in range(count)]


async def started(behaviour="{}", **sched):
    client = await EngineClient.start(config(behaviour, **sched), ENGINE)
    await client.ready()
    return client


def alive(pid):
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_requests_stream_side_by_side_and_the_process_ends_clean():
    async def test():
        client = await EngineClient.start(config("{}"), ENGINE)
        assert client.info is None
        with pytest.raises(Overloaded, match="loading"):
            client.submit(request("early"))
        assert (await client.stats()).steps == 0
        info = await client.ready()
        assert client.info is info
        assert info.family == "fake"
        parts = [outcome(client.submit(request(f"r{i}", [1] * (i + 1), 5 + i))) for i in range(20)]
        for i, (tokens, finish) in enumerate(await asyncio.gather(*parts)):
            assert tokens == expected(i + 1, 5 + i)
            assert finish is Finish.LENGTH
        stats = await client.stats()
        assert stats.finished == {"length": 20}
        assert stats.generated_tokens == sum(5 + i for i in range(20))
        first = client.submit(request("twice", max_tokens=3000))
        with pytest.raises(BadRequest, match="in use"):
            client.submit(request("twice"))
        await first.aclose()
        await client.close()
        await client.close()
        assert client.exit_code == 0
        assert client.fault == "it was closed"
        assert not Path(client.folder).exists()

    run(test())


def test_the_socket_is_private():
    async def test():
        client = await started()
        assert os.stat(client.folder).st_mode & 0o777 == 0o700
        command = Path(f"/proc/{client.pid}/cmdline").read_bytes()
        assert b"inkcap-" not in command
        await client.close()

    run(test())


def test_abort_ends_the_stream_and_frees_its_blocks():
    async def test():
        client = await started()
        stream = client.submit(request("long", max_tokens=4000))
        await anext(stream)
        client.abort("long")
        client.abort("nobody")
        assert (await outcome(stream))[1] is Finish.ABORT
        assert (await settled(client)).group_usage == {"full": 0.0}
        await client.close()

    run(test())


@pytest.mark.parametrize("how", ["close", "drop", "cancel"])
def test_200_readers_who_leave_midway_leave_nothing_behind(how):
    reading = []

    async def read(client, name):
        stream = client.submit(request(name, max_tokens=4000))
        reading.append(await anext(stream))
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            async for _ in stream:
                pass

    async def test():
        client = await started('{"step_seconds": 0.0005}')
        beside = asyncio.create_task(outcome(client.submit(request("stays", max_tokens=300))))
        for start in (0, 50, 100, 150):
            tasks = [asyncio.create_task(read(client, f"leaves{start + i}")) for i in range(50)]
            if how == "cancel":
                await until(lambda count=start + 50: len(reading) == count)
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        tokens, finish = await beside
        assert (tokens, finish) == (expected(3, 300), Finish.LENGTH)
        stats = await settled(client)
        assert stats.group_usage == {"full": 0.0}
        assert stats.finished == {"abort": 200, "length": 1}
        assert client.open_count == 0
        await client.close()

    run(test())


def test_2000_at_once_are_served_or_refused_and_none_is_lost():
    async def test():
        client = await started(rows=16, waiting=100)
        readers, refused = [], []
        for i in range(2000):
            try:
                readers.append(outcome(client.submit(request(f"r{i}"))))
            except QueueFull as full:
                refused.append(full)
        assert (len(readers), len(refused)) == (116, 1884)
        assert refused[0].retry_after >= 1
        assert "116" in str(refused[0])
        assert {(tuple(tokens), finish) for tokens, finish in await asyncio.gather(*readers)} == {
            (tuple(expected(3, 8)), Finish.LENGTH)
        }
        assert (await outcome(client.submit(request("afterwards"))))[1] is Finish.LENGTH
        await client.close()

    run(test())


def test_a_killed_engine_ends_every_open_request_at_once():
    async def test():
        client = await started('{"step_seconds": 0.001}')
        readers = [asyncio.create_task(outcome(client.submit(request(f"r{i}", max_tokens=4000)))) for i in range(30)]
        await until(lambda: client.open_count == 30)
        asked = asyncio.create_task(client.stats())
        os.kill(client.pid, signal.SIGKILL)
        for tokens, finish in await asyncio.gather(*readers):
            assert isinstance(finish, EngineFault)
            assert "SIGKILL" in str(finish)
            assert len(tokens) < 4000
        assert "SIGKILL" in (client.fault or "")
        with pytest.raises(EngineFault, match="SIGKILL"):
            client.submit(request("late"))
        with pytest.raises(EngineFault, match="SIGKILL"):
            await client.stats()
        await asyncio.gather(asked, return_exceptions=True)
        assert client.exit_code == -signal.SIGKILL
        await client.close()
        assert not Path(client.folder).exists()

    run(test())


def test_submitting_to_an_engine_that_has_just_died_does_not_hang():
    async def test():
        client = await started()
        os.kill(client.pid, signal.SIGKILL)
        limit = time.monotonic() + DEADLINE
        while client._socket.poll(0, zmq.POLLOUT):  # the event loop, which would notice the death, gets no turn
            assert time.monotonic() < limit, "the socket never lost its peer"
        assert client.fault is None
        stream = client.submit(request("late"))
        assert isinstance((await outcome(stream))[1], EngineFault)
        await client.close()

    run(test())


def test_a_failing_step_ends_every_open_request_with_its_reason():
    async def test():
        client = await started('{"fail_at": 5}')
        results = await asyncio.gather(*(outcome(client.submit(request(f"r{i}", max_tokens=50))) for i in range(3)))
        for _, finish in results:
            assert isinstance(finish, EngineFault)
            assert "a planted bug" in str(finish)
        await until(lambda: client.exit_code is not None)
        assert client.exit_code == FAULT
        assert "a planted bug" in (client.fault or "")
        await client.close()

    run(test())


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ('{"setup": "mismatch"}', CheckpointMismatch, "the demo checkpoint lacks 3 tensors"),
        ('{"setup": "bug"}', EngineFault, "KeyError: 'surprise'"),
        ('{"blocks": 1}', None, "0 of full"),
    ],
)
def test_an_engine_that_cannot_start_says_why(behaviour, kind, message):
    async def test():
        client = await EngineClient.start(config(behaviour), ENGINE)
        with pytest.raises(kind or Exception, match=message) as caught:
            await client.ready()
        assert kind is None or type(caught.value) is kind
        assert message in (client.fault or "")
        with pytest.raises(EngineFault):
            client.submit(request("r"))
        await client.close()

    run(test())


@pytest.mark.parametrize("closed", [True, False], ids=["closed by the server", "left alone"])
def test_sigterm_lets_open_requests_finish_and_refuses_new_ones(closed):
    async def test():
        client = await started('{"step_seconds": 0.002}')
        stream = client.submit(request("open", max_tokens=200))
        first = await anext(stream)
        os.kill(client.pid, signal.SIGTERM)
        await until(lambda: client.draining)
        with pytest.raises(Draining):
            client.submit(request("new"))
        tokens, finish = await outcome(stream)
        tokens = [token for delta in first for token in delta.tokens] + tokens  # the first part may hold several
        assert tokens == expected(3, 200)[: len(tokens)]
        assert finish is Finish.LENGTH
        assert client.fault is None
        if not closed:
            await until(lambda: client.fault is not None)
        await client.close()
        assert client.exit_code == 0

    run(test())


def test_sigint_is_the_servers_business():
    async def test():
        client = await started()
        os.kill(client.pid, signal.SIGINT)
        assert (await outcome(client.submit(request("r"))))[1] is Finish.LENGTH
        assert os.getsid(client.pid) != os.getsid(0), "Ctrl-C in the terminal would reach the engine"
        await client.close()

    run(test())


ORPHAN = """
import asyncio, os, signal, sys
sys.path[:0] = {paths!r}
from conftest import config
from fakes import ENGINE
from inkcap.engine.client import EngineClient
async def main():
    client = await EngineClient.start(config("{{}}"), ENGINE)
    await client.ready()
    print(client.pid, client.folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_the_engine_ends_when_its_client_is_killed():
    code = ORPHAN.format(paths=[str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    pid, folder = done.stdout.split()
    limit = time.monotonic() + DEADLINE
    while alive(pid):
        assert time.monotonic() < limit, f"engine {pid} outlived its client (expected exit {ORPHANED})"
        time.sleep(0.01)
    assert not Path(folder).exists()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("victim", ["rank", "engine"])
def test_ranks_and_engine_go_down_together(victim):
    async def test():
        client = await started('{"step_seconds": 0.001}', tp=2)
        ranks = children(client.pid)
        assert len(ranks) == 2
        readers = [asyncio.create_task(outcome(client.submit(request(f"r{i}", max_tokens=4000)))) for i in range(3)]
        await until(lambda: client.open_count == 3)
        os.kill(ranks[1] if victim == "rank" else client.pid, signal.SIGKILL)
        for _, finish in await asyncio.gather(*readers):
            assert isinstance(finish, EngineFault)
            assert ("rank 1 was killed by SIGKILL" if victim == "rank" else "SIGKILL") in str(finish)
        await until(lambda: client.exit_code is not None and not any(map(alive, ranks)))
        assert client.exit_code == (FAULT if victim == "rank" else -signal.SIGKILL)
        await client.close()

    run(test())


def test_close_while_loading_ends_the_process():
    async def test():
        client = await EngineClient.start(config("{}"), ENGINE)
        await client.close()
        assert client.exit_code is not None
        with pytest.raises(EngineFault):
            await client.ready()

    run(test())


def test_a_request_that_can_never_run_ends_with_its_reason():
    async def test():
        client = await started()
        stream = client.submit(request("huge", max_tokens=5000))
        (delta,) = await anext(stream)
        assert delta.finish is Finish.ERROR
        assert "4096" in (delta.error or "")
        await client.close()

    run(test())
