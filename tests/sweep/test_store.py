"""The log: whole lines only, one writer, nothing lost."""

import json

import pytest

from muon_lab.sweep.store import Log


def row(key, value=0.0):
    return {"key": key, "outcome": "ok", "relative": value, "seconds": 0.1}


def test_every_cut_of_the_file_is_a_prefix_of_its_rows(tmp_path):
    path = tmp_path / "cases.jsonl"
    with Log(path) as log:
        for key in "abc":
            log.append(row(key), {"torch": "2"})
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        with Log(path) as log:
            assert list(log.rows) == list("abc")[: len(log.rows)]
            log.append(row("z"), {"torch": "2"})
        with Log(path) as log:
            assert list(log.rows)[-1] == "z"
            assert log.provenance("z") == {"torch": "2"}


def test_a_later_row_of_the_same_case_counts_and_the_older_one_stays(tmp_path):
    path = tmp_path / "cases.jsonl"
    with Log(path) as log:
        log.append(row("a", 1.0), {"torch": "2.11"})
        log.append(row("a", 2.0), {"torch": "2.13"})
    with Log(path) as log:
        assert log.rows["a"]["relative"] == 2.0
        assert log.provenance("a") == {"torch": "2.13"}
    assert path.read_text().count("relative") == 2


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "cases.jsonl"
    whole = json.dumps(row("a"))
    for damaged in ('{"key": ', '{"key": "b"}', "[]", "null"):
        path.write_text(f"{whole}\n{damaged}\n{whole}\n")
        with pytest.raises(ValueError, match=r"line 2 of .* is damaged"):
            Log(path)


def test_a_second_writer_is_refused(tmp_path):
    with Log(tmp_path / "cases.jsonl"), pytest.raises(ValueError, match="another sweep is writing"):
        Log(tmp_path / "cases.jsonl")
