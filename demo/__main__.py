"""`python -m demo`: start a pair, ask it questions, show the timeline of each.

The answers stand in the prompts alone, so they are right only if the KV cache reached the decode
server whole. Exit code 0 if at least 95 % are right and nothing is left behind.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from demo.facts import Ask, Question, is_right, make_question
from demo.servers import DemoFailed, Pair, end_when_terminated

CHECKPOINT = Path(__file__).parent / "checkpoint"
QUESTION_COUNT = 32
CONCURRENT_COUNT = 4
RIGHT_SHARE_MIN = 0.95
FACT_COUNTS = (4, 8, 16, 24, 32, 40)
SHARED_MEMORY = Path("/dev/shm")


class TransferTimes(msgspec.Struct):
    """The prefill server's part of a timeline; seconds."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    wire_s: float
    nbytes: int
    exposed_nbytes: int
    run_count: int


class Stages(msgspec.Struct):
    """The part of meta_info.timeline that is printed; seconds."""

    reserve_s: float
    transfer: TransferTimes
    ttft_s: float
    decode_s: float


class Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    timeline: Stages | None = None


class Reply(msgspec.Struct):
    """The part of a /generate reply that the demo reads."""

    text: str
    meta_info: Meta


@dataclass(frozen=True, slots=True)
class Answered:
    question: Question
    reply: Reply

    @property
    def is_right(self) -> bool:
        return is_right(self.question, self.reply.text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--questions", type=int, default=QUESTION_COUNT)
    parser.add_argument("--keep", action="store_true", help="leave the pair running")
    parser.add_argument("--transport", default="auto", help="auto, shm, stream or ucx-tcp")
    options = parser.parse_args()
    end_when_terminated()
    left_before = set(SHARED_MEMORY.iterdir())
    try:
        share = run_demo(options.questions, options.transport, keep=options.keep)
    except DemoFailed as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    left = {path.name for path in set(SHARED_MEMORY.iterdir()) - left_before}
    print(f"both servers have stopped; left in {SHARED_MEMORY}: {', '.join(left) or 'nothing'}")
    return 0 if share >= RIGHT_SHARE_MIN and not left else 1


def run_demo(question_count: int, transport: str, *, keep: bool) -> float:
    """Run the demo; returns the share of right answers."""
    print("starting a prefill server and a decode server")
    args = ("--transport", transport)
    with Pair(CHECKPOINT, prefill_args=args, decode_args=args) as pair:
        print(f"  prefill {pair.prefill.url}  decode {pair.decode.url}  logs {pair.log_dir}")
        print("\none question, answered as it streams:")
        stream_one(pair, make_question(7, 8, ask=Ask.ALL))
        print(f"\n{question_count} questions, {CONCURRENT_COUNT} at a time:")
        answers = ask_all(pair, question_count)
        right_count = sum(answer.is_right for answer in answers)
        share = right_count / len(answers)
        print(f"\nrecall score: {right_count} of {len(answers)} right ({share:.1%})")
        if keep:
            print(f"page:    {pair.decode.url}/")
            print(f"metrics: {pair.decode.url}/metrics and {pair.prefill.url}/metrics")
            wait_for_interrupt()
        else:
            print("to look at its page and metrics: make demo ARGS=--keep")
    return share


def wait_for_interrupt() -> None:
    print("the pair runs until Ctrl-C, or until its input ends")
    try:
        while True:
            sys.stdin.readline() or sys.exit(0)
    except KeyboardInterrupt:
        print()


def stream_one(pair: Pair, question: Question) -> None:
    """Print a prompt and its answer token by token."""
    print(f"  {question.prompt}")
    body = _body(question) | {"stream": True}
    shown = ""
    reply: Reply | None = None
    url = f"{pair.decode.url}/generate"
    with httpx.stream("POST", url, json=body, timeout=60.0) as response:
        for line in response.iter_lines():
            payload = line.removeprefix("data: ")
            if not payload or payload == "[DONE]":
                continue
            try:
                reply = msgspec.json.decode(payload, type=Reply)
            except msgspec.ValidationError as exc:
                raise DemoFailed(f"/generate streamed {payload}") from exc
            print(reply.text[len(shown) :], end="", flush=True)
            shown = reply.text
    print()
    if reply is None:
        raise DemoFailed(f"no answer from {url}: status {response.status_code}")
    print(_timeline(Answered(question, reply)))


def ask_all(pair: Pair, question_count: int) -> list[Answered]:
    """Ask, print a line for each as it is answered."""
    questions = [
        make_question(1000 + index, FACT_COUNTS[index % len(FACT_COUNTS)])
        for index in range(question_count)
    ]
    answers: list[Answered] = []
    with httpx.Client(timeout=60.0) as client, ThreadPoolExecutor(CONCURRENT_COUNT) as pool:
        for answer in pool.map(lambda question: ask(client, pair, question), questions):
            answers.append(answer)
            print(_timeline(answer))
    return answers


def ask(client: httpx.Client, pair: Pair, question: Question) -> Answered:
    response = client.post(f"{pair.decode.url}/generate", json=_body(question))
    if response.status_code != 200:
        raise DemoFailed(f"/generate answered {response.status_code}: {response.text}")
    return Answered(question, msgspec.json.decode(response.content, type=Reply))


def _body(question: Question) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": 256}
    return {"text": question.prompt, "sampling_params": sampling}


def _timeline(answer: Answered) -> str:
    """One line: what was asked of which stage, and whether the answer is right."""
    meta = answer.reply.meta_info
    stages = meta.timeline
    mark = "right" if answer.is_right else f"WRONG: {answer.reply.text!r}"
    if stages is None:
        return f"  {meta.prompt_tokens:4} tokens | {mark}"
    transfer = stages.transfer
    speed = transfer.nbytes / transfer.wire_s / 1e9 if transfer.wire_s > 0 else 0.0
    decoded = max(0, meta.completion_tokens - 1)
    rate = decoded / stages.decode_s if stages.decode_s > 0 else 0.0
    queued_s = stages.reserve_s + transfer.queue_s
    return (
        f"  {meta.prompt_tokens:4} tokens | queued {1e3 * queued_s:5.1f}"
        f" | prefill {1e3 * transfer.prefill_s:5.1f}"
        f" | transfer {1e3 * transfer.transfer_s:4.1f} ms: {transfer.nbytes / 1e6:.2f} MB in"
        f" {transfer.run_count} runs, {speed:.1f} GB/s"
        f" | first token {1e3 * stages.ttft_s:6.1f} ms | {rate:4.0f} tokens/s | {mark}"
    )


if __name__ == "__main__":
    sys.exit(main())
