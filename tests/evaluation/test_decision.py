"""The decision from estimates, simulation and publish_if, and how it is written."""

from dataclasses import replace

import pytest
from helpers.reports import FIGURE, OVERLAP, RESULT, around, comparison, estimated, game, undefined

from reagent_lite.evaluation.cpe import CPEResult, Estimate, OutcomeResult, ReturnOrReward
from reagent_lite.evaluation.decision import (
    Choice,
    Comparison,
    Evidence,
    compare_models,
    compare_with_log,
    decide_findings,
    evidence_of,
)
from reagent_lite.evaluation.gate import Gate
from reagent_lite.evaluation.overlap import RareOutcomes
from reagent_lite.evaluation.played import EstimatedReturn
from reagent_lite.evaluation.verdict import Verdict

PDIS = "Per_Decision_Importance_Sampling"
DR = "Sequential_Doubly_Robust"
SHIP = Choice.SHIP
NOT = Choice.DO_NOT_SHIP
UNCLEAR = Choice.NOT_ENOUGH
BETTER, WORSE, EQUAL = (comparison(estimated("MAGIC", value, 1.0)) for value in (12.5, 8.0, 10.0))
BEATS_RANDOM, BEATS_OTHER = (
    game(around(5.0, 1.0), around(2.0, 1.0), around(3.0, 1.0), against=against) for against in (False, True)
)
CONTINUED = replace(comparison(estimated("MAGIC", 12, 1)), reference=around(4.0, 1.0), continued=around(10.0, 1.0))
PASSED, HELD = (Gate(passed=passed, reason="why", document={}) for passed in (True, False))


@pytest.mark.parametrize(
    ("rows", "choice", "reason"),
    [
        ([estimated(PDIS, 12.5, 1), estimated(DR, 13, 2.5)], SHIP,
         "the new policy would earn 12.5 (11.5 to 13.5) an episode (discounted), today's earns 10 (9 to 11) (+25%); "
         "Per Decision Importance Sampling estimates a difference of 2.5 (1.5 to 3.5)"),
        ([estimated(PDIS, 8, 1), estimated(DR, 20, 1, Verdict.DO_NOT_USE)], NOT,
         "the new policy would earn 8 (7 to 9) an episode (discounted), today's earns 10 (9 to 11) (-20%); "
         "Per Decision Importance Sampling estimates a difference of -2 (-3 to -1)"),
        ([estimated(PDIS, 12, 1.5), estimated(DR, 10, 1)], UNCLEAR,
         "the new policy would earn 10 (9 to 11) an episode (discounted), today's earns 10 (9 to 11) (+0%); "
         "Sequential Doubly Robust estimates a difference of 0 (-1 to 1), which may be 0"),
        ([estimated(PDIS, 12, 1), estimated(DR, 8, 1)], UNCLEAR,
         "trustworthy estimates contradict each other about the logged policy"),
        ([estimated(PDIS, 12, 1, Verdict.SUPPORT), undefined(DR), undefined("MAGIC")], UNCLEAR,
         "no estimate of the discounted return per episode can be trusted in comparison with the logged policy's "
         "10 (9 to 11): no propensities"),
    ],
)  # fmt: skip
def test_the_log_decides_by_trustworthy_differences(rows: list[Estimate], choice: Choice, reason: str) -> None:
    decision = decide_findings(Evidence(comparisons=(comparison(*rows),)))
    assert (decision.choice, decision.reason) == (choice, reason)
    assert decision.json() == {"choice": choice.value, "reason": reason, "next": decision.next_step}
    assert str(decision) == f"{choice.value.capitalize()}: {reason}. Next: {decision.next_step}"


