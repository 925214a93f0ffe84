"""`edgexpert pull` and `edgexpert list`, against a stand-in for the Hub on the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgexpert.cli.pull import wanted
from tests.cli.conftest import Run
from tests.cli.hub import Hub, serve
from tests.conftest import make_model, make_tokenizer
from tests.conversion.gguf_files import write_gguf

MAIN = "from edgexpert.cli.main import main; main()"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("hub")
    make_model("olmoe", num_hidden_layers=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_gguf(make_model("olmoe", num_hidden_layers=1), folder / "m.gguf")
    gguf = (folder / "m.gguf").read_bytes()
    return {
        "tiny/olmoe": {**files, "README.md": b"hello", "original/model.safetensors": b"twice", "pytorch_model.bin": b"again",
                       "draft/config.json": b'{"draft_vocab_size": 128, "hidden_size": 32, "vocab_size": 128}'},
        "tiny/gguf": {"olmoe-f32.gguf": gguf, "olmoe-q4.gguf": gguf, "README.md": b"hello"},
        "tiny/pickled": {"config.json": b"{}", "pytorch_model.bin": b"weights"},
        "tiny/gated": files,
    }


def surroundings(home: Path, address: str, offline: str = "0") -> dict[str, str]:
    """The environment of a client of the stand-in, with a cache of its own."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": offline, "NO_PROXY": "*",
                   "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200"}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    return environment


def cli(home: Path, address: str, *arguments: str, offline: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", MAIN, *arguments], env=surroundings(home, address, offline),
                          capture_output=True, text=True, check=False)


