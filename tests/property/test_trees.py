"""Whatever a draft proposes, trees are well formed and the text stays that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgexpert.core.stage import TokenTree
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.sampling import Sampler, SamplingParams
from edgexpert.speculation.tree import Level, build_tree
from edgexpert.speculation.verify import SamplingVerifier
from tests.speculation.drafts import GarbageDraft, OracleDraft, RandomDraft

VOCAB, NEW = 12, 12
PROMPT = [3, 1, 4]

shapes = st.builds(TreeShape, size=st.integers(1, 24), depth=st.integers(1, 5), top_k=st.integers(1, 4))
params = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]), top_k=st.sampled_from([0, 3]),
                   top_p=st.sampled_from([1.0, 0.8]), repetition_penalty=st.sampled_from([1.0, 1.3]),
                   seed=st.integers(0, 99))


LOGITS = 2 * torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


def model(text: Sequence[int]) -> Tensor:
    """A fake target: logits [V] that depend on the last two tokens."""
    return LOGITS[text[-2], text[-1]]


def plain(sampler: Sampler) -> list[int]:
    text = list(PROMPT)
    for _ in range(NEW):
        text.append(sampler.pick(model(text), text, len(text)))
    return text[len(PROMPT):]


def tree_logits(tree: TokenTree, text: list[int]) -> Tensor:
    before = tree.tokens[tree.parents]  # [N]
    before[0] = text[-2]
    return LOGITS[before, tree.tokens]


def speculative(draft: Draft, sampler: Sampler, shape: TreeShape, keep: float = 1.0) -> list[int]:
    """Decodes with trees of which only the first share ``keep`` of the nodes is verified."""
    text = [*PROMPT, sampler.pick(model(PROMPT), PROMPT, len(PROMPT))]
    state, verifier = draft.start(), SamplingVerifier(sampler)
    state.observe(torch.tensor(PROMPT), None)
    while len(text) < len(PROMPT) + NEW:
        tree = state.propose(text[-1], shape)
        tree = tree.subtree(range(max(1, round(keep * len(tree)))))  # parents stand before children: any prefix is closed
        path, token = verifier.accept(tree, tree_logits(tree, text), text)
        assert tree.parents[path].tolist() == [-1, *path[:-1]]
        state.observe(tree.tokens[path], None)
        text += [*tree.tokens[path[1:]].tolist(), token]
    return text[len(PROMPT):][:NEW]


@settings(max_examples=25, deadline=None)
@given(params, shapes, st.sampled_from([1.0, 0.5, 0.0]))
def test_the_text_is_that_of_plain_decoding_for_any_draft_and_any_truncation(
    params: SamplingParams, shape: TreeShape, keep: float
) -> None:
    sampler = Sampler(params)
    truth = plain(sampler)
    for draft in (OracleDraft(truth), GarbageDraft(VOCAB), RandomDraft(VOCAB), OracleDraft(truth[::-1])):
        assert speculative(draft, sampler, shape, keep) == truth, draft.name


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), shapes, st.sampled_from([1.0, 0.1, 0.0]))
def test_trees_are_closed_bounded_and_as_full_as_they_can_be(seed: int, shape: TreeShape, spread: float) -> None:
    """Small spreads make many scores equal; a spread of 0 all of them."""
    generator = torch.Generator().manual_seed(seed)
    offers: list[Tensor] = []

    def expand(level: Level) -> tuple[Tensor, Tensor]:
        n = len(level.tokens)
        tokens = torch.stack([torch.randperm(VOCAB, generator=generator)[:shape.top_k] for _ in range(n)])
        log_probs = -spread * torch.randint(0, 3, tokens.shape, generator=generator).float()
        offers.append(log_probs)
        return tokens, log_probs

    tree = build_tree(5, expand, shape)  # that parents exist and stand first is asserted by TokenTree
    offered = sum(log_probs.numel() for log_probs in offers)
    assert tree.candidates == min(shape.size, offered)
    assert tree.depth.max() <= shape.depth
    assert (tree.path_log_prob[1:] <= tree.path_log_prob[tree.parents[1:]]).all()
    for node, children in enumerate(tree.children):
        assert len(children) == int((tree.parents == node).sum()), "siblings are distinct"
    assert torch.equal(tree.mask.sum(1) - 1, tree.depth)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), shapes, st.sampled_from([3.0, 1.0, 0.1, 0.0]))
def test_leaving_out_nodes_whose_children_cannot_enter_gives_the_same_tree(seed: int, shape: TreeShape, spread: float) -> None:
    """A node's children depend on its path alone, as those of a real draft do."""
    trees, expanded = [], []
    for expand_all in (True, False):
        paths: list[tuple[int, ...]] = [()]
        count = 0

        def expand(level: Level) -> tuple[Tensor, Tensor]:
            nonlocal paths, count
            if count > 0:
                paths = [(*paths[parent], token) for parent, token in zip(*(x.tolist() for x in level[::-1]), strict=True)]
            count += len(paths)
            draws = [torch.Generator().manual_seed(hash((seed, *path)) % 2**32) for path in paths]
            log_probs = torch.stack([-spread * torch.randint(0, 4, (shape.top_k,), generator=draw).float() for draw in draws])
            return torch.arange(shape.top_k).expand_as(log_probs), log_probs

        trees.append(build_tree(5, expand, shape, expand_all))
        expanded.append(count)
    assert all(torch.equal(getattr(trees[0], name), getattr(trees[1], name)) for name in ("tokens", "parents", "path_log_prob"))
    assert expanded[1] <= expanded[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1, exclude_max=True), max_size=70), st.sampled_from([0, 1, 3, 100]))
def test_the_mask_of_a_tree_is_every_nodes_walk_to_the_root(draws: list[float], width: int) -> None:
    """Parents among the last ``width`` nodes make deep trees, a chain for 1; 0 makes them all children of the root."""
    parents = [-1, *(max(0, node - width) + int(draw * min(width, node)) if width else 0
                     for node, draw in enumerate(draws, start=1))]
    tree = TokenTree(torch.arange(len(parents)), torch.tensor(parents), torch.zeros(len(parents)))
    for node in range(len(tree)):
        walk = [node]
        while walk[-1] > 0:
            walk.append(parents[walk[-1]])
        assert tree.mask[node].nonzero().flatten().tolist() == sorted(walk)
        assert tree.depth[node] == len(walk) - 1