@pytest.mark.parametrize(
    ("value", "half", "changed", "choice"),
    [
        (10.0004, 0.0003, 0.0005, UNCLEAR),
        (9.9996, 0.0003, 0.0005, UNCLEAR),
        (10.0004, 0.0003, 0.02, SHIP),  # other choices that earn nearly the same
        (11.0, 0.5, 0.0005, SHIP),  # few choices that earn much more
        (10.01, 0.0085, 0.0005, SHIP),  # may be more than a thousandth of what the log earns
    ],
)
def test_a_policy_that_does_what_the_log_does_is_not_shipped(
    value: float, half: float, changed: float, choice: Choice
) -> None:
    result = replace(RESULT, overlap=replace(OVERLAP, changed_share=changed))
    decision = decide_findings(Evidence(result=result, comparisons=(comparison(estimated(PDIS, value, half)),)))
    assert decision.choice is choice
    if choice is UNCLEAR:
        assert decision.reason.startswith(
            "the policy does the same as the logged policy: it takes 0.05% of the decisions otherwise"
        )
        assert decision.next_step.startswith("keep the policy in use: there is nothing to gain")


@pytest.mark.parametrize("rows", [[estimated(PDIS, 10, 1)], [estimated(PDIS, 10, 1, Verdict.SUPPORT)]])
def test_episodes_that_the_log_has_are_not_asked_for(rows: list[Estimate]) -> None:
    result = replace(RESULT, overlap=OVERLAP, num_episodes_left_out=3000)
    step = decide_findings(Evidence(result=result, comparisons=(comparison(*rows),))).next_step
    count = OVERLAP.num_episodes
    assert step.startswith(
        f"set evaluation.max_episodes to {count + 3000}: {count:,} episodes were scored, and the log has 3,000 more"
    )
    assert "log more" not in step


@pytest.mark.parametrize(
    ("evidence", "choice", "part"),
    [
        (Evidence(result=RESULT, played=BEATS_RANDOM), UNCLEAR, "no episodes could be scored"),
        # the paired difference decides, not the returns
        *((Evidence(played=game(around(5.0, 1.0), around(4.5, 1.0), around(difference, 0.25))), choice,
           "is 5 (4 to 6), against 4.5 (3.5 to 5.5) of random actions, a paired difference of "
           f"{around(difference, 0.25)}")
          for difference, choice in ((0.5, SHIP), (-0.5, NOT), (0.1, UNCLEAR))),
        # better than random actions says nothing of the logged policy
        (Evidence(comparisons=(EQUAL,), played=BEATS_RANDOM), UNCLEAR, "which may be 0"),
        (Evidence(comparisons=(EQUAL,), played=BEATS_OTHER), SHIP, "of the other model, a paired difference"),
        (Evidence(comparisons=(replace(EQUAL, simulated=around(15, 1)),)), SHIP,
         "in simulation its discounted return is 15 (14 to 16), against 10 (9 to 11) of the logged policy in the log"),
        (Evidence(comparisons=(WORSE,), played=BEATS_RANDOM), UNCLEAR, "; but its return in simulation"),
        (Evidence(comparisons=(BETTER,), played=BEATS_RANDOM), SHIP, "MAGIC estimates"),
        # a passed publish_if is no evidence
        (Evidence(comparisons=(EQUAL,), gate=PASSED), UNCLEAR, "which may be 0"),
        (Evidence(comparisons=(WORSE,), gate=PASSED), NOT, "a difference of -2"),
        (Evidence(comparisons=(BETTER,), gate=HELD), NOT, "publish_if blocks the export: why"),
        (Evidence(comparisons=(replace(BETTER, reference=None),)), SHIP, "a difference of 2.5 (1.5 to 3.5) from"),
        (Evidence(comparisons=(replace(BETTER, decides=False),)), UNCLEAR, "no episodes could be scored"),
        # an estimate that continues cut records is next to the logged value continued alike
        (Evidence(comparisons=(CONTINUED,)), SHIP,
         "12 (11 to 13) an episode (discounted), the logged policy continued by the value model earns 10 (9 to 11)"),
        (Evidence(comparisons=(replace(CONTINUED, rows=(estimated(PDIS, 12, 1),)),)), SHIP,
         "today's earns 4 (3 to 5) (+50%); Per"),
        (Evidence(comparisons=(replace(EQUAL, events=RareOutcomes(unsized=0, expected=1.2, seen=0.0)),)),
         UNCLEAR, ", which may be 0 (0 rare outcomes in matching decisions, 1.2 expected by chance)"),
        # what flatters a policy speaks against it, not for it
        (Evidence(comparisons=(BETTER,), seen=True), UNCLEAR, "; but the policy has learned from scored episodes"),
        (Evidence(comparisons=(WORSE,), seen=True), NOT, "a difference of -2"),
        (Evidence(comparisons=(BETTER,), played=BEATS_OTHER, seen=True), SHIP, "in simulation"),
        (Evidence(comparisons=(WORSE,), other_seen=True), UNCLEAR, "; but the other policy has learned from scored"),
        (Evidence(comparisons=(BETTER,), other_seen=True), SHIP, "a difference of 2.5"),
    ],
)  # fmt: skip
def test_findings_add_up(evidence: Evidence, choice: Choice, part: str) -> None:
    decision = decide_findings(evidence)
    assert decision.choice is choice
    assert part in decision.reason


