"""Speculative decoding with a given acceptance length, to time real shapes without a trained model or draft.

A recorded text supplies the tokens. Each tree is drafted as usual, at its usual cost; then its likeliest path is given the next
tokens of the text, and as many of them are accepted as bring the acceptance length asked for. Nothing but time and bytes means
anything here, and every result says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.model.storage import calibration_text
from edgexpert.runtime.engine import Engine
from edgexpert.runtime.results import Generation, Timing
from edgexpert.speculation.draft import TreeShape


def replay(engine: Engine, prompt: Sequence[int], text: Sequence[int], acceptance: float, shape: TreeShape) -> Generation:
    """Decodes ``text`` after ``prompt``, both token ids, as if drafts were accepted to ``acceptance`` tokens a stage.

    Raises:
        UserError: trees of this shape cannot bring that acceptance length.
    """
    if not 1 <= acceptance <= shape.depth + 1:
        raise UserError(f"an acceptance length of {acceptance} needs a tree of that depth less one; give one from 1 to "
                        f"{shape.depth + 1}, or a larger `TreeShape.depth`")
    started = time.perf_counter()
    run, _ = engine.prefill(prompt, len(text) + shape.size)
    run.committed.append(text[0])
    first, done, owed = time.perf_counter(), 1, 0.0
    while True:
        owed += acceptance - 1  # what a shallow tree cannot bring, later ones do
        tree = engine.propose(run, shape)
        accepted = min(int(owed + 1e-9), int(tree.depth.max()))
        if done + accepted >= len(text):
            break
        owed -= accepted
        if owed > 3 * acceptance + 3:
            raise UserError(f"the drafted trees are too shallow for an acceptance length of {acceptance}; give a draft, and "
                            "larger trees")
        tree, path = relabelled(tree, text[done : done + accepted])
        stage = Stage.verify(tree, run.cache.length)
        output = engine.run_stage(stage, run)
        done += len(engine.commit(run, stage, path, output, text[done + accepted]))
        run.speculation.record(tree.candidates, accepted, accepted + 1)
    ended = time.perf_counter()
    timing = Timing(ttft_s=first - started, total_s=ended - started, tpot_s=(ended - first) / max(1, done - 1))
    result = engine.result(run, prompt, list(text[:done]), "", "replayed", timing)
    result.notes = [*result.notes, f"replayed: {acceptance} tokens of a recorded text a stage; only time and bytes count"]
    return result


def recorded_tokens(engine: Engine, count: int) -> list[int]:
    """The first ``count`` tokens of the recorded text: the package's sample text, again and again."""
    ids = engine.encode(" ".join(calibration_text()))
    return (ids * (count // len(ids) + 1))[:count]


def relabelled(tree: TokenTree, tokens: Sequence[int]) -> tuple[TokenTree, list[int]]:
    """The tree with ``tokens`` on the path to its likeliest node of that depth, and the nodes of the path, the root first."""
    labels, depth = tree.tokens.clone(), len(tokens)
    likeliest = torch.where(tree.depth == depth, tree.path_log_prob, -torch.inf).argmax()
    path = tree.mask[likeliest].nonzero().flatten().tolist()
    assert len(path) == depth + 1, "the caller looked at the tree's depth"
    for parent, node, token in zip(path, path[1:], tokens, strict=False):
        for sibling in tree.children[parent].values():
            if int(labels[sibling]) == token:
                labels[sibling] = labels[node]  # siblings stay distinct
        labels[node] = token
    return TokenTree(labels, tree.parents, tree.path_log_prob), path
