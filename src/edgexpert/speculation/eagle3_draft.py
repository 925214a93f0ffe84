"""EAGLE-3 as a draft: token trees from the target's own features."""

from __future__ import annotations

import torch
from torch import Tensor

from edgexpert.core.stage import TokenTree
from edgexpert.kernels.dense import top_log_probs
from edgexpert.kernels.modules import weights_of
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.eagle3 import Eagle3Model
from edgexpert.speculation.eagle3_step import DraftCache, NativeStep, step_of
from edgexpert.speculation.tree import Level, build_tree


class Eagle3Draft:
    """Drafts with an `Eagle3Model`."""

    name = "eagle3"

    def __init__(self, model: Eagle3Model) -> None:
        self.model = model
        self.step = step_of(model)
        self.fused_layers: tuple[int, ...] = model.config.fused_layers
        size = {name: sum(weight.nbytes for _, weight in weights_of(part)) for name, part in model.named_children()}
        self.fuse_bytes = sum(size.get(name, 0) for name in ("input_norm", "fc_norm", "fc"))
        self.step_bytes = size["midlayer"]
        self.head_bytes = size["norm"] + size["lm_head"]

    @property
    def is_native(self) -> bool:
        """Whether the layer runs in one native call."""
        return isinstance(self.step, NativeStep)

    def start(self) -> Eagle3State:
        """The state of a text that begins."""
        return Eagle3State(self)


class Eagle3State:
    """What the draft knows of one text.

    The feature of position t goes in together with token t + 1. Keys and values that stay come from the target's features
    alone; those of drafted tokens, which rest on the draft's own states, last for one tree.
    """

    def __init__(self, draft: Eagle3Draft) -> None:
        self._draft, self.bytes_read = draft, 0.0
        config, weight = draft.model.config, draft.model.norm.weight
        self._tokens: list[Tensor] = []  # observed, not in the cache yet, int64 [n] each
        self._features: list[Tensor] = []  # theirs, [n, 3 * Ht] each: fused in one product where a tree is wanted
        self._cache = DraftCache(config, weight)

    def fork(self, length: int) -> Eagle3State:
        """The first ``length`` tokens' state; the last of them was paired with the token that the texts have in common, too."""
        other, pending = Eagle3State(self._draft), max(length - self._cache.length, 0)
        other._cache.take(self._cache, min(self._cache.length, length))
        if self._tokens:
            other._tokens, other._features = [torch.cat(self._tokens)[:pending]], [torch.cat(self._features)[:pending]]
        return other

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n], with target features [n, 3 * Ht]."""
        assert features is not None
        assert len(tokens) == len(features)
        weight = self._draft.model.norm.weight
        self._tokens.append(tokens.to(weight.device, torch.int64))
        self._features.append(features.to(weight))

    @torch.no_grad()
    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``."""
        assert self._tokens, "the target's feature of the token before the root is needed"
        start, observed = self._cache.length, torch.cat(self._tokens)
        tokens = torch.cat([observed[1:], observed.new_tensor([root])])
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        hidden = self._draft.model.fuse(torch.cat(self._features))
        self.bytes_read += self._draft.fuse_bytes
        states = self._step(tokens, hidden, positions, None)[-1:]  # of the nodes of a level, [n, H]
        self._tokens, self._features = [], []
        length = self._cache.length  # what lies behind lasts for this tree
        ancestors = torch.empty(1, 0, dtype=torch.bool, device=tokens.device)  # among drafted tokens, [n, drafted]
        depth = 0

        def expand(level: Level) -> tuple[Tensor, Tensor]:
            nonlocal states, ancestors, depth
            if depth > 0:
                tokens, parents = level.tokens.to(states.device), level.parents.to(states.device)
                itself = torch.eye(len(tokens), dtype=torch.bool, device=states.device)
                ancestors = torch.cat([ancestors[parents], itself], 1)
                mask = torch.cat([ancestors.new_ones(len(tokens), length), ancestors], 1)
                positions = torch.full_like(tokens, length + depth - 1)
                states = self._step(tokens, states.index_select(0, parents), positions, mask)
            depth += 1
            self.bytes_read += self._draft.head_bytes
            draft_ids, log_probs = top_log_probs(self._draft.model.logits(states), shape.top_k)
            return self._draft.model.to_target(draft_ids), log_probs

        tree = build_tree(root, expand, shape)
        self._cache.length = length
        return tree

    def _step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        rows = len(set(tokens.tolist()))
        self.bytes_read += self._draft.step_bytes + rows * self._draft.model.embed_tokens.weight[0].nbytes
        return self._draft.step(tokens, hidden, positions, self._cache, mask)
