"""Devices as data: the paper's figures, and files of a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgexpert.core.errors import UserError
from edgexpert.simulator.device import built_in, load_device
from edgexpert.simulator.run import simulate
from edgexpert.simulator.shapes import model_named
from edgexpert.simulator.workload import dense_decode
from tests.simulator.workloads import MODEL, text


def test_table_v_adds_up() -> None:
    device = load_device("edgexpert")
    controller = [c for c in device.components if c.group == "controller"]
    assert device.area_mm2 == pytest.approx(9.3, abs=0.05)
    assert device.power_w == pytest.approx(1.52, abs=0.005)
    assert sum(c.area_mm2 for c in controller) / device.area_mm2 == pytest.approx(0.141, abs=0.002)
    assert sum(c.power_w for c in controller) / device.power_w == pytest.approx(0.086, abs=0.001)


def test_throughput_and_efficiency_follow_from_array_and_clock() -> None:
    device = load_device("edgexpert")
    assert device.array.macs == 8192
    assert device.tops == pytest.approx(13.1, abs=0.05)
    assert device.tops / device.power_w == pytest.approx(8.6, abs=0.05)
    assert device.pj_per_mac("logic") + device.pj_per_mac("sram") == pytest.approx(0.232, abs=0.0005)
    assert device.bytes_per_weight == 4.5 / 8


@pytest.mark.parametrize(("name", "tops", "watts"), [
    ("moe-pruner-au", 13.1, 2.49), ("moe-pruner-sd", 13.1, 2.49), ("edgemoe-au", 13.1, 1.29), ("edgemoe-sd", 13.1, 1.29),
    ("smolpu", 14.4, 1.44), ("edgexpert", 13.1, 1.52),
])
def test_table_ii(name: str, tops: float, watts: float) -> None:
    device = load_device(name)
    assert device.tops == pytest.approx(tops, abs=0.01)
    assert device.power_w == pytest.approx(watts, abs=0.005)
    assert (device.dram.bandwidth, device.clock_hz) == (16e9, 800e6)


def test_every_device_is_found_by_its_name() -> None:
    assert {load_device(name).name for name in built_in()} >= {"EdgeXpert", "Baseline", "SMoLPU"}
    assert len(built_in()) == 7


def test_a_file_on_disk_gives_what_differs_and_a_change_to_it_changes_the_result(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "edgexpert"\n[dram]\nbandwidth = 16e9\n')
    before = simulate(MODEL, load_device(str(file)), text("exact"))
    assert before.latency == simulate(MODEL, load_device("edgexpert"), text("exact")).latency
    file.write_text('base = "edgexpert"\n[dram]\nbandwidth = 8e9\n')
    after = simulate(MODEL, load_device(str(file)), text("exact"))
    assert after.latency > 1.5 * before.latency
    assert after.joules == before.joules


@pytest.mark.parametrize(("content", "message"), [
    ('base = "edgexpert"\n[dram]\nbandwith = 1e9\n', r"unknown key dram\.bandwith in .*; did you mean bandwidth"),
    ('base = "edgexpert"\n[dram]\nbandwidth = -1\n', r"dram\.bandwidth .* must be above 0"),
    ('base = "edgexpert"\n[dram]\nbandwidth = nan\n', r"dram\.bandwidth .* must be above 0"),
    ('base = "edgexpert"\n[dram]\nmode = "fast"\n', r"dram\.mode .* must be one of flat, closed, inorder"),
    ('base = "edgexpert"\n[array]\ncores = 1.5\n', r"array\.cores .* must be a whole number"),
    ('base = "edgexpert"\ndrafts = 1\n', r"drafts .* must be true or false"),
    ('base = "edgexpert"\narray = 3\n', r"array .* must be a table"),
    ('base = "edgexpert"\ncomponents = []\n', r"components .* must be a list of tables"),
    ('base = "edgexpert"\n[dram]\ntrfc = 9000\n', r"dram\.trfc .* leaves no time between refreshes"),
    ('base = "edgexpert"\n[dram]\nburst_bytes = 48\n', r"dram\.page_bytes .* must be a multiple"),
    ('name = "x"\n', r"the key policy of .* is missing"),
    ('base = "nope"\n', r"there is no device 'nope'"),
    ("name = \n", r"cannot be read"),
    ('base = "edgexpert"\n[array]\nclusters = 100000000000000000000\n', r"array\.clusters .* must be from 1 to 1e\+06"),
    ('base = "edgexpert"\n[array]\nclusters = true\n', r"array\.clusters .* must be a whole number"),
    ('base = "edgexpert"\n[precision]\nweight_bits = 0\n', r"precision\.weight_bits .* must be from 1 to 64"),
    ('base = "edgexpert"\nclock_hz = inf\n', r"clock_hz .* must be above 0"),
    ('base = "edgexpert"\n[[components]]\nname = "x"\ngroup = "clusters"\nkind = "logic"\npower_w = -1.0\n',
     r"components\[0\]\.power_w .* must be above 0"),
])
def test_a_bad_file_is_refused_with_the_key_that_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        load_device(str(file))


def test_a_file_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "circle.toml"
    file.write_text(f'base = "{file.as_posix()}"\n')
    with pytest.raises(UserError, match="its own base"):
        load_device(str(file))


@pytest.mark.parametrize("memory", ["core_weights", "core_scales"])
def test_memories_so_small_that_a_stage_takes_millions_of_loads_are_refused(tmp_path: Path, memory: str) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(f'base = "edgexpert"\n[memory]\n{memory} = 1\n')
    with pytest.raises(UserError, match=f"memory.{memory}.* instructions"):
        simulate(model_named("qwen3-30b-a3b"), load_device(str(file)), dense_decode(model_named("qwen3-30b-a3b")))
