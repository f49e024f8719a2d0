"""Servers under load: tokens per second and the times between tokens, and whether all is answered.

Once with a server alone and once with a pair, on one device, with the same model and prompts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.load_cases import LoadCase, figures_of, send_case, why_unfinished
from bench.serve.summary import Summary
from tests.gpu.model_shapes import ModelShape, write_model
from tests.gpu.report import Section
from tests.gpu.servers import servers


def check_load_section(section: Section, device: str, shape: ModelShape, *, is_pair: bool) -> None:
    name = "pair" if is_pair else "single"
    # Pages in whole, and one for the next token of each stream.
    pool_tokens = max(case.token_count + 32 * case.stream_count for case in shape.loads)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as directory:
        model = write_model(Path(directory), shape)
        with servers(model, device, shape, is_pair=is_pair, pool_tokens=pool_tokens) as running:
            for case in shape.loads:
                summary = send_case(case, running.url, shape.vocab_size)
                tell_case(section, f"{name}: {case}", case, summary)


def tell_case(section: Section, name: str, case: LoadCase, summary: Summary) -> None:
    """The figures of what was answered, and whether that is all."""
    missing = why_unfinished(case, summary)
    section.figure(f"{name}: finished", f"{summary.good_count} of {summary.request_count}")
    section.check(f"{name}: all finished", not missing, missing[:500])
    for figure, value in figures_of(summary).items():
        section.figure(f"{name}: {figure}", value)
