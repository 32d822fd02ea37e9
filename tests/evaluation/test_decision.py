"""The decision from estimates, simulation and publish_if, and how it is written."""

from dataclasses import replace

import pytest
from oracles.reports import FIGURE, OVERLAP, around, comparison, estimated, undefined

from reagent_lite.evaluation.cpe import Estimate
from reagent_lite.evaluation.decision import Choice, Simulated, decide, findings_of
from reagent_lite.evaluation.gate import Gate
from reagent_lite.evaluation.report import compared
from reagent_lite.evaluation.verdict import Verdict

SHIP, NOT, UNCLEAR = Choice.SHIP, Choice.DO_NOT_SHIP, Choice.NOT_ENOUGH
BETTER, WORSE, EQUAL = (comparison(estimated("MAGIC", value, 1.0)) for value in (12.5, 8.0, 10.0))
ONE = Simulated(name="The policy", returns=around(5.0, 1.0))
RANDOM = Simulated(name="Random actions", returns=around(2.0, 1.0), random=True)
PASSED, HELD = (Gate(passed=passed, reason="why", document={}) for passed in (True, False))


@pytest.mark.parametrize(
    ("rows", "choice", "reason"),
    [
        ([estimated("a", 12.5, 1), estimated("b_c", 13, 2.5)], SHIP,
         "b c estimates a discounted return of an episode of 13.0 (10.5 to 15.5) against 10 (9 to 11) of the logged "
         "policy, a difference of 3.0 (0.5 to 5.5)"),
        ([estimated("a", 8, 1), estimated("b", 20, 1, Verdict.DO_NOT_USE)], NOT,
         "a estimates a discounted return of an episode of 8 (7 to 9) against 10 (9 to 11) of the logged policy, a "
         "difference of -2 (-3 to -1)"),
        ([estimated("a", 12, 1), estimated("b", 10, 1)], UNCLEAR,
         "b estimates a discounted return of an episode of 10 (9 to 11) against 10 (9 to 11) of the logged policy, a "
         "difference of 0 (-1 to 1), which may be 0"),
        ([estimated("a", 12, 1), estimated("b", 8, 1)], UNCLEAR,
         "trustworthy estimates contradict each other about the logged policy"),
        ([estimated("a", 12, 1, Verdict.WIDE), undefined("b"), undefined("c")], UNCLEAR,
         "no estimate of the discounted return of an episode can be trusted in comparison with the logged policy's "
         "10 (9 to 11); the most frequent reason is: no propensities"),
    ],
)  # fmt: skip
def test_the_log_decides_by_trustworthy_differences(rows: list[Estimate], choice: Choice, reason: str) -> None:
    found = decide(findings_of([comparison(*rows)], ()))
    assert (found.choice, found.reason) == (choice, reason)
    assert found.json() == {"choice": choice.value, "reason": reason, "next": found.next_step}
    assert str(found) == f"{choice.value.capitalize()}: {reason}. Next: {found.next_step}"


@pytest.mark.parametrize(
    ("first", "second", "difference", "choice"),
    [(5.0, 2.0, None, SHIP), (2.0, 5.0, None, NOT), (5.0, 5.0, None, UNCLEAR), (5.0, 4.5, 0.5, SHIP),
     (5.0, 4.5, -0.5, NOT), (5.0, 2.0, 0.1, UNCLEAR)],
)  # fmt: skip
def test_a_paired_difference_or_intervals_that_do_not_meet_decide_a_simulation(
    first: float, second: float, difference: float | None, choice: Choice
) -> None:
    paired = None if difference is None else around(difference, 0.25)
    other = replace(RANDOM, returns=around(second, 1.0), difference=paired)
    found = decide(findings_of((), (replace(ONE, returns=around(first, 1.0)), other)))
    assert found.choice is choice
    assert found.reason.startswith(
        f"its return in simulation is {around(first, 1.0)}, against {around(second, 1.0)} of "
    )


@pytest.mark.parametrize(
    ("findings", "choice", "part"),
    [
        (findings_of((), ()), UNCLEAR, "nothing was evaluated"),
        (findings_of((), (ONE,)), UNCLEAR, "its return in simulation is 5 (4 to 6)"),
        # better than random actions says nothing of the logged policy
        (findings_of((EQUAL,), (ONE, RANDOM)), UNCLEAR, "which may be 0"),
        (findings_of((EQUAL,), (ONE, replace(RANDOM, random=False))), SHIP, "its return in simulation"),
        (findings_of((replace(EQUAL, simulated=around(15, 1)),), ()), SHIP, "in simulation its discounted return"),
        (findings_of((WORSE,), (ONE, RANDOM)), UNCLEAR, "; but its return in simulation"),
        (findings_of((BETTER,), (ONE, RANDOM)), SHIP, "MAGIC estimates"),
        (findings_of((BETTER,), (), gate=PASSED), SHIP, "publish_if is fulfilled: why"),
        (findings_of((EQUAL,), (), gate=PASSED), SHIP, "publish_if is fulfilled: why"),
        (findings_of((WORSE,), (), gate=PASSED), UNCLEAR, "; but publish_if is fulfilled: why"),
        (findings_of((BETTER,), (), gate=HELD), NOT, "publish_if holds the model back: why"),
        (findings_of((replace(BETTER, reference=None),), ()), SHIP, "a difference of 2.5 (1.5 to 3.5) from"),
        (findings_of((replace(BETTER, decides=False),), ()), UNCLEAR, "nothing was evaluated"),
    ],
)  # fmt: skip
def test_findings_add_up(findings, choice: Choice, part: str) -> None:  # type: ignore[no-untyped-def]
    found = decide(findings)
    assert found.choice is choice
    assert part in found.reason


@pytest.mark.parametrize(("share", "word"), [(None, "action_probability"), (1.0, "action_probability"), (0.0, "A/B")])
def test_the_next_step_is_what_the_log_lacks(share: float | None, word: str) -> None:
    found = findings_of([comparison(undefined("IPS"))], (), overlap=OVERLAP | {"unsupported_share": share})
    step = decide(found).next_step
    assert word in step
    assert step.startswith("log the probability") == (share != 0.0)


def test_the_reward_s_return_decides_and_metrics_have_their_own_title() -> None:
    row = {"name": "MAGIC", "figure": FIGURE, "difference": FIGURE, "normalized": None, "verdict": "wide",
           "reason": "r"}  # fmt: skip
    family = {"logged": FIGURE, "estimates": [row], "disagreement": FIGURE}
    outcomes = [{"name": name, "one_step": family, "sequential": family} for name in ("Reward", "reward")]
    found = compared({"outcomes": outcomes})
    assert [one.title for one in found] == [
        "Reward: discounted return of an episode", "Reward: reward of a row",
        "Metric reward: discounted sum over an episode", "Metric reward: mean of a row",
    ]  # fmt: skip
    assert [one.decides for one in found] == [True, False, False, False]
    assert found[0].rows[0].figure == around(2.0, 1.0)
