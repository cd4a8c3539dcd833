"""Guard a run, so that nothing it has started outlives a command that was stopped or killed.

Called as ``python -S guard.py PIPE COMMAND...``. The command runs as a child of this process, which ends the way its child does. On
Linux every descendant stays below this process, even if its own parent has ended, so that the whole tree can be found. All processes
stay in the process group in which they were started: a terminal's Ctrl-C, Ctrl-Z and standard input work as without a guard.

The pipe carries one message per line:

    pass N PID SECONDS   send signal N to PID (0: the child), unless a terminal has sent it to the whole group already;
                         SECONDS later (0: never), kill the tree if it still runs
    kill PID             kill PID and its descendants (0: everything)
    ended                the process that a signal was sent to has ended: the tree need not be killed

When the pipe closes, the command has ended, and everything is killed. Every run waits for this file's imports, so they are few.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that stop a command and its run."""

PASSED_ON = (*STOPPING, *(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)))
"""The signals that a command passes on to its run: those above, and those whose meaning only the script knows."""

FINAL_SIGNAL = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else None
"""The signal sent to a run before it is killed, so that it can still write its record: no script has a reason to ignore it."""

_JOB_CONTROL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGQUIT)
"""Terminal signals that the run receives itself. A guard stopped by them could not act."""

_DESCENDANTS_S = 5.0
"""Time for the descendants of a stopped run to end after SIGTERM."""

_FINAL_S = 3.0
"""Time for a run to end after ``FINAL_SIGNAL``."""

_KILLED_S = 5.0
"""Most time to wait for killed processes: a process that hangs in a driver cannot be killed."""

