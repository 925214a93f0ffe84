"""`edgexpert chat`: a conversation, or a text that grows in turns where the model has no chat template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from edgexpert.cli.options import Options, shared_options
from edgexpert.cli.show import print_generation, print_line, print_piece, sentence
from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.runtime.engine import Engine
    from edgexpert.runtime.stream import TextStream
    from edgexpert.runtime.tokens import Prompt
    from edgexpert.speculation.draft import TreeShape
    from edgexpert.speculation.sampling import SamplingParams

HELP = """\
/reset         forget the conversation
/policy NAME   answer under another policy (exact, pruned, reuse, coalesced, edgexpert)
/stats         what the last answer cost
/help          this list
/quit          leave (so does end of input)"""


class Conversation:
    """History of a chat, and the turn that is going on.

    With a chat template the history is messages. Without one it is the text so far: a turn adds a line, the model goes on.
    """

    def __init__(self, engine: Engine, options: Options, params: SamplingParams, shape: TreeShape) -> None:
        self.engine = engine
        self.options = options
        self.params = params
        self.shape = shape
        self.messages: list[dict[str, str]] = []
        self.stream: TextStream | None = None  # of the last answer

    @property
    def has_template(self) -> bool:
        return self.engine.tokenizer.chat_template is not None

    @property
    def prompt(self) -> Prompt:
        if self.has_template:
            return self.messages
        # an answer goes straight on from what was said, as the model produced it
        return "".join("\n" * (i > 0 and m["role"] == "user") + m["content"] for i, m in enumerate(self.messages))

    def answer(self, text: str) -> None:
        """One turn, printed as it is produced. Ctrl-C ends the answer and keeps what there is."""
        self.messages.append({"role": "user", "content": text})
        try:
            stream = self.engine.stream(self.prompt, self.params, self.shape, after=self.stream)
        except UserError as error:
            self.messages.pop()
            raise UserError(f"{error} (/reset starts over)") from None
        produced = ""
        try:
            for piece in stream:
                produced += piece
                print_piece(piece)
        except KeyboardInterrupt:
            pass
        print_piece("\n")
        if produced:
            self.stream = stream
            self.messages.append({"role": "assistant", "content": produced})
        else:
            self.messages.pop()

    def command(self, line: str) -> None:
        """A line that starts with a slash."""
        name, _, argument = line.partition(" ")
        match name:
            case "/reset":
                self.messages.clear()
                print_line("The conversation starts over.")
            case "/policy":
                self.engine.set_policy(self.options.policy_named(argument.strip()))
                print_line(f"From now on: {'; '.join(self.engine.policy.approximations()) or 'nothing approximated'}.")
            case "/stats":
                if self.stream is None:
                    raise UserError("there is no answer yet; say something first")
                print_generation(self.stream.generation)
            case "/help":
                print_line(HELP)
            case _:
                raise UserError(f"there is no command {name}; /help lists them")


@shared_options()
def chat(options: Options) -> None:
    """Talk with a model; /help lists what else you can say."""
    params, shape = options.sampling, options.tree
    conversation = Conversation(options.load(), options, params, shape)
    for note in conversation.engine.notes:
        print_line(f"note: {note}")
    if not conversation.has_template:
        print_line(f"note: {options.model} has no chat template, so it goes on from the text so far instead of answering")
    print_line("/help lists the commands, /quit leaves.")
    while (line := _read_line()) not in (None, "/quit"):
        try:
            if line.startswith("/"):
                conversation.command(line)
            elif line:
                conversation.answer(line)
        except UserError as error:
            print_line(sentence(error))


def _read_line() -> str | None:
    """What the user says; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print_piece("\n")
        return None
    except UnicodeError:
        raise UserError("the input is not UTF-8 text; convert it first") from None
