"""What a row of events must fulfil, as SQL of Spark's, whose reading does not go through rows/table.py yet."""

from __future__ import annotations

from dataclasses import dataclass

from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.timeline.engine import Dialect, EventColumns

MOST_SEQUENCE = (1 << 62) - 1
"""Differences of sequence numbers up to it are 64-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that may be wrong with a row.

    Attributes:
        name: in reports.
        broken: SQL that is true where the rule is broken; null counts as false.
        expected: in words.
        got: SQL for what stands there instead, as text.
        todo: advice.
    """

    name: str
    broken: str
    expected: str
    got: str
    todo: str = ""


def rules(
    dialect: Dialect,
    columns: EventColumns,
    actions: tuple[str, ...],
    rewards: tuple[str, ...] = (),
    *,
    dated: bool = False,
) -> tuple[Rule, ...]:
    """Returns the rules for the columns that are there, the ones that others rest on first.

    Args:
        dialect: of the engine.
        columns: of the events.
        actions: the names that actions may have; empty for any.
        rewards: further columns that must hold finite numbers, or nothing.
        dated: whether date partitions are asked for.
    """
    text = dialect.types["text"]

    def shown(expression: str) -> str:
        return f"COALESCE(CAST({expression} AS {text}), 'null')"

    found = [
        Rule(name="unreadable", broken="fault IS NOT NULL", expected="", got="fault"),
        Rule(name="mdp_id_absent", broken="mdp_id IS NULL", expected="an mdp_id", got="'null'",
             todo="It says which rows are one episode"),
        Rule(name="sequence_number_absent", broken="sequence_number IS NULL", expected="a sequence_number",
             got="'null'", todo="It says in which order the rows of an episode happened"),
        Rule(name="sequence_number_far", got=shown("sequence_number"), expected="a sequence_number within ±2^62",
             broken=f"NOT (sequence_number BETWEEN {-MOST_SEQUENCE} AND {MOST_SEQUENCE})"),
        Rule(name="state_features_absent", broken="state_features IS NULL", expected="state_features", got="'null'"),
        Rule(name="state_features_empty", broken="CARDINALITY(state_features) = 0", got="'none'",
             expected="at least one feature in state_features", todo="A state of which nothing is known leads nowhere"),
        Rule(name="state_features_infinite", broken=dialect.any_infinite("state_features"),
             expected="finite numbers in state_features", got=shown("state_features")),
        Rule(name="reward_not_finite", broken=f"(reward IS NULL) OR ({dialect.infinite('reward')})",
             expected="a finite number in reward", got=shown("reward")),
    ]  # fmt: skip
    if dated:
        found.append(Rule(name="ds_absent", broken="ds IS NULL", expected="a date in ds", got="'null'"))
    if "metrics" in columns.optional:
        found.append(
            Rule(name="metrics_not_finite", broken=f"(metrics IS NOT NULL) AND ({dialect.any_not_finite('metrics')})",
                 expected="finite numbers in metrics", got=shown("metrics"))
        )  # fmt: skip
    for name in rewards:
        number = f"TRY_CAST({dialect.quote(name)} AS {dialect.types['number']})"
        found.append(
            Rule(name=f"{name}_not_finite", expected=f"a finite number in {name}", got=shown(dialect.quote(name)),
                 broken=f"({dialect.quote(name)} IS NOT NULL) AND (({number} IS NULL) OR ({dialect.infinite(number)}))")
        )  # fmt: skip
    if "action_probability" in columns.optional:
        outside = "(NOT (action_probability > 0 AND action_probability <= 1))"
        outside += f" OR ({dialect.infinite('action_probability')})"  # NaN compares as engines like
        found.append(
            Rule(name="propensity_outside", got=shown("action_probability"),
                 broken=f"(action_probability IS NOT NULL) AND ({outside})",
                 expected="a propensity above 0 and at most 1")
        )  # fmt: skip
    if actions:
        names = ", ".join(dialect.literal(name) for name in actions)
        listed = ", ".join(actions[:10]) + (", ..." if len(actions) > 10 else "")
        found.append(
            Rule(name="action_unknown", broken=f"(action IS NOT NULL) AND (action NOT IN ({names}))",
                 expected=f"one of the actions {listed}, or an index below {len(actions)}", got="action")
        )  # fmt: skip
    if not columns.discrete:
        found.append(
            Rule(name="action_infinite", broken=f"(action IS NOT NULL) AND ({dialect.any_infinite('action')})",
                 expected="finite numbers in action", got=shown("action"))
        )  # fmt: skip
    if "possible_actions" in columns.optional:
        taken = "action" if columns.discrete else "TO_JSON(action)"
        holds = dialect.holds if columns.discrete else dialect.holds_features
        inside = holds("possible_actions", "action")
        if not columns.discrete:  # of an empty list the candidates are unknown
            inside = f"({dialect.length('possible_actions')} = 0) OR {inside}"
        found.append(
            Rule(name="action_not_possible", got=shown(taken), expected="an action among possible_actions",
                 broken=f"(action IS NOT NULL) AND (possible_actions IS NOT NULL) AND (NOT ({inside}))")
        )  # fmt: skip
    if "truncated" in columns.optional and "terminal" in columns.optional:
        found.append(
            Rule(name="terminal_and_truncated", broken="terminal AND truncated", got="'both'",
                 expected="terminal or truncated, not both",
                 todo="A true end is terminal; truncated says that a limit cut the episode before one")
        )  # fmt: skip
    return tuple(found)


def faulty(query: str, dialect: Dialect, columns: EventColumns, contract: Contract) -> str:
    """Returns a query whose `fault` is (rule, expected, got, todo) of the first rule that a row breaks, or null."""
    found = rules(dialect, columns, contract.actions or (), contract.rewards, dated=contract.dated)
    known = contract.actions or ()
    places = [(str(index), name) for index, name in enumerate(known) if str(index) not in known]
    cases = " ".join(f"WHEN {dialect.literal(index)} THEN {dialect.literal(name)}" for index, name in places)
    action = f"CASE action {cases} ELSE action END" if places else "action"
    faults = []
    for rule in found:
        words = [dialect.literal(one) for one in (rule.name, rule.expected, rule.todo)]
        got = rule.got
        if rule.name == "unreadable":
            words[1] = "SUBSTRING_INDEX(SUBSTR(fault, 10), ', got ', 1)"
            got = "SUBSTRING_INDEX(fault, ', got ', -1)"
        struct = f"NAMED_STRUCT('rule', {words[0]}, 'expected', {words[1]}, 'got', {got}, 'todo', {words[2]})"
        faults.append(f"WHEN ({rule.broken}) THEN {struct}")
    named = f"SELECT * EXCEPT (action), {action} AS action FROM ({query}) found"
    return f"SELECT * EXCEPT (fault), CASE {' '.join(faults)} END AS fault FROM ({named}) named"
