"""Chooses the shape of token trees while a text is decoded, from what stages cost here and what they bring.

A few shapes (`ARMS`) compete, plain decoding among them. What an arm is worth is tokens a stage over seconds a stage:

- Seconds are learnt for all texts of an engine together, in `Experience`. Logarithms of the arms' seconds follow a Gaussian walk
  from the smallest arm to the largest, so what is seen of one arm says something of its neighbours. A Kalman filter updates it.
- Tokens come from how often a candidate is accepted at each depth where its parent was. Chains share one table; each tree has one
  of its own, which begins with what the chains say.

The best arm is taken. Now and then it is another one that may be better: as often as the time so lost stays below a hundredth.
"""

from __future__ import annotations

import math
from threading import Lock

import numpy as np

from edgexpert.speculation.draft import TreeShape

LARGEST = TreeShape(64, 6, 10)
ARMS: tuple[TreeShape | None, ...] = (
    None, TreeShape(1, 1, 1), TreeShape(2, 2, 1), TreeShape(3, 3, 1), TreeShape(4, 4, 1),
    TreeShape(8, 4, 4), TreeShape(16, 6, 4), TreeShape(32, 6, 8), LARGEST,
)
"""From the cheapest to the dearest; None is plain decoding."""

DEPTHS = np.array([arm.depth if arm else 0 for arm in ARMS])
DEEPEST = int(DEPTHS.max())
WITHIN = np.arange(DEEPEST) < DEPTHS[:, None]  # [arms, depths]
TABLE = np.array([0, 0, 0, 0, 0, 1, 2, 3, 4])  # where the acceptance of each arm is counted
BREADTH = np.array([1, 1.4, 1.55, 1.75, 1.95])  # of each table: at a depth, a tree is as good as so many tries of a chain

GROWTH = np.array([0, 0.25, 0.08, 0.08, 0.08, 0.25, 0.35, 0.45, 0.5])  # of log seconds from arm to arm, before any was seen
SPREAD = np.array([0, 0.35, 0.10, 0.08, 0.08, 0.25, 0.25, 0.25, 0.25])  # standard deviation of that
NOISE = 0.2**2  # variance of one stage's seconds about what is expected, relative
LONGEST = 1.5  # a stage counts as at most so many times what it was expected to take: what else the machine does hits all arms
CLIP = 2.0  # standard deviations that the mean of some stages counts at most
FAR = 3  # so many means in a row that were beyond that are no accident
DRIFT, OWN_DRIFT = 1e-4, 1e-4  # what a stage adds to the variance of all arms together, and of each alone

FIRST_GUESS, GUESS_WEIGHT = 0.5, 2.0  # acceptance before anything was seen, and how many stages that counts for
PRIOR_WEIGHT = 16.0  # stages that what others say of a table counts for
STAGE_VARIANCE = 0.3  # relative variance of the tokens of one stage
FORGET, FORGET_ALL = 0.99, 0.998  # a stage's weight after another one of its table, and of any
INHERITED = 24.0  # stages that earlier texts count for at most

LOSS = 0.01  # share of the time that trying other arms may lose
START_LOSS = 1.0  # and so many plain stages at the start
ROUND = 4  # stages until it chooses again
PLAIN = 3  # stages of the first text that have no tree
ROUND_SECONDS, LONG_ROUND = 0.02, 32  # with the best arm a round takes so long, or so many stages: to choose takes 0.1 ms
EARLY = 24  # in so many stages of the first text it chooses each time


class Experience:
    """What the texts of one engine under one policy and draft have taught: seconds of each arm, and acceptance to begin with.

    Attributes:
        stages: how many were observed.
        tables: how often depths were reached and passed in the latest stages, [2, tables, depths].
    """

    def __init__(self) -> None:
        cumulated = np.cumsum(GROWTH)
        walk = np.cumsum(SPREAD**2)
        self._log = math.log(0.01) + cumulated
        self._cov = 9.0 + np.minimum.outer(walk, walk) + 0.5 * np.outer(cumulated, cumulated)
        self._far = 0
        self._lock = Lock()
        self.stages = 0
        self.tables = np.zeros((2, len(BREADTH), DEEPEST))

    @property
    def seconds(self) -> np.ndarray:
        """Of a stage with each arm, [arms]."""
        return np.exp(self._log)

    def variance(self, arm: int) -> np.ndarray:
        """Of the logarithm of each arm's seconds over those of ``arm``, [arms]."""
        cov = self._cov
        return np.maximum(cov.diagonal() + cov[arm, arm] - 2 * cov[arm], 0)

    def observe(self, arm: int, seconds: float, stages: int) -> None:
        """Takes in the mean ``seconds`` of some stages with an arm."""
        with self._lock:
            self.stages += stages
            cov = self._cov + DRIFT * stages
            cov[np.diag_indices(len(ARMS))] += OWN_DRIFT * stages
            variance = cov[arm, arm] + NOISE / stages
            gain = cov[arm] / variance
            ratio = seconds / math.exp(self._log[arm])
            if cov[arm, arm] > 1:  # nothing is known yet
                wrong = math.log(ratio)
            else:  # not the logarithm of the ratio: the mean of the seconds counts
                most = CLIP * math.sqrt(variance)
                wrong = min(max(ratio - 1, -most), most)
            self._log = self._log + gain * wrong
            self._cov = cov - np.outer(gain, cov[arm])
            self._far = self._far + 1 if abs(ratio - 1) > abs(wrong) else 0
            if self._far >= FAR:
                self._cov[arm, arm] += NOISE  # the next stages are believed sooner


