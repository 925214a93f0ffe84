"""How results look on a terminal: units, and the tables of a generation and of a comparison."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.runtime.results import Generation, Speculation

NOTHING = "–"
PIPE_WIDTH = 10_000


def three_digits(value: float) -> str:
    """A figure with three digits that count, and never as a power of ten."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def readable_bytes(count: float | None) -> str:
    """Decimal units, three significant digits: ``1.23 MB``."""
    if count is None:
        return NOTHING
    units = iter(("B", "KB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.5 and unit != "TB":
        count, unit = count / 1000, next(units)
    return f"{count:.0f} {unit}" if unit == "B" else f"{three_digits(count)} {unit}"


def readable_seconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def readable_number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def sentence(error: UserError) -> str:
    """An error as a sentence, in which Python's names are the options that a user of the command line gave."""
    text = re.sub(r"`([\w.]+)`", _option, str(error))
    return f"{text[0].upper()}{text[1:]}."


def _option(name: re.Match[str]) -> str:
    """``k_min`` is --k-min, and ``TreeShape.size`` is --tree-size."""
    return "--" + name[1].replace("TreeShape.", "tree_").replace("_", "-")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output, in ASCII whatever the terminal's encoding."""
    print(json.dumps(value))


def print_piece(piece: str) -> None:
    """A piece of text as it is: not wrapped, not coloured, at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def table(*columns: str) -> Table:
    """A plain table whose first column is text and whose others are figures."""
    result = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    return result


def print_pairs(title: str, pairs: Mapping[str, str]) -> None:
    """Names and values in two columns under a title."""
    rows = Table.grid(padding=(0, 1, 0, 2), pad_edge=True)
    for name, value in pairs.items():
        rows.add_row(name, Text(value))
    print_line(title)
    print_rich(rows)


def print_rich(content: Table | Text, err: bool = False) -> None:
    """As wide as the terminal; where the stream is none, lines are neither cut nor wrapped."""
    width = None if (sys.stderr if err else sys.stdout).isatty() else PIPE_WIDTH
    Console(highlight=False, width=width, stderr=err).print(content)


def print_line(line: str, err: bool = False) -> None:
    """A sentence, wrapped to the terminal, in which brackets and numbers mean nothing special."""
    print_rich(Text(line), err)


def print_summary(generation: Generation, given: Collection[str] = (), err: bool = False) -> None:
    """One line of figures, and a second one where there are notes."""
    print_line(summary(generation), err)
    notes = _notes(generation, given)
    if notes:
        print_line(f"note: {'; '.join(notes)}", err)


def summary(generation: Generation) -> str:
    """Speed, bytes beside those of plain decoding, and what was approximated, in one line."""
    timing, speculation = generation.timing, generation.speculation
    parts = [f"{generation.new_tokens} tokens"]
    if timing.tpot_s:
        parts[0] += f", {three_digits(1 / timing.tpot_s)} a second, the first after {readable_seconds(timing.ttft_s)}"
    if speculation.acceptance_length is not None and speculation.drafted:
        parts.append(f"{speculation.acceptance_length:.2f} tokens a stage")
    if generation.expert_bytes_per_token is not None:
        parts.append(f"{readable_bytes(generation.expert_bytes_per_token)} of experts read a token "
                     f"(counted; plain decoding reads {readable_bytes(generation.expert_bytes_plain)}: its top-k experts)")
    parts.append(_approximated(generation))
    if generation.finish == "interrupted":
        parts.append("interrupted")
    return "; ".join(parts)


def _approximated(generation: Generation) -> str:
    """The names alone; --json has the whole sentences."""
    names = [sentence.partition(":")[0] for sentence in generation.approximations]
    return "approximated: " + ", ".join(names) if names else "exact"


def _widths(speculation: Speculation) -> str:
    """``1 (62 %), 5 (38 %)``: the three that most stages had, and their share."""
    usual = sorted(speculation.widths.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{width} ({count / speculation.stages:.0%})" for width, count in usual).replace("%", " %") or NOTHING


def _notes(generation: Generation, given: Collection[str]) -> list[str]:
    """What the user should know, with the sampling that nobody asked for but the checkpoint."""
    params, usual = generation.sampling, type(generation.sampling)()
    unused = ("top_k", "top_p") if params.temperature == 0 else ()
    taken = [f"{field.name} {value}" for field in fields(params) if field.name not in (*given, *unused)
             and (value := getattr(params, field.name)) != getattr(usual, field.name)]
    return [*generation.notes, f"from the checkpoint's generation_config.json: {', '.join(taken)}"] if taken else generation.notes


def print_generation(generation: Generation, given: Collection[str] = (), err: bool = False) -> None:
    """The statistics of a generation beside plain decoding of the same model."""
    timing, speculation = generation.timing, generation.speculation
    new = generation.new_tokens
    plain_prefill = generation.expert_bytes_exact_prefill / max(1, new)
    rows = table("", "this run", "plain decoding")
    rows.add_row("prompt tokens", str(generation.prompt_tokens), "")
    if generation.prompt_tokens_cached:
        rows.add_row("prompt tokens from the cache", str(generation.prompt_tokens_cached), "")
    rows.add_row("new tokens", str(new), "")
    rows.add_row("time to first token", readable_seconds(timing.ttft_s), "")
    rows.add_row("time per output token", readable_seconds(timing.tpot_s), "")
    rows.add_row("tokens per second, prompt included", readable_number(new / timing.total_s if timing.total_s else None), "")
    rows.add_row(f"tokens of a stage, {speculation.mode}", _widths(speculation), "1")
    rows.add_row("acceptance length", readable_number(speculation.acceptance_length), "1.00")
    rows.add_row("expert bytes per output token, prefill",
                 readable_bytes(generation.prefill_expert_bytes_per_token), readable_bytes(plain_prefill))
    rows.add_row("expert bytes per output token, decode",
                 readable_bytes(generation.expert_bytes_per_token), readable_bytes(generation.expert_bytes_plain))
    everything = sum(generation.traffic.decode.values()) / speculation.emitted if speculation.emitted else None
    rows.add_row("all bytes per output token, decode", readable_bytes(everything), "")
    print_rich(rows, err)
    print_line(_approximated(generation), err)
    for note in _notes(generation, given):
        print_line(f"note: {note}", err)
    if generation.finish == "interrupted":
        print_line("note: interrupted; the figures are those of the text so far", err)
