"""Options: all that are promised are there, and they arrive where they belong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgexpert.cli.options import Options, shared_options
from edgexpert.core.errors import UserError
from edgexpert.speculation.draft import TreeShape
from tests.cli.conftest import Run

PROMISED = """
    --model --draft --policy --coarse-pruning --no-coarse-pruning --fine-pruning --no-fine-pruning --prompt-wise-expert-reuse
    --no-prompt-wise-expert-reuse --depth-aware-coalescing --no-depth-aware-coalescing --computational-calibration
    --no-computational-calibration --k-min --n-min --k-tri --n-tri --theta1 --theta2 --selection-ratio --keep-channels
    --max-new-tokens --temperature --top-k --top-p --seed --stop --speculation --tree-size --tree-depth --tree-top-k
    --dtype --device --kernels
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
    assert run("-V").stdout == run("--version").stdout


@pytest.mark.parametrize("command", ["", "generate", "chat", "bench", "info", "list", "pull", "trace", "simulate", "convert",
                                     "reproduce", "train", "train model", "train draft"])
def test_every_command_has_a_short_and_a_long_help(run: Run, command: str) -> None:
    short = run(*command.split(), "-h")
    assert short.exit_code == 0 and "-h, --help" in short.stdout
    assert short.stdout == run(*command.split(), "--help").stdout


def test_switches_and_hyperparameters_override_the_policy() -> None:
    options = Options(policy="edgexpert", coarse_pruning=False, selection_ratio=0.5, n_tri=2)
    policy = options.policy_named("edgexpert")
    assert (policy.coarse_pruning, policy.selection_ratio, policy.n_tri) == (False, 0.5, 2)
    assert policy.fine_pruning
    assert policy.name == "edgexpert"
    assert policy.k_min is None, "what is not given is left to the policy"


def test_sampling_options_that_are_given_reach_the_engine_and_others_are_left_to_it() -> None:
    options = Options(max_new_tokens=3, temperature=0.5, top_k=4, seed=7, stop=["a", "b"])
    assert options.sampling == {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "seed": 7, "stop": ("a", "b")}
    assert Options().sampling == {"max_new_tokens": 128, "seed": 0}


@pytest.mark.parametrize(("options", "tree"), [
    (Options(), "auto"), (Options(speculation="off"), TreeShape(0)), (Options(speculation="16"), TreeShape(16)),
    (Options(speculation="16", tree_size=8), TreeShape(8)), (Options(speculation="off", tree_size=8), TreeShape(8)),
    (Options(tree_size=8, tree_depth=2), TreeShape(8, 2)), (Options(tree_top_k=1), TreeShape(top_k=1)),
])
def test_tree_options_win_over_speculation(options: Options, tree: TreeShape | str) -> None:
    assert options.tree == tree


@pytest.mark.parametrize("value", ["never", "-1", "1.5", ""])
def test_speculation_is_auto_off_or_a_number(run: Run, value: str) -> None:
    result = run("generate", "--speculation", value, "hi")
    assert result.exit_code == 2
    assert result.stderr.startswith("edgexpert: --speculation must be auto, off or a number of candidates")


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
