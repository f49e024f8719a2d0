"""What operators are shown of a server's settings holds nothing that opens a door."""

from __future__ import annotations

import pytest

from common.config import Role, ServerConfig, shown_settings


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://me:sk-1@c:4318/v1/traces?key=sk-2#sk-3", "https://c:4318/v1/traces"),
        ("http://[::1]:4318/v1/traces", "http://[::1]:4318/v1/traces"),
        ("", ""),
    ],
)
def test_where_spans_go_is_shown_without_what_the_collector_is_told(
    endpoint: str, shown: str
) -> None:
    config = ServerConfig(
        role=Role.DECODE,
        model_path="/m",
        tokenizer_path="/m",
        served_model_name="m",
        port=1,
        otlp_traces_endpoint=endpoint,
    )
    assert shown_settings(config)["otlp_traces_endpoint"] == shown
    assert config.trace_endpoint == endpoint
