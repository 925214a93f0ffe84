"""Values that the shell completes. A name may be bundled, a local folder, or in the cache of the Hub."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from edgexpert.core.resources import BUNDLED
from edgexpert.weights.places import cached_names

POLICIES = ("exact", "pruned", "reuse", "coalesced", "edgexpert", "moe-pruner", "edgemoe")
DRAFTS = ("auto", "none", "ngram")
DTYPES = ("float32", "bfloat16", "float16", "auto")
DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "avx512", "avx2", "neon", "portable", "torch")


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Completes one of a few values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def complete_policy(incomplete: str) -> list[str]:
    """Completes a policy's name, those of other packages included."""
    others = sorted({entry.name for entry in entry_points(group="edgexpert.policies")} - set(POLICIES))
    return one_of(*POLICIES, *others)(incomplete)


def complete_policies(incomplete: str) -> list[str]:
    """Completes the last of several policies with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in complete_policy(last)]


def complete_model(incomplete: str) -> list[str]:
    """Completes a model's name."""
    return one_of(*BUNDLED, *cached_names(), *_folders(incomplete))(incomplete)


def complete_draft(incomplete: str) -> list[str]:
    """Completes a draft's name."""
    return one_of(*DRAFTS, *cached_names(), *_folders(incomplete))(incomplete)


def _folders(incomplete: str) -> list[str]:
    """Folders that hold a config.json, where the text so far points to."""
    above = incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ""
    try:
        return sorted(above + path.name for path in Path(above or ".").expanduser().iterdir() if (path / "config.json").is_file())
    except OSError:
        return []
