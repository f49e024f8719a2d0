"""A second real process that owns a transport and does what a test tells it over a pipe."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from common.planner.copy_plan import CopyPlan
from common.transport.auto import AutoTransport
from common.transport.connections import Connections
from common.transport.stream import StreamSettings, StreamTransport
from common.transport.transport import (
    ConnectionClosed,
    ConnectionFailed,
    ConnectionMade,
    TargetDescriptor,
    TransferSettled,
    Transport,
    TransportEvent,
)
from common.transport.ucx import UcxSettings, UcxTransport

EVENT_PATIENCE_S = 20.0
CLOSE_PATIENCE_S = 1.0
REKEY_NBYTES = 1 << 20
"""So small that every test renews keys."""
LastEvent = ConnectionFailed | ConnectionClosed


class EventTimeout(AssertionError):
    """An event that the contract promises did not come."""


def open_transport(tls: str, cuda_device: int | None = None) -> Transport:
    """tls: the UCX transports, or "stream" or "stream-tls" for streams of our own, or "auto"."""
    streams = StreamSettings(
        is_encrypted=tls == "stream-tls",
        connection_count=2,
        keepalive_s=1.0,
        rekey_nbytes=REKEY_NBYTES,
    )
    if tls.startswith("stream"):
        return StreamTransport(streams)
    settings = UcxSettings(
        tls=tls,
        keepalive_s=1.0,
        close_patience_s=CLOSE_PATIENCE_S,
        cuda_device=cuda_device,
    )
    if tls != "auto":
        return UcxTransport(settings)
    shared = Connections()
    return AutoTransport(UcxTransport(settings, shared), StreamTransport(streams, shared))


class Writer:
    """A transport, and its events kept until a test asks for them."""

    def __init__(self, tls: str, cuda_device: int | None = None) -> None:
        """tls: as of `open_transport`."""
        self.transport = open_transport(tls, cuda_device)
        self.events: list[TransportEvent] = []

    def wait_for(self, is_wanted: Callable[[TransportEvent], bool]) -> TransportEvent:
        """The first event that `is_wanted`, removed from the kept ones."""
        while True:
            for index, event in enumerate(self.events):
                if is_wanted(event):
                    return self.events.pop(index)
            if not self.transport.wait(EVENT_PATIENCE_S):
                raise EventTimeout(f"kept meanwhile: {self.events}")
            self.events += self.transport.poll()

    def connect(self, peer: str, descriptor: TargetDescriptor) -> ConnectionMade | ConnectionFailed:
        self.transport.connect(peer, descriptor)
        event = self.wait_for(
            lambda event: (
                isinstance(event, ConnectionMade | ConnectionFailed) and event.peer == peer
            )
        )
        assert isinstance(event, ConnectionMade | ConnectionFailed)
        return event

    def settle(self, tag: int) -> TransferSettled:
        event = self.wait_for(lambda event: isinstance(event, TransferSettled) and event.tag == tag)
        assert isinstance(event, TransferSettled)
        return event

    def copy(self, peer: str, plan: CopyPlan, tag: int) -> TransferSettled:
        self.transport.submit(peer, plan, tag)
        return self.settle(tag)

    def last_event(self, peer: str) -> LastEvent:
        event = self.wait_for(lambda event: isinstance(event, LastEvent) and event.peer == peer)
        assert isinstance(event, LastEvent)
        return event

    def disconnect(self, peer: str) -> LastEvent:
        self.transport.disconnect(peer)
        return self.last_event(peer)


class Servant:
    """The child's side: each public method is a command."""

    def __init__(self, tls: str, cuda_device: int | None, gate: Connection) -> None:
        self._writer = Writer(tls, cuda_device)
        self._transport = self._writer.transport
        self._gate = gate
        self._views: dict[str, np.ndarray] = {}
        self._kept: list[np.ndarray] = []

    def allocate(self, name: str, nbytes: int) -> None:
        view = self._transport.allocate(name, nbytes).view
        assert view is not None
        self._views[name] = view

    def register(self, name: str, nbytes: int) -> None:
        memory = np.zeros(nbytes, dtype=np.uint8)
        self._transport.register(name, memory.ctypes.data, nbytes, "host")
        self._views[name] = memory

    def register_cuda(self, name: str, nbytes: int) -> None:
        """Memory of a device that this process can read and write itself, as a stub's."""
        driver = ctypes.CDLL("libcuda.so.1")
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        for result in (
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            driver.cuCtxSetCurrent(context),
            driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)),
        ):
            assert result == 0, f"CUDA driver error {result}"
        self._transport.register(name, address.value, nbytes, "cuda")
        memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
        self._views[name] = np.frombuffer(memory, dtype=np.uint8)

    def address(self, name: str) -> int:
        return self._views[name].ctypes.data

    def fill(self, name: str, value: int) -> None:
        self._views[name][:] = value

    def read(self, name: str) -> bytes:
        return self._views[name].tobytes()

    def open_target(self, peer: str, regions: list[str] | None = None) -> TargetDescriptor:
        return self._transport.open_target(peer, regions)

    def close_target(self, peer: str) -> None:
        self._transport.close_target(peer)

    def connect(self, peer: str, descriptor: TargetDescriptor) -> ConnectionMade | ConnectionFailed:
        return self._writer.connect(peer, descriptor)

    def disconnect(self, peer: str) -> LastEvent:
        return self._writer.disconnect(peer)

    def last_event(self, peer: str) -> LastEvent:
        return self._writer.last_event(peer)

    def start_disconnecting(self, peer: str) -> None:
        self._transport.disconnect(peer)

    def events(self, timeout_s: float) -> list[TransportEvent]:
        """What has happened and was not asked for yet; waits for something."""
        if not self._writer.events:
            self._transport.wait(timeout_s)
        self._writer.events += self._transport.poll()
        events, self._writer.events = self._writer.events, []
        return events

    def submit(self, peer: str, plan: CopyPlan, tag: int) -> None:
        self._transport.submit(peer, plan, tag)

    def settle(self, tag: int) -> TransferSettled:
        return self._writer.settle(tag)

    def hold_gil(self) -> None:
        """Keeps the interpreter lock, as PyDLL calls do, until the test opens the gate."""
        ctypes.PyDLL(None).read(self._gate.fileno(), ctypes.create_string_buffer(1), 1)

    def spin(self) -> int:
        """Runs Python code until the test opens the gate."""
        turns = 0
        while not (turns % 100_000 == 0 and self._gate.poll()):
            turns += 1
        os.read(self._gate.fileno(), 1)
        return turns

    def close(self) -> None:
        self._views.clear()
        self._transport.close()


