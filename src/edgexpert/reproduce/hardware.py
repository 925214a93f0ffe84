"""Tables II, III and V: devices, models and synthesis results, computed from our data files."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from edgexpert.core.resources import MODELS
from edgexpert.policy.hyperparameters import TABLE_III
from edgexpert.reproduce.claims import Answer, paper
from edgexpert.reproduce.figure import Figure, bars, column
from edgexpert.reproduce.workbench import Workbench
from edgexpert.simulator.device import load_device
from edgexpert.simulator.dram import seconds
from edgexpert.simulator.shapes import model_named, parameters

DATA = "none: device and model files"


def table2(bench: Workbench) -> Figure:
    """Throughput and power of all devices, and what the external memory can do."""
    rows = []
    for name, printed in paper()["table2"].items():
        device = load_device(name)
        rows.append({"device": device.name, "bandwidth_gb_s": device.dram.bandwidth / 1e9, "paper_tops": printed["tops"],
                     "tops": device.tops, "paper_watts": printed["watts"], "watts": device.power_w,
                     "tops_per_watt": device.tops / device.power_w})
    chip = load_device("edgexpert")
    dram, qwen = replace(chip.dram, mode="closed"), model_named("qwen3-30b-a3b")
    every = {name: count for name, count in qwen.parameters().items() if name != "expert"}
    needed = (sum(every.values()) + prod(qwen.lm_head)) * chip.bytes_per_weight / 1e9  # and as many embeddings
    bursts = np.array([1e6])
    rows_opened = bursts * dram.burst_bytes / dram.page_bytes
    reached = float((bursts * dram.burst_bytes / seconds(dram, bursts * dram.burst_bytes, bursts, rows_opened))[0]) / 1e9
    largest = replace(dram, trfc=812)
    worse = float((bursts * dram.burst_bytes / seconds(largest, bursts * dram.burst_bytes, bursts, rows_opened))[0]) / 1e9
    return Figure(
        "Table II: hardware", DATA, "Power of the baselines is Table II's; throughput follows from array and clock.", rows,
        [
            Answer("tops", chip.tops, DATA, "8192 multiplications a cycle at 800 MHz, two operations each"),
            Answer("tops_per_watt", chip.tops / chip.power_w, DATA, "throughput over the sum of Table V's powers"),
            Answer("dram_capacity", needed, DATA, f"all of Qwen3's weights at {8 * chip.bytes_per_weight:g} bits; the cited "
                   "part cannot hold them"),
            Answer("bandwidth", reached, DATA, f"two channels of 16 bits at 4266 MT/s after all-bank refresh of 8 Gb a channel; "
                   f"{worse:.1f} GB/s with 16 Gb a channel. The simulator grants the paper's 16 GB/s unless told otherwise"),
        ],
        lambda drawing: bars(drawing.subplots(), column(rows, "device"), {
            "TOPS": column(rows, "tops"), "TOPS, paper": column(rows, "paper_tops"),
            "W": column(rows, "watts"), "W, paper": column(rows, "paper_watts")}, "TOPS and W"),
    )


def table3(bench: Workbench) -> Figure:
    """Models from their configurations, hyperparameters from the policy's table."""
    rows, broken = [], []
    for name in MODELS:
        shape, printed = model_named(name), paper()["table3"][name]
        h = TABLE_III[shape.model_type, shape.experts, shape.top_k]
        shared = shape.shared_intermediate // shape.intermediate
        draft = shape.draft
        assert draft is not None
        rows.append({
            "model": name, "layers": len(shape.moe_layers), "paper_layers": printed["layers"], "hidden": shape.hidden,
            "paper_hidden": printed["hidden"], "experts": shape.experts, "paper_experts": printed["experts"],
            "expert_mi": parameters(shape.expert) / 2**20, "paper_expert_millions": printed["expert_millions"],
            "top_k": shape.top_k + shared, "paper_top_k": printed["top_k"], "k_min": h.k_min, "n_min": h.n_min,
            "k_tri": h.k_tri, "n_tri": h.n_tri, "theta1": h.theta1, "theta2": h.theta2, "selection_ratio": h.selection_ratio,
            "draft_millions_a_step": draft.streamed / 1e6})
        if h.k_min <= shape.top_k:
            broken.append(f"{name} ({h.k_min} of {shape.top_k} routed)")
    deepseek = model_named("deepseek-v2-lite")
    assert deepseek.draft is not None
    step, table = deepseek.draft.streamed / 1e6, prod(deepseek.lm_head) / 1e6
    return Figure(
        "Table III: models", DATA, "Expert sizes are in units of 2^20 weights, which is how the paper's numbers come out.", rows,
        [
            Answer("expert_size", parameters(model_named("qwen3-30b-a3b").expert) / 2**20, DATA,
                   "in units of 2^20; in millions it would be 4.72"),
            Answer("draft_size", step, DATA, f"what a drafting step streams with the published draft's sizes; its embedding "
                   f"table has {table:.0f} M more, and only with it the total ({step + table:.0f} M) comes near the paper's"),
            Answer("budget_order", float(len(broken)), DATA, f"k_min equals the routed top-k for {', '.join(broken)}; we "
                   "require k_min >= top-k"),
        ],
        lambda drawing: bars(drawing.subplots(), column(rows, "model"), {
            "ours": column(rows, "expert_mi"), "paper": column(rows, "paper_expert_millions")}, "weights an expert (Mi)"),
    )


def table5(bench: Workbench) -> Figure:
    """Area and power by component; the controller's share."""
    chip = load_device("edgexpert")
    rows = [{"component": part.name, "group": part.group, "area_mm2": part.area_mm2, "power_w": part.power_w,
             "area_percent": 100 * part.area_mm2 / chip.area_mm2, "paper_area_percent": printed["area"],
             "power_percent": 100 * part.power_w / chip.power_w, "paper_power_percent": printed["power"]}
            for part in chip.components for printed in (paper()["table5"][part.name],)]
    area, power = (sum(column(rows, name, group="controller")) for name in ("area_percent", "power_percent"))
    by_sum = "sum of Table V's rows, which the device file holds"
    return Figure(
        "Table V: area and power", DATA, "The text calls 1.52 W peak power, the table average power; the simulator takes it as "
        "the average at work.", rows,
        [
            Answer("area", chip.area_mm2, DATA, by_sum),
            Answer("power", chip.power_w, DATA, by_sum),
            Answer("controller_area", area, DATA, by_sum),
            Answer("controller_power", power, DATA, by_sum),
        ],
        lambda drawing: bars(drawing.subplots(), column(rows, "component"), {
            "area": column(rows, "area_percent"), "power": column(rows, "power_percent")}, "share (%)"),
    )
