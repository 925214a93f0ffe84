"""Putting a trained model into the package: 8-bit weights, tokenizer, held-out texts, and the draft beside it.

    python -m edgexpert.training.bundle RUN CORPUS [DRAFT]

RUN is the ``--out`` of `edgexpert train model`, CORPUS its corpus, DRAFT the ``--out`` of `edgexpert train draft`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from edgexpert.model.bundled import save_packed
from edgexpert.model.loading import bundled_folder
from edgexpert.speculation.loading import BESIDE_MODEL
from edgexpert.training.corpus import documents, is_held_out

HELD_OUT_FILES = {"tinystories_sample.txt": 40, "synthetic_fables_permissive.txt": 20}


def bundle(run: Path, corpus: Path, draft: Path | None, out: Path) -> None:
    """Writes the package's copy of a trained model to ``out``; an earlier draft stays when none is given."""
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    save_packed(model, out)
    AutoTokenizer.from_pretrained(run / "model").save_pretrained(out)
    shutil.copyfile(run / "history.json", out / "history.json")
    with (out / "held_out.jsonl").open("w", encoding="utf-8") as file:
        for name, count in HELD_OUT_FILES.items():
            held_out = [text for text in documents(corpus / name) if is_held_out(text) and len(text) > 1000]
            for text in dict.fromkeys(held_out[:count]):
                file.write(json.dumps({"source": name, "text": text}, ensure_ascii=False) + "\n")
    if draft is not None:
        shutil.rmtree(out / BESIDE_MODEL, ignore_errors=True)
        shutil.copytree(draft, out / BESIDE_MODEL)


if __name__ == "__main__":
    bundle(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None, bundled_folder("stories"))
