"""Threads of the native kernels: exceptions, tasks within tasks, and several callers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from edgexpert.kernels import native
from edgexpert.weights.rounding import quantise

pytestmark = pytest.mark.skipif(native.path() == "torch", reason="no native kernels here")


@pytest.fixture(autouse=True, params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = native.get_threads()
    native.set_threads(request.param)
    yield request.param
    native.set_threads(before)


@pytest.mark.parametrize("tasks", [1, 2, 7, 300])
def test_the_exception_of_a_task_reaches_the_caller_and_the_next_call_computes(tasks: int) -> None:
    torch.manual_seed(0)
    matrix, x = quantise(torch.randn(64, 1100), 4, 32), torch.randn(9, 64)
    expected = native.linear(x, matrix)
    for failing in {0, tasks // 2, tasks - 1}:
        with pytest.raises(RuntimeError, match=f"^task {failing} failed$"):
            native._native.run_failing_tasks(tasks, failing)
        assert torch.equal(native.linear(x, matrix), expected)
    native._native.run_failing_tasks(tasks, -1)  # none fails, and the exception of an earlier call is gone


@pytest.mark.parametrize("outer", [2, 50])  # a lone task is the caller's own, and what it begins may use every thread
def test_tasks_that_a_task_begins_run_on_its_thread(outer: int) -> None:
    assert native._native.run_nested_tasks(outer, 20) == 20 * outer


def test_several_callers_get_their_own_results_and_exceptions() -> None:
    torch.manual_seed(1)
    matrices = [quantise(torch.randn(64, outputs), bits, 32) for outputs, bits in ((300, 4), (1100, 8), (70, 16))]
    x = torch.randn(20, 64)
    expected = [native.linear(x, matrix) for matrix in matrices]

    def call(caller: int) -> None:
        for turn in range(40):
            which = (caller + turn) % len(matrices)
            assert torch.equal(native.linear(x, matrices[which]), expected[which])
            with pytest.raises(RuntimeError, match=f"^task {caller} failed$"):
                native._native.run_failing_tasks(10, caller)
            assert native._native.run_nested_tasks(4, caller) == 4 * caller

    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(call, range(4), timeout=60)) == [None] * 4


def test_the_number_of_threads_may_change_while_others_compute(threads: int) -> None:
    torch.manual_seed(2)
    matrix, x = quantise(torch.randn(64, 1100), 4, 32), torch.randn(20, 64)
    expected = native.linear(x, matrix)
    with ThreadPoolExecutor(1) as other:
        changes = other.submit(lambda: [native.set_threads(1 + i % 4) for i in range(40)])
        results = [native.linear(x, matrix) for _ in range(40)]
        changes.result(timeout=60)
    assert all(torch.equal(result, expected) for result in results)
