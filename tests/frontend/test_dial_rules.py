"""Which prefill servers a request may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError, RequestError
from common.frontend.apis import sglang_api
from common.frontend.bodies.dial_rules import DialRules
from decode_server.config import parse_args
from tests.frontend.frontend_rig import BASE_PARTS, Rig, run_with_rig, write_model

RULES = ("10.1.0.0/16", "192.168.3.4", "fd00::/8", "*.prefill.svc", "GPU-7")
CONFIGURED = ("127.0.0.1:8998", "[::1]:8999")


@pytest.mark.parametrize(
    ("host", "port", "is_allowed"),
    [
        ("10.1.2.3", 1, True),
        ("10.2.0.1", 1, False),
        ("::ffff:10.1.2.3", 1, True),
        ("::ffff:10.2.0.1", 1, False),
        ("192.168.3.4", 1, True),
        ("192.168.3.5", 1, False),
        ("fd00::7", 1, True),
        ("[fd00::7]", 1, True),
        ("fe80::7", 1, False),
        ("a.prefill.svc", 1, True),
        ("A.Prefill.svc.", 1, True),
        ("prefill.svc", 1, False),
        ("a.prefill.svc.evil.com", 1, False),
        ("gpu-7", 1, True),
        ("gpu-70", 1, False),
        ("localhost", 8998, False),
        ("127.0.0.1", 8998, True),
        ("127.0.0.1", 8997, False),
        ("::1", 8999, True),
    ],
)
def test_what_may_be_dialled(host: str, port: int, is_allowed: bool) -> None:
    rules = DialRules(RULES, CONFIGURED)
    if is_allowed:
        assert rules.check(host, port).port == port
    else:
        with pytest.raises(RequestError, match="may not dial") as caught:
            rules.check(host, port)
        assert (caught.value.status, caught.value.field) == (403, "bootstrap_host")
    assert DialRules(("any",), ()).check(host, port).port == port


@pytest.mark.parametrize("host", ["a b", "http://a", "a:1", "x" * 300, "1.2.3", "*", "\0"])
def test_what_is_no_host_is_400_whatever_is_allowed(host: str) -> None:
    with pytest.raises(RequestError, match="bootstrap_host: host ") as caught:
        DialRules(("any",), ()).check(host, 1)
    assert caught.value.status == 400 and len(str(caught.value)) < 200


def test_a_request_that_names_another_server_is_not_passed_on(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        body = {"input_ids": [1], "bootstrap_room": 1, "bootstrap_host": "10.9.9.9"}
        reply = await rig.http.post("/generate", json=body)
        assert reply.status_code == 403
        assert "may not dial 10.9.9.9:8998" in reply.json()["error"]["message"]
        assert rig.scheduler.submits == []

    parts = (*BASE_PARTS, sglang_api.build_router)
    run_with_rig(tmp_path, story, parts=parts, bootstrap_allow=())


def parse(tmp_path: Path, value: str) -> tuple[str, ...]:
    model = str(write_model(tmp_path / "tiny"))
    argv = ["--model-path", model, "--prefill", "a:1", f"--bootstrap-allow={value}"]
    return parse_args(argv).bootstrap_allow


def test_the_flag_takes_hosts_patterns_and_networks(tmp_path: Path) -> None:
    assert parse(tmp_path, "10.0.0.0/8, *.svc,::1") == ("10.0.0.0/8", "*.svc", "::1")
    assert parse(tmp_path, "none") == ()
    assert parse(tmp_path, "any") == ("any",)


@pytest.mark.parametrize("value", ["", "a,,b", "http://a b", "10.0.0.0/99", "x/8"])
def test_a_rule_that_is_none_is_named(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="--bootstrap-allow"):
        parse(tmp_path, value)
