// Entry points of a GPU: one thread per environment, which holds the state in registers.
#pragma once

namespace reagent_lite::environment {

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

extern "C" __device__ const Description env_description = describe();

KERNEL env_describe(float *parameters, float *features) { write_numbers(parameters, features); }

DEVICE void show(const Call &c, long i, unsigned episode, int done, const State &s) {
  if (c.observation) write_observation(c.observation, i, s);
  if (c.mask || c.features) write_choices(c.mask, c.features, c, i, episode, done, s);
}

DEVICE void start(const Call &c, long i, unsigned episode, State &s) {
  Random random = random_of(c, i, episode, 0, FOR_RESET);
  reset(s, random);
}

KERNEL env_observe(const Call c) {
  long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= c.num) return;
  show(c, i, c.episode[i], c.step_count[i], load(c.state, c.num, i));
}

KERNEL env_reset(const Call c) {
  long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= c.num) return;
  unsigned episode = c.episode[i];
  State s;
  start(c, i, episode, s);
  store(c.state, c.num, i, s);
  c.step_count[i] = 0;
  c.episode_return[i] = 0.0f;
  show(c, i, episode, 0, s);
}

KERNEL env_step(const Call c) {
  long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= c.num) return;
  State s = load(c.state, c.num, i);
  unsigned episode = c.episode[i];
  int done = c.step_count[i];
  float reward;
  unsigned flags = advance(c, i, episode, done, s, reward);
  unsigned ended = flags & (TERMINATED | TRUNCATED);
  float episode_return = c.episode_return[i] + reward;
  done += 1;
  c.reward[i] = reward;
  if (flags & FAULT) count_fault(c.fault, c.first_env + unsigned(i));
  if (c.ended) c.ended[i] = (unsigned char)ended;
  if (c.next_observation) write_observation(c.next_observation, i, s);
  if (c.next_mask || c.next_features) write_choices(c.next_mask, c.next_features, c, i, episode, done, s);
  if (ended) {
    if (c.last_return) c.last_return[i] = episode_return;
    if (c.last_length) c.last_length[i] = done;
    episode += 1u;
    c.episode[i] = episode;
    done = 0;
    episode_return = 0.0f;
    start(c, i, episode, s);
  }
  store(c.state, c.num, i, s);
  c.step_count[i] = done;
  c.episode_return[i] = episode_return;
  show(c, i, episode, done, s);
}

KERNEL env_act(const ActCall c) {
  long i = long(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= c.num) return;
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
  if (none) count_fault(c.fault, c.first_env + unsigned(i));
}

}  // namespace reagent_lite::environment
