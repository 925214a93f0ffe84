"""The key/value cache of a tree-decoding engine: preallocated, appended in place, the accepted path kept by a gather."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from edgexpert.core.library import Cache, CacheLayerMixin
from edgexpert.weights.memory import huge_pages


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
        start = self.append(key_states.shape[2])
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def append(self, tokens: int) -> int:
        """Makes room for ``tokens`` behind the others, to be filled in by the caller; returns where they begin."""
        start = self.length
        assert start + tokens <= self.capacity, "the engine checks the context before a stage"
        self.length = start + tokens
        return start

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Goes on in other memory of its sizes."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            keys[:, :, : self.length] = self.keys[:, :, : self.length]
            values[:, :, : self.length] = self.values[:, :, : self.length]
        self.keys, self.values, self.is_initialized = keys, values, True

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
    """One `TreeLayer` for each decoder layer.

    Attributes:
        keys, values: of all layers, [layers, 1, heads, capacity, dim], after `together`.
    """

    keys: Tensor | None = None
    values: Tensor | None = None

    def __init__(self, layers: int, capacity: int) -> None:
        self.tree_layers = [TreeLayer(capacity) for _ in range(layers)]
        super().__init__(layers=self.tree_layers)
        self.capacity = capacity

    @property
    def length(self) -> int:
        return self.tree_layers[0].length

    def together(self, heads: int, dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all layers, which now have one piece of memory each; for layers of the same sizes, float32."""
        if self.keys is None or self.values is None:
            shape = (2, len(self.tree_layers), 1, heads, self.capacity, dim)
            memory = huge_pages(4 * prod(shape))
            self.keys, self.values = torch.empty(shape) if memory is None else memory.view(torch.float32).view(shape)
            for layer, keys, values in zip(self.tree_layers, self.keys, self.values, strict=True):
                layer.move(keys, values)
        return self.keys, self.values

    def append(self, tokens: int) -> int:
        """Makes room in all layers; as `TreeLayer.append`."""
        start = self.length
        for layer in self.tree_layers:
            layer.append(tokens)
        return start

    def take(self, other: TreeCache, length: int) -> None:
        """Begins with the first ``length`` tokens of another cache."""
        for layer, earlier in zip(self.tree_layers, other.tree_layers, strict=True):
            layer.take(earlier, length)

    def keep(self, prefix: int, path: Sequence[int]) -> None:
        """After a verify stage: of the tokens behind ``prefix``, only the nodes of ``path`` stay, in its order."""
        if list(path) != list(range(len(path))):
            nodes = prefix + torch.tensor(path, dtype=torch.int64)
            for states in self._states():
                states[..., prefix : prefix + len(path), :] = states[..., nodes, :]  # advanced indexing copies first
        for layer in self.tree_layers:
            layer.length = prefix + len(path)

    def _states(self) -> list[Tensor]:
        """All keys and values, in as few tensors as there are."""
        if self.keys is not None and self.values is not None:
            return [self.keys, self.values]
        return [states for layer in self.tree_layers for states in (layer.keys, layer.values) if states is not None]


def bytes_per_token(cache: Cache) -> int:
    """Bytes of one token's keys and values in all layers; 0 before the first stage."""
    return sum(
        states.shape[1] * states.shape[3] * states.element_size()
        for layer in cache.layers
        for states in (layer.keys, layer.values)
        if states is not None
    )
