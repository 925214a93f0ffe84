"""What reads files ends with a sane result or a `UserError`, whatever the file holds; scripts/fuzz does the same for longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import Fuzzer

EXAMPLES = {"device": 120, "trace": 60, "shape": 120, "gguf": 30, "manifest": 300, "packed-config": 60, "config": 60,
            "safetensors": 60}


@pytest.fixture(scope="module", params=EXAMPLES)
def fuzzer(request: pytest.FixtureRequest) -> Iterator[Fuzzer]:
    with Fuzzer(request.param) as opened:
        yield opened


def test_the_file_as_it_is_is_accepted(fuzzer: Fuzzer) -> None:
    assert fuzzer.run(None) == "accepted"


def test_a_changed_file_is_accepted_or_refused(fuzzer: Fuzzer) -> None:
    @settings(max_examples=EXAMPLES[fuzzer.name], deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(0, 2**32))
    def change(seed: int) -> None:
        assert fuzzer.run(seed) in ("accepted", "refused"), f"scripts/fuzz --target {fuzzer.name} --seed {seed}"

    change()
