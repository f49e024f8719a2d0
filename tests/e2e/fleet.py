"""Real servers for the end-to-end tests: started with any flags, killed, started again, asked.

Built on the demo's servers. Waiting is polling with a limit; no test sleeps on its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import msgspec

from common.stopped import is_stopped
from demo.servers import Server, free_ports, start_server, stop_servers, wait_ready
from tests.e2e.replies import ErrorReply, Info, Peer, Reply

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"
# A start imports torch four times over on two cores that others use too.
WAIT_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0
POLL_INTERVAL_S = 0.02
# Pools this small are warmed in no time.
COMMON_FLAGS = (
    *("--device", "cpu", "--cpu-threads", "1"),
    *("--max-total-tokens", "8192", "--drain-timeout", "2"),
)
CLIENT_COUNT_MAX = 32

Body = dict[str, object]


def wait_until(what: str, is_so: Callable[[], bool], timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Poll until `is_so`. Fails the test, naming `what`, if it never is."""
    end_at = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_at, f"waited {timeout_s:.0f} s for: {what}"
        time.sleep(POLL_INTERVAL_S)


class Node:
    """One server of a fleet; the same node can be started again on its ports after it has ended.

    host: where it listens. prefix: as of `start_server`. Both may be changed before a start.
    key: that its clients show, unless they say another one; "" for none.
    """

    def __init__(
        self,
        role: str,
        args: Sequence[str],
        model_path: Path,
        log_dir: Path,
        name: str,
        client: httpx.Client,
    ) -> None:
        self.name = name
        self.port, self.bootstrap_port = free_ports(2)
        self.host = "127.0.0.1"
        self.prefix: Sequence[str] = ()
        self._role = role
        self._args = [*COMMON_FLAGS, *args]
        self._model_path = model_path
        self._log_dir = log_dir
        self._client = client
        self._start_count = 0
        self.key = ""
        self.server: Server

    # ---- life ------------------------------------------------------------------------------------

    def add_flags(self, *flags: str) -> None:
        """For the next start."""
        self._args += flags

    def start(self) -> Node:
        self._start_count += 1
        listens = ["--host", self.host]
        if self._role == "prefill" or "--enable-role-switch" in self._args:
            listens += ["--bootstrap-port", str(self.bootstrap_port)]
        self.server = start_server(
            self._role,
            self.port,
            *self._args,
            *listens,
            model_path=self._model_path,
            log_dir=self._log_dir,
            name=f"{self.name}-{self._start_count}",
            prefix=self.prefix,
        )
        self.server.url = f"http://{self.host}:{self.port}"
        return self

    def wait_ready(self) -> Node:
        wait_ready(self.server, lambda _: None)
        return self

    def kill(self) -> None:
        """As an out-of-memory kill would: no farewell to anybody."""
        pids = self.process_ids()
        self.server.process.kill()
        self.server.process.wait()
        wait_until(f"{self.name} to be gone", lambda: not any(map(is_alive, pids)))

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.server.process.send_signal(signal.SIGTERM)
        return self.server.process.wait(WAIT_TIMEOUT_S)

    def process_ids(self) -> list[int]:
        """The supervisor and all of its children."""
        return [self.server.process.pid, *self._children().values()]

    def process_id_of(self, module: str) -> int:
        """The child that runs a module, e.g. common.worker; the end of its name will do."""
        (found,) = [pid for name, pid in self._children().items() if name.endswith(module)]
        return found

    def _children(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pid in children_of(self.server.process.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if len(words) > 2:  # else it has ended
                found[words[2]] = pid  # python -m MODULE ...
        return found

    @contextmanager
    def frozen(self, module: str) -> Iterator[None]:
        """Stop a child with SIGSTOP for a while, as a debugger or a swapping host does."""
        pid = self.process_id_of(module)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(f"{module} to be stopped", lambda: is_stopped(pid))  # kill does not wait
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @property
    def log(self) -> str:
        return self.server.log_path.read_text(errors="replace")

    @property
    def bootstrap(self) -> str:
        """What a decode server's --prefill says to find this one."""
        return f"{self.host}:{self.bootstrap_port}"

    # ---- asking ----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.server.url

    def get(self, path: str) -> httpx.Response:
        return self._client.get(self.url + path, headers=_bearing(self.key))

    def post(self, path: str, body: Body, key: str = "") -> httpx.Response:
        """key: that the client shows, if not the node's."""
        headers = _bearing(key or self.key)
        return self._client.post(self.url + path, json=body, headers=headers)

    def delete(self, path: str, params: dict[str, str]) -> httpx.Response:
        return self._client.delete(self.url + path, params=params)

    def try_post(self, path: str, body: Body) -> httpx.Response | None:
        """None if nobody listens, or whoever did has gone."""
        try:
            return self.post(path, body)
        except httpx.TransportError:
            return None

    def generate(self, body: Body) -> Reply:
        return msgspec.json.decode(self._generate(body).content, type=Reply)

    def generate_list(self, body: Body) -> list[Reply]:
        return msgspec.json.decode(self._generate(body).content, type=list[Reply])

    def _generate(self, body: Body) -> httpx.Response:
        response = self.post("/generate", body)
        assert response.status_code == 200, f"{self.name}: {response.text}"
        return response

    def refused(self, path: str, body: Body, status: int) -> str:
        """Post what must end in an error of `status`; its message."""
        response = self.post(path, body)
        assert response.status_code == status, f"{self.name}: {response.text}"
        return error_message(response)

    @contextmanager
    def stream(self, body: Body) -> Iterator[Iterator[Reply]]:
        """Events of a streamed /generate; leaving the block early is a disconnect."""
        with self._client.stream(
            "POST",
            f"{self.url}/generate",
            json=body | {"stream": True},
            headers=_bearing(self.key),
        ) as response:
            assert response.status_code == 200, response.read()
            yield _events(response)

    def info(self) -> Info:
        return msgspec.json.decode(self.get("/server_info").content, type=Info)

    @property
    def role(self) -> str:
        """Of the server that answers, "" while none does."""
        try:
            return str(self.get("/server_info").json().get("disaggregation_mode", ""))
        except (httpx.TransportError, ValueError):
            return ""

    def switch(self, role: str) -> None:
        """Returns when it is a server of that role."""
        reply = self.post("/switch_role", {"role": role})
        assert reply.status_code == 200 and reply.json()["role"] == role, reply.text
        wait_until(f"{self.name} to be a {role} server", lambda: self.role == role)

    def peers(self) -> list[Peer]:
        """Its peers; none while this server starts, of which its frontend hears last."""
        if "workers are ready" not in self.log:
            return []
        response = self.get("/server_info")
        if response.status_code == 503:
            return []
        return msgspec.json.decode(response.content, type=Info).peers

    def refusals(self) -> list[Peer]:
        """Peers that were refused, or refused us; none while this server starts."""
        return [peer for peer in self.peers() if peer.state == "refused"]

    def wait_refused(self) -> None:
        wait_until(f"{self.name} to be refused", lambda: self.refusals() != [])

    def has_queued(self, queue: str, count: int = 1) -> bool:
        return self.info().queues.get(queue, 0) >= count

    def wait_queued(self, queue: str, count: int = 1) -> None:
        wait_until(f"{count} in {self.name}'s {queue}", lambda: self.has_queued(queue, count))

    def wait_counted(self, counter: str, count: float) -> None:
        """Until a counter has come so far."""
        wait_until(
            f"{count:g} {counter} on {self.name}",
            lambda: self.info().counters[counter] >= count,
        )

    def wait_at_rest(self) -> None:
        """Until nothing is under way and every page is free again."""
        try:
            wait_until(f"{self.name} to be at rest", lambda: self.info().is_at_rest, 60.0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.info()}") from error


def _bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _events(response: httpx.Response) -> Iterator[Reply]:
    for line in response.iter_lines():
        payload = line.removeprefix("data: ")
        if payload and payload != "[DONE]":
            yield msgspec.json.decode(payload, type=Reply)


def error_message(response: httpx.Response) -> str:
    return msgspec.json.decode(response.content, type=ErrorReply).error.message


def children_of(pid: int) -> list[int]:
    """Processes that a process's first thread has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Fleet:
    """Servers of one test module, all gone when its `with` block ends."""

    log_dir: Path
    model_path: Path = CHECKPOINT

    def __enter__(self) -> Fleet:
        self.nodes: list[Node] = []
        limits = httpx.Limits(max_connections=2 * CLIENT_COUNT_MAX, max_keepalive_connections=0)
        self.client = httpx.Client(timeout=WAIT_TIMEOUT_S, limits=limits)
        self.threads = ThreadPoolExecutor(CLIENT_COUNT_MAX)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop_servers([node.server for node in self.nodes], STOP_TIMEOUT_S)
        self.threads.shutdown(cancel_futures=True)
        self.client.close()

    def prefill(
        self, *args: str, name: str = "prefill", model: Path | None = None, starts: bool = True
    ) -> Node:
        return self._add("prefill", args, name, model, starts=starts)

    def decode(
        self,
        prefills: Sequence[Node] | str,
        *args: str,
        name: str = "decode",
        model: Path | None = None,
        starts: bool = True,
    ) -> Node:
        """A decode server; without prefill servers it computes prompts itself. prefills: what is to
        be said of them, or the servers."""
        if not isinstance(prefills, str):
            prefills = ",".join(node.bootstrap for node in prefills) or "none"
        return self._add("decode", ["--prefill", prefills, *args], name, model, starts=starts)

    def _add(
        self, role: str, args: Sequence[str], name: str, model: Path | None, *, starts: bool = True
    ) -> Node:
        node = Node(role, args, model or self.model_path, self.log_dir, name, self.client)
        if starts:
            node.start()
            self.nodes.append(node)
        return node

    def start(self, node: Node) -> Node:
        """Start a node that was made with `starts=False`."""
        self.nodes.append(node.start())
        return node

    def wait_ready(self) -> None:
        for node in self.nodes:
            node.wait_ready()

    def wait_at_rest(self) -> None:
        for node in self.nodes:
            node.wait_at_rest()

    def in_background(self, node: Node, body: Body, key: str = "") -> Future[httpx.Response]:
        """A /generate of which the reply is looked at later."""
        return self.threads.submit(node.post, "/generate", body, key)


def reply_of(response: httpx.Response) -> Reply:
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=Reply)
