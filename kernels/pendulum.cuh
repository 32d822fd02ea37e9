// Pendulum-v1 with a choice of torques: a rod hinged at one end is swung up and held upright.
//
// Source   equation of motion of a uniform rod about its end, theta'' = 3 g / (2 l) sin(theta) + 3 / (m l^2) torque,
//          semi-implicit Euler; constants, limits and starts as Gymnasium's Pendulum-v1
// State    theta angle from upright (rad), at most one step outside [-pi, pi); omega its speed (rad/s)
// Observed cos(theta), sin(theta), omega
// Actions  `num_levels` torques evenly spaced in +-max_torque (N m), an odd number so that 0 is one of them. The
//          action's feature is the torque
// Reward   -(theta^2 + 0.1 omega^2 + 0.001 torque^2), of the state that the action is taken in
// Start    theta uniform in [-pi, pi), omega uniform in +-start_speed
// Ends     never
// Limit    200 steps
#include "port.cuh"

#define NUM_ACTIONS int(num_levels)
#define ACTION_FEATURE_SIZE 1
#define OBSERVATION_SIZE 3
#define TIME_LIMIT 200
#define PARAMETERS(P)      \
  P(num_levels, 5.0f)      \
  P(gravity, 10.0f)        \
  P(mass, 1.0f)            \
  P(length, 1.0f)          \
  P(time_step, 0.05f)      \
  P(max_speed, 8.0f)       \
  P(max_torque, 2.0f)      \
  P(start_speed, 1.0f)
#define STATE(FIELD, ARRAY) FIELD(float, theta) FIELD(float, omega)
DECLARE_ENVIRONMENT

static_assert(num_levels >= 3 && NUM_ACTIONS == num_levels && NUM_ACTIONS % 2 == 1,
              "num_levels must be odd, at least 3");

DEVICE float torque_of(int action) { return max_torque * float(2 * action + 1 - NUM_ACTIONS) / float(NUM_ACTIONS - 1); }

DEVICE void action_features(int action, float *features) { features[0] = torque_of(action); }

DEVICE void reset(State &s, Random &random) {
  s.theta = uniform(random, -pi, pi);
  s.omega = uniform(random, -start_speed, start_speed);
}

DEVICE void observe(const State &s, float *observation) {
  sine_cosine(s.theta, &observation[1], &observation[0]);
  observation[2] = s.omega;
}

DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  constexpr float fall = 3.0f * gravity / (2.0f * length);
  constexpr float turn = 3.0f / (mass * length * length);
  float torque = torque_of(action);
  float theta = wrap_angle(s.theta);
  float cost = theta * theta + 0.1f * s.omega * s.omega + 0.001f * torque * torque;
  s.omega = clamp(s.omega + (fall * sine(theta) + turn * torque) * time_step, -max_speed, max_speed);
  s.theta = theta + s.omega * time_step;
  terminated = false;
  return -cost;
}
