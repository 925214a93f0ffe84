"""Medusa heads: each guesses one token further ahead from the target's last state alone (Medusa, arXiv 2401.10774, 2.1.1).

The heads know nothing of each other's guesses, so all nodes of one depth get the same children.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from edgexpert.core.errors import UserError
from edgexpert.core.stage import TokenTree
from edgexpert.kernels.dense import top_log_probs
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.fit import MEDUSA, check_medusa
from edgexpert.speculation.tree import Level, build_tree


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of the heads, and of the target that they are for."""

    medusa_num_heads: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    rms_norm_eps: float


class MedusaHead(nn.Module):
    """A residual block, which changes nothing at first, and an output head."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.block = nn.Linear(config.hidden_size, config.hidden_size)
        nn.init.zeros_(self.block.weight)
        nn.init.zeros_(self.block.bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed states [..., H]."""
        return self.lm_head(hidden + F.silu(self.block(hidden)))


class MedusaModel(nn.Module):
    """The heads, with a copy of the target's final norm: the engine's features are states before it."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.medusa_num_heads))


class MedusaDraft:
    """Drafts with a `MedusaModel`. Its feature is the input of the final norm: of "layer" L in a target of L layers."""

    name = "medusa"

    def __init__(self, model: MedusaModel) -> None:
        self.model = model
        self.fused_layers: tuple[int, ...] = (model.config.num_hidden_layers,)
        self.norm_bytes, self.head_bytes = (sum(weight.nbytes for weight in part.parameters())
                                            for part in (model.norm, model.heads[0]))

    def start(self) -> MedusaState:
        """The state of a text that begins."""
        return MedusaState(self)


class MedusaState:
    """The target's last state of one text."""

    def __init__(self, draft: MedusaDraft) -> None:
        self._draft = draft
        self.bytes_read = 0.0
        self._state: Tensor | None = None  # of the token before the root, [1, H]

    def fork(self, length: int) -> MedusaState:
        """The state of another text: only its last token matters, and that is to come."""
        return MedusaState(self._draft)

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n], with target features [n, H]."""
        assert features is not None
        self._state = features[-1:]

    @torch.no_grad()
    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``, no deeper than there are heads."""
        assert self._state is not None, "the target's feature of the token before the root is needed"
        model = self._draft.model
        hidden = model.norm(self._state.to(model.norm.weight))
        self.bytes_read += self._draft.norm_bytes
        heads = iter(model.heads)

        def expand(level: Level) -> tuple[Tensor, Tensor]:
            self.bytes_read += self._draft.head_bytes
            tokens, log_probs = top_log_probs(next(heads)(hidden), shape.top_k)  # [1, k]
            return tokens.expand(len(level.tokens), -1), log_probs.expand(len(level.tokens), -1)

        return build_tree(root, expand, replace(shape, depth=min(shape.depth, len(model.heads))))


def save_medusa(model: MedusaModel, folder: Path) -> None:
    """Writes heads as a folder of ``config.json`` and ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", **asdict(model.config)}, indent=2) + "\n")


def load_medusa(folder: Path, target_config: PreTrainedConfig) -> MedusaModel:
    """Loads heads for a target.

    Raises:
        UserError: they are damaged, incomplete, or not for this target.
    """
    try:
        raw = json.loads((folder / "config.json").read_text())
        model = MedusaModel(MedusaConfig(**{name: raw[name] for name in MedusaConfig.__dataclass_fields__}))
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the folder {folder} holds no Medusa heads; get a complete copy, or train them again") from error
    text_config = target_config.get_text_config()
    check_medusa(folder, asdict(model.config), {name: getattr(text_config, name) for name in MEDUSA})
    return model
