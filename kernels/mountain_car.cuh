// MountainCar-v0: a car too weak to climb out of a valley straight away swings itself up.
//
// Source   Moore, "Efficient Memory-based Learning for Robot Control" (1990); Sutton and Barto, "Reinforcement
//          Learning" (2018), example 10.1; constants, limits and starts as Gymnasium's MountainCar-v0
// State    x position along the track, v position gained per step; the valley's floor is at -pi/6
// Actions  0 push left, 1 coast, 2 push right, with `force` per step
// Reward   -1 for every step, the last one included
// Start    x uniform in [start_low, start_high], v 0
// Ends     x >= goal_position and v >= goal_velocity; the wall at min_position stops the car without bouncing
// Limit    200 steps
#include "port.cuh"

#ifndef NUM_ACTIONS  // mountain_car_continuous.cuh brings its own engine
#define NUM_ACTIONS 3
#define ACTION_NAMES {"left", "coast", "right"}
#define TIME_LIMIT 200
#define GOAL_POSITION 0.5f
#define ENGINE(P) P(force, 0.001f)
#endif
#define OBSERVATION_SIZE 2
#define PARAMETERS(P)             \
  ENGINE(P)                       \
  P(gravity, 0.0025f)             \
  P(min_position, -1.2f)          \
  P(max_position, 0.6f)           \
  P(max_speed, 0.07f)             \
  P(goal_position, GOAL_POSITION) \
  P(goal_velocity, 0.0f)          \
  P(start_low, -0.6f)             \
  P(start_high, -0.4f)
#define STATE(FIELD, ARRAY) FIELD(float, x) FIELD(float, v)
DECLARE_ENVIRONMENT

DEVICE void reset(State &s, Random &random) {
  s.x = uniform(random, start_low, start_high);
  s.v = 0.0f;
}

DEVICE void observe(const State &s, float *observation) {
  observation[0] = s.x;
  observation[1] = s.v;
}

// Moves the car for one step under the push of its engine; returns whether it reached the goal. Maxima are used in
// place of conditions: with them g++ 12 vectorises the loop over environments, 1.1 instead of 16 ns a step.
DEVICE bool drive(State &s, float push) {
  s.v = clamp(s.v + (push - gravity * cosine(3.0f * s.x)), -max_speed, max_speed);
  s.x = clamp(s.x + s.v, min_position, max_position);
  s.v = maximum(s.v, s.x <= min_position ? 0.0f : -max_speed);
  return maximum(goal_position - s.x, goal_velocity - s.v) <= 0.0f;
}

#ifndef ACTION_FEATURE_SIZE
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  terminated = drive(s, float(action - 1) * force);
  return -1.0f;
}
#endif
