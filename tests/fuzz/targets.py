"""What is fuzzed: a tiny valid folder, the file in it that is changed, and what then reads it.

Whatever a file holds, reading it ends with a sane result or a `UserError`: with no other exception, within `SECONDS`, and with
at most `MEMORY` more than before. Cases run in a process of their own, which a crash or the alarm may end.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from edgexpert.core.errors import UserError
from tests.fuzz import mutate

SECONDS, MEMORY = 60, 4 << 30


@dataclass(frozen=True)
class Target:
    """Attributes:
        file: the one that is changed.
        make: fills an empty folder.
        mutate: its bytes, changed.
        read: reads the folder; raises AssertionError where the result is none that could be.
    """

    file: str
    make: Callable[[Path], None]
    mutate: Callable[[bytes, Random], bytes]
    read: Callable[[Path], None]


def make_device(folder: Path) -> None:
    from edgexpert.core.resources import PACKAGE

    shutil.copyfile(PACKAGE / "simulator" / "devices" / "edgexpert.toml", folder / "device.toml")


def read_device(folder: Path) -> None:
    from edgexpert.simulator.device import load_device
    from edgexpert.simulator.shapes import model_named
    from edgexpert.trace.cases import Dense, dense_case

    case = dense_case(model_named("granite-1b-a400m"), load_device(str(folder / "device.toml")), Dense(prompt=4, stages=1))
    result = case.run()
    assert 0 < result.latency < float("inf") and 0 <= result.joules < float("inf")


def make_trace(folder: Path) -> None:
    import edgexpert
    from edgexpert.speculation.draft import TreeShape
    from edgexpert.speculation.sampling import SamplingParams
    from edgexpert.trace.record import record_trace

    record_trace(edgexpert.load("stories"), ["the fox"], folder / "t.parquet", SamplingParams(max_new_tokens=2),
                 TreeShape(size=2, depth=2))


def read_trace(folder: Path) -> None:
    from edgexpert.simulator.device import load_device
    from edgexpert.trace.cases import trace_case

    result = trace_case(folder / "t.parquet", load_device("edgexpert"), model="stories").run()
    assert 0 < result.latency < float("inf")


def make_checkpoint(folder: Path) -> None:
    from tests.conftest import make_model, make_tokenizer

    make_model("olmoe", num_hidden_layers=1, intermediate_size=32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_packed(folder: Path) -> None:
    from edgexpert.conversion.convert import convert
    from edgexpert.conversion.options import PackOptions
    from edgexpert.conversion.sources.opening import open_source

    make_checkpoint(folder / "source")
    convert(open_source(str(folder / "source")), folder / "packed", PackOptions(4, 32, "rtn", False, {}))
    shutil.rmtree(folder / "source")


def read_model(folder: Path) -> None:
    import edgexpert
    from edgexpert.simulator.shapes import model_named

    text = edgexpert.load(str(folder), draft="none").generate("ab", max_new_tokens=2).text
    assert isinstance(text, str)
    assert sum(model_named(str(folder)).parameters().values()) > 0


def read_shape(folder: Path) -> None:
    from edgexpert.simulator.device import load_device
    from edgexpert.simulator.shapes import model_named
    from edgexpert.trace.cases import Dense, dense_case

    result = dense_case(model_named(str(folder)), load_device("edgexpert"), Dense(prompt=4, stages=1, candidates=0)).run()
    assert 0 < result.latency < float("inf")


def make_gguf(folder: Path) -> None:
    from tests.conftest import make_model
    from tests.conversion.gguf_files import write_gguf

    write_gguf(make_model("olmoe", num_hidden_layers=1, intermediate_size=32), folder / "model.gguf")


def read_gguf(folder: Path) -> None:
    from edgexpert.conversion.convert import convert
    from edgexpert.conversion.options import PackOptions
    from edgexpert.conversion.sources.opening import open_source

    place = folder / "packed"
    try:
        manifest = convert(open_source(str(folder / "model.gguf")), place, PackOptions(4, 32, "rtn", False, {}))
        assert manifest.layers
    finally:
        for left in folder.glob("packed*"):
            shutil.rmtree(left)


TARGETS = {
    "device": Target("device.toml", make_device, mutate.toml_of, read_device),
    "trace": Target("t.parquet", make_trace, mutate.bytes_of, read_trace),
    "shape": Target("config.json", make_checkpoint, mutate.json_of, read_shape),
    "config": Target("config.json", make_checkpoint, mutate.json_of, read_model),
    "safetensors": Target("model.safetensors", make_checkpoint, mutate.safetensors_of, read_model),
    "gguf": Target("model.gguf", make_gguf, partial(mutate.bytes_of, within=6000), read_gguf),
    "manifest": Target("packed/manifest.json", make_packed, mutate.json_of, lambda folder: read_model(folder / "packed")),
    "packed-config": Target("packed/config.json", make_packed, mutate.json_of, lambda folder: read_model(folder / "packed")),
}


class Fuzzer:
    """Runs cases of one target. A context manager."""

    def __init__(self, name: str) -> None:
        self.name, self.target = name, TARGETS[name]

    def __enter__(self) -> Fuzzer:
        self._folder = tempfile.TemporaryDirectory()
        self.target.make(Path(self._folder.name))
        self._whole = (Path(self._folder.name) / self.target.file).read_bytes()
        self._pool: ProcessPoolExecutor | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._folder.cleanup()

    def run(self, seed: int | None) -> str:
        """What became of a case: "accepted", "refused", or else what went wrong. None for the file as it is."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _limit, (self.name, self._folder.name))
        data = self._whole if seed is None else self.target.mutate(self._whole, Random(seed))
        try:
            return self._pool.submit(_attempt, self.name, self._folder.name, data).result()
        except BrokenProcessPool:
            self._pool = None
            return f"crashed, or had no answer in {SECONDS} seconds"


def _limit(name: str, folder: str) -> None:
    """Once for each process: imports and the first run do not count."""
    TARGETS[name].read(Path(folder))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _attempt(name: str, folder: str, data: bytes) -> str:
    file = Path(folder) / TARGETS[name].file
    whole = file.read_bytes()
    signal.alarm(SECONDS)
    try:
        file.write_bytes(data)
        TARGETS[name].read(Path(folder))
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"a message of several lines: {error}"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        file.write_bytes(whole)
    return "accepted"
