// Everything between one environment, which ENVIRONMENT_FILE defines as scalar code, and many on a CPU or a GPU.
// README.md says what such a file defines. The order matters: the file is written with what language.cuh gives it, and
// all the rest is written in terms of the file.
//
// Entry points, the same on both machines: env_reset, env_step, env_observe, env_act, env_describe, env_description.
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
