"""The engine's promises: exact text whatever drafts, limits kept, bytes counted, forced decoding honest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.stage import TokenTree
from edgexpert.model.host import HostedModel
from edgexpert.policy import PRESETS, Techniques
from edgexpert.runtime.engine import Engine
from edgexpert.runtime.stream import TextStream
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.ngram import NgramDraft, NgramState
from tests.conftest import make_model, make_tokenizer
from tests.speculation.drafts import GarbageDraft, OracleDraft, RandomDraft

PROMPT = "once upon a time a fox met a crow, once upon a time"


def make_engine(model: PreTrainedModel, draft: Draft | None = None, policy: Techniques | None = None) -> Engine:
    return Engine(HostedModel(model), make_tokenizer(), name="tiny", draft=draft, policy=policy or PRESETS["exact"])


def library_text(model: PreTrainedModel, new: int) -> list[int]:
    ids = make_tokenizer()(PROMPT)["input_ids"]
    out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist()


def drafts(truth: list[int]) -> dict[str, Draft | None]:
    return {
        "none": None,
        "ngram": NgramDraft(),
        "oracle": OracleDraft(truth),
        "garbage": GarbageDraft(128),
        "random": RandomDraft(128),
    }


@pytest.mark.parametrize("size", [1, 8, 64])
def test_greedy_text_is_that_of_transformers_for_every_draft_and_tree_size(model: PreTrainedModel, size: int) -> None:
    truth = library_text(model, 24)
    for name, draft in drafts(truth).items():
        engine = make_engine(model, draft)
        got = engine.generate(PROMPT, tree=TreeShape(size=size), max_new_tokens=24)
        assert got.token_ids == truth, name
        engine.host.detach()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_second_turn_from_the_cache_has_the_text_of_a_fresh_run(family: str) -> None:
    engine = make_engine(make_model(family))
    options = dict(max_new_tokens=12, ignore_eos=True, tree=TreeShape(size=8))
    first = engine.encode(PROMPT)
    answer = engine.generate(first, **options).token_ids
    second = [*first, *answer, *engine.encode(" and the crow")]
    other = [*first[:10], *engine.encode(PROMPT)]  # parts from the text before in the middle of its prompt
    truth = [engine.generate(ids, **options).token_ids for ids in (first, second, other)]
    for name, draft in drafts(truth[1]).items():
        engine.draft = draft
        streams: list[TextStream] = []
        for ids in (first, second, other):
            streams.append(engine.stream(ids, after=streams[-1] if streams else None, **options))
            assert "".join(streams[-1]) == streams[-1].generation.text
        runs = [stream.generation for stream in streams]
        assert [run.token_ids for run in runs] == truth, name
        # one less than what is common: the last common token is run again
        assert [run.prompt_tokens_cached for run in runs] == [0, len(first) + len(answer) - 1, 9], name
        assert runs[1].to_json()["prompt_tokens_cached"] == runs[1].prompt_tokens_cached


def test_a_cache_is_reused_only_where_policy_and_draft_are_the_same() -> None:
    engine = make_engine(make_model("qwen3_moe"), NgramDraft())
    options = dict(max_new_tokens=8, ignore_eos=True)

    def cached(after: TextStream) -> int:
        return engine.generate(PROMPT, after=after, **options).prompt_tokens_cached

    stream = engine.stream(PROMPT, **options)
    assert cached(stream) == 0, "nothing of it has run"
    next(stream)
    assert cached(stream) == len(PROMPT) - 1, "its prompt has"
    whole = engine.generate(PROMPT, **options).token_ids
    assert list(stream) and stream.generation.token_ids == whole, "nothing was taken away from it"
    engine.set_policy(PRESETS["pruned"])
    assert cached(stream) == 0, "another policy"
    engine.set_policy(PRESETS["exact"])
    engine.draft = None
    assert cached(stream) == 0, "another draft"


@pytest.mark.parametrize("name", PRESETS)
def test_a_second_turn_reads_less_under_every_policy(name: str) -> None:
    engine = make_engine(make_model("qwen3_moe"), NgramDraft(), PRESETS[name])
    fresh = engine.generate(PROMPT + " again", max_new_tokens=2).traffic
    before = engine.stream(PROMPT, max_new_tokens=2)
    list(before)
    again = engine.generate(PROMPT + " again", max_new_tokens=2, after=before)
    assert again.prompt_tokens_cached == len(PROMPT) - 1
    assert again.traffic.prefill["experts"] < fresh.prefill["experts"]
    assert again.traffic.prefill["encoder"] == fresh.prefill["encoder"], "the whole prompt is weighed"


def test_sampled_text_does_not_depend_on_the_draft() -> None:
    model = make_model("qwen3_moe")
    options = dict(max_new_tokens=24, temperature=0.8, top_k=30, top_p=0.9, repetition_penalty=1.2, seed=3, ignore_eos=True)
    engine = make_engine(model)
    truth = engine.generate(PROMPT, **options).token_ids
    assert truth != engine.generate(PROMPT, **{**options, "seed": 4}).token_ids
    for name, draft in drafts(truth).items():
        engine.draft = draft
        assert engine.generate(PROMPT, **options).token_ids == truth, name


def test_an_oracle_is_accepted_to_full_depth() -> None:
    model = make_model("olmoe")
    truth = make_engine(model).generate(PROMPT, max_new_tokens=29, ignore_eos=True).token_ids
    got = make_engine(model, OracleDraft(truth)).generate(PROMPT, max_new_tokens=29, ignore_eos=True, tree=TreeShape(depth=6))
    assert got.speculation.stages == 4
    assert got.speculation.acceptance_length == 7
    assert got.speculation.accepted_per_depth == [4] * 6


@pytest.mark.parametrize("new", [1, 2, 5, 6])
def test_never_more_than_max_new_tokens(new: int) -> None:
    model = make_model("olmoe")
    truth = make_engine(model).generate(PROMPT, max_new_tokens=29, ignore_eos=True).token_ids
    got = make_engine(model, OracleDraft(truth)).generate(PROMPT, max_new_tokens=new, ignore_eos=True)
    assert got.token_ids == truth[:new]
    assert got.finish == "length"


def test_nothing_after_an_end_of_sequence_inside_an_accepted_path() -> None:
    model = make_model("olmoe")
    truth = make_engine(model).generate(PROMPT, max_new_tokens=20, ignore_eos=True).token_ids
    engine = make_engine(model, OracleDraft(truth))
    engine.end_of_sequence = {truth[4]}
    got = engine.generate(PROMPT, max_new_tokens=20)
    assert got.token_ids == truth[: truth.index(truth[4]) + 1]
    assert got.finish == "eos"


def test_a_stop_string_ends_the_text_before_it() -> None:
    model = make_model("olmoe")
    whole = make_engine(model).generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    stop = whole.text[6:9]
    engine = make_engine(model, OracleDraft(whole.token_ids))
    stream = engine.stream(PROMPT, max_new_tokens=20, ignore_eos=True, stop=(stop,))
    pieces = "".join(stream)
    assert pieces == stream.generation.text == whole.text[: whole.text.index(stop)]
    assert stream.generation.finish == "stop"


def test_streamed_pieces_join_to_the_text() -> None:
    engine = make_engine(make_model("granitemoe"), NgramDraft())
    stream = engine.stream(PROMPT, max_new_tokens=30)
    assert "".join(stream) == stream.generation.text


@pytest.mark.parametrize("name", PRESETS)
def test_a_policy_plans_the_bytes_that_it_reads(name: str, model: PreTrainedModel) -> None:
    """`HostedModel` asserts planned against read bytes in every layer; here the sum must reach the ledger."""
    engine = make_engine(model, RandomDraft(128), PRESETS[name])
    got = engine.generate(PROMPT, max_new_tokens=12, tree=TreeShape(size=16), ignore_eos=True)
    assert len(got.token_ids) == 12
    assert 0 < got.traffic.decode["experts"] < got.speculation.stages * sum(
        block.num_experts * block.shape.expert for block in engine.host.blocks
    ) + 1
    assert (got.approximations == []) == (name == "exact")
    assert (got.traffic.prefill["encoder"] > 0) == PRESETS[name].prompt_wise_expert_reuse


def test_exact_plain_decoding_reads_top_k_experts_a_token() -> None:
    engine = make_engine(make_model("qwen3_moe"))
    got = engine.generate(PROMPT, max_new_tokens=10, ignore_eos=True)
    assert got.expert_bytes_per_token == got.expert_bytes_plain == 7 * 2 * 3 * 32 * 24 * 4
    assert got.experts_per_layer_per_stage == 2


def test_forced_decoding_under_the_exact_policy_gives_the_teacher_forced_log_probabilities(model: PreTrainedModel) -> None:
    tokenizer = make_tokenizer()
    ids, truth = tokenizer(PROMPT)["input_ids"], tokenizer(" and they talked for a while")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + truth])).logits[0].log_softmax(-1)
    expected = [float(logits[len(ids) - 1 + i, token]) for i, token in enumerate(truth)]
    for draft in (None, NgramDraft(), RandomDraft(128), OracleDraft(truth)):
        engine = make_engine(model, draft)
        score = engine.score(PROMPT, truth, TreeShape(size=12, depth=4))
        assert score.log_probs == pytest.approx(expected, abs=1e-4)
        engine.host.detach()


def test_every_byte_that_a_draft_reads_is_counted() -> None:
    states: list[NgramState] = []

    class Reader(NgramState):
        def observe(self, tokens: torch.Tensor, features: torch.Tensor | None) -> None:
            super().observe(tokens, features)
            self.bytes_read += 10

        def propose(self, root: int, shape: TreeShape) -> TokenTree:
            self.bytes_read += 1000
            return super().propose(root, shape)

    class ReadingDraft(NgramDraft):
        def start(self) -> NgramState:
            states.append(Reader())
            return states[-1]

    got = make_engine(make_model("olmoe"), ReadingDraft()).generate(PROMPT, tree=TreeShape(), max_new_tokens=20, ignore_eos=True)
    assert got.traffic.prefill["draft"] == 10
    assert got.traffic.total("draft") == states[0].bytes_read


def test_coarse_pruning_alone_never_loads_more() -> None:
    model, truth = make_model("qwen3_moe"), make_tokenizer()(" and they talked for a while")["input_ids"]
    engine = make_engine(model, RandomDraft(128))
    exact = engine.score(PROMPT, truth).expert_bytes_per_token
    engine.set_policy(replace(PRESETS["exact"], name="custom", coarse_pruning=True, keep_mass=0.5))
    engine.draft = RandomDraft(128)
    assert engine.score(PROMPT, truth).expert_bytes_per_token < exact


@pytest.mark.parametrize(
    ("prompt", "options", "part"),
    [
        ("", {}, "empty"),
        ("  \n", {}, "empty"),
        ("x" * 250, {"max_new_tokens": 10}, "context"),
        ([{"role": "user", "content": "hi"}], {}, "chat template"),
        ([], {}, "empty"),
        (b"Once", {}, "not bytes"),
        (None, {}, "not NoneType"),
        ([5, 128], {}, "no token 128"),
        (torch.tensor([5, -1]), {}, "no token -1"),
        ([5, "x"], {}, "no token 'x'"),
        ([{"text": "hi"}], {}, "role"),
        ("once", {"stop": [1]}, "`stop`"),
        ("once", {"max_new_tokens": "3"}, "`max_new_tokens`"),
        ("once", {"top_k": 1.5}, "`top_k`"),
        ("once", {"temperature": 1e-40}, "`temperature`"),
        ("once", {"tree": 5}, "TreeShape"),
        ("once", {"n": 0}, "`n`"),
        ("once", {"logprobs": -1}, "`logprobs`"),
        ("once", {"warmth": 1}, "no option 'warmth'"),
        ("once", {"policy": 7}, "`policy`"),
        ("once", {"params": {"seed": 1}}, "SamplingParams"),
    ],
)
def test_bad_prompts_are_named(prompt: object, options: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        make_engine(make_model("olmoe")).generate(prompt, **options)  # type: ignore[arg-type]


def test_a_dense_model_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2))
    with pytest.raises(UserError, match="no mixture-of-experts layer"):
        HostedModel(dense)
