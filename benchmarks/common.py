"""What the benchmarks share: their options, models and held-out texts, and the files of their results."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.dummy import DummySource, dummy_config
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.core.resources import bundled_folder
from edgexpert.kernels import native
from edgexpert.runtime.engine import Engine

BUNDLED = "stories"
BUNDLED_TEXTS = bundled_folder(BUNDLED) / "held_out.jsonl"
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

ModelName = Annotated[str, typer.Option(help="bundled name, folder or Hub name")]
Texts = Annotated[Path, typer.Option(help='JSON lines with a "text" each')]


def cut_texts(engine: Engine, texts: Path, prompt_tokens: int, more_tokens: int, limit: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and continuation of the first ``limit`` texts that are long enough for both.

    Raises:
        UserError: none is.
    """
    encoded = (engine.encode(json.loads(line)["text"]) for line in texts.read_text(encoding="utf-8").splitlines())
    length = prompt_tokens + more_tokens
    cut = [(ids[:prompt_tokens], ids[prompt_tokens:length]) for ids in encoded if len(ids) >= length][:limit]
    if not cut:
        raise UserError(f"no text in {texts} has {length} tokens; give longer texts or a lower --prompt-tokens")
    return cut


def packed_model(name: str, work: Path) -> Path:
    """A packed checkpoint, made once: of the bundled model, or of random weights in a named shape."""
    folder = work / name
    if not folder.exists():
        convert(open_source(name) if name == BUNDLED else DummySource(dummy_config(name), name), folder, PackOptions())
    return folder


def about(**more: Any) -> dict[str, Any]:
    """What a result was measured on: the command, the commit, and what a speed depends on; with ``more`` of a benchmark's own."""
    return {
        "command": shlex.join(["python", *sys.argv]), "commit": commit(), "date": date.today().isoformat(),
        "processor": processor(), "kernels": native.path(), "threads": native.get_threads(), "torch": torch.__version__, **more,
    }


def commit() -> str:
    """The commit that runs, marked where files have changed since."""
    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return found.stdout.strip()

    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + " and changes" * bool(git("status", "--porcelain", "-uno"))


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def save(file: Path, results: dict[str, Any]) -> None:
    """Writes results, which hold what `about` gives."""
    assert {"command", "commit"} <= results["about"].keys()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
