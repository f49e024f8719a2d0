"""The weights of a rank: those of the start, and others that take their place while it lives.

Others are loaded whole beside those that compute, by a thread of their own. So a checkpoint that
can't be loaded changes nothing, and a rank goes on until all ranks have theirs. Only a checkpoint
of the served model's config fits what was sized at the start: layout, pool, page tables. Knows
nothing of steps or peers.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import msgspec
import torch

from common.config import ServerConfig
from common.engine.attention.choose import AttentionChoice
from common.engine.checkpoint.files import read_tensor_entries
from common.engine.checkpoint.fingerprint import draft_fingerprint, model_fingerprint
from common.engine.config.draft import DraftConfig
from common.engine.config.model import ModelConfig
from common.engine.distributed import ParallelContext
from common.engine.graphs.decode_graphs import DecodeGraphs
from common.engine.kernel_trial import give_memory_back
from common.engine.layers.narrow import NarrowWeights
from common.engine.loader import load_model, read_served_config
from common.engine.model_runner import ModelRunner
from common.engine.models.causal_lm import CausalLm
from common.errors import ConfigError, NotNow
from common.protocol.weights import LoadWeights, WeightsLoaded
from common.protocol.worker import WorkerReady
from common.weights import DEFAULT_VERSION, ServedWeights
from common.worker.pools import free_nbytes
from common.worker.start_device import enough_memory
from common.worker.start_graphs import GraphPlan

log = logging.getLogger(__name__)

WeightLoads = SimpleQueue[LoadWeights | None]
"""From the I/O thread; None ends the thread that loads."""

MORE_ROOM_FOR_WEIGHTS = "raise --tp-size or --pp-size, or end what else uses the memory"


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a rank's model is made from, the checkpoint aside."""

    config: ServerConfig
    device: torch.device
    parallel: ParallelContext
    choice: AttentionChoice
    draft: DraftConfig | None = None

    def load(self) -> CausalLm:
        """Raises: ConfigError that names what is wrong with the checkpoint."""
        with enough_memory("the weights", MORE_ROOM_FOR_WEIGHTS):
            return load_model(
                self.config.model_path,
                dtype=self.config.dtype,
                device=self.device,
                parallel=self.parallel,
                load_format=self.config.load_format,
                seed=self.config.random_seed,
                attention=self.choice.attention,
                packs=True,
                narrow=NarrowWeights(self.config.quantized_weights),
                draft=self.draft,
                draft_path=self.config.speculative_draft_model_path,
            )

    def fingerprint(self, model_config: ModelConfig, version: str) -> dict[str, str]:
        """The fingerprint that servers compare. Raises: ConfigError if files can't be read.

        Pools of different kinds of memory have no transport in common. Weights that their operator
        calls differently are different ones, whatever their files hold: a fingerprint reads samples
        of a tensor, and a few steps of training may leave those as they were. Servers without a
        draft don't name it, so that those of releases without drafts fit them.
        """
        config = self.config
        named = {} if version == DEFAULT_VERSION else {"weight_version": version}
        of_model = model_fingerprint(
            config.model_path, model_config, load_format=config.load_format, seed=config.random_seed
        )
        of_draft = {}
        if self.draft is not None:
            path = config.speculative_draft_model_path
            of_draft["draft"] = draft_fingerprint(self.draft, path, load_format=config.load_format)
        return of_model | of_draft | {"memory": self.device.type} | named

    def replaced(self, weights: ServedWeights) -> RankModel:
        """With another checkpoint."""
        config = msgspec.structs.replace(
            self.config, model_path=weights.model_path, load_format=weights.load_format
        )
        return dataclasses.replace(self, config=config)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """model: None to go on with the one that computes."""

    source: RankModel
    model: CausalLm | None
    weights: ServedWeights
    fingerprint: dict[str, str]


