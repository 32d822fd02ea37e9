"""The benchmark's figures: ratios are of its own columns, errors are sentences."""

import json

import pytest

from workflows.benchmark import main


def test_simulation_is_measured_by_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "simulation", "--num_envs", "1", "4096", "--device", "cpu", "--seconds", "0.01"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    one, many = result["simulation"]
    assert (one["num_envs"], many["num_envs"]) == (1, 4096)
    for point in (one, many):
        assert point["share_of_limit"] == pytest.approx(point["dynamics"] / point["copy_limit"], abs=2e-3)
    assert many["observed"] > 10 * one["observed"]  # a call costs the same for one as for thousands
    assert "4,096" in err


@pytest.mark.parametrize("env", ["cartpole_v1", "recommend"])
def test_training_is_measured(capsys: pytest.CaptureFixture[str], env: str) -> None:
    assert main(["--only", "training", "--env", env, "--num_envs", "16", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1  # nothing of the runs' own reports, which are removed
    (point,) = json.loads(out)["training"]
    # 400 updates of 16 rows beside 404 steps of 16 environments, in the same seconds
    ratio = point["env_steps_per_second"] / point["learned_rows_per_second"]
    assert ratio == pytest.approx(404 / 400, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--env", "nothing"], "one of acrobot"), (["--num_envs", "0"], "at least 1")]
)
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main([*arguments, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
