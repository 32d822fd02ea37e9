"""Collectors and learners over a shared folder: the same rows, the same amount of data, and what goes wrong."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call, patch

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from helpers.roles import Roles, role, whole_files
from helpers.runs import ALONE, Tree, checked, merged, trained
from helpers.shares import Share, mounted_share
from helpers.waiting import wait_until
from oracles.team import TEAM
from safetensors.torch import load_file

from reagent_lite import console, disk_room, folder_lock
from reagent_lite.config import check
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.data.episode_folder import EpisodeFolder
from reagent_lite.data.formats import arrow
from reagent_lite.data.writing.episode_rows import LogSchema, episode_rows
from reagent_lite.distributed.launcher import Processes
from reagent_lite.errors import ConfigError, DataError, FolderInUseError, UnavailableError
from reagent_lite.manifest import POLICY, read_document, seal_folder
from reagent_lite.run.dry_run import dry_run, lines_of
from reagent_lite.run.environments import open_simulation
from reagent_lite.run.learner import build_learners
from reagent_lite.run.resolved import resolve
from reagent_lite.run.roles import published_policies
from reagent_lite.run.roles.collect import Collector, named_block
from reagent_lite.run.roles.collected import CollectedReplay, env_steps
from reagent_lite.run.roles.published_policies import PolicyReader, shared_folders
from reagent_lite.run.sources.stream import Stream
from reagent_lite.sim.experience import Actor
from reagent_lite.sim.played_episodes import EpisodeRecorder
from reagent_lite.tasks.simulate import simulate
from reagent_lite.training.checkpoint_folder import flat, nest
from reagent_lite.training.stop import StopSignal

RANDOM = Actor(policy=None, epsilon=torch.ones(1))

TAG: Tree = {"env": "tag_gridworld", "env_parameters": {"num_taggers": 3, "grid_length": 4, "episode_length": 20}}


class IdleError(Exception):
    """Raised where a role in this process would wait."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role in this process raises IdleError where it would wait."""

    def sleep(self: console.Waiting, what: str, key: str = "") -> None:
        raise IdleError(what)

    monkeypatch.setattr(console.Waiting, "sleep", sleep)


@pytest.fixture
def roles(tmp_path: Path) -> Iterator[Roles]:
    started = Roles(tmp_path)
    yield started
    started.stop()


def idle(work: Callable[..., Any], *arguments: Any, match: str | None = None) -> None:
    """Works in this process until it would wait."""
    with pytest.raises(IdleError, match=match):
        work(*arguments)


def collector(tree: Tree) -> Collector:
    config = checked(tree)
    with shared_folders(config):
        return Collector(config, ALONE, StopSignal())


def collected(tree: Tree, match: str = "not learned from yet") -> Collector:
    """A collector that has written until it would wait."""
    collecting = collector(tree)
    idle(collecting.run, match=match)
    return collecting


def opened(tree: Tree, workflow: str = "dqn") -> Stream:
    """The stream of a run that has taken no step yet."""
    config = checked(tree, workflow)
    with shared_folders(config) if config.follows else nullcontext():
        resolved = resolve(config, ALONE)
    source = resolved.open_source()
    return source.stream(build_learners(source.config, source.spec, source.types, ALONE.device))


def steps_of(file: Path) -> int:
    """Environment steps that a file's name says."""
    return int(file.name.split("-")[1])


def read_by(stream: Stream) -> CollectedReplay:
    """What a learner's stream reads collectors' files with."""
    return stream.source.rollout


def fifo(folder: Path) -> list[Path]:
    return sorted((folder / "data" / "fifo").glob("*.parquet"))


def progresses_of(folder: Path) -> list[dict[str, Any]]:
    """Of the newest three policies."""
    return [
        json.loads(manifest.read_text())["progress"]
        for manifest in sorted((folder / "data" / "policies").glob("0*/manifest.json"))
    ]


def progress_of(folder: Path) -> dict[str, Any]:
    return progresses_of(folder)[-1]


