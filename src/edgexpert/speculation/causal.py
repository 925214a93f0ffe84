"""A smaller causal language model as draft."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from edgexpert.core.errors import UserError
from edgexpert.core.stage import TokenTree
from edgexpert.kernels.dense import top_log_probs
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.tree import Level, build_tree


def load_causal_draft(name: str | Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int, dtype: torch.dtype,
                      device: torch.device | str = "cpu") -> CausalDraft:
    """Loads a causal language model from a folder or the Hub.

    Args:
        tokenizer: the target's; the draft's must have the same tokens.
        vocab_size: the target's.

    Raises:
        UserError: it cannot be loaded, has another vocabulary, or keeps a state that cannot be cut back.
    """
    try:
        own = AutoTokenizer.from_pretrained(name)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"the folder {name} holds no causal language model with tokenizer that can be a draft; "
                        "give a folder that transformers can load") from error
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(f"the draft {name} has another vocabulary than the model; give a draft that shares its tokenizer")
    return CausalDraft(model.to(device), vocab_size)  # type: ignore[arg-type]


class CausalDraft:
    """Drafts with a causal language model.

    Args:
        vocab_size: the target's; token ids from there on, which some models have as padding, are never drafted.
    """

    name = "causal"
    fused_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        if getattr(model, "_is_stateful", False):
            raise UserError("a recurrent model cannot take back drafted tokens; give a draft with attention alone")
        self.model = model
        self.vocab_size = vocab_size
        weights = sum(weight.nbytes for weight in model.parameters())  # tied weights come once
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        tied = model.config.tie_word_embeddings  # then the head reads them all
        self._row_bytes = 0 if tied else embedding[0].nbytes
        self._step_bytes = weights - (0 if tied else embedding.nbytes)

    def start(self) -> CausalState:
        """The state of a text that begins."""
        return CausalState(self)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache) -> tuple[Tensor, float]:
        """Logits [n, V] of tokens [n] that see, by ``mask`` [n, cached + n], the cache and one another; and the bytes read."""
        bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        bias.masked_fill_(~mask, torch.finfo(bias.dtype).min)
        out = self.model(input_ids=tokens[None], position_ids=positions[None], attention_mask=bias[None, None],
                         cache=cache, use_cache=True)
        logits: Tensor = out.logits[0, :, :self.vocab_size]
        return logits, self._step_bytes + len(set(tokens.tolist())) * self._row_bytes


class CausalState:
    """Cache of one text. It holds committed tokens; those of a tree last for one tree."""

    def __init__(self, draft: CausalDraft) -> None:
        self._draft, self.bytes_read = draft, 0.0
        self._cache = DynamicCache()
        self._tokens: list[int] = []  # observed, not in the cache yet

    def fork(self, length: int) -> CausalState:
        """The state of a text that begins with the first ``length`` tokens of this one."""
        other, cached = CausalState(self._draft), self._cache.get_seq_length()
        other._cache, other._tokens = deepcopy(self._cache), self._tokens[: max(length - cached, 0)]
        other._crop(length)
        return other

    def _crop(self, length: int) -> None:
        self._cache.crop(min(length - self._cache.get_seq_length(), 0))  # transformers wants how many to drop, negative

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n]."""
        self._tokens += tokens.tolist()

    @torch.no_grad()
    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``."""
        device = self._draft.model.device
        start = self._cache.get_seq_length()
        committed = start + len(self._tokens)
        tokens = torch.tensor([*self._tokens, root], device=device)
        causal = torch.ones(len(tokens), committed + 1, dtype=torch.bool, device=device).tril(start)
        logits = self._forward(tokens, torch.arange(start, committed + 1, device=device), causal)[-1:]
        self._tokens = []
        ancestors = torch.empty(1, 0, dtype=torch.bool, device=device)  # among drafted tokens, [n, drafted]
        depth = 0

        def expand(level: Level) -> tuple[Tensor, Tensor]:
            nonlocal logits, ancestors, depth
            if depth > 0:
                tokens = level.tokens.to(device)
                itself = torch.eye(len(tokens), dtype=torch.bool, device=device)
                ancestors = torch.cat([ancestors[level.parents.to(device)], itself], 1)
                mask = torch.cat([ancestors.new_ones(len(tokens), committed + 1), ancestors], 1)
                logits = self._forward(tokens, torch.full_like(tokens, committed + depth), mask)
            depth += 1
            return top_log_probs(logits, shape.top_k)

        tree = build_tree(root, expand, shape)
        self._crop(committed)
        return tree

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        logits, read = self._draft.forward(tokens, positions, mask, self._cache)
        self.bytes_read += read
        return logits

