// MountainCarContinuous-v0 with a choice of forces: the car of mountain_car.cuh, paid on arrival and charged for fuel.
//
// Source   as mountain_car.cuh; engine, goal and reward as Gymnasium's MountainCarContinuous-v0
// State    as mountain_car.cuh
// Actions  `num_levels` forces evenly spaced in [-1, 1], an odd number so that coasting is one of them; force * power
//          is the push per step. The action's feature is the force
// Reward   -0.1 force^2 for every step, and 100 on arrival
// Start    as mountain_car.cuh
// Ends     as mountain_car.cuh, the goal at 0.45
// Limit    999 steps
#include "port.cuh"

#define NUM_ACTIONS int(num_levels)
#define ACTION_FEATURE_SIZE 1
#define TIME_LIMIT 999
#define GOAL_POSITION 0.45f
#define ENGINE(P)         \
  P(num_levels, 5.0f)     \
  P(power, 0.0015f)       \
  P(fuel_price, 0.1f)     \
  P(goal_reward, 100.0f)
#include "mountain_car.cuh"

static_assert(num_levels >= 3 && NUM_ACTIONS == num_levels && NUM_ACTIONS % 2 == 1,
              "num_levels must be odd, at least 3");

DEVICE float force_of(int action) { return float(2 * action + 1 - NUM_ACTIONS) / float(NUM_ACTIONS - 1); }

DEVICE void action_features(int action, float *features) { features[0] = force_of(action); }

DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  float force = force_of(action);
  terminated = drive(s, force * power);
  return (terminated ? goal_reward : 0.0f) - fuel_price * force * force;
}
