"""The policy that docs/extending.md shows works as an installed package; packages at fault are named in one sentence."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from edgexpert.core.errors import UserError
from edgexpert.policy import Policy, policy_named
from tests.cli.conftest import Run, run, tiny_checkpoint  # noqa: F401  # fixtures

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text("utf-8")
Install = Callable[[str, str, dict[str, str]], None]


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package of one module onto the path as an installer would: its code, and what it says of itself."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, code: str, entries: dict[str, str]) -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {target}\n" for name, target in entries.items())
        (info / "entry_points.txt").write_text(f"[edgexpert.policies]\n{lines}")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


@pytest.fixture
def few_experts(install: Install) -> None:
    project = tomllib.loads(block("toml"))["project"]
    install(project["name"], block("python"), project["entry-points"]["edgexpert.policies"])


@pytest.mark.usefixtures("few_experts")
def test_the_policy_of_the_page_is_found_by_name_and_loads_fewer_bytes(run: Run, tmp_path: Path) -> None:  # noqa: F811
    assert policy_named("few-experts").to_json() == {"name": "few-experts", "importance": "mean", "least": 0.5}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox met a crow, a fox met a crow")
    result = run("bench", "--prompts", prompts, "--max-new-tokens", 6, "--policies",
                 "exact,few-experts", "--json")
    assert result.exit_code == 0, result.stderr
    exact, few = json.loads(result.stdout)["policies"]
    assert few["policy"]["name"] == "few-experts"
    assert few["approximations"] == ["few experts: those with less than 0.5 of the weight of a token's best one are skipped"]
    assert few["expert_bytes_per_token"]["decode"] < exact["expert_bytes_per_token"]["decode"]


@pytest.mark.usefixtures("few_experts")
def test_the_policy_of_the_page_replays_traces(run: Run, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("pyarrow")
    from edgexpert.trace.read import Trace
    from edgexpert.trace.synthesis import synthesise_trace

    file = tmp_path / "run.parquet"
    synthesise_trace("granite-1b-a400m", file, stages=1, prompt_tokens=8)
    exact, few = (sum(plan.routing.count for stage in Trace(file).replay(policy_named(name)) for plan in stage.plans)
                  for name in ("exact", "few-experts"))
    assert few < exact
    result = run("simulate", "--trace", file, "--policy", "few-experts", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["runs"][0]["policy"] == "few-experts"


@pytest.mark.usefixtures("few_experts")
def test_a_run_under_the_policy_of_the_page_is_recorded_and_replays_to_the_bytes_of_the_run(
    run: Run, tiny_checkpoint: Path, tmp_path: Path  # noqa: F811
) -> None:
    pytest.importorskip("pyarrow")
    from edgexpert.core.shapes import WeightFormat
    from edgexpert.trace.read import Trace

    file, prompt = tmp_path / "run.parquet", tmp_path / "prompt.txt"
    prompt.write_text("a fox met a crow, a fox met a crow")
    arguments = ("--model", tiny_checkpoint, "--policy", "few-experts", "--max-new-tokens", 4, "--speculation", 64,
                 "--json")
    recorded = run("trace", "--prompts", prompt, "--out", file, *arguments)
    assert recorded.exit_code == 0, recorded.stderr
    generated = json.loads(run("generate", prompt.read_text(), *arguments).stdout)
    assert generated["policy"]["name"] == "few-experts" and generated["approximations"]
    trace = Trace(file)
    assert trace.facts.policy == {"name": "few-experts", "importance": "mean", "least": 0.5}
    plans = [plan for stage in trace.replay(policy_named("few-experts")) for plan in stage.plans]
    replayed = sum(plan.bytes(trace.shape(WeightFormat(4.0))) for plan in plans)
    traffic = generated["traffic"]
    assert replayed == pytest.approx(traffic["prefill"]["experts"] + traffic["decode"]["experts"])


@pytest.mark.usefixtures("few_experts")
def test_a_setting_of_another_policy_and_an_impossible_value_are_refused(run: Run, tiny_checkpoint: Path) -> None:  # noqa: F811
    import edgexpert

    result = run("generate", "a fox", "--model", tiny_checkpoint, "--policy", "few-experts", "--theta1", 0.5)
    assert result.exit_code == 2
    assert "Policy few-experts has no setting 'theta1'; it has least" in " ".join(result.stderr.split())
    with pytest.raises(UserError, match="`least`"):
        edgexpert.load(str(tiny_checkpoint), policy="few-experts", least=1.5)


@pytest.mark.parametrize(("code", "part"), [
    ("import no_such_module", "cannot be loaded (ModuleNotFoundError"),
    ("", "cannot be loaded (AttributeError"),
    ("def Mine(): pass", "is no edgexpert.policy.Policy"),
    ("class Mine:\n    def __init__(self): raise ValueError('two\\nlines')", "(ValueError: two lines)"),
    ("from edgexpert.policy import Policy\nclass Mine(Policy): pass", "is named 'Mine'"),
])
def test_a_broken_package_is_named_in_one_sentence(install: Install, code: str, part: str) -> None:
    install("broken-policies", code, {"mine": "broken_policies:Mine"})
    with pytest.raises(UserError) as error:
        policy_named("mine")
    assert part in str(error.value) and "package broken-policies" in str(error.value) and "\n" not in str(error.value)
    assert policy_named("exact").is_exact  # others go on working


def test_a_name_is_offered_once(install: Install) -> None:
    code = "from edgexpert.policy import Policy\nclass Mine(Policy):\n    name = 'mine'\n"
    install("first", code, {"mine": "first:Mine", "edgexpert": "first:Mine"})
    assert isinstance(policy_named("mine"), Policy)
    with pytest.raises(UserError, match="which EdgeXpert has itself"):
        policy_named("edgexpert")
    with pytest.raises(UserError, match="edgemoe, edgexpert, mine"):
        policy_named("other")
    install("second", code, {"mine": "second:Mine"})
    with pytest.raises(UserError, match="the packages first and second both offer a policy 'mine'"):
        policy_named("mine")
