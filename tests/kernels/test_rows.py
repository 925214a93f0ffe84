"""In PyTorch, too, a token's result is the same bit for bit whatever shares the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from edgexpert.kernels import dense, native, reference
from edgexpert.kernels.modules import SteadyRows
from edgexpert.kernels.reference import Pairs
from tests.kernels.test_native import FORMATS, experts


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "path", lambda: "torch")


SIZES = st.sampled_from([1, 3, 8, 17, 64, 100, 333])
FUNCTIONS = [F.silu, torch.sigmoid, F.softplus, F.mish, F.gelu, torch.tanh]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 40), width=SIZES, outputs=SIZES, seed=st.integers(0, 999))
def test_norms_products_and_functions_of_a_row_alone_are_those_of_the_row_among_others(
    n: int, width: int, outputs: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight, scale = torch.randn(n, width), torch.randn(outputs, width), torch.randn(width)
    t = seed % n

    def all_of(x: Tensor) -> list[Tensor]:
        with SteadyRows():
            return [dense.rms_norm(x, scale, 1e-5), dense.linear(x, weight), F.linear(x, weight), *(f(x) for f in FUNCTIONS)]

    for together, alone in zip(all_of(x), all_of(x[t : t + 1]), strict=True):
        assert torch.equal(together[t], alone[0])
    torch.testing.assert_close(dense.linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_threads_change_no_element(function: Callable[[Tensor], Tensor]) -> None:
    x, before, results = torch.randn(300, 2001, generator=torch.Generator().manual_seed(0)), torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with SteadyRows():
            results.append(function(x))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMATS), tokens=st.integers(1, 12), activation=st.sampled_from(sorted(reference.ACTIVATIONS)),
    gated=st.booleans(), seed=st.integers(0, 999),
)
def test_experts_of_a_token_alone_are_those_of_the_token_among_others(
    form: tuple[int, bool], tokens: int, activation: str, gated: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    bits, zero_point = form
    up = experts(4, 64, 72 if gated else 36, bits, 32, zero_point)
    lower = experts(4, 36, 40, bits, 36, zero_point)
    x, weights = torch.randn(tokens, 64), torch.rand(tokens, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])

    def run(some: Tensor) -> Tensor:
        pairs, order = Pairs.group(chosen[some].flatten(), torch.arange(len(some)).repeat_interleave(2))
        inner = native.gate_up(x[some], up, pairs, activation=activation, gated=gated)
        return native.down(inner, lower, pairs, weights[some].flatten()[order], len(some))

    together = run(torch.arange(tokens))
    for t in range(tokens):
        assert torch.equal(run(torch.tensor([t]))[0], together[t])


@settings(max_examples=40, deadline=None)
@given(prefix=st.integers(0, 40), nodes=st.integers(1, 12), heads=st.sampled_from([1, 4]), dim=SIZES, seed=st.integers(0, 999))
def test_a_node_of_a_tree_attends_as_the_token_at_the_end_of_its_path(
    prefix: int, nodes: int, heads: int, dim: int, seed: int
) -> None:
    torch.manual_seed(seed)
    query, key, value = torch.randn(heads, nodes, dim), torch.randn(1, prefix + nodes, dim), torch.randn(1, prefix + nodes, 24)
    paths = [[0]]
    for t in range(1, nodes):
        paths.append([*paths[int(torch.randint(t, ()))], t])
    mask = torch.ones(nodes, prefix + nodes, dtype=torch.bool)
    for t, path in enumerate(paths):
        mask[t, prefix:] = False
        mask[t, prefix + torch.tensor(path)] = True
    together = dense.attention(query, key, value, mask, 0.3)
    expected = F.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=0.3, enable_gqa=True)[0]
    torch.testing.assert_close(together, expected.transpose(0, 1), rtol=1e-4, atol=1e-5)
    for t, path in enumerate(paths):
        own = torch.cat([torch.arange(prefix), prefix + torch.tensor(path)])
        alone = dense.attention(query[:, t : t + 1], key[:, own], value[:, own], None, 0.3)
        assert torch.equal(alone[0], together[t])
