"""The process around a scheduler core: sockets in, sockets out, and the time.

It decides nothing. One thread; the only blocking call is the poll. Before all workers are ready it
answers for the server that is not ready; then it makes the core and drives it to the end.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Callable
from typing import Protocol, assert_never

from common.channel.keys import load_own_curve
from common.channel.local import LocalServer
from common.channel.poller import Poller
from common.channel.sockets import SendResult
from common.clock import SystemClock
from common.config import ServerConfig
from common.errors import BatonError, ConfigError, ProtocolError
from common.exit_codes import EXIT_FAILED, EXIT_START_AGAIN, exit_code_of
from common.protocol.codec import (
    decode_frontend_to_scheduler,
    decode_worker_to_scheduler,
    encode,
)
from common.protocol.frontend import Drain, FrontendToScheduler, GetState, ServerInfo, State
from common.protocol.worker import SchedulerToWorker, Shutdown, WorkerReady, WorkerToScheduler
from common.runtime.frontend_link import LAST_MESSAGES_MS, FrontendLink
from common.runtime.gathered_facts import gather_facts
from common.runtime.peer_endpoint import PeerEnd, PeerEndpoint
from common.runtime.processes import ProcessWatch
from common.scheduling.events import (
    Dial,
    Effect,
    Event,
    FromFrontend,
    FromWorker,
    FrontendBehind,
    GiveUp,
    HangUp,
    LinkRefused,
    ProcessesGone,
    Report,
    Stopping,
    Tick,
    ToFrontend,
    ToPeer,
    ToWorkers,
    WatchProcesses,
    WorkersStopped,
)
from common.scheduling.facts import ServerFacts
from common.scheduling.log_rate_limiter import LogRateLimiter
from common.stopped import is_stopped

log = logging.getLogger(__name__)

# Effects of one round can cause events at once only through sockets, so a round is bounded by what
# the sockets held; this bounds how long the loop goes without looking at the time.
POLL_MAX_S = 0.5
PAUSE_MAX_S = 0.5  # peers wait for 0.8 s; a loaded machine takes some hundredths

# Refused connections that are remembered while the workers still load.
EARLY_REFUSALS_MAX = 64


class WorkerLost(BatonError):
    """A worker takes no messages: its server can't go on."""


class ServerSpent(BatonError):
    """This process can't go on, and a new one can."""


class Core(Protocol):
    """What the loop needs of a scheduler core."""

    request_token_max: int

    @property
    def is_idle(self) -> bool: ...

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def schedule(self, now: float) -> list[Effect]: ...

    def next_wakeup(self, now: float) -> float: ...


MakeCore = Callable[[ServerFacts, ServerConfig], Core]
OpenPeers = Callable[[ServerConfig], PeerEnd]


