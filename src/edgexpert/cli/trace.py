"""`edgexpert trace`: record a run, or synthesise one of a model that cannot be run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from edgexpert.cli.options import Json, Options, shared_options
from edgexpert.cli.prompts import read_prompts
from edgexpert.cli.show import print_json, print_pairs, readable_bytes, readable_number
from edgexpert.core.errors import UserError
from edgexpert.core.output import checked_file


@shared_options()
def trace(
    options: Options,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The Parquet file to write.")],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Prompts to record: one a line, or JSON lines with "prompt" or "text".'),
    ] = None,
    channels: Annotated[
        str, typer.Option(help="Verify stages whose channel inputs are recorded: full, sampled (one in eight) or none.")
    ] = "full",
    synthesise: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Instead of recording: a random trace in the form of this model.")
    ] = None,
    stages: Annotated[int, typer.Option(help="Verify stages to synthesise.", min=1)] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens to synthesise.", min=1)] = 128,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Mean tokens of a synthesised stage. [default: the model's published one]", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
    json: Json = False,
) -> None:
    """Record what a run decides by, for replay under any policy."""
    if (prompts is None) == (synthesise is None):
        raise UserError("give either --prompts FILE to record a run, or --synthesise MODEL to draw one at random")
    checked_file(out, force=force)
    if prompts is not None:
        _record(options, read_prompts(prompts), out, channels, force)
    else:
        from edgexpert.trace.synthesis import synthesise_trace

        assert synthesise is not None
        with _progress("synthesising", stages) as advance:
            synthesise_trace(synthesise, out, stages, prompt_tokens, acceptance, options.seed, advance, force=force)
    facts = summarise(out)
    if json:
        print_json(facts)
    else:
        print_summary(facts)


def _record(options: Options, texts: list[str], out: Path, channels: str, force: bool) -> None:
    from edgexpert.trace.record import record_trace

    engine = options.load()
    with _progress("recording", len(texts)) as advance:
        params, tree = options.params(engine), options.fixed_tree
        record_trace(engine, texts, out, params, tree, channels, advance, force=force)  # type: ignore[arg-type]  # it checks


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def summarise(file: Path) -> dict[str, Any]:
    """What a trace holds, read back from it."""
    from edgexpert.trace.read import Trace

    trace = Trace(file)
    verify = emitted = prefill = loaded = 0
    for recorded in trace.stages():
        if recorded.stage.tree is None:
            prefill += 1
            continue
        verify += 1
        emitted += recorded.emitted
        loaded += sum(len(layer.exact.loaded) for layer in recorded.layers)
    return {
        "file": str(file), "bytes": file.stat().st_size, "model": trace.facts.model, "synthetic": trace.synthetic,
        "draft": trace.facts.draft, "policy": trace.facts.policy, "channels": trace.facts.channels, "seed": trace.facts.seed,
        "prefill_stages": prefill, "verify_stages": verify, "acceptance_length": emitted / verify if verify else None,
        "experts_per_layer_per_stage": loaded / (verify * len(trace.facts.layers)) if verify else None,
    }


def print_summary(facts: dict[str, Any]) -> None:
    """The summary as text."""
    origin = "synthetic: drawn at random in the form of" if facts["synthetic"] else "recorded from"
    print_pairs(facts["file"], {
        "origin": f"{origin} {facts['model']}",
        "size": readable_bytes(facts["bytes"]),
        "policy of the run": facts["policy"]["name"],
        "channel inputs": "drawn at replay" if facts["synthetic"] else facts["channels"],
        "stages": f"{facts['prefill_stages']} prefill, {facts['verify_stages']} verify",
        "acceptance length": readable_number(facts["acceptance_length"]),
        "experts a layer and verify stage": readable_number(facts["experts_per_layer_per_stage"]),
    })
