"""What our pages tell people to type, typed: against one pair, started as the README says.

Servers that a page starts with other flags are put through their own parsers instead. Loads are
made small, targets of make are looked up only. The rest runs in bash as it stands.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from bench.__main__ import serve
from bench.serve.settings import parse_settings
from bench.simulator.__main__ import main as simulate
from demo.servers import free_ports, start_server, stop_servers, wait_ready
from tests.deploy.commands import PARSERS
from tests.docs.blocks import PAGES, ROOT, Block, all_blocks, blocks_of
from tests.e2e.fleet import COMMON_FLAGS, wait_until
from tests.e2e.sglang_router import FLAGS as ROUTER_FLAGS

MISSING = [name for name in ("bash", "curl", "make", "openssl") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(MISSING != [], reason=f"not installed: {', '.join(MISSING)}"),
]

CHECKPOINT = ROOT / "demo" / "checkpoint"
# As written: HTTP of the prefill server, of the decode server, of a router; bootstrap.
PORTS = ("30000", "30001", "30002", "8998")
# A load that proves that its flags are taken, in no time.
SMALL = {"num-prompts": "2", "request-rate": "50", "max-concurrency": "2"}
LENGTH_MAX = 6
NOT_RUN = {
    "demo/README.md": ["needs twenty minutes", "needs half an hour"],
    "deploy/README.md": ["needs Docker", "needs a Kubernetes cluster", "needs root and systemd"],
    "docs/clients.md": [
        "needs a checkpoint of a model that thinks",
        "needs guidellm",
        "needs locust",
        "needs locust",
        "needs lm-eval",
    ],
    "docs/fleet.md": ["needs a server that may end", "needs a server that may change its role"],
    "docs/rdma.md": [
        "needs an RDMA NIC and a UCX that knows it",
        "needs a GPU and an RDMA NIC",
        "needs two machines",
    ],
}


@dataclass
class Pair:
    """The README's two servers on ports of our own. ports: as written -> as used."""

    ports: dict[str, str] = field(default_factory=dict)

    def localized(self, text: str) -> str:
        """Text of a page, for this machine."""
        text = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda match: self.ports[match[1]], text)
        text = re.sub(r"(?<![\w/])DIR(?![\w/])", str(CHECKPOINT), text)
        text = re.sub(r"(?m)^baton-admin(?= )", f"{sys.executable} -m common.admin", text)
        return re.sub(r"(?<![\w/])(\.venv/bin/python|python3)(?= )", sys.executable, text)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    started = Pair(dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True)))
    commands = [command for block in blocks_of(ROOT / "README.md") for command in block.commands]
    log_dir = tmp_path_factory.mktemp("logs")
    servers = []
    try:
        for command in commands:
            role, argv = server_start(started.localized(command))
            if role:
                port = int(argv[argv.index("--port") + 1])
                servers.append(
                    start_server(
                        role, port, *argv, *COMMON_FLAGS, model_path=CHECKPOINT, log_dir=log_dir
                    )
                )
        assert [server.name for server in servers] == ["prefill", "decode"]
        for server in servers:
            wait_ready(server, lambda _: None)
        yield started
    finally:
        stop_servers(servers)


def server_start(command: str) -> tuple[str, list[str]]:
    """Role and flags of a command that starts a server, "" for any other."""
    match = re.match(r"\S+ -m (prefill|decode)_server\s", command)
    return (match[1], words_of(command)[3:]) if match else ("", [])


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def program_of(command: str) -> str:
    if re.match(r"\S+ -m bench serve ", command):
        return "bench"
    if re.match(r"\S+ -m bench.simulator ", command):
        return "simulator"
    if re.match(r"\S+ -m sglang_router", command):
        return "router"
    if command.startswith("make "):
        return "make"
    return "server" if server_start(command)[0] else "shell"


def check_make(command: str) -> None:
    target = command.split()[1]
    # All but running anything.
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_server(command: str) -> None:
    role, argv = server_start(command)
    PARSERS[role](argv)


def run_load(command: str) -> None:
    """As it is written through the parser; for real with fewer and shorter requests."""
    argv = words_of(re.sub(r" --picture \S+", "", command))[4:]
    parse_settings(argv)
    for index, word in enumerate(argv):
        name = word.removeprefix("--")
        if name in SMALL:
            argv[index + 1] = SMALL[name]
        elif name.endswith("-len"):
            argv[index + 1] = str(min(LENGTH_MAX, int(argv[index + 1])))
    if "--random-output-len" not in argv:
        argv += ["--random-output-len", str(LENGTH_MAX)]
    assert serve([*argv, "--disable-tqdm"]) == 0


def run_simulator(command: str) -> None:
    """As it is written, but small. That nothing keeps its promise is an answer too."""
    argv = words_of(command)[3:]
    if argv[0] == "profile":
        assert simulate([*argv, "--input-lens", "16,64", "--streams", "1,2", "--rounds", "1"]) == 0
        return
    assert simulate([*argv, "--input-len", "16", "--requests", "20", "--max-servers", "4"]) in (
        0,
        1,
    )


def run_shell(script: str, cwd: Path) -> None:
    script = re.sub(r"\bcurl ", "curl -sS --fail-with-body --max-time 60 ", script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    assert '"error"' not in done.stdout, f"{script}\n{done.stdout}"


def run_router(command: str, stack: ExitStack, log_path: Path) -> None:
    """Started as it is written, but quick to notice; gone when `stack` is."""
    argv = words_of(command)
    (metrics_port,) = free_ports(1)
    log = stack.enter_context(log_path.open("wb"))
    process = subprocess.Popen(
        [*argv, *ROUTER_FLAGS, "--prometheus-port", str(metrics_port)],
        stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    url = f"http://127.0.0.1:{argv[argv.index('--port') + 1]}/readiness"
    wait_until("the router to be ready", lambda: answers(url))


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10.0).status_code == 200
    except httpx.TransportError:
        return False


def run_block(block: Block, pair: Pair, cwd: Path, stack: ExitStack) -> None:
    if block.language == "python":
        exec(compile(pair.localized(block.text), block.page, "exec"), {"__name__": "__main__"})
        return
    checks: dict[str, Callable[[str], None]] = {
        "make": check_make,
        "server": check_server,
        "bench": run_load,
        "simulator": run_simulator,
        "router": lambda command: run_router(command, stack, cwd / "router.log"),
    }
    script: list[str] = []
    for command in map(pair.localized, block.commands):
        check = checks.get(program_of(command))
        if check is None:
            script.append(command)
            continue
        if script:  # what stands together shares a shell
            run_shell("\n".join(script), cwd)
            script = []
        check(command)
    if script:
        run_shell("\n".join(script), cwd)


PAGES_TO_RUN = [page for page in PAGES if any(not block.why_not for block in blocks_of(page))]


@pytest.mark.parametrize("page", PAGES_TO_RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_works(
    page: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        for block in blocks_of(page):
            if not block.why_not:
                run_block(block, pair, tmp_path, stack)


def test_what_can_not_run_here_is_known() -> None:
    marked: dict[str, list[str]] = {}
    for block in all_blocks():
        if block.why_not:
            marked.setdefault(block.page, []).append(block.why_not)
    assert marked == NOT_RUN
