"""A resolved run: its config does not change any more, and its input has been read."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cases import cases
from helpers.events import event
from helpers.logs import Row, random_rows, write_lines
from helpers.runs import ALONE, Tree, checked, quick

from reagent_lite.config import DqnConfig, WorkflowConfig
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.run.resolved import resolve
from reagent_lite.run.runner import Run
from reagent_lite.training.metrics import MetricsWriter
from reagent_lite.training.stop import StopSignal

FAST: Tree = {"calc_cpe_in_training": False, "models": {"final_fit_passes": 1}, "bootstrap_resamples": 100}


def events(first: int, episodes: int) -> list[Row]:
    """Episodes of three events with the actions a and b."""
    return [
        event(str(name), step, float(step), float(name % 3), terminal=step == 2, action="ab"[(name + step) % 2])
        | {"possible_actions": ["a", "b"]}
        for name in range(first, first + episodes)
        for step in range(3)
    ]


def renamed(rows: list[Row]) -> list[Row]:
    """The rows with the reward in a column of another name."""
    return [{"won" if name == "reward" else name: value for name, value in row.items()} for row in rows]


@cases("logs, sections", {
    "transitions": ([random_rows(60)], {}),
    "events": ([events(0, 30)], {}),
    "a sample of events": ([events(0, 30)], {"query": {"tableSample": 90.0}}),
    "two logs": ([events(0, 20), events(10, 20)], {}),
    "two logs with the same episodes": ([events(0, 20), events(10, 20)], {"data": {"same_episodes": True}}),
    "two logs, the first with names of its own": (
        [renamed(events(0, 20)), events(20, 20)], {"data": {"columns": {"reward": "won"}}},
    ),
})  # fmt: skip
def test_an_input_file_is_opened_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list[list[Row]], sections: Tree
) -> None:
    """For its first rows, which say what it is, and to be copied; not at all by the next run."""
    paths = [str(write_lines(tmp_path / f"{number}.jsonl", rows)) for number, rows in enumerate(logs)]
    tree = quick(Path(), tmp_path / "out", training_data_path=paths, evaluation=FAST, **sections)
    assert opened(monkeypatch, lambda: Run(resolve(checked(tree), ALONE), StopSignal())) == dict.fromkeys(paths, 2)
    again = opened(monkeypatch, lambda: Run(resolve(checked(tree), ALONE), StopSignal()))
    assert max(again.values(), default=0) <= ("query" in sections)  # its first rows, as a sample is one of events


def opened(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> dict[str, int]:
    """Returns how often each input file is opened."""
    counts: Counter[str] = Counter()
    open_file = InputFile.open

    def counted(file: InputFile) -> Any:
        counts[file.path] += 1
        return open_file(file)

    with monkeypatch.context() as patch:
        patch.setattr(InputFile, "open", counted)
        work()
    return dict(counts)


def test_nothing_changes_the_config_of_a_resolved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported model alone has another one, with the temperature that the evaluation has chosen."""
    log = write_lines(tmp_path / "log.jsonl", random_rows(60))
    sections: Tree = {"rl": {"temperature": "auto"}, "training": {"minibatch_size": None}, "evaluation": FAST}
    resolved = resolve(checked(quick(log, tmp_path / "out", epochs=2, **sections)), ALONE)
    assert resolved.config.training.minibatch_size is not None
    (tmp_path / "out").mkdir()

    def refuse(*_: object, **__: object) -> WorkflowConfig:
        raise AssertionError("a config is changed")

    with StopSignal() as signal, MetricsWriter(lines=0, figures={}) as writer, monkeypatch.context() as patch:
        patch.setattr(DqnConfig, "model_copy", refuse)
        run = Run(resolved, signal)
        learned = run.learn(writer)
        assert run.config is run.source.config is resolved.config
    with monkeypatch.context() as patch:
        published: list[WorkflowConfig] = []
        patch.setattr("reagent_lite.run.runner.publish", lambda config, *_: published.append(config))
        run.publish(learned, 0.0)
    assert published[0].rl.temperature == run.evaluators.temperature
    assert run.config.rl.temperature == "auto"
