"""Float kernels against PyTorch, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from edgexpert.kernels import dense, native

ISAS = [path for path in native.available() if path != "torch"]
pytestmark = pytest.mark.skipif(native.path() == "torch", reason="no native kernels here")


@pytest.fixture(autouse=True)
def _auto() -> Iterator[None]:
    yield
    native._native.select_isa("auto")


def on_every_isa(run: object) -> Tensor:
    """What all instruction sets give, bit for bit."""
    results = []
    for path in ISAS:
        native._native.select_isa(path)
        results.append(run())  # type: ignore[operator]
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), n=st.sampled_from([1, 7, 16, 33, 100]), outputs=st.integers(1, 70), seed=st.integers(0, 99))
def test_norms_and_products_are_pytorchs_for_any_size(rows: int, n: int, outputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, scale, weight = torch.randn(rows, n), torch.randn(n), torch.randn(outputs, n)
    torch.testing.assert_close(on_every_isa(lambda: dense.rms_norm(x, scale, 1e-5)), F.rms_norm(x, (n,), scale, 1e-5))
    torch.testing.assert_close(on_every_isa(lambda: dense.linear(x, weight)), x @ weight.T, rtol=1e-4, atol=1e-5)


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and a mask in which each token sees itself."""
    torch.manual_seed(draw(st.integers(0, 999)))
    kv_heads, group, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    keys = tokens + draw(st.integers(0, 40))
    dim, value_dim = draw(st.sampled_from([4, 12, 64])), draw(st.sampled_from([3, 16, 40]))
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(tokens, keys) < 0.5
        mask[:, keys - tokens :] |= torch.eye(tokens, dtype=torch.bool)
    query = torch.randn(tokens, kv_heads * group, dim).transpose(0, 1)  # as a projection gives them: token by token
    return query, torch.randn(kv_heads, keys, dim), torch.randn(kv_heads, keys, value_dim), mask


@settings(max_examples=40, deadline=None)
@given(attentions())
def test_attention_is_pytorchs_for_any_mask_and_any_sizes(case: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
    query, key, value, mask = case
    tokens, keys = query.shape[1], key.shape[1]
    seen = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens) if mask is None else mask
    expected = F.scaled_dot_product_attention(query[None], key[None], value[None], seen, scale=0.3, enable_gqa=True)[0]
    got = on_every_isa(lambda: dense.attention(query, key, value, mask, 0.3))
    torch.testing.assert_close(got, expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(attentions(), st.integers(1, 3))
def test_a_token_attends_alone_as_among_others(case: tuple[Tensor, Tensor, Tensor, Tensor | None], threads: int) -> None:
    query, key, value, mask = case
    before = native.get_threads()
    native.set_threads(threads)
    together = dense.attention(query, key, value, mask, 0.3)
    native.set_threads(before)
    tokens, keys = query.shape[1], key.shape[1]
    for t in range(tokens):
        end = keys if mask is not None else keys - tokens + t + 1
        row = None if mask is None else mask[t : t + 1].contiguous()
        assert torch.equal(dense.attention(query[:, t : t + 1], key[:, :end], value[:, :end], row, 0.3)[0], together[t])


def a_tree(tokens: int) -> list[list[int]]:
    """The path from the root to each token of a random tree, the token included."""
    paths = [[0]]
    for t in range(1, tokens):
        paths.append([*paths[int(torch.randint(max(0, t - 9), t, (1,)))], t])
    return paths


@pytest.mark.parametrize("path", ISAS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "context", "window"), [(4, 2, 64, 150, None), (2, 2, 20, 60, None), (3, 1, 8, 90, 40)]
)
def test_a_candidate_in_a_tree_attends_as_in_plain_decoding(
    path: str, heads: int, kv_heads: int, dim: int, context: int, window: int | None
) -> None:
    """Other queries, other places in the cache, several blocks of queries: the same bits. With a window, old keys are unseen."""
    torch.manual_seed(2)
    native._native.select_isa(path)
    paths = a_tree(64)
    query, key, value = (
        torch.randn(64, heads, dim),
        torch.randn(kv_heads, context + 64, dim),
        torch.randn(kv_heads, context + 64, dim),
    )
    slots = [[*range(context), *(context + t for t in seen)][-window if window else 0 :] for seen in paths]
    mask = torch.zeros(64, context + 64, dtype=torch.bool)
    for t, seen in enumerate(slots):
        mask[t, seen] = True
    tree = dense.attention(query.transpose(0, 1), key, value, mask, 0.3)
    for t, seen in enumerate(slots):
        alone = dense.attention(query[t][:, None], key[:, seen].contiguous(), value[:, seen].contiguous(), None, 0.3)
        assert torch.equal(alone[0], tree[t])


