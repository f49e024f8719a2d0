"""schemathesis, as users run it, finds no failure in a real server.

What is an administrator's is asked without the key: /drain would end the search. The frontend's own
tests search those paths with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SETTINGS = Path(__file__).with_name("schemathesis.toml")
# Answers are short: a request has at most 40 tokens in all, and 3 s.
SMALL = ("--context-length", "40", "--request-timeout", "3", "--admin-api-key", "sk-unknown")


@pytest.mark.parametrize(
    ("example_count", "phases"),
    [
        (3, "fuzzing"),
        pytest.param(200, "fuzzing", marks=pytest.mark.soak),
        pytest.param(200, "coverage", marks=pytest.mark.soak),
    ],
)
def test_every_operation_answers_as_the_document_says(
    fleet: Fleet, example_count: int, phases: str
) -> None:
    server = fleet.nodes[0] if fleet.nodes else fleet.decode([], *SMALL).wait_ready()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(SETTINGS)),
            *("run", f"{server.url}/openapi.json", "--no-color", "--continue-on-failure"),
            *("--max-examples", str(example_count), "--phases", phases),
            "--generation-deterministic",
            *("--suppress-health-check", "all", "--request-timeout", "60"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=server.server.log_path.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.get("/health").status_code == 200
    server.wait_at_rest()
