"""Which speculative-decoding framework suits an edge device: kinds of drafts for one target (paper, Figures 4(b) and 11).

    python benchmarks/frameworks.py [--model stories] [--draft auto] [--medusa FOLDER] [--little FOLDER]

Greedy, exact policy, the same held-out prompts for all, interleaved text by text. Traffic is weight bytes of the verify
stages and of the drafting for them. The first stage of each text is not counted, because in it a draft reads the prompt.
"""

from __future__ import annotations

import statistics
import time
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

import edgexpert
from common import BUNDLED_TEXTS, ROOT, ModelName, Texts, about, cut_texts, save
from edgexpert.core.errors import UserError
from edgexpert.core.traffic import Ledger
from edgexpert.model.blocks import find_blocks
from edgexpert.model.loading import load_model, resolve
from edgexpert.runtime.engine import Engine
from edgexpert.runtime.results import Speculation
from edgexpert.speculation.causal import CausalDraft
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.eagle3_draft import Eagle3Draft
from edgexpert.speculation.loading import load_draft
from edgexpert.speculation.medusa import MedusaDraft
from edgexpert.speculation.ngram import NgramDraft
from edgexpert.speculation.sampling import Sampler, SamplingParams
from edgexpert.speculation.verify import SamplingVerifier
from self_draft import MoeDraft, stored_bits, weight_bytes

REPRODUCED = ROOT / "src" / "edgexpert" / "reproduce"
SELF_DRAFT_BITS = (2, 3)
SCALED_BITS = 4  # at which an edge device would store target and drafts


def make_drafts(engine: Engine, eagle3: str, medusa: str | None, little: str | None) -> dict[str, Draft | None]:
    """All that can be had, by name; says what is left out."""
    model, folder, vocab_size = engine.host.model, resolve(engine.name)[1], engine.host.config.vocab_size
    drafts: dict[str, Draft | None] = {"plain": None, "ngram": NgramDraft()}
    trained = ("eagle3", eagle3, Eagle3Draft), ("medusa", medusa, MedusaDraft), ("big-little", little, CausalDraft)
    for name, source, kind in trained:
        draft = load_draft(source, model, engine.tokenizer, folder)[0] if source is not None else None
        if draft is None or isinstance(draft, NgramDraft):
            print(f"{name} is left out: " + ("no draft lies beside the model" if draft else "no folder was given"))
            continue
        if not isinstance(draft, kind):
            raise UserError(f"{source} holds a draft of kind {draft.name}; give a folder with one of kind {name}")
        is_moe = isinstance(draft, CausalDraft) and find_blocks(draft.model)
        drafts[name] = MoeDraft(draft.model, vocab_size) if is_moe else draft
    for bits in SELF_DRAFT_BITS:
        drafts[f"low-bit {bits}"] = MoeDraft(load_model(engine.name, dtype="float32").model, vocab_size, bits)
    return drafts


def measure(engine: Engine, draft: Draft | None, prompt: list[int], new_tokens: int, shape: TreeShape) -> dict[str, Any]:
    """One draft on one prompt. Bytes are as stored here; ``low_bit_draft_bytes`` is the part of the draft's in few bits."""
    engine.draft = draft
    session, verifier = engine.session(shape), SamplingVerifier(Sampler(SamplingParams()))
    session.begin(verifier, prompt, new_tokens + 3 * (shape.depth + 1))
    session.step(verifier)
    session.speculation, session.ledger = Speculation(), Ledger()
    low = getattr(draft, "low_bit_bytes", 0.0)
    started = time.perf_counter()
    while session.speculation.emitted < new_tokens:
        session.step(verifier)
    return {
        "seconds": time.perf_counter() - started,
        "stages": session.speculation.stages,
        "emitted": session.speculation.emitted,
        "accepted_per_depth": session.speculation.accepted_per_depth,
        "target_bytes": weight_bytes(session.ledger.decode),
        "draft_bytes": session.ledger.decode["draft"],
        "low_bit_draft_bytes": getattr(draft, "low_bit_bytes", 0.0) - low,
    }


def summarise(rows: list[dict[str, Any]], scaling: float) -> dict[str, Any]:
    """Sums over texts. ``scaling`` takes bytes as stored here to `SCALED_BITS` bits; fewer bits stay as they are."""
    stages, emitted, target, draft, low = (
        sum(row[key] for row in rows) for key in ("stages", "emitted", "target_bytes", "draft_bytes", "low_bit_draft_bytes")
    )
    depths = zip_longest(*(row["accepted_per_depth"] for row in rows), fillvalue=0)
    return {
        "acceptance_length": emitted / stages,
        "accepted_per_depth": [sum(counts) / stages for counts in depths],
        "target_kb_per_token": target / emitted / 1e3,
        "draft_kb_per_token": draft / emitted / 1e3,
        "scaled_target_kb_per_token": target * scaling / emitted / 1e3,
        "scaled_draft_kb_per_token": (low + (draft - low) * scaling) / emitted / 1e3,
        "tokens_per_s": statistics.median(row["emitted"] / row["seconds"] for row in rows),
    }


def main(
    model: ModelName = "stories",
    draft: Annotated[str, typer.Option(help="EAGLE-3: auto for the one beside the model, or a folder")] = "auto",
    medusa: Annotated[str | None, typer.Option(help="folder of Medusa heads")] = None,
    little: Annotated[str | None, typer.Option(help="folder of a smaller causal model")] = None,
    texts: Texts = BUNDLED_TEXTS,
    prompt_tokens: int = 100,
    new_tokens: int = 120,
    limit: int = 24,
    tree_size: int = 64,
    tree_depth: int = 6,
    out: Annotated[Path, typer.Option(help="folder of the result, which `edgexpert reproduce` draws")] = REPRODUCED,
) -> None:
    engine = edgexpert.load(model, draft="none", dtype="float32")
    shape = TreeShape(size=tree_size, depth=tree_depth)
    prompts = [prompt for prompt, _ in cut_texts(engine, texts, prompt_tokens, 0, limit)]
    drafts = make_drafts(engine, draft, medusa, little)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in drafts}
    for prompt in track(prompts, description="texts"):
        for name, drafting in drafts.items():
            rows[name].append(measure(engine, drafting, prompt, new_tokens, shape))
    bits = 8 * engine.host.model.dtype.itemsize
    table = {name: summarise(found, stored_bits(SCALED_BITS) / bits) for name, found in rows.items()}
    for row in table.values():
        for kind in ("", "scaled_"):
            plain = table["plain"][f"{kind}target_kb_per_token"]
            row[f"{kind}normalised"] = (row[f"{kind}target_kb_per_token"] + row[f"{kind}draft_kb_per_token"]) / plain
    facts = about(**{
        "model": model, "texts": len(prompts), "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "tree": vars(shape),
        "stored_bits": bits, "scaled_bits": stored_bits(SCALED_BITS),
    })
    save(out / f"frameworks-{Path(model).name}.json", {"about": facts, "frameworks": table, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
