"""Examines one architecture: a tiny random checkpoint through the library, hosted and packed."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import native
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.model.native_layer import NativeLayer
from edgexpert.policy import PRESETS
from tests.conftest import make_tokenizer
from tests.parity.architectures import WINDOW, quiet, tiny_config, tiny_model

NEW = 32
"""Tokens of each text: with the longer prompt, several windows and both sides of a switch of rotary frequencies."""
PROMPTS = ([5, 17, 99, 3, 42, 7, 7, 64, 23, 120, 11, 90], [(7 * i * i + 3 * i + 11) % 120 + 2 for i in range(2 * WINDOW + 5)])
SWITCH = 24
"""Where rotary frequencies change: while the tree reaches over it, behind the shorter prompt."""


@dataclass
class Row:
    """What was found of one architecture: "exact", or what is not.

    Attributes:
        policies: of every other policy, "run", or why they do not.
        native: how much of the packed model is native.
        ropes: hosted, with rotary frequencies that change in the middle of the text; "own" where the family has others.
    """

    name: str
    hosted: str = ""
    ropes: str = ""
    policies: str = ""
    packed: str = ""
    native: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether all is exact, or refused with a reason."""
        found = (self.hosted, self.ropes, self.packed)
        good = all(text in ("exact", "own", "") or text.startswith("refused: ") for text in found)
        return good and (self.policies in ("run", "") or self.policies.startswith("exact only: "))


class Differs(Exception):
    """Two results that should be the same are not."""


def examine(name: str, *, quick: bool = False) -> Row:
    """The row of one architecture.

    Args:
        quick: one prompt, 4 bits and the original's own rotary frequencies.
    """
    quiet()
    row = Row(name)
    with tempfile.TemporaryDirectory() as folder:
        _examine(row, tiny_config(name), Path(folder), quick)
    return row


def _examine(row: Row, config: PreTrainedConfig, folder: Path, quick: bool) -> None:
    source = folder / "source"
    save(config, source)
    row.hosted = outcome(lambda: hosted(source, PROMPTS[:1] if quick else PROMPTS))
    if row.hosted == "exact":
        row.policies = outcome(lambda: policies(load_model(str(source)).model))
        if not quick:
            row.ropes = outcome(lambda: ropes(row.name, folder))
    row.packed = outcome(lambda: packed(row, source, folder, (4,) if quick else (4, 8)))


def outcome(check: Callable[[], str | None]) -> str:
    """What a check says, or how it ended."""
    try:
        return check() or "exact"
    except UserError as error:
        return f"refused: {error}"
    except Differs as error:
        return f"differs: {error}"
    except Exception as error:  # a crash is a finding, not the end
        traceback.print_exc()
        return f"crash: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


def save(config: PreTrainedConfig, folder: Path) -> None:
    tiny_model(config).bfloat16().float().save_pretrained(folder)  # weights that 16 bits hold
    make_tokenizer().save_pretrained(folder)


def library(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], Tensor]:
    """The library's own text, and the logits of each of its tokens."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                         output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0)
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def hosted(source: Path, prompts: Any) -> str | None:
    model = load_model(str(source)).model
    for prompt in prompts:
        text, logits = greedy(library(source), prompt)
        host = HostedModel(model)
        same(plain(host, prompt, text), text, logits, "plain decoding")
        same(branching(host, prompt, text), text, logits, "trees")
        other_branches(host, prompt, text)
    return None


def plain(host: HostedModel, prompt: list[int], text: list[int]) -> Tensor:
    """Logits of each token of a text, one after the other."""
    cache = host.new_cache(len(prompt) + len(text))
    found = [host.run(Stage.prefill(torch.tensor(prompt)), cache).logits[-1]]
    found += [host.run(Stage.verify(TokenTree.of_root(token), cache.length), cache).logits[0] for token in text[:-1]]
    return torch.stack(found)


def tree_of(text: list[int], at: int) -> tuple[TokenTree, list[int]]:
    """A tree that branches at every level, rooted at token ``at``; and its nodes on the text's path."""
    true = text[at : at + 4]
    tokens, parents, path = [true[0]], [-1], [0]
    for depth, token in enumerate(true[1:]):
        wrong = (token + 17 * (depth + 1)) % 120 + 2
        parent = path[-1]
        tokens += [wrong, token, (wrong + 31) % 120 + 2]
        parents += [parent, parent, len(tokens) - 3]  # a candidate behind the wrong one, too
        path.append(len(tokens) - 2)
    return TokenTree(torch.tensor(tokens), torch.tensor(parents), -torch.arange(float(len(tokens))) / 4), path


def branching(host: HostedModel, prompt: list[int], text: list[int]) -> Tensor:
    """Logits of each token of a text, by trees of which a path is the text."""
    cache = host.new_cache(len(prompt) + len(text) + 12)
    found = [host.run(Stage.prefill(torch.tensor(prompt)), cache).logits[-1:]]
    at = 0
    while at < len(text) - 1:
        tree, path = tree_of(text[:-1], at)
        prefix = cache.length
        found.append(host.run(Stage.verify(tree, prefix), cache).logits[path])
        cache.keep(prefix, path)
        at += len(path)
    return torch.cat(found)


