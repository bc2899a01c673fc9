"""How the requests of a soak ended, counted as they end; no servers, no threads of its own."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from soak_client import Reply
from soak_judging import Expected, Judgement, Limits, Verdict, judge
from soak_windows import Windows

_MOST_DETAILS = 30


@dataclass(frozen=True)
class Ended:
    """One request that has ended. Times are seconds since the start of the load; ``prompt`` is its number.

    ``own``: a fault's own request, which may fail but not be wrong.
    """

    prompt: int
    started: float
    ended: float
    reply: Reply
    own: bool = False


@dataclass
class Account:
    """Counts and details of a run. Safe for use by several threads.

    Attributes:
        verdicts: requests by verdict, errors and our aborts included.
        errors: errors by kind: those that a fault explains, and those of a fault's own requests.
        unexpected: errors by kind that nothing explains.
        details: the first wrong, differing and unexpectedly failed ones.
        to_repeat: prompts whose answers were wrong, to be asked again alone.
        first_tokens: of each whole answer the second it ended, seconds to the first token, and whether it met a fault.
        largest_shift: of the log-probabilities of right answers.
        tie_gaps: of the ties.
    """

    expected: list[list[Expected]]
    windows: Windows
    limits: Limits = field(default_factory=Limits)
    lossy: bool = False
    verdicts: Counter[str] = field(default_factory=Counter)
    in_windows: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    details: list[dict[str, Any]] = field(default_factory=list)
    to_repeat: list[int] = field(default_factory=list)
    first_tokens: list[tuple[float, float, bool]] = field(default_factory=list)
    largest_shift: float = 0.0
    tie_gaps: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def answered(self) -> int:
        """Whole answers that were compared."""
        kinds = (Verdict.RIGHT, Verdict.TIE, Verdict.DIFFERS, Verdict.WRONG)
        return sum(self.verdicts[kind.value] for kind in kinds)

    def judged(self, prompt: int, reply: Reply) -> Judgement:
        """Compare a whole answer with what is expected; counts nothing."""
        return judge(self.expected[prompt], reply.tokens, reply.logprobs, self.limits, lossy=self.lossy)

    def add(self, request: Ended) -> Verdict:
        """Count a request; returns how it ended."""
        reply = request.reply
        hit = self.windows.touched(request.started, request.ended)
        if reply.left:
            verdict = Verdict.ABORTED
        elif reply.error:
            verdict = Verdict.ERROR
            self._add_error(request)
        else:
            verdict = self._add_answer(request, hit)
        with self._lock:
            self.verdicts[verdict.value] += 1
            if hit:
                self.in_windows[verdict.value] += 1
        return verdict

    def _add_error(self, request: Ended) -> None:
        kind = request.reply.error
        explained = request.own or self.windows.explain(kind, request.started, request.ended) is not None
        with self._lock:
            (self.errors if explained else self.unexpected)[kind] += 1
            if not explained:
                self._detail(request, error=kind)

    def _add_answer(self, request: Ended, hit: bool) -> Verdict:
        judgement = self.judged(request.prompt, request.reply)
        verdict = judgement.verdict
        with self._lock:
            if not request.own:
                self.first_tokens.append((request.ended, request.reply.ttft, hit))
            if verdict is Verdict.RIGHT:
                self.largest_shift = max(self.largest_shift, judgement.shift)
            elif verdict is Verdict.TIE:
                self.tie_gaps.append(judgement.gap)
            elif verdict is Verdict.WRONG:
                self.to_repeat.append(request.prompt)
                self._detail(request, wrong=vars(judgement) | {"verdict": verdict.value, "in a window": hit})
        return verdict

    def _detail(self, request: Ended, **what: Any) -> None:
        if len(self.details) < _MOST_DETAILS:
            times = {"prompt": request.prompt, "started": round(request.started, 2), "ended": round(request.ended, 2)}
            self.details.append(times | what)
