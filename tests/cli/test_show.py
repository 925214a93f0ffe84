"""Units."""

from __future__ import annotations

import pytest

from edgexpert.cli.show import readable_bytes, readable_seconds


@pytest.mark.parametrize(("count", "text"), [
    (None, "–"), (0, "0 B"), (999, "999 B"), (999.6, "1 KB"), (1234, "1.23 KB"), (999_400, "999 KB"), (999_600, "1 MB"),
    (2.5e9, "2.5 GB"), (5e15, "5e+03 TB"),
])
def test_bytes_have_three_digits_and_a_unit(count: float | None, text: str) -> None:
    assert readable_bytes(count) == text


def test_seconds_below_one_are_milliseconds() -> None:
    assert [readable_seconds(s) for s in (None, 0.0123, 1.5)] == ["–", "12.3 ms", "1.50 s"]
