"""`edgexpert pull`: a model from the Hugging Face Hub into its cache."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from edgexpert.cli.show import print_json, print_line, readable_bytes
from edgexpert.core.errors import UserError
from edgexpert.core.resources import BUNDLED
from edgexpert.weights.facts import DRAFT, disk_bytes
from edgexpert.weights.places import is_hub_name

WANTED = ("*.json", "*.safetensors", "*.pack", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Files of a checkpoint that are read; repositories often hold the same weights in other forms, too."""
UNWANTED = ("consolidated*",)


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of the Hub, like owner/name.")],
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="A branch, a tag or a commit. [default: main]", show_default=False)
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="This file alone, such as one of several GGUF files.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")] = False,
) -> None:
    """Download a model. Files that are complete are kept: after an interruption the same command fetches the others."""
    if name in BUNDLED:
        raise UserError(f"the model {name} comes with edgexpert; there is nothing to download")
    if not is_hub_name(name):
        raise UserError(f"the name {name!r} is no name of the Hub; give one like owner/name")
    place, new = download(name, revision, file)
    if json:
        print_json({"model": name, "path": str(place), "disk_bytes": disk_bytes(place), "downloaded_bytes": new})
    else:
        print_line(f"{name} lies in {place} ({readable_bytes(disk_bytes(place))}, {readable_bytes(new)} of them new)")


def download(name: str, revision: str | None, file: str | None) -> tuple[Path, int]:
    """Brings a model into the cache. Returns where it lies, and the bytes that were downloaded.

    Raises:
        UserError: it cannot be had, or there is no room for it.
    """
    import huggingface_hub
    from huggingface_hub import constants

    try:
        with quietly():
            planned: list[Any] = huggingface_hub.snapshot_download(name, revision=revision, dry_run=True)  # type: ignore[assignment]
        sizes = {each.filename: each.file_size for each in planned}
        chosen = [file] if file is not None else list(wanted(sizes))
        check_choice(name, chosen, sizes, file)
        new = sum(each.file_size for each in planned if each.filename in chosen and each.will_download)
        check_room(name, new, Path(constants.HF_HUB_CACHE))
        with nullcontext() if sys.stderr.isatty() else quietly():
            folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=chosen))
    except UserError:
        raise
    except Exception as error:  # the Hub's client raises errors of many kinds, those of its HTTP library among them
        raise UserError(explain(name, revision, error)) from error
    return folder / file if file is not None else folder, new


@contextmanager
def quietly() -> Iterator[None]:
    """Without the progress bars of the Hub's client."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def wanted(names: Iterable[str]) -> Iterable[str]:
    """Those of a repository's files that a checkpoint and the draft beside it are made of."""
    for name in names:
        folder, _, own = name.rpartition("/")
        read = any(fnmatch(own, form) for form in WANTED) and not any(fnmatch(own, form) for form in UNWANTED)
        if folder in ("", DRAFT) and read:
            yield name


def check_choice(name: str, chosen: list[str], sizes: dict[str, int], file: str | None) -> None:
    """Raises a `UserError` where what is to be downloaded is not there, or could not be used."""
    gguf = sorted(each for each in sizes if each.endswith(".gguf"))
    if file is not None and file not in sizes:
        raise UserError(f"the repository {name} has no file {file}; it has {', '.join(gguf or sorted(sizes)) or 'none at all'}")
    if file is None and not any(each.endswith((".safetensors", ".pack")) for each in chosen):
        if gguf:
            raise UserError(f"the repository {name} has GGUF files alone; choose one with --file: {', '.join(gguf)}")
        raise UserError(f"the repository {name} has no safetensors files, so EdgeXpert could not load it; take another one")


def check_room(name: str, size: int, cache: Path) -> None:
    """Raises a `UserError` where the disk of the cache has no room for ``size`` bytes."""
    place = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if size > free:
        raise UserError(f"the model {name} needs {readable_bytes(size)} more on the disk of {cache}, where "
                        f"{readable_bytes(free)} are free; make room, or set HF_HOME to a folder on another disk")


def explain(name: str, revision: str | None, error: Exception) -> str:
    """An error of the Hub's client as one sentence."""
    from huggingface_hub import constants, errors

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, errors.GatedRepoError):
            return f"the model {name} asks for an agreement: accept its terms on its page, then log in with: hf auth login"
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"the model {name} has no revision {revision}; give a branch, a tag or a commit that it has"
        if isinstance(cause, errors.RepositoryNotFoundError | errors.HFValidationError):
            return f"there is no model {name} on the Hub, or it is private: check the name, or log in with: hf auth login"
        if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, errors.HfHubHTTPError | ConnectionError):
            return f"the model {name} cannot be written to {constants.HF_HUB_CACHE} ({cause.strerror})"
        cause = cause.__cause__ or cause.__context__
    if constants.HF_HUB_OFFLINE:
        return f"the model {name} cannot be downloaded while HF_HUB_OFFLINE is set; unset it, or give the folder of a checkpoint"
    reason = str(error).strip().split("\n")[0][:200].rstrip(".").replace("`", "'")
    return f"the Hub cannot be reached for {name} ({type(error).__name__}: {reason}); try the same command again"
