"""Packed checkpoints, hosted: the numbers of the original, every technique, and trees that equal plain decoding bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.core.resources import bundled_folder
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import native
from edgexpert.kernels.modules import PackedLinear
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.policy import PRESETS
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.eagle3_draft import Eagle3Draft
from edgexpert.speculation.loading import load_draft
from edgexpert.weights.files import Pack
from tests.packs import make_pack
from tests.speculation.drafts import RandomDraft

FAMILIES = ("granitemoe", "olmoe", "deepseek_v2", "qwen3_moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_16_bit_pack_are_those_of_the_library_on_the_same_weights(family: str, tmp_path: Path) -> None:
    folder = make_pack(family, tmp_path, PackOptions(16))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16).float().eval()
    host = HostedModel(load_model(str(folder)).model)
    ids = torch.arange(2, 30)
    ours = host.run(Stage.prefill(ids), host.new_cache(40)).logits[-1]
    with torch.no_grad():
        theirs = reference(ids[None]).logits[0, -1]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Native kernels, where there are any, and PyTorch."""
    monkeypatch.setenv("EDGEXPERT_KERNELS", request.param)
    native.path.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.path.cache_clear()


TREE = TokenTree(
    torch.tensor([7, 30, 31, 40, 41, 50, 51, 60, 61, 70]), torch.tensor([-1, 0, 0, 1, 2, 3, 3, 5, 5, 7]), torch.zeros(10)
)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_tree_on_packed_weights_gives_plain_decoding_bit_for_bit(family: str, bits: int, tmp_path: Path) -> None:
    host = HostedModel(load_model(str(make_pack(family, tmp_path, PackOptions(bits, 32)))).model)
    prompt = torch.arange(2, 20)
    cache = host.new_cache(40)
    host.run(Stage.prefill(prompt), cache)
    together = host.run(Stage.verify(TREE, cache.length), cache).logits
    for path in ([0, 1, 3, 5, 7, 9], [0, 1, 3, 5, 8], [0, 1, 3, 6], [0, 2, 4]):
        plain = host.new_cache(40)
        host.run(Stage.prefill(prompt), plain)
        for node in path:
            alone = host.run(Stage.verify(TokenTree.of_root(int(TREE.tokens[node])), plain.length), plain).logits[0]
            assert torch.equal(alone, together[node]), (path, node)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, tmp_path: Path) -> None:
    host = HostedModel(load_model(str(make_pack("olmoe", tmp_path))).model)
    before = native.get_threads()
    results = []
    for count in (1, threads):
        native.set_threads(count)
        results.append(host.run(Stage.prefill(torch.arange(2, 60)), host.new_cache(64)).logits)
    native.set_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["pruned", "coalesced", "edgexpert"])
def test_techniques_read_what_they_plan_and_stay_near_the_library_on_the_same_plan(
    family: str, policy: str, tmp_path: Path
) -> None:
    # the host itself asserts that bytes planned are bytes read
    folder = make_pack(family, tmp_path, PackOptions(16))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16).float().eval()
    outputs = []
    for model in (load_model(str(folder)).model, reference):
        host = HostedModel(model)
        cache, resolved = host.new_cache(40), host.resolve(PRESETS[policy])
        stage = Stage.prefill(torch.arange(2, 20), importance=torch.ones(18))
        host.run(stage, cache, resolved)
        tree = TokenTree(torch.arange(3, 11), torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5]), -torch.arange(8.0) / 2)
        outputs.append(host.run(Stage.verify(tree, cache.length), cache, resolved))
    ours, theirs = outputs
    same = [
        torch.equal(a.gate_up.loaded, b.gate_up.loaded)
        for a, b in zip(ours.plans, theirs.plans, strict=True)
        if a.gate_up is not None and b.gate_up is not None
    ]
    assert same and all(same)
    torch.testing.assert_close(ours.logits[0], theirs.logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_same_with_and_without_a_draft(family: str, tmp_path: Path) -> None:
    loaded = load_model(str(make_pack(family, tmp_path, num_hidden_layers=3)))
    texts = []
    for draft in (None, RandomDraft(128)):
        engine = Engine(HostedModel(loaded.model), loaded.tokenizer, name="tiny", draft=draft)
        for size in (7, 12):
            got = engine.generate("abcabcabcabc", max_new_tokens=20, ignore_eos=True, tree=TreeShape(size=size))
            texts.append(got.token_ids)
    assert all(text == texts[0] for text in texts)


def test_bytes_by_part_are_those_of_the_file(tmp_path: Path) -> None:
    folder = make_pack("deepseek_v2", tmp_path)
    host = HostedModel(load_model(str(folder)).model)
    manifest = Pack(folder).manifest
    records = sum(
        extent.bytes * layer.experts
        for layer in manifest.layers
        for matrix in (layer.gate_up, layer.down)
        for extent in matrix.extents.values()
    )
    assert host.sizes["experts"] == records == sum(b.num_experts * b.shape.expert for b in host.blocks)
    assert isinstance(host.model.get_output_embeddings(), PackedLinear)
    assert host.sizes["lm_head"] == 128 * 64 * 4.5 / 8


def test_policies_that_change_weights_ask_for_floats(tmp_path: Path) -> None:
    loaded = load_model(str(make_pack("olmoe", tmp_path)))
    engine = Engine(HostedModel(loaded.model), loaded.tokenizer, name="tiny")
    from edgexpert.policy import policy_named

    with pytest.raises(UserError, match="`dtype` float32"):
        engine.set_policy(policy_named("edgemoe"))


def test_an_activation_that_the_kernels_lack_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="activation"):
        make_pack("gpt_oss", tmp_path)
    assert not (tmp_path / "packed").exists()


def test_a_type_that_is_named_makes_floats_of_packed_weights(tmp_path: Path) -> None:
    folder = make_pack("olmoe", tmp_path)
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16
    for dtype in (None, "auto"):
        assert "packed weights" in load_model(str(folder), dtype=dtype).notes[0]


def test_the_draft_of_a_packed_model_computes_in_float32_and_leaves_the_models_embedding_alone(tmp_path: Path) -> None:
    convert(open_source("stories"), tmp_path / "packed", PackOptions(4, 32))
    loaded = load_model(str(tmp_path / "packed"))
    embedding = loaded.model.get_input_embeddings()
    draft, notes = load_draft(str(bundled_folder("stories") / "draft"), loaded.model, loaded.tokenizer, loaded.folder)
    assert isinstance(draft, Eagle3Draft)
    assert draft.is_native == (native.path() != "torch")
    assert ("one native call" if draft.is_native else "PyTorch modules") in notes[0]
    own = {p.dtype for name, p in draft.model.named_parameters() if name != "embed_tokens.weight"}
    assert own == {torch.float32}
    assert draft.model.embed_tokens.weight.data_ptr() == embedding.weight.data_ptr(), "no copy of the model's embedding"
    assert draft.model.embed_tokens(torch.tensor([3])).dtype == torch.float32
    assert embedding.weight.dtype == torch.bfloat16
