"""Child processes end with the program that started them, however it ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spectrumkv_sglang.launch.processes import ManagedProcess, ProcessError, stop_processes

# A leader that ignores SIGTERM, with two children: what an SGLang server with its schedulers looks like from outside.
STUBBORN_FAMILY = "trap '' TERM; sleep 600 & sleep 600 & echo started; wait"
# The same, held by a program that then waits; it prints the leader's process id.
# A shell in the background starts programs that ignore SIGINT; an operator's does not.
PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from spectrumkv_sglang.launch.processes import ManagedProcess, stopping_on_signals
process = ManagedProcess("family", ["/bin/bash", "-c", sys.argv[1]], env=os.environ, cwd=Path("."),
                         log_path=Path(sys.argv[2]))
process.further_temporary = (Path(sys.argv[3]),)
with stopping_on_signals():
    process.start()
    while not Path(sys.argv[2]).read_text():
        time.sleep(0.01)
    print(process.pid, process._temporary, flush=True)
    time.sleep(60)
"""


def family_process(log: Path, script: str = STUBBORN_FAMILY) -> ManagedProcess:
    """Return a started family, its children running."""
    process = ManagedProcess("family", ["/bin/bash", "-c", script], env=os.environ, cwd=log.parent, log_path=log)
    process.start()
    wait_until(lambda: "started" in log.read_text())
    return process


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def running_in_group(group: int) -> list[int]:
    """Return the process ids of the group's members that have not ended."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def test_stop_ends_the_whole_family_even_when_it_ignores_sigterm(tmp_path: Path) -> None:
    process = family_process(tmp_path / "log")
    assert len(running_in_group(process.pid)) == 3
    process.stop(grace_seconds=0.1)
    process.stop(grace_seconds=0.1)  # safe to repeat
    assert running_in_group(process.pid) == []
    assert not process.alive


def test_children_in_sessions_of_their_own_are_ended_too(tmp_path: Path) -> None:
    process = family_process(tmp_path / "log", "setsid sleep 600 & sleep 0.3; echo started; wait")
    children = psutil.Process(process.pid).children(recursive=True)
    assert any(os.getsid(child.pid) != process.pid for child in children)
    process.stop(grace_seconds=0.1)
    assert not any(child.is_running() for child in children)


def test_several_processes_are_stopped_at_once(tmp_path: Path) -> None:
    processes = [family_process(tmp_path / f"log-{i}") for i in range(6)]
    started = time.monotonic()
    stop_processes(processes, grace_seconds=1.0)
    assert time.monotonic() - started < 4.5  # one after the other: 6 s
    assert [running_in_group(process.pid) for process in processes] == [[]] * 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_child_survives_a_signal_to_the_program(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, STUBBORN_FAMILY, str(tmp_path / "log"), str(tmp_path / "further")]
    (tmp_path / "further").mkdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        group, temporary = program.stdout.readline().split()
        assert len(running_in_group(int(group))) == 3
        program.send_signal(number)
        program.wait(timeout=20)
    wait_until(lambda: running_in_group(int(group)) == [])
    wait_until(lambda: not Path(temporary).exists())
    wait_until(lambda: not (tmp_path / "further").exists())


def test_a_killed_program_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    """What an SGLang server has there: semaphores that a resource tracker unlinks, and a file that nothing unlinks."""
    shared = Path(f"/dev/shm/spectrumkv_test_{os.getpid()}")
    server = (
        "import glob, mmap, multiprocessing, sys, time\n"
        f"file = open({str(shared)!r}, 'w+b'); file.truncate(4096); mapped = mmap.mmap(file.fileno(), 4096)\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True); time.sleep(600)"
    )
    program = PROGRAM.replace("process.further", f"process.shared_memory_prefix = {shared.name!r}\nprocess.further")
    command = [sys.executable, "-c", program, f"exec {shlex.join([sys.executable, '-c', server])}"]
    arguments = [str(tmp_path / "log"), str(tmp_path / "further")]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        group = int(holder.stdout.readline().split()[0])
        semaphore = Path("/dev/shm") / f"sem.{(tmp_path / 'log').read_text().strip().lstrip('/')}"
        assert semaphore.exists()
        assert shared.exists()
        holder.kill()
    wait_until(lambda: running_in_group(group) == [])
    wait_until(lambda: not semaphore.exists() and not shared.exists())


def test_a_process_that_ended_by_itself_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = family_process(tmp_path / "log", "echo started; echo the reason; exit 7")
    wait_until(lambda: not process.alive)
    with pytest.raises(ProcessError, match=r"(?s)family ended with exit status 7.*the reason"):
        process.check_alive()
    process.stop()


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    process = ManagedProcess("ghost", ["/no/such/program"], env={}, cwd=tmp_path, log_path=tmp_path / "log")
    with pytest.raises(ProcessError, match=r"could not start ghost \(/no/such/program\)"):
        process.start()
