"""Runs pytest on another build of the native kernels: python -m tests.kernels.another_build EXTENSION ARGUMENTS."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import edgexpert.kernels

NAME = "edgexpert.kernels._native"

if __name__ == "__main__":
    extension, *arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(NAME, extension)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    edgexpert.kernels._native = sys.modules[NAME] = module  # type: ignore[attr-defined]
    sys.exit(pytest.main(["-p", "no:cacheprovider", *arguments]))
