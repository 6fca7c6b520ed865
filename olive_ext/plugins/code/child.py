"""The child's side of a sandbox: confines a process, runs one program in it, and says how that ended.

Run as a script by `sandbox.Sandbox`, with the standard library alone. There are three processes: this one keeps the
clock; the second is the first process of the namespaces, with which all others end; the last one runs the program.
Knows no task.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NoReturn

_ENDING_S = 4.0
"""The most seconds that ending a program's remaining processes takes; less than its sender waits."""

_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID and CLONE_NEWNET of sched.h."""

_NEW_USER = 0x10000000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_READ_ONLY = 1 | 2 | 4  # with nosuid and nodev
_DEVICES = ("null", "zero", "full", "random", "urandom")

_INTROSPECTION = ("gc.get_objects", "gc.get_referrers", "sys._current_frames", "ctypes.string_at")
"""Audit events of a program that looks for what the harness holds."""

_WITHOUT_NAMESPACES = (
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"),
    *("os.kill", "os.killpg", "signal.pthread_kill", "ctypes.dlsym", "ctypes.dlsym/handle"),
)
"""Audit events that are refused where the kernel refuses nothing: a hurdle for Python alone, none for native code."""

_libc: Any = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Reads the options (JSON, first argument) and the job (standard input), and ends with the program's status."""
    options = json.loads(sys.argv[1])
    verdict, job = os.dup(1), [sys.stdin.buffer.read()]
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.closerange(3, verdict)
    os.closerange(verdict + 1, 256)
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if options["mode"] == "namespaces":
            user, group = os.getuid(), os.getgid()
            _called("unshare", _libc.unshare(_NAMESPACES | (_NEW_USER if user else 0)))
            if user:  # nobody else, in a user namespace of its own
                maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
                for name, text in maps.items():
                    Path("/proc/self", name).write_text(text)
            first = partial(_first_process, options, job, verdict)
        else:
            _called("prctl", _libc.prctl(36, 1, 0, 0, 0))  # PR_SET_CHILD_SUBREAPER: what leaves its group comes here
            first = partial(_run, options, job, verdict)
        _called("prctl", _libc.prctl(4, 0, 0, 0, 0))  # PR_SET_DUMPABLE: nobody may look into the memory of this process
        child = _forked(first, verdict)
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        os.write(verdict, f"refused: {error}".encode())
        os._exit(1)
    os.close(verdict)
    status = _wait(child, options["wall_s"], options["timed_out"])
    if options["mode"] != "namespaces":
        _end_descendants()
    os._exit(status)


def _first_process(options: Mapping[str, Any], job: list[bytes], verdict: int) -> NoReturn:
    """The first process of the namespaces: prepares what there is to see, and ends with the program."""
    _called("prctl", _libc.prctl(1, signal.SIGKILL, 0, 0, 0))  # PR_SET_PDEATHSIG
    _new_root(options)
    child = _forked(partial(_run, options, job, verdict), verdict)
    os.close(verdict)
    os._exit(_wait(child))


def _new_root(options: Mapping[str, Any]) -> None:
    """Python's files, read-only, a few devices, and a folder /tmp in memory: nothing else is there."""
    root = Path(options["folder"])
    _mount(None, "/", None, 0x44000)  # MS_REC | MS_PRIVATE
    _mount("tmpfs", root, "tmpfs", 6, "size=1m,mode=755")
    (root / "tmp").mkdir()
    _mount("tmpfs", root / "tmp", "tmpfs", 6, f"size={options['folder_bytes']},mode=1777,nr_inodes=1024")
    for path in options["visible"]:  # some lie in /tmp where Python does
        _bind(Path(path), root)
    for name in _DEVICES:
        _bind(Path("/dev", name), root, is_device=True)
    for name in ("proc", "old"):
        (root / name).mkdir(exist_ok=True)
    with suppress(OSError):  # refused where the machine's own is covered in part, as in containers
        _mount("proc", root / "proc", "proc", 14)
    _called("pivot_root", _libc.syscall(_PIVOT_ROOT[os.uname().machine], bytes(root), bytes(root / "old")))
    os.chdir("/")
    _called("umount2", _libc.umount2(b"/old", 2))  # MNT_DETACH
    Path("/old").rmdir()
    _mount(None, "/", None, 0x1027)  # MS_REMOUNT | MS_BIND | MS_NODEV | MS_NOSUID | MS_RDONLY
    os.chdir("/tmp")


