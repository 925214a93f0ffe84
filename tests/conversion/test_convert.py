"""What is written can be read back, whatever the family, and however often the conversion was killed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import edgexpert
from edgexpert.conversion import writer as writer_module
from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions, parse_keep
from edgexpert.conversion.sources.opening import open_source
from edgexpert.conversion.writer import JOURNAL, Writer
from edgexpert.core.errors import UserError
from edgexpert.core.resources import bundled_folder
from edgexpert.model.loading import load_model
from edgexpert.weights.files import Pack, verify
from edgexpert.weights.manifest import DENSE, EXPERTS, MANIFEST
from edgexpert.weights.matrix import PackedMatrix, dequantise
from edgexpert.weights.rounding import quantise
from tests.conftest import FAMILIES
from tests.conversion.conftest import TINY, checkpoint, float_weights

DOCUMENTED = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt_oss"}))
def test_at_16_bits_everything_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    model, source = checkpoint(family, tmp_path / "source")
    convert(source, tmp_path / "out", PackOptions(16))
    weights = float_weights(tmp_path / "out")
    state = model.state_dict()
    assert set(weights) == set(state)
    for name, tensor in state.items():
        assert torch.equal(weights[name], tensor.float()), name


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("options", [PackOptions(4, 8), PackOptions(8, 4), PackOptions(4, 8, zero_point=True)], ids=str)
def test_at_fewer_bits_what_comes_back_is_what_rounding_gives(family: str, options: PackOptions, tmp_path: Path) -> None:
    model, source = checkpoint(family, tmp_path / "source")
    manifest = convert(source, tmp_path / "out", options)
    weights, state = float_weights(tmp_path / "out"), model.state_dict()
    for layer in manifest.layers:
        for part, name in layer.parameters.items():
            for expert, weight in enumerate(state[name]):
                rounded = dequantise(quantise(weight.t(), options.bits, options.group_size, options.zero_point)).t()
                assert torch.equal(weights[name][expert], rounded)
                error = (rounded - weight.float()).norm() / weight.float().norm()
                assert layer.errors[part][expert] == pytest.approx(float(error), rel=1e-4)
    for name in manifest.linears:
        rounded = dequantise(quantise(state[name].t(), options.bits, options.group_size, options.zero_point)).t()
        assert torch.equal(weights[name], rounded)


def test_the_documented_ten_lines_read_an_expert(tmp_path: Path) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")
    snippet = re.search(r"```python\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    assert snippet is not None and len(snippet[1].strip().splitlines()) <= 12
    scope: dict = {}
    exec(snippet[1], scope)
    for number, options in enumerate((PackOptions(4, 8), PackOptions(4, 8, zero_point=True), PackOptions(8, 8))):
        convert(source, tmp_path / f"out{number}", options)
        pack = Pack(tmp_path / f"out{number}")
        for part in ("gate_up", "down"):
            expected = dequantise(pack.experts(pack.manifest.layers[1])[part][3]).numpy()
            np.testing.assert_array_equal(scope["read"](pack.folder, 1, 3, part), expected)


def test_records_and_arrays_are_aligned_and_the_layers_experts_are_one_view(tmp_path: Path) -> None:
    _, source = checkpoint("qwen3_moe", tmp_path / "source")
    convert(source, tmp_path / "out", PackOptions(4, 8, zero_point=True))
    pack = Pack(tmp_path / "out")
    for layer in pack.manifest.layers:
        assert layer.offset % 4096 == 0 and layer.stride % 4096 == 0
        for part, stacked in pack.experts(layer).items():
            extents = getattr(layer, part).extents
            assert set(extents) == {"values", "scales", "zeros"} and all(e.offset % 64 == 0 for e in extents.values())
            assert stacked.values.shape[0] == layer.experts and stacked.values.stride(0) == layer.stride
            assert stacked.values[3].is_contiguous() and stacked.scales is not None and stacked.scales[3].is_contiguous()


def test_a_tied_head_gets_a_copy_of_its_own(tmp_path: Path) -> None:
    model, source = checkpoint("granitemoe", tmp_path / "source", tie_word_embeddings=True)
    convert(source, tmp_path / "out", PackOptions(4, 8, keep=parse_keep(["lm_head=8"])))
    dense = Pack(tmp_path / "out").dense()
    head, embeddings = dense["lm_head.weight"], dense["model.embed_tokens.weight"]
    assert isinstance(head, PackedMatrix) and head.bits == 8
    assert torch.equal(embeddings, model.get_input_embeddings().weight)


def test_the_bundled_model_is_a_source_too(tmp_path: Path) -> None:
    convert(open_source("stories"), tmp_path / "out", PackOptions(16))
    weights = float_weights(tmp_path / "out")
    pack = Pack(bundled_folder("stories"))
    assert set(pack.parameters) == weights.keys()
    assert all(torch.equal(weights[name].bfloat16(), pack.read_float(name).bfloat16()) for name in pack.parameters)


def test_a_packed_checkpoint_made_floats_is_the_library_s_model_on_the_rounded_weights(tmp_path: Path) -> None:
    checkpoint("olmoe", tmp_path / "source")
    convert(open_source(str(tmp_path / "source")), tmp_path / "out", PackOptions(8, 8))
    loaded = load_model(str(tmp_path / "out"), dtype="float32")
    expected = float_weights(tmp_path / "out")
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in loaded.model.state_dict().items())
    assert "PyTorch computes" in loaded.notes[0]
    ids = torch.arange(2, 20)[None]
    packed = load_model(str(tmp_path / "out")).model
    torch.testing.assert_close(loaded.model(ids).logits, packed(ids).logits, rtol=0.05, atol=0.05)


def test_floats_keep_their_type(tmp_path: Path) -> None:
    model, _ = checkpoint("olmoe", tmp_path / "source")
    model.float().save_pretrained(tmp_path / "float")
    convert(open_source(str(tmp_path / "float")), tmp_path / "out", PackOptions(4, 8))
    dense = Pack(tmp_path / "out").dense()
    assert dense["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    assert dense["model.embed_tokens.weight"].dtype == torch.bfloat16


class Killed(BaseException):
    """What a kill looks like to the code: nothing after it runs."""


@pytest.mark.parametrize("moment", ["_sync", "_append", "_write"])
def test_killed_again_and_again_it_ends_with_the_same_files(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")
    convert(source, tmp_path / "whole", PackOptions(4, 8))
    real, countdown, kills = getattr(Writer, moment), [0], 0

    def dying(self: Writer, *args: object) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise Killed
        real(self, *args)

    monkeypatch.setattr(Writer, moment, dying)
    done = False
    while not done:
        countdown[0] = 7 + 40 * (moment == "_write")
        try:
            convert(source, tmp_path / "out", PackOptions(4, 8))
            done = True
        except Killed:
            kills += 1
            assert not (tmp_path / "out").exists() and (tmp_path / "out.unfinished").is_dir()
    assert kills >= 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["out", "source", "whole"]
    for name in (EXPERTS, DENSE, MANIFEST):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_half_a_line_of_the_journal_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")
    interrupt(source, tmp_path / "out", monkeypatch)
    journal = tmp_path / "out.unfinished" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-9])
    convert(source, tmp_path / "out", PackOptions(4, 8))
    assert verify(tmp_path / "out")


def test_other_options_do_not_continue_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")
    interrupt(source, tmp_path / "out", monkeypatch)
    with pytest.raises(UserError, match="with other options"):
        convert(source, tmp_path / "out", PackOptions(8, 8))
    convert(source, tmp_path / "out", PackOptions(4, 8))


def interrupt(source: object, destination: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills a conversion half-way."""
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write_experts", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            convert(source, destination, PackOptions(4, 8))  # type: ignore[arg-type]


