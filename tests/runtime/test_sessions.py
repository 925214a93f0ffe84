"""One text owns its state: texts of one engine that run in turns or in threads give what each gives alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.model.host import HostedModel
from edgexpert.model.packed import load_pack
from edgexpert.policy import PRESETS
from edgexpert.runtime.engine import Engine
from edgexpert.runtime.results import Generation
from edgexpert.runtime.stream import TextStream
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.ngram import NgramDraft
from edgexpert.speculation.sampling import SamplingParams
from tests.conftest import make_model, make_tokenizer
from tests.packs import make_pack
from tests.speculation.drafts import RandomDraft

PROMPTS = ("once upon a time a fox met a crow, once upon a time", "a crow and a crow and a crow", "the bear was old, so the old")
POLICIES = ("exact", "edgexpert", "moe-pruner")


def make_engine(draft: Draft | None = None, model: PreTrainedModel | None = None) -> Engine:
    return Engine(HostedModel(model or make_model("qwen3_moe", num_hidden_layers=3)), make_tokenizer(), name="tiny", draft=draft)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A model whose stages are one native call each, where there are compiled kernels."""
    return load_pack(make_pack("olmoe", tmp_path_factory.mktemp("packed"), num_hidden_layers=3))


def told(result: Generation) -> dict[str, Any]:
    """Everything that a result says but for times."""
    facts = result.to_json()
    del facts["timing"]
    return facts


def streams(engine: Engine) -> list[TextStream]:
    options = dict(max_new_tokens=16, ignore_eos=True, tree=TreeShape(size=8))
    return [engine.stream(prompt, policy=policy, **options) for policy in POLICIES for prompt in PROMPTS]


def in_turns(running: list[TextStream]) -> None:
    """A piece of each, until all are through."""
    left = list(running)
    while left:
        left = [stream for stream in left if next(stream, None) is not None]


def in_threads(running: list[TextStream]) -> None:
    with ThreadPoolExecutor(len(running)) as pool:
        list(pool.map(list, running))


@pytest.mark.parametrize("together", [in_turns, in_threads])
@pytest.mark.parametrize("draft", [NgramDraft(), RandomDraft(128), None], ids=["ngram", "random", "plain"])
def test_texts_that_run_together_give_what_each_gives_alone(
    draft: Draft | None, together: Callable[[list[TextStream]], None]
) -> None:
    engine, alone = make_engine(draft), []
    for number in range(len(streams(engine))):
        stream = streams(engine)[number]
        list(stream)
        alone.append(told(stream.generation))
    running = streams(engine)
    together(running)
    assert [told(stream.generation) for stream in running] == alone
    assert all(result["traffic"]["decode"]["experts"] > 0 for result in alone)


@pytest.mark.parametrize("together", [in_turns, in_threads])
def test_texts_on_packed_weights_give_together_what_each_gives_alone(
    packed: PreTrainedModel, together: Callable[[list[TextStream]], None]
) -> None:
    engine, options = make_engine(RandomDraft(128), packed), dict(max_new_tokens=24, ignore_eos=True, tree=TreeShape())
    policies = ("exact", "pruned", "edgexpert", replace(PRESETS["coalesced"], token_weight="attention"))

    def begin() -> list[TextStream]:
        return [engine.stream(prompt, policy=policy, **options) for policy in policies for prompt in PROMPTS]

    alone = []
    for stream in begin():
        list(stream)
        alone.append(told(stream.generation))
    for _ in range(3):
        running = begin()
        together(running)
        assert [told(stream.generation) for stream in running] == alone


def test_a_policy_set_in_mid_text_decides_the_next_one() -> None:
    engine = make_engine(NgramDraft())
    options = dict(max_new_tokens=16, ignore_eos=True, tree=TreeShape())
    truth = engine.generate(PROMPTS[0], **options)
    stream = engine.stream(PROMPTS[0], **options)
    next(stream)
    engine.set_policy("pruned")
    list(stream)
    assert told(stream.generation) == told(truth)
    assert engine.generate(PROMPTS[0], **options).policy["name"] == "pruned"


def test_preparing_weights_for_one_text_leaves_the_next_ones_alone() -> None:
    model = make_model("olmoe", num_hidden_layers=3)
    engine = make_engine(model=model)
    truth = engine.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True)
    for policy in ("edgemoe", "edgexpert", "moe-pruner"):
        engine.generate(PROMPTS[0], policy=policy, max_new_tokens=2)
        assert told(engine.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True)) == told(truth)


# -- several answers, log-probabilities, times --------------------------------------------------------------------------------


