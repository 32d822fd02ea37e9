"""The CPU build: what it says when it cannot compile, its cache, and the sources it is made of."""

import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from sim.conftest import COUNTER

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import KernelBuildError, SimulationError
from reagent_lite.sim import cache, cpu, sources
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.cache import cache_folder, cached, make_key
from reagent_lite.sim.compiler import KERNELS, Compiler, find_compiler, zig_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.sources import find_environment, known_environments, read_sources

CPU = torch.device("cpu")


def opened(env: str, **parameters: float) -> CpuBackend:
    backend = open_backend(EnvironmentConfig(env=env, env_parameters=parameters), CPU)
    assert isinstance(backend, CpuBackend)
    return backend


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("REAGENT_LITE_CACHE", str(folder))
    return folder


def written(tmp_path: Path, text: str, name: str = "mine.cuh") -> Path:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# -- Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [("CartPole-v1", "cartpole_v1"), ("cartpol_v0", "cartpole_v0"), ("MountainCar-v0", "mountain_car")],
)
def test_an_unknown_environment_is_answered_with_the_known_ones(name: str, near: str) -> None:
    with pytest.raises(SimulationError) as caught:
        opened(name)
    for words in (f"Did you mean {near!r}?", repr(name), *known_environments()):
        assert words in str(caught.value)


def test_every_file_of_the_folder_but_the_machinery_is_an_environment() -> None:
    assert set(known_environments()) == {
        *("acrobot", "cartpole_v0", "cartpole_v1", "gridworld", "mountain_car", "mountain_car_continuous"),
        *("tag_continuous", "tag_gridworld"),
        *("pendulum", "recommend"),
    }


def test_a_path_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=r"a \.cuh file, got .*missing\.cuh"):
        opened(str(tmp_path / "missing.cuh"))


def test_an_unknown_parameter_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SimulationError) as caught:
        opened("cartpole_v1", gravty=9.0, lenght=1.0)
    assert len(caught.value.problems) == 2
    text = str(caught.value)
    assert "Did you mean 'gravity'?" in text
    assert "half_length" in text
    with pytest.raises(SimulationError, match="got 'half length\"'"):
        CpuBackend(find_environment("cartpole_v1"), {'half length"': 1.0}, "exact")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_parameter_that_is_no_float32(value: float) -> None:
    with pytest.raises(SimulationError, match=r"env_parameters\.gravity: expected"):
        opened("cartpole_v1", gravity=value)


def test_parameters_reach_the_kernel_to_the_last_bit() -> None:
    for value in (9.7, 1e-30, -3e38, 1.0, 16777217.0):
        assert opened("cartpole_v1", gravity=value).spec.parameters["gravity"] == torch.tensor(value).item()


# -- A user's own file ------------------------------------------------------------------------------------------------


def test_an_own_file_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, COUNTER, "with space/mine.cuh")
    monkeypatch.chdir(tmp_path / "with space")
    for path in (str(file), "mine.cuh", "./mine.cuh", "../with space/mine.cuh"):
        assert opened(path).spec.name == "mine"


def test_an_own_file_may_build_on_ours_and_on_its_neighbours(tmp_path: Path) -> None:
    written(tmp_path, "constexpr float reach = 3.0f;\n", "parts/numbers.cuh")
    text = '#define TIME_LIMIT 7\n#include "parts/numbers.cuh"\n#include "cartpole_v1.cuh"\n'
    file = written(tmp_path, text)
    assert opened(str(file)).spec.time_limit == 7
    names = set(read_sources(file))
    assert {"./mine.cuh", "./parts/numbers.cuh", "cartpole_v1.cuh", "env.cuh", "core/cpu.cuh", "port.cuh"} <= names


