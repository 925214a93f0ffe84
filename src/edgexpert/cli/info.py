"""`edgexpert info`: what a model is made of and what it takes to run it here, without loading a weight."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgexpert.cli.completion import DTYPES, POLICIES, complete_model
from edgexpert.cli.options import MODEL_HELP, DraftName, Dtype, Json
from edgexpert.cli.show import print_json, print_line, print_pairs, readable_bytes
from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.weights.facts import Facts
    from edgexpert.weights.need import Need


def info(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, autocompletion=complete_model)] = "stories",
    draft: DraftName = "auto",
    dtype: Dtype = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check a packed checkpoint's files against their hashes.")] = False,
    json: Json = False,
) -> None:
    """Show what a model is made of, the memory that it takes, and what works with it. No weight is loaded."""
    if verify:
        check_files(model, json)
        return
    facts = describe(model, dtype, draft)
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


def describe(name: str, dtype: str | None, draft: str) -> dict[str, Any]:
    """Facts about a model; bytes are those of its weights in the form in which they would be loaded."""
    from edgexpert.core.machine import available_memory
    from edgexpert.model.calibrated import read_calibrated
    from edgexpert.policy import Hyperparameters
    from edgexpert.policy.hyperparameters import choose_hyperparameters
    from edgexpert.weights import families
    from edgexpert.weights.need import memory_need

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"unknown `dtype` {dtype}; choose one of {', '.join(DTYPES)}")
    facts = find_facts(name)
    if not facts.experts or not facts.top_k:
        raise UserError(f"the model {name} (model type {facts.family}) has no mixture-of-experts layer, so there is nothing for "
                        "EdgeXpert to do: give an MoE model")
    drafted = judge_draft(draft, facts)
    folder = drafted.pop("folder")
    need = memory_need(facts, dtype, folder)
    calibrated = read_calibrated(facts.path if facts.path.is_dir() else None)
    family = families.GGUF.get(facts.family, facts.family) if facts.kind == "gguf" else facts.family
    chosen: Hyperparameters = calibrated or choose_hyperparameters(family, facts.experts, facts.top_k)
    refused = family in families.REFUSED
    policies = [] if refused else list(POLICIES) if family in families.EVERY_POLICY else ["exact"]
    if facts.kind != "float":
        policies = [policy for policy in policies if policy not in ("moe-pruner", "edgemoe")]
    return {
        "model": name,
        "family": facts.family,
        "layers": facts.layers,
        "moe_layers": facts.moe_layers,
        "experts": facts.experts,
        "top_k": facts.top_k,
        "parameters": facts.parameters,
        "dtype": facts.stored,
        "disk_bytes": facts.disk,
        "random_weights": facts.random,
        "context": facts.context,
        "chat_template": has_chat_template(facts.path),
        "bytes": {part: round(size) for part, size in need.parts.items()},
        "expert_bytes": need.expert,
        "expert_bytes_per_token_plain": need.expert * facts.top_k * facts.moe_layers,
        "memory": memory(need, available_memory()),
        "runs": None if facts.kind == "quantised" and not refused else facts.kind in ("float", "packed") and not refused,
        "draft": drafted,
        "hyperparameters": asdict(chosen),
        "hyperparameters_calibrated": calibrated is not None,
        "policies": policies,
        "policies_certain": family in families.EVERY_POLICY | families.EXACT_ALONE | families.REFUSED,
    }


def memory(need: Need, available: int) -> dict[str, Any]:
    """Bytes that running the model takes, beside those that are free here."""
    room = available - (need.total - need.kv_full)
    return {
        "form": need.form, "weights": round(need.weights), "draft": round(need.draft), "encoder": round(need.encoder),
        "kv_cache_per_1000_tokens": round(1000 * need.kv_token), "kv_cache_full": round(need.kv_full),
        "total": round(need.total), "available": available or None, "fits": need.total <= available if available else None,
        "context_that_fits": max(0, min(need.context, int(room / need.kv_token))) if available and need.kv_token else None,
    }


def find_facts(name: str) -> Facts:
    """The facts of a model by name: of the Hub, if it is in the cache.

    Raises:
        UserError: it is nowhere here, or damaged.
    """
    from edgexpert.weights.facts import read_facts
    from edgexpert.weights.places import cached_folder, local_folder

    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return read_facts(path)
    folder = local_folder(name)
    if folder is None:
        folder = cached_folder(name)
        if folder is None or not list(folder.glob("*.safetensors")):  # of some, the configuration alone was asked for before
            return facts_at_hub(name)
    return read_facts(folder)


def facts_at_hub(name: str) -> Facts:
    """The facts of a model that was not downloaded: its configuration and the headers of its files are, and forgotten again.

    Raises:
        UserError: it cannot be had.
    """
    import huggingface_hub
    from huggingface_hub import constants

    from edgexpert.cli.pull import explain, quietly
    from edgexpert.weights.facts import facts_of, read_config
    from edgexpert.weights.headers import of_shape

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"the model {name} is not in the Hub's cache; get it where there is a network: edgexpert pull {name}")
    with TemporaryDirectory() as place, quietly():
        try:
            huggingface_hub.hf_hub_download(name, "config.json", local_dir=place)
            files = huggingface_hub.get_safetensors_metadata(name).files_metadata.values()
        except Exception as error:  # the Hub's client raises errors of many kinds
            raise UserError(explain(name, None, error)) from error
        tensors = {tensor: header for file in files for tensor, header in file.tensors.items()}
        headers = {tensor: of_shape(str(header.dtype), list(header.shape)) for tensor, header in tensors.items()}
        facts = facts_of(Path(place), read_config(Path(place)), headers)
        return replace(facts, disk=sum(header.bytes for header in headers.values()))


def has_chat_template(path: Path) -> bool | None:
    """Whether a chat template lies with a checkpoint's tokenizer; None for a checkpoint that is not here."""
    if not path.exists():
        return None
    if path.is_file():
        from edgexpert.weights.headers import gguf_headers

        return "tokenizer.chat_template" in gguf_headers(path)[0]
    tokenizer = path / "tokenizer_config.json"
    return (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file() or (
        tokenizer.is_file() and '"chat_template":' in tokenizer.read_text(encoding="utf-8", errors="replace"))


def judge_draft(name: str, target: Facts) -> dict[str, Any]:
    """Which draft would run, or why none does, by the configurations; ``folder`` is where it lies."""
    from edgexpert.speculation.fit import check_config, kind_of_draft
    from edgexpert.weights.facts import read_config, weight_files
    from edgexpert.weights.places import cached_folder, is_hub_name

    if name in ("none", "ngram"):
        return {"asked_for": name, "fits": True, "kind": name, "notes": [], "folder": None}
    if name == "auto" and target.draft is None:
        note = "no EAGLE-3 draft lies beside this model, so prompt look-up (ngram) drafts; see --draft"
        return {"asked_for": name, "fits": True, "kind": "ngram", "notes": [note], "folder": None}
    folder = target.draft if name == "auto" else Path(name).expanduser()
    try:
        if folder is None or not folder.is_dir():
            folder = cached_folder(name) if is_hub_name(name) else None
            if folder is None:
                raise UserError(f"there is no draft {name!r} here: give auto, none, ngram, a folder, or a name that you pulled")
        raw = read_config(folder)
        sizes = {"hidden_size": _of_embedding(target, 1), "vocab_size": _of_embedding(target, 0),
                 "num_hidden_layers": target.layers, "architectures": target.config.get("architectures")}
        check_config(folder, raw, sizes)
        if not list(folder.glob("*.bin")):
            weight_files(folder)
    except UserError as error:
        return {"asked_for": name, "fits": False, "reason": str(error), "folder": None}
    return {"asked_for": name, "fits": True, "kind": kind_of_draft(raw), "notes": [], "folder": folder}


def _of_embedding(facts: Facts, axis: int) -> int:
    """Vocabulary (axis 0) or hidden size (axis 1)."""
    from edgexpert.weights.facts import part_of

    shapes = [weight.shape for name, weight in facts.weights.items() if part_of(name, weight.shape) == "embeddings"]
    return shapes[0][axis] if shapes and len(shapes[0]) == 2 else 0


def print_facts(facts: dict[str, Any]) -> None:
    """The facts as text: the model, its bytes, its memory, its hyperparameters, its draft."""
    print_pairs(facts["model"], {
        "family": facts["family"] + ", random weights: for timing alone" * facts["random_weights"],
        "layers": f"{facts['layers']}, of which {facts['moe_layers']} with experts",
        "experts": f"{facts['experts']}, of which {facts['top_k']} for each token",
        "parameters": f"{facts['parameters']:,} stored as {facts['dtype']}, {readable_bytes(facts['disk_bytes'])} on disk",
        "context": f"{facts['context']:,} tokens",
        "chat template": {True: "yes", False: "no", None: "not known before it is downloaded"}[facts["chat_template"]],
    })
    memory = facts["memory"]
    print_pairs(f"bytes by part, in memory ({memory['form']})", {
        **{part.replace("_", " "): readable_bytes(size) for part, size in facts["bytes"].items()},
        "one expert": readable_bytes(facts["expert_bytes"]),
        "experts read for a token in plain decoding": readable_bytes(facts["expert_bytes_per_token_plain"]),
    })
    print_pairs("memory to run it", {
        "weights": readable_bytes(memory["weights"]),
        **({"draft": readable_bytes(memory["draft"])} if memory["draft"] else {}),
        "encoder": f"{readable_bytes(memory['encoder'])}, only with prompt-wise expert reuse",
        "KV cache of 1,000 tokens": readable_bytes(memory["kv_cache_per_1000_tokens"]),
        "KV cache of the full context": readable_bytes(memory["kv_cache_full"]),
        "all of it, at full context": f"{readable_bytes(memory['total'])}: {verdict(memory)}",
    })
    if not facts["policies"]:
        print_line(f"note: EdgeXpert cannot run models of the type {facts['family']}: loading it says why")
    elif facts["runs"] is None:
        print_line(f"note: stored as {facts['dtype']}; whether transformers can make floats of that here shows when it is loaded")
    elif not facts["runs"]:
        print_line(f"note: stored as {facts['dtype']} it cannot be run; convert it first: "
                   f"edgexpert convert {facts['model']} FOLDER")
    print_pairs("hyperparameters" + " (calibrated for this checkpoint)" * facts["hyperparameters_calibrated"],
                {name: str(value) for name, value in facts["hyperparameters"].items()})
    more = "" if facts["policies_certain"] else "; the others if its router can be read, which is tried when it is loaded"
    print_line("policies: " + (", ".join(facts["policies"]) or "none") + more)
    draft = facts["draft"]
    judgement = f"fits ({draft['kind']})" if draft["fits"] else f"does not fit: {draft['reason']}"
    print_line(f"draft {draft['asked_for']}: {judgement}")
    for note in draft.get("notes", ()):
        print_line(f"note: {note}")


def verdict(memory: dict[str, Any]) -> str:
    """Whether the model fits into the memory that is free here, in words."""
    if memory["fits"] is None:
        return "the system does not tell what is free"
    free = f"{readable_bytes(memory['available'])} free here"
    if memory["fits"]:
        return f"fits, {free}"
    if memory["context_that_fits"]:
        return f"fits with a context of up to {memory['context_that_fits']:,} tokens, {free}"
    if memory["form"].startswith("packed"):
        return f"does not fit, {free}; a packed checkpoint's experts are then read from the file as they are needed"
    return f"does not fit, {free}; converted to 4 bits it takes less (edgexpert convert)"
