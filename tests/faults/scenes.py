"""Opens a pair of servers where a case wants it. Knows nothing of faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from common.channel.keys import write_key_pair
from tests.faults.cases import Scene
from tests.faults.isolation import Disk, FarHosts
from tests.soak.servers import ROOT, ServerPair

COMMON_ARGS = (
    *("--dtype", "float32", "--cpu-threads", "1", "--log-level", "info"),
    *("--chunked-prefill-size", "512", "--drain-timeout", "10"),
)
# Caches go both ways, so that a fault meets writers and readers on either side.
RETURN_ARGS = ("--return-cache", "auto")
# Half a request whose other half met a dead server has nothing to wait for.
PREFILL_ARGS = ("--bootstrap-timeout", "4")
POOL_TOKENS = {
    Scene.PLAIN: 12288,
    # The longest request takes three quarters of it, and a dozen ask at a time.
    Scene.CROWDED: 2048,
    Scene.FAR: 12288,
}
# A lost packet costs a round trip or a timer of the kernel's, and is no reason to give a peer up.
FAR_ARGS = ("--peer-timeout", "2")
FAR_CLIENT_COUNT = 6


@dataclass(frozen=True, slots=True)
class Settings:
    """seed: fixes what is sent. request_timeout_s: what the servers allow a request. is_isolated:
    whether mounts and networks are ours alone, to be filled and cut. has_keys: whether the two know
    each other by keys."""

    client_count: int = 16
    seed: int = 1
    golden_count: int = 64
    request_timeout_s: float = 12.0
    is_isolated: bool = False
    has_keys: bool = False


def settings_of(scene: Scene, settings: Settings) -> Settings:
    """What fits a scene: a slow link serves few clients, and slowly."""
    if scene is not Scene.FAR:
        return settings
    count = min(settings.client_count, FAR_CLIENT_COUNT)
    return replace(settings, client_count=count, request_timeout_s=2 * settings.request_timeout_s)


def key_flags(directory: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags of a prefill and a decode server that let in each other and nobody else."""
    root = Path(directory)
    known = {
        role: write_key_pair(root / f"{role}.key").public.hex() for role in ("prefill", "decode")
    }
    (root / "prefill.peers").write_text(f"{known['decode']} decode\n")
    (root / "decode.peers").write_text(f"{known['prefill']} *\n")
    prefill, decode = (
        (
            *("--curve-secret-key-file", str(root / f"{role}.key")),
            *("--curve-peer-keys-file", str(root / f"{role}.peers")),
        )
        for role in ("prefill", "decode")
    )
    return prefill, decode


@asynccontextmanager
async def open_pair(
    transport: str, scene: Scene, settings: Settings
) -> AsyncIterator[tuple[ServerPair, FarHosts | None]]:
    """A pair that is ready, and the hosts it is on if they are not this one."""
    args = (*COMMON_ARGS, *RETURN_ARGS, "--transport", transport)
    args += ("--request-timeout", str(settings.request_timeout_s))
    args += ("--max-total-tokens", str(POOL_TOKENS[scene]))
    async with AsyncExitStack() as stack:
        disk = stack.enter_context(Disk(is_small=settings.is_isolated))
        hosts: FarHosts | None = None
        pair = ServerPair(args, PREFILL_ARGS, log_dir=disk.path)
        if settings.has_keys:
            prefill_keys, decode_keys = key_flags(stack.enter_context(TemporaryDirectory()))
            pair.prefill_args += prefill_keys
            pair.decode_args += decode_keys
        if scene is Scene.FAR:
            hosts = await stack.enter_async_context(FarHosts(ROOT, settings.seed))
            pair.places = (hosts.places[0], hosts.places[1])
            pair.common_args += FAR_ARGS
        yield await stack.enter_async_context(pair), hosts
