"""`edgexpert convert` and `edgexpert info --verify` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

from edgexpert.weights.files import Pack
from tests.cli.conftest import Run
from tests.conftest import make_model


def test_a_checkpoint_is_converted_verified_and_written_back(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = run("convert", tiny_checkpoint, tmp_path / "out", "--group-size", 8, "--keep", "lm_head=8", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["bits"] == {"experts": 4, "attention": 4, "shared_experts": 4, "lm_head": 8}
    assert 0.01 < facts["relative_error_of_experts"] < 0.2 and not facts["dummy"]
    assert facts["bytes"]["experts.pack"] == (tmp_path / "out" / "experts.pack").stat().st_size
    assert "as they were written" in run("info", tmp_path / "out", "--verify").stdout
    back = run("convert", tmp_path / "out", tmp_path / "back", "--to", "compressed-tensors", "--json")
    assert back.exit_code == 0
    assert sum(json.loads(back.stdout)["bytes"].values()) == sum(file.stat().st_size for file in (tmp_path / "back").iterdir())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_a_dummy_needs_the_new_folder_alone_and_says_what_it_is(run: Run, tmp_path: Path) -> None:
    make_model("olmoe", num_hidden_layers=1).config.save_pretrained(tmp_path)
    result = run("convert", "--dummy", tmp_path / "config.json", tmp_path / "out", "--group-size", 8)
    assert result.exit_code == 0 and "its text means nothing" in " ".join(result.stdout.split())
    assert Pack(tmp_path / "out").manifest.dummy


def test_mistakes_are_one_sentence_and_exit_code_2(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    for arguments, sentence in (
        ((tiny_checkpoint,), "Give a checkpoint and a new folder"),
        ((tiny_checkpoint, tiny_checkpoint, "--group-size", 8), "exists"),
        ((tiny_checkpoint, tmp_path / "out"), "does not divide the 24 input channels"),
        ((tiny_checkpoint, tmp_path / "out", "--bits", 3), "cannot have 3 bits"),
        ((tiny_checkpoint, tmp_path / "out", "--method", "awq"), "Unknown --method awq"),
        ((tiny_checkpoint, tmp_path / "out", "--method", "gptq"), "belong together"),
        ((tiny_checkpoint, tmp_path / "out", "--keep", "head=8"), "--keep head=8 is not understood"),
        ((tmp_path / "no.gguf", tmp_path / "out"), "is not a GGUF file"),
        ((tmp_path / "nowhere", tmp_path / "out"), "There is no model"),
        (("--dummy", "gpt-7", tmp_path / "out"), "There is no shape"),
        ((tiny_checkpoint, tmp_path / "out", "--to", "compressed-tensors"), "has no manifest.json"),
        ((tiny_checkpoint, tmp_path / "out", "--to", "compressed-tensors", "--bits", 8), "--bits says how to pack"),
    ):
        result = run("convert", *arguments)
        assert result.exit_code == 2 and sentence in result.stderr, arguments
        assert result.stderr.count("\n") == 1
    assert run("info", tiny_checkpoint, "--verify").exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["no.gguf"]
