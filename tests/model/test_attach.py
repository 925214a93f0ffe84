"""A policy on a model that the user drives."""

from __future__ import annotations

import pytest
import torch

import edgexpert
from edgexpert.core.errors import UserError
from edgexpert.policy import Techniques
from tests.conftest import make_model, make_tokenizer

PROMPT = "a fox and a crow met under an old tree"


def test_the_exact_policy_leaves_generate_and_its_logits_alone() -> None:
    model, tokenizer = make_model("qwen3_moe"), make_tokenizer()
    batch = tokenizer([PROMPT, PROMPT[::-1]], return_tensors="pt")
    before = model.generate(**batch, max_new_tokens=12, do_sample=False)
    logits = model(**batch).logits
    attached = edgexpert.attach(model, "exact", tokenizer=tokenizer)
    assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False), before)
    assert torch.equal(model(**batch).logits, logits)
    assert attached.ledger.decode["experts"] > 0


def test_generate_runs_through_every_technique_and_detach_undoes_it() -> None:
    model, tokenizer = make_model("olmoe"), make_tokenizer()
    batch = tokenizer([PROMPT], return_tensors="pt")
    logits = model(**batch).logits
    attached = edgexpert.attach(model, "edgexpert", tokenizer=tokenizer, keep_channels=0.5)
    model.generate(**batch, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    plain = 7 * attached.host.plain_decode_expert_bytes
    assert 0 < attached.ledger.decode["experts"] < plain
    assert not torch.equal(model(**batch).logits, logits)
    attached.detach()
    assert torch.equal(model(**batch).logits, logits)


def test_sequences_of_a_batch_are_decided_one_by_one() -> None:
    """Under reuse a sequence's logits do not depend on its neighbours in the batch."""
    model, tokenizer = make_model("qwen3_moe"), make_tokenizer()
    edgexpert.attach(model, Techniques("custom", prompt_wise_expert_reuse=True, theta1=2.0, theta2=1.0), tokenizer=tokenizer)
    other = "zz top, quick brown 0123456789 !?!?!?!"
    together = model(**tokenizer([PROMPT, other], return_tensors="pt")).logits
    for row, text in enumerate((PROMPT, other)):
        torch.testing.assert_close(together[row], model(**tokenizer([text], return_tensors="pt")).logits[0], atol=1e-4, rtol=1e-4)


def test_attaching_again_replaces_the_policy() -> None:
    model, tokenizer = make_model("olmoe"), make_tokenizer()
    logits = model(**tokenizer([PROMPT], return_tensors="pt")).logits
    edgexpert.attach(model, "edgexpert", tokenizer=tokenizer)
    edgexpert.attach(model, "exact", tokenizer=tokenizer)
    assert torch.equal(model(**tokenizer([PROMPT], return_tensors="pt")).logits, logits)


@pytest.mark.parametrize(("overrides", "part"), [
    ({"token_weight": "attention"}, "needs the attention that tokens receive"),
    ({"n_tri": 0}, "must be at least 1"),
])
def test_a_policy_that_is_refused_leaves_the_model_as_it_was(overrides: dict[str, object], part: str) -> None:
    model, tokenizer = make_model("olmoe"), make_tokenizer()
    before = [dict(module._forward_hooks) for module in model.modules()]
    with pytest.raises(UserError, match=part):
        edgexpert.attach(model, "edgexpert", tokenizer=tokenizer, **overrides)
    assert [dict(module._forward_hooks) for module in model.modules()] == before
    assert model.config._experts_implementation != "edgexpert"
