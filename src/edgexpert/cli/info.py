"""`edgexpert info`: what a model is made of, and what EdgeXpert would do with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgexpert.cli.options import MODEL_HELP, DraftName, Json
from edgexpert.cli.show import print_json, print_line, print_pairs, readable_bytes
from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.model.host import HostedModel
    from edgexpert.model.loading import LoadedModel


def info(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)] = "stories",
    draft: DraftName = "auto",
    verify: Annotated[bool, typer.Option("--verify", help="Check a packed checkpoint's files against their hashes.")] = False,
    json: Json = False,
) -> None:
    """Show what a model is made of, whether a draft fits it, and the hyperparameters chosen for it."""
    if verify:
        check_files(model, json)
        return
    from edgexpert.model.calibrated import read_calibrated
    from edgexpert.model.host import HostedModel
    from edgexpert.model.loading import load_model

    loaded = load_model(model, dtype="auto")
    facts = describe(model, loaded, HostedModel(loaded.model, calibrated=read_calibrated(loaded.folder)), draft)
    if json:
        print_json(facts)
    else:
        print_facts(facts)


def check_files(folder: str, json: bool) -> None:
    """Compares every file of a packed checkpoint with its hash in the manifest."""
    from edgexpert.weights.files import verify

    names = verify(Path(folder).expanduser())
    if json:
        print_json({"model": folder, "verified": names})
    else:
        print_line(f"all {len(names)} files of {folder} are as they were written")


def describe(name: str, loaded: LoadedModel, host: HostedModel, draft: str) -> dict[str, Any]:
    """Facts about a model; bytes are those of its weights in the checkpoint's own dtype."""
    from edgexpert.policy import Policy

    shape = host.blocks[0].shape
    return {
        "model": name,
        "family": host.config.model_type,
        "layers": host.layers,
        "moe_layers": len(host.blocks),
        "experts": host.num_experts,
        "top_k": host.top_k,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "context": host.max_context,
        "chat_template": loaded.tokenizer.chat_template is not None,
        "bytes": host.sizes,
        "expert_bytes": shape.expert,
        "expert_bytes_per_token_plain": host.plain_decode_expert_bytes,
        "draft": _try_draft(draft, loaded),
        "hyperparameters": asdict(host.resolve(Policy()).hyperparameters),
        "hyperparameters_calibrated": host.calibrated is not None,
        "policies": ["exact"] if any(block.form is None for block in host.blocks) else _policies(),
    }


def _policies() -> list[str]:
    from edgexpert.policy import BASELINES, PRESETS

    return [*PRESETS, *BASELINES]


def _try_draft(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """Which draft would run, or why none does."""
    from edgexpert.speculation.loading import load_draft

    try:
        draft, notes = load_draft(name, loaded.model, loaded.tokenizer, loaded.folder)
    except UserError as error:
        return {"asked_for": name, "fits": False, "reason": str(error)}
    return {"asked_for": name, "fits": True, "kind": draft.name if draft else "none", "notes": notes}


def print_facts(facts: dict[str, Any]) -> None:
    """The facts as text: the model, its bytes, its hyperparameters, its draft."""
    print_pairs(facts["model"], {
        "family": facts["family"],
        "layers": f"{facts['layers']}, of which {facts['moe_layers']} with experts",
        "experts": f"{facts['experts']}, of which {facts['top_k']} for each token",
        "parameters": f"{facts['parameters']:,} in {facts['dtype']}",
        "context": f"{facts['context']:,} tokens",
        "chat template": "yes" if facts["chat_template"] else "no",
    })
    print_pairs("bytes by part", {
        **{part.replace("_", " "): readable_bytes(size) for part, size in facts["bytes"].items()},
        "one expert": readable_bytes(facts["expert_bytes"]),
        "experts read for a token in plain decoding": readable_bytes(facts["expert_bytes_per_token_plain"]),
    })
    print_pairs("hyperparameters", {name: str(value) for name, value in facts["hyperparameters"].items()})
    print_line("policies: " + ", ".join(facts["policies"]))
    draft = facts["draft"]
    verdict = f"fits ({draft['kind']})" if draft["fits"] else f"does not fit: {draft['reason']}"
    print_line(f"draft {draft['asked_for']}: {verdict}")
    for note in draft.get("notes", ()):
        print_line(f"note: {note}")
