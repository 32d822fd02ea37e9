// Gridworld: 5 x 5 cells around a wall, small enough that every value is known exactly.
//
//     0  1  2  3  4        cell = 5 y + x; start 0, goal 24
//     5  6  #  8  9
//    10 11  # 13 14
//    15 16  # 18 19
//    20 21 22 23 24
//
// Source   this project's; exact transition matrix and values in tests/oracles/gridworld.py
// State    cell
// Observed one-hot of the cell
// Actions  L, R, U, D; a move into the wall or off the grid is not allowed, and at the goal none is. A move goes in its
//          direction with probability `intended`, else to either side, equally likely; a slip that is blocked stays
// Reward   goal_reward on entering the goal, else 0
// Start    cell 0; with random_start 1 uniform over the free cells but the goal
// Ends     at the goal
// Limit    1000 steps
#include "port.cuh"

#define NUM_ACTIONS 4
#define ACTION_NAMES {"L", "R", "U", "D"}
#define MASKED
#define OBSERVATION_SIZE 25
#define TIME_LIMIT 1000
#define PARAMETERS(P)       \
  P(intended, 0.98f)        \
  P(goal_reward, 10.0f)     \
  P(random_start, 0.0f)
#define STATE(FIELD, ARRAY) FIELD(int, cell)
DECLARE_ENVIRONMENT

constexpr int side = 5;
constexpr int goal = 24;

// The cell that a move without a slip leads to; the same cell if it is blocked.
DEVICE int destination(int cell, int action) {
  int x = cell % side + (action == 1) - (action == 0);
  int y = cell / side + (action == 3) - (action == 2);
  bool outside = (x < 0) | (x >= side) | (y < 0) | (y >= side);
  bool wall = (x == 2) & (y >= 1) & (y <= 3);
  return outside | wall ? cell : side * y + x;
}

DEVICE bool allowed(const State &s, int action) { return (s.cell != goal) & (destination(s.cell, action) != s.cell); }

DEVICE void reset(State &s, Random &random) {
  int free = below(random, 21);  // the 21 free cells but the goal in order, then past the walls 7, 12 and 17
  free += free >= 7;
  free += free >= 12;
  free += free >= 17;
  s.cell = random_start != 0.0f ? free : 0;
}

DEVICE void observe(const State &s, float *observation) {
  for (int cell = 0; cell < side * side; ++cell) observation[cell] = cell == s.cell ? 1.0f : 0.0f;
}

DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  float chance = uniform(random);
  int across = (action < 2 ? 2 : 0) + (chance >= 0.5f * (1.0f + intended));
  s.cell = destination(s.cell, chance < intended ? action : across);
  terminated = s.cell == goal;
  return terminated ? goal_reward : 0.0f;
}
