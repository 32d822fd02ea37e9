// Entry points of a GPU: one thread per environment, which holds the state in registers; above 16 agents one block per
// environment, which holds it in shared memory.
#pragma once

namespace reagent_lite::environment {

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

extern "C" __device__ const Description env_description = describe();

KERNEL env_describe(float *parameters, float *features, int *agent_types, int *observed) {
  write_numbers<64>(parameters, features, agent_types, observed);
}

template <auto entry>
DEVICE void run(const Call &c) {
  long i = by_block ? long(blockIdx.x) : long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= c.num) return;
  if constexpr (by_block) {
    __shared__ Scratch scratch;
    entry(c, i, scratch);
  } else {
    Scratch scratch;
    entry(c, i, scratch);
  }
}

KERNEL env_observe(const Call c) { run<observe_whole>(c); }
KERNEL env_reset(const Call c) { run<reset_whole>(c); }
KERNEL env_step(const Call c) { run<step_whole>(c); }

KERNEL env_act(const ActCall c) {
  long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= long(c.num) * agents) return;
  float value[num_choices], open[num_choices];
  UNROLL
  for (int k = 0; k < num_choices; ++k) {
    open[k] = !c.mask || c.mask[i * num_choices + k] ? 1.0f : 0.0f;
    value[k] = c.q ? value_of(c.q[i * num_choices + k], open[k]) : 0.0f;
  }
  bool none;
  if (!c.q) {
    none = draw_action<ANY>(c, i, value, open, 1, 1.0f, 0.0f);
  } else if (c.temperature > 0.0f) {
    none = draw_action<SOFTMAX>(c, i, value, open, 1, 0.0f, 1.0f / c.temperature);
  } else {
    none = draw_action<GREEDY>(c, i, value, open, 1, c.epsilon[0], 0.0f);
  }
  if (none) count_fault(c.fault, c.first_env + unsigned(i / agents));
}

}  // namespace reagent_lite::environment
