"""Declarations of machines before a run, and the check that they fit together."""

import uuid
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from reagent_lite.config.loader import leaves
from reagent_lite.errors import Problem, RendezvousError

LOCAL_KEYS = ("node_index", "num_processes_per_node", "init_method", "data.training_copy_dir", "rendezvous.interface")
"""Config keys that may differ between machines."""

_MOST_KEYS = 20


class Declaration(BaseModel):
    """Declaration of a machine that takes part in a run.

    Attributes:
        node, host, pid: number of the machine, and its launcher.
        processes: number of workers it will start.
        device: "cuda" or "cpu".
        versions: versions of libraries that must fit together, such as torch and NCCL.
        gpus: UUIDs of the GPUs it will use, if known.
        config: the resolved config by dotted key, without LOCAL_KEYS.
        problem: why this machine cannot take part, or "".
        exit_code: exit code for the problem.
        job: name of the machine's job, see `nodes.job_name`; "" fits every job.
        run: random id of this start of the launcher.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: int
    host: str
    pid: int
    processes: int
    device: str
    versions: dict[str, str] = {}
    gpus: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    problem: str = ""
    exit_code: int = 2
    job: str = ""
    run: str = Field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def name(self) -> str:
        """Name of this machine in messages."""
        return f"node {self.node} (host {self.host}, pid {self.pid})"


class Compatibility(BaseModel):
    """Node 0's check of all declarations. If there are problems, no run starts.

    Attributes:
        problems: reasons why the machines do not fit together.
        warnings: differences that do not prevent a run.
        exit_code: exit code for the problems.
        declarations: the declarations without their configs.
    """

    problems: list[Problem]
    warnings: list[str]
    exit_code: int
    declarations: tuple[Declaration, ...]

    def require_fit(self) -> None:
        """Raises an error if the machines do not fit together.

        Raises:
            RendezvousError: all problems.
        """
        if self.problems:
            error = RendezvousError(self.problems)
            error.exit_code = self.exit_code
            raise error


def check_compatibility(declared: Sequence[Declaration]) -> Compatibility:
    """Checks that declared machines fit together; if some cannot take part, only their problems are returned."""
    unfit = [declaration for declaration in declared if declaration.problem]
    problems, warnings = compare_declarations(declared)
    if unfit:
        problems = [Problem(machine.name, "a machine that can take part", machine.problem) for machine in unfit]
        warnings = []
    code = max(unfit[0].exit_code, 1) if unfit else RendezvousError.exit_code
    # without configs, as every machine reads the result
    declarations = tuple(declaration.model_copy(update={"config": {}}) for declaration in declared)
    return Compatibility(problems=problems, warnings=warnings, exit_code=code, declarations=declarations)


def shared_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a resolved config by dotted key, without the keys that may differ between machines."""
    return {key: value for key, value in leaves(tree).items() if key not in LOCAL_KEYS}


def digest_of_code(package: Path) -> str:
    """Returns a digest of a package's Python files and their names, which differs between commits of a release."""
    digest = sha256()
    for file in sorted(package.rglob("[!.]*.py")):  # editors keep hidden files next to edited files
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def compare_declarations(declarations: Sequence[Declaration]) -> tuple[list[Problem], list[str]]:
    """Returns problems that prevent these machines from training together, and warnings."""
    problems = []
    warnings = []
    first, *others = declarations
    for other in others:
        problems += _config_problems(first, other)
        for name in sorted(first.versions.keys() | other.versions.keys()):
            a = first.versions.get(name, "none")
            b = other.versions.get(name, "none")
            if _series(a) != _series(b):
                todo = "Install the same release on every machine, or check out the same commit"
                problems.append(Problem(f"version of {name}", f"{a} as on {first.name}", f"{b} on {other.name}", todo))
            elif a != b:
                warnings.append(f"{name} is {a} on {first.name} and {b} on {other.name}")
        if first.device != other.device:
            expected = f"{first.device} as on {first.name}"
            got = f"{other.device} on {other.name}"
            todo = "Set use_gpu to false, or find out why GPUs are missing there"
            problems.append(Problem("devices", expected, got, todo))
    owners: dict[str, Declaration] = {}
    for machine in declarations:
        for gpu in machine.gpus:
            if gpu in owners:
                todo = "Set CUDA_VISIBLE_DEVICES so that launchers on the same machine use different GPUs"
                expected = f"used by {owners[gpu].name} alone"
                problems.append(Problem(f"GPU {gpu}", expected, f"also by {machine.name}", todo))
            owners[gpu] = machine
    return problems, warnings


def _config_problems(first: Declaration, other: Declaration) -> list[Problem]:
    keys = first.config.keys() | other.config.keys()
    differs = [key for key in sorted(keys) if first.config.get(key) != other.config.get(key)]
    problems = [
        Problem(
            f"config key {key}",
            f"{first.config.get(key)!r} as on {first.name}",
            f"{other.config.get(key)!r} on {other.name}",
        )
        for key in differs[:_MOST_KEYS]
    ]
    if len(differs) > _MOST_KEYS:
        problems.append(Problem.stating("config", f"{len(differs) - _MOST_KEYS} more keys differ"))
    return problems


def _series(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
