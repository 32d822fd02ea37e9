// The arguments of the entry points; reagent_lite/sim/calls.py has the same layout.
#pragma once

namespace reagent_lite::environment {

template <bool narrow>
struct ActionOf {
  using type = int;
};
template <>
struct ActionOf<true> {
  using type = unsigned char;
};
using Action = ActionOf<(num_choices <= 256)>::type;

// N = num environments, R = N * A rows, row = environment * A + agent. An output that is null is not written.
struct Call {
  unsigned *state;           // [words, N] the fields in order; an array of n takes n rows
  int *step_count;           // [N] steps done in the running episode
  unsigned *episode;         // [N] episodes finished
  float *episode_return;     // [R] reward so far in the running episode
  const Action *action;      // [R]
  float *observation;        // [R, S] the policy acts on it next; after an end, of the next episode
  float *next_observation;   // [R, S] at the end of the transition
  float *reward;             // [R]
  unsigned char *ended;      // [N] bit 0 terminated, bit 1 truncated
  float *last_return;        // [R] return of the last finished episode
  int *last_length;          // [N] steps of the last finished episode
  unsigned char *mask;       // [N, K] choices at observation
  unsigned char *next_mask;  // [N, K] choices at next_observation
  float *features;           // [N, K, F] of the candidates at observation
  float *next_features;      // [N, K, F] of the candidates at next_observation
  unsigned char *in_game;       // [R] whether the agent plays at observation; null with one agent
  unsigned char *next_in_game;  // [R] whether it plays at next_observation
  unsigned *fault;           // [2] actions that were not allowed, and the complement of the lowest id that took one
  unsigned seed, stream, first_env;
  int num, time_limit;
  int stay;  // 1: an environment keeps the last state of an ended episode; for the last step before a reset
};

struct ActCall {
  const float *q;             // [R, K]; null: every allowed choice has the same probability
  const unsigned char *mask;  // [R, K]; null: all allowed
  Action *action;             // [R] out
  float *propensity;          // [R] out, probability of that action under this policy
  const int *step_count;      // [N]
  const unsigned *episode;    // [N]
  const float *epsilon;       // [1] of the epsilon-greedy policy, used if temperature is 0
  unsigned *fault;            // [2]
  unsigned seed, stream, first_env;
  int num;
  float temperature;  // above 0: softmax(q / temperature)
  int reserved;
};

DEVICE void count_fault(unsigned *fault, unsigned env) {
  add_to(fault, 1u);
  raise_to(fault + 1, ~env);
}

}  // namespace reagent_lite::environment