def test_a_full_disk_is_one_sentence_and_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer_module.os, "fsync", full)
        with pytest.raises(UserError, match="disk is full"):
            convert(source, tmp_path / "out", PackOptions(4, 8))
    convert(source, tmp_path / "out", PackOptions(4, 8))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
        with pytest.raises(UserError, match="GB free"):
            convert(source, tmp_path / "second", PackOptions(4, 8))
    assert not list(tmp_path.glob("second*"))


def test_bad_requests_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")
    with pytest.raises(UserError, match=r"does not divide the 24 input channels of model\.layers\.0\.mlp\.experts\.down_proj"):
        convert(source, tmp_path / "out", PackOptions(4, 16))
    with pytest.raises(UserError, match="exists"):
        convert(source, tmp_path / "source", PackOptions(4, 8))
    with pytest.raises(UserError, match="belong together"):
        convert(source, tmp_path / "out", PackOptions(4, 8, "gptq"))
    bad_options = (lambda: PackOptions(5), lambda: PackOptions(8, zero_point=True), lambda: PackOptions(4, 6))
    for bad in (*bad_options, lambda: parse_keep(["router=8"])):
        with pytest.raises(UserError):
            bad()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint("olmoe", tmp_path / "source")
    index = json.loads((tmp_path / "source" / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    shard = tmp_path / "source" / index["weight_map"].pop(name)
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="has 7 of the 8 tensors"):
        convert(open_source(str(tmp_path / "source")), tmp_path / "out", PackOptions(4, 8))
    assert not list(tmp_path.glob("out*"))
    checkpoint("olmoe", tmp_path / "source")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged or truncated"):
        convert(open_source(str(tmp_path / "source")), tmp_path / "out", PackOptions(4, 8))


def test_a_changed_file_and_a_newer_format_are_refused(tmp_path: Path) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")
    convert(source, tmp_path / "out", PackOptions(4, 8))
    assert set(verify(tmp_path / "out")) == {p.name for p in (tmp_path / "out").iterdir()}
    raw = bytearray((tmp_path / "out" / EXPERTS).read_bytes())
    raw[1000] ^= 1
    (tmp_path / "out" / EXPERTS).write_bytes(raw)
    with pytest.raises(UserError, match="SHA-256"):
        verify(tmp_path / "out")
    (tmp_path / "out" / EXPERTS).write_bytes(raw[:-1])
    with pytest.raises(UserError, match="should have"):
        Pack(tmp_path / "out")
    (tmp_path / "out" / EXPERTS).unlink()
    with pytest.raises(UserError, match=r"experts\.pack should have [0-9]+ bytes and has 0"):
        load_model(str(tmp_path / "out"))
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    (tmp_path / "out" / MANIFEST).write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(UserError, match="newer edgexpert"):
        Pack(tmp_path / "out")
    (tmp_path / "out" / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        Pack(tmp_path / "out")


def test_a_draft_and_calibrated_hyperparameters_beside_the_checkpoint_come_along(tmp_path: Path) -> None:
    convert(open_source("stories"), tmp_path / "packed", PackOptions())
    engine = edgexpert.load(str(tmp_path / "packed"))
    assert engine.draft is not None and engine.draft.name == "eagle3"
    assert engine.host.calibrated == edgexpert.load("stories", draft="none").host.calibrated
    assert any("rounded to 4 bits" in note for note in engine.notes)
    text = engine.generate("Once upon a time", max_new_tokens=12)
    engine.draft = None
    assert engine.generate("Once upon a time", max_new_tokens=12).token_ids == text.token_ids
