"""Synthetic traces of models that cannot be run here: routing drawn at random so that published facts come out.

The logits of a layer's experts are a sum of three Gaussian parts: how popular an expert is in the layer, how it suits the
position (one vector for all candidates of a depth, similar to that of the position before), and each token's own part. Two
published facts of Qwen3-30B-A3B fix the shares of the first two (`fit`): at acceptance length 4.3, 64 candidates route to
52.1 distinct experts of 128 (section I), and 88.4 % of same-depth pairs share three or more of eight (section III-B; the paper
says "up to", we take it as the mean). How similar consecutive positions are, and how far logits spread, is assumed. Other
models have no published facts and get the same shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from edgexpert.core.checked import Range, require
from edgexpert.core.errors import UserError
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.policy import EXACT
from edgexpert.simulator.shapes import model_named
from edgexpert.trace.channels import generator
from edgexpert.trace.schema import Facts
from edgexpert.trace.trees import TREE, draw_tree, fit_sharpness, walk
from edgexpert.trace.write import Row, layer_row, stage_row, trace_writer

PROMPT_TOKENS, STAGES = Range(1, 32_768), Range(0, 1_000_000)  # a prompt's logits are in memory at once
LOGIT_SPREAD = 2.0  # assumed
DRAFT_STEPS = TREE.depth + 1  # EAGLE's code passes through its draft once more than its depth


@dataclass(frozen=True)
class RoutingModel:
    """Shares of the logits' variance; what is left of 1 is each token's own.

    Attributes:
        popularity: the same for every token of a layer.
        position: the same for candidates of one depth.
        memory: correlation of the position part between consecutive positions.
    """

    popularity: float
    position: float
    memory: float = 0.8  # assumed

    def logits(self, popularity: Tensor, positions: Tensor, depth: Tensor, random: torch.Generator) -> Tensor:
        """Router logits [L, T, E] of tokens at ``depth`` [T], for popularity [L, E] and position parts [L, D, E]."""
        own = torch.randn(len(popularity), len(depth), popularity.shape[1], generator=random)
        mixed = (self.popularity**0.5 * popularity[:, None] + self.position**0.5 * positions[:, depth]
                 + max(0.0, 1 - self.popularity - self.position) ** 0.5 * own)
        return LOGIT_SPREAD * mixed

    def positions(self, first: Tensor, count: int, random: torch.Generator) -> Tensor:
        """Position parts of ``count`` consecutive positions that begin with ``first`` [L, E]: [L, count, E]."""
        parts = [first]
        for _ in range(count - 1):
            fresh = torch.randn(first.shape, generator=random)
            parts.append(self.memory * parts[-1] + (1 - self.memory**2) ** 0.5 * fresh)
        return torch.stack(parts, 1)


FITTED = RoutingModel(popularity=0.394, position=0.390)
"""What `fit` finds for Qwen3's two facts."""


@dataclass(frozen=True)
class Published:
    """What a synthetic trace takes from a published model beside its sizes.

    Attributes:
        acceptance: Baseline's acceptance length on MT-Bench (Table IV).
        normalise: whether the router divides a token's weights by their sum.
    """

    acceptance: float
    normalise: bool


MODELS = {
    "granite-1b-a400m": Published(3.9, True),
    "olmoe-1b-7b": Published(4.0, False),
    "deepseek-v2-lite": Published(3.8, False),
    "qwen3-30b-a3b": Published(4.3, True),
}


def synthesise_trace(
    name: str,
    file: Path,
    stages: int = 16,
    prompt_tokens: int = 128,
    acceptance: float | None = None,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
    *,
    force: bool = False,
) -> None:
    """Writes a prefill stage and ``stages`` verify stages of a model that was never run.

    Args:
        acceptance: mean tokens a verify stage; the published one by default.
        advance: called after each stage.
        force: whether a file that is there may be replaced.

    Raises:
        UserError: there is no such model, the acceptance length cannot be reached with these trees, or the
            file cannot be written.
    """
    if name not in MODELS:
        raise UserError(f"there is no model {name!r} to synthesise; choose one of {', '.join(MODELS)}")
    require("prompt_tokens", prompt_tokens, PROMPT_TOKENS)
    require("stages", stages, STAGES)
    published, shape = MODELS[name], model_named(name)
    moe = len(shape.moe_layers)
    facts = Facts(
        model=name, model_type=shape.model_type, num_experts=shape.experts, top_k=shape.top_k, layers=list(shape.moe_layers),
        hidden=shape.hidden, intermediate=shape.intermediate, gate_up_outputs=2 * shape.intermediate,
        normalise=[published.normalise] * moe, scale=[1.0] * moe, draft="eagle3",
        policy=EXACT.resolved(model_type=shape.model_type, num_experts=shape.experts, top_k=shape.top_k).to_json(),
        channels="full", synthetic=True, seed=seed,
    )
    sharpness = fit_sharpness(acceptance or published.acceptance)
    with trace_writer(file, force) as writer:
        for stage, layers in _stages(facts, shape.vocabulary, stages, prompt_tokens, sharpness):
            writer.append(facts, stage, layers)
            advance()


