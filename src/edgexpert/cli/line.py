"""What a user types at a prompt: edited, of several lines where they say so, and remembered."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from edgexpert.core.errors import UserError

PROMPT, MORE = "> ", "… "
QUOTES = '"""'
KEPT_LINES = 1000


def history_file() -> Path:
    """Where typed lines are kept: in the user's folder for the state of programs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "edgexpert" / "chat_history"


class Lines:
    """Reads from standard input. At a terminal there are prompts, and editing and history where Python has readline.

    Args:
        keep: the history is read from `history_file`, and written there at the end.
    """

    def __init__(self, keep: bool = True) -> None:
        self.terminal = sys.stdin.isatty()
        self._keep = keep
        self._readline: Any = None
        if self.terminal:
            with suppress(ImportError):
                import readline

                self._readline = readline

    def __enter__(self) -> Lines:
        if self._readline is not None and self._keep:
            with suppress(OSError):
                self._readline.read_history_file(history_file())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._readline is None or not self._keep:
            return
        with suppress(OSError):  # a chat must not end with an error because of its history
            history_file().parent.mkdir(parents=True, exist_ok=True)
            history_file().touch(mode=0o600)
            self._readline.set_history_length(KEPT_LINES)
            self._readline.write_history_file(history_file())

    def read(self) -> str | None:
        """The next text, without blanks around it; None at the end of the input.

        A line that ends with a backslash goes on in the next one. A text between triple quotes may have several lines.
        """
        line = self._line(PROMPT)
        if line is None:
            return None
        line = line.strip()
        if line.startswith(QUOTES):
            return self._quoted(line.removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\") and (more := self._line(MORE)) is not None:
            lines[-1] = lines[-1][:-1]
            lines.append(more.rstrip())
        return "\n".join(lines).strip()

    def _quoted(self, first: str) -> str:
        lines = [first]
        while QUOTES not in lines[-1] and (more := self._line(MORE)) is not None:
            lines.append(more)
        return "\n".join(lines).partition(QUOTES)[0].strip()

    def _line(self, prompt: str) -> str | None:
        while True:
            try:
                return input(prompt if self.terminal else "")
            except EOFError:
                return None
            except UnicodeError:
                raise UserError("the input is not UTF-8 text; convert it first") from None
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                print("\nCtrl-D or /quit leaves.")
