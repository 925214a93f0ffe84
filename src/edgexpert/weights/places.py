"""From a model's name to where it lies: bundled, a folder or file, or the cache of the Hugging Face Hub.

Nothing here imports PyTorch.
"""

from __future__ import annotations

from pathlib import Path

from edgexpert.core.errors import UserError
from edgexpert.core.resources import BUNDLED, bundled_folder


def is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def local_folder(name: str) -> Path | None:
    """The folder that a model name stands for; None for a name of the Hub.

    Raises:
        UserError: the name leads nowhere, or to something that is no checkpoint.
    """
    if name in BUNDLED:
        folder = bundled_folder(name)
        if not folder.is_dir():
            raise UserError(f"the bundled model {name} is not part of this installation; reinstall edgexpert")
        return folder
    if not name.strip():
        raise UserError(f"the model's name is empty; give a bundled name ({', '.join(BUNDLED)}), a folder, or a Hub name")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"the model folder {name} has no config.json; give a folder that holds a Hugging Face checkpoint")
        return path
    if path.exists():
        raise UserError(f"the model {name} is a file; give the folder that holds config.json and the safetensors files")
    if not is_hub_name(name):
        raise UserError(
            f"there is no model {name!r}: give a bundled name ({', '.join(BUNDLED)}), a folder, or a Hub name like owner/name"
        )
    return None


def cached_folder(name: str) -> Path | None:
    """The snapshot of a Hub name in the cache; None where there is none."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def cached_names() -> list[str]:
    """Names of the models in the cache of the Hub, without a look at their files."""
    from huggingface_hub import constants

    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
