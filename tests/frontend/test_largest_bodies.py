"""What the frontend of a decode server lets in, the codecs behind it carry: every field of every
body at its largest value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from common.errors import RequestError
from common.frontend.apis.messages_body import parse_messages
from common.frontend.apis.openai_api import parse_completion
from common.frontend.apis.openai_chat import parse_chat
from common.frontend.apis.responses_body import parse_responses
from common.frontend.bodies.dial_rules import DialRules
from common.frontend.bodies.resume import parse_resume
from common.frontend.bodies.sample import Limits, Sample
from common.frontend.bodies.validation import parse_generate
from common.frontend.text.parsing.formats import HERMES, THINK
from common.frontend.text.parsing.parsing import Parsers
from common.frontend.text.tokenizer import Tokenizer, load_tokenizer
from common.protocol import codec
from common.protocol.frontend import Submit
from common.protocol.peer import TransferRequest
from common.protocol.worker import NewSequence, Step
from common.request import Origin, SamplingParams
from common.request_bounds import REQUEST_TIMEOUT_S_MAX
from tests.frontend.largest import OUTPUT_COUNT, PATHS, RESUME, Case, Server, cases
from tests.frontend.tiny_tokenizers import CHATML, write_tokenizer

SERVER = Server(vocab_size=1 << 14, prompt_max=4094)
PARSERS = Parsers(calls=HERMES)
LIMITS = Limits(
    vocab_size=SERVER.vocab_size,
    request_token_max=SERVER.prompt_max + OUTPUT_COUNT,
    is_prefill=False,
    model_names=("default",),
    default_host=SERVER.host,
    default_port=SERVER.port,
    dial_rules=DialRules(("any",), ()),
    request_timeout_s=REQUEST_TIMEOUT_S_MAX,
)
TRACE_PARENT = f"00-{'f' * 32}-{'f' * 16}-ff"
# What a decode server does not do.
REFUSED = ("kv_transfer_params.do_remote_decode",)
# What no other server asks for.
NOT_RESUMED = (
    "sampling_params.n",
    "sampling_params.stop",
    "sampling_params.bad_words",
    "sampling_params.stop_regex",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("chat")
    return load_tokenizer(str(write_tokenizer(directory, chat_template=CHATML)), lambda: 0.0)


def samples_of(case: Case, tokenizer: Tokenizer) -> Sequence[Sample]:
    limits = replace(LIMITS, encode=tokenizer.encode)
    match case.path:
        case "/generate":
            parsers = Parsers(reasoning=THINK)
            return parse_generate(case.body, tokenizer, limits, "rid", parsers).samples
        case "/resume":
            return [parse_resume(case.body, limits)]
        case "/v1/completions":
            return parse_completion(case.body, tokenizer, limits, "name")[0].samples
        case "/v1/responses":
            return parse_responses(case.body, tokenizer, limits, "name", PARSERS)[0].samples
        case "/v1/messages":
            return parse_messages(case.body, tokenizer, limits, "name", PARSERS)[0].samples
        case _:
            return parse_chat(case.body, tokenizer, limits, "name", PARSERS)[0].samples


def is_refused(case: Case) -> bool:
    options = case.body.get("sampling_params")
    is_one = isinstance(options, dict) and options.get("n") == 1
    is_foreign = case.path == RESUME and case.field in NOT_RESUMED and not is_one
    return case.field in REFUSED or is_foreign


def check_carried(sample: Sample) -> None:
    """Its way to its scheduler, to the prefill server and to workers."""
    origin = Origin(sample.rid, TRACE_PARENT)
    submit = Submit(
        2**63 - 1,
        sample.token_ids,
        sample.sampling,
        sample.timeout_s,
        sample.bootstrap,
        origin,
        output_ids=list(sample.output_ids),
    )
    assert codec.decode_frontend_to_scheduler(codec.encode(submit)) == submit
    sequence = NewSequence(1, sample.token_ids, len(sample.token_ids), sample.sampling)
    step = Step(1, [sequence])
    assert codec.decode_scheduler_to_worker(codec.encode(step)) == step
    request = TransferRequest(
        transfer_id=2**63 - 1,
        incarnation="decode",
        peer_incarnation="prefill",
        token_count=len(sample.token_ids),
        pages=[(0, [1])],
        budget_ms=int(1000 * sample.timeout_s),
        writers=[0],
        room=sample.bootstrap.room if sample.bootstrap is not None else None,
        token_ids=sample.token_ids,
        prompt_count=len(sample.token_ids),
        sampling=sample.sampling,
        origin=origin,
    )
    assert codec.decode_peer_message(codec.encode(request)) == request


@pytest.mark.parametrize("path", [*PATHS, RESUME])
def test_every_field_at_its_largest_value_is_carried(path: str, tokenizer: Tokenizer) -> None:
    for case in cases(path, SERVER):
        if is_refused(case):
            with pytest.raises(RequestError, match=case.field.rpartition(".")[2]):
                samples_of(case, tokenizer)
            continue
        try:
            for sample in samples_of(case, tokenizer):
                check_carried(sample)
        except Exception as error:
            raise AssertionError(f"{case.path} {case.field}: {error}") from error


def test_every_option_of_sampling_is_asked_for_by_some_field(tokenizer: Tokenizer) -> None:
    asked: set[str] = set()
    plain = msgspec.structs.asdict(SamplingParams(max_new_tokens=1, seed=0, top_p=0.5))
    for path in PATHS:
        for case in cases(path, SERVER):
            if case.field not in REFUSED:
                sampling = msgspec.structs.asdict(samples_of(case, tokenizer)[0].sampling)
                asked |= {name for name, value in sampling.items() if value != plain[name]}
    assert asked == set(SamplingParams.__struct_fields__)
