"""Runs one deployment shape at a time for `shapes.py`: a plain server, then a pair, and the same questions to both."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from command_line import made
from fault_pair import GPU_FLAGS, failures, metrics_of
from shape_cases import Models, Shape
from shape_report import Answers, Row
from soak_client import ask_pair, ask_plain
from soak_judging import Expected, Limits, Verdict, first_difference, judge
from soak_plain import SoakError, expected_of

from spectrumkv_sglang.launch.processes import ProcessError
from spectrumkv_sglang.launch.prompts import LONG_PROMPTS, SHORT_PROMPTS
from spectrumkv_sglang.launch.servers import Device, Fleet, Role, ServerSpec, SGLangServer
from spectrumkv_sglang.observability.live_metrics import LiveMetrics
from spectrumkv_sglang.observability.metric_specs import CHUNKS, NATIVE_BYTES, WIRE_BYTES

OURS, SGLANGS = "spectrumkv_tcp", "mooncake_tcp"
SETTINGS = {"SPECTRUMKV_SLOT_BYTES": "4MiB", "SPECTRUMKV_MIN_TOKENS": "0"}
_ERROR_LINE = re.compile(r"^(?:\[[^]]*\] )?(?:[\w.]*(?:Error|Exception|Interrupt)\b.*|.*: error: .*)$")


@dataclass(frozen=True)
class BenchSettings:
    """What all shapes of a run have in common.

    Attributes:
        models: directories.
        out: for logs and results.
        device: where servers run.
        profile: SpectrumKV's profile, one without loss: answers are compared.
        flags: further SGLang flags of every server.
        new_tokens: of each answer.
        ready_seconds: for the start of servers.
        request_seconds: for one answer.
        longest_words: cuts the long prompts; None leaves them as they are.
        limits: what still counts as rounding.
    """

    models: Models
    out: Path
    device: Device
    profile: str
    flags: tuple[str, ...]
    new_tokens: int
    ready_seconds: float
    request_seconds: float
    longest_words: int | None = None
    limits: Limits = field(default_factory=Limits)


def prompts(longest_words: int | None) -> list[str]:
    """Short ones, long ones, and long ones again with another end, which hit the prefix cache."""
    short, long = [one.text for one in SHORT_PROMPTS][:1], [one.text for one in LONG_PROMPTS][:2]
    long = [" ".join(text.split()[:longest_words]) for text in long]
    return [*short, *long, *(f"{text}\nWhat does the text leave open?" for text in long)]


class ShapeBench:
    """Plain answers are kept in the folder of results, for shapes that share model and flags and for later runs."""

    def __init__(self, settings: BenchSettings, fleet: Fleet) -> None:
        self._settings, self._fleet = settings, fleet
        self._prompts = prompts(settings.longest_words)

    def run(self, shape: Shape) -> Row:
        """Start the shape's servers, ask, stop them."""
        if getattr(self._settings.models, shape.model) is None:
            return Row(shape.name, shape.what, not_started=f"no model was given for it (--{shape.model}-model)")
        try:
            right = self._right_answers(shape)
        except (ProcessError, SoakError) as error:
            text = f"the plain server: {error_line(self._log(shape, 'plain'), str(error))}"
            return Row(shape.name, shape.what, not_started=text, sglang="the same server", sglang_fails=True)
        row = self._ask_pair(shape, OURS, right)
        if row.not_started or not row.answers.good:  # whose fault is it?
            plain = self._ask_pair(shape, SGLANGS, right)
            said = plain.not_started or str(plain.answers) + (
                f" ({plain.answers.first})" if plain.answers.first else ""
            )
            fails = bool(plain.not_started) or not plain.answers.good
            row = Row(**{**vars(row), "sglang": said, "sglang_fails": fails})
        return row

    # ---- servers -------------------------------------------------------------------------------------------------

    def _server(self, shape: Shape, role: Role, backend: str, ranks: int, flags: Iterable[str]) -> SGLangServer:
        settings, on_cpu = self._settings, self._settings.device is Device.CPU
        env = {} if backend == SGLANGS or role is Role.PLAIN else {**SETTINGS, "SPECTRUMKV_PROFILE": settings.profile}
        if on_cpu and ranks > 1:  # SGLang wants a NUMA node for each rank, or to be told the cores
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        spec = ServerSpec(
            role=role,
            model=getattr(settings.models, shape.model),
            backend=backend,
            device=settings.device,
            own_flags=on_cpu,
            env=env,
            extra_args=(*(() if on_cpu else GPU_FLAGS), "--enable-metrics", *shape.both, *flags, *settings.flags),
        )
        name = role.value if backend == OURS else f"{role.value}-sglang"
        server = SGLangServer(spec, name, log_dir=self._log(shape, name).parent)
        return self._fleet.start(server)

    def _log(self, shape: Shape, name: str) -> Path:
        return made(self._settings.out / shape.name) / f"{name}.log"

    def _right_answers(self, shape: Shape) -> list[Expected]:
        settings = self._settings
        model = str(getattr(settings.models, shape.model))
        asked = [settings.device.value, model, shape.both, settings.flags, settings.new_tokens, self._prompts]
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
        kept = settings.out / f"plain-answers-{digest}.json"
        if kept.exists():
            return msgspec.json.decode(kept.read_bytes(), type=list[Expected])
        server = self._server(shape, Role.PLAIN, OURS, 1, ())
        try:
            self._fleet.wait_ready([server], timeout_seconds=settings.ready_seconds)
            replies = [
                ask_plain(server, text, settings.new_tokens, timeout_seconds=settings.request_seconds)
                for text in self._prompts
            ]
        finally:
            self._fleet.stop([server])
        right = [expected_of(reply) for reply in replies]
        kept.write_bytes(msgspec.json.encode(right))
        return right

    def _ask_pair(self, shape: Shape, backend: str, right: list[Expected]) -> Row:
        both = [
            (Role.PREFILL, shape.ranks[0], (*shape.pair, *shape.prefill)),
            (Role.DECODE, shape.ranks[1], (*shape.pair, *shape.decode)),
        ]
        servers = [self._server(shape, role, backend, ranks, flags) for role, ranks, flags in both]
        prefill, decode = servers
        try:
            try:
                self._fleet.wait_ready(servers, timeout_seconds=self._settings.ready_seconds)
            except ProcessError as error:
                dead = [server for server in servers if not server.alive] or servers
                text = f"{dead[0].spec.role.value}: {error_line(dead[0].log_path, str(error))}"
                return Row(shape.name, shape.what, not_started=text)
            answers = self._answers(prefill, decode, right)
            if backend == SGLANGS or not prefill.alive:
                return Row(shape.name, shape.what, answers)
            return _counted(shape, answers, metrics_of(prefill))
        finally:
            self._fleet.stop(servers)

    def _answers(self, prefill: SGLangServer, decode: SGLangServer, right: list[Expected]) -> Answers:
        counts: Counter[Verdict] = Counter()
        first = ""
        for text, expected in zip(self._prompts, right, strict=True):
            reply = ask_pair(
                prefill, decode, text, self._settings.new_tokens, timeout_seconds=self._settings.request_seconds
            )
            if reply.error:
                counts[Verdict.ERROR] += 1
                first = first or f"error: {reply.error}"
                continue
            verdict = judge([expected], reply.tokens, reply.logprobs, self._settings.limits, lossy=False)
            counts[verdict.verdict] += 1
            if verdict.verdict is Verdict.WRONG:
                position = first_difference(reply.tokens, expected.tokens)
                first = first or f"token {position} differs (gap {verdict.gap:.1e}), shift {verdict.shift:.1e}"
        return Answers(counts[Verdict.RIGHT], counts[Verdict.TIE], counts[Verdict.WRONG], counts[Verdict.ERROR], first)


def _counted(shape: Shape, answers: Answers, prefill: LiveMetrics) -> Row:
    chunks: dict[str, dict[str, int]] = {"tiered": {}, "native": {}}
    for (path, reason), count in prefill.by_label(CHUNKS, "path", "reason").items():
        chunks.setdefault(path, {})[reason] = int(count)
    native = prefill.total(NATIVE_BYTES, path="tiered")
    b = prefill.total(WIRE_BYTES, path="tiered") / native if native else 0.0
    return Row(shape.name, shape.what, answers, chunks, failures(prefill), round(b, 4))


def error_line(log: Path, otherwise: str) -> str:
    """The last line of a server's log that names an exception, or else the last of ``otherwise``; not too long."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    found = [line for line in lines if _ERROR_LINE.match(line)]
    line = found[-1] if found else (otherwise.splitlines() or ["no word"])[-1]
    return line if len(line) <= 240 else line[:240] + " ..."
