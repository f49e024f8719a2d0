"""Triton, as far as a library needs it that only launches kernels.

Decorators, tuned arguments and heuristics are applied as Triton does. A launch takes its arguments
by the kernel's own signature and computes nothing: shapes, dtypes and arguments are what the
library made of a call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

VERSION = "3.5.0"
LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg"})


@dataclass(slots=True)
class Launches:
    """names: of kernels, in order."""

    names: list[str] = field(default_factory=list)


LAUNCHES = Launches()


class Config:
    """Arguments that tuning may choose."""

    def __init__(
        self, kwargs: Mapping[str, object], num_warps: int = 4, num_stages: int = 3, **_: object
    ) -> None:
        self.kwargs = dict(kwargs)
        self.num_warps = num_warps
        self.num_stages = num_stages


class Launchable:
    """What a kernel is under its decorators. fn: what is below; arg_names: of the kernel."""

    fn: object
    arg_names: list[str]

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)

    def run(self, *args: object, **options: object) -> None:
        raise NotImplementedError


class JitFunction(Launchable):
    """A function of Triton's language."""

    def __init__(self, fn: Callable[..., object]) -> None:
        self.fn = fn
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        self.__name__ = fn.__name__
        self.__module__ = fn.__module__

    def run(self, *args: object, **options: object) -> None:
        grid = options.pop("grid")
        assert options.pop("warmup") is False
        options_only = LAUNCH_OPTIONS - self.signature.parameters.keys()
        own = {name: value for name, value in options.items() if name not in options_only}
        bound = self.signature.bind(*args, **own)  # raises what Triton would, and more clearly
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        assert isinstance(sizes, tuple) and all(int(size) > 0 for size in sizes), (self, sizes)
        LAUNCHES.names.append(self.__name__)


class Heuristics(Launchable):
    """values: how some arguments follow from the others."""

    def __init__(self, fn: Launchable, values: Mapping[str, Callable[..., object]]) -> None:
        self.fn = fn
        self.arg_names = fn.arg_names
        self.values = dict(values)

    def run(self, *args: object, **options: object) -> None:
        assert isinstance(self.fn, Launchable)
        for name, value in self.values.items():
            options[name] = value(dict(zip(self.arg_names, args, strict=False)) | options)
        self.fn.run(*args, **options)


class Autotuner(Launchable):
    """The first of the configurations is the best one."""

    def __init__(
        self,
        fn: Launchable,
        arg_names: Sequence[str],
        configs: Sequence[Config],
        key: Sequence[str],
        reset_to_zero: Sequence[str] | None,
        restore_value: Sequence[str] | None,
        **_: object,
    ) -> None:
        self.fn = fn
        self.arg_names = list(arg_names)
        self.configs = list(configs) or [Config({})]
        self.keys = list(key)
        self.cache: dict[object, Config] = {}
        self.reset_to_zero = list(reset_to_zero or ())
        self.restore_value = list(restore_value or ())
        self.user_defined_pre_hook = self.user_defined_post_hook = False
        self.early_config_prune = None
        unknown = set(self.keys) - set(self.arg_names)
        assert not unknown, f"{fn}: is tuned by {unknown}, which it is not given"

    def run(self, *args: object, **options: object) -> None:
        assert isinstance(self.fn, Launchable)
        best = self.configs[0]
        chosen = {"num_warps": best.num_warps, "num_stages": best.num_stages}
        self.fn.run(*args, **options, **best.kwargs, **chosen)


class Names(ModuleType):
    """A module of which only names are needed."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unused


def _unused(*args: object, **options: object) -> object:
    return args[0] if args and callable(args[0]) else _unused


def jit(fn: Callable[..., object] | None = None, **options: object) -> object:
    return JitFunction(fn) if fn is not None else JitFunction


def autotune(configs: Sequence[Config], key: Sequence[str], **options: object) -> object:
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key, None, None)


def heuristics(values: Mapping[str, Callable[..., object]]) -> object:
    return lambda fn: Heuristics(fn, values)


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def install() -> None:
    """`import triton` finds this."""
    import torch._dynamo  # noqa: F401 - which would look for more of Triton than is here

    module = ModuleType("triton")
    vars(module).update(
        __version__=VERSION,
        Config=Config,
        jit=jit,
        autotune=autotune,
        heuristics=heuristics,
        cdiv=cdiv,
        next_power_of_2=next_power_of_2,
    )
    parts = ("language", "language.extra", "language.extra.libdevice", "language.core",
             "runtime", "runtime.driver", "runtime.autotuner")  # fmt: skip
    sys.modules["triton"] = module
    for part in parts:
        name = f"triton.{part}"
        sys.modules[name] = Names(name)
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, sys.modules[name])
    sys.modules["triton.runtime.autotuner"].Autotuner = Autotuner  # type: ignore[attr-defined]
