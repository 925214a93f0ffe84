"""`edgexpert chat`: a conversation, or a text that grows in turns where the model has no chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgexpert.cli.line import Lines
from edgexpert.cli.options import Options, shared_options
from edgexpert.cli.show import print_generation, print_line, print_piece, sentence, summary
from edgexpert.core.errors import UserError
from edgexpert.core.output import checked_file, output_file

if TYPE_CHECKING:
    from edgexpert.runtime.engine import Engine
    from edgexpert.runtime.stream import TextStream
    from edgexpert.runtime.tokens import Prompt

HELP = """\
/system TEXT   what the model is told before the conversation; without TEXT, nothing
/policy NAME   answer under another policy (exact, pruned, reuse, coalesced, edgexpert)
/stats         what the last answer cost
/save FILE     write the conversation as JSON messages
/load FILE     go on from a conversation that was saved
/reset         forget the conversation
/help          this list
/quit          leave (so does Ctrl-D)

A line that ends with \\ goes on in the next one; \"\"\" begins and ends a text of several lines. Ctrl-C ends an answer."""
ROLES = ("system", "user", "assistant")


class Conversation:
    """History of a chat, and the turn that is going on.

    With a chat template the history is messages. Without one it is the text so far: a turn adds a line, the model goes on.
    """

    def __init__(self, engine: Engine, options: Options, system: str | None = None, stats: bool = False) -> None:
        self.engine = engine
        self.options = options
        self.stats = stats
        self.messages: list[dict[str, str]] = []
        self.stream: TextStream | None = None  # of the last answer
        self.tell(system)

    @property
    def has_template(self) -> bool:
        return self.engine.tokenizer.chat_template is not None

    @property
    def prompt(self) -> Prompt:
        if self.has_template:
            return self.messages
        # an answer goes straight on from what was said, as the model produced it
        return "".join("\n" * (i > 0 and m["role"] == "user") + m["content"] for i, m in enumerate(self.messages))

    def tell(self, system: str | None) -> None:
        """Makes ``system`` the message before the conversation; None or nothing removes it."""
        self.messages = [message for message in self.messages if message["role"] != "system"]
        if system:
            self.messages.insert(0, {"role": "system", "content": system})

    def answer(self, text: str) -> None:
        """One turn, printed as it is produced. Ctrl-C ends the answer and keeps what there is."""
        self.messages.append({"role": "user", "content": text})
        options = self.options
        try:
            stream = self.engine.stream(self.prompt, tree=options.tree, after=self.stream, **options.sampling)
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
        except BaseException:
            self.messages.pop()
            raise
        print_piece("\n")
        if produced:
            self.stream = stream
            self.messages.append({"role": "assistant", "content": produced})
            if self.stats:
                print_line(summary(stream.generation))
        else:
            self.messages.pop()

    def command(self, line: str) -> None:
        """A line that starts with a slash."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        match name:
            case "/reset":
                self.messages = [message for message in self.messages if message["role"] == "system"]
                print_line("The conversation starts over.")
            case "/system":
                self.tell(argument)
                print_line("The model is told so from the next answer on." if argument else "The model is told nothing before.")
            case "/policy":
                if argument:
                    self.engine.set_policy(self.options.policy_named(argument))
                name = "From now on" if argument else self.engine.policy.name
                print_line(f"{name}: {'; '.join(self.engine.policy.approximations()) or 'nothing approximated'}.")
            case "/stats":
                if self.stream is None:
                    raise UserError("there is no answer yet; say something first")
                print_generation(self.stream.generation, self.options.sampling)
            case "/save":
                replaced = save(self.messages, _path(name, argument))
                print_line(f"Saved {_count(self.messages)} to {argument}{', in the place of what was there' * replaced}.")
            case "/load":
                self.messages, self.stream = load(_path(name, argument)), None
                print_line(f"Going on from {_count(self.messages)}.")
            case "/help":
                print_line(HELP)
            case _:
                raise UserError(f"there is no command {name}; /help lists them")


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise UserError(f"a file is needed: give its name after {command}")
    return Path(argument).expanduser()


def _count(messages: list[dict[str, str]]) -> str:
    return f"{len(messages)} message{'s' * (len(messages) != 1)}"


def save(messages: list[dict[str, str]], path: Path) -> bool:
    """Writes messages as JSON, whole or not at all. Returns whether a file was there."""
    existed = checked_file(path).exists()
    with output_file(path) as part:
        part.write_text(json.dumps(messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return existed


def load(path: Path) -> list[dict[str, str]]:
    """Messages of a file that `save` wrote, or that has their form.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the file {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, list) or not all(
        isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        for message in stored
    ):
        raise UserError(f"the file {path} is no JSON list of messages, each with a role ({', '.join(ROLES)}) and a content; "
                        "give a file that /save wrote")
    return [{"role": message["role"], "content": message["content"]} for message in stored]


@shared_options()
def chat(
    options: Options,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the conversation.", show_default=False)
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="After each answer, a line of speed and bytes.")] = False,
    history: Annotated[
        bool, typer.Option("--history/--no-history", envvar="EDGEXPERT_HISTORY", show_envvar=False,
                           help="Keep what you type for the next chat (EDGEXPERT_HISTORY=0 in the environment: never).")
    ] = True,
) -> None:
    """Talk with a model; /help lists what else you can say."""
    conversation = Conversation(options.load(), options, system, stats)
    for note in conversation.engine.notes:
        print_line(f"note: {note}")
    if not conversation.has_template:
        print_line(f"note: {options.model} has no chat template, so it goes on from the text so far instead of answering")
    print_line("/help lists the commands, /quit leaves.")
    with Lines(keep=history) as lines:
        while (line := lines.read()) not in (None, "/quit"):
            try:
                if line.startswith("/"):
                    conversation.command(line)
                elif line:
                    conversation.answer(line)
            except UserError as error:
                print_line(sentence(error))
    if sys.stdin.isatty():
        print_piece("\n" * (line is None))
