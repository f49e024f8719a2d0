"""Collectives between the ranks of one server inside a forward pass. Knows nothing of models.

At size 1 every call is a no-op and torch.distributed is never initialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from common.errors import ConfigError, NotNow


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This rank's place: rank = pp_rank * tp_size + tp_rank, as `RankLayout.index`.

    tp_group: the ranks of this pipeline stage, None if tp_size is 1.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_group: dist.ProcessGroup | None = None

    @staticmethod
    def join(
        *,
        rank: int,
        tp_size: int,
        pp_size: int,
        backend: str,
        init_method: str,
        meet_timeout_s: float,
        pass_timeout_s: float,
    ) -> ParallelContext:
        """Meet the other ranks and form the groups; every rank calls it once.

        backend: "gloo" on CPU, "nccl" on CUDA. init_method: as torch.distributed's, for example
        "tcp://127.0.0.1:29500" or "file:///path". meet_timeout_s: until all have called it.
        pass_timeout_s: how long a rank may wait for another afterwards; NCCL ends the process then.
        Raises: ConfigError if the ranks do not meet in time, or not on one kind of device.
        """
        world_size = tp_size * pp_size
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}: must be in 0..{world_size - 1}, tp_size * pp_size - 1")
        pp_rank, tp_rank = divmod(rank, tp_size)
        if world_size == 1:
            return ParallelContext()
        try:
            meeting = timedelta(seconds=meet_timeout_s)
            store = _meet(init_method, rank, world_size, backend, meeting)
            pass_timeout = timedelta(seconds=pass_timeout_s)
            # NCCL asks it for the other ranks' addresses as late as in the first pass.
            store.set_timeout(pass_timeout)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=pass_timeout
            )
            # Every rank has to create every group, in the same order.
            groups = [
                dist.new_group([stage * tp_size + r for r in range(tp_size)], timeout=pass_timeout)
                for stage in range(pp_size)
            ]
        except (RuntimeError, ValueError) as exc:
            raise NotNow(f"rank {rank} of {world_size} could not join: {exc}") from exc
        return ParallelContext(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            tp_group=groups[pp_rank] if tp_size > 1 else None,
        )

    def leave(self) -> None:
        """Give the groups back; the counterpart of `join`."""
        if self.tp_size * self.pp_size > 1:
            dist.destroy_process_group()

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of every TP rank's `partial`, which is overwritten."""
        if self.tp_size > 1:
            dist.all_reduce(partial, group=self.tp_group)
        return partial

    def least(self, value: int, device: torch.device) -> int:
        """The least of every rank's value, of all stages."""
        if self.tp_size * self.pp_size == 1:
            return value
        shared = torch.tensor(value, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return int(shared)

    def wait_for_ranks(self, device: torch.device) -> None:
        """What is launched next runs once every rank, of all stages, has run what it launched
        before this. The host waits on a CPU only."""
        if self.tp_size * self.pp_size > 1:
            dist.all_reduce(torch.zeros(1, device=device))

    def gather_last_dim(self, part: Tensor) -> Tensor:
        """[..., n] of every TP rank, side by side in rank order: [..., tp_size * n]."""
        if self.tp_size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tp_size)]
        dist.all_gather(parts, part.contiguous(), group=self.tp_group)
        return torch.cat(parts, dim=-1)

    def send_to_next_stage(self, hidden: Tensor) -> None:
        """Hand the hidden states to the rank of the next stage with the same TP rank."""
        assert not self.is_last_stage
        dist.send(hidden.contiguous(), dst=(self.pp_rank + 1) * self.tp_size + self.tp_rank)

    def receive_from_previous_stage(self, hidden: Tensor) -> Tensor:
        """Fill `hidden`, whose shape and dtype both stages know from the batch."""
        assert not self.is_first_stage
        dist.recv(hidden, src=(self.pp_rank - 1) * self.tp_size + self.tp_rank)
        return hidden


def _meet(init_method: str, rank: int, world_size: int, backend: str, timeout: timedelta) -> Store:
    """A store that all ranks have come to. Raises: RuntimeError naming those that have not,
    ConfigError if they have come with several backends: those would wait for each other for long.

    NCCL makes its connections in the first pass, so forming a group waits for no rank.
    """
    store: Store
    store, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    names = [f"rank {other} is here" for other in range(world_size)]
    store.set(names[rank], backend)
    try:
        store.wait(names, timeout)
    except RuntimeError as exc:
        absent = [str(other) for other, name in enumerate(names) if not store.check([name])]
        raise RuntimeError(
            f"rank {', '.join(absent)} did not come within {timeout.total_seconds():g} s"
        ) from exc
    backends = [store.get(name).decode() for name in names]
    if len(set(backends)) > 1:
        told = ", ".join(f"rank {other} {one}" for other, one in enumerate(backends))
        raise ConfigError(
            f"--device: must be the same for all ranks, of which these want: {told}; `auto` is "
            "decided on each machine, so name one"
        )
    return store
