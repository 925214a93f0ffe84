"""The shell completes commands, options and their values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgexpert.cli import completion
from edgexpert.kernels import native
from edgexpert.model.loading import DTYPES
from edgexpert.policy import BASELINES, PRESETS

MAIN = "from edgexpert.cli.main import main; main()"


def complete(line: str, folder: Path, **environment: str) -> set[str]:
    """What bash would offer for the last word of a line."""
    words = line.split(" ")
    asked = {"_EDGEXPERT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = subprocess.run([sys.executable, "-c", MAIN], env={**os.environ, **asked, **environment}, cwd=folder,
                            capture_output=True, text=True, check=False)
    return set(result.stdout.split())


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "cache" / "models--allenai--OLMoE-1B-7B-0924").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("line", "offered"), [
    ("edgexpert gen", {"generate"}),
    ("edgexpert generate --pol", {"--policy"}),
    ("edgexpert generate --policy e", {"exact", "edgexpert", "edgemoe"}),
    ("edgexpert bench --policies exact,pr", {"exact,pruned"}),
    ("edgexpert chat --dtype b", {"bfloat16"}),
    ("edgexpert chat --kernels a", {"auto", "avx512", "avx2"}),
    ("edgexpert chat --device c", {"cpu", "cuda"}),
    ("edgexpert chat --draft n", {"none", "ngram"}),
    ("edgexpert generate --speculation o", {"off"}),
    ("edgexpert info s", {"stories"}),
    ("edgexpert generate --model mi", {"mine"}),
    ("edgexpert generate --model ./", {"./mine"}),
    ("edgexpert generate --model all", {"allenai/OLMoE-1B-7B-0924"}),
])
def test_values_are_completed(line: str, offered: set[str], models: Path) -> None:
    assert complete(line, models, HF_HUB_CACHE=str(models / "cache")) == offered


def test_names_are_those_that_there_are() -> None:
    assert (*PRESETS, *BASELINES) == completion.POLICIES
    assert set(completion.DTYPES) == DTYPES.keys()
    assert completion.KERNELS == native.PATHS


def test_completion_is_installed(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", MAIN, "--install-completion", "bash"], check=False, capture_output=True,
                            env={**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert result.returncode == 0, result.stderr
    assert "edgexpert" in (tmp_path / ".bashrc").read_text()