def _stages(
    facts: Facts, vocabulary: int, stages: int, prompt_tokens: int, sharpness: float
) -> Iterator[tuple[Row, list[Row]]]:
    random = generator(facts.model, facts.seed)
    popularity = torch.randn(len(facts.layers), facts.num_experts, generator=random)

    def layers(positions: Tensor, depth: Tensor) -> list[Row]:
        logits = FITTED.logits(popularity, positions, depth, random)
        return [_layer(number, of_layer, facts) for number, of_layer in enumerate(logits)]

    here = torch.randn(popularity.shape, generator=random)  # the position part of the next token to run
    positions = FITTED.positions(here, prompt_tokens + 1, random)
    here = positions[:, -1]
    tokens = torch.randint(vocabulary, (prompt_tokens,), generator=random)
    prefill = Stage.prefill(tokens, importance=_importance(prompt_tokens, random))
    yield stage_row(prefill, 0, [], 1, 0), layers(positions, prefill.depth)
    prefix = prompt_tokens
    for _ in range(stages):
        tree = draw_tree(sharpness, vocabulary, random)
        accepted = walk(tree, random)
        positions = FITTED.positions(here, TREE.depth + 2, random)
        verify = Stage.verify(tree, prefix)
        yield stage_row(verify, 0, accepted, len(accepted), DRAFT_STEPS), layers(positions, tree.depth)
        here = positions[:, len(accepted)]
        prefix += len(accepted)


def _layer(number: int, logits: Tensor, facts: Facts) -> Row:
    gate = logits.softmax(-1)
    scores = Scores(gate, gate, facts.normalise[number], facts.scale[number])
    experts = gate.topk(facts.top_k).indices
    return layer_row(facts.layers[number], Routing(experts, scores.weights(experts), facts.num_experts), scores)


def _importance(tokens: int, random: torch.Generator) -> Tensor:
    """Weights of prompt tokens with mean 1: lognormal, so that about 45 % exceed 0.8, as with the bundled encoder."""
    weights = (0.8 * torch.randn(tokens, generator=random)).exp()
    return weights / weights.mean()


# -- the fit ---------------------------------------------------------------------------------------------------------------


def fit(distinct: float = 52.1, sharing: float = 0.884, acceptance: float = 4.3, samples: int = 100) -> RoutingModel:
    """The shares that give Qwen3's published facts, by two bisections on the same random numbers.

    Sharing among a depth depends on popularity and position together; with their sum fixed, the number of distinct experts of
    a tree falls as popularity takes more of it.

    Args:
        samples: trees that are drawn; 200 pairs of candidates for each.
    """
    common = _bisect(lambda share: pair_sharing(RoutingModel(share, 0), 200 * samples), sharing)
    random = generator("fit", "trees")
    sharpness = fit_sharpness(acceptance)
    trees = [draw_tree(sharpness, 1000, random) for _ in range(samples)]
    popularity = common * _bisect(
        lambda share: -distinct_experts(RoutingModel(share * common, (1 - share) * common), trees), -distinct
    )
    return RoutingModel(popularity, common - popularity)


def _bisect(rising: Callable[[float], float], target: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return (low + high) / 2


def pair_sharing(model: RoutingModel, pairs: int, num_experts: int = 128, top_k: int = 8, least: int = 3) -> float:
    """Share of same-depth pairs that have ``least`` or more experts in common."""
    random = generator("pairs")
    popularity = torch.randn(pairs, num_experts, generator=random)
    positions = torch.randn(pairs, 1, num_experts, generator=random)
    experts = model.logits(popularity, positions, torch.zeros(2, dtype=torch.int64), random).topk(top_k).indices  # [P, 2, k]
    common = (experts[:, 0, :, None] == experts[:, 1, None, :]).sum((1, 2))
    return float((common >= least).float().mean())


def distinct_experts(model: RoutingModel, trees: Sequence[TokenTree], num_experts: int = 128, top_k: int = 8) -> float:
    """Mean number of distinct experts that the tokens of a tree route to, over 8 layers a tree."""
    random = generator("distinct")
    count = 0
    for tree in trees:
        popularity = torch.randn(8, num_experts, generator=random)
        positions = model.positions(torch.randn(8, num_experts, generator=random), TREE.depth + 1, random)
        experts = model.logits(popularity, positions, tree.depth, random).topk(top_k).indices
        count += int(torch.zeros(8, num_experts).scatter_(1, experts.flatten(1), 1).sum())
    return count / (8 * len(trees))