@pytest.mark.parametrize(
    ("env", "parametric"),
    [("cartpole_v1", True), ("gridworld", False), ("recommend", True), ("gymnasium:FrozenLake-v1", False)],
)  # fmt: skip
def test_what_is_played_is_what_is_learned_from(tmp_path: Path, env: str, parametric: bool) -> None:
    tree = role(tmp_path, "collect", env=env, num_envs=4)
    simulation = open_simulation(checked(tree, "parametric_dqn" if parametric else "dqn"), ALONE)
    spec = simulation.backend.spec
    recorder = EpisodeRecorder(simulation.envs(0, 4, stream=9), rounds=200)
    recorder.play([RANDOM])
    episodes = recorder.episodes(recorder.over)
    fixed = spec.action_features.numpy() if parametric and not spec.candidates else None
    names = () if parametric else spec.action_names
    schema = LogSchema(transitions=True, action_names=names, action_features=fixed)
    (tmp_path / "data" / "fifo").mkdir(parents=True)
    folder = EpisodeFolder(tmp_path / "data")
    name = folder.add(episode_rows(named_block(episodes, "x"), schema), {}, "0" * 12)
    limit = int(episodes.lengths[0])
    parts = [env_steps(rows, spec, limit) for rows in folder.rows(f"fifo/{name}", names)]
    at_limit = ~episodes.terminal | (episodes.lengths == limit)

    def read(column: str) -> np.ndarray[Any, Any]:
        return torch.cat([getattr(part, column) for part in parts]).numpy()

    count, ends = np.arange(len(episodes.reward)), episodes.lengths.cumsum() - 1
    after = np.roll(episodes.state, -1, axis=0)
    after[ends] = episodes.last_state
    every = episodes.features if fixed is None else np.broadcast_to(fixed, (len(count), *fixed.shape))
    shape = every.shape[:2] if parametric else (len(count), spec.num_actions)
    allowed = np.ones(shape, bool) if episodes.mask is None else episodes.mask
    expected = {
        "observation": episodes.state, "reward": episodes.reward, "propensity": episodes.propensity,
        "terminated": np.isin(count, ends[episodes.terminal]), "truncated": np.isin(count, ends[at_limit]),
        "next_observation": after, **({} if parametric else {"action": episodes.action, "mask": allowed}),
    }  # fmt: skip
    assert {column: read(column).tolist() for column in expected} == {
        column: values.tolist() for column, values in expected.items()
    }
    if parametric:
        assert read("features")[count, read("action")].tolist() == every[count, episodes.action].tolist()
        assert [row[mask].tolist() for row, mask in zip(read("features"), read("mask"), strict=True)] == [
            row[mask].tolist() for row, mask in zip(every, allowed, strict=True)
        ]


@pytest.mark.parametrize("environment", [{}, TAG], ids=["gridworld", "tag"])
def test_a_learner_takes_as_much_as_both_plays_and_collectors_stay_two_policies_ahead(
    tmp_path: Path, environment: Tree
) -> None:
    learn, collect = (role(tmp_path, mode, warmup_steps=2000, **environment) for mode in ("learn", "collect"))
    both = opened(role(tmp_path, "both", warmup_steps=2000, dataset=None, **environment))
    first = collected(collect, "no learner has published a policy")
    written = EpisodeFolder(tmp_path / "data").unread(0)
    assert written - steps_of(fifo(tmp_path)[-1]) < 800 <= written  # two spans of 50 steps of 8
    stream = opened(learn)
    idle(stream.before_step, 0, match=rf"has {written:,} of the 2,000 environment steps")
    assert progress_of(tmp_path) == {"step": 0, "env_steps": written, "through": len(fifo(tmp_path)), "ahead": 800,
                                     "finished": False}  # fmt: skip
    idle(first.run, match="the learner is at step 0")
    learned = []
    for step in range(105):
        both.before_step(step)
        assert both.env_steps == 2000 + 8 * (step + 1)
        while True:
            with suppress(IdleError):
                stream.before_step(step)
                break
            idle(first.run)
        learned.append(stream.env_steps - both.env_steps)
    assert 0 <= min(learned) <= max(learned) < max(map(steps_of, fifo(tmp_path)))


