"""The pair of compose.yaml, and one of two pods, in the Linux namespaces that containers have.

Every server has a network of its own with one cable between them, a host name, a /dev/shm and no
capability. What they share besides decides whether UCX finds shared memory or has to use tcp.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.deploy.commands import CHECKPOINT, Command, compose_commands

TOOLS = ("ip", "unshare", "setpriv", "mount", "hostname")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason=f"needs root and {', '.join(TOOLS)}",
    ),
]
ADDRESSES = {"prefill": "10.77.77.1", "decode": "10.77.77.2"}
SHARED_PROCESSES = ("--mount", "--uts")
OWN_PROCESSES = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")
READY_TIMEOUT_S = 120

ASK = f"""
import json, time, urllib.request

def get(path, body=None):
    headers = {{"Content-Type": "application/json"}}
    request = urllib.request.Request(f"http://127.0.0.1:30001{{path}}", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))

end_at = time.monotonic() + {READY_TIMEOUT_S}
while True:
    try:
        get("/health")
        break
    except OSError:
        assert time.monotonic() < end_at, "the decode server is not ready"
        time.sleep(0.2)
body = {{"text": "hello", "sampling_params": {{"max_new_tokens": 4, "temperature": 0}}}}
meta = get("/generate", json.dumps(body).encode())["meta_info"]
(peer,) = get("/server_info")["peers"]
print(json.dumps([peer["address"], peer["transports"], meta["completion_tokens"]]))
"""


@contextmanager
def networks() -> Iterator[dict[str, str]]:
    """Names of two network namespaces with a cable between them, by role."""
    names = {role: f"baton-{secrets.token_hex(3)}" for role in ADDRESSES}
    prefill, decode = names["prefill"], names["decode"]
    with ExitStack() as undo:
        for name in names.values():
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "del", name)
        # The name of a cable's end may have 15 characters.
        run(
            *("ip", "link", "add", "eth0", "netns", prefill),
            *("type", "veth", "peer", "name", "eth0", "netns", decode),
        )
        for role, name in names.items():
            run("ip", "-n", name, "addr", "add", f"{ADDRESSES[role]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def serving(
    command: Command, network: str, unshared: tuple[str, ...], root: Path
) -> Iterator[None]:
    """One server as a container would have it; stopped as one is stopped."""
    hosts = root / "hosts"
    hosts.write_text("".join(f"{ip} {name} {name}-servers\n" for name, ip in ADDRESSES.items()))
    setup = (
        "mount --make-rprivate / && mount -t tmpfs -o size=2g tmpfs /dev/shm && "
        f"mount --bind {hosts} /etc/hosts && hostname {command.role} && "
        'exec setpriv --inh-caps -all --bounding-set -all --no-new-privs "$@"'
    )
    server = [sys.executable, "-m", f"{command.role}_server", *command.localized_argv(root)]
    inside_network = ["ip", "netns", "exec", network, "unshare", *unshared]
    inside_network += ["bash", "-c", setup, "-"]
    with (root / f"{command.role}.log").open("wb") as log:
        process = subprocess.Popen(
            [*inside_network, *server],
            cwd=CHECKPOINT.parents[1],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        # In a process namespace of its own it is process 1, and unshare waits for it outside.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        is_outside = unshared == OWN_PROCESSES and bool(children)
        os.kill(int(children[0]) if is_outside else process.pid, signal.SIGTERM)
        assert process.wait(60) == 0, (root / f"{command.role}.log").read_text()


@pytest.mark.parametrize(
    ("unshared", "transports"), [(SHARED_PROCESSES, ["posix"]), (OWN_PROCESSES, ["stream"])]
)
def test_servers_find_the_fastest_way_that_their_namespaces_leave(
    unshared: tuple[str, ...], transports: list[str], tmp_path: Path
) -> None:
    commands = {c.role: c for c in compose_commands() if not c.where.endswith("-1")}
    with networks() as names, ExitStack() as servers:
        for role in ("prefill", "decode"):
            servers.enter_context(serving(commands[role], names[role], unshared, tmp_path))
        told = run("ip", "netns", "exec", names["decode"], sys.executable, "-c", ASK)
    assert json.loads(told) == [f"{ADDRESSES['prefill']}:8998", transports, 4]
