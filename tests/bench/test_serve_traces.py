"""Each format of a trace is read into the same rows, and a bad row is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serve.noise import block_tokens, own_tokens
from bench.serve.traces.read import FORMATS, read_trace
from bench.serve.traces.row import TraceRow, packed
from common.errors import ConfigError

MOONCAKE = '{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}\n'
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:48.1805900,10,5\n"
)
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ab-1,2.5,ChatGPT,472,18,490,Conversation log\n"
    "45.5,,3,GPT-4,20,30,50,API log\n"
)
SESSION = {
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 2.0, "type": "n", "in": 130, "out": 8, "hash_ids": [1, 2], "api_time": 3.5},
        {"t": 4.0, "type": "subagent", "requests": [{"t": 4.5, "in": 9, "out": 1}]},
        {"t": 9.0, "type": "s", "in": 200, "out": 2, "hash_ids": [1, 2, 3], "think_time": 1.25},
    ],
}


def written(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_mooncakes_rows_have_the_ids_of_their_blocks(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "a.jsonl", MOONCAKE))
    assert trace.rows == [TraceRow(1500.0, 700, 9, packed("", [4, 7]))]
    assert trace.block_size == 512


def test_azures_dates_become_times_apart(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "a.csv", AZURE)).rows
    assert [(row.input_length, row.output_length) for row in rows] == [(374, 44), (10, 5)]
    assert rows[1].timestamp - rows[0].timestamp == pytest.approx(1500, abs=0.01)


def test_a_date_with_a_zone_is_the_same_instant(tmp_path: Path) -> None:
    text = AZURE.replace("18:15:48.1805900", "20:15:48.1805900+02:00")
    rows = read_trace(written(tmp_path, "a.csv", text)).rows
    assert rows[1].timestamp - rows[0].timestamp == pytest.approx(1500, abs=0.01)


def test_burstgpts_rows_have_sessions_and_the_time_of_the_answer(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, "a.csv", BURSTGPT)).rows
    assert rows == [
        TraceRow(5000.0, 472, 18, session="ab-1", elapsed_s=2.5),
        TraceRow(45500.0, 20, 30, elapsed_s=3.0),
    ]


def test_burstgpts_first_release_has_no_sessions(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n"
    assert read_trace(written(tmp_path, "a.csv", text)).rows == [TraceRow(5000.0, 472, 18)]


def test_a_recorded_session_has_its_turns_and_its_subagents_beside_it(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "one.json", json.dumps(SESSION)))
    assert trace.block_size == 64
    assert trace.rows == [
        TraceRow(2000.0, 130, 8, packed("", [1, 2]), 1, "one", elapsed_s=3.5),
        TraceRow(4500.0, 9, 1, scope=1, session="one/1"),
        TraceRow(9000.0, 200, 2, packed("", [1, 2, 3]), 1, "one", think_s=1.25),
    ]


def test_local_ids_of_two_files_have_nothing_in_common_and_global_ones_do(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "c.json"):
        written(tmp_path, name, json.dumps(SESSION))
    assert {row.scope for row in read_trace(tmp_path).rows} == {1, 2, 3}
    assert {row.scope for row in read_trace(tmp_path, file_max=2).rows} == {1, 2}
    for name in ("a.json", "b.json", "c.json"):
        written(tmp_path, name, json.dumps(SESSION | {"hash_id_scope": "global"}))
    assert {row.scope for row in read_trace(tmp_path).rows} == {0}


def test_a_csv_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    text = "output_length,user,timestamp,input_length\n5,ann,20.5,7\n6,bob,10,8\n"
    rows = read_trace(written(tmp_path, "a.csv", text)).rows
    assert rows == [TraceRow(10.0, 8, 6), TraceRow(20.5, 7, 5)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mooncake", MOONCAKE),
        ("azure", AZURE),
        ("burstgpt", BURSTGPT),
        ("lengths", "timestamp,input_length,output_length\n1,2,3\n"),
        ("kv-cache-tester", json.dumps(SESSION)),
    ],
)
def test_a_named_format_is_read_from_any_file(tmp_path: Path, name: str, text: str) -> None:
    assert name in FORMATS
    assert read_trace(written(tmp_path, "trace.txt", text), name).rows


def azure_with(row: str) -> str:
    return AZURE + row + "\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"timestamp": 1, "input_length": 2}\n', "line 1: .*output_length"),
        (
            "a.jsonl",
            '\n{"timestamp": 1, "input_length": 0, "output_length": 1}\n',
            "line 2: input length 0: must be in 1..",
        ),
        ("a.jsonl", MOONCAKE + MOONCAKE.replace("4, 7", "4, -7"), "line 2: hash id -7: must be in"),
        ("a.jsonl", "not json\n", "line 1"),
        ("a.jsonl", "\n", "at least one request"),
        ("a.csv", "timestamp,input_length\n1,2\n", "line 1 'timestamp,input_length': must name"),
        ("a.csv", "", "line 1 '': must name"),
        ("a.csv", "timestamp,input_length,output_length\n1,x,3\n", "line 2: input_length 'x'"),
        ("a.csv", "timestamp,input_length,output_length\nnan,1,3\n", "line 2: timestamp nan"),
        ("a.csv", "timestamp,input_length,output_length\n1,2\n", "line 2: output_length None"),
        ("a.csv", azure_with("yesterday,1,2"), "line 4: TIMESTAMP 'yesterday': must be a date"),
        ("a.csv", azure_with("2023-11-16 18:15:49,1,0"), "line 4: output length 0: must be in 1"),
        ("a.csv", BURSTGPT.replace("2.5", "-2"), "line 2: elapsed time -2: must be in 0"),
        ("a.csv", BURSTGPT.replace("45.5", "late"), "line 3: Timestamp 'late': must be a number"),
        ("a.json", "[]", "a.json: .*object"),
        ("a.json", '{"requests": [{"t": 1, "in": 5}]}', "request 0: output length 0: must be in"),
        ("a.json", '{"requests": [{"in": 5}]}', "a.json: .*requests"),
        ("a.json", '{"requests": [], "block_size": 0}', "block_size 0: must be in 1"),
        ("a.txt", "", "must end with .jsonl, .csv or .json"),
    ],
)
def test_an_unusable_trace_is_refused_by_its_line(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_trace(written(tmp_path, name, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("a.csv", "a.json"):
        with pytest.raises(ConfigError, match=f"{name}.*can't be read: No such file"):
            read_trace(tmp_path / name)


def test_files_of_two_block_sizes_are_not_one_trace(tmp_path: Path) -> None:
    written(tmp_path, "a.json", json.dumps(SESSION))
    written(tmp_path, "b.json", json.dumps(SESSION | {"block_size": 16}))
    with pytest.raises(ConfigError, match=r"b\.json: block_size 16: other files have 64"):
        read_trace(tmp_path)


def test_the_same_id_is_always_the_same_tokens() -> None:
    ids, others = packed("", [5, 9, 5, 1]), packed("", [9])
    found = block_tokens(1, 3, ids, 8, (0, 32), 1000)
    assert found[:8] == found[16:24] and found[8:16] == block_tokens(1, 3, others, 8, (0, 8), 1000)
    assert found[:8] != found[8:16] != found[24:]
    assert found[5:19] == block_tokens(1, 3, ids, 8, (5, 19), 1000)
    assert found[:8] != block_tokens(1, 4, ids, 8, (0, 8), 1000)  # another scope
    assert found[:8] != block_tokens(2, 3, ids, 8, (0, 8), 1000)  # another seed


def test_a_text_of_ones_own_is_the_same_from_any_place_on() -> None:
    text = own_tokens(1, (2, 3), 0, 500, 7)
    assert set(text) == set(range(7))
    assert text[100:120] == own_tokens(1, (2, 3), 100, 120, 7)
    assert text != own_tokens(1, (2, 4), 0, 500, 7) and own_tokens(1, (2, 3), 9, 4, 7) == []
