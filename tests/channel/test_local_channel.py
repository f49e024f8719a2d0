"""The local channel over real Unix sockets. Waiting is done by polling; nothing sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.channel.local import LocalClient, LocalServer
from common.channel.local_async import AsyncLocalClient
from common.channel.poller import Poller
from common.channel.sockets import LOCAL_QUEUE_MAX, ChannelClosed, Endpoint, SendResult
from common.errors import ConfigError

PATIENCE_S = 20.0  # only a failing test waits this long


@pytest.fixture
def path(tmp_path: Path) -> str:
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    return str(directory / "s.sock")


@pytest.fixture
def server(path: str) -> Iterator[LocalServer]:
    with contextlib.closing(LocalServer(path)) as server:
        yield server


def wait_for(source: Endpoint | int) -> None:
    poller = Poller()
    poller.register(source)
    assert poller.poll(PATIENCE_S) == [source], "nothing came"


def receive_count(server: LocalServer, count: int) -> list[tuple[str, bytes]]:
    messages: list[tuple[str, bytes]] = []
    while len(messages) < count:
        wait_for(server)
        messages += server.receive()
    return messages


def connect(server: LocalServer, path: str, name: str) -> LocalClient:
    client = LocalClient(path, name)
    assert client.send(b"here") is SendResult.SENT
    assert receive_count(server, 1) == [(name, b"here")]
    return client


def test_messages_go_both_ways_by_name(server: LocalServer, path: str) -> None:
    with (
        contextlib.closing(connect(server, path, "worker-0")) as first,
        contextlib.closing(connect(server, path, "worker-1")) as second,
    ):
        assert server.send("worker-1", b"to 1") is SendResult.SENT
        assert server.send("worker-0", b"to 0") is SendResult.SENT
        wait_for(first)
        wait_for(second)
        assert first.receive() == [b"to 0"]
        assert second.receive() == [b"to 1"]


def test_order_is_kept_and_nothing_is_lost(server: LocalServer, path: str) -> None:
    with contextlib.closing(connect(server, path, "worker-0")) as client:
        sent = [b"%d" % index for index in range(5000)]
        for payload in sent:
            assert client.send(payload) is SendResult.SENT
        assert receive_count(server, 5000) == [("worker-0", payload) for payload in sent]


def test_messages_wait_for_a_scheduler_that_starts_late(path: str) -> None:
    with contextlib.closing(LocalClient(path, "worker-0")) as client:
        assert client.send(b"early") is SendResult.SENT
        with contextlib.closing(LocalServer(path)) as server:
            assert receive_count(server, 1) == [("worker-0", b"early")]


def test_sending_to_a_name_that_never_came_is_reported(server: LocalServer) -> None:
    assert server.send("worker-7", b"x") is SendResult.GONE


def test_sending_to_a_name_that_has_gone_is_reported(server: LocalServer, path: str) -> None:
    connect(server, path, "worker-0").close()

    results = set()
    poller = Poller()
    poller.register(server)
    for _ in range(1000):  # ZMQ notices a hang-up in the course of its polls
        results.add(server.send("worker-0", b"x"))
        if SendResult.GONE in results:
            break
        poller.poll(0.02)
    assert SendResult.GONE in results


def test_a_process_that_comes_back_takes_its_name_over(server: LocalServer, path: str) -> None:
    connect(server, path, "worker-0").close()
    with contextlib.closing(connect(server, path, "worker-0")) as again:
        assert server.send("worker-0", b"for the new one") is SendResult.SENT
        wait_for(again)
        assert again.receive() == [b"for the new one"]


def test_a_full_queue_is_a_result_and_not_a_wait(path: str) -> None:
    with contextlib.closing(LocalClient(path, "worker-0")) as client:  # nobody ever reads
        results = [client.send(b"x") for _ in range(LOCAL_QUEUE_MAX + 1)]
    assert results[-1] is SendResult.FULL
    assert results.count(SendResult.SENT) == LOCAL_QUEUE_MAX


def test_receiving_nothing_returns_at_once(server: LocalServer, path: str) -> None:
    assert server.receive() == []
    with contextlib.closing(LocalClient(path, "worker-0")) as client:
        assert client.receive() == []


def test_malformed_messages_are_counted_and_dropped(server: LocalServer, path: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, "né".encode())
    socket.connect(f"ipc://{path}")
    socket.send(b"from a name that is not ASCII")
    socket.send_multipart([b"two", b"frames"])
    while server.malformed_count < 2:
        wait_for(server)
        assert server.receive() == []
    socket.close()


def test_the_poller_tells_channels_and_descriptors_apart(server: LocalServer, path: str) -> None:
    read_fd, write_fd = os.pipe()
    poller = Poller()
    poller.register(server)
    poller.register(read_fd)
    assert poller.poll(0.0) == []

    os.write(write_fd, b"x")
    assert poller.poll(PATIENCE_S) == [read_fd]
    with contextlib.closing(LocalClient(path, "worker-0")) as client:
        client.send(b"x")
        ready: list[Endpoint | int] = []
        while server not in ready:
            ready = poller.poll(PATIENCE_S)
            assert ready, "nothing came"
        assert ready == [server, read_fd]
    poller.unregister(server)
    assert poller.poll(0.0) == [read_fd]
    os.close(write_fd)
    os.read(read_fd, 1)
    assert poller.poll(PATIENCE_S) == [read_fd]  # the end of a pipe counts as readable
    poller.unregister(read_fd)
    assert poller.poll(0.0) == []
    os.close(read_fd)


def test_what_one_receive_left_is_still_reported(server: LocalServer, path: str) -> None:
    with contextlib.closing(connect(server, path, "worker-0")) as client:
        for _ in range(1000):
            client.send(b"x")
        received = 0
        while received < 1000:
            wait_for(server)  # would wait in vain if the poller were edge-triggered
            messages = server.receive()
            assert 0 < len(messages) <= 256
            received += len(messages)


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701])
def test_a_directory_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}, must be private"):
        LocalServer(str(directory / "s.sock"))


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("relative.sock", "must be absolute"),
        ("/tmp/" + "x" * 110, "at most 107 bytes"),
        ("/nowhere/at/all/s.sock", "no such directory"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused(path: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LocalServer(path)
    with pytest.raises(ConfigError, match=complaint):
        LocalClient(path, "worker-0")


def test_closing_removes_the_socket_and_can_be_repeated(path: str) -> None:
    server = LocalServer(path)
    server.close()
    server.close()
    client = LocalClient(path, "worker-0")
    client.close()
    client.close()


# ---- asyncio -------------------------------------------------------------------------------------


def test_the_asyncio_end_echoes_thousands_in_order(server: LocalServer, path: str) -> None:
    count = 3000

    async def echo() -> None:
        client = AsyncLocalClient(path, "frontend")
        assert client.send(b"here") is SendResult.SENT
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(count):
                assert client.send(await client.receive()) is SendResult.SENT
            assert await client.receive() == b"stop"
        client.close()

    async def play_scheduler() -> list[bytes]:
        loop = asyncio.get_running_loop()
        messages = await loop.run_in_executor(None, receive_count, server, 1)
        for index in range(count):
            assert server.send("frontend", b"%d" % index) is SendResult.SENT
        messages = await loop.run_in_executor(None, receive_count, server, count)
        server.send("frontend", b"stop")
        return [payload for _, payload in messages]

    async def both() -> list[bytes]:
        _, echoed = await asyncio.gather(echo(), play_scheduler())
        return echoed

    assert asyncio.run(both()) == [b"%d" % index for index in range(count)]


def test_a_send_between_two_receives_loses_no_wake_up(server: LocalServer, path: str) -> None:
    """A send lets ZMQ take note of what came, and silences the descriptor; the reader must still
    find it."""

    async def ping_pong() -> None:
        client = AsyncLocalClient(path, "frontend")
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            for round_index in range(200):
                waiting = asyncio.create_task(client.receive())
                await asyncio.sleep(0)  # the reader waits now
                client.send(b"ping")
                ((name, _),) = await loop.run_in_executor(None, receive_count, server, 1)
                server.send(name, b"pong %d" % round_index)
                assert await waiting == b"pong %d" % round_index
        client.close()

    asyncio.run(ping_pong())


def test_closing_wakes_the_reader(path: str) -> None:
    async def close_while_waiting() -> None:
        client = AsyncLocalClient(path, "frontend")
        waiting = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        client.close()
        client.close()
        with pytest.raises(ChannelClosed):
            await waiting
        with pytest.raises(ChannelClosed):
            await client.receive()
        with pytest.raises(ChannelClosed):
            client.send(b"x")

    asyncio.run(close_while_waiting())


def test_a_cancelled_receive_loses_no_message(server: LocalServer, path: str) -> None:
    async def cancel_then_receive() -> bytes:
        client = AsyncLocalClient(path, "frontend")
        client.send(b"here")
        await asyncio.get_running_loop().run_in_executor(None, receive_count, server, 1)
        waiting = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        server.send("frontend", b"kept")
        async with asyncio.timeout(PATIENCE_S):
            message = await client.receive()
        client.close()
        return message

    assert asyncio.run(cancel_then_receive()) == b"kept"


def test_a_flood_leaves_the_loop_its_turns(server: LocalServer, path: str) -> None:
    async def count_turns() -> int:
        client = AsyncLocalClient(path, "frontend")
        client.send(b"here")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, receive_count, server, 1)
        for _ in range(2000):
            server.send("frontend", b"x")
        server.send("frontend", b"last")
        turns = 0

        def take_turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(take_turn)

        take_turn()
        async with asyncio.timeout(PATIENCE_S):
            while await client.receive() != b"last":
                pass
        client.close()
        return turns

    assert asyncio.run(count_turns()) >= 2000 // 32
