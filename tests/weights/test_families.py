"""What is told of a model type before it is loaded is what loading finds, of architectures of all kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage
from edgexpert.model.cache import bytes_per_token
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.policy import EXACT
from edgexpert.weights.facts import read_facts
from edgexpert.weights.families import EVERY_POLICY, EXACT_ALONE, REFUSED
from edgexpert.weights.need import memory_need
from tests.conftest import make_tokenizer
from tests.parity.architectures import tiny_config, tiny_model

NAMES = sorted(EVERY_POLICY | EXACT_ALONE | REFUSED)
STEP = 1 if os.environ.get("EDGEXPERT_ALL_FAMILIES") else 4


@pytest.mark.parametrize("name", NAMES[::STEP])
def test_a_model_type_is_what_it_is_told_to_be(name: str, tmp_path: Path) -> None:
    tiny_model(tiny_config(name)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    assert facts.family == name
    if name in REFUSED:
        with pytest.raises(UserError):
            HostedModel(load_model(str(tmp_path)).model)
        return
    host = HostedModel(load_model(str(tmp_path)).model)
    assert all(block.form is not None for block in host.blocks) == (name in EVERY_POLICY)
    assert (facts.layers, facts.moe_layers, facts.experts, facts.top_k) == (
        host.layers, len(host.blocks), host.num_experts, host.top_k)
    need, cache = memory_need(facts, "float32"), host.new_cache(4)
    host.run(Stage.prefill(torch.tensor([5, 6, 7])), cache, host.resolve(EXACT))
    assert need.kv_token == bytes_per_token(cache)
    for part, size in host.sizes.items():  # buffers, such as a bias of the choice, are in no count of parameters
        assert need.parts[part] == pytest.approx(size, abs=max(2000, size / 50)), part
