"""Speculative decoding on packed weights in real shapes, drafting included, against our own plain decoding.

    python benchmarks/speculation.py --work FOLDER [--shapes granite-1b-a400m,olmoe-1b-7b] [--threads 2] [--json FILE]

FOLDER is that of llama_cpp.py; models that are not there are made. Their weights are random, so each tree's acceptance length is
measured on the bundled model with its trained draft first, both at 4 bits, and then replayed (`edgexpert.runtime.replay`).
Plain decoding and all trees take turns. ``bytes`` is what a token reads against plain decoding, everything counted: where it is
not below 1, no kernel could make that tree pay.
"""

from __future__ import annotations

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
from edgexpert.cli.measured import Measured
from edgexpert.kernels import native
from edgexpert.policy import policy_named
from edgexpert.runtime.engine import Engine
from edgexpert.runtime.replay import recorded_tokens, replay
from edgexpert.runtime.results import Generation
from edgexpert.speculation.draft import TreeShape

TREES = tuple(TreeShape(*sizes) for sizes in ((2, 2, 1), (3, 3, 1), (4, 4, 1), (8, 4, 4), (16, 6, 4), (64, 6, 10)))
POLICIES = ("exact", "edgexpert")
TARGET = 1.6
PROMPT_TOKENS, NEW_TOKENS = 64, 64


def acceptance_lengths(work: Path) -> dict[tuple[TreeShape, str], float]:
    """Of each tree and policy on the bundled model, packed as the others are; 128 greedy tokens of each of four prompts."""
    engine, lengths = edgexpert.load(str(packed_model(BUNDLED, work))), {}
    for policy in track(POLICIES, "acceptance"):
        engine.set_policy(policy_named(policy))
        for tree in TREES:
            generations = [engine.generate(prompt, tree=tree, max_new_tokens=128) for prompt in PROMPTS]
            lengths[tree, policy] = Measured(policy, generations).acceptance_length
    return lengths


def bytes_per_token(result: Generation) -> float:
    return sum(result.traffic.decode.values()) / (result.new_tokens - 1)  # the first one is prefill's


def measured(engine: Engine, lengths: dict[tuple[TreeShape, str], float], repetitions: int) -> list[dict[str, Any]]:
    """A row a tree and policy; the first is plain decoding."""
    cases = [(TreeShape(0), "exact", 1.0), *((tree, policy, length) for (tree, policy), length in lengths.items())]
    text = recorded_tokens(engine, PROMPT_TOKENS + NEW_TOKENS)
    draft, results = engine.draft, [[] for _ in cases]
    for _ in track(range(repetitions + 1), "decoding"):
        for (tree, policy, length), own in zip(cases, results, strict=True):
            engine.draft = draft if tree.size else None
            engine.set_policy(policy_named(policy))
            own.append(replay(engine, text[:PROMPT_TOKENS], text[PROMPT_TOKENS:], length, tree))
    rows, plain = [], results[0]
    for (tree, policy, length), own in zip(cases, results, strict=True):
        times = [result.timing.tpot_s * 1e3 for result in own[1:]]  # the first round warms up
        rows.append({
            "size": tree.size, "depth": tree.depth, "top_k": tree.top_k, "policy": policy, "acceptance_length": length,
            "experts": own[0].experts_per_layer_per_stage, "ms_per_token": median(times), "runs": times,
            "faster": median(first.timing.tpot_s / other.timing.tpot_s for first, other in zip(plain[1:], own[1:], strict=True)),
            "bytes": bytes_per_token(own[0]) / bytes_per_token(plain[0]),
        })
    return rows


def main(
    work: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the models are made once.")],
    shapes: str = "granite-1b-a400m,olmoe-1b-7b",
    threads: int = 2,
    repetitions: int = 5,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write figures and machine here.")] = None,
) -> None:
    """Compare token trees with plain decoding."""
    native.set_threads(threads)
    lengths, rows = acceptance_lengths(work), []
    for shape in shapes.split(","):
        engine = edgexpert.load(str(packed_model(shape, work)))
        rows += [{"shape": shape, **row} for row in measured(engine, lengths, repetitions)]
        del engine
    if json_file is not None:
        save(json_file, {
            "about": about(weights="random, 4 bits", acceptance="as measured on the bundled model at 4 bits, replayed"),
            "rows": rows,
        })
    table = Table("shape", "candidates", "policy", "acceptance", "experts", "ms a token", "bytes", "times as fast", "target")
    for row in rows:
        tree = f"{row['size']}, depth {row['depth']}" if row["size"] else "plain"
        table.add_row(row["shape"], tree, row["policy"], f"{row['acceptance_length']:.2f}", f"{row['experts']:.1f}",
                      f"{row['ms_per_token']:.1f}", f"{row['bytes']:.2f}", f"{row['faster']:.2f}", f"{TARGET}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
