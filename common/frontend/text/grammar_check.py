"""Compiles clients' grammars before any worker has to: a bad one is the client's 400.

One at a time and off the event loop, so that costly ones delay only each other. Knows
nothing of bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.config import ServerConfig
from common.errors import GrammarError, RequestError
from common.frontend.bodies.sample import Sample
from common.grammar import GrammarCompiler
from common.protocol.frontend import ServerInfo


class GrammarCheck:
    """The frontend's own compiler, with the bounds of the workers'. Made when first needed."""

    def __init__(self, config: ServerConfig) -> None:
        self._tokenizer_path = config.tokenizer_path
        self._compiler: GrammarCompiler | None = None
        self._turn = asyncio.Lock()

    async def check(self, samples: Sequence[Sample], server: ServerInfo | None) -> None:
        """Raises: RequestError naming the field whose grammar can't be compiled, or does not allow
        what has come of the output."""
        asked = {
            sample.sampling.grammar: sample
            for sample in samples
            if sample.sampling.grammar is not None
        }
        if not asked:
            return
        assert server is not None, "samples were checked against what the server said"
        async with self._turn:
            if self._compiler is None:
                self._compiler = GrammarCompiler(
                    self._tokenizer_path, server.vocab_size, server.eos_token_ids, thread_count=1
                )
            for grammar, sample in asked.items():
                field = sample.grammar_field
                try:
                    await asyncio.to_thread(self._compiler.start, grammar, sample.output_ids)
                except GrammarError as error:
                    raise RequestError(f"{field}: {error}", field=field) from error
