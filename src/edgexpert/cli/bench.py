"""`edgexpert bench`: policies side by side on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from edgexpert.cli.completion import complete_policies
from edgexpert.cli.files import told_output
from edgexpert.cli.measured import Measured
from edgexpert.cli.options import Json, Options, shared_options
from edgexpert.cli.plot import draw_comparison, require_matplotlib
from edgexpert.cli.prompts import read_prompts
from edgexpert.cli.show import NOTHING, print_json, print_line, print_rich, readable_bytes, readable_number, table
from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.runtime.engine import Engine
    from edgexpert.runtime.results import Generation
    from edgexpert.speculation.draft import TreeShape
    from edgexpert.speculation.sampling import SamplingParams

PROMPTS = (
    "Once upon a time, a little fox",
    "One sunny morning, Lily and her grandmother",
    "The old bear was hungry, so he",
    "There was once a king who had three sons.",
)
WARM_UP_TOKENS = 8


@shared_options(without=["policy"])
def bench(
    options: Options,
    policies: Annotated[
        str, typer.Option(metavar="A,B,C", help="Policies to compare.", autocompletion=complete_policies)
    ] = "exact,pruned,reuse,coalesced,edgexpert",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='One prompt a line, or JSON lines with "prompt" or "text". '
                                          "[default: four story openings]", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a bar chart into this .png, .svg or .pdf.", show_default=False)
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(metavar="L", show_default=False,
                     help="Replay: accept L tokens a stage of a recorded text, to time a model without a trained draft."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare policies on the same prompts."""
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise UserError("no policy is given; list some after --policies, with commas between them")
    texts = list(PROMPTS) if prompts is None else read_prompts(prompts)
    if plot is not None:
        require_matplotlib(plot)
    for name in names:
        options.policy_named(name)
    with told_output(plot) as drawing:
        engine = options.load()
        measured = measure(engine, options, options.params(engine), options.fixed_tree, names, texts, acceptance)
        if plot is not None and drawing is not None:
            draw_comparison(measured, drawing, format=plot.suffix.lower().removeprefix("."))
    if json:
        print_json({"model": engine.name, "draft": measured[0].generations[0].draft,
                    "policies": [row.to_json() for row in measured], "notes": measured[0].generations[0].notes})
    else:
        print_comparison(measured)
        for note in measured[0].generations[0].notes:
            print_line(f"note: {note}")


def measure(
    engine: Engine,
    options: Options,
    params: SamplingParams,
    shape: TreeShape,
    names: Sequence[str],
    prompts: Sequence[str],
    acceptance: float | None = None,
) -> list[Measured]:
    """Every policy on every prompt, after a short warm-up of each policy that does not count.

    Args:
        acceptance: replay with this acceptance length instead of generating; see `edgexpert.runtime.replay`.
    """
    from edgexpert.runtime.replay import recorded_tokens, replay

    def run(prompt: str, new_tokens: int) -> Generation:
        if acceptance is None:
            return engine.generate(prompt, replace(params, max_new_tokens=new_tokens), shape)
        return replay(engine, engine.encode(prompt), recorded_tokens(engine, new_tokens), acceptance, shape)

    measured = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(names) * len(prompts))
        for name in names:
            engine.set_policy(options.policy_named(name))
            run(prompts[0], min(WARM_UP_TOKENS, params.max_new_tokens))
            generations = []
            for prompt in prompts:
                generations.append(run(prompt, params.max_new_tokens))
                progress.advance(task)
            measured.append(Measured(name, generations))
    return measured


def print_comparison(measured: Sequence[Measured]) -> None:
    """A row a policy; what is saved is against the first."""
    first = measured[0].prefill_bytes + measured[0].decode_bytes
    rows = table("policy", "tokens/s", "acceptance length", "prefill", "decode", "total", "saved")
    for row in measured:
        total = row.prefill_bytes + row.decode_bytes
        saved = NOTHING if row is measured[0] else f"{100 * (1 - total / first):.1f} %"
        rows.add_row(row.policy, readable_number(row.tokens_per_second), readable_number(row.acceptance_length),
                     readable_bytes(row.prefill_bytes), readable_bytes(row.decode_bytes), readable_bytes(total), saved)
    print_rich(rows)
    count = len(measured[0].generations)
    print_line(f"prefill, decode and total are expert bytes per output token, over {count} prompt{'s' * (count != 1)}; "
               f"saved is against {measured[0].policy}")
