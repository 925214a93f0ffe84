"""What every source of weights offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.weights.manifest import Linear, MatrixLayout
from edgexpert.weights.rounding import PackedMatrix


class Source(ABC):
    """Weights of one model, read one parameter at a time.

    Attributes:
        model: the model on the meta device: shapes and names, no weights.
        origin: what the manifest says about where the weights came from.
        fingerprint: changes when the weights do; a conversion is only resumed from the same.
    """

    kind: ClassVar[str]
    dummy: ClassVar[bool] = False
    config: PreTrainedConfig
    model: PreTrainedModel
    origin: dict[str, Any]
    fingerprint: Any

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Type of a parameter if it keeps its floats.

        Raises:
            UserError: the source lacks the parameter.
        """

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """A parameter in the shape that the model has for it."""

    def packed(
        self, name: str, matrix: MatrixLayout | Linear, count: int, zero_point: bool
    ) -> Iterator[PackedMatrix] | None:
        """The ``count`` matrices of a parameter as the source stores them, where that is the form that is asked for.

        One for each expert, or a single one of a linear layer. None where the weights must be rounded anew.
        """
        return None

    @abstractmethod
    def save_extras(self, folder: Path) -> None:
        """Writes the tokenizer and the generation configuration, where the source has them."""


def file_fingerprint(path: Path) -> list[Any]:
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, without memory for its weights."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        first_line = str(error).strip().split("\n")[0][:200]
        raise UserError(f"config.json describes no causal language model that transformers knows ({first_line})") from error
