"""`python -m common.protocol.reference`: every message and its fields as a Markdown document.

Prints `docs/MESSAGES.md`: docstrings, types and defaults of the structs themselves.
"""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from types import ModuleType
from typing import get_args

import msgspec

from common import request
from common.protocol import descriptor, frontend, peer, staging, worker, worker_values
from common.protocol.bounds import RANK_COUNT_MAX
from common.protocol.layout_bounds import PAGE_NBYTES_MAX
from common.request_bounds import TOKEN_COUNT_MAX

Message = type[msgspec.Struct]

# Title, the module that documents the messages, and their senders.
SECTIONS: tuple[tuple[str, ModuleType, dict[str, tuple[Message, ...]]], ...] = (
    (
        "Between a decode server and a prefill server",
        peer,
        {
            "From the decode server": get_args(peer.DecodeToPrefill),
            "From the prefill server": get_args(peer.PrefillToDecode),
        },
    ),
    ("Between ranks", staging, {"Either way": get_args(staging.StagingMessage)}),
    (
        "Between frontend and scheduler",
        frontend,
        {
            "To the scheduler": get_args(frontend.FrontendToScheduler),
            "To the frontend": get_args(frontend.SchedulerToFrontend),
        },
    ),
    (
        "Between scheduler and worker",
        worker,
        {
            "To a worker": get_args(worker.SchedulerToWorker),
            "To the scheduler": get_args(worker.WorkerToScheduler),
        },
    ),
)
# Modules of the values in messages; values that a message names are shown.
VALUES = (request, descriptor, frontend, worker, worker_values)
HEAD = f"""\
# Messages

Printed by `python -m common.protocol.reference` from the structs in `common/protocol`; a test
compares.

A message is a msgpack map: its class name under `type`, then its fields by name. A field that has
its default is left out. Every number and length has a bound (`common/protocol/bounds.py`), for
example {TOKEN_COUNT_MAX} tokens of a request, {RANK_COUNT_MAX} ranks of a server and
{PAGE_NBYTES_MAX} bytes of a page; a layout beyond these bounds is refused.

Messages between servers have a version, now {peer.PROTOCOL_VERSION}; the oldest that is understood
is {peer.PROTOCOL_VERSION_MIN}. Those inside one server have none: its processes are of one release.
"""


def reference() -> str:
    """The whole document."""
    parts = [HEAD]
    shown: list[Message] = []
    for title, module, groups in SECTIONS:
        parts.append(f"## {title}\n\n{_text(module)}\n")
        for direction, messages in groups.items():
            fresh = [message for message in messages if message not in shown]
            parts += [f"### {direction}\n"] if fresh else []
            parts += [_section(message) for message in fresh]
            shown += fresh
            again = [f"`{message.__name__}`" for message in messages if message not in fresh]
            parts += [f"And {', '.join(again)}, as above.\n"] if again else []
    values = _named_values(shown)
    parts.append("## Values inside\n")
    parts += [_section(value) for value in values]
    return "\n".join(parts)


def _named_values(messages: list[Message]) -> list[Message]:
    """Structs that fields of messages hold, and fields of those, each once."""
    known = {
        name: value
        for module in VALUES
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    found: list[Message] = []
    waiting = list(messages)
    while waiting:
        words = " ".join(_types(waiting.pop(0)).values())
        names = words.replace("[", " ").replace("]", " ").replace(",", " ").split()
        for name in dict.fromkeys(names):
            value = known.get(name)
            if value is not None and value not in messages and value not in found:
                found.append(value)
                waiting.append(value)
    return found


def _section(message: Message) -> str:
    lines = [f"#### {message.__name__}\n"]
    if message.__doc__:
        lines.append(f"{_text(message)}\n")
    types = _types(message)
    if types:
        lines += ["| field | type | default |", "|---|---|---|"]
        for field in msgspec.structs.fields(message):
            shown_type = types[field.name].replace("|", "\\|")
            lines.append(f"| `{field.name}` | `{shown_type}` | {_default(field)} |")
        lines.append("")
    return "\n".join(lines)


def _types(message: Message) -> dict[str, str]:
    """The annotations as they are written."""
    return {name: str(written) for name, written in message.__annotations__.items()}


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()}`"
    value: object = field.default
    if value is msgspec.NODEFAULT:
        return "required"
    if isinstance(value, msgspec.Struct):
        return f"`{type(value).__name__}()`"
    return f"`{str(value)!r}`" if isinstance(value, Enum) else f"`{value!r}`"


def _text(thing: ModuleType | Message) -> str:
    """A docstring; its indented drawings are code in Markdown as well."""
    return inspect.cleandoc(thing.__doc__ or "")


def main() -> int:
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
