"""Hyperparameters for one checkpoint: the fewest expert bytes that a given rise in perplexity buys.

    python benchmarks/hyperparameters.py --texts FILE.jsonl [--model stories] [--out edgexpert.json]

Every ladder holds the values of one hyperparameter, from mild to strong. From the first rungs on, the step that saves the most
bytes for the perplexity it costs is taken again and again, until none is worth it within the budget: first along the ladders
of prompt-wise reuse, by the bytes of prefill, then along those of pruning and coalescing, by the bytes of decoding. Perplexity is
that of forced decoding. Tune on texts that were neither trained nor reported on, and on a packed checkpoint if there is one: its
kernels are faster.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import edgexpert
from common import ModelName, Texts, cut_texts
from edgexpert.policy import PRESETS, Techniques
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape

Rungs = tuple[dict[str, float], ...]

LEAST_WORTH = 5.0
"""Share of bytes that a step must save for each nat it adds: nothing that saves less than 5 % may cost 1 % of perplexity."""


class Cost(NamedTuple):
    loss: float  # nats a token
    prefill: float  # expert bytes
    decode: float


def reuse_ladders(num_experts: int, top_k: int) -> list[Rungs]:
    """How many tokens are trivial, how few experts they get, and among how many. A minor token stands halfway to a major one."""
    thetas = tuple({"theta1": theta, "theta2": theta / 2} for theta in (0.8, 2.0, 4.0, 6.0, 8.0))
    numbers = tuple({"n_tri": n, "n_min": math.ceil((n + top_k) / 2)} for n in range(top_k - 1, 0, -1))
    choices = tuple({"k_tri": min(k, num_experts), "k_min": (min(k, num_experts) + top_k) // 2}
                    for k in (top_k, 2 * top_k, 4 * top_k, 8 * top_k))
    return [thetas, numbers, choices]


DECODE_LADDERS: list[Rungs] = [
    tuple({"keep_mass": share} for share in (1.0, 0.998, 0.995, 0.99, 0.98, 0.95)),
    tuple({"keep_channels": share} for share in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)),
    tuple({"selection_ratio": ratio} for ratio in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)),
]


def measure(engine: Engine, policy: Techniques, cut: list[tuple[list[int], list[int]]], shape: TreeShape) -> Cost:
    """A policy on all texts."""
    engine.set_policy(policy)
    scores = [engine.score(prompt, truth, shape) for prompt, truth in cut]
    loss = -sum(sum(score.log_probs) for score in scores) / sum(len(score.log_probs) for score in scores)
    return Cost(loss, sum(score.traffic.prefill["experts"] for score in scores),
                sum(score.traffic.decode["experts"] for score in scores))


def descend(engine: Engine, policy: Techniques, ladders: list[Rungs], kind: str, most: float,
            cut: list[tuple[list[int], list[int]]], shape: TreeShape) -> tuple[Techniques, Cost]:
    """The policy at the foot of the descent, and its cost.

    Args:
        kind: whose bytes count, ``prefill`` or ``decode``.
        most: the highest loss that is allowed.
    """
    places = [0] * len(ladders)
    for ladder in ladders:
        policy = replace(policy, **ladder[0])
    cost = measure(engine, policy, cut, shape)
    while True:
        best: tuple[float, int, Techniques, Cost] | None = None
        for index, ladder in enumerate(ladders):
            if places[index] + 1 < len(ladder):
                step = replace(policy, **ladder[places[index] + 1])
                found = measure(engine, step, cut, shape)
                saved = (getattr(cost, kind) - getattr(found, kind)) / getattr(cost, kind)
                worth = saved / max(found.loss - cost.loss, 1e-4)
                if found.loss <= most and worth >= LEAST_WORTH and (best is None or worth > best[0]):
                    best = worth, index, step, found
        if best is None:
            return policy, cost
        _, index, policy, cost = best
        places[index] += 1
        print(f"{ladders[index][places[index]]}: loss {cost.loss:.4f} of at most {most:.4f}, "
              f"{getattr(cost, kind) / 1e6:.0f} MB in {kind}", flush=True)


def main(
    texts: Texts,
    model: ModelName = "stories",
    prompt_tokens: int = 125,
    new_tokens: int = 80,
    limit: int = 24,
    budget: Annotated[float, typer.Option(help="rise of perplexity that all may cost together")] = 0.03,
    reuse_share: Annotated[float, typer.Option(help="share of it that reuse may take")] = 1 / 3,
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("edgexpert.json"),
) -> None:
    engine, shape = edgexpert.load(model), TreeShape()
    cut = cut_texts(engine, texts, prompt_tokens, new_tokens, limit)
    exact = measure(engine, PRESETS["exact"], cut, shape)
    reuse_only = replace(PRESETS["exact"], name="reuse only", prompt_wise_expert_reuse=True)
    ladders = reuse_ladders(engine.host.num_experts, engine.host.top_k)
    small = TreeShape(size=8, depth=4)  # what reuse costs is paid in the prompt: the loss is that of any tree
    chosen, _ = descend(engine, reuse_only, ladders, "prefill", exact.loss + math.log1p(reuse_share * budget), cut, small)
    reuse = {name: getattr(chosen, name) for ladder in ladders for name in ladder[0]}
    full = replace(PRESETS["edgexpert"], **reuse)
    chosen, cost = descend(engine, full, DECODE_LADDERS, "decode", exact.loss + math.log1p(budget), cut, shape)
    engine.set_policy(chosen)
    found = asdict(engine.policy.hyperparameters)
    about = (f"{len(cut)} texts of {prompt_tokens} + {new_tokens} tokens, forced decoding: perplexity "
             f"{math.exp(cost.loss - exact.loss) - 1:+.1%}, expert bytes {cost.prefill / exact.prefill - 1:+.1%} in prefill, "
             f"{cost.decode / exact.decode - 1:+.1%} in decoding, of exact ones")
    out.write_text(json.dumps({"hyperparameters": found, "calibrated_on": about}, indent=2) + "\n", encoding="utf-8")
    print(about)


if __name__ == "__main__":
    typer.run(main)