def test_a_prompt_attends_as_token_by_token() -> None:
    torch.manual_seed(3)
    query, key, value = torch.randn(2, 75, 24), torch.randn(1, 90, 24), torch.randn(1, 90, 24)
    together = dense.attention(query, key, value, None, 0.3)
    for t in range(75):
        alone = dense.attention(query[:, t : t + 1], key[:, : 16 + t], value[:, : 16 + t], None, 0.3)
        assert torch.equal(alone[0], together[t])


def test_a_candidate_that_overflows_spoils_only_its_descendants() -> None:
    torch.manual_seed(4)
    query, key, value, mask = torch.randn(2, 6, 16), torch.randn(1, 46, 16), torch.randn(1, 46, 16), torch.ones(6, 46).bool()
    mask[:, 40:] = torch.eye(6, dtype=torch.bool)
    mask[5, 42] = True
    before = dense.attention(query, key, value, mask, 0.25)
    key[:, 42] = value[:, 42] = torch.inf
    after = dense.attention(query, key, value, mask, 0.25)
    others = [0, 1, 3, 4]
    assert torch.equal(after[others], before[others])
    assert after[[2, 5]].isnan().all()


def test_weights_are_those_of_an_exact_softmax() -> None:
    """Scores far apart, of which the lowest vanish."""
    scores = torch.tensor([0.0, -0.5, -3.0, -20.0, -86.0, -88.0, -200.0])
    got = dense.attention(torch.ones(1, 1, 1), scores[None, :, None], torch.eye(7)[None], None, 1.0)[0, 0]
    torch.testing.assert_close(got, scores.double().softmax(0).float(), rtol=3e-6, atol=1e-37)
    assert got[5] == got[6] == 0


def test_keys_that_a_token_does_not_see_are_not_read() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 3, 16), torch.randn(2, 10, 16), torch.randn(2, 10, 16)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[:, 4] = False
    before = dense.attention(query, key, value, mask, 0.25)
    key[:, 4] = value[:, 4] = torch.nan
    assert torch.equal(dense.attention(query, key, value, mask, 0.25), before)


def test_large_work_is_split_over_threads_without_a_change() -> None:
    torch.manual_seed(1)
    x, weight, scale = torch.randn(130, 512), torch.randn(67, 512), torch.randn(512)
    query, key, value = torch.randn(8, 40, 32), torch.randn(2, 300, 32), torch.randn(2, 300, 24)
    results = []
    before = native.get_threads()
    for threads in (1, 3):
        native.set_threads(threads)
        results.append([dense.rms_norm(x, scale, 1e-6), dense.linear(x, weight), dense.attention(query, key, value, None, 0.2)])
    native.set_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_does_not_fit_is_refused_before_memory_is_touched() -> None:
    x = torch.randn(3, 16)
    for call in (
        lambda: dense.rms_norm(x, torch.ones(15), 1e-6),
        lambda: dense.rms_norm(x.double(), torch.ones(16).double(), 1e-6),
        lambda: dense.linear(x, torch.randn(4, 15)),
        lambda: dense.linear(x, torch.randn(16, 4).T),
        lambda: dense.attention(x[None], torch.randn(1, 5, 12), torch.randn(1, 5, 16), None, 1.0),
        lambda: dense.attention(x[None], torch.randn(1, 2, 16), torch.randn(1, 2, 16), None, 1.0),
        lambda: dense.attention(x[None], torch.randn(1, 5, 16), torch.randn(1, 4, 16), None, 1.0),
        lambda: dense.attention(x[None], torch.randn(1, 5, 16), torch.randn(1, 5, 16), torch.ones(3, 4, dtype=torch.bool), 1.0),
    ):
        with pytest.raises((ValueError, TypeError), match=r"expected|do not fit|incompatible"):
            call()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 6), n=st.sampled_from([1, 5, 63, 64, 65, 200, 700]), k=st.integers(1, 70),
       distinct=st.sampled_from([1, 3, 1000]), seed=st.integers(0, 99))
def test_the_likeliest_tokens_are_pytorchs_and_of_equal_ones_the_first(
    rows: int, n: int, k: int, distinct: int, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randint(distinct, (rows, n)) * 20.0 / distinct
    logits[torch.rand(rows, n) < 0.1] = -torch.inf
    logits[:, 0] = 1.0
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    tokens = on_every_isa(lambda: dense.top_log_probs(logits, k)[0])
    log_probs = on_every_isa(lambda: dense.top_log_probs(logits, k)[1])
    assert torch.equal(tokens, order)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(-1, order), rtol=1e-5, atol=1e-5)
    assert (log_probs <= 0).all()