def test_a_list_of_prompts_gives_a_list_of_answers() -> None:
    engine = make_engine(NgramDraft())
    options = dict(max_new_tokens=6, tree=TreeShape())
    alone = [told(engine.generate(prompt, **options)) for prompt in PROMPTS]
    assert [told(got) for got in engine.generate(list(PROMPTS), **options)] == alone
    ids = [engine.encode(prompt) for prompt in PROMPTS]
    assert [told(got) for got in engine.generate(ids, **options)] == alone


def test_n_answers_have_seeds_of_their_own_and_share_the_prompt() -> None:
    engine = make_engine(NgramDraft())
    options = dict(max_new_tokens=10, temperature=1.0, ignore_eos=True)
    answers = engine.generate(PROMPTS[0], n=3, seed=5, **options)
    assert [a.token_ids for a in answers] == [engine.generate(PROMPTS[0], seed=5 + i, **options).token_ids for i in range(3)]
    assert len({tuple(a.token_ids) for a in answers}) == 3
    assert [a.prompt_tokens_cached for a in answers] == [0, *[len(PROMPTS[0]) - 1] * 2]


@pytest.mark.parametrize("draft", [NgramDraft(), None], ids=["trees", "plain"])
def test_logprobs_are_those_of_the_librarys_logits(draft: Draft | None) -> None:
    model = make_model("olmoe", num_hidden_layers=3)
    got = make_engine(draft, model).generate(PROMPTS[0], max_new_tokens=10, ignore_eos=True, logprobs=3)
    ids = make_tokenizer()(PROMPTS[0])["input_ids"]
    with torch.no_grad():
        scores = model(torch.tensor([[*ids, *got.token_ids]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    assert [entry.token for entry in got.logprobs] == got.token_ids
    for entry, row in zip(got.logprobs, scores, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert make_engine(draft, model).generate(PROMPTS[0], max_new_tokens=2).logprobs == []


def test_every_token_has_its_time() -> None:
    timing = make_engine(NgramDraft()).generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True).timing
    assert len(timing.token_s) == 12 and timing.token_s == sorted(timing.token_s)
    assert timing.ttft_s == timing.token_s[0] and timing.total_s == timing.token_s[-1]
    assert timing.tpot_s == pytest.approx((timing.token_s[-1] - timing.token_s[0]) / 11)


def test_what_a_checkpoint_wants_is_the_default_and_is_told() -> None:
    model = make_model("olmoe", num_hidden_layers=3)
    model.generation_config.update(do_sample=True, temperature=0.7, min_p=0.1)
    engine = make_engine(model=model)
    got = engine.generate(PROMPTS[0], max_new_tokens=4, top_p=0.5)
    assert (got.sampling.temperature, got.sampling.top_k, got.sampling.top_p) == (0.7, 50, 0.5)
    assert got.to_json()["sampling"]["temperature"] == 0.7
    assert [note for note in got.notes if "min_p" in note]
    assert engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=2)).sampling == SamplingParams(max_new_tokens=2)


@pytest.mark.parametrize("draft", [NgramDraft(), None], ids=["trees", "plain"])
def test_a_checkpoints_repetition_penalty_acts_as_in_the_library(draft: Draft | None) -> None:
    model = make_model("olmoe", num_hidden_layers=3)
    ids = make_tokenizer()(PROMPTS[0])["input_ids"]
    plain = make_engine(draft, model).generate(ids, max_new_tokens=16, ignore_eos=True).token_ids
    model.generation_config.repetition_penalty = 1.8
    truth = model.generate(torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16)[0, len(ids) :].tolist()
    got = make_engine(draft, model).generate(ids, max_new_tokens=16, ignore_eos=True).token_ids
    assert got == truth != plain


def test_a_checkpoint_that_wants_nonsense_is_refused() -> None:
    model = make_model("olmoe", num_hidden_layers=3)
    model.generation_config.repetition_penalty = -1.0
    with pytest.raises(UserError, match=r"generation_config\.json is wrong.*repetition_penalty"):
        make_engine(model=model)


def test_weights_that_are_no_numbers_are_named() -> None:
    model = make_model("qwen3_moe", num_hidden_layers=3)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight is not finite"):
        make_engine(model=model).generate(PROMPTS[0])


def test_a_text_that_was_interrupted_in_mid_stage_is_not_built_upon() -> None:
    engine = make_engine(NgramDraft())
    stream = engine.stream(PROMPTS[0], max_new_tokens=30, ignore_eos=True)
    next(stream)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    run, engine.host.run = engine.host.run, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    engine.host.run = run  # type: ignore[method-assign]
    assert engine.generate(PROMPTS[0], max_new_tokens=3, after=stream).prompt_tokens_cached == 0
