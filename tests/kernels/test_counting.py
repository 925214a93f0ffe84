"""The expert bytes of a result are those that the native products touch, as they count them themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from edgexpert.conversion.options import PackOptions
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import native
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.policy import PRESETS, Techniques
from tests.packs import make_pack

ISAS = [path for path in native.available() if path != "torch"]
pytestmark = pytest.mark.skipif(native.path() == "torch", reason="no native kernels here")

FORMS = {
    "4 bits": ("granitemoe", PackOptions(4, 32)),
    "zero points": ("olmoe", PackOptions(4, 32, zero_point=True)),
    "8 bits": ("qwen3_moe", PackOptions(8, 32)),
    "16 bits": ("olmoe", PackOptions(16)),
    "shared experts": ("deepseek_v2", PackOptions(4, 16)),
}
POLICIES = {
    "exact": PRESETS["exact"],
    "coarse": Techniques("coarse", coarse_pruning=True),
    "pruned": PRESETS["pruned"],
    "reuse": replace(PRESETS["reuse"], k_min=3, n_min=2, k_tri=4, n_tri=1, theta1=0.8, theta2=0.4),
    "coalesced": PRESETS["coalesced"],
    "edgexpert": PRESETS["edgexpert"],
}
PROMPT = 18
TREE = TokenTree(torch.arange(3, 11), torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5]), -torch.arange(8.0) / 2)


@pytest.fixture(scope="module", params=FORMS)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostedModel:
    family, options = FORMS[request.param]
    folder = make_pack(family, tmp_path_factory.mktemp("pack"), options, num_hidden_layers=3)
    return HostedModel(load_model(str(folder)).model)


@pytest.fixture(params=ISAS)
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    native._native.select_isa(request.param)
    yield
    native._native.count_bytes(False)
    native._native.select_isa("auto")


@pytest.mark.usefixtures("_isa")
@pytest.mark.parametrize("whole", [True, False], ids=["in one call", "layer by layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_expert_bytes_of_a_stage_are_those_that_its_products_touch(
    policy: str, whole: bool, host: HostedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole and host.native is None:
        pytest.skip("this model runs layer by layer")
    if not whole:
        monkeypatch.setattr(host, "native", None)
    cache, decides = host.new_cache(40), host.resolve(POLICIES[policy])
    order = torch.randperm(PROMPT, generator=torch.Generator().manual_seed(0))
    stages = [
        Stage.prefill(torch.arange(2, 2 + PROMPT), importance=torch.linspace(0, 1.4, PROMPT)[order]),
        Stage.verify(TREE, PROMPT),
        Stage.verify(TokenTree.of_root(5), PROMPT + len(TREE)),
    ]
    for stage in stages:
        native._native.count_bytes(True)
        output = host.run(stage, cache, decides)
        assert native._native.bytes_counted() == output.traffic["experts"] > 0, stage.kind
