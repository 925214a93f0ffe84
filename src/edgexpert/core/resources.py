"""Where the files lie that come with the package."""

from pathlib import Path

# Not importlib.resources: where the package is installed to be edited, that has two folders for it and no path.
PACKAGE = Path(__file__).parents[1]

PUBLISHED = PACKAGE / "published"
"""Configurations of published models and their drafts, as far as shapes and speed go."""
MODELS = ("granite-1b-a400m", "olmoe-1b-7b", "deepseek-v2-lite", "qwen3-30b-a3b")
"""The models in `PUBLISHED`: the four of the EdgeXpert paper (Table III)."""

BUNDLED = ("stories",)
"""Names of the models that come with the package, weights and all."""


def bundled_folder(name: str) -> Path:
    """Folder of a model that comes with the package."""
    return PACKAGE / "models" / name
