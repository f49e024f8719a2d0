"""Keys of HTTP clients: what opens what, how a refusal looks, and that no key is ever shown."""

from __future__ import annotations

import warnings
from pathlib import Path

import httpx
import pytest

from common.config import shown_settings
from common.errors import ConfigError
from common.frontend.http.api_keys import ADMIN_PATHS, OPEN_PATHS, ApiKeys
from decode_server.config import parse_args
from tests.frontend.frontend_rig import Rig, decode_config, run_with_rig, write_model

KEY, OTHER, ADMIN = "sk-client-1", "sk-client-2", "sk-admin"


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("api_keys", "admin_keys", "path", "opened_by"),
    [
        ((), (), "/generate", {"", KEY, OTHER, ADMIN}),
        ((), (), "/flush_cache", {"", KEY, OTHER, ADMIN}),
        ((KEY, OTHER), (), "/generate", {KEY, OTHER}),
        ((KEY,), (), "/flush_cache", {KEY}),
        ((KEY,), (ADMIN,), "/generate", {KEY, ADMIN}),
        ((KEY,), (ADMIN,), "/flush_cache", {ADMIN}),
        ((KEY,), (ADMIN,), "/abort_request", {ADMIN}),
        ((), (ADMIN,), "/generate", {"", KEY, OTHER, ADMIN}),
        ((), (ADMIN,), "/abort_request", {ADMIN}),
        ((KEY,), (ADMIN,), "/health", {"", KEY, OTHER, ADMIN}),
        ((KEY,), (ADMIN,), "/metrics", {"", KEY, OTHER, ADMIN}),
        ((KEY,), (), "/metrics/", {KEY}),
        ((KEY,), (), "/healthy", {KEY}),
        ((KEY,), (ADMIN,), "GET /peers", {KEY, ADMIN}),
        ((KEY,), (ADMIN,), "POST /peers", {ADMIN}),
        ((KEY,), (ADMIN,), "DELETE /peers", {ADMIN}),
        ((), (ADMIN,), "DELETE /peers", {ADMIN}),
        ((KEY,), (), "POST /peers", {KEY}),
    ],
)
def test_what_a_key_opens(
    tmp_path: Path,
    api_keys: tuple[str, ...],
    admin_keys: tuple[str, ...],
    path: str,
    opened_by: set[str],
) -> None:
    method, _, path = path.rpartition(" ")
    config = decode_config(tmp_path, api_keys=api_keys, admin_api_keys=admin_keys)
    keys = ApiKeys(config)
    assert {
        shown for shown in ("", KEY, OTHER, ADMIN) if keys.allows(method, path, shown)
    } == opened_by


def test_every_route_but_the_open_ones_asks_for_a_key(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        with warnings.catch_warnings(action="ignore"):  # two methods of one route share a name
            paths = set(rig.app.openapi()["paths"])
        assert paths >= OPEN_PATHS | ADMIN_PATHS and len(paths) > len(OPEN_PATHS) + 5
        for path in [*sorted(paths), "/openapi.json", "/nothing"]:
            reply = await rig.http.get(path)
            assert (reply.status_code == 401) == (path not in OPEN_PATHS), path
        assert (await rig.http.get("/state", headers=bearing(KEY))).status_code == 200

    run_with_rig(tmp_path, story, api_keys=(KEY,))


def refused(reply: httpx.Response) -> str:
    assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert error["code"] == "invalid_api_key"
    return str(error["message"])


def test_a_refusal_has_openai_s_shape_and_does_not_repeat_the_key(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        wrong: list[dict[str, str]] = [
            bearing("sk-wrong"), bearing(""), {"Authorization": "sk-client-1"},
            {"Authorization": "Basic sk-client-1"}, {"Authorization": "Bearer"},
            bearing(KEY + "x"), bearing(KEY[:-1]), bearing(f"{KEY},{OTHER}"),
        ]  # fmt: skip
        for path in ("/generate", "/v1/models", "/server_info", "/abort_request"):
            for headers in wrong:
                message = refused(await rig.http.post(path, headers=headers, json={}))
                assert "sk-" not in message and path in message
            assert "none was shown" in refused(await rig.http.post(path, json={}))
        twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")]
        refused(await rig.http.get("/state", headers=twice))
        latin = await rig.http.get("/state", headers=[(b"Authorization", b"Bearer \xe9\xff")])
        refused(latin)
        for scheme in ("Bearer", "bearer", "BEARER"):
            reply = await rig.http.get("/state", headers={"Authorization": f"{scheme} {OTHER}"})
            assert reply.status_code == 200

    run_with_rig(tmp_path, story, api_keys=(KEY, OTHER))


def test_a_body_is_not_read_for_whoever_has_no_key(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        reply = await rig.http.post("/abort_request", content=b"x" * 200_000)
        assert reply.status_code == 401, "not the 413 that its size deserves"

    run_with_rig(tmp_path, story, api_keys=(KEY,))


def test_no_key_is_shown_to_anybody(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for path in ("/server_info", "/state", "/model_info", "/metrics"):
            reply = await rig.http.get(path, headers=bearing(ADMIN))
            assert reply.status_code == 200 and "sk-" not in reply.text
        info = (await rig.http.get("/server_info", headers=bearing(KEY))).json()
        assert (info["api_keys"], info["admin_api_keys"]) == ("2 set", "1 set")

    run_with_rig(tmp_path, story, api_keys=(KEY, OTHER), admin_api_keys=(ADMIN,))


# ---- where keys come from ------------------------------------------------------------------------


def settings_of(tmp_path: Path, *argv: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    model = write_model(tmp_path / "tiny")
    config = parse_args(["--model-path", str(model), "--prefill", "none", *argv])
    assert "sk-" not in str(shown_settings(config))
    return config.api_keys, config.admin_api_keys


def test_keys_come_from_flags_files_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text("# of the team\nsk-file-1\n\nsk-file-2\nsk-flag\n")
    monkeypatch.setenv("BATON_API_KEY", "sk-env")
    monkeypatch.setenv("BATON_ADMIN_API_KEY", "sk-root,sk-boss")
    keys = settings_of(tmp_path, "--api-key", "sk-flag,sk-more", "--api-key-file", str(file))
    assert keys[0] == ("sk-flag", "sk-more", "sk-file-1", "sk-file-2", "sk-env")
    assert keys[1] == ("sk-root", "sk-boss")


@pytest.mark.parametrize("value", ["", "sk a", "sk-a,", "sk-\u00e9", "x" * 513])
def test_a_key_that_can_be_none_is_refused_and_not_shown(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(tmp_path, f"--api-key={value}")
    assert str(caught.value).startswith("--api-key (not shown): must be 1..512 printable ASCII")


def test_a_key_file_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"--api-key-file .*keys: can't be read: No such file"):
        settings_of(tmp_path, "--api-key-file", str(file))
    file.touch(mode=0o600)
    with pytest.raises(ConfigError, match=r"keys: must have one key per line, and has none"):
        settings_of(tmp_path, "--admin-api-key-file", str(file))
    file.write_text("sk-good\nsk bad\n")
    with pytest.raises(ConfigError, match=r"keys: key 2 must be") as caught:
        settings_of(tmp_path, "--api-key-file", str(file))
    assert "sk" not in str(caught.value).replace(str(tmp_path), "")
    file.chmod(0o604)
    with pytest.raises(ConfigError, match=r"has mode 0604, others can read it"):
        settings_of(tmp_path, "--api-key-file", str(file))
