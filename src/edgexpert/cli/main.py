"""The command line. PyTorch and transformers are imported by the commands that need them, so that help is quick."""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edgexpert.cli import bench, chat, convert, generate, info, list, pull, reproduce, simulate, trace, train
from edgexpert.cli.show import sentence
from edgexpert.core.errors import UserError

INTERRUPTED = 130
PIPE_CLOSED = 1  # typer's own code for it
UsageError: type[Any] = typer.BadParameter.__mro__[1]  # typer keeps its copy of click to itself


class Commands(TyperGroup):
    """Turns what a user can put right into one sentence and exit code 2, and Ctrl-C into one line and exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(f"edgexpert: {sentence(error)}", err=True)
            raise typer.Exit(2) from None
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise  # it prints the help
            command = error.ctx.command_path if error.ctx else "edgexpert"
            typer.echo(f"edgexpert: {error.format_message().rstrip('.')}; see {command} --help.", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            # a terminal shows ^C where the cursor stands
            typer.echo("\n" * sys.stderr.isatty() + "Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    help="Mixture-of-experts language models with speculative decoding, moving as few weight bytes as possible.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # its help cuts long option names short
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(bench.bench)
app.command()(info.info)
app.command("list")(list.list_models)
app.command()(pull.pull)
app.command()(trace.trace)
app.command()(simulate.simulate)
app.command()(reproduce.reproduce)
app.command()(convert.convert)
app.add_typer(train.app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgexpert {version('edgexpert')}")
        raise typer.Exit()


@app.callback()
def _everywhere(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script. A reader that goes away, as in ``| head -1``, ends it quietly."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show a character shows "?"
    try:
        try:
            app(prog_name="edgexpert")
        finally:
            sys.stdout.flush()
    except OSError as error:
        # what is still to be written is dropped, or the interpreter would try again at its exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            sys.exit(PIPE_CLOSED)
        where = f"the file {error.filename}" if error.filename else "the output"
        print(f"edgexpert: {where} cannot be written ({error.strerror or error}).", file=sys.stderr)
        sys.exit(2)