@pytest.mark.parametrize("plays", ["learn", "random"])
def test_each_type_learns_from_the_rows_of_its_agents_until_they_leave(tmp_path: Path, plays: str) -> None:
    """A leader and two followers; an agent leaves after two to four steps, and an episode goes on until all have."""
    (tmp_path / "team.cuh").write_text(TEAM)
    tree = {"env": str(tmp_path / "team.cuh"), "env_parameters": {"size": 3}, "policies": {"follower": plays},
            "warmup_steps": 800}  # fmt: skip
    outcome = collected(role(tmp_path, "collect", **tree)).outcome(1)
    rows = pd.concat([pq.read_table(file).to_pandas().assign(file=file.name) for file in fifo(tmp_path)])
    assert (outcome.rows, outcome.episodes) == (len(rows), rows["mdp_id"].nunique())
    stream = opened(role(tmp_path, "learn", **tree))
    stream.before_step(0)
    reader = read_by(stream)
    rows = rows[rows["file"].isin([file.name for file in fifo(tmp_path)[: reader.state_dict()["through"]]])]
    rows[["game", "agent"]] = rows["mdp_id"].str.rsplit("-", n=1, expand=True)
    rows["kind"] = rows["agent"].map({"0": "leader", "1": "follower", "2": "follower"})
    steps = rows.groupby(["file", "game"])["sequence_number"].max() + 1
    assert stream.env_steps == steps.sum() >= 808
    assert list(reader.rings) == ["leader", "follower"][: 1 + (plays == "learn")]
    for kind, ring in reader.rings.items():
        states = [[value for _, value in features] for features in rows[rows["kind"] == kind]["state_features"]]
        assert ring.state_dict()["observation"].flatten(0, 1).tolist() == states
    earned = rows.groupby("kind")["reward"].sum() / len(steps)
    expected = {"simulation/env_steps": steps.sum(), "simulation/episodes": len(steps),
                "simulation/training_length/mean": steps.mean(),
                "simulation/leader/training_return/mean": earned["leader"],
                "simulation/follower/training_return/mean": earned["follower"] / 2}  # fmt: skip
    assert stream.figures() == pytest.approx(stream.figures() | expected)


def test_a_collector_plays_the_policy_of_each_type_and_refuses_those_against_others(tmp_path: Path) -> None:
    learn, collect = (role(tmp_path, mode, warmup_steps=64, **TAG) for mode in ("learn", "collect"))
    collecting, stream = collected(collect), opened(learn)
    stream.before_step(0)
    idle(read_by(stream).run, 10_000)
    idle(collecting.run)
    *_, newest = (file for file in fifo(tmp_path) if b'"policy": 2' in pq.read_schema(file).metadata[b"reagent_lite"])
    rows = pq.read_table(newest).to_pandas()
    chances = rows.groupby(rows["mdp_id"].str.endswith("-3"))["action_probability"].max()
    assert (chances > 0.2).tolist() == [True, True]  # uniform draws of five actions
    with pytest.raises(ConfigError, match=r"simulation\.policies.*\n?.*random"):
        collector(role(tmp_path, "collect", **TAG, policies={"runner": "random"})).run()


@pytest.mark.parametrize("env", ["recommend", "gymnasium:CartPole-v1"])
def test_roles_over_candidates(tmp_path: Path, env: str) -> None:
    learn, collect = (role(tmp_path, mode, env=env, warmup_steps=64) for mode in ("learn", "collect"))
    stream, config = opened(learn, "parametric_dqn"), checked(collect, "parametric_dqn")
    collecting = Collector(config, ALONE, StopSignal())
    for _ in range(2):  # by uniform draws, then by the policy that is published once those are read
        idle(collecting.run)
        idle(read_by(stream).run, 10_000)
    assert collecting.outcome(1).policy == 1
    stream.before_step(0)
    batch, spec = next(stream.source), open_simulation(config, ALONE).backend.spec
    assert batch.actions.features.shape == (64, spec.num_actions, spec.action_feature_size)
    assert stream.env_steps == collecting.outcome(1).rows


