"""Putting a trained model into the package: packed at 8 bits, with held-out texts, plots, and beside it the draft in bfloat16.

    python -m edgexpert.training.bundle RUN CORPUS [DRAFT]

RUN is the ``--out`` of `edgexpert train model`, CORPUS its corpus, DRAFT the ``--out`` of `edgexpert train draft`. The model
card beside them, README.md, is written by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.resources import bundled_folder
from edgexpert.speculation.loading import BESIDE_MODEL
from edgexpert.training.corpus import documents, is_held_out

HELD_OUT_FILES = {"tinystories_sample.txt": 40, "synthetic_fables_permissive.txt": 20}


def bundle(run: Path, corpus: Path, draft: Path | None, out: Path) -> None:
    """Writes the package's copy of a trained model to ``out``; an earlier draft stays when none is given."""
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "packed"
        convert(open_source(str(run / "model")), packed, PackOptions(8))
        for part in packed.iterdir():
            shutil.copy(part, out / part.name)
    with (out / "held_out.jsonl").open("w", encoding="utf-8") as file:
        for name, count in HELD_OUT_FILES.items():
            held_out = [text for text in documents(corpus / name) if is_held_out(text) and len(text) > 1000]
            for text in dict.fromkeys(held_out[:count]):
                file.write(json.dumps({"source": name, "text": text}, ensure_ascii=False) + "\n")
    tokens = np.load(run / "tokens.npz")
    usage = {name.split("/")[0]: expert_usage(model, stream) for name, stream in tokens.items() if name.endswith("held_out")}
    plot_training(read_history(run), usage, out / "training.png")
    write_history(read_history(run), out)
    if draft is not None:
        shutil.rmtree(out / BESIDE_MODEL, ignore_errors=True)
        shutil.copytree(draft / "draft", out / BESIDE_MODEL)
        weights = out / BESIDE_MODEL / "model.safetensors"
        tensors = load_file(weights).items()
        save_file({name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors}, weights)
        write_history(read_history(draft), out / BESIDE_MODEL)
        plot_draft(read_history(draft), out / BESIDE_MODEL / "training.png")


def read_history(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "history.json").read_text())


def write_history(history: list[dict[str, Any]], folder: Path, rows: int = 120) -> None:
    """Keeps about ``rows`` evenly spaced records of a training, and all that hold a validation."""
    every = max(1, len(history) // rows)
    most = max(len(record) for record in history)
    kept = [record for i, record in enumerate(history) if i % every == 0 or i == len(history) - 1 or len(record) == most > 6]
    rounded = json.loads(json.dumps(kept), parse_float=lambda text: round(float(text), 5))
    (folder / "history.json").write_text("[\n" + ",\n".join(map(json.dumps, rounded)) + "\n]\n")


def plot_draft(history: list[dict[str, Any]], path: Path) -> None:
    """How often a draft's first guess is the target's, by depth, over the steps of its training."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    accuracies = np.array([record["accuracy"] for record in history])  # [records, depths]
    smooth = accuracies[: len(history) // 10 * 10].reshape(-1, 10, accuracies.shape[1]).mean(1)
    for depth, accuracy in enumerate(smooth.T, start=1):
        axis.plot(np.arange(len(accuracy)) * 10 * history[-1]["step"] / len(history), accuracy, label=f"depth {depth}")
    axis.set(xlabel="step", ylabel="first guess right (training)", ylim=(0, 1))
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


@torch.no_grad()
def expert_usage(model: PreTrainedModel, stream: np.ndarray, windows: int = 32, length: int = 512) -> np.ndarray:
    """Share of the routed tokens that each expert of each layer gets on a held-out stream, [layers, E]."""
    count = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for start in range(0, min(len(stream) - length, windows * length), length):
        ids = torch.from_numpy(stream[start : start + length].astype(np.int64))[None]
        routed = model(input_ids=ids, output_router_logits=True).router_logits
        chosen = [logits.topk(model.config.num_experts_per_tok, dim=-1).indices.flatten() for logits in routed]
        count += torch.stack([torch.bincount(c, minlength=model.config.num_experts) for c in chosen])
    return (count / count.sum(1, keepdim=True)).numpy()


def plot_training(history: list[dict[str, float]], usage: dict[str, Any], path: Path) -> None:
    """Losses over steps, and how evenly experts are used on each held-out domain."""
    from matplotlib import pyplot as plt

    figure, (losses, experts) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    losses.plot([row["step"] for row in history], [row["loss"] for row in history], color="#bbb", label="training batch")
    for name in usage:
        rows = [row for row in history if f"held_out/{name}" in row]
        losses.plot([row["step"] for row in rows], [row[f"held_out/{name}"] for row in rows], "o-", label=f"held out, {name}")
        experts.plot(np.sort(usage[name], axis=1)[:, ::-1].mean(0), label=f"{name}, mean of the layers")
        print(f"{name}: busiest expert {usage[name].max():.1%}, idlest {usage[name].min():.3%}, "
              f"experts without a token {(usage[name] == 0).sum()} of {usage[name].size}")
    losses.set(xlabel="step", ylabel="nats a token", ylim=(1.8, 6))
    experts.axhline(1 / next(iter(usage.values())).shape[1], color="black", linestyle=":", label="even")
    experts.set(xlabel="expert, busiest first", ylabel="share of routed tokens", yscale="log")
    losses.legend(fontsize=8)
    experts.legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    bundle(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None, bundled_folder("stories"))
