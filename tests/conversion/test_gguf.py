"""GGUF files of every architecture and tensor type that is read."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.gguf import GgufSource
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.weights.files import Pack
from edgexpert.weights.matrix import dequantise
from edgexpert.weights.rounding import quantise
from tests.conftest import make_model
from tests.conversion.conftest import float_weights
from tests.conversion.gguf_files import ARCHITECTURES, write_gguf

ROUND = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
LARGE = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_local_experts=2)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_a_float_file_gives_the_model_that_it_was_written_from(family: str, tmp_path: Path) -> None:
    model = make_model(family, num_hidden_layers=2)
    write_gguf(model, tmp_path / "m.gguf")
    source = GgufSource(tmp_path / "m.gguf")
    for name, parameter in model.state_dict().items():
        assert torch.equal(source.read(name), parameter), name
    source.config.dtype = torch.float32
    rebuilt = type(model)(source.config).eval()
    rebuilt.load_state_dict(model.state_dict())
    ids = torch.arange(2, 12)[None]
    assert torch.equal(rebuilt(ids).logits, model(ids).logits)  # so every hyperparameter was understood


def test_deepseeks_split_keys_and_values_are_joined(tmp_path: Path) -> None:
    model = make_model("deepseek_v2", num_hidden_layers=2)
    write_gguf(model, tmp_path / "m.gguf", split_latent=True)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(GgufSource(tmp_path / "m.gguf").read(name), model.state_dict()[name])


@pytest.mark.parametrize(("type", "changes"), [
    (Type.F16, ROUND), (Type.BF16, ROUND), (Type.Q4_0, ROUND), (Type.Q8_0, ROUND),
    (Type.Q4_K, LARGE), (Type.Q5_K, LARGE), (Type.Q6_K, LARGE),
])
def test_every_tensor_type_is_read_as_the_gguf_package_reads_it(type: Type, changes: dict, tmp_path: Path) -> None:
    write_gguf(make_model("granitemoe", **changes), tmp_path / "m.gguf", type)
    convert(GgufSource(tmp_path / "m.gguf"), tmp_path / "out", PackOptions(bits=16))
    weights = float_weights(tmp_path / "out")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for part, name in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
        tensor = tensors[f"blk.0.ffn_{part}_exps.weight"]
        assert tensor.tensor_type == type
        expected = torch.from_numpy(gguf.dequantize(tensor.data, type).copy()).bfloat16().float()
        got = weights[f"model.layers.0.block_sparse_moe.experts.{name}_proj"]
        got = got if part == "down" else got.chunk(2, dim=1)[part == "up"]
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("type", "bits"), [(Type.Q4_0, 4), (Type.Q8_0, 8)])
def test_blocks_of_the_same_form_are_taken_over_without_loss(type: Type, bits: int, tmp_path: Path) -> None:
    write_gguf(make_model("granitemoe", **ROUND), tmp_path / "m.gguf", type)
    source = GgufSource(tmp_path / "m.gguf")
    manifest = convert(source, tmp_path / "out", PackOptions(bits=bits, group_size=32))
    weights = float_weights(tmp_path / "out")
    for name in weights:
        if "norm" not in name and "embed" not in name:
            assert torch.equal(weights[name], source.read(name).float()), name
    assert set(manifest.layers[0].errors["down"]) == {0.0}


def test_q4_0_blocks_survive_rounding_to_nearest_too(tmp_path: Path) -> None:
    write_gguf(make_model("granitemoe", **ROUND), tmp_path / "m.gguf", Type.Q4_0)
    weight = GgufSource(tmp_path / "m.gguf").read("model.layers.0.self_attn.o_proj.weight").t()
    assert torch.equal(dequantise(quantise(weight, 4, 32)), weight)


def test_the_tokenizer_comes_from_the_file(tmp_path: Path) -> None:
    write_gguf(make_model("olmoe", num_hidden_layers=1), tmp_path / "m.gguf")
    convert(GgufSource(tmp_path / "m.gguf"), tmp_path / "out", PackOptions(group_size=8))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("cab")["input_ids"] == [ord("c"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert Pack(tmp_path / "out").config.eos_token_id == 1


def test_a_file_cut_anywhere_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_gguf(make_model("olmoe", num_hidden_layers=1), tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for part in (6, 30, 200, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:part])
        with pytest.raises(UserError, match="truncated or damaged"):
            open_source(str(tmp_path / "cut.gguf"))


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"something else entirely")
    with pytest.raises(UserError, match="is not a GGUF file"):
        open_source(str(tmp_path / "x.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="architecture llama"):
        open_source(str(tmp_path / "llama.gguf"))


def test_an_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    model = make_model("granitemoe", **ROUND)
    write_gguf(model, tmp_path / "m.gguf", Type.Q8_0)
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    name = b"blk.0.ffn_down_exps.weight"
    type_at = raw.index(name) + len(name) + 4 + 3 * 8  # after the name: the number of dimensions, and three of them
    assert raw[type_at] == Type.Q8_0
    raw[type_at] = 99
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(UserError, match=r"unknown type 99"):
        open_source(str(tmp_path / "m.gguf"))


def test_a_missing_tensor_is_named_before_anything_is_written(tmp_path: Path) -> None:
    write_gguf(make_model("olmoe", num_hidden_layers=1), tmp_path / "m.gguf", leave_out="blk.0.ffn_up_exps.weight")
    with pytest.raises(UserError, match=r"lacks the tensor blk\.0\.ffn_up_exps\.weight"):
        convert(GgufSource(tmp_path / "m.gguf"), tmp_path / "out", PackOptions(group_size=8))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
