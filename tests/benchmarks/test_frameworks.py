"""`benchmarks/frameworks.py`: what it counts for a draft that is an MoE itself, and a whole run on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from edgexpert.core.errors import UserError
from edgexpert.model.blocks import find_blocks
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.medusa import MedusaConfig, MedusaModel, save_medusa
from tests.conftest import make_model, make_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BITS = 2


@pytest.fixture
def self_draft(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("self_draft")


@pytest.fixture
def frameworks(self_draft: ModuleType) -> ModuleType:
    return importlib.import_module("frameworks")


def test_rounding_moves_no_weight_by_more_than_half_a_step(self_draft: ModuleType) -> None:
    weight = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0)) + 0.3
    weight[0, 0, :32] = 0
    rounded = self_draft.round_to(weight, BITS)
    groups, after = weight.unflatten(-1, (-1, 32)), rounded.unflatten(-1, (-1, 32))
    step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / (2**BITS - 1)
    assert ((groups - after).abs().amax(-1) <= 0.5 * step * 1.01).all()
    assert max(len(group.unique()) for group in after.flatten(0, -2)) == 2**BITS


def test_rows_that_have_no_groups_are_refused(self_draft: ModuleType) -> None:
    with pytest.raises(UserError, match="rows of 24 values"):
        self_draft.round_to(torch.zeros(2, 24), BITS)


@pytest.mark.parametrize("bits", [None, BITS])
def test_a_moe_draft_reads_only_the_experts_that_it_activates(self_draft: ModuleType, bits: int | None) -> None:
    model = make_model("olmoe", intermediate_size=32)
    draft = self_draft.MoeDraft(model, 128, bits)
    activated: list[int] = []
    for block in find_blocks(model):
        block.router.register_forward_hook(lambda _, __, output: activated.append(len(output[2].unique())))
    state = draft.start()
    state.observe(torch.tensor([5]), None)
    state.propose(9, TreeShape(size=4, depth=2, top_k=2))
    passes = len(activated) // 7
    experts = sum(activated) * 3 * 32 * 32 * 4
    attention = passes * sum(weight.nbytes for name, weight in model.named_parameters() if "attn" in name or "norm" in name)
    router, head, embeddings = passes * 7 * 8 * 32 * 4, passes * 128 * 32 * 4, 4 * 32 * 4
    share = 1 if bits is None else (bits + (16 + bits) / 32) / 32
    assert state.bytes_read == pytest.approx((experts + attention) * share + router + head + embeddings)
    assert draft.low_bit_bytes == pytest.approx(0 if bits is None else (experts + attention) * share)
    assert sum(activated) < passes * 7 * 8


def test_a_run_compares_all_drafts_that_can_be_had(
    frameworks: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, medusa, texts = tmp_path / "target", tmp_path / "medusa", tmp_path / "texts.jsonl"
    make_model("olmoe", intermediate_size=32).save_pretrained(target)
    make_tokenizer().save_pretrained(target)
    save_medusa(MedusaModel(MedusaConfig(2, 32, 128, 7, 1e-5)), medusa)
    texts.write_text("\n".join(json.dumps({"text": text}) for text in ("a fox met a crow", "one day it rained", "short")))
    frameworks.main(model=str(target), medusa=str(medusa), little=str(target), texts=texts, prompt_tokens=8, new_tokens=8,
                    tree_size=110, tree_depth=2, out=tmp_path)
    assert "eagle3 is left out" in capsys.readouterr().out
    table = json.loads((tmp_path / "frameworks-target.json").read_text())["frameworks"]
    assert list(table) == ["plain", "ngram", "medusa", "big-little", "low-bit 2", "low-bit 3"]
    assert table["plain"]["normalised"] == table["plain"]["scaled_normalised"] == table["plain"]["acceptance_length"] == 1
    assert table["big-little"]["accepted_per_depth"] == [1, 1], "the target as its own draft is always right"
    for name in ("medusa", "big-little", "low-bit 2", "low-bit 3"):
        assert table[name]["draft_kb_per_token"] > 0
    assert table["low-bit 2"]["draft_kb_per_token"] < table["big-little"]["draft_kb_per_token"]


def test_texts_shorter_than_the_prompt_are_answered_with_what_to_do(frameworks: ModuleType, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}')
    with pytest.raises(UserError, match="--prompt-tokens"):
        frameworks.main(texts=texts, out=tmp_path)
