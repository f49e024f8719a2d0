"""The GPU check itself, on the CPU: it must see what it is there to see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu_report import CheckedSection, CheckReport, read_check_report
from bench.machine import describe_machine
from tests.gpu.check import note_end
from tests.gpu.model_shapes import LLAMA_8B
from tests.gpu.pair_section import first_difference, prompt_of
from tests.gpu.report import Report, Section
from tests.gpu.sizes_section import WAYS, time_size
from tests.gpu.transfer_section import (
    POISON,
    Ask,
    content_of,
    layout_of,
    transfer,
    words_of,
    wrong_pages,
)

LAYOUT = layout_of(1)
ASK = Ask(np.array([4, 2, 9]), np.array([3, 6, 1]))


def landed() -> torch.Tensor:
    """A target pool of 7 pages and scratch after a transfer that went well."""
    buffer = torch.full((8 * LAYOUT.groups[0].page_nbytes,), POISON, dtype=torch.uint8)
    rows = words_of(buffer, LAYOUT)
    rows[torch.from_numpy(ASK.target_pages)] = content_of(
        torch.from_numpy(ASK.source_pages), rows.shape[1]
    )
    return buffer


def test_pages_that_landed_are_right() -> None:
    assert wrong_pages(landed(), LAYOUT, ASK) == []


@pytest.mark.parametrize(
    ("page", "mistake"),
    [
        (3, lambda rows: rows[3].fill_(-1)),
        (6, lambda rows: rows[6, -1:].add_(1)),
        (1, lambda rows: rows[1].copy_(content_of(torch.tensor([8]), rows.shape[1])[0])),
        (3, lambda rows: rows[3].copy_(rows[3].roll(1))),
        (0, lambda rows: rows[0, :1].zero_()),
        (5, lambda rows: rows[5, 7:8].add_(1)),
    ],
)
def test_a_page_that_is_torn_swapped_or_not_asked_for_is_seen(page: int, mistake: object) -> None:
    buffer = landed()
    assert callable(mistake)
    mistake(words_of(buffer, LAYOUT))
    assert wrong_pages(buffer, LAYOUT, ASK) == [page]


def test_no_two_words_of_two_pages_are_alike() -> None:
    content = content_of(torch.arange(64), 512)
    assert len(content.unique()) == content.numel()


@pytest.mark.slow
def test_a_transfer_between_two_processes_is_found_right_on_the_cpu() -> None:
    section = Section("transfer")
    transfer(section, "pages", torch.device("cpu"), LAYOUT, page_count=64, spin_us=0)
    assert len(section.checks) == 2 and not section.has_failed, section.checks
    assert section.figures["pages: lanes"] == "posix"


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_a_transfer_between_two_ranks_is_found_right_on_the_cpu(way: str) -> None:
    section = Section("sizes")
    time_size(section, way, torch.device("cpu"), LAYOUT, 64, WAYS[way])
    assert section.checks == {f"{way}: every page arrives, no other changes": "ok"}
    assert section.figures[f"{way}: GB/s"] > 0


BEGUN = CheckReport("2026-01-01T00:00:00+00:00", "abc", describe_machine(), 0.5, "cpu", "tiny")


def test_an_error_in_a_section_fails_it_and_the_others_still_run(tmp_path: Path) -> None:
    report = Report(BEGUN, tmp_path / "report.json")
    with report.section("first"):
        raise ValueError("no such thing")
    with report.section("second") as second:
        second.check("fine", True)
        second.skip("more", "no device")
    assert report.has_failed
    found = read_check_report(tmp_path / "report.json").sections
    assert found["first"].checks == {"runs to its end": "ValueError: no such thing"}
    assert found["second"].checks == {"fine": "ok"}
    assert found["second"].skipped == {"more": "no device"}


def test_what_was_found_is_kept_when_the_process_ends_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    earlier = replace(BEGUN, sections={"earlier": CheckedSection(figures={"a": 1.5})})
    with pytest.raises(SystemExit), Report(earlier, path).section("cut off") as section:
        section.figure("b", 2)
        raise SystemExit(143)
    report = note_end(read_check_report(path), "cut off", 143)
    assert report.sections["earlier"].figures == {"a": 1.5}
    cut_off = report.sections["cut off"]
    assert (cut_off.figures, cut_off.has_ended) == ({"b": 2}, False)
    assert cut_off.failed == ["its process: ended with code 143"]
    assert not report.is_good


def test_a_process_that_found_nothing_has_failed() -> None:
    report = note_end(BEGUN, "crashed", -11)
    assert report.sections["crashed"].failed == ["its process: ended with code -11"]


def test_prompts_of_the_pair_section_share_no_prefix() -> None:
    prompts = [prompt_of(n, LLAMA_8B, s) for n in (1, 15, 300) for s in range(5)]
    assert len({prompt[0] for prompt in prompts}) == len(prompts)
    assert all(0 <= token < LLAMA_8B.vocab_size for prompt in prompts for token in prompt)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
