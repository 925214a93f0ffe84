"""`edgexpert train`: the bundled model again, or a draft for a model of your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from edgexpert.cli.options import MODEL_HELP, Device, Dtype
from edgexpert.cli.show import print_line
from edgexpert.core.errors import UserError
from edgexpert.core.output import output_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from edgexpert.runtime.engine import Engine
    from edgexpert.speculation.draft import Draft
    from edgexpert.training.examples import Source

app = typer.Typer(help="Train a bundled model again, or a draft for any model.", no_args_is_help=True)
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results.")]

T = TypeVar("T")
M = TypeVar("M")

VALIDATION_ONE_IN = 50
VALIDATION_PROMPTS = 8
VALIDATION_TOKENS = 64


@app.command()
def model(
    corpus: Annotated[Path, typer.Option(metavar="DIR", help="Folder with the corpus's text files.")],
    out: Out,
    recipe: Annotated[str, typer.Option(metavar="NAME", help="What to train.")] = "stories",
    start: Annotated[
        str | None, typer.Option(metavar="NAME", help="Begin with the weights of this model.", show_default=False)
    ] = None,
    at_step: Annotated[int, typer.Option(min=0, help="With --start: the recipe's step that its weights stand for.")] = 0,
) -> None:
    """Train a bundled model again, from its recipe. An interrupted training goes on from the checkpoint in --out."""
    from edgexpert.training.model import train_model
    from edgexpert.training.recipes import RECIPES

    if recipe not in RECIPES:
        raise UserError(f"there is no recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
    begin = None if start is None else (start, at_step)
    with output_folder(out) as place:
        print_line(f"saved in {train_model(RECIPES[recipe], corpus, place, start=begin)}")


@app.command()
def draft(
    model: Annotated[str, typer.Option(metavar="NAME", help=f"The target. {MODEL_HELP}")],
    out: Out,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Train a bundled draft again, on --corpus.", show_default=False)
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with the text files of --recipe.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, show_default=False,
                     help="Plain text, documents ended by a line <|endoftext|>; may be given several times."),
    ] = None,
    chats: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, show_default=False,
                     help='JSON lines with "messages", for the model\'s chat template.'),
    ] = None,
    regenerate: Annotated[bool, typer.Option(help="Learn what the target itself writes after prompts of the text.")] = True,
    sequences: Annotated[int, typer.Option(min=1, help="Training sequences at most, of --text or --chats.")] = 4000,
    length: Annotated[int, typer.Option(min=32, help="Tokens of a sequence, of --text or --chats.")] = 256,
    steps: Annotated[int | None, typer.Option(help="Training steps. [default: 2000]", show_default=False)] = None,
    ttt: Annotated[int | None, typer.Option(help="Steps of the training-time test. [default: 7]", show_default=False)] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Tokens that the draft can propose. [default: all]", show_default=False)
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Its peak. [default: 0.001]", show_default=False)
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(metavar="DIR", exists=True, file_okay=False, show_default=False,
                     help="Begin with the weights of this EAGLE-3 draft, of an earlier version of the target, say."),
    ] = None,
    kind: Annotated[Literal["eagle3", "medusa"], typer.Option(help="EAGLE-3, or --ttt Medusa heads.")] = "eagle3",
    format: Annotated[Literal["official", "speculators"], typer.Option(help="Layout of the finished draft.")] = "official",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    dtype: Dtype = None,
    device: Device = "cpu",
) -> None:
    """Train a draft for a model, on what the model itself writes. With --recipe, options beside it override its own values."""
    if kind == "medusa" and format != "official":
        raise UserError("only EAGLE-3 drafts can be written in the speculators format; leave --format out")
    if kind == "medusa" and start is not None:
        raise UserError("only the training of an EAGLE-3 draft can begin from another one; leave --start out")
    if (recipe is None) != (corpus is None):
        raise UserError("--recipe and --corpus belong together; give both, or neither")
    if [text, chats, corpus].count(None) != 2:
        raise UserError("give the training data either as --text files, or as a --chats file, or by --recipe and --corpus")
    from edgexpert.runtime.api import load
    from edgexpert.speculation.eagle3_draft import Eagle3Draft
    from edgexpert.speculation.medusa import MedusaDraft
    from edgexpert.training.capture import capture
    from edgexpert.training.draft import RECIPES, stories_data, train_draft
    from edgexpert.training.loop import has_checkpoint
    from edgexpert.training.medusa import train_medusa
    from edgexpert.training.recipes import DraftRecipe

    if recipe is not None and recipe not in RECIPES:
        raise UserError(f"there is no recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
    chosen: dict[str, Any] = {"steps": steps, "ttt": ttt, "draft_vocab": draft_vocab, "learning_rate": learning_rate}
    base = DraftRecipe() if recipe is None else RECIPES[recipe]
    settings = replace(base, **{name: value for name, value in chosen.items() if value is not None})
    if has_checkpoint(out) and not resume:
        raise UserError(f"the folder {out} holds an unfinished training; add --resume to go on with it, or give another folder")
    if resume and not has_checkpoint(out):
        raise UserError(f"the folder {out} holds no training to resume; leave --resume out")
    with output_folder(out) as place:
        engine = load(model, draft="none", dtype=dtype or "float32", device=device)
        source, held_out = (stories_data(corpus, engine.tokenizer) if corpus is not None else
                            training_data(engine.tokenizer, text, chats, regenerate, sequences, length))
        prompts = [str(engine.tokenizer.decode(ids, skip_special_tokens=True)) for ids in held_out[:VALIDATION_PROMPTS]]
        target, states = engine.host.model, place / "states"
        capture(target, source, states)
        if kind == "medusa":
            folder = train_medusa(target, settings, states, place, evaluate=acceptance_length(engine, MedusaDraft, prompts))
        else:
            evaluate = acceptance_length(engine, Eagle3Draft, prompts)
            folder = train_draft(target, settings, states, place, start=start, evaluate=evaluate, format=format)
    print_line(f"saved in {folder}; use it with --draft {folder}")


def training_data(
    tokenizer: PreTrainedTokenizerBase,
    text: list[Path] | None,
    chats: Path | None,
    regenerate: bool,
    sequences: int,
    length: int,
) -> tuple[Source, Sequence[Tensor]]:
    """What the draft learns, and prompts that it does not learn."""
    from edgexpert.training import examples
    from edgexpert.training.corpus import documents

    texts = chain.from_iterable(map(documents, text or ()))
    prompts: Sequence[Tensor]
    source: Source
    if regenerate:
        prompts = (examples.chat_prompts(chats, tokenizer, longest=length - 1)[:sequences] if chats is not None else
                   examples.text_prompts(texts, tokenizer, (length // 16, length // 4, length // 2), length, sequences))
        held_out, learned = _split(prompts)
        source = examples.Continuations(learned, length, chat=chats is not None)
    else:
        given = (examples.chat_examples(chats, tokenizer, length) if chats is not None else
                 examples.text_examples(texts, tokenizer, length))[:sequences]
        windows, kept = _split(given)
        held_out = [window.tokens[: length // 4] for window in windows]
        source = examples.Given(kept)
    return source, held_out


def _split(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """One in fifty for validation, and the rest."""
    if len(items) < 2:
        raise UserError("the data give a single sequence, which is too little; give more, or a smaller --length")
    return list(items[::VALIDATION_ONE_IN]), [item for i, item in enumerate(items) if i % VALIDATION_ONE_IN]


def acceptance_length(engine: Engine, kind: Callable[[M], Draft], prompts: list[str]) -> Callable[[M], float]:
    """Measures a draft of some ``kind`` by real tree decoding of ``prompts``: tokens per verify stage."""
    from edgexpert.speculation.draft import TreeShape

    def measure(network: M) -> float:
        engine.draft = kind(network)
        results = [engine.generate(prompt, tree=TreeShape(), max_new_tokens=VALIDATION_TOKENS, ignore_eos=True)
                   for prompt in prompts]
        return sum(r.speculation.emitted for r in results) / sum(r.speculation.stages for r in results)

    return measure
