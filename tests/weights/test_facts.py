"""What headers tell of a checkpoint is what is found when it is loaded."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage
from edgexpert.encoder.encoder import ImportanceEncoder
from edgexpert.kernels.modules import weights_of
from edgexpert.model.cache import bytes_per_token
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.policy import Techniques
from edgexpert.weights.facts import Facts, read_facts, weight_files
from edgexpert.weights.headers import GGUF_TYPES, gguf_headers, safetensors_headers
from edgexpert.weights.need import memory_need
from tests.conftest import FAMILIES, make_model, make_tokenizer
from tests.conversion.conftest import TINY, checkpoint
from tests.conversion.gguf_files import ARCHITECTURES, write_gguf


def check_against_loaded(facts: Facts, folder: Path, dtype: str) -> None:
    host = HostedModel(load_model(str(folder), dtype=dtype).model)
    assert (facts.layers, facts.moe_layers, facts.experts) == (host.layers, len(host.blocks), host.num_experts)
    assert (facts.top_k, facts.context, facts.family) == (host.top_k, host.max_context, host.config.model_type)
    need = memory_need(facts, dtype)
    router = host.sizes.pop("router")  # some keep it in float32, some have a buffer in it
    assert router / 2 <= need.parts.pop("router") <= 1.1 * router
    assert need.parts == host.sizes
    assert need.expert == host.blocks[0].bytes / host.num_experts
    cache = host.new_cache(4)
    host.run(Stage.prefill(torch.tensor([5, 6, 7])), cache, host.resolve(Techniques()))
    assert need.kv_token == bytes_per_token(cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sizes_and_memory_of_a_float_checkpoint(family: str, dtype: str, tmp_path: Path) -> None:
    make_model(family, num_hidden_layers=2).bfloat16().save_pretrained(tmp_path, max_shard_size="30KB")
    make_tokenizer().save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    assert (facts.kind, facts.stored) == ("float", "bfloat16")
    check_against_loaded(facts, tmp_path, dtype)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("family", TINY)
def test_sizes_and_memory_of_a_packed_checkpoint(family: str, bits: int, tmp_path: Path) -> None:
    _, source = checkpoint(family, tmp_path / "float")
    convert(source, tmp_path / "packed", PackOptions(bits=bits, group_size=8))
    facts = read_facts(tmp_path / "packed")
    assert (facts.kind, facts.stored, facts.random) == ("packed", f"packed {bits} bits", False)
    assert facts.parameters == read_facts(tmp_path / "float").parameters
    host = HostedModel(load_model(str(tmp_path / "packed")).model)
    need = memory_need(facts, None)
    for part, size in host.sizes.items():
        # records of experts are padded to whole pages in the file, which is what lies in memory
        assert size <= need.parts[part] <= size + 4096 * facts.experts * facts.moe_layers * (part == "experts"), part
    cache = host.new_cache(4)
    host.run(Stage.prefill(torch.tensor([5, 6, 7])), cache, host.resolve(Techniques()))
    assert need.kv_token == bytes_per_token(cache)


def test_a_tied_output_head_is_no_second_matrix(tmp_path: Path) -> None:
    model = make_model("olmoe", tie_word_embeddings=True, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    assert facts.tied
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("method", "tensors"), [
    ("fp8", {"experts.0.up_proj.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn),
             "experts.0.up_proj.weight_scale_inv": torch.ones(1, 1)}),
    ("mxfp4", {"experts.up_proj_blocks": torch.zeros(1, 64, 1, 16, dtype=torch.uint8),
               "experts.up_proj_scales": torch.zeros(1, 64, 1, dtype=torch.uint8)}),
    ("compressed-tensors", {"experts.0.up_proj.weight_packed": torch.zeros(64, 4, dtype=torch.int32),
                            "experts.0.up_proj.weight_scale": torch.zeros(64, 1, dtype=torch.bfloat16),
                            "experts.0.up_proj.weight_shape": torch.tensor([64, 32])}),
])
def test_quantised_weights_count_with_their_scales_and_for_the_values_that_they_stand_for(
    method: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file({f"model.layers.0.mlp.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "quantization_config": {"quant_method": method}}))
    facts = read_facts(tmp_path)
    assert facts.stored == method
    assert facts.values == {"experts": 64 * 32}
    counted = [tensor for name, tensor in tensors.items() if not name.endswith("_shape")]
    assert facts.parts == {"experts": sum(tensor.nbytes for tensor in counted)}
    assert (facts.experts, facts.moe_layers) == (1, 1)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_a_gguf_file_tells_the_same_as_the_model_that_it_was_written_from(family: str, tmp_path: Path) -> None:
    model = make_model(family, num_hidden_layers=2)
    write_gguf(model, tmp_path / "m.gguf")
    model.save_pretrained(tmp_path / "float")
    from_gguf, from_folder = read_facts(tmp_path / "m.gguf"), read_facts(tmp_path / "float")
    assert (from_gguf.kind, from_gguf.stored) == ("gguf", "GGUF F32")
    for name in ("layers", "moe_layers", "experts", "top_k", "context", "parts", "values", "kv_values"):
        assert getattr(from_gguf, name) == getattr(from_folder, name), name


def test_the_types_of_gguf_files_are_those_of_the_gguf_package() -> None:
    for number, (name, values, size) in GGUF_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (values, size)


def test_the_encoder_takes_what_is_told(tmp_path: Path) -> None:
    make_model("olmoe", num_hidden_layers=1).save_pretrained(tmp_path)
    need = memory_need(read_facts(tmp_path), "float32")
    encoder = ImportanceEncoder.bundled()
    assert need.encoder == sum(weight.nbytes for _, weight in weights_of(encoder._model))


def test_layers_that_only_predict_further_ahead_do_not_count(tmp_path: Path) -> None:
    make_model("olmoe", num_hidden_layers=3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert read_facts(tmp_path).moe_layers == 2


@pytest.mark.parametrize(("file", "content", "message"), [
    ("config.json", "[]", "no JSON object"),
    ("config.json", "{", "no JSON object"),
    ("config.json", '{"num_hidden_layers": "many"}', "num_hidden_layers"),
    ("config.json", '{"num_hidden_layers": -1}', "num_hidden_layers"),
    ("model.safetensors", "not a header", "damaged or truncated"),
    ("model.safetensors.index.json", "{}", "damaged"),
    ("model.safetensors.index.json", '{"weight_map": {"a": "gone.safetensors"}}', "lacks the weight file gone.safetensors"),
    ("manifest.json", "{}", "damaged"),
    ("manifest.json", '{"layers": 3, "linears": {}, "bits": {"experts": 4}}', "damaged"),
])
def test_a_damaged_file_is_named(file: str, content: str, message: str, tmp_path: Path) -> None:
    make_model("olmoe", num_hidden_layers=1).save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "dense.safetensors")
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        read_facts(tmp_path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("files")
    model = make_model("olmoe", num_hidden_layers=1)
    write_gguf(model, folder / "m.gguf")
    model.save_pretrained(folder)
    return {"gguf": (folder / "m.gguf").read_bytes(), "safetensors": weight_files(folder)[0].read_bytes()}


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_short_or_changed_is_read_or_refused_but_never_crashes(
    kind: str, files: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    content, file = bytearray(files[kind]), tmp_path / f"m.{kind}"
    read = gguf_headers if kind == "gguf" else safetensors_headers
    if data.draw(st.booleans()):
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(UserError):
            read(file)
        return
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with suppress(UserError):
        read(file)
