"""Reading a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path

from edgexpert.core.errors import UserError


def read_prompts(file: Path) -> list[str]:
    """Prompts of a file: one a line, or where a line is a JSON object, its ``prompt`` or ``text``."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"the prompts file {file} cannot be read ({error.strerror}); give a text file") from None
    except UnicodeError:
        raise UserError(f"the prompts file {file} is not UTF-8 text; convert it first") from None
    prompts = [_prompt_of(line, number, file) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"the prompts file {file} is empty; give one prompt a line")
    return prompts


def _prompt_of(line: str, number: int, file: Path) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        values = json.loads(line)
        prompt = values.get("prompt", values.get("text"))
    except ValueError:
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f'line {number} of {file} is not a JSON object with a text in "prompt" or "text"; correct or remove it')
    return prompt
