"""Goodput: the highest rate at which a single server, 1P1D, 2P1D and 1P2D keep the same promise.

Arrivals are a Poisson process, drawn with the same seed for every rate and shape. Prefill servers
live on one core, decode and single servers on the other, as if these were two machines of one core:
two servers of a kind share theirs, so that the four shapes need two cores. The client lives on the
prefill servers' core. A single server leaves the other one idle: compare it by the core.

What the simulator predicts is of a profile that is measured in between, before each shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from bench.deployment import VOCAB_SIZE, Deployment, Shape, missing_cores
from bench.report import NotRun, Row, at_most
from bench.sending import load_settings
from bench.serve.outcome import Run
from bench.serve.workload import Ask, make_workload
from bench.simulator.calibrate import Calibration, Ranges
from bench.simulator.comparison import ERROR_MAX, Measured, Probe, goodput_of, relative_error
from bench.simulator.profile import Profile, write_profile
from bench.simulator.servers import Place
from bench.simulator.simulate import Plan, simulate
from bench.slo import Slo, find_goodput
from common.errors import ConfigError

PAIR = Shape("1p1d", 1, 1)
SHAPES = (
    Shape("single", 0, 1),
    PAIR,
    Shape("2p1d", 2, 1),
    Shape("1p2d", 1, 2),
)
# bf16 has no fast path on many CPUs.
FLAGS = ("--dtype", "float32")
INPUT_LENGTH = 512
OUTPUT_LENGTH = 32
RANGE_RATIO = 0.5
# Of this machine: some three times what an idle server needs, and a step of a few streams.
SLO = Slo(ttft_ms=400.0, itl_ms=40.0, rank=90.0)
RATE_LOW, RATE_HIGH = 3.0, 32.0  # requests per second
HALVING_COUNT = 5
RUN_S = 8.0
REQUESTS_MIN = 30
PROMPT_LENGTHS = (64, 256, 512)  # of the profile: around those of the load
STREAM_COUNTS = (1, 2, 4, 8, 16)
RESULT_PATH = Path(__file__).parent / "out" / "goodput.json"
PROFILE_PATH = Path(__file__).parent / "out" / "profile.json"


def run() -> list[Row | NotRun]:
    """Rows of what was measured, and of what the simulator makes of the profile."""
    if missing := missing_cores():
        return [NotRun("goodput", missing, f"predicted within {ERROR_MAX:.0%}")]
    measured, profile = sweep()
    write_profile(profile, PROFILE_PATH)
    write_measured(measured)
    predicted = predict(profile)
    single = measured.shapes["single"]
    return [
        *(_row(name, found, "single", single) for name, found in measured.shapes.items()),
        *(
            _row(f"{name}_predicted", predicted.shapes[name], "measured", found)
            for name, found in measured.shapes.items()
        ),
        Row(
            "goodput_prediction_error_max",
            max(map(relative_error, predicted.shapes.values(), measured.shapes.values())),
            "of measured",
            samples=len(SHAPES),
            target=at_most(ERROR_MAX),
        ),
    ]


def _row(name: str, value: float, reference: str, reference_value: float) -> Row:
    """Without a ratio where no rate was kept to hold it against."""
    if not reference_value:
        return Row(f"goodput_{name}", value, "req/s")
    ratio = value / reference_value
    return Row(f"goodput_{name}", value, "req/s", reference, reference_value, ratio)


def predict(profile: Profile) -> Measured:
    """What a sweep of the simulated servers finds."""
    probes = {shape.name: search(partial(simulate, profile, plan_of(shape))) for shape in SHAPES}
    return Measured({name: goodput_of(found) for name, found in probes.items()}, probes)


def plan_of(shape: Shape) -> Plan:
    """Where a shape's servers live, whose cores are one each."""
    (prefill_core,), (decode_core,) = shape.prefill_cores, shape.decode_cores
    return Plan(
        (Place(prefill_core, prefill_core),) * shape.prefill_count,
        (Place(decode_core, decode_core),) * shape.decode_count,
        client=shape.client_core,
    )


def sweep() -> tuple[Measured, Profile]:
    """Measure every shape, one after the other, and before each of them what 1P1D's work costs."""
    shapes: dict[str, float] = {}
    probes: dict[str, list[Probe]] = {}
    with Deployment(PAIR, FLAGS) as pair:
        ranges = Ranges(PROMPT_LENGTHS, STREAM_COUNTS)
        calibration = Calibration(pair.decodes[0].url, pair.send, ranges)
        for shape in SHAPES:
            calibration.run_round()
            if shape is PAIR:
                found = search(pair.send)
            else:
                with Deployment(shape, FLAGS) as servers:
                    servers.send(workload(RATE_LOW)[:8])  # warms every server of the shape
                    found = search(servers.send)
            probes[shape.name] = found
            shapes[shape.name] = goodput_of(found)
            print(f"  {shape.name}: {shapes[shape.name]:.2f} requests per second", flush=True)
        return Measured(shapes, probes), calibration.profile()


def search(send: Callable[[list[Ask]], Run]) -> list[Probe]:
    """Halve the range of rates. The caller's function answers a workload, measured or simulated."""
    found: list[Probe] = []

    def is_kept(rate: float) -> bool:
        run = send(workload(rate))
        ttft_ms, itl_ms = SLO.found_ms(SLO.summarize(run))
        found.append(Probe(rate, ttft_ms, itl_ms, SLO.is_kept(run)))
        return found[-1].is_kept

    find_goodput(is_kept, RATE_LOW, RATE_HIGH, HALVING_COUNT)
    return found


def workload(rate: float) -> list[Ask]:
    """Requests of RUN_S seconds at a rate, the same draws for every rate."""
    count = max(REQUESTS_MIN, math.ceil(rate * RUN_S))
    settings = load_settings(
        *("--num-prompts", str(count), "--request-rate", f"{rate:.6f}"),
        *("--random-input-len", str(INPUT_LENGTH), "--random-output-len", str(OUTPUT_LENGTH)),
        *("--random-range-ratio", str(RANGE_RATIO)),
    )
    return make_workload(settings, VOCAB_SIZE)


def write_measured(measured: Measured) -> None:
    path = RESULT_PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")


def read_measured() -> Measured:
    """What the latest sweep measured. Raises: ConfigError that says why there is none."""
    path = RESULT_PATH
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as exc:
        raise ConfigError(
            f"{path}: can't be read: {exc.strerror}; `python -m bench goodput` writes it"
        ) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path}: must be what `python -m bench goodput` wrote: {exc}") from exc
