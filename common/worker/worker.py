"""A worker: one rank's engine on the main thread, its sockets and transfers on another.

    scheduler --Step-----> I/O thread --steps---> engine thread
    scheduler <-StepDone-- I/O thread <-outbox--- engine thread, on CUDA through a notifier thread

A fourth thread computes digests of transferred caches, where transfers are verified. A fifth copies
pages to the tier in host memory and back, where there is one. A sixth loads other weights.

The engine thread only computes; transfers progress and settle while a forward pass runs. Every
failure here that no peer has caused ends the process with one line in the log.

On CUDA peers, staging, digests and the tier touch the pool beside the stream that computes. No
event orders them; the host does:
- A scheduler may send a step that reads transferred or loaded pages only after a message from here.
  It is sent when every put and every copy has returned and every staged byte is scattered.
- Pages that a step writes leave, are digested, or are spilled, after the host has seen the step
  computed. They get another owner after its `StepDone`.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from queue import SimpleQueue

from common.channel.keys import load_own_curve
from common.channel.local import LocalClient
from common.clock import SystemClock
from common.config import ServerConfig
from common.engine.model_runner import OnLayer
from common.errors import ConfigError
from common.exit_codes import EXIT_FAILED, exit_code_of
from common.worker.completion_notifiers import start_notifier
from common.worker.device_thread import DeviceThread, JobThread
from common.worker.io_loop import EngineOutbox, IoLoop, Progress, Steps
from common.worker.last_resort import end_process_after
from common.worker.peer_links import PeerLinks
from common.worker.sends import Computed, Sends
from common.worker.staging.io import StagingIo
from common.worker.start import StartedRank, start_rank
from common.worker.succession import ForgetSequences, SequencesForgotten, Succession

log = logging.getLogger(__name__)

ENGINE_PATIENCE_S = 10.0
"""How long an engine may go on after another thread has failed. Most steps end in less."""

LOAD_PATIENCE_S = 0.5
"""How long a worker that ends waits for a load of weights, which may take minutes."""

SWITCH_INTERVAL_S = 0.0005
"""How long the engine thread may keep the interpreter from the I/O thread. The default, 5 ms, is as
long as a step of a small model; the forward pass itself runs without the interpreter lock."""


def run_worker(config: ServerConfig, rank: int) -> int:
    """Run a worker process to its end; returns its exit code: 0 after a Shutdown or SIGTERM."""
    clock = SystemClock()
    started_at = clock.now()
    try:
        started = start_rank(config, rank, clock)
        address = config.scheduler_address if config.node_rank > 0 else ""
        curve = load_own_curve(config.curve_secret_key_file) if address else None
        client = LocalClient(config.scheduler_ipc_path, f"worker-{rank}", address, curve)
    except ConfigError as error:
        log.error("%s", error)
        return exit_code_of(error)
    except Exception:
        log.error("worker %d can't start", rank, exc_info=True)
        return EXIT_FAILED
    log.info(
        "rank %d is ready after %.1f s: %s, %s, %s; weights: %s",
        rank,
        clock.now() - started_at,
        started.ready.describe["device"],
        started.ready.describe["attention"],
        started.ready.describe["pages"],
        started.ready.describe["weights"],
    )
    # Model and pools stay for good: the collector must not traverse them while a step waits.
    gc.collect()
    gc.freeze()
    return _Worker(started, client, config.heartbeat_interval_s).run()


class _Worker:
    """The threads of a worker and their queues."""

    def __init__(self, started: StartedRank, client: LocalClient, beat_interval_s: float) -> None:
        self._device = started.device
        self._runner = started.runner
        self._transport = started.transport
        self._client = client
        self._steps: Steps = SimpleQueue()
        self._outbox = EngineOutbox()
        self._progress = Progress()
        self._notifier = start_notifier(
            started.device, self._outbox, self._progress, self._fail_thread
        )
        self._has_thread_failed = False
        # One rank reports for all. No token is drawn before every rank has written its share of the
        # cache: each layer's sum waits for all ranks of its stage, each stage for the one before.
        layout = started.layout
        last_stage = len(layout.server.stages) - 1
        self._is_reporter = (layout.pp_rank, layout.tp_rank) == (last_stage, 0)
        # Last layer of each layer group -> layer groups that are complete with it, and its layers.
        self._last_layers = {
            layers[-1]: (index + 1, len(layers)) for index, layers in enumerate(layout.layer_groups)
        }
        links = PeerLinks(started.transport, layout, started.staging_target, started.staging_source)
        sends = Sends(started.transport, links, layout, started.page_counts, started.staging_source)
        self._staged = StagingIo(
            sends, links, started.staging_target, started.staging_source, SystemClock()
        )
        self._digests = JobThread(
            "digest", self._device, started.digester.run, self._outbox.put, self._fail_thread
        )
        self._moves = JobThread(
            "host page", self._device, started.host_pages.run, self._outbox.put, self._fail_thread
        )
        self._weights = started.weights
        self._loads = JobThread(
            "weights", self._device, started.weights.run, self._outbox.put, self._fail_thread
        )
        self._loop = IoLoop(
            client,
            started.transport,
            links,
            sends,
            self._steps,
            self._outbox,
            self._digests.jobs,
            self._moves.jobs,
            self._weights,
            self._loads.jobs,
            Succession(links, sends, started.ready, self._steps.put),
            self._staged,
            progress=self._progress,
            beat_interval_s=beat_interval_s,
        )
        self._outbox.put(started.ready)

    def run(self) -> int:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        signal.signal(signal.SIGTERM, lambda *_: self._steps.put(None))
        # A Ctrl-C reaches the whole process group; the supervisor handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        io_thread = DeviceThread("I/O", self._device, self._loop.run, self._fail_thread)
        io_thread.start()
        self._digests.start()
        self._moves.start()
        self._loads.start()
        self._notifier.start()
        code = 0
        try:
            self._compute()
        except Exception:
            log.error("the engine failed", exc_info=True)
            code = EXIT_FAILED
        self._notifier.end()
        self._digests.end()
        self._moves.end()
        self._loads.end(LOAD_PATIENCE_S)
        self._outbox.end()
        io_thread.join()
        self._client.close()
        self._staged.close()
        self._transport.close()
        self._outbox.close()
        return EXIT_FAILED if self._has_thread_failed else code

    def _compute(self) -> None:
        """The engine thread, until Shutdown. The notifier still reports all launched steps.

        On CUDA a step is launched as soon as the scheduler sends it, while the one before it runs.
        """
        if self._device.type == "cpu":
            self._progress.follow_cpu()
        while (step := self._steps.get()) is not None:
            if isinstance(step, ForgetSequences):
                self._runner.forget_all()
                ready = self._weights.use(step.load_id)
                self._notifier.notify(0, SequencesForgotten(ready))
                continue
            # No transfer waits for a step without chunks.
            on_layer = self._layer_notifier(step.step_id) if step.chunks else None
            pending = self._runner.launch(step, on_layer)
            computed = Computed(step.step_id, len(self._last_layers))
            if self._is_reporter:
                self._notifier.notify(1, computed, pending)
            else:
                self._notifier.notify(1, computed)

    def _layer_notifier(self, step_id: int) -> OnLayer:
        """The model's callback after each layer. It reports each finished layer group."""

        def on_layer(layer: int) -> None:
            group = self._last_layers.get(layer)
            if group is not None:
                group_count, layer_count = group
                self._notifier.notify(layer_count, Computed(step_id, group_count))

        return on_layer

    def _fail_thread(self) -> None:
        self._has_thread_failed = True
        self._steps.put(None)
        end_process_after(ENGINE_PATIENCE_S, EXIT_FAILED)
