"""Units, and tables in pipes."""

from __future__ import annotations

import pytest

from edgexpert.cli.show import print_line, print_pairs, print_rich, readable_bytes, readable_seconds, table, three_digits


@pytest.mark.parametrize(("count", "text"), [
    (None, "–"), (0, "0 B"), (999, "999 B"), (999.6, "1 KB"), (1234, "1.23 KB"), (999_400, "999 KB"), (999_600, "1 MB"),
    (2.5e9, "2.5 GB"), (5e15, "5000 TB"),
])
def test_bytes_have_three_digits_and_a_unit(count: float | None, text: str) -> None:
    assert readable_bytes(count) == text


def test_figures_above_a_thousand_are_no_powers_of_ten() -> None:
    assert [three_digits(value) for value in (0.5, 702.4, 999.6, 1119.0)] == ["0.5", "702", "1000", "1119"]


def test_seconds_below_one_are_milliseconds() -> None:
    assert [readable_seconds(s) for s in (None, 0.0123, 1.5)] == ["–", "12.3 ms", "1.50 s"]


def test_lines_in_a_pipe_are_neither_cut_nor_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "word " * 60 + "end"
    rows = table("", "one", "two")
    rows.add_row(long, "1" * 60, "2" * 60)
    print_rich(rows)
    print_pairs("title", {"name": long})
    print_line(long)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert sum(long in line for line in lines) == 3
    assert "1" * 60 in lines[1] and lines[1].rstrip().endswith("2" * 60)
