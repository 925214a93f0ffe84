"""The one training loop: resumable, stopped by Ctrl-C after a whole step, and by the first loss that is not finite.

Runs resume exactly: a batch is a function of the step, and a checkpoint holds weights, optimiser, step and history.
"""

from __future__ import annotations

import ctypes
import json
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from edgexpert.core.errors import UserError
from edgexpert.core.output import output_file

CHECKPOINT, HISTORY = "checkpoint.pt", "history.json"

Record = dict[str, Any]
"""How a step went, as JSON holds it; its ``loss`` is a number, or a list of them."""


class Trainer(ABC):
    """What the loop trains.

    Attributes:
        network: whose parameters that need gradients learn.
        optimizer: over those.
        steps: of the whole training.
        recipe: what a checkpoint must agree in to be resumed.
        clip: the largest norm of the gradients.
        record_every: steps between records that are kept; those with a validation always are.
        validate_every: steps between validations; the last step always has one.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    recipe: Mapping[str, Any]
    clip: float = 1.0
    record_every: int = 1
    validate_every: int = 500

    def begin(self, step: int) -> None:  # noqa: B027  # most have nothing to do
        """Before each step; may exchange network and optimiser."""

    @abstractmethod
    def rate(self, step: int) -> float:
        """Learning rate of a step."""

    @abstractmethod
    def learn(self, step: int) -> Record:
        """Backpropagates the loss of the step's batch."""

    def validate(self) -> Record:
        """What is measured on held-out data."""
        return {}

    def note(self, record: Record) -> str:
        """What the progress bar shows of a step."""
        return f"loss {record['loss']:.3f}"

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the network."""
        return self.network.state_dict()

    def shape(self) -> dict[str, Any]:
        """What `restore` needs to know besides the weights."""
        return {}

    def restore(self, shape: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Takes over what `shape` and `weights` gave."""
        self.network.load_state_dict(weights)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]


def has_checkpoint(out: Path) -> bool:
    return (out / CHECKPOINT).exists()


def train(trainer: Trainer, out: Path, *, checkpoint_every: int, first: int = 0, stop_at: int | None = None) -> bool:
    """Trains, resuming from ``out`` when it holds a checkpoint. Records are kept in ``out/history.json``.

    Args:
        first: the step to begin with where there is no checkpoint.
        stop_at: stop after this many steps, with a checkpoint, as an interruption would.

    Returns whether the last step is done.

    Raises:
        UserError: the checkpoint is damaged or of another recipe, the disk is full, or a loss is not finite; the checkpoint
            is then as it was.
        KeyboardInterrupt: after the step in which Ctrl-C was pressed, with a checkpoint; at once when it is pressed twice.
    """
    keep_freed_memory()
    out.mkdir(parents=True, exist_ok=True)
    step, history = _resumed(trainer, out) if has_checkpoint(out) else (first, [])
    assert _finite(trainer.network.parameters()), "a weight was not initialised"
    last = min(trainer.steps, stop_at or trainer.steps)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[note]}"))
    with Progress(*columns) as progress, _interrupts_held() as interrupted:
        task = progress.add_task("training", total=trainer.steps, completed=step, note="")
        while step < last:
            record = _step(trainer, step, out)
            step += 1
            validated = step % trainer.validate_every == 0 or step == last
            if validated:
                record |= trainer.validate()
            if validated or step % trainer.record_every == 0:
                history.append(record)
            if step % checkpoint_every == 0 or step == last or interrupted():
                _save(trainer, out, step, history)
            progress.update(task, advance=1, note=trainer.note(record))
            if interrupted():
                raise KeyboardInterrupt
    return step == trainer.steps


def _step(trainer: Trainer, step: int, out: Path) -> Record:
    started = time.perf_counter()
    trainer.begin(step)
    rate, trained = trainer.rate(step), trainer.trained
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    device = trained[0].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu" or fast_bfloat16()):
        record = trainer.learn(step)
    norm = float(torch.nn.utils.clip_grad_norm_(trained, trainer.clip))
    if not np.isfinite([*np.atleast_1d(record["loss"]), norm]).all():
        raise _not_finite("loss", step, rate, out)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return {"step": step + 1, **record, "rate": rate, "gradient": norm, "seconds": time.perf_counter() - started}


def _not_finite(what: str, step: int, rate: float, out: Path) -> UserError:
    kept = (f"the checkpoint in {out} is one from before" if has_checkpoint(out) else "there is no checkpoint yet")
    return UserError(f"the {what} of step {step + 1} is not a finite number at a learning rate of {rate:g}, so the training "
                     f"stops; {kept}: try a smaller learning rate, or check the text")


def _resumed(trainer: Trainer, out: Path) -> tuple[int, list[Record]]:
    """Puts the trainer where the checkpoint in ``out`` left it: steps done, and their records."""
    file = out / CHECKPOINT
    try:
        saved = torch.load(file, weights_only=True, map_location="cpu")
        if saved["recipe"] != _as_json(trainer.recipe):
            raise UserError(f"the folder {out} holds a training by another recipe; resume with the same options, or give "
                            "another folder")
        trainer.restore(saved["shape"], saved["weights"])
        if not _finite(trainer.network.parameters()):
            raise ValueError("weights that are no numbers")
        trainer.optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"]), list(saved["history"])
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"the checkpoint {file} cannot be read ({error.strerror}); make it readable") from None
    except Exception as error:  # whatever a damaged file makes the readers stumble over
        raise UserError(f"the checkpoint {file} is damaged, or of another version ({type(error).__name__}); remove it to "
                        "begin anew") from error


def _finite(parameters: Iterable[Tensor]) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in parameters)


def _save(trainer: Trainer, out: Path, step: int, history: list[Record]) -> None:
    if not _finite(trainer.trained):
        raise _not_finite("result", step - 1, trainer.rate(step - 1), out)
    with output_file(out / CHECKPOINT) as part:
        torch.save({"weights": trainer.weights(), "shape": trainer.shape(), "optimizer": trainer.optimizer.state_dict(),
                    "step": step, "history": history, "recipe": _as_json(trainer.recipe)}, part)
    with output_file(out / HISTORY) as part:
        part.write_text(json.dumps(history, indent=0))


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits until it is asked about. A second one does not wait; one in another thread has no handler."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def hold(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def keep_freed_memory() -> None:
    """Tells glibc to keep freed activations: giving them back and faulting them in again takes a third of a step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except OSError:
        pass  # another C library


def fast_bfloat16() -> bool:
    """Whether this CPU has a unit for bfloat16 products; without one they take ten times as long as float32 ones."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16", False) or has.get("avx512_bf16", False))
