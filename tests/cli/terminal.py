"""Runs a Python program at a terminal of its own and types: ``terminal.py CODE TYPED...`` prints what it shows.

A program, so that the one that forks has one thread and can be given up on.
"""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from contextlib import suppress


def at_terminal(code: str, typed: list[str]) -> str:
    """What the program shows; each of ``typed`` is typed at one of its prompts."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown, rest, last = "", list(typed), ""
    with suppress(OSError):  # which a terminal gives at its end
        while True:
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 1000).decode()
            else:  # what is typed before the terminal is ready for it may be lost
                os.write(terminal, last.encode())
            if rest and shown.count("> ") > len(typed) - len(rest):
                time.sleep(0.1)
                last = rest.pop(0)
                os.write(terminal, last.encode())
    os.waitpid(process, 0)
    return shown


if __name__ == "__main__":
    print(at_terminal(sys.argv[1], sys.argv[2:]))