def other_branches(host: HostedModel, prompt: list[int], text: list[int]) -> None:
    """Every node of a tree behind a text has the logits of its own path in plain decoding."""
    cache = host.new_cache(len(prompt) + len(text) + 16)
    host.run(Stage.prefill(torch.tensor(prompt)), cache)
    for token in text[:-4]:
        host.run(Stage.verify(TokenTree.of_root(token), cache.length), cache)
    prefix = cache.length
    tree, _ = tree_of(text[-4:], 0)
    logits = host.run(Stage.verify(tree, prefix), cache).logits
    for node in range(len(tree)):
        cache.keep(prefix, [])
        for token in tree.tokens[tree.mask[node]].tolist():
            alone = host.run(Stage.verify(TokenTree.of_root(token), cache.length), cache).logits[0]
        if error(logits[node], alone) > 1e-3:
            raise Differs(f"node {node} of a tree by {error(logits[node], alone):.2g}")


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative distance of two vectors."""
    return float((ours - theirs).norm() / theirs.norm())


def same(ours: Tensor, text: list[int], theirs: Tensor, what: str) -> None:
    """The same text, with the same logits but for rounding."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if int(a.argmax()) != text[i] or error(a, b) > 1e-3:
            raise Differs(f"{what} at token {i}, logits by {error(a, b):.2g}")


def policies(model: PreTrainedModel) -> str | None:
    host = HostedModel(model)
    for name, preset in PRESETS.items():
        try:
            policy = host.resolve(preset)
        except UserError as reason:
            return f"exact only: {reason}"
        cache = host.new_cache(64)
        host.run(Stage.prefill(torch.tensor(PROMPTS[0]), importance=torch.linspace(0, 2, 12)), cache, policy)
        tree, _ = tree_of(PROMPTS[0][:4], 0)
        output = host.run(Stage.verify(tree, cache.length), cache, policy)
        if not torch.isfinite(output.logits).all() or len(output.plans) != len(host.blocks):
            raise Differs(f"policy {name} gives no finite logits, or no plan for some layer")
    return "run"


def ropes(name: str, folder: Path) -> str | None:
    """Rotary frequencies that change at a position of the text."""
    own = tiny_config(name)
    parameters = getattr(own, "rope_parameters", None)
    if not isinstance(parameters, dict) or parameters.get("rope_type") != "default":
        return "own"
    rotary = next((m for m in tiny_model(own).modules() if hasattr(m, "rope_type")), None)
    if rotary is None:
        return "own"
    half = len(rotary.inv_freq)
    scaled = {
        "dynamic": (dict(factor=4.0), dict(max_position_embeddings=SWITCH)),
        "longrope": (
            dict(short_factor=[1.0] * half, long_factor=[2.0 + i for i in range(half)], original_max_position_embeddings=SWITCH,
                 factor=4.0), {}
        ),
    }
    for kind, (changes, sizes) in scaled.items():
        try:
            config = tiny_config(name, rope_parameters={**parameters, "rope_type": kind, **changes}, **sizes)
        except Exception:  # the configuration does not allow it
            return "own"
        save(config, folder / kind)
        hosted(folder / kind, PROMPTS)
    return None


def packed(row: Row, source: Path, folder: Path, bits: tuple[int, ...]) -> str | None:
    def load(width: int) -> HostedModel:
        place = folder / f"packed{width}"
        if not place.exists():
            convert(open_source(str(source)), place, PackOptions(width, 32))
        return HostedModel(load_model(str(place)).model)

    prompt = PROMPTS[-1]
    whole = load(16)
    row.native = how_native(whole)
    text, logits = greedy(library(source), prompt)
    near(plain(whole, prompt, text), logits, "16 bits against the library", 1e-3)
    for width in bits:
        host = load(width)
        one_by_one = plain(host, prompt, text)
        if native.path() != "torch" and not torch.equal(branching(host, prompt, text), one_by_one):
            raise Differs(f"{width} bits, trees against plain decoding")
        if host.native is not None:
            host.native = None
            near(plain(host, prompt, text), one_by_one, f"{width} bits, one call against layer by layer", 1e-4)
        with mock.patch.object(native, "path", return_value="torch"):
            near(plain(load(width), prompt, text), one_by_one, f"{width} bits, PyTorch against native kernels", 5e-2)
        if row.policies == "run":
            policies(host.model)
    return None


def near(ours: Tensor, theirs: Tensor, what: str, limit: float) -> None:
    """The same logits but for rounding, which may send a token or two to another expert.

    Args:
        limit: of the relative error of most tokens.
    """
    errors = torch.tensor([error(a, b) for a, b in zip(ours, theirs, strict=True)])
    if errors.median() > limit or (errors > 10 * limit).float().mean() > 0.2:
        raise Differs(f"{what}, logits by {float(errors.median()):.2g} in the median, {float(errors.max()):.2g} at most")


def how_native(host: HostedModel) -> str:
    layers = [layer.forward for layer in host.model.base_model.layers]
    found = sum(isinstance(forward, NativeLayer) for forward in layers)
    if host.native is not None:
        return "one call"
    return f"{found} of {len(layers)} layers" if found else "library's layers"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("ROW " + json.dumps(asdict(examine(sys.argv[1]))))
