"""The key/value cache of a tree-decoding engine: preallocated, appended in place, the accepted path kept by a gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, heads, capacity, dim] each; the two may differ in heads and dim (latent attention)."""

    is_sliding = False
    is_croppable = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[3])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        assert end <= self.capacity, "the engine checks the context before a stage"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, prefix: int, path: Tensor) -> None:
        """Keeps the first ``prefix`` entries and, behind them, those at ``prefix + path``."""
        if self.is_initialized and not torch.equal(path, torch.arange(len(path))):
            for states in (self.keys, self.values):
                assert states is not None
                states[:, :, prefix : prefix + len(path)] = states[:, :, prefix + path]  # advanced indexing copies first
        self.length = prefix + len(path)

    def take(self, other: TreeLayer, length: int) -> None:
        """Begins with the first ``length`` entries of another layer."""
        if other.is_initialized and length > 0:
            assert other.keys is not None and other.values is not None
            self.update(other.keys[:, :, :length], other.values[:, :, :length])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class TreeCache(Cache):
    """One `TreeLayer` for each decoder layer."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.tree_layers = [TreeLayer(capacity) for _ in range(layers)]
        super().__init__(layers=self.tree_layers)
        self.capacity = capacity

    @property
    def length(self) -> int:
        return self.tree_layers[0].length

    def take(self, other: TreeCache, length: int) -> None:
        """Begins with the first ``length`` tokens of another cache."""
        for layer, earlier in zip(self.tree_layers, other.tree_layers, strict=True):
            layer.take(earlier, length)

    def keep(self, prefix: int, path: Sequence[int]) -> None:
        """After a verify stage: of the tokens behind ``prefix``, only the nodes of ``path`` stay, in its order."""
        nodes = torch.tensor(path, dtype=torch.int64)
        for layer in self.tree_layers:
            layer.keep(prefix, nodes)


def bytes_per_token(cache: Cache) -> int:
    """Bytes of one token's keys and values in all layers; 0 before the first stage."""
    return sum(
        states[:1, :, :1].numel() * states.element_size()
        for layer in cache.layers
        for states in (layer.keys, layer.values)
        if states is not None
    )
