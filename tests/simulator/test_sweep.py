"""Many runs at once, and what becomes of their results."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from edgexpert.core.errors import UserError
from edgexpert.simulator.device import load_device
from edgexpert.simulator.sweep import Case, result_row, run_cases, write_rows
from tests.simulator.workloads import MODEL, text


def cases() -> list[Case]:
    return [Case("text", True, policy, load_device(device), MODEL, partial(text, policy), reuse=policy == "edgexpert")
            for policy, device in (("exact", "edgexpert"), ("exact", "smolpu"), ("edgexpert", "edgexpert"))]


def test_processes_give_the_same_results_in_the_same_order() -> None:
    arrived: list[int] = []
    alone = [result.to_json() for result in run_cases(cases())]
    together = [result.to_json() for result in run_cases(cases(), jobs=2, advance=lambda: arrived.append(1))]
    assert together == alone
    assert len(arrived) == 3


def test_a_case_that_cannot_run_is_refused_with_a_sentence() -> None:
    broken = Case("text", True, "edgexpert", load_device("smolpu"), MODEL, partial(text, "edgexpert"), reuse=True)
    with pytest.raises(UserError, match="no unit for prompt-wise expert reuse"):
        run_cases([broken])


def test_ray_gives_the_same_results() -> None:
    pytest.importorskip("ray")
    alone = [result.to_json() for result in run_cases(cases())]
    assert [result.to_json() for result in run_cases(cases(), ray="local")] == alone


def test_results_become_a_parquet_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    results = run_cases(cases())
    write_rows([result_row(case, result) for case, result in zip(cases(), results, strict=True)], tmp_path / "r.parquet")
    rows = parquet.read_table(tmp_path / "r.parquet").to_pylist()
    assert [(row["device"], row["policy"], row["synthetic"]) for row in rows] == [
        ("EdgeXpert", "exact", True), ("SMoLPU", "exact", True), ("EdgeXpert", "edgexpert", True)]
    for row, result in zip(rows, results, strict=True):
        assert row["tpot_s"] == result.tpot
        parts = [row[f"decode_{group}_{kind}_joules"] for group in ("attention", "moe", "draft", "other")
                 for kind in ("dram", "sram", "logic")]
        assert sum(parts) == pytest.approx(row["decode_joules"])
    assert list(tmp_path.iterdir()) == [tmp_path / "r.parquet"]
