"""Sizes of a model, of its EAGLE-3 draft and of the prompt encoder, derived from their ``config.json``.

Norm weights and biases are left out: together they are less than a thousandth of a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from edgexpert.core.errors import UserError
from edgexpert.core.resources import MODELS, PACKAGE, PUBLISHED, bundled_folder


class Matrix(NamedTuple):
    """A weight matrix; an input channel multiplies ``outputs`` weights."""

    inputs: int
    outputs: int


def parameters(matrices: tuple[Matrix, ...]) -> int:
    return sum(prod(matrix) for matrix in matrices)


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one layer.

    Attributes:
        before, after: matrices before the scores (queries, keys, values) and after them (output).
        heads: query heads.
        cached: values that the KV cache keeps for a token.
        score_macs: multiplications of one token with one cached token, scores and weighted sum together.
    """

    before: tuple[Matrix, ...]
    after: tuple[Matrix, ...]
    heads: int
    cached: int
    score_macs: int

    @classmethod
    def grouped(cls, inputs: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> AttentionShape:
        queries, keys = heads * head_dim, kv_heads * head_dim
        before = (Matrix(inputs, queries), Matrix(inputs, keys), Matrix(inputs, keys))
        return cls(before, (Matrix(queries, hidden),), heads, 2 * keys, 2 * queries)

    @classmethod
    def latent(cls, config: Mapping[str, Any]) -> AttentionShape:
        """DeepSeek's multi-head latent attention; scores are computed on the latent, its projection absorbed."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        latent, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        values, rank = config["v_head_dim"], config.get("q_lora_rank")
        query = heads * (nope + rope)
        queries = (Matrix(hidden, rank), Matrix(rank, query)) if rank else (Matrix(hidden, query),)
        before = (*queries, Matrix(hidden, latent + rope), Matrix(latent, heads * (nope + values)))
        return cls(before, (Matrix(heads * values, hidden),), heads, latent + rope, heads * (2 * latent + rope))

    @property
    def parameters(self) -> int:
        return parameters(self.before + self.after)


@dataclass(frozen=True)
class DraftShape:
    """An EAGLE-3 draft: one layer that sees token embedding and feature side by side (arXiv 2503.01840, section 3.1).

    Attributes:
        fuse: joins three features of the target, once a stage.
        beam: candidates that one step runs; EAGLE's own top-k, and this project's ``--tree-top-k``.
    """

    fuse: Matrix
    attention: AttentionShape
    feed_forward: tuple[Matrix, ...]
    head: Matrix
    beam: int = 10

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DraftShape:
        config = {**config, **(config.get("transformer_layer_config") or {})}  # nested as speculators does, or flat
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        attention = AttentionShape.grouped(2 * hidden, hidden, heads, config["num_key_value_heads"],
                                           config.get("head_dim") or hidden // heads)
        return cls(
            fuse=Matrix(3 * (config.get("target_hidden_size") or hidden), hidden),
            attention=attention,
            feed_forward=(Matrix(hidden, 2 * inner), Matrix(inner, hidden)),
            head=Matrix(hidden, config.get("draft_vocab_size") or config["vocab_size"]),
        )

    @property
    def streamed(self) -> int:
        """Weights that every step reads."""
        return self.attention.parameters + parameters((*self.feed_forward, self.head))


@dataclass(frozen=True)
class ModelShape:
    """Attributes:
        moe_layers: which layers have experts; the others have a dense feed-forward network.
        intermediate: of one routed expert.
        shared_intermediate: of all shared experts of a layer together.
        dense_intermediate: of a layer without experts.
    """

    name: str
    model_type: str
    hidden: int
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    dense_intermediate: int
    vocabulary: int
    attention: AttentionShape
    draft: DraftShape | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], draft: Mapping[str, Any] | None = None, name: str | None = None) -> ModelShape:
        """The shape of a model from what its ``config.json`` holds (``config.to_dict()`` of a transformers configuration).

        Raises:
            UserError: names the key that is missing.
        """
        try:
            return cls._of(config, draft, name)
        except KeyError as error:
            raise UserError(f"the model configuration has no {error.args[0]!r}, which the simulator needs; give the "
                            "config.json of an MoE model") from None

    @classmethod
    def _of(cls, config: Mapping[str, Any], draft: Mapping[str, Any] | None, name: str | None) -> ModelShape:
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        intermediate = _first(config, "moe_intermediate_size", "intermediate_size")
        shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * intermediate
        if config.get("kv_lora_rank"):
            attention = AttentionShape.latent(config)
        else:
            attention = AttentionShape.grouped(hidden, hidden, heads, config.get("num_key_value_heads") or heads,
                                               config.get("head_dim") or hidden // heads)
        step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
        moe_layers = tuple(layer for layer in range(config.get("first_k_dense_replace") or 0, layers)
                           if layer not in dense and (layer + 1) % step == 0)
        return cls(
            name or config.get("_name_or_path") or config["model_type"], config["model_type"], hidden, layers, moe_layers,
            experts, config["num_experts_per_tok"], intermediate, shared, config["intermediate_size"], config["vocab_size"],
            attention, DraftShape.of(draft) if draft else None,
        )

    @property
    def expert(self) -> tuple[Matrix, Matrix]:
        """Gate and up as one matrix, and down."""
        return _gated(self.hidden, self.intermediate)

    @property
    def shared(self) -> tuple[Matrix, ...]:
        return _gated(self.hidden, self.shared_intermediate) if self.shared_intermediate else ()

    @property
    def dense(self) -> tuple[Matrix, Matrix]:
        return _gated(self.hidden, self.dense_intermediate)

    @property
    def router(self) -> Matrix:
        return Matrix(self.hidden, self.experts)

    @property
    def lm_head(self) -> Matrix:
        return Matrix(self.hidden, self.vocabulary)

    def parameters(self) -> dict[str, int]:
        """Weights of the whole model by part; ``expert`` is one expert, ``experts`` all routed ones."""
        moe = len(self.moe_layers)
        return {
            "expert": parameters(self.expert),
            "experts": moe * self.experts * parameters(self.expert),
            "attention": self.layers * self.attention.parameters,
            "router": moe * prod(self.router),
            "shared_experts": moe * parameters(self.shared),
            "dense": (self.layers - moe) * parameters(self.dense),
            "lm_head": prod(self.lm_head),
        }


def _gated(hidden: int, intermediate: int) -> tuple[Matrix, Matrix]:
    return Matrix(hidden, 2 * intermediate), Matrix(intermediate, hidden)


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name):
            return int(config[name])
    raise KeyError(names[0])


def model_named(name: str) -> ModelShape:
    """One of `MODELS`, a bundled model, or the one whose ``config.json`` is the file or folder ``name``; a ``draft`` folder
    beside that file may hold the configuration of its draft.

    Raises:
        UserError: there is none; lists those there are.
    """
    if name in MODELS:
        config, draft = (_read(PUBLISHED / f"{name}{kind}.json") for kind in ("", ".draft"))
        return ModelShape.of(config, draft, name)
    bundled = bundled_folder(name)
    path = bundled if bundled.is_dir() else Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"there is no model {name!r}; give one of {', '.join(MODELS)}, or a folder with a config.json")
    draft_path = path.parent / "draft" / "config.json"
    return ModelShape.of(_read(path), _read(draft_path) if draft_path.is_file() else None, path.parent.name)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the file {path} cannot be read as JSON ({error}); give the config.json of a model") from None
    if not isinstance(config, dict):
        raise UserError(f"the file {path} does not hold a JSON object; give the config.json of a model")
    return config


def encoder_matrices() -> tuple[Matrix, ...]:
    """What the bundled prompt encoder multiplies; its embedding table is only looked up."""
    config = _read(PACKAGE / "encoder" / "minilm-l6-v2" / "config.json")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer = (*(Matrix(hidden, hidden),) * 4, Matrix(hidden, inner), Matrix(inner, hidden))
    return layer * int(config["num_hidden_layers"])