_LONGEST_BYTES = 1 << 12
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def die_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends; on Linux only."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(arguments: list[str]) -> None:
    """Run the command after the pipe's number in ``arguments``; end the way it does."""
    pipe, command = int(arguments[0]), arguments[1:]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, *_JOB_CONTROL, signal.SIGCHLD})
    _prctl(_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(pipe)
        die_with_parent()
        if os.getppid() != guard:  # the guard was killed before that took effect
            os._exit(128 + signal.SIGKILL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt here would print a traceback of ours
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the new program would inherit that
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.execv(command[0], command)
    _release_streams()
    _end_as(_Guard(child, pipe).watch())


def _release_streams() -> None:
    """Replace this process's standard streams by the null device, so that it does not keep the run's streams open."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)


def _end_as(status: int) -> None:
    """End with the exit code, or by the signal, of a process's wait status."""
    if os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


class _Guard:
    def __init__(self, child: int, pipe: int) -> None:
        self._child, self._pipe = child, pipe
        self._status: int | None = None
        """The child's wait status, once it has ended."""
        self._received: set[int] = set()
        """Signals that this process received directly, as did the whole group."""
        self._stopped = self._terminated_rest = False
        """Whether the run was sent a signal to end, and whether its remaining descendants were."""
        self._kill_at: float | None = None
        self._ending: int | None = None
        """The process that was sent a signal to end, until it has been sent ``FINAL_SIGNAL``."""
        self._wakeup, write_end = os.pipe()
        for end in (self._wakeup, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in _JOB_CONTROL:
            signal.signal(number, signal.SIG_IGN)
        for number in (*PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*PASSED_ON, *_JOB_CONTROL, signal.SIGCHLD})

    def _handle(self, number: int, frame: object) -> None:
        self._received.add(number)
        # The run has received it as well, and may end before the command sends a message.
        self._stopped |= number in STOPPING

    def watch(self) -> int:
        """Return the child's wait status once it has ended and, after a stop, its descendants have ended as well."""
        while True:
            self._reap()
            if self._status is not None and not (self._stopped and self._terminate_rest()):
                return self._status
            due = self._kill_at is not None and time.monotonic() >= self._kill_at
            if (due and not self._send_final_signal()) or not self._listen():
                kill_all()
                self._reap()
                return signal.SIGKILL if self._status is None else self._status

    def _terminate_rest(self) -> bool:
        """Send SIGTERM to the remaining descendants of a stopped run, once; return whether there are any."""
        left = tree(os.getpid())[1:]
        if left and not self._terminated_rest:
            self._terminated_rest = True
            self._kill_at = time.monotonic() + _DESCENDANTS_S
            for pid in left:
                _send(pid, signal.SIGTERM)
        return bool(left)

    def _send_final_signal(self) -> bool:
        """Send ``FINAL_SIGNAL`` to a run that is about to be killed; return whether it was sent."""
        if self._ending is None or FINAL_SIGNAL is None or self._status is not None:
            return False
        _send(self._ending, FINAL_SIGNAL)
        self._ending, self._kill_at = None, time.monotonic() + _FINAL_S
        return True

    def _listen(self) -> bool:
        """Wait for a message, a signal or the time to kill; return whether the command is still alive."""
        wait = None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)
        ready, _, _ = select.select([self._pipe, self._wakeup], [], [], wait)
        if self._wakeup in ready:
            with suppress(BlockingIOError):
                os.read(self._wakeup, _LONGEST_BYTES)
        if self._pipe not in ready:
            return True
        messages = os.read(self._pipe, _LONGEST_BYTES).decode()
        for line in messages.splitlines():
            verb, *numbers = line.split()
            if verb == "pass":
                self._pass(int(numbers[0]), int(numbers[1]) or self._child, float(numbers[2]))
            elif verb == "kill":
                self._kill(int(numbers[0]))
            else:
                self._ending = self._kill_at = None
        return bool(messages)

    def _pass(self, number: int, pid: int, seconds: float) -> None:
        if number in STOPPING:
            self._stopped = True
        if number not in self._received:
            _send(pid, number)
        self._received.discard(number)
        if seconds:
            self._ending = pid
            self._kill_at = time.monotonic() + (0.0 if _ignores(pid, number) else seconds)

    def _kill(self, pid: int) -> None:
        if pid == 0:
            self._stopped, self._ending, self._kill_at = True, None, time.monotonic()
            return
        for process in tree(pid):
            _send(process, signal.SIGKILL)
        # Their children have become children of this process, now or earlier.
        for orphan in _children().get(os.getpid(), []):
            for process in tree(orphan) if orphan != self._child else []:
                _send(process, signal.SIGKILL)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = status
                    self._stopped |= os.WIFSIGNALED(status) and os.WTERMSIG(status) in STOPPING


def kill_all() -> None:
    """Kill every descendant of this process, and wait until they have ended."""
    end = time.monotonic() + _KILLED_S
    while time.monotonic() < end:
        left = tree(os.getpid())[1:]
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGKILL)
        time.sleep(0.01)


def tree(root: int) -> list[int]:
    """Return the ids of a process and of its running descendants, parents first."""
    children = _children()
    pids = [root]
    for pid in pids:  # the list grows while it is walked
        pids += children.get(pid, [])
    return pids


def _children() -> dict[int, list[int]]:
    """Return the children of each process, without those that have ended."""
    children: dict[int, list[int]] = {}
    for pid, parent in _linux_parents() if sys.platform == "linux" else _other_parents():
        children.setdefault(parent, []).append(pid)
    return children


def _linux_parents() -> list[tuple[int, int]]:
    pairs = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # it may have ended
                state, parent, *_ = file.read().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    pairs.append((int(name), int(parent)))
    return pairs


def _other_parents() -> list[tuple[int, int]]:
    import subprocess

    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [(int(pid), int(parent)) for pid, parent, state, *_ in rows if not state.startswith("Z")]


def _ignores(pid: int, number: int) -> bool:
    """Return whether a process is known to ignore a signal, so that waiting is useless."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        masks = [line.split()[1] for line in file if line.startswith("SigIgn:")]
        return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)
    return False


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    main(sys.argv[1:])
