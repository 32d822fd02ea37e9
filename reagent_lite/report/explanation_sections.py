"""Sections on who gets what under a policy, who gains and who loses."""

from collections.abc import Iterator, Mapping

from reagent_lite.errors import pluralize
from reagent_lite.evaluation.explanation import Explanation, Importance, PolicyGroup, PolicyTree
from reagent_lite.evaluation.interval import Interval, number, percent
from reagent_lite.evaluation.segment_effects import SegmentChange, SegmentEffect, Segments
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.charts import interval_chart
from reagent_lite.report.content import Cell, PageSection, Table, note_omitted

_GAINS = "Who gains and who loses"
_GETS = "Who gets what"
_MOST_FEATURES = 100
_MOST_CHOICES = 5  # of a segment
_MOST_LETTERS = 26  # of a segment's name in the chart, which fits a phone
_LEAST_SHARE = 0.005  # of a choice that is named
_MARKS = {
    SegmentChange.GAINS: Verdict.TRUSTWORTHY,
    SegmentChange.LOSES: Verdict.DO_NOT_USE,
    SegmentChange.UNDECIDED: Verdict.SUPPORT,
}
"""Marks of segments in their chart."""


def explanation_sections(explanation: Explanation, where: str) -> tuple[PageSection, PageSection]:
    """Returns the sections "Who gains and who loses" and "Who gets what".

    Args:
        explanation: the explanation of the policy.
        where: name of the file with the complete figures.
    """
    absent = {part: (("Not shown", reason),) for part, reason in explanation.absent.items()}
    gains = PageSection(title=_GAINS, facts=absent.get("segments", ()))
    gets = PageSection(title=_GETS, facts=absent.get("tree", ()))
    if explanation.segments is not None:
        gains = _segments_section(explanation.segments, explanation.choices)
    if explanation.tree is not None and explanation.importance is not None:
        tables = (_tree_table(explanation.tree), _importance_table(explanation.importance, where))
        gets = PageSection(title=_GETS, notes=(_fidelity(explanation.tree),), tables=tables)
    return gains, gets


def _segments_section(segments: Segments, choices: tuple[PolicyGroup, ...]) -> PageSection:
    unit = segments.unit
    numbered = sorted(enumerate(segments.effects), key=lambda pair: pair[1].difference.value)
    several = len(numbered) > 1
    names = {
        index: f"{rank}. {effect.words}" if several else effect.words
        for rank, (index, effect) in enumerate(numbered, 1)
    }
    what = "reward of a row" if unit == "row" else "discounted return of an episode"
    of_episodes = "" if unit == "row" else " Episodes are divided by their first rows."
    how = (
        f"The policy's {what} minus the logged one, in segments that {segments.choosing:,} other {unit}s chose; "
        f"{percent(segments.level)} intervals that hold together.{of_episodes}"
    )
    alike = f"In {segments.choosing:,} {unit}s no feature divides them into segments whose effects clearly differ."
    drawn = [(_shorten(names[index]), effect.difference, _MARKS[effect.standing]) for index, effect in numbered]
    chart = interval_chart(
        "Difference from the logged policy by segment",
        drawn,
        {"no difference": Interval(value=0.0, low=0.0, high=0.0)},
        words_of={mark: standing.value for standing, mark in _MARKS.items()},
    )
    rows = [_segment_row(names[index], effect) for index, effect in numbered]
    if several:
        rows.append(("all, weighted by share", 1.0, None, None, None, segments.total, ""))
    effects = Table(
        title=f"Effect by segment, the largest loss first: {what}",
        columns=(
            ("Segment", "name"),
            (f"Share of {unit}s", "bar"),
            (f"Effective {unit}s", "number"),
            ("Logged policy", "number"),
            ("New policy", "number"),
            ("Difference", "number"),
            ("Result", "words"),
        ),
        rows=rows,
    )
    return PageSection(
        title=_GAINS,
        notes=(how if several else alike,),
        charts=(chart,) if several else (),
        tables=(
            *((effects,) if several else ()),
            *_choices_table({names[index]: choices[index] for index, _ in numbered if choices}),
        ),
        in_brief=1,
    )


def _segment_row(name: str, effect: SegmentEffect) -> tuple[Cell, ...]:
    result = f"{effect.standing} ({effect.verdict}: {effect.reason})"
    means = (effect.logged.value, effect.figure.value)
    return (name, effect.share, effect.effective, *means, effect.difference, result)


def _choices_table(groups: Mapping[str, PolicyGroup]) -> Iterator[Table]:
    """Yields a table of the most frequent choices in each segment, unless they are unknown."""
    if not groups:
        return
    rows = [
        (f"{name}: {choice}", logged, policy)
        for name, group in groups.items()
        for choice, (logged, policy) in [*group.choices.items()][:_MOST_CHOICES]
    ]
    yield Table(
        title="Shares of choices by segment, the most frequent ones",
        columns=(("Segment: choice", "name"), ("Log", "bar"), ("New policy", "bar")),
        rows=rows,
    )


def _fidelity(tree: PolicyTree) -> str:
    return (
        f"A small tree predicts {percent(tree.fidelity)} of the policy's decisions in "
        f"{pluralize(tree.rows, 'row')} that did not grow it. A complete description would reach {percent(tree.best)}, "
        f"as the policy draws the rest by chance; without any feature it would be {percent(tree.constant)}."
    )


def _tree_table(tree: PolicyTree) -> Table:
    if any(leaf.probability is not None for leaf in tree.leaves):
        return Table(
            title="Kinds of candidates, by the policy's choices",
            columns=(
                ("Candidates with", "words"),
                ("Probability to be chosen", "bar"),
                ("Share of the log's choices", "bar"),
                ("Share of the policy's choices", "bar"),
            ),
            rows=[(leaf.words, leaf.probability, *leaf.choices[leaf.words]) for leaf in tree.leaves],
        )
    return Table(
        title="The policy as a small tree",
        columns=(("Rows with", "words"), ("Share of rows", "bar"), ("New policy", "words"), ("Log", "words")),
        rows=[(leaf.words, leaf.share, _list_leaf(leaf, 1), _list_leaf(leaf, 0)) for leaf in tree.leaves],
    )


def _list_leaf(leaf: PolicyGroup, side: int) -> str:
    """Returns the most frequent choices in the log (side 0) or under the policy (1), in words."""
    ordered = sorted(leaf.choices.items(), key=lambda choice: -choice[1][side])[:_MOST_CHOICES]
    return ", ".join(f"{name} {shares[side]:.0%}" for name, shares in ordered if shares[side] >= _LEAST_SHARE)


def _importance_table(importance: Importance, where: str) -> Table:
    shown = [*importance.changes.items()][:_MOST_FEATURES]
    of_tree = " by the tree, as the policy is a column of the log," if importance.of_tree else ""
    rest = note_omitted(len(importance.changes) - len(shown), "features", where)
    note = f"Share of {number(importance.rows)} decisions{of_tree} that change if values are shuffled among rows."
    return Table(
        title="Features that decisions depend on",
        columns=(("Feature", "name"), ("Decisions that change", "bar")),
        rows=shown,
        note=f"{note} {rest}".strip(),
    )


def _shorten(name: str) -> str:
    return name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
