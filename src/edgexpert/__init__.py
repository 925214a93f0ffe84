"""EdgeXpert: mixture-of-experts language models with speculative decoding, moving as few weight bytes as possible.

    engine = edgexpert.load("stories", policy="edgexpert")
    print(engine.generate("Once upon a time, a little fox").text)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgexpert.runtime.api import attach, load

__all__ = ["attach", "load"]


def __getattr__(name: str) -> Any:
    """Loads PyTorch and transformers only when they are needed: the command line answers ``--help`` at once."""
    if name in __all__:
        from edgexpert.runtime import api

        return getattr(api, name)
    raise AttributeError(f"module 'edgexpert' has no attribute {name!r}")