class WeightLoader:
    """Loads, and has a runner take over what was loaded.

    `run` is called by a thread of its own, `use` by the engine's, `want` and `drop` by the I/O
    thread's. record: makes the recordings of a model's decode passes, None where there are none,
    and says what came of it. ready: what the rank said when it was started.
    """

    def __init__(
        self,
        source: RankModel,
        model_config: ModelConfig,
        runner: ModelRunner,
        record: Callable[[CausalLm], tuple[DecodeGraphs | None, GraphPlan]],
        ready: WorkerReady,
    ) -> None:
        self._source = source
        self._model_config = model_config
        self._runner = runner
        self._record = record
        self._ready = ready
        self._lock = threading.Lock()
        self._wanted_id = ""
        self._loaded: _Loaded | None = None

    def want(self, load: LoadWeights) -> None:
        """`run` is to be called with this next."""
        with self._lock:
            self._wanted_id, self._loaded = load.weights.load_id, None

    def drop(self) -> None:
        """Nothing that was asked for is wanted any more."""
        with self._lock:
            self._wanted_id, self._loaded = "", None

    def run(self, load: LoadWeights) -> WeightsLoaded:
        """Load, and keep it aside if it is still wanted then."""
        weights = load.weights
        try:
            loaded = self._load(weights)
        except ConfigError as error:
            return WeightsLoaded(self._ready.rank, weights.load_id, str(error))
        with self._lock:
            if self._wanted_id == weights.load_id:
                self._loaded = loaded
        return WeightsLoaded(self._ready.rank, weights.load_id)

    def _load(self, weights: ServedWeights) -> _Loaded:
        if not weights.model_path:  # only their name changes
            served = self._ready.weights
            weights = msgspec.structs.replace(
                served, version=weights.version, load_id=weights.load_id
            )
            fingerprint = self._source.fingerprint(self._model_config, weights.version)
            return _Loaded(self._source, None, weights, fingerprint)
        source = self._source.replaced(weights)
        self._check_config(source.config)
        self._check_room(source)
        model = source.load()
        fingerprint = source.fingerprint(self._model_config, weights.version)
        return _Loaded(source, model, weights, fingerprint)

    def _check_config(self, config: ServerConfig) -> None:
        """Raises: ConfigError naming each value that is not the served model's."""
        if self._source.draft is not None:
            raise ConfigError(
                f"{config.model_path}: other weights can't be loaded beside "
                f"--speculative-algorithm {config.speculative_algorithm}, whose draft fits its own "
                "model only: must be off or NGRAM"
            )
        found = read_served_config(config.model_path, dtype=config.dtype)
        differing = [
            f"{name}={other!r}, served {own!r}"
            for field in dataclasses.fields(ModelConfig)
            if (other := getattr(found, (name := field.name)))
            != (own := getattr(self._model_config, name))
        ]
        if differing:
            raise ConfigError(
                f"{config.model_path}: must have the served model's config: {'; '.join(differing)}"
            )

    def _check_room(self, source: RankModel) -> None:
        """Raises: ConfigError if the files, shared out over ranks, are larger than what is free. A
        kernel that runs out of memory ends whole processes."""
        config = source.config
        if config.load_format == "dummy":
            return
        entries = read_tensor_entries(Path(config.model_path)).values()
        nbytes = sum(entry.stop - entry.start for entry in entries) // config.rank_count
        if self._source.device.type == "cpu":
            nbytes *= len(config.local_ranks)
        free = free_nbytes(self._source.device)
        if nbytes > free:
            raise NotNow(
                f"{config.model_path}: no memory for other weights beside those that are served: "
                f"{nbytes} bytes, {free} are free; {MORE_ROOM_FOR_WEIGHTS}"
            )

    def use(self, load_id: str) -> WorkerReady | None:
        """Have the runner compute with what was loaded under `load_id`; what this rank says of
        itself from then on. Nothing else that was loaded is kept. No sequence is known.
        """
        with self._lock:
            loaded, self._loaded, self._wanted_id = self._loaded, None, ""
        if not load_id:
            return None
        assert loaded is not None and loaded.weights.load_id == load_id, "all ranks have loaded it"
        describe = self._ready.describe
        if loaded.model is not None:
            self._runner.use(loaded.model, None)  # first, for recordings need the others' room
            graphs, plan = self._record(loaded.model)
            self._runner.use(loaded.model, graphs)
            of_model = loaded.model.describe()["weights"]
            describe = describe | {"weights": of_model, "cuda_graphs": plan.summary}
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            give_memory_back(self._source.device)  # what the next load is compared with
        self._source = loaded.source
        self._ready = msgspec.structs.replace(
            self._ready,
            fingerprint=loaded.fingerprint,
            weights=loaded.weights,
            describe=describe,
        )
        log.info("computes with other weights: %s", self._ready.weights)
        return self._ready