@pytest.mark.parametrize(
    ("share", "reason", "step"),
    [
        (
            0.5,
            "",
            "give it a small share of the decisions, with their propensities logged (rollout of workflows.serve).",
        ),
        (0.97, "; but it takes one action with propensity 1.0 in 97% of its decisions", "train it again with rl."),
    ],
)
def test_a_policy_that_does_not_explore_is_not_shipped_for_its_propensities(
    share: float, reason: str, step: str
) -> None:
    result = replace(RESULT, overlap=replace(OVERLAP, certain_share=share))
    decision = decide_findings(Evidence(result=result, comparisons=(BETTER,)))
    assert decision.choice is SHIP
    assert ("; but it takes" in decision.reason, reason in decision.reason) == (bool(reason), True)
    assert decision.next_step.startswith(step)
    assert decide_findings(Evidence(result=result, comparisons=(WORSE,))).next_step.startswith("keep the policy in use")


@pytest.mark.parametrize(("by_time", "choice"), [(False, SHIP), (True, UNCLEAR)])
def test_simulation_is_beside_the_log_if_it_is_the_same_quantity(by_time: bool, choice: Choice) -> None:
    """A return of 15 in simulation against 10 logged, unless the log is discounted by time."""
    family = ReturnOrReward(logged=around(10.0, 1.0), continued=None, estimates=(undefined(PDIS),), events=None)
    result = replace(RESULT, outcomes=(OutcomeResult(name="Reward", one_step=family, sequential=family),))
    estimated_return = EstimatedReturn.of(result.overlap, gamma=0.8, by_time=by_time, horizon=1000)
    decision = decide_findings(evidence_of(result, game(around(15, 1), around(2, 1), around(13, 1)), estimated_return))
    assert (decision.choice, "its discounted return is 15" in decision.reason) == (choice, not by_time)


UNSURE = comparison(undefined("IPS_Reward"))


@pytest.mark.parametrize(
    ("unsure", "result", "steps"),
    [
        ([UNSURE], replace(RESULT, weighted=False), ["log the probability of every action"]),
        ([UNSURE], replace(RESULT, overlap=replace(OVERLAP, unsupported_share=1.0)),
         ["log the probability of every action"]),
        # 2.5 of 10 effective episodes among 30: four times as many
        ([UNSURE], replace(RESULT, overlap=replace(OVERLAP, effective_episodes=2.5)),
         ["log about 120 episodes to score in place of 30"]),
        ([UNSURE], replace(RESULT, overlap=replace(OVERLAP, mean_weight=around(0.7, 0.1),
                                                 mean_episode_weight=around(0.7, 0.1))),
         ["log more episodes, or a policy that takes this policy's actions more often"]),
        ([UNSURE], replace(RESULT, overlap=replace(OVERLAP, mean_weight=around(2.0, 0.5))),
         ["check that action_probability is the probability with which"]),
        ([comparison(estimated(PDIS, 12, 1), estimated(DR, 8, 1))], RESULT,
         ["that every state feature was known before"]),
        # a mean weight of 2 (1 to 3) is chance
        ([UNSURE], RESULT, ["log more episodes, or a policy that takes"]),
        ([UNSURE], replace(RESULT, overlap=None), ["evaluate on a log with whole episodes"]),
        ([], RESULT, ["give more episodes"]),
        # few events of different sizes, 25 of 100 in 30 episodes: four times as many episodes
        ([replace(UNSURE, events=RareOutcomes(unsized=25, expected=8.0, seen=7.0))], RESULT,
         ["say in evaluation.reward_range", "about 120 episodes to score in place of 30, for 100 rare outcomes"]),
        ([replace(UNSURE, outlying="the 5 lowest outcomes")], RESULT,
         ["say in evaluation.reward_range which rewards are possible, or log more episodes; and evaluate again."]),
        # a difference of 0.5 (-1.5 to 2.5) from 30 episodes: (2 / 0.5)^2 = 16 times as many; 10 % of 10: (2 / 1)^2 = 4
        ([comparison(replace(estimated("MAGIC", 10.5, 2.0), difference=around(0.5, 2.0)))], RESULT,
         ["about 480 to show a difference of 0.5, about 120 to show one of 1, 10% of the logged value"]),
        ([comparison(replace(estimated("MAGIC", 10.0, 2.0), difference=around(0.0, 0.0)))], RESULT,
         ["both choose with the same probabilities in the scored rows"]),
    ],
)  # fmt: skip
def test_the_next_step_is_what_the_log_lacks(unsure: list[Comparison], result: CPEResult, steps: list[str]) -> None:
    next_step = decide_findings(Evidence(comparisons=tuple(unsure), result=result)).next_step
    assert [step for step in steps if step not in next_step] == []


