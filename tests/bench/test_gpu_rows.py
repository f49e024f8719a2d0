"""What the GPU section makes of the GPU check's figures, whose names the check itself gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import __main__ as bench
from bench import gpu, gpu_peers, gpu_records
from bench.gpu_report import CheckedSection, CheckReport, join_check_reports, write_check_report
from bench.machine import Machine, card_of
from bench.peers import CARD, PEERS
from bench.record import UnreadableRecord, read_record, result_path
from bench.report import NotRun, Row
from bench.serve.outcome import Outcome, Run
from bench.serve.summary import summarize
from bench.serve.workload import Ask
from tests.gpu.load_section import tell_case
from tests.gpu.model_shapes import LLAMA_8B
from tests.gpu.pair_section import measure
from tests.gpu.report import Section
from tests.gpu.servers import Running

MACHINE = Machine("a CPU", 16, 128.0, "3.12", "2.11", "1.21", CARD, "580.1", "0.6.18")
SECONDS_A_TOKEN = 0.005


class PacedServer(Running):
    """Answers in no time and tells times of its own: the first token after so many seconds."""

    def __init__(self, first_s: float) -> None:
        super().__init__([])
        self.first_s = first_s

    def stream_times(self, prompt: list[int], token_count: int) -> list[float]:
        return [self.first_s + 0.004 * index for index in range(token_count)]


def paced_load(count: int, output_count: int) -> Run:
    """All at once, a token every 5 ms."""
    outcomes = [
        Outcome(
            Ask(index, 0.0, (1, 2), output_count),
            due_s=0.0,
            ended_s=SECONDS_A_TOKEN * output_count,
            arrivals=[(SECONDS_A_TOKEN * n, n) for n in range(1, output_count + 1)],
            output_count=output_count,
        )
        for index in range(count)
    ]
    return Run(outcomes, SECONDS_A_TOKEN * output_count, [0.0])


def report_of(*sections: Section, machine: Machine = MACHINE) -> CheckReport:
    return CheckReport(
        "2026-01-02T00:00:00+00:00",
        "abc",
        machine,
        0.5,
        "cuda",
        "llama",
        {section.name: replace(section.as_checked(), has_ended=True) for section in sections},
    )


@pytest.fixture(scope="module")
def whole() -> CheckReport:
    """Every figure that sections name by a case or a length, as the sections themselves name it;
    those of other sections by hand."""
    pair = Section("pair")
    measure(pair, "single", PacedServer(0.010), LLAMA_8B)
    measure(pair, "pair", PacedServer(0.0145), LLAMA_8B)
    loads = [Section("load_single"), Section("load_pair")]
    for section, kind in zip(loads, ("single", "pair"), strict=True):
        for case in LLAMA_8B.loads:
            run = paced_load(case.request_count, case.output_length)
            summary = summarize(run, (50.0, 99.0), {})
            tell_case(section, f"{kind}: {case}", case, summary)
    sizes, transfer, engine = Section("sizes"), Section("transfer"), Section("engine")
    for mib in (256, 1024, 4096):
        sizes.figure(f"{mib} MiB direct: GB/s", 300.0)
        sizes.figure(f"{mib} MiB staged: GB/s", 400.0)
    transfer.figure("2048 KiB pages: GB/s", 243.0)
    engine.figure("decode attention, of copy", 0.9)
    engine.figure("prefill 8192: of matmul", 0.5)
    return report_of(pair, *loads, sizes, transfer, engine)


def test_every_wanted_figure_is_one_that_the_check_gives(whole: CheckReport) -> None:
    results = gpu.results_of(whole)
    assert [result.name for result in results] == [one.name for one in gpu.WANTED]
    assert all(isinstance(result, Row) for result in results)
    assert len({result.name for result in results}) == len(results)


def test_figures_become_rows_with_their_targets(whole: CheckReport) -> None:
    rows = {row.name: row for row in gpu.results_of(whole) if isinstance(row, Row)}
    told = {name: (round(row.value, 3), row.is_met) for name, row in rows.items() if row.target}
    assert told == {
        "gpu_transfer_1GiB": (243.0, False),
        **{f"gpu_ttft_{length}": (14.5, True) for length in (128, 2048, 8192)},
        **{f"gpu_ttft_{length}_added": (4.5, length == 8192) for length in (128, 2048, 8192)},
        "gpu_itl_1_stream": (4.0, True),
        "gpu_512_256x32_pair_itl_p50": (5.0, True),
        "gpu_512_256x128_pair_itl_p50": (5.0, True),
        "gpu_4096_256x32_pair_itl_p99": (5.0, True),
        # All requests of a case at once, in 5 ms a token.
        "gpu_512_256x128_single_rate": (512 / SECONDS_A_TOKEN, True),
        "gpu_512_256x128_pair_rate": (512 / SECONDS_A_TOKEN, True),
        "gpu_4096_256x32_pair_rate": (96 / SECONDS_A_TOKEN, True),
        "gpu_decode_attention": (0.9, True),
        "gpu_prefill": (0.5, False),
    }
    assert rows["gpu_transfer_4096MiB_staged"].value == 400.0


def test_a_section_that_failed_has_no_rows_and_the_others_have_theirs(whole: CheckReport) -> None:
    """One request of the long case never ends, as a peer's did."""
    case = LLAMA_8B.loads[-1]
    run = paced_load(case.request_count, case.output_length)
    run.outcomes[-1].error_kind, run.outcomes[-1].error = "timeout", "no end within 90 s"
    section = Section("load_pair")
    tell_case(section, f"pair: {case}", case, summarize(run, (50.0, 99.0), {}))
    results = {
        result.name: result
        for result in gpu.results_of(join_check_reports([whole, report_of(section)]))
    }
    missing = results["gpu_4096_256x32_pair_rate"]
    assert isinstance(missing, NotRun) and missing.target == "at least 1190 tokens/s"
    assert missing.reason == (
        "section load_pair: pair: 4096/256 x 32: all finished: 95 of 96 answered: "
        "1 timeout (no end within 90 s)"
    )
    assert isinstance(results["gpu_4096_256x32_single_rate"], Row)