def test_logs_of_simulate_in_protected_are_read_first_and_files_added_while_a_learner_is_stopped_later(
    tmp_path: Path,
) -> None:
    protected = tmp_path / "data" / "protected"
    tree = {"env": "gridworld", "output_path": str(protected / "random.parquet"), "rows": 500,
            "format": "transitions", "use_gpu": False}  # fmt: skip
    rows = simulate(check(SimulateConfig, tree)).rows
    collected(role(tmp_path, "collect", warmup_steps=64))
    stream, more = (opened(role(tmp_path, "learn", warmup_steps=64)) for _ in range(2))
    stream.before_step(0)
    assert stream.env_steps == rows
    read_by(stream).run(100)
    first = fifo(tmp_path)[0]
    shutil.copy(protected / "random.parquet", protected / "added.parquet")
    shutil.copy(first, first.with_name(f"{first.stem[:-12]}{'a' * 12}.parquet"))  # of a slower collector
    read_by(more).load_state_dict(nest(flat(read_by(stream).state_dict())))
    idle(read_by(more).run, 10_000)
    assert more.env_steps == 2 * rows + EpisodeFolder(tmp_path / "data").unread(0)


def test_a_learner_goes_on_behind_the_files_it_has_read_and_fills_its_replay_from_them(tmp_path: Path) -> None:
    collected(role(tmp_path, "collect", warmup_steps=64, num_envs=4))
    stream, more, empty = (opened(role(tmp_path, "learn", warmup_steps=64, num_envs=4)) for _ in range(3))
    stream.before_step(0)
    rows = stream.env_steps
    state = {"step": 1, "warm": True, "rollout": read_by(stream).state_dict()}
    states = [state, {"rollout": {"finished": torch.full((3,), 2.0, dtype=torch.float64)}}]
    dealt = [more.partition(states, rank, 1)["rollout"]["finished"].tolist() for rank in range(3)]
    # ranks sum them up
    assert dealt == [(state["rollout"]["finished"] + 2).tolist(), [0, 0, 0], [0, 0, 0]]
    more.source.load_state_dict(more.partition(states, 0, 1))
    assert more.env_steps == read_by(more).rings[""].rows == read_by(stream).rings[""].rows == rows
    more.before_step(1)
    assert more.env_steps >= rows
    for path in fifo(tmp_path):
        path.unlink()
    empty.source.load_state_dict(state)
    idle(empty.before_step, 1)  # there is nothing to learn from, whatever was read once
    del state["rollout"]["seen"]
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: .* earlier version"):
        empty.source.load_state_dict(state)


def test_files_of_others_are_left_out_with_one_warning_for_those_found_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    collected(role(tmp_path, "collect"))
    own = fifo(tmp_path)
    collected(role(tmp_path / "elsewhere", "collect", env_parameters={"random_start": 1}))
    others = fifo(tmp_path / "elsewhere")
    stream = opened(role(tmp_path, "learn"))

    def warning() -> str:
        caplog.clear()
        for _ in range(2):
            idle(read_by(stream).run, 10_000)
        (text,) = (message for message in caplog.messages if "left out" in message)
        return text

    shutil.copytree(others[0].parent, own[0].parent, dirs_exist_ok=True)
    assert re.search(
        f"(?s){len(others)} files of the dataset are left out.*parameters: expected.*environment_sha256", warning()
    )
    late = own[0].with_name("0000000999-0000004-aaaaaaaaaaaa.parquet")
    late.write_bytes(own[0].read_bytes()[:-9])
    assert re.search(f"1 file of the dataset is left out.*{late.name}", warning())
    assert stream.env_steps == read_by(stream).rings[""].rows == sum(map(steps_of, own))


