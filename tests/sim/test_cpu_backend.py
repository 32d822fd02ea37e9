"""The CPU build: what it says when it cannot compile, its cache, and the sources it is made of."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.runs import ROOT
from sim.conftest import COUNTER, MakeEnv, environments, take, written

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import KernelBuildError, SimulationError
from reagent_lite.sim import cache, cpu, kernel_sources
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.cache import cache_folder, find_or_build, make_key
from reagent_lite.sim.compiler import KERNELS, Compiler, find_compiler, zig_compiler
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.kernel_sources import read_sources


def opened(env: str | Path, **parameters: float) -> Any:
    return open_backend(EnvironmentConfig(env=str(env), env_parameters=parameters), torch.device("cpu"))


def build(target: Path) -> None:
    target.write_bytes(b"whole")


# -- Names ------------------------------------------------------------------------------------------------------------


KNOWN = (
    "acrobot, cartpole_v0, cartpole_v1, gridworld, mountain_car, mountain_car_continuous, pendulum, recommend, "
    "tag_continuous, tag_gridworld"
)


@pytest.mark.parametrize(
    ("env", "parameters", "words"),
    [
        *((name, {}, f"expected one of {KNOWN}, got '{name}'.*Did you mean '{near}'")
          for name, near in (("CartPole-v1", "cartpole_v1"), ("cartpol_v0", "cartpole_v0"),
                             ("MountainCar-v0", "mountain_car"))),
        ("/missing.cuh", {}, r"a \.cuh file, got .*missing\.cuh"),
        ("\xff\xfe\n", {}, "readable source text"),
        ("cartpole_v1", {"gravty": 9.0, "lenght": 1.0}, "(?s)Did you mean 'gravity'.*half_length.*'lenght'"),
        ("cartpole_v1", {'half length"': 1.0}, "got 'half length\"'"),
        *(("cartpole_v1", {"gravity": value}, r"env_parameters\.gravity: expected")
          for value in (float("nan"), float("inf"), 1e39)),
        (COUNTER.replace("SIZE 2", "SIZE 1"), {}, "all 1 floats of OBSERVATION_SIZE"),
        (COUNTER.replace("SIZE 2", "SIZE 3"), {}, "all 3 floats of OBSERVATION_SIZE"),
        (COUNTER.replace("observation[1]", "for (int i = 1; i < 500; ++i) observation[i]"), {}, "the first 500"),
        ('#define ACTION_NAMES {"a", "b", "a"}\n' + COUNTER, {}, "a unique name for each, got 'a', 'b', 'a'"),
        ('#define ACTION_NAMES {"a", "b", ""}\n' + COUNTER, {}, "got 'a', 'b', ''"),
    ],
)  # fmt: skip
def test_what_cannot_be_opened_is_named(tmp_path: Path, env: str, parameters: dict[str, float], words: str) -> None:
    with pytest.raises(SimulationError, match=words):
        opened(written(tmp_path, env) if "\n" in env else env, **parameters)


def test_parameters_reach_the_kernel_to_the_last_bit() -> None:
    for value in (9.7, 1e-30, -3e38, 1.0, 16777217.0):
        assert opened("cartpole_v1", gravity=value).spec.parameters["gravity"] == torch.tensor(value).item()
    listed = opened("tag_gridworld", **{"starting_location_x[1]": 3.0}).spec.parameters
    assert [listed[f"starting_location_x[{k}]"] for k in range(3)] == [-1, 3, -1]


# -- A user's own file ------------------------------------------------------------------------------------------------


def test_an_own_file_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, COUNTER, "with space/mine.cuh")
    monkeypatch.chdir(tmp_path / "with space")
    for path in (str(file), "mine.cuh", "./mine.cuh", "../with space/mine.cuh"):
        assert opened(path).spec.name == "mine"


def test_an_own_file_may_build_on_ours_and_on_its_neighbors(tmp_path: Path) -> None:
    written(tmp_path, "constexpr float reach = 3.0f;\n", "parts/numbers.cuh")
    file = written(tmp_path, '#define TIME_LIMIT 7\n#include "parts/numbers.cuh"\n#include "cartpole_v1.cuh"\n')
    assert opened(file).spec.time_limit == 7
    assert {"./mine.cuh", "./parts/numbers.cuh", "cartpole_v1.cuh", "env.cuh", "core/cpu.cuh", "port.cuh"} <= set(
        read_sources(file)
    )


def test_the_identity_is_that_of_own_sources_and_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sources, "KERNELS", shutil.copytree(KERNELS, tmp_path / "kernels"))
    written(tmp_path, "constexpr float reach = 3.0f;\n", "numbers.cuh")
    file = written(tmp_path, '#include "numbers.cuh"\n#include "cartpole_v1.cuh"\n')

    def identity(**settings: Any) -> str:
        return kernel_sources.identity(EnvironmentConfig(env=str(file), **settings))

    def changed(name: str) -> str:
        written(tmp_path, (tmp_path / name).read_text() + "// another line\n", name)
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
        (
            "DEVICE void reset",
            "DEVICE bool allowed(const State &s, int action) { return true; }\nDEVICE void reset",
            "an environment with allowed() must define MASKED",
        ),
        (
            "DEVICE void reset",
            "DEVICE bool candidate(const State &s, int k, Random &r, float *f) { return true; }\nDEVICE void reset",
            "an environment with candidate() must define CANDIDATES",
        ),
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
        CpuBackend(file, {}, "exact", compiler=compiler(), optimization="-O0", cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    flat = " ".join(str(caught.value).replace('" "', "").translate({ord("‘"): "'", ord("’"): "'"}).split())
    assert sentence in flat.replace("-Werror=", "-W")
    assert flat.count("error: ") <= 5


def test_what_reset_leaves_out_is_0(counter: MakeEnv) -> None:
    env = counter(COUNTER.replace("FIELD(int, count)", "FIELD(int, count) FIELD(int, more)"), num_envs=1000)
    env.field("more").fill_(7)
    env.reset()
    assert not env.field("more").any()


def test_parameters_and_names_are_optional(tmp_path: Path) -> None:
    text = COUNTER.replace("int(goal)", "4").replace("worth *", "").replace(" P(goal, 4.0f) P(worth, 1.0f)", "")
    assert opened(written(tmp_path, text.replace("#define PARAMETERS(P)", ""))).spec.parameters == {}
    names = ("one", 'in "quotes"\n', "long" * 3000)
    named = written(tmp_path, f"{text}#define ACTION_NAMES {{{', '.join(map(json.dumps, names))}}}\n", "named.cuh")
    assert opened(named).spec.action_names == names


def test_names_of_the_c_library_are_free(tmp_path: Path) -> None:
    assert opened(
        written(tmp_path, COUNTER.replace("worth", "gamma").replace("count", "index").replace("past", "y1"))
    ).spec.parameters == {"goal": 4.0, "gamma": 1.0}


# -- Compilers --------------------------------------------------------------------------------------------------------


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelBuildError, match=r"Install g\+\+, .*pip install 'reagent-lite\[compiler\]'"):
        opened("cartpole_v1")


@pytest.mark.parametrize("broken", [False, True])
def test_the_wheels_compiler_is_taken_where_no_other_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: bool
) -> None:
    if broken:
        written(tmp_path, "#!/bin/sh\nexit 1\n", "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == zig_compiler()


# -- Cache ------------------------------------------------------------------------------------------------------------


def test_a_library_needs_no_other_and_a_second_opening_compiles_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened("cartpole_v1")
    (file,) = empty_cache.iterdir()  # one library, nothing temporary
    assert "NEEDED" not in subprocess.check_output(["readelf", "-d", file], text=True)  # no second OpenMP
    monkeypatch.setattr(cpu, "find_compiler", Mock(return_value=find_compiler()))
    monkeypatch.setattr(subprocess, "run", None)
    opened("cartpole_v1")


@pytest.mark.parametrize("damaged", [b"who", b"", b"whale"])
def test_a_damaged_file_is_built_anew_for_its_user_alone(empty_cache: Path, damaged: bytes) -> None:
    file = find_or_build("key", ".so", build)
    file.write_bytes(damaged)
    assert (find_or_build("key", ".so", build), file.read_bytes(), [*empty_cache.iterdir()]) == (file, b"whole", [file])
    assert [stat.S_IMODE(path.stat().st_mode) for path in (empty_cache, file)] == [0o700, 0o600]


def test_everything_that_matters_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(file: Path, parameters: dict[str, float], math: Any = "exact", **other: Any) -> str:
        with pytest.raises(LookupError):
            CpuBackend(file, parameters, math, **other)
        return str(compiled.call_args.args[0])

    compiled = Mock(side_effect=LookupError)  # in place of a compilation
    monkeypatch.setattr(cpu, "find_or_build", compiled)
    file, more = written(tmp_path, COUNTER + '#include "more.cuh"\n'), written(tmp_path, "", "more.cuh")
    keys = {key(file, {}), key(file, {"goal": 5.0}), key(file, {}, "fast"), key(file, {}, optimization="-O0"),
            key(file, {}, compiler=zig_compiler())}  # fmt: skip
    more.write_text("// a comment\n")
    changed = key(file, {})
    shutil.copytree(tmp_path, tmp_path / "elsewhere")
    assert key(tmp_path / "elsewhere" / file.name, {}) == changed  # the same texts in another folder
    monkeypatch.setattr(cpu, "machine", lambda: "another processor")
    assert len({*keys, changed, key(file, {})}) == 7


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="describes a processor elsewhere")
def test_the_machine_is_told_apart_by_what_its_processor_can() -> None:
    processor = cache.machine()
    assert "flags" in processor or "Features" in processor
    assert "MHz" not in processor


def test_concurrent_builders_do_not_meet(empty_cache: Path) -> None:
    code = (
        "import time; from reagent_lite.sim.cache import find_or_build\n"
        "print(find_or_build('key', '.so', lambda target: time.sleep(0.5) or target.write_bytes(b'whole')).read_text())"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [run.communicate()[0] for run in runs] == ["whole\n"] * 3
    assert len(list(empty_cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("what", "mode", "owner", "says"),
    [
        ("folder", 0o777, 0, "{}: .* got owner {}, mode 0777; .*this process alone.*REAGENT_LITE_CACHE.*"),
        ("folder", 0o700, 12345, "{}: .* got owner {}, mode 0700; .*this process alone.*REAGENT_LITE_CACHE.*"),
        ("file", 0o777, 0, ""),
        ("file", 0o600, 12345, ""),
        ("link", 0o600, 0, ""),
    ],
)
def test_code_that_others_may_have_written_is_compiled_anew(
    what: str, mode: int, owner: int, says: str, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if owner and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    planted = empty_cache / f"key-{hashlib.sha256(b'planted').hexdigest()[:32]}.so"
    written(empty_cache, "planted", planted.name)
    empty_cache.chmod(0o700)
    changed = empty_cache if what == "folder" else planted
    changed.chmod(mode)
    os.chown(changed, owner or os.geteuid(), -1)
    if what == "link":
        planted.symlink_to(planted.rename(empty_cache / "elsewhere"))
    assert [find_or_build("key", ".so", build).read_bytes() for _ in range(2)] == [b"whole"] * 2
    assert re.fullmatch(says.format(empty_cache, owner or os.geteuid()), "\n".join(caplog.messages))
    assert (list(empty_cache.iterdir()) == [planted]) == (what == "folder")  # left as it is, and not used


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
    example = (ROOT / "docs/environments.md").read_text().split("```c++\n")[1].split("```")[0]
    env = environments(written(tmp_path, example, "walk.cuh"), 3, parameters={"slip": 0.0})
    env.field("cell").fill_(3)
    take(env, 1, 1, 1, observation=[[pytest.approx(4 / 5)]] * 3)
    take(env, 1, 1, 1, reward=[1, 1, 1], terminated=[True] * 3)
