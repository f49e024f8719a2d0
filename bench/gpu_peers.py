"""What the GPU check found beside what others reached, ratios only where the card is the same.

Reads the check's latest report; the section gpu makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.gpu import LOAD_FIGURES, OUT_PATH, name_of
from bench.gpu_report import CheckReport, read_check_report
from bench.peers import CARD, ONE_STREAM, PEERS, Peer
from bench.report import NotRun, Row


def run() -> list[Row | NotRun]:
    if not OUT_PATH.exists():
        return [NotRun("gpu_peers", "there is no report of the GPU check: python -m bench gpu")]
    return rows_of(read_check_report(OUT_PATH))


def rows_of(report: CheckReport, peers: Sequence[Peer] = PEERS) -> list[Row | NotRun]:
    """A row for every figure that both have, of sections in which nothing failed."""
    is_same_card = report.machine.card == CARD
    if not is_same_card:
        here = report.machine.card or "no card"
        print(f"  the others were measured on an {CARD}; this is {here}: no ratios")
    rows: list[Row | NotRun] = []
    for peer in peers:
        for figure, theirs in peer.figures.items():
            section, name, unit = place_of(peer.kind, figure)
            found = report.sections.get(section)
            ours = found.figures.get(f"{peer.kind}: {figure}") if found else None
            if found is None or found.failed or ours is None or isinstance(ours, str):
                continue
            ratio = ours / theirs if is_same_card else None
            told = f"{peer.name} ({CARD})"
            rows.append(Row(f"gpu_{name}_to_{peer.key}", ours, unit, told, theirs, ratio))
    if not rows:
        return [NotRun("gpu_peers", "the GPU check found nothing that others were measured by")]
    return rows


def place_of(kind: str, figure: str) -> tuple[str, str, str]:
    """(the check's section, a row's name, the unit) of a figure of one server or of a pair."""
    case, _, of_case = figure.rpartition(": ")
    if case:
        short, unit = LOAD_FIGURES[of_case]
        return f"load_{kind}", f"{name_of(case)}_{kind}_{short}", unit
    if figure == ONE_STREAM:
        return "pair", f"itl_1_stream_{kind}", "ms"
    return "pair", f"ttft_{figure.split()[2]}_{kind}", "ms"