def test_the_identity_is_that_of_own_sources_and_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KERNELS", shutil.copytree(KERNELS, tmp_path / "kernels"))
    written(tmp_path, "constexpr float reach = 3.0f;\n", "numbers.cuh")
    file = written(tmp_path, '#include "numbers.cuh"\n#include "cartpole_v1.cuh"\n')

    def identity(**settings: Any) -> str:
        return sources.identity(EnvironmentConfig(env=str(file), **settings))

    def changed(name: str) -> str:
        with (tmp_path / name).open("a") as text:
            text.write("// another line\n")
        return identity()

    identities = [identity(), identity(env_parameters={"gravity": 9}), identity(time_limit=7), identity(math="fast")]
    identities += [changed(name) for name in ("mine.cuh", "numbers.cuh", "kernels/cartpole_v1.cuh")]
    assert len(set(identities)) == 7
    for shared in ("kernels/env.cuh", "kernels/port.cuh", "kernels/core/transition.cuh"):
        assert changed(shared) == identities[-1]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("#define NUM_ACTIONS 3", "", "an environment must define NUM_ACTIONS"),
        ("#define NUM_ACTIONS 3", "#define NUM_ACTIONS 0", "NUM_ACTIONS of an environment must be"),
        ("#define OBSERVATION_SIZE 2", "", "an environment must define OBSERVATION_SIZE"),
        ("#define TIME_LIMIT 100", "", "an environment must define TIME_LIMIT"),
        ("#define TIME_LIMIT 100", "#define TIME_LIMIT 0", "TIME_LIMIT of an environment must be"),
        ("#define STATE", "#define STAT", "must define STATE(FIELD, ARRAY)"),
        ("FIELD(int, count)", "FIELD(double, count)", "a state variable is a float, int or unsigned"),
        ("DECLARE_ENVIRONMENT", "", "an environment must say DECLARE_ENVIRONMENT"),
        ("void reset(", "void reest(", "DEVICE void reset(State &s, Random &random)"),
        ("void observe(const", "void observe(int, const", "DEVICE void observe(const State &s, float *observation)"),
        (
            "int action, Random",
            "int action, int more, Random",
            "DEVICE float step(State &s, int action, Random &random",
        ),
        ("DECLARE", "#define MASKED\nDECLARE", "must define: DEVICE bool allowed(const State &s, int action)"),
        ("DECLARE", "#define CANDIDATES\nDECLARE", "with CANDIDATES must define ACTION_FEATURE_SIZE"),
        (
            "DECLARE",
            "#define CANDIDATES\n#define ACTION_FEATURE_SIZE 1\nDECLARE",
            "must define: DEVICE bool candidate(const State &s, int k, Random &random, float *features)",
        ),
        (
            "DECLARE",
            "#define ACTION_FEATURE_SIZE 1\nDECLARE",
            "must define: DEVICE void action_features(int action, float *features)",
        ),
        ("DECLARE", '#define ACTION_NAMES {"a"}\nDECLARE', "ACTION_NAMES of an environment must name every action"),
        ("FIELD(int, count)", "FIELD(int, count) ARRAY(int, none, 0)", "an array has at least 1"),
        ("worth *", "1.5 * worth *", "'float' to 'double'"),
        ("return worth", "worth", "-Wreturn-type"),
        ("s.count +=", "s.cuont +=", "mine.cuh:20:"),  # a mistake is shown with its line
        ("#define NUM", "#include <cmath>\n#define NUM", "Remove <cmath>"),
    ],
)
@pytest.mark.parametrize("compiler", [find_compiler, zig_compiler])
def test_what_is_missing_is_said_in_a_sentence(
    tmp_path: Path, compiler: Callable[[], Compiler], old: str, new: str, sentence: str
) -> None:
    file = written(tmp_path, COUNTER.replace(old, new, 1))
    with pytest.raises(KernelBuildError) as caught:
        CpuBackend(file, {}, "exact", compiler=compiler(), optimization="-O0")
    flat = " ".join(str(caught.value).replace('" "', "").translate({ord("‘"): "'", ord("’"): "'"}).split())
    assert sentence in flat.replace("-Werror=", "-W")
    assert flat.count("error: ") <= 5


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("SIZE 2", "SIZE 1", "all 1 floats of OBSERVATION_SIZE"),
        ("SIZE 2", "SIZE 3", "all 3 floats of OBSERVATION_SIZE"),
        ("DECLARE", '#define ACTION_NAMES {"a", "b", "a"}\nDECLARE', "a unique name for each, got 'a', 'b', 'a'"),
        ("DECLARE", '#define ACTION_NAMES {"a", "b", ""}\nDECLARE', "got 'a', 'b', ''"),
    ],
)
def test_what_an_environment_shows_and_names_is_what_it_says(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    with pytest.raises(SimulationError) as caught:
        opened(str(written(tmp_path, COUNTER.replace(old, new, 1))))
    assert sentence in str(caught.value)


def test_what_reset_leaves_out_is_0(tmp_path: Path) -> None:
    text = COUNTER.replace("FIELD(int, count)", "FIELD(int, count) FIELD(int, more)")
    env = VectorEnv(opened(str(written(tmp_path, text))), num_envs=1000)
    env.field("more").fill_(7)
    env.reset()
    assert not env.field("more").any()


def test_parameters_and_names_are_optional(tmp_path: Path) -> None:
    text = COUNTER.replace("int(goal)", "4").replace("worth *", "").replace(" P(goal, 4.0f) P(worth, 1.0f)", "")
    assert opened(str(written(tmp_path, text.replace("#define PARAMETERS(P)", "")))).spec.parameters == {}
    names = ("one", 'in "quotes"\n', "long" * 3000)
    listed = ", ".join(json.dumps(name) for name in names)
    spec = opened(str(written(tmp_path, f"{text}#define ACTION_NAMES {{{listed}}}\n", "named.cuh"))).spec
    assert (spec.parameters, spec.action_names) == ({}, names)


def test_names_of_the_c_library_are_free(tmp_path: Path) -> None:
    text = COUNTER.replace("worth", "gamma").replace("count", "index").replace("past", "y1")
    assert opened(str(written(tmp_path, text))).spec.parameters == {"goal": 4.0, "gamma": 1.0}


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.cuh"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SimulationError, match="readable source text"):
        opened(str(file))


# -- Compilers --------------------------------------------------------------------------------------------------------


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ziglang" else real(name))
    with pytest.raises(KernelBuildError) as caught:
        opened("cartpole_v1")
    assert "pip install 'reagent-lite[compiler]'" in str(caught.value)
    assert "Install g++" in str(caught.value)


@pytest.mark.parametrize("broken", [False, True])
def test_the_wheels_compiler_is_taken_where_no_other_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: bool
) -> None:
    if broken:
        written(tmp_path, "#!/bin/sh\nexit 1\n", "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == zig_compiler()


def test_no_second_openmp_runtime_and_no_libraries() -> None:
    opened("cartpole_v1")
    library = max(cache_folder().glob("*.so"), key=lambda file: file.stat().st_atime)
    answer = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True)
    assert "NEEDED" not in answer.stdout


