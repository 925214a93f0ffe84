"""Training the bundled model: exact resume, nothing held out is learned, experts computed as the library does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgexpert.core.errors import UserError
from edgexpert.training.corpus import END_OF_TEXT, documents, is_held_out, prepare
from edgexpert.training.experts import SORTED
from edgexpert.training.growth import split_experts
from edgexpert.training.loop import fast_bfloat16
from edgexpert.training.model import balance_loss, train_model
from edgexpert.training.recipes import STORIES, Phase, learning_rate

TINY = replace(
    STORIES,
    domains={"one": ["a.txt"], "two": ["b.txt"]},
    config=dict(
        vocab_size=300, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True,
        max_position_embeddings=64,
    ),
    phases=[Phase(4, {"one": 0.5, "two": 0.5}, 16, peak=3e-3), Phase(4, {"one": 1.0}, 32, balance=0.001, peak=1e-3)],
    tokens_per_step=64,
    warmup=2,
)

GROWING = replace(TINY, phases=[*TINY.phases, Phase(3, {"one": 1.0}, 16, peak=1e-3, width=12)])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, animal in (("a.txt", "fox"), ("b.txt", "crow")):
        texts = (f"The {animal} number {i} sat on a wall.\nThen it saw {i * 7} friends and they sang." for i in range(200))
        (folder / name).write_text("".join(f"{text}\n{END_OF_TEXT}\n" for text in texts))
    return folder


def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(corpus: Path, tmp_path: Path) -> None:
    train_model(GROWING, corpus, tmp_path / "straight", checkpoint_every=1)
    for stop in (3, 5, TINY.steps, TINY.steps + 1, None):  # before, at and after the split of the experts
        train_model(GROWING, corpus, tmp_path / "broken", stop_at=stop)
    straight, broken = (torch.load(tmp_path / run / "checkpoint.pt", weights_only=True) for run in ("straight", "broken"))
    for name, weight in straight["weights"].items():
        assert torch.equal(weight, broken["weights"][name]), name
    last = [json.loads((tmp_path / run / "history.json").read_text())[-1] for run in ("straight", "broken")]
    assert last[0]["loss"] == last[1]["loss"]
    assert last[0]["held_out/one"] == last[1]["held_out/one"]


def test_held_out_windows_have_one_length_in_all_phases(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    def spy(model: torch.nn.Module, stream: np.ndarray, length: int) -> float:
        lengths.append(length)
        return 0.0

    monkeypatch.setattr("edgexpert.training.model.held_out_loss", spy)
    train_model(TINY, corpus, tmp_path / "run", stop_at=2)  # in the phase of 16 tokens
    train_model(TINY, corpus, tmp_path / "run")
    assert lengths == [32] * 4, "two domains, twice"


def test_a_dense_twin_trains_by_the_same_recipe(corpus: Path, tmp_path: Path) -> None:
    dense = replace(TINY, config={**TINY.config, "mlp_only_layers": [0, 1]})
    train_model(dense, corpus, tmp_path / "dense")
    assert json.loads((tmp_path / "dense" / "history.json").read_text())[-1]["balance"] == 0


def test_experts_split_into_finer_ones_keep_their_function() -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY.config)).eval()
    ids = torch.arange(40)[None]
    split = split_experts(model, 12, noise=0.0).eval()
    assert (split.config.num_experts, split.config.num_experts_per_tok, split.config.moe_intermediate_size) == (8, 4, 12)
    torch.testing.assert_close(split(input_ids=ids).logits, model(input_ids=ids).logits)
    apart = split_experts(model, 12).model.layers[0].mlp.gate.weight
    assert not torch.equal(apart[0], apart[1]), "with noise the two halves of an expert can part"
    with pytest.raises(ValueError, match="cannot be split"):
        split_experts(model, 7)


def test_sorted_experts_have_the_outputs_and_the_gradients_of_the_library() -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**TINY.config, "num_experts": 16}))  # 16 experts: some get no token
    ids = torch.arange(9)[None]
    found = {}
    for implementation in ("eager", SORTED):
        model.config._experts_implementation = implementation
        model.zero_grad()
        logits = model(input_ids=ids).logits
        logits.square().sum().backward()
        found[implementation] = [logits.detach(), *(weight.grad.clone() for weight in model.parameters())]
    for ours, theirs in zip(found[SORTED], found["eager"], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_held_out_documents_are_in_no_training_stream(corpus: Path, tmp_path: Path) -> None:
    tokenizer, mixture, held_out = prepare(corpus, TINY.domains, 300, tmp_path / "out")
    kept_out = [text for text in documents(corpus / "a.txt") if is_held_out(text)]
    assert kept_out
    learned = tokenizer.decode(mixture.streams["one"].tolist())
    assert all(text not in learned for text in kept_out)
    assert all(text in tokenizer.decode(held_out["one"].tolist()) for text in kept_out)
    assert mixture.streams["one"][0] == tokenizer.eos_token_id
    assert tokenizer("a fox")["input_ids"][0] == tokenizer.bos_token_id


def test_a_batch_is_a_function_of_its_step(corpus: Path, tmp_path: Path) -> None:
    _, mixture, _ = prepare(corpus, TINY.domains, 300, tmp_path / "out")
    shares = {"one": 0.5, "two": 0.5}
    assert torch.equal(mixture.batch(5, 1, shares, 4, 16), mixture.batch(5, 1, shares, 4, 16))
    assert not torch.equal(mixture.batch(5, 1, shares, 4, 16), mixture.batch(6, 1, shares, 4, 16))


def test_the_balance_loss_is_one_for_even_experts_and_more_for_a_favourite() -> None:
    even = torch.eye(4).repeat(3, 1) * 10
    assert balance_loss([even], 1).item() == pytest.approx(1, abs=1e-3)
    favourite = torch.zeros(12, 4)
    favourite[:, 0] = 10
    assert balance_loss([even, favourite], 1).item() == pytest.approx((1 + 4) / 2, abs=1e-2)
    assert balance_loss([], 1) == 0


def test_training_starts_from_the_weights_of_a_model(corpus: Path, tmp_path: Path) -> None:
    first = train_model(TINY, corpus, tmp_path / "first")
    before = torch.load(tmp_path / "first" / "checkpoint.pt", weights_only=True)["weights"]
    longer = replace(TINY, phases=[*TINY.phases, Phase(1, {"one": 1.0}, 16, peak=1e-9)])
    train_model(longer, corpus, tmp_path / "second", start=(str(first), TINY.steps))
    after = torch.load(tmp_path / "second" / "checkpoint.pt", weights_only=True)
    assert after["step"] == longer.steps
    assert all(torch.allclose(weight, before[name], atol=1e-6) for name, weight in after["weights"].items())


def test_the_learning_rate_warms_up_and_falls_anew_from_each_peak() -> None:
    rates = [learning_rate(STORIES, step) for step in range(STORIES.steps)]
    assert max(rates) == 2e-3
    assert np.argmax(rates) in (149, 150)
    restart = sum(phase.steps for phase in STORIES.phases[:2])
    again = restart + STORIES.phases[2].steps
    assert rates[restart - 1] == pytest.approx(1e-4, rel=1e-2)
    assert max(rates[restart:again]) == 1e-3
    assert rates[again - 1] == pytest.approx(5e-5, rel=1e-2)
    assert max(rates[again:]) == 1.5e-3
    assert rates[-1] == pytest.approx(7.5e-5, rel=1e-2)


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="corpus folder"):
        train_model(TINY, tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"a\.txt does not exist"):
        train_model(TINY, tmp_path / "empty", tmp_path / "out")


@pytest.mark.parametrize(("unit", "fast"), [("amx_bf16", True), ("avx512_bf16", True), ("avx512_vnni", False)])
def test_training_multiplies_in_bfloat16_where_the_processor_has_a_unit_for_it(
    unit: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {unit: True})
    assert fast_bfloat16() is fast


def test_a_binary_corpus_and_damaged_tokens_are_one_sentence(corpus: Path, tmp_path: Path) -> None:
    train_model(TINY, corpus, tmp_path / "out", stop_at=1)
    (tmp_path / "out" / "tokens.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match="is damaged"):
        train_model(TINY, corpus, tmp_path / "out")
    (corpus / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text"):
        train_model(TINY, corpus, tmp_path / "other")
