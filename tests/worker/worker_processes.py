"""Real worker processes, and the scheduler's end of their channel as a test drives it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from common.channel.local import LocalServer
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.clock import SystemClock
from common.config import Role, ServerConfig, write_config
from common.protocol.codec import decode_worker_to_scheduler, encode
from common.protocol.worker import (
    CloseTransfer,
    NewSequence,
    OpenTransfer,
    PageGrant,
    PrefillChunk,
    SchedulerToWorker,
    Shutdown,
    Step,
    StepDone,
    WorkerReady,
    WorkerToScheduler,
)
from common.request import SamplingParams
from tests.worker.whole_send import WholeSend

# A worker imports torch and UCX, which takes seconds on a busy machine with two cores.
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0

Message = TypeVar("Message", bound=WorkerToScheduler)


class WorkerProcesses:
    """All ranks of one server, started as the supervisor would, and a socket instead of it."""

    def __init__(
        self,
        checkpoint: Path,
        role: Role,
        environments: Mapping[int, Mapping[str, str]] | None = None,
        **changes: object,
    ) -> None:
        """environments: what single ranks find in theirs beside the test's own."""
        self._environments = environments or {}
        # Not under pytest's directory, whose path is too long for a Unix socket.
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="baton-test-"))
        values: dict[str, object] = {
            "model_path": str(checkpoint),
            "tokenizer_path": str(checkpoint),
            "served_model_name": "tiny",
            "port": 1,
            "page_size": 8,
            "max_total_tokens": 1024,
            "dtype": "float32",
            "log_level": "warning",
            "runtime_dir": str(self._runtime_dir),
            **changes,
        }
        self.config = ServerConfig(role=role, **values)  # type: ignore[arg-type]
        write_config(self.config)
        self._server = LocalServer(self.config.scheduler_ipc_path)
        self._poller = Poller()
        self._poller.register(self._server)
        self._clock = SystemClock()
        self._waiting: list[WorkerToScheduler] = []
        self._next_step_id = 1
        self._started: list[int] = []
        self._opened: dict[int, OpenTransfer] = {}
        self.log_path = self._runtime_dir / "log"
        self.processes = [self._start(rank) for rank in range(self.config.rank_count)]
        self.ready: list[WorkerReady] = []

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "common.worker", "--config", self.config.config_path]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environments.get(rank, {})},
            )

    @property
    def log(self) -> str:
        """Without what is said because tiny checkpoints have no tokenizer."""
        lines = self.log_path.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if "grammars can't be followed" not in line)

    def wait_ready(self) -> list[WorkerReady]:
        """The announcement of every rank, in rank order."""
        ready = [self.expect(WorkerReady, START_TIMEOUT_S) for _ in self.processes]
        self.ready = sorted(ready, key=lambda message: message.rank)
        return self.ready

    def send(self, message: SchedulerToWorker) -> None:
        payload = encode(message)
        for rank in range(len(self.processes)):
            assert self._server.send(f"worker-{rank}", payload) is SendResult.SENT

    def request_send(self, whole: WholeSend) -> None:
        """Begin a Send; the first one with these pages opens its transfer."""
        known = self._opened.get(whole.transfer_id)
        if known != whole.opening:
            if known is not None:
                self.send(CloseTransfer(whole.transfer_id))
            self._opened[whole.transfer_id] = whole.opening
            self.send(whole.opening)
        self.send(whole.send)

    def tell_bytes(self, payload: bytes) -> None:
        assert self._server.send("worker-0", payload) is SendResult.SENT

    def expect(self, kind: type[Message], timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
        """The next message of a kind; what comes before it stays to be expected."""
        index, message = self._find(kind, timeout_s)
        del self._waiting[index]
        return message

    def expect_after(self, kind: type[Message]) -> tuple[Message, list[WorkerToScheduler]]:
        """The next message of a kind, and all that came before it."""
        index, message = self._find(kind, ANSWER_TIMEOUT_S)
        earlier, self._waiting = self._waiting[:index], self._waiting[index + 1 :]
        return message, earlier

    def has_waiting(self, kind: type[WorkerToScheduler]) -> bool:
        """Whether a message of a kind has come and was not expected yet."""
        return any(isinstance(message, kind) for message in self._waiting)

    def forget_answers(self) -> None:
        """What was sent and has come is of an earlier scheduler."""
        self._waiting.clear()
        self._started.clear()
        self._opened.clear()

    def _find(self, kind: type[Message], timeout_s: float) -> tuple[int, Message]:
        end_at = self._clock.now() + timeout_s
        while True:
            for index, message in enumerate(self._waiting):
                if isinstance(message, kind):
                    return index, message
            for process in self.processes:
                assert process.poll() is None, f"worker ended: {self.log}"
            left = end_at - self._clock.now()
            assert left > 0, f"no {kind.__name__} in {timeout_s} s: {self.log}"
            self._poller.poll(min(left, 0.5))
            for _, payload in self._server.receive():
                self._waiting.append(decode_worker_to_scheduler(payload))

    def step(
        self,
        *,
        new: list[NewSequence] | None = None,
        grants: list[PageGrant] | None = None,
        chunks: list[PrefillChunk] | None = None,
        decode: list[int] | None = None,
        retired: list[int] | None = None,
    ) -> StepDone:
        """Run one step on all ranks; one of them answers for all."""
        self.start_step(new=new, grants=grants, chunks=chunks, decode=decode, retired=retired)
        return self.finish_step()

    def start_step(
        self,
        *,
        new: list[NewSequence] | None = None,
        grants: list[PageGrant] | None = None,
        chunks: list[PrefillChunk] | None = None,
        decode: list[int] | None = None,
        retired: list[int] | None = None,
    ) -> None:
        """Send one step; others may be under way."""
        step_id = self._next_step_id
        self._next_step_id += 1
        self._started.append(step_id)
        self.send(Step(step_id, new or [], grants or [], chunks or [], decode or [], retired or []))

    def finish_step(self) -> StepDone:
        """The answer to the first step that was started and not finished."""
        answer = self.expect(StepDone)
        assert answer.step_id == self._started.pop(0)
        return answer

    def generate(
        self, request_id: int, prompt: list[int], sampling: SamplingParams, pages: list[int]
    ) -> list[int]:
        """Compute a prompt and its output on this server alone, and forget it."""
        count = len(prompt)
        done = self.step(
            new=[NewSequence(request_id, prompt, count, sampling)],
            grants=[PageGrant(request_id, 0, 0, pages)],
            chunks=[PrefillChunk(request_id, 0, count, is_last=True)],
        )
        tokens = done.token_ids
        for _ in range(sampling.max_new_tokens - 1):
            tokens += self.step(decode=[request_id]).token_ids
        self.step(retired=[request_id])
        return tokens

    def shut_down(self) -> list[int]:
        """Exit codes after a Shutdown."""
        self.send(Shutdown())
        return [process.wait(ANSWER_TIMEOUT_S) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._server.close()
        shutil.rmtree(self._runtime_dir, ignore_errors=True)

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
