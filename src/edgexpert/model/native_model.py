"""A model that is native throughout: one call runs all decoder layers of a stage, under a policy or under none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.core.library import MaskFunction, forward_arguments
from edgexpert.core.stage import Stage
from edgexpert.kernels import layers
from edgexpert.kernels.layers import StageRule
from edgexpert.model.attention import asked_masks, attending, stage_mask
from edgexpert.model.blocks import decoder_layers
from edgexpert.model.cache import TreeCache
from edgexpert.model.native_layer import PREFIX, TREE, NativeLayer, same_states
from edgexpert.model.running import StageChoices


class NativeModel:
    """Takes the place of a model's ``forward``."""

    def __init__(self, model: PreTrainedModel, members: Sequence[NativeLayer], sees: MaskFunction) -> None:
        base = model.base_model
        self.embedding, self.rotary, self.norm = model.get_input_embeddings(), base.rotary_emb, base.norm
        self.head = model.get_output_embeddings()
        self.embedding_factor = float(getattr(base, "embedding_multiplier", 1.0))
        self.logits_divisor = float(getattr(model.config.get_text_config(), "logits_scaling", 1.0))
        self.members, self.block, self.sees = members, members[0].block, sees
        self.stack = layers.layer_stack([(member.native, member.experts) for member in members])

    def run(
        self, stage: Stage, cache: TreeCache, fused: Sequence[int], rule: StageRule | None, observes: bool = False
    ) -> tuple[Tensor, Tensor, StageChoices]:
        """One stage: logits and features as in `StageOutput`, and what was chosen.

        Args:
            rule: what the policy does; None where it leaves the stage to the router.
            observes: whether the choices hold what went through the layers, too.
        """
        tokens, positions = stage.tokens, stage.positions
        hidden = self.embed(tokens)
        keys, values = cache.together(self.members[0].kv_heads, self.members[0].dim)
        size = (len(self.members), len(tokens), self.block.top_k)
        choices = StageChoices.empty([member.block for member in self.members], size, rule, observes)
        features = torch.empty(len(tokens), len(fused) * hidden.shape[2])
        start = cache.append(len(tokens))
        mask = stage_mask(stage, self.sees)
        with attending(stage):
            cos, sin = self.rotary(hidden, position_ids=positions[None])
        hidden, choices.loaded = layers.run_layer_stack(
            self.stack, hidden, layers.context(cos, sin, keys, values, start, mask), fused, features, choices.experts,
            choices.weights, rule, choices.decided, choices.observed,
        )
        return self.logits(hidden[0] if stage.kind == "verify" else hidden[0, -1:]), features, choices

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [1, T, H]"""
        hidden: Tensor = self.embedding(tokens[None])
        return hidden if self.embedding_factor == 1.0 else hidden * self.embedding_factor

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V]"""
        logits: Tensor = self.head(self.norm(hidden))
        return logits if self.logits_divisor == 1.0 else logits.div_(self.logits_divisor)


def native_model(model: PreTrainedModel) -> NativeModel | None:
    """The model in one piece, where all of its layers are native, of the same sizes and mask, and nothing else is in it."""
    forwards = [layer.forward for layer in decoder_layers(model)]
    members = [forward for forward in forwards if isinstance(forward, NativeLayer) and forward.experts is not None]
    sizes = {(m.kv_heads, m.dim, m.block.num_experts, m.block.top_k) for m in members}
    if len(members) < len(forwards) or len(sizes) != 1:
        return None
    expected, asked = _library_logits(model)
    if len(asked) != 1:
        return None
    candidate = NativeModel(model, members, asked[0])
    cache = TreeCache(len(members), PREFIX + len(TREE))
    ours = [candidate.run(stage, cache, (), None)[0] for stage in STAGES]
    return candidate if all(same_states(a, b) for a, b in zip(ours, expected, strict=True)) else None


STAGES = (Stage.prefill(torch.arange(PREFIX)), Stage.verify(TREE, PREFIX))


@torch.no_grad()
def _library_logits(model: PreTrainedModel) -> tuple[list[Tensor], list[MaskFunction]]:
    """Logits of a text's last token and of a tree behind it, layer by layer, and the masks that the model asks for."""
    cache, logits = TreeCache(len(decoder_layers(model)), PREFIX + len(TREE)), []
    for stage in STAGES:
        with attending(stage), asked_masks() as asked:
            output = model(
                input_ids=stage.tokens[None], position_ids=stage.positions[None],
                logits_to_keep=1 if stage.kind == "prefill" else 0, **forward_arguments(model, cache),
            )
        logits.append(output.logits[0])
    return logits, asked
