"""The one road to a Python process, and the one supervisor of such processes: `ChildProcess` in the parent, `serve` in
the child. Knows no framework, and not what the messages mean.

A child imports from where this process does, and nothing from the working directory, which may be a model's folder
with a numpy.py in it. Python puts the working directory first on the path of what -c and -m start. Python 3.10 lacks
the switch against that (-P), and -I would drop a user's PYTHONPATH as well: the first words of the program replace the
path, before it imports anything. After -m that is too late: Python has imported runpy.

Parent and child exchange pickled messages through the child's standard input and output. What the child prints goes to
its standard error, and is lost before it serves. The child beats every second, which shows the parent how far it is;
it ends when the parent does.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, BinaryIO

BEAT_S = 1.0
"""Seconds between two beats of a child."""

_CLOSING_S = 5.0
_LENGTH = struct.Struct("<Q")
_BEGIN = b"\0olive_ext\n"
"""The bytes before a child's messages: Python's start and imports may have printed something (sitecustomize)."""

START_S = 600.0
"""Seconds that a child may take before it serves: imports from a cold network drive take minutes. A child that prints
and never serves cannot be told from a slow one until then."""


def usable_processors() -> int | None:
    """The number of processors that this process may run on, which is lower in a container or under a job scheduler;
    None where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def import_path() -> list[str]:
    """Where this process imports from, without the working directory, which is "" there."""
    return [folder for folder in sys.path if isinstance(folder, str) and folder]


def python_command(program: str, *arguments: str) -> list[str]:
    """The command line that runs the text `program` with `arguments` after sys.argv[0]."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {import_path()!a}; {program}", *arguments]


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` with `arguments`, as `python -m` does."""
    program = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return python_command(program, *arguments)


class ChildEndedError(Exception):
    """A child has ended; the message says how, as a clause: "ended by SIGSEGV". `was_killed`: by SIGKILL."""

    was_killed = False


class ChildProcess:
    """A process that runs the Python text `program`, which calls `serve`. One thread sends and receives; meanwhile
    another thread may `stop` it."""

    def __init__(
        self, program: str, *, environment: Mapping[str, str] | None = None, stderr: IO[bytes] | None = None
    ) -> None:
        """Starts it. Raises `OSError`, `ValueError` or `RuntimeError` where the machine refuses process or thread."""
        # A session of its own: Ctrl-C reaches all processes of the terminal's, and is the parent's to handle.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        command = python_command(program)
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._is_busy = self._is_stopped = False
        reader = threading.Thread(target=_forward, args=(self._process.stdout, self._messages), daemon=True)
        try:
            reader.start()
        except RuntimeError:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Sends a message, with which the child calls `answer`. Raises `ChildEndedError`."""
        self._is_busy = True
        try:
            _write(self._process.stdin, message)
        except (OSError, ValueError):  # ValueError: another thread has closed it
            raise self._ended() from None

    def receive(self, timeout_s: float | None = None) -> tuple[str, Any]:
        """("answer", what the child answers) or ("beat", its pulse), whichever is next; ("beat", None) where nothing
        comes for `timeout_s` seconds. Raises `ChildEndedError`."""
        try:
            kind, content = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return "beat", None
        if kind == "end":
            raise self._ended(content)
        self._is_busy = kind == "beat" and self._is_busy
        return kind, content

    def stop(self) -> None:
        """Ends it: at once where it is busy, else when `serve` returns. May be called again."""
        self._is_stopped = True
        if self._is_busy:
            self._process.kill()  # before its input is closed, to which another thread may still be writing
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._wait_or_kill()

    def _ended(self, fault: str | None = None) -> ChildEndedError:
        """How the child has ended. `fault`: why this process ended it, as a clause."""
        self._is_busy = False
        if self._is_stopped:
            return ChildEndedError("was stopped")
        if fault is not None:
            self._process.kill()
            self._process.wait()
            return ChildEndedError(fault)
        code = self._wait_or_kill()
        if code >= 0:
            return ChildEndedError(f"ended with status {code}")
        name = signal.Signals(-code).name
        if name != "SIGKILL":
            return ChildEndedError(f"ended by {name}")
        error = ChildEndedError("ended by SIGKILL, as the system does where memory is short")
        error.was_killed = True
        return error

    def _wait_or_kill(self) -> int:
        """The exit status of a child that is about to end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSING_S)
        self._process.kill()
        return self._process.wait()


def serve(answer: Callable[[Any], Any], pulse: Callable[[], Any] = lambda: None) -> None:
    """In the child: answers one message after the other until there are no more. An exception of `answer` ends the
    child. `pulse` is called every second, from another thread."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    replies.write(_BEGIN)  # sent with the first message
    lock = threading.Lock()

    def reply(kind: str, content: Any) -> None:
        try:
            with lock:
                _write(replies, (kind, content))
        except OSError:
            os._exit(1)  # the parent is gone, whatever the model is doing

    def beat() -> None:
        try:
            while True:
                time.sleep(BEAT_S)
                reply("beat", pulse())
        finally:
            os._exit(1)  # the parent could no longer distinguish long steps from a hang

    threading.Thread(target=beat, name="beat", daemon=True).start()
    with suppress(EOFError):
        while True:
            message = _read(sys.stdin.buffer)
            reply("answer", answer(message))


def _forward(pipe: BinaryIO, messages: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Moves what comes through the pipe to the queue. In every case the last item is ("end", the fault)."""
    fault, before = None, b""
    late = threading.Timer(START_S, messages.put, [("end", f"did not begin to serve within {START_S:g} s")])
    late.daemon = True
    try:
        late.start()
        while not before.endswith(_BEGIN):
            before = before[-len(_BEGIN) :] + _bytes(pipe, 1)
        late.cancel()
        while True:
            messages.put(_read(pipe))
    except (EOFError, OSError):
        pass
    except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
        reason = f"{type(error).__name__}: {error}"[:300].splitlines()[0]
        fault = f"sent what cannot be read ({reason})"
    finally:
        late.cancel()
        messages.put(("end", fault))


def _write(pipe: Any, message: Any) -> None:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(content)) + content)
    pipe.flush()


def _read(pipe: BinaryIO) -> Any:
    (size,) = _LENGTH.unpack(_bytes(pipe, _LENGTH.size))
    return pickle.loads(_bytes(pipe, size))  # from our own child, or our own parent


def _bytes(pipe: BinaryIO, count: int) -> bytes:
    content = pipe.read(count)
    if len(content) < count:
        raise EOFError
    return content
