"""In 16 bits a tree may break a near-tie otherwise than plain decoding: that is said, and it is a near-tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import edgexpert
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.model.host import HostedModel
from tests.conftest import make_model, make_tokenizer
from tests.parity.examine import branching

PROMPT = [5, 17, 99, 3, 42, 7, 7, 64, 23, 120, 11, 90]


def greedy(host: HostedModel, tokens: int) -> tuple[list[int], torch.Tensor]:
    """A text of plain decoding, and the logits of each of its tokens."""
    cache, found, text = host.new_cache(64), [], []
    logits = host.run(Stage.prefill(torch.tensor(PROMPT)), cache).logits[-1]
    for _ in range(tokens):
        found.append(logits)
        text.append(int(logits.argmax()))
        logits = host.run(Stage.verify(TokenTree.of_root(text[-1]), cache.length), cache).logits[0]
    return text, torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "gpt_oss"])
def test_the_first_difference_is_a_near_tie(family: str, dtype: torch.dtype) -> None:
    host = HostedModel(make_model(family).to(dtype))
    text, logits = greedy(host, 40)
    trees = branching(host, PROMPT, text)
    first = next((i for i, row in enumerate(trees) if int(row.argmax()) != text[i]), None)
    if first is not None:
        best, second = logits[first].topk(2).values
        assert best - second < 0.5 * logits[first].std()


@pytest.mark.parametrize(("dtype", "said"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_a_result_says_that_its_type_rounds(dtype: str, said: bool, tmp_path: Path) -> None:
    make_model("olmoe").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    result = edgexpert.load(str(tmp_path), dtype=dtype).generate("a fox", max_new_tokens=3)
    assert any(f"in {dtype} a draft may change the text" in note for note in result.notes) == said
