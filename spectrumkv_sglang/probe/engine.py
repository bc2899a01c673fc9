"""The probe's SGLang server in loopback mode: one start, tagged requests, what each of them took.

The server is an ordinary ``sglang.launch_server`` with the operator's own flags, so the attention backend, dtype and
tensor parallelism are those that will serve. Requests run one at a time, each behind an empty prefix cache.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from spectrumkv_sglang.errors import SpectrumKVError
from spectrumkv_sglang.launch.client import HttpError, flush_cache, post
from spectrumkv_sglang.launch.processes import ProcessError
from spectrumkv_sglang.launch.servers import READY_TIMEOUT_SECONDS, Device, Fleet, Role, ServerSpec, SGLangServer
from spectrumkv_sglang.launch_flags import Flags, arguments_from_flags
from spectrumkv_sglang.loopback.plan import (
    NATIVE,
    SERVER_LINE,
    LoopbackPlan,
    RequestTag,
    ResultLine,
    ServerRecord,
    read_results,
    write_plan,
)
from spectrumkv_sglang.probe.errors import ProbeError
from spectrumkv_sglang.probe.policies import LOWEST
from spectrumkv_sglang.sglang_compat import LOOPBACK_VARIABLE

_SAMPLE_SECONDS = 0.2
_RESULT_SECONDS = 30.0
_LOG_LINES = 15


class ProbeEngine:
    """A running loopback server; use it as a context manager.

    Args:
        model: directory or hub id.
        flags: SGLang's flags, as the operator gave them.
        device: CPU or GPU.
        base: fields of the SpectrumKV configuration whose scorer observes attention.
        request_seconds: longest that one request may take.
        log_path: where the server's log is copied when the server fails.
        on_waiting: called every 15 s until the server is ready, with the seconds so far.

    Attributes:
        server: what the server serves, known once it is ready.
        policies: folder for the policies' configuration files.
        load_seconds: from start to ready.
        load_bytes, peak_bytes: resident memory of the server's processes when ready, and at most so far.
    """

    def __init__(
        self,
        *,
        model: Path | str,
        flags: Flags,
        device: Device,
        base: dict[str, object],
        request_seconds: float,
        start_seconds: float = READY_TIMEOUT_SECONDS,
        log_path: Path,
        on_waiting: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._on_waiting = on_waiting
        self._request_seconds, self._start_seconds = request_seconds, start_seconds
        self._log_path = log_path
        # Removed at exit at the latest, should a signal come between the steps below.
        self._temporary = tempfile.TemporaryDirectory(prefix="spectrumkv-probe-", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        self.policies = self._folder / "policies"
        self.policies.mkdir()
        self._results = self._folder / "results.jsonl"
        self._offset = 0
        self._ids = itertools.count(1)
        base_path = self._folder / "base.yaml"
        base_path.write_text(yaml.safe_dump(base), encoding="utf-8")
        plan_path = self._folder / "plan.json"
        write_plan(LoopbackPlan(str(base_path), str(self.policies), str(self._results), LOWEST), plan_path)
        env = {LOOPBACK_VARIABLE: str(plan_path)}
        if device is Device.CPU:
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)
        spec = ServerSpec(
            role=Role.PLAIN,
            model=model,
            device=device,
            own_flags=False,
            extra_args=tuple(arguments_from_flags(flags)),
            env=env,
        )
        self._fleet = Fleet()
        self._process = SGLangServer(spec, "probe", log_dir=self._folder)
        self._process.further_temporary = (self._folder,)
        self._stop_sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample_memory, name="spectrumkv-probe-memory", daemon=True)
        self.load_seconds = 0.0
        self.load_bytes = 0
        self.peak_bytes = 0
        self.server: ServerRecord

    def __enter__(self) -> ProbeEngine:
        try:
            self._start()
        except BaseException:
            self._close(failed=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=isinstance(error, SpectrumKVError))

    @property
    def command(self) -> tuple[str, ...]:
        """Command line of the server."""
        return self._process.command

    def generate(self, token_ids: Sequence[int], policy: str, max_new_tokens: int) -> tuple[str, list[int], ResultLine]:
        """Greedy answer to a prompt whose KV has travelled as ``policy`` says: text, token ids and the result line.

        The first token comes from the native KV, as it does from a prefill server; all others from what decode gets.
        """
        tag = RequestTag(id=self._next_id("g"), policy=policy)
        self._flush()
        answer = self._ask(token_ids, tag, max_new_tokens)
        line = self._result(tag)
        return str(answer["text"]), [int(token) for token in answer["output_ids"]], line

    def judge(self, token_ids: Sequence[int], prefix_tokens: int, policy: str) -> ResultLine:
        """Teacher-forced scores of ``token_ids`` behind the first ``prefix_tokens``, whose KV travels as ``policy``
        says. Native comes first: it is the reference of later calls with the same tokens."""
        self._flush()
        prefix = RequestTag(id=self._next_id("p"), policy=policy)
        self._ask(token_ids[:prefix_tokens], prefix, 1)
        self._result(prefix)
        tag = RequestTag(id=self._next_id("j"), policy=policy, judged_after=prefix_tokens, reference=policy == NATIVE)
        self._ask(token_ids, tag, 1, return_logprob=True, logprob_start_len=prefix_tokens)
        return self._result(tag)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        started = time.monotonic()
        self._fleet.start(self._process)
        self._sampler.start()
        try:
            self._fleet.wait_ready(
                timeout_seconds=self._start_seconds, on_waiting=lambda _, seconds: self._on_waiting(seconds)
            )
        except ProcessError as error:
            what = (
                "ended while it started" if not self._process.alive else f"was not ready in {self._start_seconds:g} s"
            )
            raise ProbeError(
                f"SGLang {what}; its log, copied to {self._log_path}, ends with:\n"
                f"{self._process.log_tail(_LOG_LINES)}\n"
                "The probe gives it the flags that follow its own options: check them as you would for a server"
            ) from error
        self.load_seconds = time.monotonic() - started
        self.load_bytes = self.peak_bytes
        line = self._await_line(SERVER_LINE)
        if line.server is None:
            raise ProbeError(f"SGLang started, but its KV cannot be probed: {line.error}")
        self.server = line.server

    def _close(self, *, failed: bool) -> None:
        self._stop_sampling.set()
        try:
            if failed and self._process.log_path.is_file():
                with suppress(OSError):
                    shutil.copyfile(self._process.log_path, self._log_path)
            self._fleet.stop()  # a signal that arrives meanwhile is raised at its end
            if self._sampler.is_alive():
                self._sampler.join(10.0)
        finally:
            self._temporary.cleanup()

    def _flush(self) -> None:
        self._check_alive()
        flush_cache(self._process, timeout_seconds=60.0)

    def _ask(self, token_ids: Sequence[int], tag: RequestTag, max_new_tokens: int, **further: Any) -> dict[str, Any]:
        content = {
            "input_ids": list(token_ids),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "custom_params": tag.as_custom_params(),
            },
            **further,
        }
        url = f"{self._process.url}/generate"
        try:
            answer: dict[str, Any] = json.loads(post(url, content, timeout_seconds=self._request_seconds))
        except HttpError as error:
            self._check_alive()
            raise ProbeError(
                f"a request of {len(token_ids)} tokens failed: {error}. Raise --request-timeout if it took too long"
            ) from error
        return answer

    def _result(self, tag: RequestTag) -> ResultLine:
        line = self._await_line(tag.id)
        if line.error is not None:
            raise ProbeError(f"policy {tag.policy!r} could not be judged: {line.error}")
        return line

    def _await_line(self, wanted: str) -> ResultLine:
        deadline = time.monotonic() + _RESULT_SECONDS
        while True:
            lines, self._offset = read_results(self._results, self._offset)
            for line in lines:
                if line.id == wanted:
                    return line
            self._check_alive()
            if time.monotonic() > deadline:
                raise ProbeError(
                    f"the loopback server reported nothing about {wanted!r} within {_RESULT_SECONDS:.0f} s: is the "
                    "SGLang plugin spectrumkv installed in this environment, and not excluded by SGLANG_PLUGINS?"
                )
            time.sleep(0.02)

    def _check_alive(self) -> None:
        try:
            self._process.check_alive()
        except ProcessError as error:
            raise ProbeError(
                f"SGLang died during the probe; its log, copied to {self._log_path}, ends with:\n"
                f"{self._process.log_tail(_LOG_LINES)}"
            ) from error

    def _next_id(self, kind: str) -> str:
        return f"{kind}{next(self._ids)}"

    def _sample_memory(self) -> None:
        while not self._stop_sampling.wait(_SAMPLE_SECONDS):
            with suppress(psutil.Error):
                leader = psutil.Process(self._process.pid)
                total = 0
                for member in [leader, *leader.children(recursive=True)]:
                    with suppress(psutil.Error):
                        total += member.memory_info().rss
                self.peak_bytes = max(self.peak_bytes, total)
