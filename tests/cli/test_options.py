"""Options: all that are promised are there, and they arrive where they belong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgexpert.cli.options import Options, shared_options
from edgexpert.core.errors import UserError
from tests.cli.conftest import Run

PROMISED = """
    --model --draft --policy --coarse-pruning --no-coarse-pruning --fine-pruning --no-fine-pruning --prompt-wise-expert-reuse
    --no-prompt-wise-expert-reuse --depth-aware-coalescing --no-depth-aware-coalescing --computational-calibration
    --no-computational-calibration --k-min --n-min --k-tri --n-tri --theta1 --theta2 --selection-ratio --keep-channels
    --max-new-tokens --temperature --top-k --top-p --seed --stop --tree-size --tree-depth --tree-top-k --dtype --device
"""


@pytest.mark.parametrize(("command", "own", "missing"), [
    ("generate", {"--json"}, set()),
    ("chat", set(), set()),
    ("bench", {"--prompts", "--policies", "--plot", "--json"}, {"--policy"}),
])
def test_commands_have_every_promised_option(run: Run, command: str, own: set[str], missing: set[str]) -> None:
    words = run(command, "--help").stdout.split()
    promised = set(PROMISED.split())
    assert promised - set(words) == missing
    assert own <= set(words)


def test_help_needs_no_torch() -> None:
    code = "import sys, edgexpert.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_version_is_printed(run: Run) -> None:
    assert run("--version").stdout.startswith("edgexpert 0.")


def test_switches_and_hyperparameters_override_the_policy() -> None:
    options = Options(policy="edgexpert", coarse_pruning=False, selection_ratio=0.5, n_tri=2)
    policy = options.policy_named("edgexpert")
    assert (policy.coarse_pruning, policy.selection_ratio, policy.n_tri) == (False, 0.5, 2)
    assert policy.fine_pruning
    assert policy.name == "edgexpert"
    assert policy.k_min is None, "what is not given is left to the policy"


def test_sampling_and_tree_options_reach_the_engine() -> None:
    options = Options(max_new_tokens=3, temperature=0.5, top_k=4, top_p=0.9, seed=7, stop=["a", "b"],
                      tree_size=8, tree_depth=2)
    assert (options.sampling.max_new_tokens, options.sampling.top_k, options.sampling.seed) == (3, 4, 7)
    assert (options.sampling.temperature, options.sampling.top_p) == (0.5, 0.9)
    assert options.sampling.stop == ("a", "b")
    assert (options.tree.size, options.tree.depth, options.tree.top_k) == (8, 2, 10)


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="exact, pruned, reuse, coalesced, edgexpert"):
        Options().policy_named("exacct")


def test_a_command_gets_only_the_options_it_wants() -> None:
    seen: list[Options] = []

    @shared_options(without=["policy"])
    def command(options: Options, extra: int = 1) -> None:
        seen.append(options)

    names = command.__signature__.parameters  # type: ignore[attr-defined]
    assert "policy" not in names
    assert "extra" in names
    command(extra=2, **{name: None for name in names if name != "extra"} | {"seed": 5})
    assert seen[0].seed == 5
    assert seen[0].policy == "exact"
