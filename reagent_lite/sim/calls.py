"""The arguments of a kernel, laid out as kernels/env.cuh declares them: pointers first, then 4-byte words.

The CPU build takes a pointer to the structure, CUDA takes it by value.
"""

import ctypes
from typing import ClassVar, Literal

_POINTER = ctypes.c_void_p

Kernel = Literal["env_reset", "env_step", "env_observe", "env_act"]
"""Starts every environment's running episode anew; takes an action in every environment, where an episode that ends is
followed by the next one; writes observation, mask and features of the present states; draws actions (`ActCall`)."""


class Call(ctypes.Structure):
    """Arguments of env_reset, env_step and env_observe; a null output is not written."""

    _fields_: ClassVar = [
        ("state", _POINTER),
        ("step_count", _POINTER),
        ("episode", _POINTER),
        ("episode_return", _POINTER),
        ("action", _POINTER),
        ("observation", _POINTER),
        ("next_observation", _POINTER),
        ("reward", _POINTER),
        ("ended", _POINTER),
        ("last_return", _POINTER),
        ("last_length", _POINTER),
        ("mask", _POINTER),
        ("next_mask", _POINTER),
        ("features", _POINTER),
        ("next_features", _POINTER),
        ("fault", _POINTER),
        ("seed", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("first_env", ctypes.c_uint32),
        ("num", ctypes.c_int32),
        ("time_limit", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class ActCall(ctypes.Structure):
    """Arguments of env_act."""

    _fields_: ClassVar = [
        ("q", _POINTER),
        ("mask", _POINTER),
        ("action", _POINTER),
        ("propensity", _POINTER),
        ("step_count", _POINTER),
        ("episode", _POINTER),
        ("epsilon", _POINTER),
        ("fault", _POINTER),
        ("seed", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("first_env", ctypes.c_uint32),
        ("num", ctypes.c_int32),
        ("temperature", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]