# -- Cache ------------------------------------------------------------------------------------------------------------


def test_a_second_opening_compiles_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened("cartpole_v1")
    (file,) = empty_cache.iterdir()  # one library, nothing temporary
    before = file.stat().st_mtime_ns
    compiler = find_compiler()
    monkeypatch.setattr(cpu, "find_compiler", lambda: compiler)
    monkeypatch.setattr(subprocess, "run", None)
    opened("cartpole_v1")
    assert file.stat().st_mtime_ns == before


@pytest.mark.parametrize("damaged", [b"who", b"", b"whale"])
def test_a_damaged_file_is_built_anew(empty_cache: Path, damaged: bytes) -> None:
    def build(target: Path) -> None:
        target.write_bytes(b"whole")

    file = cached("key", ".so", build)
    file.write_bytes(damaged)
    assert cached("key", ".so", build) == file
    assert file.read_bytes() == b"whole"
    assert list(empty_cache.iterdir()) == [file]


def test_everything_that_matters_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(key: str, *rest: object) -> Path:
        raise LookupError(key)  # in place of a compilation

    def key(file: Path, parameters: dict[str, float], math: Literal["exact", "fast"] = "exact", **other: Any) -> str:
        with pytest.raises(LookupError) as caught:
            CpuBackend(file, parameters, math, **other)
        return str(caught.value)

    monkeypatch.setattr(cpu, "cached", stop)
    file, more = written(tmp_path, COUNTER + '#include "more.cuh"\n'), written(tmp_path, "", "more.cuh")
    keys = {key(file, {}), key(file, {"goal": 5.0}), key(file, {}, "fast"), key(file, {}, optimization="-O0")}
    keys |= {key(file, {}, compiler=zig_compiler())}
    more.write_text("// a comment\n")
    moved = written(tmp_path, file.read_text(), "elsewhere/mine.cuh")
    written(tmp_path, more.read_text(), "elsewhere/more.cuh")
    assert key(file, {}) == key(moved, {})  # the same texts in another folder
    keys |= {key(file, {})}
    monkeypatch.setattr(cpu, "machine", lambda: "another processor")
    assert len(keys | {key(file, {})}) == 7


