"""`edgexpert generate`: answer one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edgexpert.cli.options import Json, Options, shared_options
from edgexpert.cli.show import print_generation, print_json, print_piece, print_summary
from edgexpert.core.errors import UserError


@shared_options()
def generate(
    options: Options,
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from; standard input when left out.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="After the text, all figures instead of one line.")] = False,
    json: Json = False,
) -> None:
    """Go on from a prompt. The text goes to standard output, what it cost to standard error."""
    text = read_prompt(prompt)
    stream = options.load().stream(text, tree=options.tree, **options.sampling)
    produced, interrupted = False, False
    try:
        for piece in stream:
            produced = True
            if not json:
                print_piece(piece)
    except KeyboardInterrupt:
        if not produced:
            raise
        interrupted = True
    generation = stream.generation
    if json:
        print_json(generation.to_json())
    else:
        print_piece("\n" * (1 + sys.stdout.isatty()))
        (print_generation if stats else print_summary)(generation, given=options.sampling, err=True)
    if interrupted:
        raise KeyboardInterrupt


def read_prompt(argument: str | None) -> str:
    """The prompt, from standard input without its last line ends where there is no argument."""
    try:
        prompt = sys.stdin.read().rstrip("\r\n") if argument is None else argument
        prompt.encode()
    except UnicodeError:
        raise UserError("the prompt is not UTF-8 text; convert it first") from None
    if not prompt.strip():
        raise UserError("the prompt is empty; give some text to go on from")
    return prompt
