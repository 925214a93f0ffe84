"""Packed matrices: rounding is optimal within its form, and padding is invisible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.core.errors import UserError
from edgexpert.weights.matrix import dequantise
from edgexpert.weights.rounding import LEVELS, PADDING, columns, decode, quantise, relative_error


def weights(channels: int, outputs: int, seed: int) -> torch.Tensor:
    return torch.randn(channels, outputs, generator=torch.Generator().manual_seed(seed)) * 0.1


@settings(max_examples=20, deadline=None)
@given(
    groups=st.integers(1, 4), group=st.sampled_from([4, 8, 32]), outputs=st.integers(1, 70), seed=st.integers(0, 99),
    bits=st.sampled_from([4, 8]), zero_point=st.booleans(),
)
def test_no_code_of_the_same_scales_is_nearer(
    groups: int, group: int, outputs: int, seed: int, bits: int, zero_point: bool
) -> None:
    weight = weights(groups * group, outputs, seed)
    packed = quantise(weight, bits, group, zero_point)
    assert packed.values.shape[1] * 8 % (PADDING * bits) == 0
    error = (dequantise(packed) - weight).abs()
    codes = decode(packed)
    step = packed.scales[:, :outputs].float().abs().repeat_interleave(group, 0)
    low, high = (0, 15) if bits == 4 else (-127, 127)
    free = (codes > low) & (codes < high)  # a code at the end of the range may be further away
    assert (error[free] <= step[free] / 2 + 1e-6).all()


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.1), (8, 0.008)])
def test_normal_weights_lose_little(bits: int, bound: float) -> None:
    weight = weights(256, 100, 0)
    assert (dequantise(quantise(weight, bits, 32)) - weight).norm() / weight.norm() < bound


def test_the_best_of_several_scales_beats_each_alone() -> None:
    weight = weights(64, 64, 1)
    extreme = weight.unflatten(0, (2, 32)).gather(1, weight.unflatten(0, (2, 32)).abs().argmax(1, keepdim=True))
    error = (dequantise(quantise(weight, 4, 32)) - weight).norm()
    for level in LEVELS:
        scale = (-extreme / level).half().float()
        alone = ((weight.unflatten(0, (2, 32)) / scale).round().clamp(-8, 7) * scale).flatten(0, 1)
        assert error < (alone - weight).norm()


@pytest.mark.parametrize(("bits", "zero_point"), [(4, False), (4, True), (8, False), (16, False)])
def test_some_columns_of_a_matrix_are_those_of_the_whole(bits: int, zero_point: bool) -> None:
    weight = weights(32, 300, 3)
    packed = quantise(weight, bits, 8, zero_point)
    assert torch.equal(dequantise(columns(packed, 64, 290)), dequantise(packed)[:, 64:290])
    error = (dequantise(packed) - weight).norm() / weight.norm()
    assert relative_error(weight, packed) == pytest.approx(float(error), rel=1e-4)


def test_sixteen_bits_are_bfloat16() -> None:
    weight = weights(12, 40, 2)
    packed = quantise(weight, 16, 4)
    assert torch.equal(dequantise(packed), weight.bfloat16().float())
    assert packed.scales is None and (packed.values[:, 40:] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_weights_stay_zero(bits: int) -> None:
    assert (dequantise(quantise(torch.zeros(8, 5), bits, 4)) == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_weights_without_a_scale_are_refused(value: float) -> None:
    weight = torch.ones(8, 5)
    weight[3, 2] = value
    with pytest.raises(UserError, match="cannot be quantised"):
        quantise(weight, 4, 4)
