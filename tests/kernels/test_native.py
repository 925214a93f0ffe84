"""The native kernels against PyTorch, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgexpert.kernels import dense, native, reference
from edgexpert.kernels.reference import Pairs
from edgexpert.weights.matrix import PackedExperts, PackedMatrix, TiledMatrix, dequantise
from edgexpert.weights.rounding import quantise

ISAS = [path for path in native.available() if path != "torch"]
pytestmark = pytest.mark.skipif(not ISAS, reason="built without native kernels")

FORMATS = [(4, False), (4, True), (8, False), (16, False)]
"""Bits, and whether there are zero points."""


def run_both(x: Tensor, up: PackedExperts, lower: PackedExperts, pairs: Pairs, weights: Tensor) -> Tensor:
    return native.down(native.gate_up(x, up, pairs), lower, pairs, weights, len(x))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.path()
    native._native.select_isa(request.param)
    yield request.param
    native._native.select_isa("auto")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = native.get_threads()
    yield
    native.set_threads(before)


def close(got: Tensor, expected: Tensor, bits: int) -> bool:
    """Integer products equal the reference bit for bit; 16-bit weights are added in another order."""
    if bits != 16:
        return torch.equal(got, expected)
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-4)


def experts(count: int, channels: int, outputs: int, bits: int, group: int, zero_point: bool = False) -> PackedExperts:
    matrices = [quantise(torch.randn(channels, outputs), bits, group, zero_point) for _ in range(count)]
    parts = [[getattr(m, name) for m in matrices] for name in ("values", "scales", "zeros")]
    values, scales, zeros = (None if part[0] is None else torch.stack(part) for part in parts)
    assert values is not None
    return PackedExperts(values, scales, zeros, channels, outputs, bits, group)


def routing(tokens: int, count: int, per_token: int) -> Pairs:
    expert = torch.stack([torch.randperm(count)[:per_token] for _ in range(tokens)]).flatten()
    return Pairs.group(expert, torch.arange(tokens).repeat_interleave(per_token))[0]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 65]),
    groups=st.integers(1, 5),
    group=st.sampled_from([4, 20, 32, 64, 128]),
    outputs=st.integers(1, 300),
    form=st.sampled_from(FORMATS),
    seed=st.integers(0, 1000),
)
def test_linear_equals_the_reference_for_any_shape(
    rows: int, groups: int, group: int, outputs: int, form: tuple[int, bool], seed: int
) -> None:
    torch.manual_seed(seed)
    bits, zero_point = form
    matrix = quantise(torch.randn(groups * group, outputs), bits, group, zero_point)
    x, bias = torch.randn(rows, groups * group), torch.randn(outputs)
    expected = reference.linear(x, matrix, bias)
    for path in ISAS:
        native.path()
        native._native.select_isa(path)
        assert close(native.linear(x, matrix, bias), expected, bits), path
    native._native.select_isa("auto")


@pytest.mark.parametrize(("bits", "zero_point"), FORMATS)
@pytest.mark.parametrize("keep", [1.0, 0.4, 0.0])
def test_experts_read_only_the_selected_channels(isa: str, bits: int, zero_point: bool, keep: float) -> None:
    torch.manual_seed(0)
    hidden, inner, count = 96, 64, 6
    up = experts(count, hidden, 2 * inner, bits, 32, zero_point)
    lower = experts(count, inner, hidden, bits, 32, zero_point)
    pairs = routing(7, count - 1, 2)  # at least one expert has no token
    x, weights = torch.randn(7, hidden), torch.rand(14)
    loaded, compute = torch.rand(count, hidden) < keep, torch.rand(14, hidden) < 0.7
    bias_up, bias_down = torch.randn(count, 2 * inner), torch.randn(count, hidden)

    got = native.gate_up(x, up, pairs, loaded, compute, bias_up)
    torch.testing.assert_close(got, reference.gate_up(x, up, pairs, loaded, compute, bias_up), rtol=1e-4, atol=1e-4)

    loaded, compute = torch.rand(count, inner) < keep, torch.rand(14, inner) < 0.7
    got = native.down(got, lower, pairs, weights, 7, loaded, compute, bias_down)
    inner_x = reference.gate_up(x, up, pairs)
    got = native.down(inner_x, lower, pairs, weights, 7, loaded, compute, bias_down)
    assert close(got, reference.down(inner_x, lower, pairs, weights, 7, loaded, compute, bias_down), bits)

    poisoned = PackedExperts(lower.values.clone(), lower.scales, lower.zeros, inner, hidden, bits, 32)
    poisoned.values[~loaded] = 7 if bits != 16 else torch.nan
    assert torch.equal(native.down(inner_x, poisoned, pairs, weights, 7, loaded, compute, bias_down), got)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_activation_functions_agree_with_torch(isa: str, activation: str, gated: bool) -> None:
    torch.manual_seed(1)
    up = experts(3, 32, 64, 16, 32)
    pairs, x = routing(5, 3, 2), 3 * torch.randn(5, 32)
    got = native.gate_up(x, up, pairs, activation=activation, gated=gated)
    torch.testing.assert_close(got, reference.gate_up(x, up, pairs, activation=activation, gated=gated), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_token_is_the_same_alone_and_in_any_company_and_with_any_threads(isa: str, bits: int) -> None:
    torch.manual_seed(2)
    up, lower = experts(4, 256, 512, bits, 32), experts(4, 256, 256, bits, 32)
    matrix = quantise(torch.randn(256, 1100), bits, 32)
    x, weights = torch.randn(70, 256), torch.rand(140)
    expert = torch.randint(0, 3, (70, 1)) + torch.tensor([[0, 1]])
    pairs, order = Pairs.group(expert.flatten(), torch.arange(70).repeat_interleave(2))

    native.set_threads(3)
    dense = native.linear(x, matrix)
    together = run_both(x, up, lower, pairs, weights[order])
    for threads in (1, 2, 5):
        native.set_threads(threads)
        assert torch.equal(native.linear(x, matrix), dense)
        assert torch.equal(run_both(x, up, lower, pairs, weights[order]), together)
        for t in (0, 33, 69):
            alone, own = Pairs.group(expert[t], torch.zeros(2, dtype=torch.int64))
            assert torch.equal(native.linear(x[t : t + 1], matrix)[0], dense[t])
            got = run_both(x[t : t + 1], up, lower, alone, weights[2 * t : 2 * t + 2][own])
            assert torch.equal(got[0], together[t])


@pytest.mark.parametrize(("bits", "zero_point"), FORMATS)
@pytest.mark.parametrize("outputs", [4100, 5000])
def test_a_matrix_in_tiles_is_the_same_matrix(isa: str, bits: int, zero_point: bool, outputs: int) -> None:
    torch.manual_seed(6)
    matrix = quantise(torch.randn(64, outputs), bits, 32, zero_point)
    tiled = TiledMatrix.of(matrix)
    assert len(tiled.values) > 1
    assert torch.equal(dequantise(tiled), dequantise(matrix))
    x, bias = torch.randn(20, 64), torch.randn(outputs)
    for threads in (1, 3):
        native.set_threads(threads)
        for rows in (1, 5, 20):
            assert torch.equal(native.linear(x[:rows], tiled, bias), native.linear(x[:rows], matrix, bias))
    assert close(native.linear(x, tiled, bias), reference.linear(x, tiled, bias), bits)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_the_largest_sums_of_a_group_fit(isa: str, rows: int) -> None:
    channels, outputs = 64, 256
    scales = torch.ones(channels // 32, outputs, dtype=torch.float16)
    for byte in (0x00, 0xFF, 0xF0):  # every weight -8, or 7, or both in turn
        values = torch.full((channels, outputs // 2), byte, dtype=torch.uint8)
        matrix = PackedMatrix(values, scales, None, channels, outputs, 4, 32)
        for signs in ([1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]):
            x = torch.tensor(signs).repeat(rows, channels // 2)
            assert torch.equal(native.linear(x, matrix), reference.linear(x, matrix))


def test_all_instruction_sets_give_the_same_bits() -> None:
    torch.manual_seed(3)
    native.path()
    for bits, zero_point in FORMATS:
        up, lower = experts(4, 64, 192, bits, 32, zero_point), experts(4, 96, 64, bits, 32, zero_point)
        pairs, x, weights = routing(9, 4, 2), torch.randn(9, 64), torch.rand(18)
        results = []
        for path in ISAS:
            native._native.select_isa(path)
            results.append(run_both(x, up, lower, pairs, weights))
        native._native.select_isa("auto")
        assert all(torch.equal(result, results[0]) for result in results)


def test_experts_may_lie_apart_as_records_of_one_file_do(isa: str) -> None:
    torch.manual_seed(4)
    whole = experts(3, 64, 96, 4, 32)
    assert whole.scales is not None
    values, scales = whole.values[0].numel(), whole.scales[0].numel()
    record = torch.zeros(3, values + 2 * scales + 64, dtype=torch.uint8)
    record[:, :values] = whole.values.flatten(1)
    record[:, values : values + 2 * scales] = whole.scales.flatten(1).view(torch.uint8)
    apart = PackedExperts(
        record[:, :values].unflatten(1, (64, -1)),
        record[:, values : values + 2 * scales].view(torch.float16).unflatten(1, (2, -1)),
        None, 64, 96, 4, 32,
    )  # fmt: skip
    pairs, x = routing(4, 3, 2), torch.randn(4, 64)
    assert torch.equal(native.gate_up(x, apart, pairs), native.gate_up(x, whole, pairs))


def test_no_tokens_and_no_pairs_give_empty_results(isa: str) -> None:
    matrix = quantise(torch.randn(32, 8), 4, 32)
    assert native.linear(torch.empty(0, 32), matrix).shape == (0, 8)
    nothing = Pairs(*(torch.zeros(n, dtype=torch.int64) for n in (0, 1, 0)))
    lower = experts(2, 32, 8, 4, 32)
    assert torch.equal(native.down(torch.empty(0, 32), lower, nothing, torch.empty(0), 3), torch.zeros(3, 8))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_what_is_no_finite_number_in_a_token_shows_in_its_result_and_in_no_other(isa: str, bits: int, number: float) -> None:
    torch.manual_seed(7)
    matrix, x = quantise(torch.randn(64, 40), bits, 32), torch.randn(3, 64)
    expected = native.linear(x, matrix)
    x[1, 5] = number
    for got in (native.linear(x, matrix), reference.linear(x, matrix)):
        assert not got[1].isfinite().any() and (bits == 16 or got[1].isnan().all())
        assert close(got[[0, 2]], expected[[0, 2]], bits)

    up, lower = experts(3, 64, 64, bits, 32), experts(3, 32, 64, bits, 32)
    pairs, weights = routing(3, 3, 2), torch.rand(6)
    loaded = torch.ones(3, 64, dtype=torch.bool)
    loaded[:, 5] = False
    assert torch.equal(run_both(x, up, lower, pairs, weights).isfinite().all(1), torch.tensor([True, False, True]))
    if bits != 16:  # a row is quantised before its channels are selected
        got = native.gate_up(x, up, pairs, loaded)
        assert torch.equal(got.isnan().all(1), pairs.tokens == 1) and torch.equal(got.isfinite().all(1), pairs.tokens != 1)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_activation_functions_of_no_number_are_none_and_large_numbers_overflow_nowhere(
    isa: str, activation: str, gated: bool
) -> None:
    up = PackedExperts(torch.ones(1, 4, 32, dtype=torch.bfloat16), None, None, 4, 32, 16, 4)
    x = torch.zeros(5, 4)
    x[:, 0] = torch.tensor([0.5, torch.nan, 300.0, -300.0, 1e6])
    pairs = Pairs.group(torch.zeros(5, dtype=torch.int64), torch.arange(5))[0]
    got = native.gate_up(x, up, pairs, activation=activation, gated=gated)
    assert torch.equal(got.isnan().all(1), torch.tensor([False, True, False, False, False]))
    torch.testing.assert_close(got, reference.gate_up(x, up, pairs, activation=activation, gated=gated), equal_nan=True)


def test_wrong_shapes_and_types_are_refused_before_memory_is_touched() -> None:
    matrix = quantise(torch.randn(64, 40), 4, 32)
    with pytest.raises(ValueError, match="expected float32"):
        native.linear(torch.randn(2, 32), matrix)
    with pytest.raises(ValueError, match="expected float32"):
        native.linear(torch.randn(2, 64).double(), matrix)
    bad = PackedMatrix(matrix.values[:32], matrix.scales, None, 64, 40, 4, 32)
    with pytest.raises(ValueError, match=r"values are not contiguous matrices of the shape \[64, 32\]"):
        native.linear(torch.randn(2, 64), bad)


@pytest.mark.parametrize("wrong", [
    "expert", "negative expert", "token", "offsets", "end", "loaded", "compute", "bias", "weights", "rows",
])
def test_ids_masks_and_vectors_that_do_not_fit_are_refused_before_memory_is_touched(wrong: str) -> None:
    torch.manual_seed(5)
    lower = experts(4, 32, 8, 4, 32)
    good = Pairs(torch.tensor([1, 3]), torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]))
    ids, offsets, tokens = good.experts.clone(), good.offsets.clone(), good.tokens.clone()
    arguments: dict[str, Tensor | None] = dict(
        loaded=torch.ones(4, 32, dtype=torch.bool), compute=torch.ones(3, 32, dtype=torch.bool), bias=torch.zeros(4, 8)
    )
    x, weights = torch.randn(3, 32), torch.ones(3)
    native.down(x, lower, good, weights, 2, **arguments)
    match wrong:
        case "expert":
            ids[1] = 4
        case "negative expert":
            ids[0] = -1
        case "token":
            tokens[2] = 2
        case "offsets":
            offsets[1] = 4
        case "end":
            offsets[2] = 4
        case "weights":
            weights = torch.ones(2)
        case "rows":
            x = torch.randn(2, 32)
        case _:
            given = arguments[wrong]
            assert given is not None
            arguments[wrong] = given[:-1]
    with pytest.raises(ValueError, match=r"out of range|offsets|expected"):
        native.down(x, lower, Pairs(ids, offsets, tokens), weights, 2, **arguments)


def test_calls_from_two_threads_at_once_give_what_they_give_one_after_the_other() -> None:
    torch.manual_seed(6)
    native.set_threads(3)
    up, lower = experts(4, 64, 256, 4, 32), experts(4, 128, 64, 8, 32)
    pairs, x, weights = routing(33, 4, 2), torch.randn(33, 64), torch.rand(66)
    matrix = torch.randn(300, 64)
    query, key, value = torch.randn(8, 33, 64), torch.randn(4, 90, 64), torch.randn(4, 90, 64)
    score, mask = torch.rand(66, 64), torch.rand(66, 64) < 0.5
    expert, depth = torch.arange(66) % 4, torch.arange(66) // 20
    calls: list[Callable[[], Tensor]] = [
        lambda: run_both(x, up, lower, pairs, weights),
        lambda: dense.linear(x, matrix),
        lambda: dense.attention(query, key, value, None, 0.1),
        lambda: native.salient_channels(score, mask, expert, depth, 4, 0.5),
        lambda: dense.rms_norm(matrix, torch.ones(64), 1e-6),
    ]
    expected = [call() for call in calls]

    def repeat(shift: int) -> bool:
        turns = [(i * shift) % len(calls) for i in range(150)]  # each thread in another order
        return all(torch.equal(calls[i](), expected[i]) for i in turns)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(repeat, (1, 2), timeout=60))