class Controller:
    """Chooses for one text. It alternates between `choose` and `record`."""

    def __init__(self, experience: Experience) -> None:
        self._experience = experience
        tables = experience.tables
        self._tables = tables * min(1, INHERITED / max(1, tables[0, :, 0].sum()))
        self._stages = 0
        self._spent = self._lost = 0.0
        self._arm = 0
        self._left = 0  # stages until it chooses again
        self._switched = True  # the next stage is the first with its arm
        self._seconds = 0.0  # of the stages since it chose, the first one after a switch left out
        self._count = 0
        self._longest = math.inf  # seconds that a stage counts at most
        self._loss = 0.0  # expected of each stage with this arm

    def choose(self) -> TreeShape | None:
        """The shape of the next tree; None for no tree."""
        if self._left == 0:
            self._settle()
            self._decide()
        self._left -= 1
        return ARMS[self._arm]

    def record(self, accepted: int, seconds: float) -> None:
        """A stage with the shape that `choose` gave last: candidates accepted, and seconds with drafting and everything."""
        self._stages += 1
        self._spent += seconds
        self._lost += self._loss
        if seconds > self._longest:
            self._left = min(self._left, 1)  # it may not be worth a long round any more
        if self._switched:  # caches hold what the arm before needed, and a draft may have to catch up
            self._switched = False
        else:
            self._seconds += min(seconds, self._longest)
            self._count += 1
        depth = int(DEPTHS[self._arm])
        if depth == 0:
            return
        table = self._tables[:, TABLE[self._arm]]
        table *= FORGET
        table[0, : min(accepted + 1, depth)] += 1
        table[1, :accepted] += 1

    def _settle(self) -> None:
        """Hands what the last stages took to all texts."""
        if self._count:
            self._experience.observe(self._arm, self._seconds / self._count, self._count)
            self._tables *= FORGET_ALL**self._count
            self._experience.tables = self._tables.copy()
            self._seconds, self._count = 0.0, 0

    def _tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Expected of a stage with each arm, and the variance of their logarithms, [arms] both."""
        reached, passed = self._tables
        alone = 1 - (1 - passed / np.maximum(reached, 1e-9)).clip(1e-3) ** (1 / BREADTH[:, None])  # as of a chain
        weight, total = reached.sum(0), (reached * alone).sum(0)
        guess, pooled = FIRST_GUESS, []
        for w, t in zip(weight.tolist(), total.tolist(), strict=True):
            guess = (t + GUESS_WEIGHT * guess) / (w + GUESS_WEIGHT)  # the depth before says what to expect of the next
            pooled.append(guess)
        prior = 1 - (1 - np.array(pooled)) ** BREADTH[:, None]
        chances = (passed + PRIOR_WEIGHT * prior) / (reached + PRIOR_WEIGHT)
        tokens = 1 + (np.cumprod(chances, 1)[TABLE] * WITHIN).sum(1)
        seen = reached[:, 0]
        variance = STAGE_VARIANCE / (seen[TABLE] + PRIOR_WEIGHT) + STAGE_VARIANCE / (seen.sum() + GUESS_WEIGHT)
        variance[0] = 0
        return tokens, variance

    def _decide(self) -> None:
        """Takes the arm that may be worth most among those that can be afforded; it may lose nothing where it is the best."""
        if self._experience.stages == 0:
            self._left = PLAIN
            return
        tokens, token_variance = self._tokens()
        seconds = self._experience.seconds
        value = tokens / seconds
        best = int(value.argmax())
        variance = self._experience.variance(best) + np.where(DEPTHS > 0, token_variance, token_variance[best])
        variance[best] = 0
        hopeful = value * np.exp(np.sqrt(variance))
        loss = seconds * (1 - value / value[best])
        stages = 1 if self._experience.stages < EARLY else ROUND
        affordable = self._lost + stages * loss <= LOSS * self._spent + START_LOSS * seconds[0]
        affordable[best] = True  # whatever was lost before
        arm = int(np.where(affordable, hopeful, 0).argmax())
        self._switched, self._arm = arm != self._arm and stages > 1, arm
        self._loss = float(loss[self._arm])
        self._longest = LONGEST * float(seconds[self._arm])
        if arm == best and stages == ROUND:
            stages = max(ROUND, min(LONG_ROUND, int(ROUND_SECONDS / seconds[best])))
        self._left = stages
