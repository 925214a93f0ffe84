"""What is captured, and how it is kept."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.training.capture import Captured, capture, fused_layers, logit_scale, observe, teacher_logits
from edgexpert.training.examples import Continuations, Example, Given

from .conftest import FAMILIES, qwen3_moe


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_is_the_model(family: str) -> None:
    torch.manual_seed(1)
    target = FAMILIES[family]().eval()
    tokens = torch.randint(0, 64, (2, 9))
    features, hidden, best = observe(target, tokens, (2, 3, 4))
    with torch.no_grad():
        outputs = target(input_ids=tokens, output_hidden_states=True)
        teacher = teacher_logits(target, hidden, logit_scale(target))
        part = teacher_logits(target, hidden, logit_scale(target), torch.tensor([3, 7]))
    torch.testing.assert_close(teacher, outputs.logits)
    torch.testing.assert_close(part, outputs.logits[..., [3, 7]])
    assert torch.equal(best, outputs.logits.argmax(-1))
    # output_hidden_states[i] is the input of layer i
    torch.testing.assert_close(features, torch.cat([outputs.hidden_states[layer] for layer in (2, 3, 4)], -1))


def test_logits_that_are_no_multiple_of_the_heads_are_refused(target: PreTrainedModel) -> None:
    def cap(module: torch.nn.Module, args: object, outputs: object) -> None:
        outputs.logits = 0.1 * torch.tanh(outputs.logits)  # type: ignore[attr-defined]

    handle = target.register_forward_hook(cap)
    try:
        with pytest.raises(UserError, match="constant factor"):
            logit_scale(target)
    finally:
        handle.remove()


def test_stored_states_are_those_of_each_sequence_alone(captured: Captured, source: Continuations, target: PreTrainedModel
                                                         ) -> None:
    batch = captured.batch([10, 3], padding=2)
    for row, index in enumerate((10, 3)):
        example = source.shard(index // 8, target)[index % 8]
        n = len(example.tokens)
        features, hidden, best = observe(target, example.tokens[None], captured.fused_layers)
        assert torch.equal(batch.tokens[row, :n], example.tokens)
        assert torch.equal(batch.loss_mask[row, :n], example.loss_mask)
        assert not batch.loss_mask[row, n:].any()
        torch.testing.assert_close(batch.features[row, :n].float(), features[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(batch.hidden[row, :n].float(), hidden[0], rtol=2e-2, atol=2e-2)
        assert torch.equal(batch.best[row, :n], best[0])


def test_sequences_of_unequal_length_do_not_disturb_each_other(target: PreTrainedModel, tmp_path: Path) -> None:
    examples = [Example(torch.arange(1, n), torch.arange(1, n) > 2) for n in (4, 12, 7)]
    together = capture(target, Given(examples), tmp_path / "together")
    for index, example in enumerate(examples):
        alone = capture(target, Given([example]), tmp_path / str(index)).batch([0], 0)
        n = len(example.tokens)
        torch.testing.assert_close(together.batch([index], 0).features[:, :n], alone.features, rtol=2e-2, atol=2e-2)


def test_an_interrupted_capture_goes_on_and_repeats_nothing(target: PreTrainedModel, given: Given, tmp_path: Path) -> None:
    whole = capture(target, given, tmp_path)
    tokens = whole.batch(range(len(whole)), 0).tokens
    (tmp_path / "000001.safetensors").unlink()
    with pytest.raises(UserError, match="1 of 3 shards"):
        Captured(tmp_path)
    kept = (tmp_path / "000000.safetensors").stat().st_mtime_ns
    again = capture(target, given, tmp_path)
    assert torch.equal(again.batch(range(len(again)), 0).tokens, tokens)
    assert (tmp_path / "000000.safetensors").stat().st_mtime_ns == kept


def test_states_of_another_source_are_not_mixed_in(target: PreTrainedModel, states: Path, given: Given) -> None:
    with pytest.raises(UserError, match="another target or source"):
        capture(target, given, states)


def test_a_full_disk_is_noticed_before_anything_is_written(target: PreTrainedModel, given: Given, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    capture(target, given, tmp_path / "measured")
    written = sum(file.stat().st_size for file in (tmp_path / "measured").glob("*.safetensors"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(UserError, match=r"need [\d,]+ bytes, but .* has 1,000 bytes free") as error:
        capture(target, given, tmp_path / "full")
    needed = int(str(error.value).split("need ")[1].split(" ")[0].replace(",", ""))
    assert 0.8 * written < needed <= written
    assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize(("layers", "fused"), [(24, (2, 12, 21)), (16, (2, 8, 13)), (27, (2, 13, 24)), (48, (2, 24, 45)),
                                               (7, (2, 3, 4))])
def test_the_fused_layers_are_those_of_public_drafts(layers: int, fused: tuple[int, int, int]) -> None:
    assert fused_layers(layers) == fused


@pytest.mark.parametrize("layers", range(1, 7))
def test_a_target_without_three_distinct_layers_is_refused(layers: int, given: Given, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has {layers} layers"):
        capture(qwen3_moe(num_hidden_layers=layers), given, tmp_path)


@pytest.mark.parametrize("name", ["capture.json", "000000.safetensors"])
def test_damaged_states_are_one_sentence(states: Path, tmp_path: Path, name: str) -> None:
    for number, content in enumerate((b"", b"{", b"[]", bytes(64))):
        broken = tmp_path / str(number)
        shutil.copytree(states, broken)
        (broken / name).write_bytes(content)
        with pytest.raises(UserError, match=f"captured states in .*{number}.* cannot be read"):
            Captured(broken)
