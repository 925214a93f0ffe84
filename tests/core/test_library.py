"""Every private name of transformers stands in one module, which says what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "edgexpert"
PRIVATE = re.compile(
    r"transformers\.(cache_utils|conversion_mapping|core_model_loading|integrations\.moe|masking_utils|modeling_\w+)\b"
    r"|\b_attn_implementation|\b_experts_implementation|\b_apply_gate|all_tied_weights_keys|_non_persistent_buffers_set"
    r"|\b_init_weights|_is_hf_initialized|_is_expert_parallel"
)


def test_no_other_module_names_what_is_private() -> None:
    found = [f"{path.relative_to(SOURCES)}: {match[0]}" for path in sorted(SOURCES.rglob("*.py"))
             if path.name != "library.py" for match in PRIVATE.finditer(path.read_text())]
    assert not found


@pytest.mark.parametrize("removed", [
    "import transformers.masking_utils as m; from transformers import PreTrainedModel; del m.causal_mask_function",
    "from transformers import PreTrainedModel as m; del m.set_experts_implementation",
])
def test_a_version_without_one_of_them_is_named(removed: str) -> None:
    name = removed.rpartition(".")[2]
    code = (f"{removed}\ntry:\n    import edgexpert.core.library\n"
            "except Exception as error:\n    print(type(error).__name__, error)")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("UserError the installed transformers ") and name in said and "\n" not in said.strip()
