// CartPole-v1: a pole hinged on a cart that is pushed left or right along a track.
//
// Source   Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control
//          problems" (1983); equations of Florian, "Correct equations for the dynamics of the cart-pole system" (2007),
//          without friction; constants, limits and starts as Gymnasium's CartPole-v1
// State    x cart position (m), v cart speed (m/s), theta pole angle from upright (rad), omega its speed (rad/s)
// Actions  0 push left, 1 push right, with `force` newton
// Reward   1 for every step, the last one included
// Start    all four uniform in +-start_range
// Ends     |x| > position_limit or |theta| > angle_limit (12 degrees)
// Limit    500 steps
#include "port.cuh"

#define NUM_ACTIONS 2
#define ACTION_NAMES {"left", "right"}
#define OBSERVATION_SIZE 4
#ifndef TIME_LIMIT
#define TIME_LIMIT 500
#endif
#define PARAMETERS(P)        \
  P(gravity, 9.8f)           \
  P(cart_mass, 1.0f)         \
  P(pole_mass, 0.1f)         \
  P(half_length, 0.5f)       \
  P(force, 10.0f)            \
  P(time_step, 0.02f)        \
  P(position_limit, 2.4f)    \
  P(angle_limit, 0.20943951f) \
  P(start_range, 0.05f)
#define STATE(FIELD, ARRAY) FIELD(float, x) FIELD(float, v) FIELD(float, theta) FIELD(float, omega)
DECLARE_ENVIRONMENT

DEVICE void reset(State &s, Random &random) {
  s.x = uniform(random, -start_range, start_range);
  s.v = uniform(random, -start_range, start_range);
  s.theta = uniform(random, -start_range, start_range);
  s.omega = uniform(random, -start_range, start_range);
}

DEVICE void observe(const State &s, float *observation) {
  observation[0] = s.x;
  observation[1] = s.v;
  observation[2] = s.theta;
  observation[3] = s.omega;
}

DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  constexpr float mass = cart_mass + pole_mass;
  constexpr float moment = pole_mass * half_length;
  float sin_theta, cos_theta;
  sine_cosine(s.theta, &sin_theta, &cos_theta);
  float push = action == 1 ? force : -force;
  float shared = (push + moment * s.omega * s.omega * sin_theta) * (1.0f / mass);
  float inertia = half_length * (4.0f / 3.0f - pole_mass / mass * cos_theta * cos_theta);
  float omega_rate = (gravity * sin_theta - cos_theta * shared) / inertia;
  float v_rate = shared - moment / mass * omega_rate * cos_theta;
  s.x += time_step * s.v;  // explicit Euler: positions move with the old speeds
  s.v += time_step * v_rate;
  s.theta += time_step * s.omega;
  s.omega += time_step * omega_rate;
  terminated = (absolute(s.x) > position_limit) | (absolute(s.theta) > angle_limit);
  return 1.0f;
}