class SchedulerLoop:
    """Sockets and the core of one server."""

    def __init__(self, config: ServerConfig, make_core: MakeCore, open_peers: OpenPeers) -> None:
        """open_peers: listens or dials (`peer_ends.py`). Raises: ConfigError."""
        self._config = config
        self._make_core = make_core
        self._clock = SystemClock()
        remote_ranks = set(range(config.rank_count)) - set(config.local_ranks)
        self._local = LocalServer(
            config.scheduler_ipc_path,
            config.scheduler_address,
            [f"worker-{rank}" for rank in remote_ranks],
            load_own_curve(config.curve_secret_key_file),
        )
        self._frontend = FrontendLink(config.frontend_ipc_path)
        self._peers = PeerEndpoint(open_peers(config), self._warn_at_limited_rate)
        self._dropped_lines = LogRateLimiter()
        self._early_refusals: list[LinkRefused] = []
        self._poller = Poller()
        self._poller.register(self._local)
        self._poller.register(self._frontend.endpoint)
        self._poller.register(self._peers.links)
        self._watch = ProcessWatch()
        self._workers: dict[int, WorkerReady] = {}
        self._stopped_ranks: tuple[int, ...] = ()
        self._look_at_workers_at = 0.0
        self._worker_names = [f"worker-{rank}" for rank in range(config.rank_count)]
        self._core: Core | None = None
        self._info: ServerInfo | None = None
        self._is_frontend_known = False
        self._is_frontend_behind = False
        self._is_stopping = False
        self._stop_at = math.inf
        self.dropped_count = 0

    def run(self) -> None:
        """Until told to stop and idle, or the drain time is over."""
        signal.signal(signal.SIGTERM, self._handle_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while not self._is_finished():
            now = self._clock.now()
            timeout = POLL_MAX_S
            if self._core is not None:
                timeout = min(timeout, max(0.0, self._core.next_wakeup(now) - now))
            self._poller.wait_writable(self._frontend.endpoint, waits=self._frontend.has_unsent)
            ready = self._poller.poll(timeout)
            self._note_pause(self._clock.now() - now - timeout)
            self._receive_frontend()
            self._receive_local()
            self._receive_peers()
            self._look_at_processes([source for source in ready if isinstance(source, int)])
            self._look_at_workers()
            self._look_at_frontend()
            if self._core is not None:
                self._carry_out(self._core.schedule(self._clock.now()))
            # After all that was decided: workers have their next step before clients hear of this.
            self._frontend.flush()
        self._feed(Stopping())
        self._send_workers(Shutdown())

    def _note_pause(self, pause_s: float) -> None:
        """Peers may have given this server up meanwhile, and say so: here is why."""
        if pause_s > PAUSE_MAX_S:
            log.warning("this scheduler did not run for %.1f s: stopped, or without a CPU", pause_s)

    def close(self) -> None:
        self._peers.close(LAST_MESSAGES_MS)
        self._frontend.close()
        self._local.close(LAST_MESSAGES_MS)

    def _handle_signal(self, signum: int, frame: object) -> None:
        self._is_stopping = True
        self._limit_drain()

    def _limit_drain(self) -> None:
        """The time runs from the first word of it, the frontend's or the supervisor's."""
        if self._stop_at == math.inf:
            self._stop_at = self._clock.now() + self._config.drain_timeout_s

    def _is_finished(self) -> bool:
        if not self._is_stopping:
            return False
        is_idle = self._core is None or self._core.is_idle
        return is_idle or self._clock.now() >= self._stop_at

    # ---- what comes in ---------------------------------------------------------------------------

    def _receive_frontend(self) -> None:
        for payload in self._frontend.receive():
            try:
                self._handle_frontend(decode_frontend_to_scheduler(payload))
            except ProtocolError as error:
                self._drop_local("the frontend", error)

    def _receive_local(self) -> None:
        for name, payload in self._local.receive():
            try:
                if name in self._worker_names:
                    self._handle_worker(decode_worker_to_scheduler(payload))
                else:
                    self.dropped_count += 1
            except ProtocolError as error:
                self._drop_local(repr(name), error)

        for who in self._local.take_refusals():
            self._warn_at_limited_rate(f"refused a worker: it has another {who}")

    def _drop_local(self, sender: str, error: ProtocolError) -> None:
        self._warn_at_limited_rate(f"dropped a message of {sender}: {error}")
        self.dropped_count += 1

    def _handle_worker(self, message: WorkerToScheduler) -> None:
        if isinstance(message, WorkerReady):
            self._note_worker(message)
        else:
            self._feed(FromWorker(message))

    def _handle_frontend(self, message: FrontendToScheduler) -> None:
        if not self._is_frontend_known:
            self._is_frontend_known = True
            self._tell_info()
        if isinstance(message, Drain):
            self._limit_drain()
        if self._core is not None:
            self._feed(FromFrontend(message))
        elif isinstance(message, GetState):
            self._frontend.add(State(message.call_id, False, {}, {}, [], []))

    def _receive_peers(self) -> None:
        events = self._peers.receive()
        if self._core is None:
            self._early_refusals += [e for e in events if isinstance(e, LinkRefused)]
            del self._early_refusals[EARLY_REFUSALS_MAX:]
            return
        refusals, self._early_refusals = self._early_refusals, []
        for event in (*refusals, *events):
            self._feed(event)

    def _warn_at_limited_rate(self, text: str) -> None:
        """Of what comes in from others, who may send as much as they like."""
        line = self._dropped_lines.admit(text, self._clock.now())
        if line:
            log.warning("%s", line)

    def _look_at_processes(self, readable: list[int]) -> None:
        gone, finished = self._watch.take_gone(readable)
        for fd in finished:
            self._poller.unregister(fd)
        self._watch.close(finished)
        for key in gone:
            self._feed(ProcessesGone(key))

    def _look_at_workers(self) -> None:
        """Stopped ones can't say so themselves. Those of other machines are known by silence."""
        now = self._clock.now()
        if self._core is None or now < self._look_at_workers_at:
            return
        self._look_at_workers_at = now + self._config.heartbeat_interval_s
        ranks = tuple(r for r in self._config.local_ranks if is_stopped(self._workers[r].pid))
        if ranks != self._stopped_ranks:
            self._stopped_ranks = ranks
            self._feed(WorkersStopped(ranks))

    def _look_at_frontend(self) -> None:
        """One that reads nothing for long holds steps back, and nothing else."""
        if self._frontend.has_unsent:
            self._frontend.flush()
        is_behind = self._frontend.is_behind
        if is_behind == self._is_frontend_behind:
            return
        self._is_frontend_behind = is_behind
        if is_behind:
            self._warn_at_limited_rate("the frontend does not read its messages: steps wait for it")
        self._feed(FrontendBehind(is_behind))

    def _feed(self, event: Event) -> None:
        if self._core is not None:
            self._carry_out(self._core.handle(event, self._clock.now()))

    def _feed_if_any(self, event: Event | None) -> None:
        if event is not None:
            self._feed(event)

    # ---- start -----------------------------------------------------------------------------------

    def _note_worker(self, ready: WorkerReady) -> None:
        self._workers[ready.rank] = ready
        if self._core is not None or len(self._workers) < self._config.rank_count:
            return
        facts = gather_facts(self._config, self._workers)
        self._core = self._make_core(facts, self._config)
        first = self._workers[0]
        running_max = facts.running_max(self._config.max_running_requests)
        self._info = ServerInfo(
            token_capacity=self._core.request_token_max,
            request_token_max=self._core.request_token_max,
            running_max=running_max,
            vocab_size=first.vocab_size,
            eos_token_ids=first.eos_token_ids,
            fingerprint=first.fingerprint,
            workers=[worker.describe for _, worker in sorted(self._workers.items())],
            incarnation=facts.incarnation,
            pid=os.getpid(),
        )
        self._tell_info()
        self._feed(Tick())
        log.info(
            "all %d workers are ready: incarnation %s, %s pages, %d requests at a time%s",
            len(self._workers),
            facts.incarnation,
            list(facts.page_counts),
            running_max,
            self._why_running_max(facts),
        )

    def _why_running_max(self, facts: ServerFacts) -> str:
        if self._config.max_running_requests is not None or facts.state_count is None:
            return ""
        return ", as many as there are slots"

    def _tell_info(self) -> None:
        if self._info is not None and self._is_frontend_known:
            self._frontend.add(self._info)

    # ---- what goes out ---------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToFrontend(message=message):
                    self._frontend.add(message)
                case ToWorkers(message=worker_message):
                    self._send_workers(worker_message)
                case ToPeer(link=link, message=peer_message):
                    self._feed_if_any(self._peers.send(link, peer_message))
                case Dial(link=link):
                    self._feed_if_any(self._peers.dial(link))
                case HangUp(link=link):
                    self._peers.hang_up(link)
                case WatchProcesses(incarnation=incarnation, pids=pids):
                    for fd in self._watch.watch(incarnation, pids):
                        self._poller.register(fd)
                case GiveUp(reason=reason):
                    raise ServerSpent(reason)
                case Report(text=text, is_warning=is_warning):
                    log.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
                case _:
                    assert_never(effect)

    def _send_workers(self, message: SchedulerToWorker) -> None:
        payload = encode(message)
        for name in self._worker_names:
            if self._local.send(name, payload) is not SendResult.SENT and not self._is_stopping:
                raise WorkerLost(f"{name} is gone or reads nothing")


def run(config: ServerConfig, make_core: MakeCore, open_peers: OpenPeers) -> int:
    """The scheduler process. Returns its exit code, after a log line for what ended it."""
    try:
        loop = SchedulerLoop(config, make_core, open_peers)
    except ConfigError as error:
        log.error("%s", error)
        return exit_code_of(error)
    log.debug("scheduler process %d", os.getpid())
    try:
        loop.run()
    except WorkerLost as error:
        log.error("%s: the server stops", error)
        return EXIT_FAILED
    except ServerSpent as error:
        log.error("%s: the server ends, to be started again", error)
        return EXIT_START_AGAIN
    finally:
        loop.close()
    return 0