def test_a_policy_that_is_damaged_is_skipped_and_one_of_another_network_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    idle(opened(role(tmp_path, "learn")).before_step, 0)
    folder = tmp_path / "data" / "policies"
    first, damaged = folder / "0000000001", shutil.copytree(folder / "0000000001", folder / "0000000002")
    for file in damaged.glob("*[!n]"):
        os.truncate(file, 200)
    reader = PolicyReader(folder, {})
    assert [policy and policy.version for policy in (reader.newer(), reader.newer())] == [1, None]
    assert caplog.text.count("policy 2 is skipped") == 1
    document, earlier = read_document(first, POLICY), shutil.copytree(first, folder / "0000000003")
    progress = document["progress"] | {"frames": document["progress"]["env_steps"]}
    seal_folder(earlier, document | {"progress": progress}, document["files"])
    with pytest.raises(ConfigError, match="0000000003: expected the progress"):
        reader.newer()
    shutil.rmtree(earlier)
    for tree, words in (
        (merged(role(tmp_path, "collect"), {"training": {"layers": [-1, 24, -1]}}), "tensors"),
        (role(tmp_path, "collect", env_parameters={"random_start": 1}), "environment_sha256"),
    ):
        with pytest.raises(ConfigError, match=words):
            collector(tree).run()


def failing(number: int) -> Any:
    """Lets no policy be written inside the block."""
    return patch.object(published_policies, "appearing_folder", side_effect=OSError(number, os.strerror(number)))


def test_a_policy_that_cannot_be_written_is_one_warning_until_one_can_and_the_last_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = {"path": str(tmp_path / "data"), "publish_every_steps": 1}
    reader = read_by(opened(role(tmp_path, "learn", dataset=shared)))
    for fits in (False, True, False):
        with nullcontext() if fits else failing(errno.ENOSPC):
            for step in range(3):
                reader.publish(step)
    assert re.findall("step 0 was not published: (.*);", caplog.text) == [os.strerror(errno.ENOSPC)] * 2
    assert progress_of(tmp_path)["step"] == 2
    for number in (errno.ENOSPC, errno.EROFS):
        with failing(number), pytest.raises(IdleError, match=rf"cannot be written to .*: {os.strerror(number)}"):
            reader.publish_last(3)
    reader.publish_last(3)
    assert progress_of(tmp_path)["finished"]


@contextmanager
def unmounted(folder: Path, *, mount_point: bool) -> Iterator[None]:
    """Takes a folder away inside the block, and leaves an empty one, or none, into which nothing may be written."""
    away = folder.rename(folder.with_name("away"))
    if mount_point:
        folder.mkdir()
    yield
    assert folder.exists() == mount_point
    away.rename(folder)  # which it cannot replace unless that is empty


AWAY = "data/fifo is no longer the folder that it was when the run began: its share is not mounted"

mount_points = pytest.mark.parametrize("mount_point", [True, False])


@mount_points
def test_a_learner_forgets_nothing_while_its_share_is_away(tmp_path: Path, mount_point: bool) -> None:
    collected(role(tmp_path, "collect", warmup_steps=64))
    stream = opened(role(tmp_path, "learn", warmup_steps=64))
    stream.before_step(0)
    reader, every = read_by(stream), EpisodeFolder(tmp_path / "data").unread(0)
    for wanted in (every, 10_000):
        with unmounted(tmp_path / "data", mount_point=mount_point):
            for _ in range(2):
                idle(reader.run, wanted, match=AWAY)
            reader.publish(50)
            reader.publish(100)
            idle(reader.publish_last, 100, match="policies is no longer the folder")
        idle(reader.run, 10_000, match="environment steps that step 100 needs")
        assert reader.env_steps == reader.rings[""].rows == every
    assert json.loads(bytes(reader.state_dict()["seen"])) == [f"fifo/{file.name}" for file in fifo(tmp_path)]
    reader.publish_last(100)
    assert {progress["step"]: progress["finished"] for progress in progresses_of(tmp_path)} == {0: False, 100: True}