def test_a_model_is_pulled_listed_told_of_and_run(repositories: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    with serve(Hub(repositories)) as hub:
        before = cli(tmp_path, hub.address, "info", "tiny/olmoe", "--json")
        assert before.returncode == 0, before.stderr
        assert not list(tmp_path.rglob("*.safetensors")), "headers alone were read"
        pulled = cli(tmp_path, hub.address, "pull", "tiny/olmoe", "--json")
        assert pulled.returncode == 0, pulled.stderr
        place = json.loads(pulled.stdout)
        got = {str(path.relative_to(place["path"])) for path in Path(place["path"]).rglob("*") if path.is_file()}
        assert "model.safetensors" in got and "draft/config.json" in got
        assert not got & {"README.md", "original/model.safetensors", "pytorch_model.bin"}, "weights are fetched once"
        assert place["downloaded_bytes"] == sum(len(repositories["tiny/olmoe"][name]) for name in got) == place["disk_bytes"]
        again = cli(tmp_path, hub.address, "pull", "tiny/olmoe")
        assert "0 B of them new" in again.stdout
    listed = cli(tmp_path, hub.address, "list", "--json", offline="1")
    model = next(model for model in json.loads(listed.stdout)["models"] if model["place"] == "hub")
    assert (model["name"], model["family"], model["experts"], model["draft"]) == ("tiny/olmoe", "olmoe", 8, "eagle3")
    after = json.loads(cli(tmp_path, hub.address, "info", "tiny/olmoe", "--draft", "none", "--json", offline="1").stdout)
    told = json.loads(before.stdout)
    assert (after["experts"], after["bytes"], after["top_k"]) == (8, told["bytes"], told["top_k"])
    assert (told["chat_template"], after["chat_template"]) == (None, False)
    ran = cli(tmp_path, hub.address, "generate", "--draft", "ngram", "--model", "tiny/olmoe", "--max-new-tokens", "3", "--json",
              "abc", offline="1")
    assert json.loads(ran.stdout)["model"] == "tiny/olmoe", ran.stderr


def test_a_broken_connection_is_taken_up_where_it_broke_and_complete_files_are_kept(tmp_path: Path) -> None:
    first, second = os.urandom(25 << 20), os.urandom(25 << 20)  # the client keeps pieces of 10 MB
    files = {"config.json": b"{}", "model-1.safetensors": first}
    with serve(Hub({"large/model": files}, cut=15 << 20)) as hub:
        assert cli(tmp_path, hub.address, "pull", "large/model").returncode == 0
        assert [asked for file, asked in hub.asked if file == "model-1.safetensors"] == ["", f"bytes={10 << 20}-"]
        hub.asked.clear()
        files["model-2.safetensors"], hub.commit = second, "d" * 40
        assert cli(tmp_path, hub.address, "pull", "large/model").returncode == 0
        assert {file for file, _ in hub.asked} == {"model-2.safetensors"}
    for name, content in (("model-1.safetensors", first), ("model-2.safetensors", second)):
        assert next((tmp_path / "hub").glob(f"*/snapshots/{'d' * 40}/{name}")).read_bytes() == content


def test_one_gguf_file_is_pulled_by_its_name(repositories: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    with serve(Hub(repositories)) as hub:
        asked = cli(tmp_path, hub.address, "pull", "tiny/gguf")
        assert asked.returncode == 2
        assert "choose one with --file: olmoe-f32.gguf, olmoe-q4.gguf" in asked.stderr
        missing = cli(tmp_path, hub.address, "pull", "tiny/gguf", "--file", "none.gguf")
        assert missing.returncode == 2 and "has no file none.gguf; it has olmoe-f32.gguf" in missing.stderr
        pulled = cli(tmp_path, hub.address, "pull", "tiny/gguf", "--file", "olmoe-q4.gguf", "--json")
    place = Path(json.loads(pulled.stdout)["path"])
    assert place.name == "olmoe-q4.gguf" and place.read_bytes() == repositories["tiny/gguf"]["olmoe-q4.gguf"]
    listed = cli(tmp_path, hub.address, "list", offline="1")
    assert "tiny/gguf (olmoe-q4.gguf)" in listed.stdout and "GGUF F32" in listed.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (("nobody/nothing",), "There is no model nobody/nothing on the Hub, or it is private"),
    (("tiny/olmoe", "--revision", "gone"), "The model tiny/olmoe has no revision gone"),
    (("tiny/gated",), "asks for an agreement"),
    (("tiny/pickled",), "has no safetensors files"),
    (("stories",), "comes with edgexpert"),
    (("./folder",), "is no name of the Hub"),
    (("a/b/c",), "is no name of the Hub"),
    (("a b/c",), "There is no model a b/c on the Hub"),
])
def test_what_cannot_be_had_is_one_sentence(
    repositories: dict[str, dict[str, bytes]], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with serve(Hub(repositories, gated={"tiny/gated"})) as hub:
        refused = cli(tmp_path, hub.address, "pull", *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert refused.stderr.startswith("edgexpert: ") and refused.stderr.count("\n") == 1


def test_offline_and_unreachable_are_one_sentence(tmp_path: Path) -> None:
    offline = cli(tmp_path, "http://127.0.0.1:9", "pull", "tiny/olmoe", offline="1")
    assert offline.returncode == 2 and "while HF_HUB_OFFLINE is set" in offline.stderr and offline.stderr.count("\n") == 1
    unreachable = cli(tmp_path, "http://127.0.0.1:9", "pull", "tiny/olmoe")
    assert unreachable.returncode == 2 and "The Hub cannot be reached for tiny/olmoe" in unreachable.stderr
    assert unreachable.stderr.count("\n") == 1


def test_room_on_the_disk_is_looked_at_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Planned:
        filename, file_size, will_download = "model.safetensors", 1 << 60, True

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: [Planned()])
    result = run("pull", "huge/model")
    assert result.exit_code == 2 and "are free; make room, or set HF_HOME" in result.stderr


def test_which_files_are_wanted() -> None:
    read = ["config.json", "model-00001-of-2.safetensors", "tokenizer.json", "draft/model.safetensors", "experts.pack",
            "chat_template.jinja"]
    other = ["pytorch_model.bin", "onnx/model.onnx", "original/params.json", "consolidated.safetensors", "a.gguf"]
    assert list(wanted([*read, *other])) == read


def test_list_shows_a_folder_of_models_and_what_is_wrong_with_one(run: Run, tmp_path: Path) -> None:
    for name in ("good", "cut"):
        make_model("mixtral", num_hidden_layers=1).save_pretrained(tmp_path / name)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    write_gguf(make_model("olmoe", num_hidden_layers=1), tmp_path / "m.gguf")
    (tmp_path / "other").mkdir()
    result = run("list", tmp_path, "--json")
    models = {Path(model["name"]).name: model for model in json.loads(result.stdout)["models"]}
    assert models.keys() >= {"stories", "good", "cut", "m.gguf"} and "other" not in models
    assert (models["good"]["weights"], models["good"]["family"], models["good"]["draft"]) == ("float32", "mixtral", None)
    assert "damaged or truncated" in models["cut"]["problem"]
    assert models["m.gguf"]["weights"] == "GGUF F32"
    assert models["stories"]["draft"] == "eagle3"
    shown = run("list", tmp_path).stdout
    assert "mixtral, 2 of 8 experts" in shown
    assert run("list", tmp_path / "nowhere").exit_code == 2
    alone = json.loads(run("list", tmp_path / "good", "--json").stdout)["models"]
    assert [Path(model["name"]).name for model in alone if model["place"] == "folder"] == ["good"]
