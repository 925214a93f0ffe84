"""Which code computes: forced, refused, absent, and AVX-512 and Arm by emulation."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgexpert.kernels import native

ROOT = Path(__file__).parents[2]

PRINT_RESULT = """
import hashlib, torch
from edgexpert.kernels import native
from edgexpert.weights.rounding import quantise
torch.manual_seed(0)
matrix, x = quantise(torch.randn(256, 200), 4, 32), torch.randn(9, 256)
print(native.path(), hashlib.sha256(native.linear(x, matrix).numpy().tobytes()).hexdigest())
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_every_path_can_be_forced_and_computes_the_same() -> None:
    digests = set()
    for path in native.available():
        result = run(PRINT_RESULT, EDGEXPERT_KERNELS=path)
        assert result.returncode == 0, result.stderr
        used, digest = result.stdout.split()
        assert used == path
        digests.add(digest)
    assert len(digests) == 1


def test_a_path_that_the_processor_lacks_and_an_unknown_one_are_refused() -> None:
    refused = [path for path in native.PATHS[1:] if path not in native.available()]
    for path in [*refused, "sse9"]:
        result = run(PRINT_RESULT, EDGEXPERT_KERNELS=path)
        assert "UserError: EDGEXPERT_KERNELS" in result.stderr
        assert path in result.stderr


def test_without_the_extension_torch_computes_and_says_so() -> None:
    absent = "import sys; sys.modules['edgexpert.kernels._native'] = None\n"
    result = run(absent + PRINT_RESULT, EDGEXPERT_KERNELS="auto")
    assert result.stdout.startswith("torch "), result.stderr
    result = run(absent + PRINT_RESULT, EDGEXPERT_KERNELS="portable")
    assert "installed without a compiler" in result.stderr


@pytest.mark.skipif(
    not Path("/usr/include/simde").exists() or not shutil.which("cmake") or importlib.util.find_spec("nanobind") is None,
    reason="needs SIMDe, CMake and nanobind",
)
def test_avx512_by_emulation_passes_the_tests_of_the_kernels(tmp_path: Path) -> None:
    options = ["-DEDGEXPERT_EMULATE_AVX512=ON", f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path, "--parallel", "2"], check=True, capture_output=True)
    (extension,) = tmp_path.glob("_native*.so")
    chosen = "avx512 or any_shape or same_bits"  # the other paths need no emulation
    command = [sys.executable, "-m", "tests.kernels.another_build", extension, "-q", "-k", chosen, "tests/kernels/test_native.py"]
    result = subprocess.run(command, env=os.environ | {"EDGEXPERT_KERNELS": "avx512"}, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")


@pytest.mark.skipif(not all(map(shutil.which, ("g++", *ARM))), reason=f"needs g++, {' and '.join(ARM)}")
def test_arm_computes_the_same_bits_by_emulation(tmp_path: Path) -> None:
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-trapping-math", "-pthread", "-DEDGEXPERT_NEON"]
    sources = [f"csrc/{name}.cpp" for name in ("kernels", "dense", "select", "pool", "dispatch", "isa_portable")]
    driver = ["tests/kernels/same_bits.cpp", *sources]

    def compile_with(*command: str) -> None:
        subprocess.run(command, check=True, cwd=ROOT)

    def results(*command: str) -> dict[str, list[str]]:
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        parts = [part.split("\n") for part in printed.split("isa ")[1:]]
        return {name: lines for name, *lines in parts}

    here, arm, neon = (str(tmp_path / name) for name in ("here", "arm", "neon.o"))
    compile_with("g++", *options, "-UEDGEXPERT_NEON", *driver, "-o", here)
    compile_with(ARM[0], *options, "-march=armv8.2-a+dotprod", "-c", "csrc/isa_neon.cpp", "-o", neon)
    compile_with(ARM[0], *options, *driver, neon, "-static", "-o", arm)

    expected = results(here)["portable"]
    assert len(expected) > 190
    assert results(ARM[1], arm) == {"neon": expected, "portable": expected}
    assert results(ARM[1], "-cpu", "cortex-a53", arm) == {"portable": expected}, "this processor has no dot product"


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles the kernels of x86")
def test_clang_compiles_the_kernels() -> None:
    flags = {
        "isa_avx2": ["-mavx2", "-mf16c"],
        "isa_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"],
    }
    options = ["-std=c++20", "-fsyntax-only", "-Wall", "-DEDGEXPERT_AVX2", "-DEDGEXPERT_AVX512"]
    for source in sorted((ROOT / "csrc").glob("*.cpp")):
        if source.stem not in ("module", "isa_neon"):
            subprocess.run(["clang++", *options, *flags.get(source.stem, []), source], check=True)
    if shutil.which(ARM[0]):  # brings the headers of Arm
        arm = ["--target=aarch64-linux-gnu", "-march=armv8.2-a+dotprod", "-std=c++20", "-fsyntax-only", "-DEDGEXPERT_NEON"]
        for name in ("isa_neon", "isa_portable", "dispatch", "dense"):
            subprocess.run(["clang++", *arm, ROOT / "csrc" / f"{name}.cpp"], check=True)
