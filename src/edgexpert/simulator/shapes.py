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
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        latent, rope, nope = (_size(config, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        values, rank = _size(config, "v_head_dim"), _size_or(config, "q_lora_rank", 0)
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
        nested = config.get("transformer_layer_config")
        config = {**config, **(nested if isinstance(nested, dict) else {})}  # nested as speculators does, or flat
        hidden, inner, heads = (_size(config, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
        attention = AttentionShape.grouped(2 * hidden, hidden, heads, _size(config, "num_key_value_heads"),
                                           _size_or(config, "head_dim", hidden // heads))
        return cls(
            fuse=Matrix(3 * _size_or(config, "target_hidden_size", hidden), hidden),
            attention=attention,
            feed_forward=(Matrix(hidden, 2 * inner), Matrix(inner, hidden)),
            head=Matrix(hidden, _size_or(config, "draft_vocab_size", 0) or _size(config, "vocab_size")),
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
        hidden, layers, heads = (_size(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        experts = _size(config, "num_experts", "num_local_experts", "n_routed_experts")
        intermediate = _size(config, "moe_intermediate_size", "intermediate_size")
        shared = _size_or(config, "shared_expert_intermediate_size", 0) or _size_or(config, "n_shared_experts", 0) * intermediate
        if config.get("kv_lora_rank"):
            attention = AttentionShape.latent(config)
        else:
            attention = AttentionShape.grouped(hidden, hidden, heads, _size_or(config, "num_key_value_heads", heads),
                                               _size_or(config, "head_dim", 0) or max(1, hidden // heads))
        top_k, dense = _size(config, "num_experts_per_tok"), _dense_layers(config)
        step = _size_or(config, "decoder_sparse_step", 1)
        if layers * experts > MOST_EXPERTS or top_k > experts:
            raise UserError(f"a model of {layers} layers with {experts} experts each, of which a token takes {top_k}, cannot be "
                            "simulated; correct its config.json")
        moe_layers = tuple(layer for layer in range(_size_or(config, "first_k_dense_replace", 0), layers)
                           if layer not in dense and (layer + 1) % step == 0)
        if not moe_layers:
            raise UserError("the model configuration leaves no layer with experts; give the config.json of an MoE model")
        model_type = str(config["model_type"])
        return cls(
            name or str(config.get("_name_or_path") or model_type), model_type, hidden, layers, moe_layers, experts, top_k,
            intermediate, shared, _size(config, "intermediate_size"), _size(config, "vocab_size"), attention,
            DraftShape.of(draft) if draft else None,
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


LARGEST, MOST_EXPERTS = 2**24, 1_000_000
"""Of any size that a configuration names, and of the experts of all layers."""


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of several keys that is there and not 0. Raises KeyError where none is."""
    for name in names:
        if size := _size_or(config, name, 0):
            return size
    raise KeyError(names[0])


def _size_or(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise UserError(f"the key {name} of the model configuration must be a whole number up to {LARGEST}, not "
                        f"{str(value)[:30]}; correct it")
    return value or default


def _dense_layers(config: Mapping[str, Any]) -> set[int]:
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise UserError("the key mlp_only_layers of the model configuration must be a list of whole numbers; correct it")
    return set(layers)


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
    except (OSError, ValueError, RecursionError) as error:
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
