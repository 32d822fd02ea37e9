"""The arguments of a kernel, in the layout of kernels/env.cuh: pointers first, then 4-byte words.

The CPU build takes a pointer to the structure; CUDA takes the structure by value.
"""

import ctypes
from typing import ClassVar, Literal

Kernel = Literal["env_reset", "env_step", "env_observe", "env_act"]
"""The entry points of a compiled environment.

env_reset    restarts every environment's current episode
env_step     takes an action in every environment, and starts the next episode after an end
env_observe  writes observation, mask and features of the current states
env_act      draws actions; its arguments are an ActCall
"""

_SHARED: list[tuple[str, type]] = [
    ("seed", ctypes.c_uint32),
    ("stream", ctypes.c_uint32),
    ("first_env", ctypes.c_uint32),
    ("num", ctypes.c_int32),
]


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


class Call(ctypes.Structure):
    """Arguments of env_reset, env_step and env_observe; a null output is not written."""

    _fields_: ClassVar = [
        *_pointers("state step_count episode episode_return action observation next_observation reward ended"),
        *_pointers("last_return last_length mask next_mask features next_features in_game next_in_game fault"),
        *_SHARED,
        ("time_limit", ctypes.c_int32),
        ("stay", ctypes.c_int32),
    ]


class ActCall(ctypes.Structure):
    """Arguments of env_act."""

    _fields_: ClassVar = [
        *_pointers("q mask action propensity step_count episode epsilon fault"),
        *_SHARED,
        ("temperature", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]
