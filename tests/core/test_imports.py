"""No module imports another that imports it, in whatever way: `TYPE_CHECKING` imports and those within functions count."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def imports() -> dict[str, set[str]]:
    graph = grimp.build_graph("edgexpert", exclude_type_checking_imports=False, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def test_modules_import_one_another_in_no_circle() -> None:
    found = imports()
    assert len(found) > 100
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_imports_for_type_checking_count() -> None:
    assert "edgexpert.reproduce.workbench" in imports()["edgexpert.reproduce.make"], "it is imported for type checking"
