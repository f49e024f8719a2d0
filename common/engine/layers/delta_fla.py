"""The delta rule on CUDA by flash-linear-attention, whose state is [key dim, value dim] as ours.

The library is imported when the kernels are made, never before. `choose_delta.py` checks their
numbers first. Written against the sources of fla-core 0.6.0. Needs a CUDA device. In Triton's
interpreter on a CPU, one token of several sequences differs from plain torch by 4e-7 at most.
"""

from __future__ import annotations

import inspect
from typing import Protocol

from torch import Tensor

from common.engine.layers.delta_rule import DeltaGates, DeltaInputs
from common.engine.layers.sequence_rows import SequenceRows


class _Kernel(Protocol):
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor | None,
        **more: Tensor | bool,
    ) -> tuple[Tensor, Tensor]: ...


GATE_OPTIONS = {"use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel"}
"""Of a kernel that makes decays and betas itself."""
HOST_STARTS = "cu_seqlens_cpu"
"""Where rows of sequences begin, as the host knows it: a kernel that has to ask waits for the
device."""


class FlaDelta:
    """See `DeltaKernels`. Raises ImportError if the library is not installed."""

    name = "fla"

    def __init__(self, *, is_per_channel: bool) -> None:
        self._chunk: _Kernel
        self._recurrent: _Kernel
        if is_per_channel:
            from fla.ops.kda import chunk_kda, fused_recurrent_kda

            self._chunk, self._recurrent = chunk_kda, fused_recurrent_kda
        else:
            from fla.ops.gated_delta_rule import (
                chunk_gated_delta_rule,
                fused_recurrent_gated_delta_rule,
            )

            self._chunk = chunk_gated_delta_rule
            self._recurrent = fused_recurrent_gated_delta_rule
        self._takes_gates = inspect.signature(self._recurrent).parameters.keys() >= GATE_OPTIONS
        self._takes_host_starts = HOST_STARTS in inspect.signature(self._chunk).parameters

    def step(self, inputs: DeltaInputs, states: Tensor) -> tuple[Tensor, Tensor]:
        # [B, 1, ...]: every sequence is a batch entry of one token.
        outputs, after = self._call(self._recurrent, inputs, 1, states)
        return outputs[:, 0], after

    def step_gated(
        self, query: Tensor, key: Tensor, value: Tensor, gates: DeltaGates, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not self._takes_gates:
            return self.step(gates.inputs(query, key, value), states)
        inputs = DeltaInputs(query, key, value, gates.step[..., None], gates.beta)
        outputs, after = self._call(
            self._recurrent,
            inputs,
            1,
            states,
            use_gate_in_kernel=True,
            A_log=gates.decay_log,
            dt_bias=gates.step_bias,
            use_beta_sigmoid_in_kernel=True,
        )
        return outputs[:, 0], after

    def run(self, inputs: DeltaInputs, rows: SequenceRows, states: Tensor) -> tuple[Tensor, Tensor]:
        # [1, T, ...]: one batch entry that is cut into sequences.
        host = {HOST_STARTS: rows.host_starts} if self._takes_host_starts else {}
        outputs, after = self._call(self._chunk, inputs, 0, states, rows.starts, **host)
        return outputs[0], after

    def _call(
        self,
        kernel: _Kernel,
        inputs: DeltaInputs,
        dim: int,
        states: Tensor,
        starts: Tensor | None = None,
        **more: Tensor | bool,
    ) -> tuple[Tensor, Tensor]:
        log_decay = inputs.log_decay
        if log_decay.shape[-1] == 1:
            log_decay = log_decay[..., 0]
        return kernel(
            inputs.query.contiguous().unsqueeze(dim),
            inputs.key.contiguous().unsqueeze(dim),
            inputs.value.contiguous().unsqueeze(dim),
            g=log_decay.contiguous().unsqueeze(dim),
            beta=inputs.beta.contiguous().unsqueeze(dim),
            initial_state=states.contiguous(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
            **more,
        )
