"""What the page is made of: its files and their headers, and the one object that it asks for."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from common.config import Role
from common.frontend.page.files import DIRECTORY, FILES, PAGE_PATHS
from common.protocol.frontend import Traced
from common.request import RequestTrace, SamplingParams, TransferTrace
from tests.frontend.frontend_rig import Rig, run_with_rig
from tests.frontend.scripted_scheduler import PEER


def test_every_file_is_sent_as_what_it_is_and_nothing_else_may_run(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for path, content_type in (
            ("/", "text/html"),
            ("/static/page.css", "text/css"),
            ("/static/main.js", "text/javascript"),
            ("/static/icon.svg", "image/svg+xml"),
        ):
            reply = await rig.http.get(path)
            assert reply.status_code == 200 and reply.headers["content-type"].startswith(
                content_type
            )
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self';" in policy and "unsafe" not in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
        for path in (
            "/static/",
            "/static/page.html",
            "/static/../page.py",
            "/static/%2e%2e/page.py",
        ):
            assert (await rig.http.get(path)).status_code == 404, path

    run_with_rig(tmp_path, story)


def test_the_page_asks_for_nothing_but_its_own_files() -> None:
    named: set[str] = set()
    for name in FILES.values():
        text = (DIRECTORY / name).read_text()
        assert "://" not in text.replace("http://www.w3.org/", ""), f"{name} names another host"
        named |= {f"/static/{module}" for module in re.findall(r'from "\./(.+?)"', text)}
        named |= set(re.findall(r'(?:src|href)="(/static/.+?)"', text))
        assert not re.search(r"<script>|<style|\sstyle=|\son[a-z]+=", text), (
            f"{name} has inline code"
        )
    assert named == PAGE_PATHS - {"/"}
    assert set(FILES.values()) == {path.name for path in DIRECTORY.iterdir()}


async def generate(rig: Rig, prompt_length: int) -> None:
    sampling = SamplingParams(max_new_tokens=3, seed=0)
    with rig.context.submit([1] * prompt_length, sampling, rid="r") as handle:
        async for _ in handle:
            pass


def test_state_has_every_number_the_page_reads(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for length in (1, 2):
            await generate(rig, length)
        body = (await rig.http.get("/state")).json()
        assert body["page_groups"] == [
            {"name": "full", "total": 256, "free": 180, "cached": 20, "used": 50, "quarantined": 6,
             "page_nbytes": 4096}
        ]  # fmt: skip
        assert body["prefix_cache"]["token_count"] == 960
        newest, oldest = body["requests"]
        assert (newest["prompt_tokens"], oldest["prompt_tokens"]) == (2, 1)
        assert [span["name"] for span in newest["spans"]][1:4] == ["queue", "prefill", "transfer"]
        assert sum(span["duration_s"] for span in newest["spans"]) == pytest.approx(0.051)
        assert body["queues"] == rig.scheduler.queues
        assert body["layout"] == {"tp_size": 1, "pp_size": 1, "page_size": 16}
        (peer,) = body["peers"]
        assert (peer["state"], peer["gb_per_s"]) == ("connected", pytest.approx(1.0))
        assert body["handed_over_nbytes"] == 20_000_000
        assert "key" not in str(sorted(body))

    run_with_rig(tmp_path, story)


def test_percentiles_are_of_the_latest_requests_that_were_answered(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        for number in range(1, 101):
            transfer = TransferTrace(prefill_s=number / 2, nbytes=100 if number > 90 else 0)
            trace = RequestTrace(number, ttft_s=float(number), transfer=transfer)
            rig.context.scheduler.log.add(msgspec.structs.replace(trace, output_token_count=1))
        rig.context.scheduler.log.add(RequestTrace(101, status="timed_out", ttft_s=1e6))
        body = (await rig.http.get("/state")).json()
        at = {one["name"]: one for one in body["percentiles"]}
        ttft = at["ttft"]
        assert (ttft["count"], ttft["p50_s"], ttft["p90_s"], ttft["p99_s"]) == (100, 50, 90, 99)
        assert at["prefill"]["p99_s"] == 49.5
        assert at["transfer"]["count"] == 10, "prompts that were computed here handed nothing over"
        assert "inter_token" not in at

    run_with_rig(tmp_path, story)


def test_a_prefill_server_counts_what_it_handed_to_each_peer(tmp_path: Path) -> None:
    async def story(rig: Rig) -> None:
        transfer = TransferTrace(prefill_s=0.2, nbytes=3_000_000, wire_s=0.001)
        trace = RequestTrace(7, peer=PEER.label, transfer=transfer, output_token_count=1)
        rig.context.scheduler.handle(Traced(trace))
        body = (await rig.http.get("/state")).json()
        assert body["peers"][0]["gb_per_s"] == pytest.approx(3.0), "known by its name"
        assert "first_token" not in {one["name"] for one in body["percentiles"]}

    run_with_rig(tmp_path, story, role=Role.PREFILL, prefill=())


def test_state_says_when_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.frontend.requests.scrape.SCRAPE_TIMEOUT_S", 0.01)

    async def story(rig: Rig) -> None:
        rig.scheduler.is_silent = True
        body = (await rig.http.get("/state")).json()
        assert body["is_fresh"] is False and body["queues"] == rig.scheduler.queues

    run_with_rig(tmp_path, story)
