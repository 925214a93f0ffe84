"""What each technique brings and costs on a model: the five policies on held-out text.

    python benchmarks/techniques.py [--model stories] [--texts FILE.jsonl] [--out benchmarks/results]

Each text is cut into a prompt and a continuation. Forced decoding of the continuation gives perplexity; greedy generation from
the prompt gives acceptance length, traffic and speed. Policies are interleaved text by text, so that all see the same machine.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import track

import edgexpert
from common import BUNDLED_TEXTS, RESULTS, ModelName, Texts, about, cut_texts, save
from edgexpert.kernels import native
from edgexpert.policy import PRESETS
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape


def measure(engine: Engine, policy: str, prompt: list[int], truth: list[int], shape: TreeShape) -> dict[str, float]:
    """One policy on one text."""
    engine.set_policy(PRESETS[policy])
    score = engine.score(prompt, truth, shape)
    got = engine.generate(prompt, tree=shape, max_new_tokens=len(truth), ignore_eos=True)
    return {
        "log_prob": sum(score.log_probs),
        "tokens": len(score.log_probs),
        "stages": got.speculation.stages,
        "emitted": got.speculation.emitted,
        "decode_expert_bytes": got.traffic.decode["experts"],
        "prefill_expert_bytes": got.traffic.prefill["experts"],
        "encoder_bytes": got.traffic.prefill["encoder"],
        "tpot_s": got.timing.tpot_s or 0.0,
        "experts": got.experts_per_layer_per_stage or 0.0,
    }


def resolved(engine: Engine, policy: str) -> dict[str, Any]:
    """A policy with the hyperparameters that it has on this model, those that the checkpoint brings along included."""
    engine.set_policy(PRESETS[policy])
    return engine.policy.to_json()


def summarise(rows: list[dict[str, float]]) -> dict[str, float]:
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    return {
        "perplexity": math.exp(-total["log_prob"] / total["tokens"]),
        "acceptance_length": total["emitted"] / total["stages"],
        "decode_expert_kb_per_token": total["decode_expert_bytes"] / total["emitted"] / 1e3,
        "prefill_expert_mb": total["prefill_expert_bytes"] / len(rows) / 1e6,
        "encoder_mb": total["encoder_bytes"] / len(rows) / 1e6,
        "experts_per_layer_per_stage": statistics.mean(row["experts"] for row in rows),
        "tokens_per_s": 1 / statistics.median(row["tpot_s"] for row in rows),
    }


def main(
    model: ModelName = "stories",
    draft: str = "auto",
    texts: Texts = BUNDLED_TEXTS,
    prompt_tokens: int = 100,
    new_tokens: int = 120,
    limit: int = 24,
    tree_size: int = 64,
    tree_depth: int = 6,
    out: Path = RESULTS,
) -> None:
    engine = edgexpert.load(model, draft=draft)
    shape = TreeShape(size=tree_size, depth=tree_depth)
    cut = cut_texts(engine, texts, prompt_tokens, new_tokens, limit)
    rows: dict[str, list[dict[str, float]]] = {policy: [] for policy in PRESETS}
    for prompt, truth in track(cut, description="texts"):
        for policy in PRESETS:
            rows[policy].append(measure(engine, policy, prompt, truth, shape))
    table = {policy: summarise(found) for policy, found in rows.items()}
    plain = engine.host.plain_decode_expert_bytes / 1e3
    facts = about(**{
        "model": Path(model).name, "draft": engine.draft.name if engine.draft else "none", "texts": len(cut),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens, "tree": vars(shape), "plain_decoding_expert_kb_per_token": plain,
        "executor": (f"PyTorch on {torch.get_num_threads()} threads" if engine.host.blocks[0].packed is None else
                     f"{native.path()} kernels on {native.get_threads()} threads"),
        "policies": {policy: resolved(engine, policy) for policy in PRESETS},
    })
    stem = out / f"techniques-{Path(model).name}"
    save(stem.with_suffix(".json"), {"about": facts, "policies": table, "rows": rows})
    plot(table, plain, stem.with_suffix(".png"))


def plot(table: dict[str, dict[str, float]], plain: float, path: Path) -> None:
    from matplotlib import pyplot as plt

    names = list(table)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, key, title in zip(
        axes,
        ("decode_expert_kb_per_token", "perplexity", "acceptance_length"),
        ("expert KB a token, decode", "perplexity, forced decoding", "acceptance length"),
        strict=True,
    ):
        axis.bar(names, [table[name][key] for name in names], color=["#888", "#9ecae1", "#6baed6", "#fd8d3c", "#31a354"])
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="x", rotation=30)
    axes[0].axhline(plain, color="black", linestyle=":", label="plain decoding")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    typer.run(main)