def test_the_reward_s_return_decides_and_metrics_have_their_own_title() -> None:
    families = {
        kind: ReturnOrReward(logged=FIGURE, continued=None, estimates=(estimated(name, 2.0, 1.0),), events=None)
        for kind, name in (("one_step", "IPS_Reward"), ("sequential", "MAGIC"))
    }
    result = replace(RESULT, outcomes=tuple(OutcomeResult(name=name, **families) for name in ("Reward", "reward")))
    assert [(each.title, each.decides, each.simulated, each.rows[0].name)
            for each in compare_with_log(result, simulated=FIGURE)] == [
        ("Reward: discounted return per episode", True, FIGURE, "MAGIC"),
        ("Reward: reward per row", False, None, "IPS_Reward"),
        ("Metric reward: discounted sum per episode", False, None, "MAGIC"),
        ("Metric reward: mean per row", False, None, "IPS_Reward"),
    ]  # fmt: skip
    # where every episode is one row its reward is its return
    alone = compare_with_log(replace(result, overlap=replace(OVERLAP, horizon=1)))
    assert [(each.title, each.decides) for each in alone] == [
        ("Reward: reward per row", True), ("Metric reward: mean per row", False),
    ]  # fmt: skip
    # of two models the better one is wanted, whatever the logged policy was
    assert not any(each.decides for each in compare_with_log(result, decides=False))
    differences = compare_models({outcome.name: outcome.estimates for outcome in result.outcomes}, by_row=False)
    assert [(each.title, each.decides, each.rows[0].name) for each in differences] == [
        ("Reward: discounted return per episode, model minus against", True, "MAGIC"),
        ("Reward: reward per row, model minus against", False, "IPS_Reward"),
        ("Metric reward: discounted sum per episode, model minus against", False, "MAGIC"),
        ("Metric reward: mean per row, model minus against", False, "IPS_Reward"),
    ]


def test_what_a_log_says_of_its_outcomes_is_the_same_for_two_models() -> None:
    by_row = ReturnOrReward(
        logged=FIGURE, continued=None, estimates=(undefined("IPS_Reward"),), events=None, outlying="lowest"
    )
    returns = replace(
        by_row, estimates=(undefined(PDIS),), outlying="", events=RareOutcomes(unsized=25, expected=8.0, seen=7.0)
    )
    outcome = OutcomeResult(name="Reward", one_step=by_row, sequential=returns)
    estimated_return = EstimatedReturn.of(RESULT.overlap, gamma=0.8, by_time=False, horizon=1000)
    evidence = evidence_of(
        replace(RESULT, outcomes=(outcome,)), None, estimated_return, differences={"Reward": outcome.estimates}
    )
    assert [(each.decides, each.outlying) for each in evidence.comparisons] == [
        (False, ""), (False, "lowest"), (True, ""), (False, "lowest"),
    ]  # fmt: skip
    assert "for 100 rare outcomes" in decide_findings(evidence).next_step
