"""Router forms beyond the common ones."""

from __future__ import annotations

import threading

import torch
from torch import nn

from edgexpert.core.library import ALL_ATTENTION_FUNCTIONS, attention_implementation
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.model.attention import watch_received_attention
from edgexpert.model.host import HostedModel
from edgexpert.model.router import detect_form, try_router
from edgexpert.policy import Techniques
from tests.conftest import make_model


def test_group_limited_routing_of_deepseek_is_recognised_and_forbidden_experts_are_not_ranked() -> None:
    model = make_model("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=1)
    form = HostedModel(model).blocks[0].form
    assert form is not None
    assert form.groups == (4, 1, 1)
    scores = form.scores(torch.randn(10, 8))
    assert (torch.isfinite(scores.choice).sum(1) == 2).all()


def test_a_router_of_an_unknown_form_is_not_guessed() -> None:
    class Odd(nn.Module):
        top_k = 2

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = x @ self.weight.T
            values, index = logits.topk(2)
            return logits, values.exp().log1p(), index

    odd = Odd()
    assert detect_form(try_router(odd, odd, 8)) is None


def test_received_attention_is_measured_without_changing_the_logits() -> None:
    model = make_model("qwen3_moe")
    tree = TokenTree(torch.tensor([8, 3, 60, 9]), torch.tensor([-1, 0, 0, 1]), torch.tensor([0.0, -0.1, -2.0, -0.3]))
    prompt, logits = torch.arange(20, 30), []
    # with every channel kept, the weight of a candidate decides nothing
    for token_weight in ("routing", "attention"):
        policy = Techniques("p", fine_pruning=True, depth_aware_coalescing=True, keep_channels=1.0, selection_ratio=0.0,
                        token_weight=token_weight)  # type: ignore[arg-type]
        host = HostedModel(model)
        cache, policy = host.new_cache(32), host.resolve(policy)
        host.run(Stage.prefill(prompt), cache, policy)
        logits.append(host.run(Stage.verify(tree, 10), cache, policy).logits)
    assert torch.equal(*logits)


def test_attention_is_watched_for_the_text_that_wants_it_and_in_its_thread_alone() -> None:
    model = make_model("qwen3_moe")
    stage = Stage.verify(TokenTree(torch.tensor([8, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, -0.1])), 10)
    name = attention_implementation(model)
    query, key = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 12, 16)
    received: dict[int, torch.Tensor] = {}

    def attend() -> None:
        layer = model.model.layers[0].self_attn
        ALL_ATTENTION_FUNCTIONS[name](layer, query, key, key, None, scaling=0.25)

    with watch_received_attention(model, received, stage, wanted=True):
        other = threading.Thread(target=attend)
        other.start()
        other.join()
        assert not received
        attend()
    assert list(received) == [0]
    received.clear()
    attend()
    assert not received
