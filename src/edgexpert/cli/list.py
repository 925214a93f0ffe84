"""`edgexpert list`: the models that are here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from edgexpert.cli.options import Json
from edgexpert.cli.show import NOTHING, print_json, print_line, print_rich, readable_bytes, table
from edgexpert.core.errors import UserError
from edgexpert.core.resources import BUNDLED, bundled_folder
from edgexpert.weights.facts import disk_bytes, is_checkpoint, read_config, read_facts

COLUMNS = ("model", "weights", "on disk", "family", "draft")


def list_models(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Also the checkpoints and GGUF files in this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """List the models that come along, those in the cache of the Hugging Face Hub, and those in a folder."""
    found = [*_bundled(), *(_in_folder(folder) if folder is not None else ()), *_in_cache()]
    if json:
        print_json({"models": found})
        return
    rows = table(*COLUMNS)
    for model in found:
        weights = (model["weights"] or NOTHING) + ", random" * model["random_weights"]
        rows.add_row(model["name"], weights, readable_bytes(model["disk_bytes"]),
                     model["problem"] or _family(model), model["draft"] or "none")
    print_rich(rows)
    if not any(model["place"] != "bundled" for model in found):
        print_line("No other models are here; edgexpert pull NAME gets one from the Hub.")


def _family(model: dict[str, Any]) -> str:
    experts = f"{model['top_k']} of {model['experts']} experts" if model["experts"] else "no experts"
    return f"{model['family']}, {experts}"


def _bundled() -> Iterator[dict[str, Any]]:
    for name in BUNDLED:
        yield describe(name, "bundled", bundled_folder(name))


def _in_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """The folder itself where it is a checkpoint, else what lies in it."""
    try:
        inside = sorted(folder.expanduser().iterdir())
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be read ({error.strerror}); give a folder that holds models") from None
    for path in [folder] if is_checkpoint(folder.expanduser()) else inside:
        if is_checkpoint(path.expanduser()):
            yield describe(str(path), "folder", path.expanduser())


def _in_cache() -> Iterator[dict[str, Any]]:
    """Models of the Hub: of each the revision ``main``, else the one that was changed last."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        revision = max(repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
        if is_checkpoint(revision.snapshot_path):
            yield describe(repository.repo_id, "hub", revision.snapshot_path)
        for file in sorted(revision.snapshot_path.glob("*.gguf")):
            yield describe(f"{repository.repo_id} ({file.name})", "hub", file)


def describe(name: str, place: str, path: Path) -> dict[str, Any]:
    """What a model is, by its headers; where they cannot be read, the problem."""
    model: dict[str, Any] = {"name": name, "place": place, "path": str(path), "disk_bytes": disk_bytes(path), "weights": None,
                             "family": None, "experts": 0, "top_k": 0, "draft": None, "random_weights": False, "problem": None}
    try:
        facts = read_facts(path)
        model |= {"weights": facts.stored, "family": facts.family, "experts": facts.experts, "top_k": facts.top_k,
                  "random_weights": facts.random, "draft": _draft(facts.draft)}
    except UserError as error:
        model["problem"] = str(error)
    return model


def _draft(folder: Path | None) -> str | None:
    from edgexpert.speculation.fit import kind_of_draft

    return None if folder is None else kind_of_draft(read_config(folder))
