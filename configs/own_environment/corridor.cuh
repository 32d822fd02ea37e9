// A corridor of `length` cells: an environment of one's own, in one file.
//
// State    cell, 0 to length - 1
// Actions  0 back, 1 forward; a step succeeds with probability 1 - slip, else the walker stays
// Reward   1 on reaching the last cell, -0.01 for every step
// Start    cell 0
// Ends     in the last cell
// Limit    100 steps
#include "port.cuh"

#define NUM_ACTIONS 2
#define ACTION_NAMES {"back", "forward"}
#define OBSERVATION_SIZE 1
#define TIME_LIMIT 100
#define PARAMETERS(P) P(length, 10.0f) P(slip, 0.1f)
#define STATE(FIELD, ARRAY) FIELD(int, cell)
DECLARE_ENVIRONMENT

DEVICE void reset(State &s, Random &random) { s.cell = 0; }

DEVICE void observe(const State &s, float *observation) { observation[0] = float(s.cell) / (length - 1.0f); }

DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  int move = bernoulli(random, slip) ? 0 : 2 * action - 1;
  s.cell = maximum(s.cell + move, 0);
  terminated = s.cell >= int(length) - 1;
  return terminated ? 0.99f : -0.01f;
}
