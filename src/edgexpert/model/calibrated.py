"""Hyperparameters that were calibrated for one checkpoint, kept beside it in ``edgexpert.json``."""

from __future__ import annotations

import json
from pathlib import Path

from edgexpert.core.errors import UserError
from edgexpert.policy import Hyperparameters

FILE = "edgexpert.json"


def read_calibrated(folder: Path | None) -> Hyperparameters | None:
    """The hyperparameters beside a local checkpoint; None where there are none.

    The file is ``{"hyperparameters": {...}, "calibrated_on": "..."}``, the names those of `Hyperparameters`.
    """
    if folder is None or not (folder / FILE).is_file():
        return None
    try:
        return Hyperparameters(**json.loads((folder / FILE).read_text())["hyperparameters"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"the file {folder / FILE} does not name all hyperparameters ({error}); mend or remove it") from error
