"""The one road to a Python process: it imports from where this process does, and nothing from the working directory,
which may be a model's folder with a numpy.py in it. Knows no framework.

Python puts the working directory first on the path of what -c and -m start. Python 3.10 lacks the switch against that
(-P), and -I would drop a user's PYTHONPATH as well: the first words of the program replace the path, before it imports
anything. Behind -m that is too late: Python has imported runpy.
"""

from __future__ import annotations

import sys


def import_path() -> list[str]:
    """Where this process imports from, without the working directory, which is "" there."""
    return [place for place in sys.path if isinstance(place, str) and place]


def python_command(program: str, *arguments: str) -> list[str]:
    """The command line that runs the text `program` with `arguments` behind sys.argv[0]."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {import_path()!a}; {program}", *arguments]


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` with `arguments`, as `python -m` does."""
    program = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return python_command(program, *arguments)
