"""Startup code of Python in a program that `hfshard run` has started, and in the programs that it starts.

Every Python of the process tree finds it by PYTHONPATH, including other versions and Pythons without hfshard. So it is
written for all of them, imports nothing that Python has not imported already, and breaks no program. hfshard is
imported only when a program imports transformers.

The order matters: site imports `sitecustomize` by its name, and finds this one in place of another that the system, or
the program's owner, may have. The other one runs at the end, as if site had found it: the name refers to it from then
on, site reports its error, and if there is no other one, site gets the ImportError that it expects.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SETTINGS = "HFSHARD_RUN"
"""The variable with the options of `hfshard run`, as JSON: see `hfshard.cli.run_command`."""


class _Waiting:  # not a class of importlib.abc: that would be imported in every Python
    """Finder that enables hfshard when transformers is looked up, and finds nothing itself."""

    is_over = False

    def find_spec(self, name, path=None, target=None):  # type: (str, object, object) -> None
        if not self.is_over and name.partition(".")[0] == "transformers":
            self.is_over = True  # it stays where it is: a loop over sys.meta_path would miss the next finder
            _turn_on_or_say_why_not()


def _turn_on_or_say_why_not():  # type: () -> None
    try:
        _turn_on()
    except Exception as error:  # noqa: BLE001  # the program goes on
        reason = " ".join(str(error).split())
        line = "hfshard: inactive in process %d: %s: %s\n" % (os.getpid(), type(error).__name__, reason)  # noqa: UP031
        try:  # noqa: SIM105  # contextlib may not be imported yet
            sys.stderr.write(line)
        except (AttributeError, OSError, ValueError):
            pass  # stderr is closed, or was never open


def _turn_on():  # type: () -> None
    import json

    settings = json.loads(os.environ.get(_SETTINGS, "{}"))
    prefix = settings.pop("prefix", None)
    try:
        from hfshard.models.install import install_first
    except ImportError as error:
        if error.name != "hfshard":
            raise
        if prefix != sys.prefix:
            return  # another environment, which has no hfshard
        sys.path.append(_package_parent())  # `python -m hfshard run` in a checkout that is not installed
        from hfshard.models.install import install_first
    install_first(**settings)


def _package_parent():  # type: () -> str
    folder = _FOLDER
    for _ in ("startup", "cli", "hfshard"):
        folder = os.path.dirname(folder)
    return folder


if __name__ == "sitecustomize":
    # sys.path is that of a Python of its own; only PYTHONPATH, which children inherit, still names the folder.
    sys.path[:] = [path for path in sys.path if path != _FOLDER]
    if sys.version_info >= (3, 11):  # noqa: UP036  # any Python comes here
        sys.meta_path.insert(0, _Waiting())
        if "transformers" in sys.modules:  # by a .pth file
            _turn_on_or_say_why_not()
    _this = sys.modules.pop(__name__)  # kept: Python 2 would clear it
    __import__("sitecustomize")
