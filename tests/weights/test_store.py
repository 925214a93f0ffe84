"""Where experts lie changes nothing: mapped, whole, or copied into a few slots while they are used."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgexpert.conversion.options import PackOptions
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import native
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.policy import PRESETS
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.ngram import NgramDraft
from edgexpert.weights import files
from edgexpert.weights.files import Pack
from edgexpert.weights.manifest import EXPERTS
from edgexpert.weights.store import MappedStore, WholeStore
from tests.packs import make_pack
from tests.weights.stores import SmallStore

COUNT, SLOTS, LAYERS = 32, 20, 3  # a stage of eight tokens uses 16 experts of a layer at most
FORMS = {
    "olmoe": PackOptions(4, 32),
    "qwen3_moe": PackOptions(8, 32),
    "deepseek_v2": PackOptions(4, 32, zero_point=True),  # its shared experts keep it from native layers
    "granitemoe": PackOptions(16),
}
WAYS = ("in one call", "layer by layer", "in PyTorch")
TREE = TokenTree(torch.arange(3, 11), torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5]), -torch.arange(8.0) / 2)
STAGES = (
    Stage.prefill(torch.arange(2, 10), importance=torch.linspace(0, 1.4, 8)),
    Stage.verify(TREE, 8),
    Stage.verify(TokenTree.of_root(5), 8 + len(TREE)),
)


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), COUNT)
    return make_pack(
        request.param, tmp_path_factory.mktemp("pack"), FORMS[request.param], num_hidden_layers=LAYERS, **counts
    )


@pytest.fixture(params=WAYS)
def engines(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Engines of the same checkpoint; with a store that is small, if one is wanted."""
    if request.param == "in PyTorch":
        monkeypatch.setenv("EDGEXPERT_KERNELS", "torch")
    elif native.path() == "torch":
        pytest.skip("no native kernels here")
    native.path.cache_clear()

    def load(small: bool) -> Engine:
        with monkeypatch.context() as patch:
            if small:
                whole = files.open_store
                patch.setattr(files, "open_store", lambda path, layers: SmallStore(whole(path, layers), len(layers), SLOTS, 3e-4))
            loaded = load_model(str(folder))
        host = HostedModel(loaded.model)
        if request.param == "in one call" and host.native is None:
            pytest.skip("this model runs layer by layer")
        if request.param == "layer by layer":
            host.native = None
        return Engine(host, loaded.tokenizer, name="tiny", draft=NgramDraft())

    yield load
    monkeypatch.undo()
    native.path.cache_clear()


def store_of(engine: Engine) -> SmallStore:
    packed = engine.host.blocks[0].packed
    assert packed is not None and isinstance(packed.store, SmallStore)
    return packed.store


def logits(engine: Engine, policy: str) -> list[Tensor]:
    host = engine.host
    cache, decides = host.new_cache(40), host.resolve(PRESETS[policy])
    return [host.run(stage, cache, decides).logits for stage in STAGES]


def text(engine: Engine, policy: str) -> list[int]:
    options = dict(max_new_tokens=20, ignore_eos=True, tree=TreeShape(size=7))
    return engine.generate("abcabca", policy=PRESETS[policy], **options).token_ids


@pytest.mark.parametrize("policy", ["exact", "edgexpert"])
def test_experts_that_come_and_go_give_the_bits_of_experts_that_stay(policy: str, engines: Callable[..., Engine]) -> None:
    whole, small = engines(small=False), engines(small=True)
    store = store_of(small)
    assert all(torch.equal(*pair) for pair in zip(logits(small, policy), logits(whole, policy), strict=True))
    assert text(small, policy) == text(whole, policy)
    assert store.evictions > 0 and not store.in_use


@pytest.mark.parametrize("policy", ["exact", "edgexpert"])
def test_an_exception_of_a_store_reaches_the_caller_and_the_next_text_is_right(
    policy: str, engines: Callable[..., Engine]
) -> None:
    class Unreadable(Exception):
        pass

    engine = engines(small=True)
    store, expected = store_of(engine), text(engine, policy)
    layers = len(engine.host.blocks)
    for layer in {0, layers - 1}:
        store.fails, store.fails_at = Unreadable("flash"), store.uses + layers + layer  # in the stage behind the prompt
        cache, decides = engine.host.new_cache(40), engine.host.resolve(PRESETS[policy])
        engine.host.run(STAGES[0], cache, decides)
        with pytest.raises(Unreadable, match="flash") as raised:
            engine.host.run(STAGES[1], cache, decides)
        assert raised.value is store.fails and not store.in_use
        store.fails, store.fails_at = Unreadable("flash"), store.uses + 2 * layers + layer
        with pytest.raises(Unreadable, match="flash"):
            text(engine, policy)
        assert not store.in_use
        assert text(engine, policy) == expected and not store.in_use
    store.fails = Exception()  # whose traceback would keep the model


def test_a_mapped_file_gives_the_experts_of_one_in_memory(folder: Path) -> None:
    manifest = Pack(folder).manifest
    path = folder / EXPERTS
    whole = WholeStore(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), manifest.layers)
    mapped = MappedStore(path, manifest.layers)
    every = [(layer, expert) for layer in range(len(manifest.layers)) for expert in range(COUNT)]
    random.Random(0).shuffle(every)
    for layer, expert in [(0, 0), (len(manifest.layers) - 1, COUNT - 1), *every]:  # both ends of the file first
        mapped.prefetch(layer, [expert])
        for name, matrix in mapped.experts(layer).items():
            other = whole.experts(layer)[name]
            for part in ("values", "scales", "zeros"):
                ours, theirs = getattr(matrix[expert], part), getattr(other[expert], part)
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert mapped.experts(0)["down"] is mapped.experts(0)["down"] and not mapped.watches and not whole.watches
