"""Traces whose numbers are none that a run could have: one sentence, never a wrong result."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgexpert
from edgexpert.core.errors import UserError
from edgexpert.policy import PRESETS
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.sampling import SamplingParams
from edgexpert.trace.read import Trace
from edgexpert.trace.record import record_trace
from edgexpert.trace.schema import KEY, SCHEMA


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "t.parquet"
    record_trace(edgexpert.load("stories"), ["the fox and"], file, SamplingParams(max_new_tokens=3), TreeShape(size=4, depth=2))
    return file


def read_all(file: Path) -> None:
    trace = Trace(file)
    for planned in trace.replay(PRESETS["edgexpert"]):
        assert planned.emitted >= 0 and planned.stage.prefix >= 0
        for layer in planned.layers:
            assert (layer.rows > 0).all()


def rewritten(good: Path, place: Path, column: str, row: int, change: Callable[[Any], Any]) -> Path:
    """The good trace with one value changed."""
    table = pq.read_table(good)
    values = table.column(column).to_pylist()
    values[row] = change(values[row])
    number = table.schema.get_field_index(column)
    pq.write_table(table.set_column(number, SCHEMA.field(column), pa.array(values, SCHEMA.field(column).type)), place)
    return place


def first(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value, *values[1:]]


STAGE, VERIFY, LAYER, CHANNELS = 0, 9, 1, 10  # rows of the good trace: eight layers a stage


def test_the_good_trace_has_the_rows_that_these_tests_change(good: Path) -> None:
    read_all(good)
    table = pq.read_table(good).to_pylist()
    assert [table[row]["kind"] for row in (STAGE, VERIFY)] == ["prefill", "verify"]
    assert table[LAYER]["layer"] == 0 and table[CHANNELS]["input"] is not None


@pytest.mark.parametrize(("column", "row", "change"), [
    ("stage", STAGE, lambda _: 7), ("stage", VERIFY, lambda _: 0), ("stage", LAYER, lambda _: None),
    ("layer", STAGE, lambda _: 3), ("layer", LAYER, lambda _: 3), ("layer", LAYER, lambda _: None),
    ("kind", STAGE, lambda _: "decode"), ("kind", STAGE, lambda _: None), ("kind", STAGE, lambda _: "verify"),
    ("text", STAGE, lambda _: -1), ("prefix", STAGE, lambda _: -5), ("prefix", VERIFY, lambda _: 2**31 - 1),
    ("tokens", STAGE, lambda _: []), ("tokens", STAGE, first(-1)), ("tokens", STAGE, first(None)),
    ("tokens", VERIFY, lambda v: v[1:]), ("depth", VERIFY, first(1)), ("depth", STAGE, lambda _: None),
    ("parents", VERIFY, first(0)), ("parents", VERIFY, lambda v: [-1] * len(v)),
    ("parents", VERIFY, lambda v: [-1, *v[1:-1], 99]),
    ("path_log_prob", VERIFY, first(float("nan"))), ("path_log_prob", VERIFY, first(5.0)),
    ("accepted", VERIFY, lambda _: [1]), ("accepted", VERIFY, lambda _: [0, 99]), ("accepted", VERIFY, lambda _: [0, 0]),
    ("emitted", VERIFY, lambda _: -1), ("emitted", VERIFY, lambda _: 1000), ("draft_steps", VERIFY, lambda _: -3),
    ("draft_steps", VERIFY, lambda _: 2**31 - 1), ("importance", STAGE, lambda _: [1.0]),
    ("importance", STAGE, first(float("nan"))),
    ("experts", LAYER, first(-1)), ("experts", LAYER, first(10**6)), ("experts", LAYER, lambda v: [v[1], *v[1:]]),
    ("weights", LAYER, first(float("nan"))), ("weights", LAYER, lambda v: v[1:]), ("choice", LAYER, first(float("nan"))),
    ("choice", LAYER, lambda v: v[1:]), ("gate", LAYER, lambda _: [-1.0]), ("input", CHANNELS, first(float("inf"))),
    ("input", CHANNELS, lambda v: v[1:]), ("ran", CHANNELS, first(-2)), ("down_input", CHANNELS, lambda v: v[1:]),
    ("down_input", CHANNELS, lambda _: None),
])
def test_a_value_out_of_its_range_is_named(good: Path, tmp_path: Path, column: str, row: int, change: Any) -> None:
    broken = rewritten(good, tmp_path / "t.parquet", column, row, change)
    with pytest.raises(UserError, match=r"the trace .* is damaged: row \d+ has no sensible"):
        read_all(broken)


@pytest.mark.parametrize(("facts", "message"), [
    (b"", "facts in the trace"), (b"{", "facts in the trace"), (b"[]", "facts in the trace"), (b"null", "facts in the trace"),
    (b"\xff", "facts in the trace"), (b"[" * 100_000, "facts in the trace"), (b'{"version": 1}', "key model .* is missing"),
    ({"num_experts": "64"}, "num_experts .* must be a whole number"), ({"num_experts": 10**30}, "num_experts .* must be from"),
    ({"top_k": 0}, "top_k .* must be from"), ({"top_k": 999}, "top_k .* does not agree"),
    ({"layers": []}, "layers .* does not agree"), ({"layers": [1, 0]}, "layers"),
    ({"hidden": -1}, "hidden .* must be from"), ({"hidden": True}, "hidden"),
    ({"scale": [float("nan")] * 8}, r"scale\[0\]"), ({"normalise": [True]}, "normalise .* does not agree"),
    ({"channels": "some"}, "channels .* must be one of"), ({"weights_dtype": "int8"}, "weights_dtype .* must be one of"),
    ({"policy": {}}, "policy .* does not agree"), ({"calibrated": {"k_min": 1}}, r"calibrated\.n_min .* is missing"),
    ({"calibrated": 3}, "calibrated .* must be a table"), ({"value_share": [[1.0]]}, "value_share .* does not agree"),
    ({"num_experts": 1000}, "no sensible"), ({"hidden": 255}, "no sensible"), ({"intermediate": 47}, "no sensible"),
])
def test_facts_that_cannot_be_are_named(good: Path, tmp_path: Path, facts: bytes | dict[str, Any], message: str) -> None:
    table = pq.read_table(good)
    if isinstance(facts, dict):
        facts = json.dumps({**json.loads(table.schema.metadata[KEY]), **facts}).encode()
    pq.write_table(table.replace_schema_metadata({KEY: facts}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=message):
        read_all(tmp_path / "t.parquet")


@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_column_that_is_missing_twice_or_of_another_type_is_named(good: Path, tmp_path: Path, name: str) -> None:
    table = pq.read_table(good)
    number = table.schema.get_field_index(name)
    for broken in (table.drop_columns(name), table.append_column(name, table.column(name)),
                   table.set_column(number, name, pa.array(["x"] * len(table), pa.large_string()))):
        pq.write_table(broken, tmp_path / "t.parquet")
        with pytest.raises(UserError, match=f"column {name}"):
            Trace(tmp_path / "t.parquet")


def test_flipped_bytes_in_the_columns_are_found_by_their_checksums(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    footer = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8
    for place in np.linspace(4, footer - 1, 40, dtype=int):
        broken = bytearray(whole)
        broken[place] ^= 1 << int(place) % 8
        (tmp_path / "t.parquet").write_bytes(broken)
        with pytest.raises(UserError):
            read_all(tmp_path / "t.parquet")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_footer_with_flipped_bytes_is_read_or_refused(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(good.read_bytes())
    footer = len(whole) - int.from_bytes(whole[-8:-4], "little") - 8
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(footer, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    (tmp_path / "t.parquet").write_bytes(whole)
    with suppress(UserError):
        read_all(tmp_path / "t.parquet")
