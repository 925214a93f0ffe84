"""EdgeXpert: mixture-of-experts language models with speculative decoding, moving as few weight bytes as possible.

    engine = edgexpert.load("stories", policy="edgexpert")
    print(engine.generate("Once upon a time, a little fox").text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgexpert.runtime.api import attach, load
    from edgexpert.speculation.draft import TreeShape
    from edgexpert.speculation.sampling import SamplingParams

__all__ = ["SamplingParams", "TreeShape", "attach", "load"]

_HOMES = {
    "attach": "edgexpert.runtime.api", "load": "edgexpert.runtime.api", "SamplingParams": "edgexpert.speculation.sampling",
    "TreeShape": "edgexpert.speculation.draft",
}


def __getattr__(name: str) -> Any:
    """Loads PyTorch and transformers only when they are needed: the command line answers ``--help`` at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgexpert' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