def test_the_machine_is_told_apart_by_what_its_processor_can() -> None:
    processor = cache.machine()
    if Path("/proc/cpuinfo").exists():
        assert "flags" in processor or "Features" in processor
        assert "MHz" not in processor
    assert cache.machine() == processor


def test_concurrent_builders_do_not_meet(empty_cache: Path) -> None:
    code = (
        "import time; from reagent_lite.sim.cache import cached\n"
        "print(cached('key', '.so', lambda target: time.sleep(0.5) or target.write_bytes(b'whole')).read_text())"
    )
    with ThreadPoolExecutor() as pool:
        command = [sys.executable, "-c", code]
        runs = [pool.submit(subprocess.run, command, capture_output=True, text=True) for _ in range(3)]
    assert [run.result().stdout for run in runs] == ["whole\n"] * 3, runs[0].result().stderr
    assert len(list(empty_cache.iterdir())) == 1


def test_a_build_that_fails_leaves_nothing(empty_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError):
        opened(str(written(tmp_path, "nonsense")))
    assert list(empty_cache.iterdir()) == []


def tampered(folder: Path, how: str) -> Path:
    """Puts a file of the right name and digest where compiled code is looked for, and returns it."""
    planted = folder / f"key-{hashlib.sha256(b'planted').hexdigest()[:32]}.so"
    folder.mkdir(0o700)
    planted.write_bytes(b"planted")
    if how == "a link":
        planted.rename(folder / "elsewhere")
        planted.symlink_to(folder / "elsewhere")
    elif how.endswith("anybody"):
        (folder if "folder" in how else planted).chmod(0o777)
    else:
        os.chown(folder if "folder" in how else planted, 12345, -1)
    return planted


@pytest.mark.parametrize(
    "how", ["folder, anybody", "file, anybody", "folder, another user", "file, another user", "a link"]
)
def test_code_that_others_may_have_written_is_compiled_anew(
    how: str, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if how.endswith("another user") and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    planted = tampered(empty_cache, how)
    for _ in range(2):
        assert cached("key", ".so", lambda target: target.write_bytes(b"ours") and None).read_bytes() == b"ours"
    lines = caplog.messages
    if "folder" not in how:
        assert (lines, planted.exists()) == ([], False)
    else:
        status = f"owner {os.geteuid()}, mode 0777" if how.endswith("anybody") else "owner 12345, mode 0700"
        assert lines == [
            f"{empty_cache}: expected a folder for compiled code that only this user can write to, got "
            f"{status}; compiling for this process alone. "
            "Remove it, or set REAGENT_LITE_CACHE to another folder"
        ]
        assert list(empty_cache.iterdir()) == [planted]


def test_the_cache_is_the_users_alone(empty_cache: Path) -> None:
    file = cached("key", ".so", lambda target: target.write_bytes(b"ours") and None)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (empty_cache, file)] == [0o700, 0o600]


def test_a_folder_that_is_a_file(empty_cache: Path) -> None:
    empty_cache.write_text("")
    with pytest.raises(KernelBuildError, match="Set REAGENT_LITE_CACHE"):
        opened("cartpole_v1")


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"REAGENT_LITE_CACHE": "/somewhere", "XDG_CACHE_HOME": "/caches"}, Path("/somewhere")),
        ({"XDG_CACHE_HOME": "/caches"}, Path("/caches/reagent-lite/kernels")),
        ({}, Path.home() / ".cache" / "reagent-lite" / "kernels"),
    ],
)
def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: Path) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": os.environ["HOME"], **variables})
    assert cache_folder() == folder


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    assert len({make_key(parts) for parts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["a:bc"])}) == 5


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    text = (KERNELS / "README.md").read_text()
    example = text.split("```c++\n")[1].split("```")[0]
    env = VectorEnv(opened(str(written(tmp_path, example, "walk.cuh")), slip=0.0), num_envs=3)
    env.reset()
    env.field("cell").fill_(3)
    env.action.fill_(1)
    env.step()
    assert env.observation.tolist() == [[pytest.approx(4 / 5)]] * 3
    env.step()
    assert env.reward.tolist() == [1, 1, 1]
    assert env.terminated.all()