def serve(tls: str, cuda_device: int | None, pipe: Connection, gate: Connection) -> None:
    servant = Servant(tls, cuda_device, gate)
    pipe.send(None)
    while True:
        name, arguments = pipe.recv()
        if name == "exit":
            return
        try:
            pipe.send((getattr(servant, name)(*arguments), None))
        except Exception as exc:  # noqa: BLE001 - the test sees it
            pipe.send((None, f"{type(exc).__name__}: {exc}"))


@contextmanager
def changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """What a process that is started meanwhile finds."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Remote:
    """The test's side of a servant."""

    def __init__(
        self,
        tls: str,
        cuda_device: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._gate, gate = context.Pipe()
        arguments = (tls, cuda_device, pipe, gate)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        with changed_environment(environment or {}):
            self._process.start()
        pipe.close()
        gate.close()
        self._pipe.recv()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def call(self, name: str, *arguments: object) -> object:
        self.post(name, *arguments)
        return self.reply()

    def post(self, name: str, *arguments: object) -> None:
        self._pipe.send((name, arguments))

    def reply(self) -> object:
        result, error = self.reply_or_failure()
        assert error is None, error
        return result

    def reply_or_failure(self) -> tuple[object, str | None]:
        assert self._pipe.poll(EVENT_PATIENCE_S), "the servant does not answer"
        result, error = self._pipe.recv()
        return result, error

    def failure_of(self, name: str, *arguments: object) -> str:
        """The error that a call ends with."""
        self.post(name, *arguments)
        result, error = self.reply_or_failure()
        assert isinstance(error, str), result
        return error

    def has_replied(self) -> bool:
        return self._pipe.poll(0)

    def open_gate(self) -> None:
        os.write(self._gate.fileno(), b"x")

    def open_target(self, peer: str, regions: list[str] | None = None) -> TargetDescriptor:
        descriptor = self.call("open_target", peer, regions)
        assert isinstance(descriptor, TargetDescriptor)
        return descriptor

    def read(self, name: str) -> np.ndarray:
        content = self.call("read", name)
        assert isinstance(content, bytes)
        return np.frombuffer(content, dtype=np.uint8)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def exit(self) -> None:
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
            self.post("exit")
            self._process.join(EVENT_PATIENCE_S)
        if self._process.is_alive():
            self.kill()