def test_a_section_that_was_ended_has_the_rows_it_came_to(whole: CheckReport) -> None:
    cut = {"2048 KiB pages: GB/s": 1.0}
    sections = {"transfer": CheckedSection(figures=cut), "engine": CheckedSection()}
    results = gpu.results_of(replace(whole, sections=sections))
    told = {one.name: one.reason for one in results if isinstance(one, NotRun)}
    assert [row.name for row in results if isinstance(row, Row)] == ["gpu_transfer_1GiB"]
    assert told["gpu_prefill"] == "section engine: ended before it"
    assert told["gpu_itl_1_stream"] == "section pair: was not asked for"


def test_a_size_that_no_memory_was_there_for_says_so(whole: CheckReport) -> None:
    skipped = {"4096 MiB direct": "needs 9000 MiB, 8000 MiB are free"}
    section = CheckedSection(skipped=skipped, has_ended=True)
    results = gpu.results_of(replace(whole, sections={"sizes": section}))
    told = {one.name: one.reason for one in results if isinstance(one, NotRun)}
    assert told["gpu_transfer_4096MiB_direct"] == (
        "section sizes: needs 9000 MiB, 8000 MiB are free"
    )


# Others' figures ----------------------------------------------------------------------------------


def test_every_figure_of_others_is_one_that_the_check_gives(whole: CheckReport) -> None:
    rows = gpu_peers.rows_of(whole)
    assert len(rows) == sum(len(peer.figures) for peer in PEERS)
    assert len({row.name for row in rows}) == len(rows)


def test_a_ratio_needs_the_same_card(
    whole: CheckReport, capsys: pytest.CaptureFixture[str]
) -> None:
    for card, ratio in ((CARD, 14.5 / 33.9), ("NVIDIA H100 80GB HBM3", None)):
        report = replace(whole, machine=replace(MACHINE, card=card))
        rows = {row.name: row for row in gpu_peers.rows_of(report) if isinstance(row, Row)}
        row = rows["gpu_ttft_128_pair_to_vllm_tuned"]
        assert (row.value, row.reference_value, row.ratio) == (14.5, 33.9, ratio)
        assert row.reference == "vLLM 0.24.0 + NIXL 1.5.1 pair, tuned (NVIDIA H200)"
    assert "this is NVIDIA H100 80GB HBM3: no ratios" in capsys.readouterr().out


