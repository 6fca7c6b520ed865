"""A worker in a process of its own on this machine: `ProcessWorker` in the parent, `serve` in the child.

They exchange pickled messages through the child's standard input and output. The child's thread tells every second how
many steps it has run; it ends when the parent does. What the child prints goes to the parent's standard error.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from olive_ext.engine.requests import Request
from olive_ext.errors import one_line
from olive_ext.python_processes import python_command
from olive_ext.session.workers.served_model import Job, Reply, Served, ServedModel, read_error, told_error
from olive_ext.session.workers.worker import Watchdog, WorkerLostError

_TAKE_LESS = ": close other programs, or take less ('engine.num_slots', 'max_length', 'workers', 'reference.mode')"
_SEE_ABOVE = ": what it printed is above"

_BEAT_S = 1.0
_CLOSING_S = 5.0
_LENGTH = struct.Struct("<Q")
_CHILD = "from olive_ext.session.workers.process_worker import serve; serve()"


class ProcessWorker:
    """A child process with the model of `job`."""

    def __init__(self, job: Job, watchdog: Watchdog, name: str = "worker", child: str = _CHILD) -> None:
        """`child`: the Python text that the child runs; it calls `serve`."""
        self.name = name
        self._child = child
        self._job = job
        self._watchdog = watchdog
        self._process: subprocess.Popen[bytes] | None = None
        self._is_busy = False
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._process is None else self._process.pid

    def open(self) -> Served:
        self.stop()
        self._replies = queue.SimpleQueue()
        # A session of its own: Ctrl-C reaches all processes of the terminal's, and is the parent's to handle.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(python_command(self._child), start_new_session=True, **pipes)
        self._process = process  # another thread may stop it from here on
        assert process.stdout is not None
        arguments = process.stdout, self._replies
        threading.Thread(target=_forward, args=arguments, name=f"{self.name}'s replies", daemon=True).start()
        self._send(self._job)
        served: Served = self._answer(is_watched=False)
        return served

    def run(self, which: str, requests: Sequence[Request]) -> Reply:
        self._watchdog.begin(time.monotonic())
        self._send(("run", which, requests))
        reply: Reply = self._answer(is_watched=True)
        return reply

    def call(self, which: str, name: str) -> Any:
        self._send(("call", which, name))
        return self._answer(is_watched=False)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        if self._is_busy:
            process.kill()  # before its input is closed, to which another thread may still be writing
        with suppress(OSError):
            process.stdin.close()  # an idle child closes its model and ends
        try:
            process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send(self, message: Any) -> None:
        if self._process is None or self._process.stdin is None:
            raise WorkerLostError("not running")
        self._is_busy = True
        try:
            _write(self._process.stdin, message)
        except OSError:
            raise self._lost() from None

    def _answer(self, *, is_watched: bool) -> Any:
        """The next answer of the child, behind its beats."""
        while True:
            try:
                kind, content = self._replies.get(timeout=2 * _BEAT_S)
            except queue.Empty:
                kind, content = "beat", None
            if kind == "beat":
                if is_watched and self._watchdog.is_hung(time.monotonic(), content):
                    self.stop()
                    raise WorkerLostError("ended because it hung")
                continue
            self._is_busy = False
            if kind == "end":
                raise self._lost(content)
            if kind == "error":
                raise read_error(content)
            return content

    def _lost(self, unread: str | None = None) -> WorkerLostError:
        """How the child has ended; `unread`: why what it sent cannot be read."""
        process, self._process = self._process, None
        if process is None:
            return WorkerLostError("was stopped")
        if unread is not None:
            process.kill()
            process.wait()
            return WorkerLostError(f"sent what cannot be read ({unread})")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSING_S)
        process.kill()
        code = process.wait()
        if code >= 0:
            return WorkerLostError(f"ended with status {code}", _SEE_ABOVE)
        name = signal.Signals(-code).name
        if name == "SIGKILL":
            return WorkerLostError("ended by SIGKILL, as the system does where memory is short", _TAKE_LESS)
        return WorkerLostError(f"ended by {name}", _SEE_ABOVE)


def serve(open_served: Callable[[Job], Any] = ServedModel) -> None:
    """The child: opens what the first message names, then answers one message after the other until there are no
    more."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lock = threading.Lock()

    def reply(kind: str, content: Any) -> None:
        try:
            with lock:
                _write(replies, (kind, content))
        except OSError:
            os._exit(1)  # the parent is gone, whatever the model is doing

    served: Any = None

    def beat() -> None:
        try:
            while True:
                time.sleep(_BEAT_S)
                reply("beat", None if served is None else served.pulse)
        finally:
            os._exit(1)  # the parent could no more tell long steps from a hang

    threading.Thread(target=beat, name="beat", daemon=True).start()
    with suppress(EOFError):
        while True:
            message = _read(sys.stdin.buffer)
            try:
                if served is None:
                    served = open_served(message)
                    content: Any = served.facts
                else:
                    name, *arguments = message
                    content = getattr(served, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - raised in the parent, whatever it is
                reply("error", told_error(error))
            else:
                reply("answer", content)
    if served is not None:
        served.close()


def _forward(pipe: BinaryIO, replies: queue.SimpleQueue[Any]) -> None:
    """Moves what comes through the pipe to the queue; ("end", why it cannot be read) comes last, whatever happens."""
    unread = None
    try:
        while True:
            replies.put(_read(pipe))
    except (EOFError, OSError):
        pass
    except BaseException as error:  # noqa: BLE001 - told where the answer is waited for
        unread = one_line(error)
    finally:
        replies.put(("end", unread))


def _write(pipe: Any, message: Any) -> None:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(content)) + content)
    pipe.flush()


def _read(pipe: BinaryIO) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(head)
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return pickle.loads(content)  # from our own child, or our own parent
