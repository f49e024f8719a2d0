"""The costs of work on one kind of server, measured once: the numbers that a simulation runs on.

Every cost is a straight line, or a parabola of the prompt's length for attention. Knows nothing of
their measurement or use.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from common.errors import ConfigError

NO_NUMBER = "must be a profile that `python -m bench.simulator profile` wrote"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a server of one model on one kind of card takes.

    A step computes pieces of prompts and one token of each running sequence together:
        prefill_fixed_s, prefill_token_s, prefill_pair_s: of a step with prompts, for each of their
            tokens, for each (token, earlier token of its prompt) that attention looks at.
        decode_fixed_s, decode_sequence_s, decode_context_s: of a step with running sequences, for
            each of them, for each token of their caches. Streaming the tokens is in it.
    frontend_s, frontend_token_s: to take a request in over HTTP and to answer its first token, and
        for each token of its prompt.
    dispatch_s: of a prefill server, for a request beside its steps.
    message_s: from server to server and back, without computing.
    transfer_s, bandwidth: of a transfer, at least, and bytes per second of the link.
        token_nbytes: what is left to be sent of each token of the prompt after its last step.
    client_token_s: what the client of the measurement itself takes for a token.
    chunk_token_max: prompt tokens of a step. running_max, token_capacity: of a decode server.
    """

    source: str
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_fixed_s: float
    decode_sequence_s: float
    decode_context_s: float
    frontend_s: float
    frontend_token_s: float
    dispatch_s: float
    message_s: float
    transfer_s: float
    bandwidth: float
    token_nbytes: float
    client_token_s: float = 0.0
    chunk_token_max: int
    running_max: int
    token_capacity: int

    def step_s(
        self, chunks: list[tuple[int, int]], sequence_count: int, context_token_count: int
    ) -> float:
        """Of a step with prompt tokens [start, stop) of each chunk and so many sequences, whose
        caches have so many tokens together. A pass of both kinds has what is fixed only once."""
        fixed_s = 0.0
        variable_s = 0.0
        if chunks:
            fixed_s = self.prefill_fixed_s
            for start, stop in chunks:
                pairs = (stop * stop - start * start) / 2
                variable_s += (stop - start) * self.prefill_token_s + pairs * self.prefill_pair_s
        if sequence_count:
            fixed_s = max(fixed_s, self.decode_fixed_s)
            variable_s += sequence_count * self.decode_sequence_s
            variable_s += context_token_count * self.decode_context_s
        return fixed_s + variable_s

    def transferred_s(self, token_count: int) -> float:
        """What a transfer adds after the prompt's last step."""
        return self.transfer_s + token_count * self.token_nbytes / self.bandwidth


def read_profile(path: Path) -> Profile:
    """Raises: ConfigError that names the file and what is wrong with it."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as exc:
        raise ConfigError(f"--profile {path}: can't be read: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--profile {path}: {NO_NUMBER}: {exc}") from exc
    numbers = [value for value in msgspec.structs.astuple(profile) if not isinstance(value, str)]
    bounds = (profile.bandwidth, profile.chunk_token_max, profile.running_max)
    if min(numbers) < 0 or min(bounds) <= 0:
        raise ConfigError(f"--profile {path}: {NO_NUMBER}: it has a number below its least")
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Raises: ConfigError if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    except OSError as exc:
        raise ConfigError(f"--profile {path}: can't be written: {exc.strerror}") from exc
