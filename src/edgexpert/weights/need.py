"""How much memory a model takes once it is loaded, told before it is. Nothing here imports PyTorch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from edgexpert.core.resources import PACKAGE
from edgexpert.weights.facts import FLOAT_BYTES, Facts, part_of, weight_files
from edgexpert.weights.headers import safetensors_headers

FOUR_BITS = 0.5 + 2 / 32
"""Bytes of a weight of 4 bits, with a float16 scale for each 32."""
ENCODER = PACKAGE / "encoder" / "minilm-l6-v2"


@dataclass(frozen=True)
class Need:
    """Bytes.

    Attributes:
        form: what the weights are in memory.
        parts: weights by part, as `edgexpert.weights.facts.Facts.parts`.
        expert: one expert.
        kv_token: keys and values of one token.
        context: tokens that the model can hold.
    """

    form: str
    parts: dict[str, float]
    expert: float
    draft: float
    encoder: float
    kv_token: float
    context: int

    @property
    def weights(self) -> float:
        return sum(self.parts.values())

    @property
    def kv_full(self) -> float:
        return self.kv_token * self.context

    @property
    def total(self) -> float:
        """With a full context and the encoder."""
        return self.weights + self.draft + self.encoder + self.kv_full


def memory_need(facts: Facts, dtype: str | None, draft: Path | None = None, encoder: bool = True) -> Need:
    """What a checkpoint takes in memory.

    Args:
        dtype: as for `edgexpert.load`; beside packed weights everything is float32. What must be converted first is taken to be
            converted to 4 bits.
        draft: folder of a draft that is loaded with it.
        encoder: whether the bundled importance encoder is loaded, for prompt-wise expert reuse.
    """
    parts: dict[str, float] = defaultdict(float)
    if facts.kind == "packed" and dtype in (None, "auto"):
        form, size = "packed", 4.0
        for name, weight in facts.weights.items():
            part = part_of(name, weight.shape)
            parts[part] += weight.bytes if weight.packed or part == "embeddings" else 4 * weight.values
    elif facts.kind in ("float", "quantised", "packed"):
        own = facts.dtype if facts.dtype in FLOAT_BYTES else "float32"
        form = str(own) if dtype == "auto" else dtype or "float32"
        size = FLOAT_BYTES.get(form, 4)
        parts |= {part: values * size for part, values in facts.values.items()}
    else:
        form, size = "packed 4 bits, once converted", 4.0
        parts |= {part: values * FOUR_BITS for part, values in facts.values.items()}
        parts["embeddings"] = 2 * facts.values.get("embeddings", 0)
        parts["router"] = 4 * facts.values.get("router", 0)
        if facts.tied:
            parts["lm_head"] = FOUR_BITS * facts.values.get("embeddings", 0)
    expert = parts.get("experts", 0) / max(1, facts.experts * facts.moe_layers)
    return Need(
        form, dict(parts), expert, _draft_bytes(draft, facts, size) if draft else 0, _encoder_bytes() if encoder else 0,
        size * facts.kv_values, facts.context,
    )


def _draft_bytes(folder: Path, target: Facts, size: float) -> float:
    """A draft is in the dtype of its target; its matrices are packed where the target's are."""
    packed = size if target.kind == "float" else {4: FOUR_BITS, 8: 1 + 2 / 32, 16: 2}.get(target.bits or 4, 1)
    pickled = list(folder.glob("*.bin"))
    if pickled and not list(folder.glob("*.safetensors")):  # in 16 bits, nearly all of it matrices
        return sum(file.stat().st_size for file in pickled) / 2 * packed
    headers = [header for file in weight_files(folder) for header in safetensors_headers(file).values()]
    return sum(header.values * (packed if len(header.shape) == 2 else size) for header in headers)


def _encoder_bytes() -> float:
    headers = safetensors_headers(ENCODER / "model.safetensors")
    matrices = sum(2 * header.values for name, header in headers.items() if name.endswith(".values"))  # 16 bits, when loaded
    return matrices + sum(header.bytes for name, header in headers.items() if not name.endswith((".values", ".scales")))