def test_single_servers_are_held_against_single_servers(whole: CheckReport) -> None:
    rows = {row.name: row for row in gpu_peers.rows_of(whole) if isinstance(row, Row)}
    assert rows["gpu_ttft_128_single_to_sglang"].value == 10.0
    assert rows["gpu_ttft_128_pair_to_sglang"].value == 14.5
    assert rows["gpu_512_256x128_single_rate_to_vllm"].reference_value == 8652


# Where reports come from --------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_every_target_says_so() -> None:
    results = gpu.run()
    assert len(results) == len(gpu.WANTED)
    for result in results:
        assert isinstance(result, NotRun) and result.reason == "torch sees no CUDA device"


def test_reports_of_two_kinds_of_machine_are_not_joined(whole: CheckReport) -> None:
    for other in (
        replace(whole, commit="def"),
        replace(whole, machine=replace(MACHINE, card="x")),
        replace(whole, machine=replace(MACHINE, torch="2.12")),
    ):
        with pytest.raises(UnreadableRecord, match="must be of one kind of machine"):
            join_check_reports([whole, other])


def test_reports_of_two_machines_of_a_kind_tell_both_drivers(whole: CheckReport) -> None:
    machine = replace(MACHINE, driver="580.2", memory_gib=127.9)
    joined = join_check_reports([whole, replace(whole, machine=machine), whole])
    assert joined.machine == replace(MACHINE, driver="580.1 and 580.2")


@pytest.mark.parametrize("rehearsal", [{"device": "cpu"}, {"shape": "tiny"}])
def test_a_rehearsal_is_no_measurement(whole: CheckReport, rehearsal: dict[str, str]) -> None:
    with pytest.raises(UnreadableRecord, match="is a rehearsal: --device"):
        join_check_reports([whole, replace(whole, **rehearsal)])


def test_a_check_of_another_machine_is_kept_with_its_own_date_and_card(
    whole: CheckReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "JSON_PATH", tmp_path / "out" / "report.json")
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    for module in (gpu_records, gpu_peers):
        monkeypatch.setattr(module, "OUT_PATH", tmp_path / "out" / "gpu.json")
    names = sorted(whole.sections)
    files = []
    for index, part in enumerate((names[:2], names[2:])):
        files.append(tmp_path / f"{index}.json")
        sections = {name: whole.sections[name] for name in part}
        write_check_report(files[-1], replace(whole, sections=sections))
    flags = [text for path in files for text in ("--gpu-report", str(path))]
    assert bench.main([*flags, "--record"]) == 0
    (kept,) = (tmp_path / "results").iterdir()
    assert kept.name == "2026-01-02-nvidia-h200-abc.json"
    sections_kept = read_record(kept).sections
    assert list(sections_kept) == ["gpu", "gpu_peers"]
    assert sections_kept == read_record(tmp_path / "out" / "report.json").sections
    assert sections_kept["gpu"].machine == MACHINE
    assert sections_kept["gpu"].rows == gpu.results_of(whole)
    assert "no ratios" not in (page := (tmp_path / "out" / "report.html").read_text())
    assert "NVIDIA H200, driver 580.1, FlashInfer 0.6.18; a CPU, 16 cores" in page


def test_a_file_that_is_no_report_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert bench.main(["--gpu-report", str(tmp_path / "x.json")]) == 2
    assert "x.json" in capsys.readouterr().out


def test_a_run_is_kept_by_date_machine_and_commit(whole: CheckReport, tmp_path: Path) -> None:
    section = gpu_records.section_of(whole, [])
    on_cpu = replace(section, machine=replace(MACHINE, card=""), commit="abc+")
    assert result_path(tmp_path, on_cpu).name == "2026-01-02-a-cpu-16-cores-abc-changed.json"
    nowhere = replace(section, commit=None)
    assert result_path(tmp_path, nowhere).name == "2026-01-02-nvidia-h200-unknown.json"


def test_the_first_card_is_told_with_its_driver() -> None:
    assert card_of("NVIDIA H200, 580.159.03\nNVIDIA H200, 580.159.03\n") == (CARD, "580.159.03")
    assert card_of("") == ("", "")
