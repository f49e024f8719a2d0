"""Which lines of a story's log concern a request, a transfer or everybody, and how they are shown.

Knows nothing of how stories are told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LINE_LENGTH_MAX = 240
# What goes on all the time and says nothing.
BACKGROUND = ("Heartbeat(", "WorkerBeat(", "Tick(")
# Long bytes of layouts, keys and digests.
BYTES = re.compile(r"b(?P<quote>['\"])(?:\\.|(?!(?P=quote)).){12,}(?P=quote)")


def concerned(problem: str) -> list[str]:
    """Options of a replay that show whom a problem is about."""
    request = re.search(r"request (\d+)", problem)
    transfer = re.search(r"transfer_id=(\d+)", problem)
    found = ["--request", request[1]] if request else []
    return ["--transfer", transfer[1]] if transfer else found


def of_request(log: list[str], request_id: int) -> Iterator[str]:
    """Accidents, and the lines that name a request or one of its transfers.

    Servers number their requests alike only at their clients' side: a transfer is known by its
    id, which is told in the same moment in which its request's pages are reserved.
    """
    words = [f"request_id={request_id},", f"request_id={request_id})"]
    prompt = ""
    for line in log:
        if is_accident(line):
            yield line
            continue
        if f"Submit(request_id={request_id}," in line:
            prompt = line.partition("token_ids=[")[2].partition("]")[0]
        if prompt and "TransferRequest(" in line and f"token_ids=[{prompt}" in line:
            words.append(line.partition("transfer_id=")[2].partition(",")[0])
        if any(word in line for word in words):
            yield line


def of_transfer(log: list[str], transfer_id: int) -> Iterator[str]:
    """Accidents, and the lines that name a transfer."""
    return (line for line in log if is_accident(line) or str(transfer_id) in line)


def of_all(log: list[str]) -> Iterator[str]:
    return (line for line in log if not any(word in line for word in BACKGROUND))


def is_accident(line: str) -> bool:
    return "(" not in line


def shown(line: str) -> str:
    """A line that fits: long bytes left out, the end cut."""
    line = BYTES.sub("b'...'", line)
    return line if len(line) <= LINE_LENGTH_MAX else f"{line[:LINE_LENGTH_MAX]} ..."
