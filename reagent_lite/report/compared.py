"""The page of workflows.compare: curves over seeds, configs, runs, and the decision about the chosen run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reagent_lite.errors import pluralize
from reagent_lite.evaluation.decision import Choice, ShipDecision
from reagent_lite.evaluation.interval import Interval, none_if_infinite, percent
from reagent_lite.report.charts import Curves, Line, curve_chart
from reagent_lite.report.content import PageSection, Report, Table, made_now

CURVE_LEVEL = 0.95
"""Level of the band at each point of a curve."""
TABLE_LEVEL = 0.95
"""Level with which the intervals of all configs hold together."""
_ENOUGH_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedConfig:
    """The runs of a config that have ended.

    Attributes:
        name: its name.
        runs: {name of a run: its score}, of the episodes that choose.
        middle: interquartile mean of the scores.
        mean: mean of the scores, with an interval that holds together with those of the other configs.
        curve: {step: interquartile mean over the runs, with a bootstrap interval}, at the steps that all runs have.
    """

    name: str
    runs: Mapping[str, float]
    middle: float
    mean: Interval
    curve: Mapping[int, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRuns:
    """All figures of a comparison.

    Attributes:
        score: tag of the score that runs are compared by.
        configs: the configs with a finished run, the best first.
        seeds: {run: its seed}.
        outcomes: {run: the last line of its standard output}.
        failed: {run: its error}.
        folders: {run: its folder}.
    """

    score: str
    configs: tuple[ComparedConfig, ...]
    seeds: Mapping[str, int]
    outcomes: Mapping[str, Mapping[str, Any]]
    failed: dict[str, str]
    folders: Mapping[str, str]

    @property
    def chosen(self) -> str:
        """The run with the highest score of the config with the highest interquartile mean."""
        runs = self.configs[0].runs
        return max(runs, key=lambda name: runs[name])

    @property
    def decision(self) -> ShipDecision:
        """The chosen run's own decision, which rests on episodes that did not choose it."""
        decision = self.outcomes[self.chosen]["decision"]
        return ShipDecision(
            choice=Choice(decision["choice"]),
            reason=(
                f"{self.chosen} was chosen from {pluralize(len(self.outcomes), 'run')} by other episodes than "
                f"those that decide: {decision['reason']}"
            ),
            next_step=decision["next"],
        )

    def config_rows(self) -> list[dict[str, Any]]:
        """Returns a row for each config, the best first."""
        return [
            {
                "config": config.name,
                "runs": len(config.runs),
                "interquartile_mean": config.middle,
                "mean": config.mean.value,
                "low": none_if_infinite(config.mean.low),
                "high": none_if_infinite(config.mean.high),
            }
            for config in self.configs
        ]

    def curve_rows(self) -> list[dict[str, Any]]:
        """Returns a row for each point of each config's curve."""
        return [
            {"config": config.name, "step": step, **point.json()}
            for config in self.configs
            for step, point in config.curve.items()
        ]

    def run_rows(self) -> list[dict[str, Any]]:
        """Returns a row for each run: those of the best config first, failed ones last."""
        done = [
            {
                "run": run,
                "config": config.name,
                "seed": self.seeds[run],
                "score": score,
                "final": outcome["scores"].get(self.score),
                "decision": outcome["decision"]["choice"],
                "steps": outcome["steps"],
                "seconds": outcome["seconds"],
                "folder": self.folders[run],
                "error": "",
            }
            for config in self.configs
            for run, score in config.runs.items()
            for outcome in [self.outcomes[run]]
        ]
        failed = [
            {
                **dict.fromkeys(done[0]),
                "run": run,
                "config": run.rpartition("-")[0],
                "seed": self.seeds[run],
                "folder": self.folders[run],
                "error": error,
            }
            for run, error in self.failed.items()
        ]
        return [*done, *failed]

    def document(self) -> dict[str, Any]:
        """Returns compare.json."""
        return {
            "score": self.score,
            "compared": len(self.outcomes),
            "chosen": self.chosen,
            "decision": self.decision.json(),
            "level": TABLE_LEVEL,
            "configs": self.config_rows(),
            "runs": self.run_rows(),
            "curves": self.curve_rows(),
        }


def report_of_comparison(comparison: ComparedRuns, seconds: float) -> Report:
    """Returns the page of a comparison whose last command took so many seconds."""
    fewest = min(len(config.runs) for config in comparison.configs)
    few = f"Bands of curves are too narrow with few runs; here a config has {fewest}." if fewest < _ENOUGH_RUNS else ""
    lost = pluralize(len(comparison.failed), "run")
    return Report(
        title="Comparison of runs",
        decision=comparison.decision,
        notes=(
            f"Runs are compared by {comparison.score} on episodes that choose and do not decide. Reports of other "
            "runs are about runs that were not chosen: to choose by them is to choose by the episodes that decide.",
            f"{lost} failed and {'is' if len(comparison.failed) == 1 else 'are'} not compared."
            if comparison.failed
            else "",
        ),
        facts=(
            ("Runs compared", len(comparison.outcomes)),
            ("Configs", len(comparison.configs)),
            ("Score", comparison.score),
            ("Chosen run", comparison.chosen),
        ),
        made=made_now(seconds),
        sections=(_curves(comparison, few), _configs(comparison), _runs(comparison)),
    )


def _curves(comparison: ComparedRuns, few: str) -> PageSection:
    lines = tuple(
        Line(
            name=config.name,
            points=tuple((float(step), point.value) for step, point in config.curve.items()),
            band=tuple(
                (point.low, point.high) if point.defined else (point.value, point.value)
                for point in config.curve.values()
            ),
        )
        for config in comparison.configs
        if len(config.curve) > 1
    )
    if not lines:
        return PageSection(title="Learning curves")
    chart = curve_chart(Curves(title=comparison.score, x="optimizer steps", y="interquartile mean", lines=lines))
    band = (
        f"Interquartile mean over the runs of a config, with the {percent(CURVE_LEVEL)} bootstrap interval at each "
        "point (Agarwal et al. 2021)."
    )
    return PageSection(title="Learning curves", notes=(band, few), charts=(chart,))


def _configs(comparison: ComparedRuns) -> PageSection:
    level = percent(TABLE_LEVEL)
    table = Table(
        title="Configs, best first",
        columns=(
            ("Config", "name"),
            ("Runs", "number"),
            ("Interquartile mean", "number"),
            (f"Mean ({level} together)", "number"),
        ),
        rows=[(config.name, len(config.runs), config.middle, config.mean) for config in comparison.configs],
        note=(
            f"The intervals of the means (Student's t over runs) hold together with {level}: the level is divided by "
            "the number of configs. A single run has none."
        ),
    )
    return PageSection(title="Configs", tables=(table,), in_brief=1)


def _runs(comparison: ComparedRuns) -> PageSection:
    rows = comparison.run_rows()
    done = Table(
        title="Runs",
        columns=(("Run", "name"), ("Score that chooses", "number"), ("Final score", "number"), ("Folder", "name")),
        rows=[[row[key] for key in ("run", "score", "final", "folder")] for row in rows if not row["error"]],
    )
    failed = Table(
        title="Runs that failed",
        columns=(("Run", "name"), ("Error", "words")),
        rows=[*comparison.failed.items()],
        note="The same command tries them again.",
    )
    return PageSection(title="Runs", tables=(done, failed) if comparison.failed else (done,))
