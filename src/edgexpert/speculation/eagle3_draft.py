"""EAGLE-3 as a draft: token trees from the target's own features."""

from __future__ import annotations

import torch
from torch import Tensor

from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.eagle3 import Eagle3Model, KeyValue
from edgexpert.speculation.tree import Level, build_tree, top_log_probs
from edgexpert.stage import TokenTree


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Eagle3Draft:
    """Drafts with an `Eagle3Model`.

    The feature of position t goes in together with token t + 1. Keys and values that stay come from the target's features
    alone; those of drafted tokens, which rest on the draft's own states, last for one tree.
    """

    name = "eagle3"

    def __init__(self, model: Eagle3Model) -> None:
        self.model = model
        self.fused_layers: tuple[int, ...] = model.config.fused_layers
        self.bytes_read = 0.0
        parts = {name: _bytes(list(child.parameters())) for name, child in model.named_children()}
        self._fuse_bytes = sum(parts.get(name, 0) for name in ("fc", "input_norm", "fc_norm"))
        self._step_bytes = sum(parts[name] for name in ("midlayer", "norm", "lm_head"))
        self.reset()

    def reset(self) -> None:
        """Forgets the text."""
        weight = self.model.fc.weight
        self._tokens = torch.empty(0, dtype=torch.int64, device=weight.device)  # observed, not in the cache yet
        self._hidden = weight.new_empty(0, self.model.config.hidden_size)  # their fused features
        heads, width = self.model.config.num_key_value_heads, self.model.config.head_dim
        self._past: KeyValue = (weight.new_empty(heads, 0, width), weight.new_empty(heads, 0, width))

    @torch.inference_mode()
    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n], with target features [n, 3 * Ht]."""
        assert features is not None, "EAGLE-3 drafts from the target's features"
        self._tokens = torch.cat([self._tokens, tokens.to(self._tokens)])
        self._hidden = torch.cat([self._hidden, self.model.fuse(features.to(self._hidden))])
        self.bytes_read += self._fuse_bytes

    @torch.inference_mode()
    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``."""
        assert len(self._tokens) > 0, "each proposal needs the target's features of the token before it"
        length = self._past[0].shape[-2]
        follow = torch.cat([self._tokens[1:], self._tokens.new_tensor([root])])
        state, new = self._step(follow, self._hidden, length, self._past)
        self._past = _join(self._past, new)
        self._tokens, self._hidden = self._tokens[:0], self._hidden[:0]

        hidden, past = state[-1:], self._past  # states of a level's nodes [n, H]; keys and values that grow with the levels
        stable = past[0].shape[-2]
        ancestry = torch.empty(1, 0, dtype=torch.bool, device=hidden.device)  # [n, drafted tokens in past]

        def expand(level: Level) -> tuple[Tensor, Tensor]:
            nonlocal hidden, past, ancestry
            drafted = past[0].shape[-2] - stable
            tokens, parents = level.tokens.to(hidden.device), level.parents.to(hidden.device)
            if expand.depth > 0:  # type: ignore[attr-defined]
                pass
            return tokens, parents

        return build_tree(root, expand, shape)
