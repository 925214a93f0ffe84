"""A sample of `scripts/parity`: architectures of many forms, exact or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.parity.architectures import moe_architectures
from tests.parity.examine import Row, examine
from tests.parity.table import BEGIN, END, written

SAMPLE = {
    "mixtral": "one call",  # a window for all layers
    "granitemoeshared": "library's layers",  # a shared MLP beside the experts
    "glm4_moe": "library's layers",  # partial rotary embeddings, a router with a bias and groups
    "afmoe": "library's layers",  # windows in some layers, a router that takes its bias from the block
    "qwen2_moe": "4 of 4 layers",  # a shared expert with a gate
    "gemma4_text": "library's layers",  # scaled embeddings, heads of several sizes
    "lara_mini:attention": "4 of 4 layers",  # layers without positions
}
REFUSED = {
    "qwen3_next": "recurrent or convolutional state in 3 of its 4 layers",
    "deepseek_v32": "indexer",
    "llama4_text": "Llama4TextExperts",
    "minimax:attention": "MiniMax uses cache of its own",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_an_architecture_is_exact_hosted_and_packed(name: str) -> None:
    row = examine(name, quick=True)
    assert (row.hosted, row.packed, row.native) == ("exact", "exact", SAMPLE[name])
    assert row.policies == "run" or row.policies.startswith("exact only")


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_is_refused_with_the_reason(name: str) -> None:
    row = examine(name, quick=True)
    assert row.hosted.startswith("refused: ") and REFUSED[name] in row.hosted
    assert row.packed == row.hosted


def test_attention_sinks_are_refused_by_convert(tmp_path: Path) -> None:
    row = examine("granitemoe_swa", quick=True)
    assert row.hosted == "exact" and row.native == ""
    assert row.packed.startswith("refused: attention sinks")


def test_architectures_are_found_by_trying_and_all_stand_in_the_table() -> None:
    names = moe_architectures()
    assert {"mixtral", "gpt_oss", "deepseek_v3", "llama4_text"} <= set(names)
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    if f"transformers {transformers.__version__}," not in page:
        pytest.skip("the table is that of another version of transformers")
    assert all(f"| {name} |" in page for name in names), "run scripts/parity"


def test_a_row_that_is_neither_exact_nor_refused_is_wrong() -> None:
    assert Row("a", hosted="exact", ropes="own", policies="run", packed="refused: sinks").is_right
    assert not Row("a", hosted="exact", policies="crash: ValueError", packed="exact").is_right
    assert not Row("a", hosted="differs: trees at token 3").is_right


def test_the_table_replaces_the_one_before() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    rows = [Row("a", "exact", "own", "run", "exact", "one call"), Row("b", "refused: the model /tmp/b (model type b) has <none>")]
    new = written(page, rows, "two")
    assert new.startswith("before\n") and new.endswith("\nafter\n") and "old" not in new
    assert "| a | exact | own | all | exact | one call |" in new and "| b | has &lt;none> |" in new
    assert written(new, rows, "two") == new
