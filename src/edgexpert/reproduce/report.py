"""The report: a row for each claim, and every figure with its numbers, as Markdown, HTML and JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from typing import Any

from edgexpert.reproduce.claims import with_unit
from edgexpert.reproduce.figure import Figure

COLUMNS = ("claim", "paper", "ours", "difference", "verdict", "trace", "why")

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:.85rem}
td,th{border:1px solid #ccc;padding:.3rem .5rem;vertical-align:top;text-align:left}
th{background:#f2f2f2}img{max-width:100%}.differs{color:#a33}.agrees{color:#27632a}"""

HOW = (
    "Paper: a statement of the paper. Ours: computed here. A figure agrees within 5 % of the paper's (energy of naive "
    "speculation 25 %, bandwidth 1 %), a bound when it holds. Synthetic traces are drawn at random in the form of the paper's "
    "models, which cannot be run here; recorded ones are runs of the small bundled model. What comes from either is no "
    "measurement of the paper's chip."
)


def claim_rows(figures: Mapping[str, Figure]) -> list[dict[str, Any]]:
    """A row for each claim, in the order of the figures; one that two figures answer comes once."""
    rows = [answer.row() for figure in figures.values() for answer in figure.answers]
    return list({row["claim"]: row for row in rows}.values())


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row's texts in the order of `COLUMNS`."""
    difference = row["difference"]
    sign = "+" if difference > 0 else ""
    return [
        f"{row['says']} ({row['where']})", row["paper"], with_unit(row["ours"], row["unit"]),
        "none" if difference == 0 else sign + with_unit(difference, row["unit"]), row["verdict"], row["trace"], row["why"],
    ]


def sections(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Claims, and those that contradict others of the paper."""
    parts = {"Claims": [row for row in rows if not row["contradiction"]],
             "Where the paper contradicts itself": [row for row in rows if row["contradiction"]]}
    return {title: found for title, found in parts.items() if found}


def markdown(figures: Mapping[str, Figure]) -> str:
    """The report with the images beside it."""
    lines = ["# The paper's figures, reproduced", "", HOW, ""]
    for title, rows in sections(claim_rows(figures)).items():
        lines += [f"## {title}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(cells(row)) for row in rows), ""]
    for name, figure in figures.items():
        lines += [f"## {figure.title}", "", f"![{figure.title}]({name}.png)", "", f"Trace: {figure.trace}.", "", figure.note, "",
                  f"Numbers: [{name}.csv]({name}.csv), [{name}.json]({name}.json).", ""]
    return "\n".join(lines)


def _row(texts: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def html(figures: Mapping[str, Figure], images: Mapping[str, bytes]) -> str:
    """The report in one file."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>EdgeXpert reproduced</title><style>{STYLE}</style>",
             f"<h1>The paper's figures, reproduced</h1><p>{escape(HOW)}</p>"]
    for title, rows in sections(claim_rows(figures)).items():
        head = "".join(f"<th>{name}" for name in COLUMNS)
        body = "".join(f'<tr class="{row["verdict"]}">' + "".join(f"<td>{escape(text)}" for text in cells(row)) for row in rows)
        parts.append(f"<h2>{title}</h2><table><tr>{head}{body}</table>")
    for name, figure in figures.items():
        image = base64.b64encode(images[name]).decode()
        parts.append(f'<h2 id="{name}">{escape(figure.title)}</h2><img alt="{escape(figure.title)}" '
                     f'src="data:image/png;base64,{image}"><p>Trace: {escape(figure.trace)}.</p><p>{escape(figure.note)}</p>')
        parts.append(f"<details><summary>Numbers</summary>{_numbers(figure)}</details>")
    return "\n".join(parts) + "</html>\n"


def _numbers(figure: Figure) -> str:
    head = "".join(f"<th>{escape(name)}" for name in figure.rows[0])
    body = "".join("<tr>" + "".join(f"<td>{f'{value:.4g}' if isinstance(value, float) else escape(str(value))}"
                                    for value in row.values()) for row in figure.rows)
    return f"<table><tr>{head}{body}</table>"
