"""An interpreter that is a fork of the session's server, for what starts one by its path: scripts and pytest-xdist.

The fork goes on where somebody kills the process that started it: not for programs that are killed from outside.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests import REPOSITORY
from tests.helpers import forked, forkserver

_SCRIPT = """#!{python}
import sys
sys.path.insert(0, {repository!r})
from tests.helpers.forked_python import main
sys.exit(main())
"""


def environment_of(directory: Path, environment: dict[str, str]) -> dict[str, str]:
    """An environment for `forkserver.run`, in which `sys.executable` of a script is such an interpreter.

    Args:
        directory: For the interpreter.
        environment: The script's.
    """
    python = directory / "python"
    python.write_text(_SCRIPT.format(python=sys.executable, repository=str(REPOSITORY)))
    python.chmod(0o755)
    return {**environment, forked.EXECUTABLE: str(python)}


def main() -> int:
    """Do what the interpreter would do with these arguments, in a fork; gives its exit status, or ends as it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the fork
    arguments = [argument for argument in sys.argv[1:] if argument != "-u"]  # pytest-xdist's own streams have no buffer
    status = forkserver.start(arguments, env=os.environ, stdin=0, stdout=1, stderr=2).wait()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
