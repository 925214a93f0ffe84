"""Trees that are chosen while a text is decoded (`--speculation auto`) against every fixed choice.

    python benchmarks/controller.py --work FOLDER [--shapes granite-1b-a400m,olmoe-1b-7b] [--threads 2] [--json FILE]

On the bundled model, packed, with its trained draft: greedy texts. In real shapes the weights are random, so each tree's
acceptance length is the one that it had on the bundled model, and is replayed. Plain decoding, all fixed trees and the chosen
ones take turns, and begin each round with another one. ``auto`` knows from one text to the next what it has seen; what the
first round takes, where it knows nothing, is told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import edgexpert
from common import BUNDLED, about, packed_model, save
from edgexpert.cli.bench import PROMPTS
from edgexpert.core.stage import TokenTree
from edgexpert.kernels import native
from edgexpert.policy import policy_named
from edgexpert.runtime.engine import Engine, Tree
from edgexpert.runtime.replay import ReplayVerifier, recorded_tokens
from edgexpert.runtime.results import Generation
from edgexpert.speculation.controller import ARMS
from edgexpert.speculation.draft import TreeShape

FIXED = tuple(arm or TreeShape(0) for arm in ARMS)
POLICIES = ("exact", "edgexpert")
LIMIT = 1.03
PROMPT_TOKENS, NEW_TOKENS = 64, 192

Run = Callable[[Tree], Sequence[Generation]]
Lengths = dict[int, float]
"""Acceptance length of the tree with so many candidates."""


class ReplayByShape(ReplayVerifier):
    """Accepts what a tree of the drafted size accepts."""

    def __init__(self, text: Sequence[int], lengths: Lengths) -> None:
        super().__init__(text, 1.0)
        self._lengths = lengths

    def extend(self, tree: TokenTree) -> TokenTree:
        self._acceptance = self._lengths[max(size for size in self._lengths if size <= tree.candidates)]
        return super().extend(tree)


def told(engine: Engine) -> Run:
    """Texts of the model itself."""
    return lambda tree: [
        engine.generate(prompt, tree=tree, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True) for prompt in PROMPTS
    ]


def replayed(engine: Engine, lengths: Lengths) -> Run:
    """A recorded text."""
    text = recorded_tokens(engine, PROMPT_TOKENS + NEW_TOKENS)

    def run(tree: Tree) -> Sequence[Generation]:
        stream = engine.stream(text[:PROMPT_TOKENS], tree=tree, max_new_tokens=NEW_TOKENS, ignore_eos=True,
                               verifier=ReplayByShape(text[PROMPT_TOKENS:], lengths))
        for _ in stream:
            pass
        return [stream.generation]

    return run


def compared(run: Run, repetitions: int) -> dict[str, Any]:
    """Milliseconds a token of each fixed choice and of ``auto``, and how long ``auto`` takes against the best fixed one."""
    choices: list[Tree] = [*FIXED, "auto"]
    times: list[list[float]] = [[] for _ in choices]
    lengths, widths = [1.0] * len(choices), Counter[int]()
    for round_ in track(range(repetitions + 1), "decoding"):  # the first round warms up
        for turn in range(len(choices)):
            i = (turn + round_) % len(choices)
            generations = run(choices[i])
            seconds = sum(g.timing.total_s - g.timing.ttft_s for g in generations)
            times[i].append(1e3 * seconds / sum(g.new_tokens - 1 for g in generations))
            lengths[i] = sum(g.speculation.emitted for g in generations) / sum(g.speculation.stages for g in generations)
            if choices[i] == "auto":
                for generation in generations:
                    widths.update(generation.speculation.widths)
    runs = [own[1:] for own in times]
    *fixed, auto = map(median, runs)
    best = fixed.index(min(fixed))
    return {
        "fixed": [
            {"size": tree.size, "depth": tree.depth, "top_k": tree.top_k, "acceptance_length": length,
             "ms_per_token": ms, "runs": own}
            for tree, ms, length, own in zip(FIXED, fixed, lengths, runs, strict=False)
        ],
        "best": FIXED[best].size, "best_ms_per_token": fixed[best], "auto_ms_per_token": auto, "auto_runs": runs[-1],
        "first_auto_ms_per_token": times[-1][0], "auto_acceptance_length": lengths[-1], "widths": dict(sorted(widths.items())),
        "against_best": median(one / other for one, other in zip(runs[-1], runs[best], strict=True)),
    }


def main(
    work: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the models are made once.")],
    shapes: Annotated[str, typer.Option(metavar="A,B", help="Real shapes with replayed acceptance; none by default.")] = "",
    threads: int = 2,
    repetitions: int = 5,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write figures and machine here.")] = None,
) -> None:
    """Compare chosen trees with fixed ones."""
    native.set_threads(threads)
    rows = []
    lengths: dict[str, Lengths] = {}
    for name in (BUNDLED, *filter(None, shapes.split(","))):
        engine = edgexpert.load(str(packed_model(name, work)))
        for policy in POLICIES:
            engine.set_policy(policy_named(policy))
            found = compared(told(engine) if name == BUNDLED else replayed(engine, lengths[policy]), repetitions)
            lengths.setdefault(policy, {one["size"]: one["acceptance_length"] for one in found["fixed"]})
            rows.append({"model": name, "policy": policy, **found})
        del engine
    if json_file is not None:
        save(json_file, {"about": about(limit=LIMIT), "rows": rows})
    table = Table("model", "policy", "best fixed", "ms a token", "auto", "against the best", "limit", "plain")
    for row in rows:
        table.add_row(row["model"], row["policy"], str(row["best"]), f"{row['best_ms_per_token']:.2f}",
                      f"{row['auto_ms_per_token']:.2f}", f"{row['against_best']:.3f}", f"{LIMIT}",
                      f"{row['fixed'][0]['ms_per_token']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
