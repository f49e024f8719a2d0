"""Counts launches: operations of torch on its meta device, and kernels that are stood in for.

Every operation that reaches a tensor of that device is a launch, except for views and for memory
that is taken. Knows nothing of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
NOTHING_LAUNCHED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
        "detach", "alias", "lift_fresh", "resize_", "set_", "_to_dense",
    }
)  # fmt: skip
ONE_KERNEL = frozenset({"rms_norm"})
"""What torch spells in smaller operations where it has no kernel, and has one on CUDA."""


class LaunchCounter(TorchDispatchMode):
    """names: of what was launched, by place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.names: dict[str, Counter[str]] = {}
        self._place = place
        self._is_inside_kernel = False

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def note(self, name: str) -> None:
        if not self._is_inside_kernel:
            self.names.setdefault(self._place, Counter())[name] += 1

    @contextmanager
    def one_kernel(self, name: str) -> Iterator[None]:
        """Whatever is computed meanwhile is this one's."""
        self.note(name)
        before, self._is_inside_kernel = self._is_inside_kernel, True
        try:
            yield
        finally:
            self._is_inside_kernel = before

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = dict(kwargs or {})
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name not in ONE_KERNEL and _is_composite(func):
            with self:
                spelled: object = func.decompose(*args, **options)
            if spelled is not NotImplemented:
                return spelled
        result: object = func(*args, **options)
        if not func.is_view and name not in NOTHING_LAUNCHED and _is_there(args, options, result):
            self.note(name)
        return result


def _is_there(*values: object) -> bool:
    return any(isinstance(x, Tensor) and x.device == DEVICE for x in tree_leaves(values))


def _is_composite(func: torch._ops.OpOverload) -> bool:
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
