"""The loop that every trainer shares: damaged checkpoints, losses that are not finite, Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from edgexpert.core.errors import UserError
from edgexpert.training.loop import CHECKPOINT, Record, Trainer, train


class Line(Trainer):
    """Fits a line; ``learning`` sees each step before it is learned."""

    steps = 6
    validate_every = 3

    def __init__(self, recipe: str = "a", rate: float = 0.1) -> None:
        torch.manual_seed(0)
        self.network, self.recipe, self._rate = nn.Linear(1, 1), {"name": recipe}, rate
        self.optimizer = torch.optim.AdamW(self.network.parameters())

    def learning(self, step: int) -> float:
        return 1.0

    def rate(self, step: int) -> float:
        return self._rate

    def learn(self, step: int) -> Record:
        loss = (self.network(torch.ones(1, 1)) - 3).square().sum() * self.learning(step)
        loss.backward()
        return {"loss": loss.item()}

    def validate(self) -> Record:
        return {"held_out": 1.0}


def saved(out: Path) -> dict[str, object]:
    return torch.load(out / CHECKPOINT, weights_only=True)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_the_first_loss_that_is_not_finite_ends_the_training_and_the_checkpoint_stays(tmp_path: Path, factor: float) -> None:
    class Breaking(Line):
        def learning(self, step: int) -> float:
            return factor if step == 4 else 1.0

    with pytest.raises(UserError, match=r"the loss of step 5 is not a finite number at a learning rate of 0\.1"):
        train(Breaking(), tmp_path, checkpoint_every=3)
    assert saved(tmp_path)["step"] == 3
    assert train(Line(), tmp_path, checkpoint_every=3), "goes on from there"


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a finite number"):
        train(Line(rate=float("inf")), tmp_path, checkpoint_every=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK", bytes(1000), None, "other"])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path, content: bytes | str | None) -> None:
    train(Line(), tmp_path, checkpoint_every=3, stop_at=3)
    file = tmp_path / CHECKPOINT
    if content == "other":
        torch.save({"recipe": {"name": "a"}, "weights": [1]}, file)
    else:
        file.write_bytes(file.read_bytes()[:-100] if content is None else content)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is damaged"):
        train(Line(), tmp_path, checkpoint_every=3)


def test_every_flipped_byte_is_resumed_or_refused(tmp_path: Path) -> None:
    train(Line(), tmp_path, checkpoint_every=3, stop_at=3)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    for place in range(0, len(whole), 41):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        (tmp_path / CHECKPOINT).write_bytes(broken)
        with suppress(UserError):
            train(Line(), tmp_path, checkpoint_every=100)


def test_another_recipe_is_not_resumed(tmp_path: Path) -> None:
    train(Line(), tmp_path, checkpoint_every=3, stop_at=3)
    with pytest.raises(UserError, match="another recipe"):
        train(Line("b"), tmp_path, checkpoint_every=3)


def test_ctrl_c_ends_after_a_whole_step_with_a_checkpoint_from_which_training_goes_on_exactly(tmp_path: Path) -> None:
    class Interrupted(Line):
        def learning(self, step: int) -> float:
            if step == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return 1.0

    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(), tmp_path / "broken", checkpoint_every=100)
    assert saved(tmp_path / "broken")["step"] == 2
    for run in ("broken", "straight"):
        assert train(Line(), tmp_path / run, checkpoint_every=100)
    histories = [json.loads((tmp_path / run / "history.json").read_text()) for run in ("broken", "straight")]
    losses = [[record["loss"] for record in history] for history in histories]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_held_out_data_is_measured_at_its_steps_and_at_the_last(tmp_path: Path) -> None:
    train(Line(), tmp_path, checkpoint_every=100, stop_at=5)
    history = json.loads((tmp_path / "history.json").read_text())
    assert [record["step"] for record in history if "held_out" in record] == [3, 5]


def test_a_checkpoint_that_finds_no_room_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(Line(), tmp_path, checkpoint_every=3, stop_at=3)

    def half_written(_: object, part: Path) -> None:
        part.write_bytes(b"PK")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.save", half_written)
    with pytest.raises(UserError, match=r"cannot be written \(the disk is full\)"):
        train(Line(), tmp_path, checkpoint_every=3)
    assert saved(tmp_path)["step"] == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint.pt", "history.json"]
