// Compiles one environment, which ENVIRONMENT_FILE defines as scalar code, to entry points for many on a CPU or a GPU.
// docs/environments.md documents what such a file defines. The order matters: the file uses language.cuh, and all headers after
// the file use its definitions.
//
// Entry points, the same on CPU and GPU: env_reset, env_step, env_observe, env_act, env_describe, env_description.
#pragma once
#include "core/language.cuh"
#include "philox.cuh"
#include "port.cuh"

namespace reagent_lite::environment {
#include ENVIRONMENT_FILE
}  // namespace reagent_lite::environment

#include "core/contract.cuh"
#include "core/calls.cuh"
#include "core/transition.cuh"
#include "core/draw.cuh"
#include "core/describe.cuh"

#ifdef __CUDACC__
#include "core/cuda.cuh"
#else
#include "core/cpu.cuh"
#endif
