"""The choice of token trees, on simulated machines: how long it takes against the best fixed choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import numpy as np
import pytest

from edgexpert.speculation.controller import ARMS, BREADTH, PLAIN, TABLE, Controller, Experience
from edgexpert.speculation.draft import TreeShape


@dataclass
class Machine:
    """A stage takes ``start + a row * rows + a level * levels`` milliseconds, and a chain's candidate is accepted so often."""

    start: float
    row: float
    level: float
    acceptance: Callable[[int], float]

    def decode(self, tokens: int, seed: int, chooser: Controller | TreeShape | None) -> float:
        """Seconds of a text, each stage's with 20 % noise."""
        rng, done, total = np.random.default_rng(seed), 0, 0.0
        while done < tokens:
            shape = chooser.choose() if isinstance(chooser, Controller) else chooser
            size, depth = (shape.size, shape.depth) if shape else (0, 0)
            accepted, chance = 0, 1 - (1 - self.acceptance(done)) ** BREADTH[TABLE[ARMS.index(shape)]]
            while accepted < depth and rng.random() < chance:
                accepted += 1
            seconds = 1e-3 * (self.start + self.row * (size + 1) + self.level * depth) * rng.lognormal(-0.02, 0.2)
            done, total = done + accepted + 1, total + seconds
            if isinstance(chooser, Controller):
                chooser.record(accepted, seconds)
        return total

    def best_fixed(self, tokens: int) -> float:
        return min(mean(self.decode(tokens, seed, arm) for seed in range(100, 100 + 20000 // tokens)) for arm in ARMS)


MACHINES = {
    "drafting is slow": Machine(1, 0.15, 1.0, lambda _: 0.68),
    "rows are dear": Machine(1, 0.2, 0.5, lambda _: 0.5),
    "nothing is accepted": Machine(1, 0.05, 0.1, lambda _: 0.0),
    "little is accepted": Machine(1, 0.1, 0.05, lambda _: 0.3),
    "half is accepted, large model": Machine(13, 2.2, 1.0, lambda _: 0.68),
    "half is accepted, small model": Machine(0.8, 0.15, 0.15, lambda _: 0.68),
    "nearly all is accepted": Machine(1, 0.15, 0.1, lambda _: 0.98),
    "rows are free": Machine(1, 0.002, 0.02, lambda _: 0.7),
    "the text changes": Machine(1, 0.1, 0.05, lambda done: 0.85 if done < 1000 else 0.1),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
@pytest.mark.parametrize(("tokens", "texts", "later", "first"), [(2000, 10, 1.03, 1.06), (150, 12, 1.06, 1.2)])
def test_it_takes_as_long_as_the_best_fixed_choice(machine: Machine, tokens: int, texts: int, later: float, first: float) -> None:
    times = []
    for seed in range(texts):
        experience = Experience()
        cold = machine.decode(tokens, seed, Controller(experience))
        machine.decode(350, 1000 + seed, Controller(experience))
        times.append((cold, machine.decode(tokens, seed, Controller(experience))))
    best = machine.best_fixed(tokens)
    assert mean(cold for cold, _ in times) < first * best
    assert mean(warm for _, warm in times) < later * best


def choices(machine: Machine, tokens: int) -> list[TreeShape | None]:
    made = []

    class Watched(Controller):
        def choose(self) -> TreeShape | None:
            made.append(super().choose())
            return made[-1]

    machine.decode(tokens, 0, Watched(Experience()))
    return made


def test_where_no_draft_is_accepted_most_stages_are_plain() -> None:
    made = choices(MACHINES["nothing is accepted"], 1000)
    assert made.count(None) > 0.8 * len(made)
    assert sum(shape.size for shape in made if shape) < 0.3 * len(made)


def test_where_rows_are_free_it_finds_the_large_trees() -> None:
    made = choices(MACHINES["rows are free"], 1000)
    assert mean(shape.size if shape else 0 for shape in made[30:]) > 20


def test_the_first_stages_of_the_first_text_are_plain() -> None:
    experience = Experience()
    for first in (True, False):
        controller, shapes = Controller(experience), []
        for _ in range(8):
            shapes.append(controller.choose())
            controller.record(shapes[-1].depth if shapes[-1] else 0, 1e-3)
        assert (shapes[:PLAIN] == [None] * PLAIN) == first
        assert shapes[-1] is not None


def test_it_follows_a_machine_that_becomes_slower_at_trees() -> None:
    machine = Machine(1, 0.002, 0.02, lambda _: 0.7)
    controller = Controller(Experience())
    machine.decode(600, 0, controller)
    machine.row = 0.5
    machine.decode(600, 1, controller)
    slow = machine.decode(600, 2, controller)
    assert slow < 1.1 * machine.best_fixed(600)


def test_one_stage_of_a_thousand_times_the_usual_changes_little() -> None:
    experience = Experience()
    for _ in range(50):
        experience.observe(0, 1e-3, 1)
    experience.observe(0, 1.0, 1)
    assert experience.seconds[0] < 1.5e-3


@pytest.mark.parametrize("unit", [1e-6, 1e-3, 10.0])
def test_seconds_are_learnt_whatever_their_size(unit: float) -> None:
    experience = Experience()
    for _ in range(20):
        experience.observe(0, unit, 1)
        experience.observe(4, 3 * unit, 4)
    assert experience.seconds[[0, 4]] == pytest.approx([unit, 3 * unit], rel=0.05)
    assert unit < experience.seconds[2] < 3 * unit  # of what was never seen, its neighbours say something
