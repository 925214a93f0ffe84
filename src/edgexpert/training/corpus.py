"""Text to tokens: reading a corpus, holding documents out, training a tokenizer, drawing reproducible batches.

A corpus is a folder of UTF-8 text files: one paragraph a line, documents ended by a line ``<|endoftext|>``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from edgexpert.core.errors import UserError
from edgexpert.core.output import output_file, writing

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_ONE_IN = 50


@contextmanager
def reading_text(path: Path) -> Iterator[None]:
    """Raises UserError where ``path`` cannot be read as text."""
    try:
        yield
    except UnicodeError:
        raise UserError(f"the file {path} is not UTF-8 text; convert it first") from None
    except OSError as error:
        raise UserError(f"the file {path} cannot be read ({error.strerror}); give a text file that can") from None


def documents(path: Path) -> Iterator[str]:
    """Documents of one corpus file, without the end marker.

    Raises:
        UserError: there is no such file, or it cannot be read as UTF-8 text.
    """
    if not path.is_file():
        raise UserError(f"the corpus file {path} does not exist; give the folder that holds it as `corpus`")
    lines: list[str] = []
    with reading_text(path), path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip() == END_OF_TEXT:
                if lines:
                    yield "".join(lines).strip()
                lines = []
            else:
                lines.append(line)
    if any(line.strip() for line in lines):
        yield "".join(lines).strip()


def is_held_out(document: str) -> bool:
    """Whether a document is never trained on. Decided by its content, so that a copy elsewhere is held out too."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits and one special token, ``<|endoftext|>``, which begins every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    start = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, start)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def encode(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All documents as one stream of token ids, each behind an end-of-text token; uint16 [N]."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    pieces: list[np.ndarray] = []
    batch: list[str] = []

    def flush() -> None:
        for ids in tokenizer(batch, return_attention_mask=False)["input_ids"] if batch else []:
            pieces.append(np.array(ids, dtype=np.uint16))  # the end-of-text token stands first
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == 512:
            flush()
    flush()
    pieces.append(np.array([end], dtype=np.uint16))
    return np.concatenate(pieces)


@dataclass(frozen=True)
class Mixture:
    """Token streams by domain, from which batches are drawn."""

    streams: Mapping[str, np.ndarray]

    def batch(self, step: int, seed: int, shares: Mapping[str, float], sequences: int, length: int) -> torch.Tensor:
        """Token ids [sequences, length + 1] of one step. A pure function of its arguments, so that resuming is exact."""
        rng = np.random.default_rng((seed, step))
        names = sorted(shares)
        weights = np.array([shares[name] for name in names])
        rows = []
        for domain in rng.choice(len(names), size=sequences, p=weights / weights.sum()):
            stream = self.streams[names[domain]]
            start = rng.integers(0, len(stream) - length - 1)
            rows.append(stream[start : start + length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def prepare(
    corpus: Path,
    domains: Mapping[str, Sequence[str]],
    vocab_size: int,
    out: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[PreTrainedTokenizerBase, Mixture, dict[str, np.ndarray]]:
    """Tokenizer, training mixture and held-out streams of a corpus, made once and kept under ``out``.

    Args:
        tokenizer: use this one instead of training one.
    """
    tokenizer_dir, tokens_file = out / "tokenizer", out / "tokens.npz"
    if tokens_file.exists():
        tokenizer, tokens = _kept(tokenizer_dir, tokens_file)
    else:
        def texts(name: str, held_out: bool) -> Iterator[str]:
            return (d for file in domains[name] for d in documents(corpus / file) if is_held_out(d) == held_out)

        def tokenizer_sample() -> Iterator[str]:
            for name in domains:
                read = 0
                for text in texts(name, held_out=False):
                    yield text
                    read += len(text)
                    if read > 12_000_000:  # every domain weighs alike in the vocabulary, however large it is
                        break

        if tokenizer is None:
            tokenizer = train_tokenizer(tokenizer_sample(), vocab_size)
        tokens = {f"{name}/{part}": encode(texts(name, part == "held_out"), tokenizer)
                  for name in domains for part in ("train", "held_out")}
        out.mkdir(parents=True, exist_ok=True)
        with writing(out):
            tokenizer.save_pretrained(tokenizer_dir)
        with output_file(tokens_file) as part, part.open("wb") as file:
            np.savez(file, **tokens)  # type: ignore[arg-type]  # numpy: allow_pickle could be among them
    train = {name: tokens[f"{name}/train"] for name in domains}
    held_out = {name: tokens[f"{name}/held_out"] for name in domains}
    return tokenizer, Mixture(train), held_out


def _kept(tokenizer: Path, tokens: Path) -> tuple[PreTrainedTokenizerBase, dict[str, np.ndarray]]:
    try:
        return PreTrainedTokenizerFast.from_pretrained(tokenizer), dict(np.load(tokens))
    except Exception as error:  # whatever damaged files make the readers stumble over
        raise UserError(f"what an earlier training left in {tokens.parent} is damaged ({type(error).__name__}); give an empty "
                        "folder, or remove this one") from error
