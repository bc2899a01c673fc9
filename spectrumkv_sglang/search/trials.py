"""What was judged so far: an optuna study, in memory or in a journal file that a later run takes up again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectrumkv_sglang.search.codec_speeds import CodecSpeeds, decode_speeds
from spectrumkv_sglang.search.errors import TuneError
from spectrumkv_sglang.search.known_costs import KnownCosts

STUDY_NAME = "spectrumkv-tune"
_IDENTITY, _SPEEDS, _KL, _PRUNED = "identity", "speeds", "kl", "pruned"


@dataclass(frozen=True)
class Trial:
    """A point that was judged.

    Attributes:
        place: of the point among all.
        kl: KL divergence on each text that it was judged on, in the texts' order.
        pruned: why not on all of them; "" if it was.
    """

    place: int
    kl: tuple[float, ...]
    pruned: str


class Trials:
    """The trials of one study, in the order in which they were made.

    Args:
        costs: of the points that are searched.
        path: of the journal file; None: nothing is kept.
        identity: what the results depend on; a study that was begun with another one is refused.
        speeds: kept along with a study that begins, for `kept_speeds`.

    Raises:
        TuneError: the file is no study, or one of another identity; says what differs.
    """

    def __init__(
        self, costs: KnownCosts, path: Path | None, identity: Mapping[str, str], speeds: bytes | None = None
    ) -> None:
        self._costs = costs
        self._optuna = _import_optuna()
        self._places = {point: place for place, point in enumerate(costs.points)}
        self._study = self._open(path, dict(identity), speeds)
        self._running: Any = None
        self._current = -1
        self.finished: list[Trial] = []
        """In order."""
        self._read()

    def begin(self, place: int) -> None:
        """The point at ``place`` is being judged."""
        self._study.sampler = _given_sampler(_parameters(self._costs, place))
        self._running = self._study.ask(self._distributions())
        self._current = place

    def finish(self, kl: Sequence[float], pruned: str) -> Trial:
        """It was, with these results."""
        trial = Trial(self._current, tuple(kl), pruned)
        state = self._optuna.trial.TrialState
        self._running.set_user_attr(_KL, list(kl))
        self._running.set_user_attr(_PRUNED, pruned)
        if pruned:
            self._study.tell(self._running, state=state.PRUNED)
        else:
            objectives = self._costs.objectives(trial.place, sum(kl) / len(kl))
            values = [objectives.kl, objectives.wire_ratio, objectives.seconds_per_byte]
            self._study.tell(self._running, values)
        self.finished.append(trial)
        return trial

    def _distributions(self) -> dict[str, Any]:
        points = self._costs.points
        axes = {axis: sorted({getattr(point, axis) for point in points}) for axis in _parameters(self._costs, 0)}
        return {axis: self._optuna.distributions.CategoricalDistribution(choices) for axis, choices in axes.items()}

    def _open(self, path: Path | None, identity: dict[str, str], speeds: bytes | None) -> Any:
        optuna = self._optuna
        study = optuna.create_study(
            storage=optuna.storages.InMemoryStorage() if path is None else _storage(path),
            study_name=STUDY_NAME,
            directions=["minimize"] * 3,
            load_if_exists=True,
            sampler=_given_sampler({}),
        )
        before = study.user_attrs.get(_IDENTITY)
        if before is None:
            study.set_user_attr(_IDENTITY, identity)
            study.set_user_attr(_SPEEDS, None if speeds is None else speeds.decode())
            study.set_metric_names(["kl", "wire_ratio", "seconds_per_byte"])
        elif before != identity:
            differing = sorted(name for name in {*before, *identity} if before.get(name) != identity.get(name))
            shown = "; ".join(f"{name} was {before.get(name)}, is {identity.get(name)}" for name in differing)
            raise TuneError(
                f"--study {path} was begun with something else ({shown}): its results would not fit. Give the same, or "
                "another --study"
            )
        return study

    def _read(self) -> None:
        state = self._optuna.trial.TrialState
        for stored in self._study.get_trials(deepcopy=False):
            if stored.state is state.RUNNING:  # of a run that was interrupted: judged again when it is proposed
                self._study.tell(stored.number, state=state.FAIL)
                continue
            kl = stored.user_attrs.get(_KL)
            if stored.state is state.FAIL or kl is None:
                continue
            point = type(self._costs.points[0])(**stored.params)
            self.finished.append(Trial(self._places[point], tuple(kl), stored.user_attrs.get(_PRUNED, "")))


def kept_speeds(path: Path) -> CodecSpeeds | None:
    """The speeds that a study was begun with; None if there is no study yet.

    Raises:
        TuneError: the file is no study.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    _import_optuna()
    (study,) = _storage(path).get_all_studies()
    kept = study.user_attrs.get(_SPEEDS)
    return None if kept is None else decode_speeds(kept.encode(), f"--study {path}")


def _storage(path: Path) -> Any:
    """Of a study that is there, or is to be."""
    optuna = _import_optuna()
    new = not path.exists() or path.stat().st_size == 0
    try:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        names = [study.study_name for study in storage.get_all_studies()]
    except OSError as error:
        raise TuneError(f"--study {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever a file that is none brings about in there
        raise TuneError(f"--study {path}: no file of a search ({error}); give another name") from error
    if not new and names != [STUDY_NAME]:
        raise TuneError(f"--study {path}: holds no search of spectrumkv tune; give another name")
    return storage


def _given_sampler(given: Mapping[str, Any]) -> Any:
    """A sampler of optuna that draws nothing: points are chosen by `proposal`."""
    from optuna.samplers import BaseSampler

    class GivenSampler(BaseSampler):  # type: ignore[misc]
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return given[param_name]

    return GivenSampler()


def _parameters(costs: KnownCosts, place: int) -> dict[str, Any]:
    return dict(vars(costs.points[place]))


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise TuneError(
            "optuna and scipy, which search, are not installed: pip install 'spectrumkv-sglang[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