@mount_points
@pytest.mark.parametrize("method", ["origin", "rows"])
def test_a_file_of_which_a_part_was_read_when_the_share_went_away_is_learned_from_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount_point: bool, method: str
) -> None:
    collected(role(tmp_path, "collect", warmup_steps=64))
    expected, stream = (opened(role(tmp_path, "learn", warmup_steps=64)) for _ in range(2))
    idle(read_by(expected).run, 10_000)
    monkeypatch.setattr(arrow, "BLOCK_VALUES", 700)  # a few rows at once
    reader, read, parts, away = read_by(stream), getattr(EpisodeFolder, method), itertools.count(1), ExitStack()

    def goes_away() -> None:
        if next(parts) == 3:
            away.enter_context(unmounted(tmp_path / "data", mount_point=mount_point))
            raise DataError(())

    def origin(self: EpisodeFolder, *given: Any) -> Any:
        goes_away()
        return read(self, *given)

    def rows(self: EpisodeFolder, *given: Any) -> Any:
        for part in read(self, *given):
            goes_away()
            yield part

    monkeypatch.setattr(EpisodeFolder, method, origin if method == "origin" else rows)
    idle(reader.run, 10_000, match=AWAY)
    away.close()
    idle(reader.run, 10_000, match="environment steps that step 0 needs")
    result, wanted = (replay.rings[""].state_dict() for replay in (reader, read_by(expected)))
    assert stream.figures() == expected.figures()
    assert all(torch.equal(result[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("fault", ["full", "away", "unmounted"])
def test_a_collector_keeps_its_episodes_while_the_share_is_full_or_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    collecting, said = collector(role(tmp_path, "collect")), list[str]()
    add, away = EpisodeFolder.add, ExitStack()

    def failing(self: EpisodeFolder, *given: Any) -> str:
        if fault == "full" and len(said) < 2:
            with disk_room.disk_errors("fifo", "a file that can be written"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault != "full" and len(fifo(tmp_path)) == 1 and not said:
            away.enter_context(unmounted(tmp_path / "data", mount_point=fault == "unmounted"))
        return add(self, *given)

    def sleep(self: console.Waiting, what: str, key: str = "") -> None:
        said.append(what)
        if "not learned from yet" in what:
            raise IdleError(what)
        if len(said) == 2:
            away.close()

    monkeypatch.setattr(EpisodeFolder, "add", failing)
    monkeypatch.setattr(console.Waiting, "sleep", sleep)
    idle(collecting.run)
    assert [("no room for" if fault == "full" else AWAY) in text for text in said] == [True, True, False]
    outcome = collecting.outcome(1)
    assert (outcome.rows, outcome.files) == (EpisodeFolder(tmp_path / "data").unread(0), len(fifo(tmp_path)))


@mount_points
@pytest.mark.parametrize("mode", ["collect", "learn"])
def test_a_share_that_goes_away_before_its_first_use_is_waited_for_and_no_folder_is_made(
    tmp_path: Path, mount_point: bool, mode: str
) -> None:
    tree = role(tmp_path, mode)
    run = collector(tree).run if mode == "collect" else partial(opened(tree).before_step, 0)
    with unmounted(tmp_path / "data", mount_point=mount_point):
        idle(run, match="cannot be used: No")


def test_a_learner_that_goes_on_waits_for_its_dataset_and_does_not_make_it(tmp_path: Path) -> None:
    for _ in range(2):
        idle(shared_folders(checked(role(tmp_path, "learn")), resumed=True).__enter__, match=AWAY)
        assert not fifo(tmp_path)
        (tmp_path / "data" / "fifo").mkdir(parents=True, exist_ok=True)  # a mount point


@pytest.mark.parametrize("mode", ["collect", "learn"])
@pytest.mark.parametrize("number", [None, errno.EIO])
def test_a_share_that_stays_away_ends_either_role_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, number: int | None
) -> None:
    collecting = collected(role(tmp_path, "collect", warmup_steps=64))
    stream = opened(role(tmp_path, "learn", warmup_steps=64))
    stream.before_step(0)
    monkeypatch.undo()
    monkeypatch.setattr(console, "_MOST_FOLDER_SECONDS", 0.1)
    run = collecting.run if mode == "collect" else partial(read_by(stream).run, 10_000)
    reason = AWAY if number is None else f"data cannot be used: {os.strerror(number)}"
    error = OSError(number, os.strerror(number or 0), "data")
    fault = patch.object(os, "listdir", side_effect=error) if number else unmounted(tmp_path / "data", mount_point=True)
    with fault, pytest.raises(UnavailableError, match=rf"simulation\.dataset\.path: .*{reason}"):
        run()


@pytest.mark.parametrize("mode", ["collect", "learn"])
def test_a_dry_run_says_which_role_it_is(tmp_path: Path, mode: str) -> None:
    lines = [*lines_of(dry_run(checked(role(tmp_path, mode), "dqn"), Processes(1, "cpu")))]
    (line,) = (line for line in lines if "simulation.mode" in line)
    assert line.startswith(f"simulation.mode {mode}: episodes in {tmp_path / 'data'}; collectors pause about 800 ")
    learns = ("evaluated every", "checkpoints", "memory per process: replay ")
    assert [word in "\n".join(lines) for word in learns] == [mode == "learn"] * 3
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("key", "holder", "second", "edits"),
    [("edits", "collect", "learn", True), ("edits", "learn", "collect", True), ("policies", "learn", "learn", False)],
)
def test_a_second_editor_or_learner_of_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, holder: str, second: str, edits: bool
) -> None:
    for name in ("_ENDING_SECONDS", "_LEASE_SECONDS"):
        monkeypatch.setattr(folder_lock, name, 0.0)
    settings = {"path": str(tmp_path / "data"), "edits": edits, "max_bytes": 1}
    refused = pytest.raises(FolderInUseError, match=rf"simulation\.dataset\.{key}.*pid {os.getpid()}")
    with shared_folders(checked(role(tmp_path, holder, dataset=settings))):
        with shared_folders(checked(role(tmp_path, "collect"))):
            pass
        with refused, shared_folders(checked(role(tmp_path, second, dataset=settings))):
            pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Roles wait as they do, by a clock that a test sets."""
    monkeypatch.undo()
    monkeypatch.setattr(console, "time", Mock(**{"monotonic.return_value": 0.0}))
    return console.time


def test_what_is_waited_for_is_logged_at_intervals_that_grow_to_an_hour(
    clock: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = console.Waiting()
    for clock.monotonic.return_value in range(0, 6 * 3600, 5):
        waiting.sleep("no rows")
    logged = [int(text.replace(",", "")) for text in re.findall(r"no rows; waited (\S+) s so far", caplog.text)]
    assert logged[:6] == [10, 20, 40, 80, 160, 320]
    assert np.diff(logged[-3:]).tolist() == [3600, 3600]
    assert clock.sleep.call_args == call(2.0)


def test_ten_minutes_are_those_of_one_folder_that_is_away_all_the_time(clock: Mock) -> None:
    waiting = console.Waiting()
    # twice it is back before ten minutes are over
    for seconds, key in ((0, "a"), (599, "a"), (601, ""), (1000, "a"), (1599, "a"), (1601, ""), (1601, "a")):
        clock.monotonic.return_value = seconds
        waiting.sleep("away", key)
    clock.monotonic.return_value = 2201.0
    with pytest.raises(UnavailableError, match=r"a: .* within 600 s"):
        waiting.sleep("away", "a")


def survive(
    roles: Roles, share: Share, faults: list[str], seconds: tuple[float, float], steps: int, environment: Tree
) -> None:
    """A learner and two collectors to the end, with a fault at each of some moments.

    One of them is killed and started again, or stopped for a while as a machine without a network; or all of them lose
    the share for seconds, once they have used it.
    """
    folder, chance = share.stored, random.Random(3)
    dataset = {"path": str(share.path / "data"), "publish_every_steps": 50}
    changes = {
        "simulation": {"total_steps": steps, "dataset": dataset, **environment},
        "checkpoint": {"every_steps": 20},
    }
    running = {name: roles.start(name.rstrip("12"), changes) for name in ("learn", "collect1", "collect2")}
    seen: dict[str, bytes] = {}
    for fault in chance.sample(faults, len(faults)):
        time.sleep(chance.uniform(*seconds))
        name = chance.choice(list(running))
        if fault == "kill":
            running[name].send_signal(signal.SIGKILL)
            running[name].wait()
        for file in fifo(folder):
            assert seen.setdefault(file.name, file.read_bytes()) == file.read_bytes()
        if fault == "kill":
            running[name] = roles.start(name.rstrip("12"), changes)
        elif fault == "cut":
            running[name].send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(*seconds))
            running[name].send_signal(signal.SIGCONT)
        else:
            wait_until(lambda: all("training: " in run.said or "collecting in" in run.said for run in running.values()))
            share.unmount()
            time.sleep(4)
            share.mount()
            assert all(run.poll() in (None, 0) for run in running.values()), running["learn"].said
    roles.end(running["learn"])
    assert list(share.path.iterdir()) == []  # nothing was written below the mount point
    assert {file.name for file in fifo(folder)} >= seen.keys()
    progress = progress_of(folder)
    assert progress["finished"]
    assert steps <= progress["env_steps"] + 8 <= whole_files(folder) + 8
    saved = load_file(max((roles.folder / "out" / "checkpoints").glob("step_*")) / "rank_0000.safetensors")
    learned = json.loads(saved["source/rollout/seen"].numpy().tobytes())
    sizes = {file.name: file.steps for file in EpisodeFolder(folder / "data").files()}
    assert len(set(learned)) == len(learned)
    assert progress["env_steps"] == int(saved["source/rollout/env_steps"]) == sum(sizes[name] for name in learned)


@pytest.fixture
def share(tmp_path: Path, roles: Roles) -> Iterator[Share]:
    with mounted_share(tmp_path) as mounted:
        roles.namespaces_of = mounted.pid
        yield mounted
        roles.stop()


def test_a_learner_and_collectors_that_come_go_are_killed_and_lose_their_share(
    roles: Roles, share: Share, tmp_path: Path
) -> None:
    survive(roles, share, ["kill", "unmount"], seconds=(1.0, 2.0), steps=5000, environment={})
    offline = {"model_output_path": str(tmp_path / "off"), "training_data_path": str(share.stored / "data" / "fifo"),
               "epochs": 1, "actions": ["L", "R", "U", "D"], "simulation": None}  # fmt: skip
    assert trained(merged(role(tmp_path, "learn"), offline), "dqn").rows > 0


def test_roles_end_at_a_signal_while_they_wait_and_a_collector_with_the_run(roles: Roles, tmp_path: Path) -> None:
    learner = roles.start("learn")
    wait_until(lambda: (tmp_path / "data" / "policies" / "0000000001").exists())
    learner.send_signal(signal.SIGTERM)
    assert "checkpoint step_000000 is complete" in roles.end(learner, 75).err
    short = {"simulation": {"total_steps": 1500}}
    collector = roles.start("collect", short)
    wait_until(lambda: bool(fifo(tmp_path)))
    collector.send_signal(signal.SIGTERM)
    roles.end(collector, 75)
    rest = roles.start("collect", short)
    roles.end(roles.start("learn", short, "--set", "checkpoint.resume=false"))
    assert roles.end(rest).outcome["policy"] > 1
    assert whole_files(tmp_path) == EpisodeFolder(tmp_path / "data").unread(0)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, TAG], ids=["gridworld", "tag"])
def test_kills_cuts_and_an_unmount_lose_no_finished_episode(roles: Roles, share: Share, environment: Tree) -> None:
    faults = ["kill"] * 50 + ["cut"] * 5 + ["unmount"]
    survive(roles, share, faults, seconds=(0.2, 4.0), steps=60_000, environment=environment)


@pytest.mark.slow
def test_two_ranks_share_the_files_and_one_goes_on_with_what_they_have_read(roles: Roles, tmp_path: Path) -> None:
    two = {"num_processes_per_node": 2, "checkpoint": {"every_steps": 50}}
    learner, collector = roles.start("learn", two), roles.start("collect")
    policies = tmp_path / "data" / "policies"
    wait_until(lambda: len(list(policies.glob("0*"))) == 3 and progress_of(tmp_path)["step"] >= 150, seconds=240)
    learner.send_signal(signal.SIGTERM)
    roles.end(learner, 75)
    before = progress_of(tmp_path)
    assert roles.end(roles.start("learn")).outcome["steps"] == 625
    roles.end(collector)
    assert before["env_steps"] < 6000 <= progress_of(tmp_path)["env_steps"] < 6000 + max(map(steps_of, fifo(tmp_path)))
