"""Every figure on a tiny setting: its files, its claims, and that they agree with one another."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")

from edgexpert.core.resources import MODELS
from edgexpert.reproduce.claims import claims, paper
from edgexpert.reproduce.figure import Figure
from edgexpert.reproduce.make import reproduce
from edgexpert.reproduce.registry import NAMES
from edgexpert.reproduce.report import cells, claim_rows
from edgexpert.reproduce.workbench import Settings
from edgexpert.simulator.device import built_in

GRANITE = "granite-1b-a400m"
TINY = Settings(stages=1, prompt=16, lengths=(16, 32), stories=1, story_characters=60, story_tokens=8, models=(GRANITE,),
                example=GRANITE)
Made = tuple[Path, dict[str, Figure]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:  # the fit takes seconds, and its result does not matter here
        patch.setattr("edgexpert.trace.synthesis.fit_sharpness", lambda acceptance: 2.0)
        return out, reproduce(("all",), out, TINY)


@pytest.fixture(scope="module")
def rows(made: Made) -> list[dict[str, str]]:
    with (made[0] / "claims.csv").open() as file:
        return list(csv.DictReader(file))


def read_csv(made: Made, name: str) -> list[dict[str, str]]:
    with (made[0] / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_its_files_with_the_same_numbers(made: Made, name: str) -> None:
    out, figures = made
    content = json.loads((out / f"{name}.json").read_text())
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (out / f"{name}.svg").read_text()
    printed = read_csv(made, name)
    assert len(printed) == len(content["rows"]) == len(figures[name].rows) > 0
    for line, row in zip(printed, figures[name].rows, strict=True):
        assert line == {key: str(value) for key, value in row.items()}


def test_no_partial_file_is_left(made: Made) -> None:
    assert {file.suffix for file in made[0].iterdir()} == {".png", ".svg", ".csv", ".json", ".md", ".html"}


def test_every_claim_has_one_row_with_label_difference_and_reason(rows: list[dict[str, str]]) -> None:
    assert sorted(row["claim"] for row in rows) == sorted(claims())
    for row in rows:
        assert row["trace"].startswith(("synthetic", "recorded", "none")) and row["why"]
        claim, ours = claims()[row["claim"]], float(row["ours"])
        assert float(row["difference"]) == pytest.approx(claim.difference(ours))
        assert row["verdict"] == claim.verdict(ours)


def test_the_report_shows_the_numbers_of_the_tables(made: Made) -> None:
    out, figures = made
    markdown, html = (out / "report.md").read_text(), (out / "report.html").read_text()
    for row in claim_rows(figures):
        assert "| " + " | ".join(cells(row)[:4]) + " |" in markdown
    assert html.count("data:image/png;base64,") == len(NAMES) and "src=\"http" not in html


def test_answers_are_computed_from_the_figures_own_numbers(made: Made, rows: list[dict[str, str]]) -> None:
    ours = {row["claim"]: float(row["ours"]) for row in rows}
    for figure, claim in (("fig12a", "latency"), ("fig13a", "energy")):
        saved = [100 * (1 - float(row["normalised"])) for row in read_csv(made, figure) if row["design"] == "EdgeXpert ALL"]
        assert (ours[f"{claim}_least"], ours[f"{claim}_most"]) == pytest.approx((min(saved), max(saved)))
    limits = [row for row in read_csv(made, "fig12c") if row["design"] == "EdgeXpert ALL"]
    assert ours["within_limits"] == sum(float(row["ttft_ms"]) < 450 and float(row["tpot_ms"]) < 50 for row in limits)


def test_a_design_that_only_changes_prefill_decodes_as_the_other(made: Made) -> None:
    tpot = {row["design"]: row["tpot_ms"] for row in read_csv(made, "fig12c")}
    assert tpot["EdgeXpert ALL"] == tpot["EdgeXpert ALL, max"]
    normalised = {row["design"]: float(row["normalised"]) for row in read_csv(made, "fig12a")}
    assert normalised["EdgeXpert ALL, max"] <= normalised["EdgeXpert ALL"]


def test_what_must_hold_exactly_follows_from_the_device_file(made: Made, rows: list[dict[str, str]]) -> None:
    ours = {row["claim"]: float(row["ours"]) for row in rows}
    components = read_csv(made, "table5")
    assert ours["area"] == pytest.approx(sum(float(row["area_mm2"]) for row in components)) == pytest.approx(9.31)
    assert ours["power"] == pytest.approx(sum(float(row["power_w"]) for row in components)) == pytest.approx(1.52, abs=0.001)
    assert ours["tops"] == pytest.approx(8 * 4 * 8 * 32 * 0.8e9 * 2 / 1e12)
    assert ours["tops_per_watt"] == pytest.approx(ours["tops"] / ours["power"])
    for share in ("area", "power"):
        assert sum(float(row[f"{share}_percent"]) for row in components) == pytest.approx(100)
        half_a_digit = 0.005 / ours[share] * 100  # of the areas and powers that the table prints
        for row in components:
            printed = float(row[f"paper_{share}_percent"])
            assert float(row[f"{share}_percent"]) == pytest.approx(printed, abs=half_a_digit + 0.05)


def test_figures_name_what_they_were_computed_from(made: Made) -> None:
    for figure in made[1].values():
        assert any(f"{kind}:" in figure.trace for kind in ("synthetic", "recorded", "none"))
    assert all("synthetic:" in made[1][name].trace for name in ("fig2b", "fig12a", "fig12b", "fig12c", "fig13a"))
    assert all("recorded:" in made[1][name].trace for name in ("fig4b", "fig11"))


def test_the_papers_tables_are_of_our_devices_and_models() -> None:
    assert set(paper()["table2"]) == set(built_in()) - {"baseline"}
    assert set(paper()["table3"]) == set(paper()["acceptance"]) == set(MODELS)
