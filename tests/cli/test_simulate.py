"""`edgexpert simulate`: devices, synthetic workloads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

DENSE = ("--dense", "granite-1b-a400m", "--stages", "1", "--prompt", "8", "--experts", "20")


def test_devices_are_listed_with_their_main_figures(run: Run) -> None:
    listed = json.loads(run("simulate", "--devices", "--json").stdout)["devices"]
    chip = next(device for device in listed if device["name"] == "edgexpert")
    assert round(chip["tops"], 1) == 13.1 and round(chip["power_w"], 2) == 1.52 and round(chip["area_mm2"], 1) == 9.3
    table = run("simulate", "--devices").stdout
    assert all(device["name"] in table for device in listed)


def test_a_dense_workload_on_several_devices(run: Run) -> None:
    result = run("simulate", *DENSE, "--device", "edgexpert", "--device", "edgemoe-au", "--json")
    speculative, plain = json.loads(result.stdout)["runs"]
    assert (speculative["acceptance_length"], plain["acceptance_length"]) == (4, 1)
    assert speculative["synthetic"] and speculative["decode"]["experts_per_layer"] == 20
    assert plain["decode"]["experts_per_layer"] == 8
    assert plain["decode"]["energy"]["draft"] == {"dram": 0, "sram": 0, "logic": 0}
    table = run("simulate", *DENSE, "--device", "edgemoe-au").stdout
    assert "EdgeMoE AU" in table and "synthetic workload: dense" in table


def test_a_timeline_is_a_trace_that_perfetto_reads(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    assert run("simulate", *DENSE, "--timeline", file).exit_code == 0
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"DRAM", "NOC", "PE", "SIMD", "PRU", "DCU"}
    by_resource: dict[int, float] = {}
    for event in (event for event in events if event["ph"] == "X"):
        assert event["ts"] >= by_resource.get(event["tid"], 0) - 1e-6  # a resource does one thing at a time
        assert event["dur"] >= event["args"]["busy_us"] - 1e-6
        by_resource[event["tid"]] = event["ts"] + event["dur"]
    assert list(tmp_path.iterdir()) == [file]


def test_files_beside_the_results_are_replaced_and_said_so(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    out = tmp_path / "results.parquet"
    arguments = ("simulate", *DENSE, "--out", out, "--json")
    assert [run(*arguments).stderr for _ in range(2)] == [f"wrote {out}\n", f"replaced {out}\n"]
    both = run(*arguments, "--timeline", out)
    assert both.exit_code == 2 and "give two names" in both.stderr.replace("\n", " ")
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_of_ones_own_is_a_device(run: Run, tmp_path: Path) -> None:
    device = tmp_path / "half.toml"
    device.write_text('base = "edgexpert"\nname = "Half"\n[dram]\nbandwidth = 8e9\n')
    runs = json.loads(run("simulate", *DENSE, "--device", "edgexpert", "--device", device, "--json").stdout)["runs"]
    assert runs[1]["device"] == "Half" and runs[1]["tpot_s"] > 1.9 * runs[0]["tpot_s"]


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "nothing to simulate"),
    (("--dense", "gpt"), "there is no model 'gpt'"),
    ((*DENSE, "--device", "gpu"), "there is no device 'gpu'"),
    ((*DENSE, "--policy", "pruned"), "give --policy and --importance with --trace alone"),
    ((*DENSE, "--device", "edgexpert", "--device", "smolpu", "--timeline", "t.json"), "a timeline is of one run"),
    (("--dense", "granite-1b-a400m", "--experts", "33"), "cannot load 33 distinct ones of 32"),
    ((*DENSE, "--out", "nowhere/results.parquet"), "there is no folder"),
    (("--trace", "nowhere.parquet"), "there is no trace"),
    (("--dense", "granite-1b-a400m", "--experts", "nan"), "--experts must be from 1 to"),
    (("--dense", "granite-1b-a400m", "--experts", "1e300"), "--experts must be from 1 to"),
    (("--dense", "granite-1b-a400m", "--acceptance-length", "inf"), "--acceptance-length must be from 1 to 65"),
    (("--dense", "granite-1b-a400m", "--acceptance-length", "66"), "--acceptance-length must be from 1 to 65"),
    (("--dense", "granite-1b-a400m", "--candidates", "10000000"), "--candidates must be from 0 to 10000, not 10000000"),
    (("--dense", "granite-1b-a400m", "--candidates", "-1"), "--candidates must be from 0"),
    (("--dense", "granite-1b-a400m", "--stages", "0"), "--stages must be from 1"),
])
def test_what_cannot_be_simulated_is_refused_with_one_sentence(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("simulate", *arguments)
    assert result.exit_code == 2
    assert message.lower() in result.stderr.replace("\n", " ").lower()
    assert "Traceback" not in result.output


def test_a_dense_workload_without_candidates_is_plain_decoding_of_the_top_k(run: Run) -> None:
    result = run("simulate", "--dense", "granite-1b-a400m", "--candidates", 0, "--stages", 2, "--json")
    assert result.exit_code == 0, result.output
    only = json.loads(result.stdout)["runs"][0]
    assert (only["acceptance_length"], only["decode"]["experts_per_layer"]) == (1, 8)
    assert sum(only["decode"]["energy"]["draft"].values()) == 0


def test_a_policy_of_a_device_that_does_not_exist_is_refused_whatever_the_workload(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "edgexpert"\npolicy = "nope"\n')
    result = run("simulate", *DENSE, "--device", tmp_path / "mine.toml")
    assert result.exit_code == 2 and "no policy 'nope'" in result.stderr


def test_importance_changes_what_reuse_saves(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from edgexpert.trace.synthesis import synthesise_trace

    trace = tmp_path / "granite.parquet"
    synthesise_trace("granite-1b-a400m", trace, stages=0, prompt_tokens=24, acceptance=3.9)
    arguments = ("simulate", "--trace", trace, "--policy", "reuse", "--json")
    mean, maximum = (json.loads(run(*arguments, *more).stdout)["runs"][0] for more in ((), ("--importance", "max")))
    assert maximum["prefill"]["read_bytes"]["experts"] < mean["prefill"]["read_bytes"]["experts"]
    refused = run(*arguments, "--importance", "median")
    assert refused.exit_code == 2 and "--importance must be one of mean, max, quantile" in refused.stderr.replace("\n", " ")
