"""Compiles clients' grammars before any worker has to: a bad one is the client's 400. So is a
regular expression that ends an output, which no worker sees.

One at a time and off the event loop, so that costly ones delay only each other. Knows
nothing of bodies.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from common.config import ServerConfig
from common.errors import GrammarError, RequestError
from common.frontend.bodies.sample import Sample
from common.grammar import CACHED_COUNT_MAX, GrammarCompiler, RegexWatch
from common.protocol.frontend import ServerInfo


class GrammarCheck:
    """The frontend's own compiler, with the bounds of the workers'. Made when first needed."""

    def __init__(self, config: ServerConfig) -> None:
        self._tokenizer_path = config.tokenizer_path
        self._compiler: GrammarCompiler | None = None
        self._watches: OrderedDict[str, RegexWatch] = OrderedDict()  # by expression, unused
        self._turn = asyncio.Lock()

    async def check(self, samples: Sequence[Sample], server: ServerInfo | None) -> None:
        """Raises: RequestError naming the field whose grammar can't be compiled, or does not allow
        what has come of the output, or whose regular expression can't be looked for."""
        regexes = {regex: one.text.regex_field for one in samples for regex in one.text.regexes}
        for regex, field in regexes.items():
            async with self._turn:
                if regex in self._watches:
                    continue
                try:
                    self._keep(regex, await asyncio.to_thread(RegexWatch.of, regex))
                except GrammarError as error:
                    raise RequestError(f"{field}={regex!r}: {error}", field=field) from error
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

    def watches(self, sample: Sample) -> list[tuple[str, RegexWatch]]:
        """A sample's expressions, and what looks for each in its text. They have been checked."""
        for regex in sample.text.regexes:
            if regex not in self._watches:  # others have taken its place meanwhile
                self._keep(regex, RegexWatch.of(regex))
            self._watches.move_to_end(regex)
        return [(regex, self._watches[regex].copy()) for regex in sample.text.regexes]

    def _keep(self, regex: str, watch: RegexWatch) -> None:
        self._watches[regex] = watch
        if len(self._watches) > CACHED_COUNT_MAX:
            self._watches.popitem(last=False)
