"""What would not run on Windows or macOS: calls, modules and paths that only POSIX or Linux has, outside a guard.

No such machine is here, so the source is read. A guard is a condition, or a handler, that asks for the platform or for
the name. Below it, the code that takes paths apart is given paths of Windows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from olive_ext.model.files.model_package import why_missing
from olive_ext.model.files.package_config import is_hub_name

PACKAGE = Path(__file__).resolve().parents[1] / "olive_ext"
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
NAMES = {
    "os": "fork forkpty killpg getuid geteuid getgid setuid sched_getaffinity sched_setaffinity mkfifo uname wait "
    "waitid "
    "wait3 wait4 WIFEXITED WEXITSTATUS WIFSIGNALED WTERMSIG statvfs getloadavg getpgid setpgid setsid chown chroot "
    "posix_fadvise posix_fallocate pread pwrite sync nice O_NOFOLLOW O_DIRECTORY O_CLOEXEC",
    "signal": "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGQUIT alarm setitimer pause pthread_kill sigwait",
}
ATTRIBUTES = {f"{module}.{name}" for module, names in NAMES.items() for name in names.split()}
ARGUMENTS = {"preexec_fn", "pass_fds", "start_new_session"}
FOLDERS = ("/tmp", "/proc", "/dev/", "/sys/", "/var/", "/usr/")
GUARDS = ("sys.platform", "os.name", "hasattr", "getattr", "platform.system")
HANDLED = {"ImportError", "ModuleNotFoundError", "AttributeError", "OSError"}

KNOWN = {
    "'/proc/cpuinfo'": "the processor's name; where there is no such file another is taken",
    "start_new_session=": "Windows ignores it: there Ctrl-C reaches a worker, too, which its parent then ends",
}
"""What is not guarded by a condition that is seen, and why it is safe."""

NAMED = re.compile(
    "|".join([*(rf"(import|from) .*\b{name}\b" for name in MODULES), *map(re.escape, ATTRIBUTES), *ARGUMENTS, *FOLDERS])
)
"""What a source has somewhere if it uses any of that: most have not, and are not taken apart."""

LINUX_ALONE = PACKAGE / "plugins" / "code"
"""Imported by `backends.code_eval` alone, behind a condition on the platform."""


def found(source: str) -> list[str]:
    """What the source uses that is not everywhere, outside a guard, each with its line."""
    return [f"{line}: {name}" for line, name in _visit(ast.parse(source), False)] if NAMED.search(source) else []


def _visit(node: ast.AST, is_guarded: bool) -> Iterator[tuple[int, str]]:
    if not is_guarded:
        yield from ((getattr(node, "lineno", 0), name) for name in _uses(node))
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        guarded = is_guarded or _guards(node, field)
        for child in children:
            if isinstance(child, ast.AST) and not _is_docstring(child):
                yield from _visit(child, guarded)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _guards(node: ast.AST, field: str) -> bool:
    if isinstance(node, ast.If | ast.IfExp | ast.BoolOp):
        return any(guard in ast.unparse(node.test if not isinstance(node, ast.BoolOp) else node) for guard in GUARDS)
    if isinstance(node, ast.Try) and field == "body":
        return any(name in ast.unparse(handler.type) for handler in node.handlers if handler.type for name in HANDLED)
    return False


def _uses(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in MODULES)
    elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
        yield node.module
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield from {f"{node.value.id}.{node.attr}"} & ATTRIBUTES
    elif isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
        yield f"{node.arg}="
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(FOLDERS):
        yield repr(node.value)


def test_package_uses_nothing_that_only_posix_has() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if LINUX_ALONE not in path.parents]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    uses = [f"{path.relative_to(PACKAGE).as_posix()}:{use}" for path, text in texts.items() for use in found(text)]
    assert [use for use in uses if use.split(": ", 1)[1] not in KNOWN] == []


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import fcntl", ["1: fcntl"]),
        ("from resource import getrusage", ["1: resource"]),
        ("def f():\n    os.killpg(1, signal.SIGKILL)", ["2: os.killpg", "2: signal.SIGKILL"]),
        ("Popen(x, start_new_session=True)", ["0: start_new_session="]),
        ("open('/tmp/x')", ["1: '/tmp/x'"]),
        ("if hasattr(os, 'sched_getaffinity'):\n    os.sched_getaffinity(0)", []),
        ("n = os.getuid() if os.name == 'posix' else 0", []),
        ("try:\n    import fcntl\nexcept ImportError:\n    fcntl = None", []),
        ("try:\n    import fcntl\nexcept ValueError:\n    pass", ["2: fcntl"]),
        ("def f():\n    '/tmp is not used'", []),
    ],
)
def test_planted_use_is_found(source: str, uses: list[str]) -> None:
    assert [use.split(": ", 1)[1] for use in found(source)] == [use.split(": ", 1)[1] for use in uses]


@pytest.mark.parametrize(
    "path", ["C:\\models\\int4", "C:/models/int4", "..\\int4", "models\\a b\\int4", "\\\\host\\m", "./m"]
)
def test_path_of_windows_is_no_name_on_the_hub(path: str) -> None:
    assert not is_hub_name(path)
    assert why_missing("hfmodel", path, None).startswith(f"'input_model.model_path' = '{path}': ")
