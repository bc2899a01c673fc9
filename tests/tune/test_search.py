"""The search finds the frontier with few evaluations, ends when it should, and goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spectrumkv_sglang.search.errors import TuneError
from spectrumkv_sglang.search.known_costs import KnownCosts
from spectrumkv_sglang.search.pareto import Box
from spectrumkv_sglang.search.pruning import Pruning
from spectrumkv_sglang.search.search import Limits, Search
from spectrumkv_sglang.search.surrogate import Surrogate
from spectrumkv_sglang.search.trials import Trials

Small = tuple[KnownCosts, Callable[[int, int], float]]
LEAST = 1e-5


def make(small: Small, trials: Trials, evaluations: int, patience: int = 1000, max_kl: float | None = None) -> Search:
    costs, kl = small
    return Search(costs, 2, kl, trials, Pruning(LEAST, max_kl), Limits(evaluations, patience), seed=3)


def places(search: Search) -> list[int]:
    return [trial.place for trial in search.trials.finished]


def test_few_evaluations_come_near_to_all(small_space: Small) -> None:
    costs, kl = small_space
    everything = [
        costs.objectives(place, (kl(place, 0) + kl(place, 1)) / 2).coordinates(LEAST)
        for place in range(len(costs.points))
    ]
    box = Box.around(everything)
    search = make(small_space, Trials(costs, None, {}), 24)
    list(search.run())
    assert len(set(places(search))) == 24
    found = box.hypervolume([one.coordinates(LEAST) for _, one in search.measured()]) / box.hypervolume(everything)
    drawn = np.random.default_rng(0).permutation(len(everything))[:24]
    assert found > 0.97
    assert found > box.hypervolume([everything[place] for place in drawn]) / box.hypervolume(everything)
    assert "--evaluations" in search.stopped_by


def test_what_is_interrupted_goes_on_as_if_it_had_not_been(small_space: Small, tmp_path: Path) -> None:
    costs, kl = small_space
    whole = make(small_space, Trials(costs, None, {"a": "1"}), 14)
    list(whole.run())

    path = tmp_path / "study.log"
    first = make(small_space, Trials(costs, path, {"a": "1"}), 14)
    run = first.run()
    for _ in range(6):
        next(run)

    def fails(place: int, text: int) -> float:
        if text:
            raise KeyboardInterrupt
        return kl(place, text)

    broken = make((costs, fails), Trials(costs, path, {"a": "1"}), 14)
    with pytest.raises(KeyboardInterrupt):
        list(broken.run())
    second = make(small_space, Trials(costs, path, {"a": "1"}), 14)
    assert places(second) == places(whole)[:6]
    list(second.run())
    assert second.trials.finished == whole.trials.finished


def test_a_study_of_something_else_is_refused(small_space: Small, tmp_path: Path) -> None:
    costs, _ = small_space
    path = tmp_path / "study.log"
    Trials(costs, path, {"model weights": "1", "text": "t"})
    with pytest.raises(TuneError, match=r"begun with something else \(model weights was 1, is 2\)"):
        Trials(costs, path, {"model weights": "2", "text": "t"})


@pytest.mark.parametrize("content", ["hello\n", '{"a": 1}\n', "\x00\x01\n"])
def test_a_file_that_is_no_study_is_refused_and_left_alone(small_space: Small, tmp_path: Path, content: str) -> None:
    path = tmp_path / "study.log"
    path.write_text(content)
    with pytest.raises(TuneError, match=r"--study .*give another name"):
        Trials(small_space[0], path, {})
    assert path.read_text() == content


def test_it_ends_without_gain_and_when_nothing_is_left(small_space: Small) -> None:
    costs, _ = small_space
    search = make(small_space, Trials(costs, None, {}), 1000, patience=6)
    list(search.run())
    assert len(places(search)) < len(costs.points)
    assert "--patience" in search.stopped_by

    few = KnownCosts(costs.points[:10], costs.wire[:10], costs.seconds_per_byte[:10])
    search = make((few, small_space[1]), Trials(few, None, {}), 1000)
    list(search.run())
    assert search.stopped_by == "no point is left"
    assert len(places(search)) + search.ruled_out == 10


def test_points_that_lose_too_much_are_no_result(small_space: Small) -> None:
    costs, _ = small_space
    search = make(small_space, Trials(costs, None, {}), 20, max_kl=0.001)
    list(search.run())
    assert search.frontier()
    assert all(one.kl <= 0.001 for _, one in search.measured())
    assert any(trial.pruned for trial in search.trials.finished)


def test_predictions_pass_through_what_is_known_and_are_unsure_elsewhere(small_space: Small) -> None:
    costs, kl = small_space
    truth = np.log10([kl(place, 0) for place in range(len(costs.points))])
    known = np.random.default_rng(2).permutation(len(truth))[:40]
    mean, deviation = Surrogate(costs.points).predict(known.tolist(), truth[known].tolist())
    assert np.abs(mean - truth)[known].max() < 0.05
    others = np.setdiff1d(np.arange(len(truth)), known)
    assert np.abs(mean - truth)[others].mean() < 0.2
    assert deviation[others].mean() > deviation[known].mean()
