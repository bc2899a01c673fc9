"""Child processes that never outlive the program that started them.

Each process runs in a session of its own, so that Ctrl-C reaches only the program in front, which then stops its
children in an orderly way. Three things together leave no orphan: `ManagedProcess.stop` ends the whole process group
and every descendant (SGLang spawns schedulers and detokenizers); an `atexit` hook and the signal handlers of
`stopping_on_signals` call it on every ordinary way out; and a *leash*, a tiny shell that waits on a pipe, kills the
group and removes its temporary files should the program itself be killed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

import psutil

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.netns import NetworkNamespace

PROGRESS_SECONDS = 15.0
"""Between two words about servers that are not healthy yet."""
LOG_TAIL_LINES = 40
# SGLang looks for a SIGTERM every 5 seconds, to drain requests that nobody here waits for: not worth a long grace.
GRACE_SECONDS = 1.0
_TRACKER_SECONDS = 3.0
# Waits for end-of-file on its standard input, which comes when the program that holds the other end is gone. If the
# group still runs then, the program was killed: Python's resource trackers are ended last, to unlink their semaphores.
_LEASH = r"""
group=$1; prefix=$2; shift 2
cat >/dev/null
if kill -0 "-$group" 2>/dev/null; then
  shared=
  for process in /proc/[0-9]*; do
    fields=$(cat "$process/stat" 2>/dev/null)
    fields=${fields##*) ? }; fields=${fields#* }
    [ "${fields%% *}" = "$group" ] || continue
    [ -z "$prefix" ] || shared="$shared $(grep -o "/dev/shm/$prefix[^ ]*" "$process/maps" 2>/dev/null)"
    grep -q multiprocessing.resource_tracker "$process/cmdline" || kill -KILL "${process#/proc/}"
  done 2>/dev/null
  sleep 2
  kill -KILL "-$group" 2>/dev/null
  [ -z "$shared" ] || rm -f -- $shared
fi
rm -rf -- "$@"
"""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_running: set[ManagedProcess] = set()
_running_lock = threading.Lock()


class ProcessError(SpectrumKVError):
    """A child process did not start, or died."""


class ManagedProcess:
    """A command in its own session, with its output in a log file and its own temporary folder.

    Args:
        name: short name for messages ("decode", "router").
        command: program and arguments.
        env: the whole environment; ``TMPDIR`` is replaced by a folder that lives as long as the process.
        cwd: working directory.
        log_path: file that takes standard output and standard error; it is replaced.
        namespace: network namespace to start in; None for the program's own.

    Attributes:
        shared_memory_prefix: files in shared memory whose names start so are removed with the process that maps them;
            for subclasses whose program leaves them behind. Empty for none.
        further_temporary: folders that are removed with the process's own, even should the program be killed. Set
            before the start.
    """

    shared_memory_prefix = ""
    further_temporary: Sequence[Path] = ()

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log_path: Path,
        namespace: NetworkNamespace | None = None,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.env = dict(env)
        self.cwd = cwd
        self.log_path = log_path
        self.namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None
        self._leash: subprocess.Popen[bytes] | None = None
        self._temporary = ""
        self._stop_lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id, which is also the process group id.

        Raises:
            ProcessError: it was never started.
        """
        if self._process is None:
            raise ProcessError(f"{self.name} has not been started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has been started and still runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and return at once.

        Raises:
            ProcessError: it runs already, or the program cannot be executed.
        """
        if self._process is not None:
            raise ProcessError(f"{self.name} has been started before")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.mkdtemp(prefix="spectrumkv-")
        leashed = [self._temporary, *map(str, self.further_temporary)]
        inside = self.namespace.entered() if self.namespace is not None else nullcontext()
        try:
            with signals_held(), self.log_path.open("wb") as log, inside:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self.env, "TMPDIR": self._temporary},
                    cwd=self.cwd,
                    start_new_session=True,
                )
                with _running_lock:
                    _running.add(self)
                self._leash = subprocess.Popen(
                    ["/bin/sh", "-c", _LEASH, "leash", str(self._process.pid), self.shared_memory_prefix, *leashed],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            self.stop()
            raise ProcessError(f"could not start {self.name} ({self.command[0]}): {error}") from error

    def check_alive(self) -> None:
        """Raise when the process has ended by itself.

        Raises:
            ProcessError: with the exit status and the end of the log.
        """
        if self._process is None or self._process.poll() is None:
            return
        raise ProcessError(
            f"{self.name} ended with exit status {self._process.returncode}; its log, {self.log_path}, ends with:\n"
            f"{self.log_tail()}"
        )

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log."""
        try:
            text = self.log_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """End the process and all its descendants: SIGTERM, then SIGKILL after ``grace_seconds``. Safe to repeat."""
        with self._stop_lock:
            if self._process is not None:
                _end_process_tree(self._process, grace_seconds, self.shared_memory_prefix)
            if self._temporary:
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._temporary = ""
            if self._leash is not None:
                if self._leash.stdin is not None:
                    self._leash.stdin.close()
                self._leash.wait()
                self._leash = None
            with _running_lock:
                _running.discard(self)


def stop_processes(processes: Iterable[ManagedProcess], grace_seconds: float = GRACE_SECONDS) -> None:
    """Stop several processes at once; signals that arrive meanwhile wait until all are gone."""
    with signals_held():
        threads = [threading.Thread(target=process.stop, args=(grace_seconds,)) for process in processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def stop_all() -> None:
    """Stop every process that is still managed; runs at exit by itself."""
    with _running_lock:
        remaining = list(_running)
    for process in remaining:  # no threads: at exit the interpreter may refuse to start one
        process.stop()


atexit.register(stop_all)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an ordinary exit for the block, so that ``with`` blocks and ``finally`` run.

    SIGINT already does, as KeyboardInterrupt. Main thread only.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold stop signals back for a short block that must not be left half done, then deliver the first one.

    Handlers are replaced rather than signals blocked: a process started in the block would inherit a blocked signal.
    Python runs handlers in the main thread only, so other threads have nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    previous = {number: signal.signal(number, lambda n, _frame: arrived.append(n)) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


def _end_process_tree(process: subprocess.Popen[bytes], grace_seconds: float, shared_memory_prefix: str) -> None:
    family: list[psutil.Process] = []
    trackers: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        family = [leader, *leader.children(recursive=True)]
        trackers = [member for member in family if _is_resource_tracker(member)]
    leftovers = _mapped_shared_memory(family, shared_memory_prefix) if shared_memory_prefix else set()
    if process.poll() is None:
        process.terminate()  # not the group: SGLang takes a scheduler that ends first for a crash
    psutil.wait_procs(family, timeout=grace_seconds)
    for member in family:
        if member not in trackers:
            _kill(member)
    process.wait()
    # Python's resource trackers end by themselves once their clients are gone, after unlinking their semaphores.
    psutil.wait_procs(trackers, timeout=_TRACKER_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        _kill(member)
    psutil.wait_procs(family, timeout=10)
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)


def _mapped_shared_memory(processes: Iterable[psutil.Process], prefix: str) -> set[Path]:
    """Return the files in /dev/shm with names that start with ``prefix`` and that one of the processes maps."""
    mapped: set[Path] = set()
    for process in processes:
        with suppress(OSError):  # it has ended, or the system has no /proc
            for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines():
                path = line[line.index("/") :] if "/" in line else ""
                if path.startswith(f"/dev/shm/{prefix}") and not path.endswith(" (deleted)"):
                    mapped.add(Path(path))
    return mapped


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()  # psutil compares the creation time first, so a reused id is never hit