def _bind(path: Path, root: Path, *, is_device: bool = False) -> None:
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() and not is_device:
        target.symlink_to(path.readlink())
        return
    target.mkdir(exist_ok=True) if path.is_dir() else target.touch()
    _mount(path, target, None, 0x5000)  # MS_BIND | MS_REC
    if not is_device:
        attributes = (ctypes.c_uint64 * 4)(_READ_ONLY)
        done = _libc.syscall(_MOUNT_SETATTR, -100, bytes(target), 0x8000, attributes, 32)  # AT_RECURSIVE
        _called("mount_setattr", done)


def _run(options: Mapping[str, Any], job: list[bytes], verdict: int) -> NoReturn:
    """Confines this process for good, and runs the program. What it must not know, the nonce, is then in no frame and
    in no object that it can ask for: the program and what follows it are called by a loop in C."""
    is_bare = options["mode"] != "namespaces"
    if is_bare:
        _called("prctl", _libc.prctl(1, signal.SIGKILL, 0, 0, 0))
        os.chdir(options["folder"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for name, least, most in options["limits"]:
        resource.setrlimit(getattr(resource, name), (least, most))
    if options["user"]:
        os.setgroups([])
        os.setresgid(*[options["user"]] * 3)
        os.setresuid(*[options["user"]] * 3)
    _called("prctl", _libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _called("capset", _libc.capset(header, none))
    os.environ["HOME"] = os.environ["TMPDIR"] = str(Path.cwd())
    sys.argv[:] = [""]
    _refuse(frozenset(_INTROSPECTION + (_WITHOUT_NAMESPACES if is_bare else ())), is_bare)
    try:
        deque(map(methodcaller("__call__"), _calls(job.pop(), options["nonce"], verdict)), maxlen=0)
    except BaseException as error:  # noqa: BLE001 - an answer's own
        message = f"failed: {_text(error)}"
    os.write(verdict, message.encode("utf-8", "replace")[:2000])
    os._exit(0)


def _calls(job: bytes, size: int, verdict: int) -> tuple[Callable[[], Any], ...]:
    program: Any = partial(exec, job[size:].decode("utf-8", "surrogatepass"), {})
    return program, partial(os.write, verdict, job[:size]), partial(os._exit, 0)


def _refuse(events: frozenset[str], is_bare: bool) -> None:
    """Hooks of Python's auditing cannot be taken away again by Python."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        is_path = event == "open" and isinstance(arguments[0], str | bytes)
        path = os.fsdecode(arguments[0]) if is_path else ""
        # The memory of a process, and without namespaces anything of the system's processes.
        if event in events or ("/proc/" in path and (is_bare or path.endswith("mem"))):
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - of a class that the program has made
        return type(error).__name__


def _forked(run: Callable[[], NoReturn], verdict: int) -> int:
    """The process id of a child that does `run`."""
    child = os.fork()
    if not child:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - sent to the parent
            os.write(verdict, f"refused: {error}".encode())
        finally:
            os._exit(1)
    return child


def _wait(child: int, seconds: float = math.inf, timed_out: int = 1) -> int:
    """The child's exit status, 128 and its signal where it was killed; `timed_out` where that is after `seconds`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        found, status = os.waitpid(-1, os.WNOHANG)
        if found == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if not found:
            signal.sigtimedwait([signal.SIGCHLD], min(left, 60.0))
    os.kill(child, signal.SIGKILL)
    return timed_out


def _end_descendants() -> None:
    """Kills what is left: processes that lose their parent become children of this process. All are stopped before any
    is killed, because a stopped process keeps its place among the allowed processes, and forks no more."""
    end = time.monotonic() + _ENDING_S
    while (left := _descendants()) and time.monotonic() < end:
        running = [child for child, state in left.items() if state not in "TZ"]
        for child in running or left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGSTOP if running else signal.SIGKILL)
        with suppress(ChildProcessError):
            while not running and os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _descendants() -> dict[int, str]:
    """Process ids and states (R, S, T, Z, ...) of all that come from this process."""
    states, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            states[int(folder.name)], parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            parents[int(folder.name)] = int(parent)
    processes: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in {os.getpid(), *processes}} - processes:
        processes |= new
    return {child: states[child] for child in processes}


def _mount(source: object, target: object, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if item is None else os.fsencode(str(item)) for item in (source, target, kind, data)]
    _called(f"mount of {target}", _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _called(name: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
