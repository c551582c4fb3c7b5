"""Work that is killed without any clean-up at its N-th change of a file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def killed_at(number: int, below: Path, work: Callable[[], object]) -> bool:
    """Do the work in a process that kills itself just before its N-th change of a file below the
    folder; tell whether it came to that.

    The moments are the interpreter's audit events; what git writes is not among them.
    """
    seen = 0

    def kill_at_the_moment(event, arguments):
        nonlocal seen
        writes = event in ("os.rename", "os.remove", "os.chmod", "os.truncate", "os.link")
        if event == "open":
            writes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and any(str(argument).startswith(str(below)) for argument in arguments[:2]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    process = os.fork()
    if not process:
        try:
            sys.addaudithook(kill_at_the_moment)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
