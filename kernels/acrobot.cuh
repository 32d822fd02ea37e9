// Acrobot-v1: two links hang from a bar like a gymnast, driven only at the joint between them, and must swing the free
// end up above the bar.
//
// Source   Sutton, "Generalization in Reinforcement Learning: Successful Examples Using Sparse Coarse Coding" (1996),
//          with the equations of Sutton and Barto, "Reinforcement Learning" (1998), section 11.3 (the paper's lack a
//          term); constants, limits and starts as Gymnasium's Acrobot-v1; classical Runge-Kutta of order 4
// State    theta_1 angle of the first link from hanging, theta_2 of the second from the first (rad, [-pi, pi));
//          omega_1, omega_2 their speeds (rad/s)
// Observed cos(theta_1), sin(theta_1), cos(theta_2), sin(theta_2), omega_1, omega_2
// Actions  0, 1, 2: -torque, 0, +torque at the middle joint (N m), constant over the step. Its feature is this torque
// Reward   -1 for every step, 0 for the step that reaches the goal
// Start    all four uniform in +-start_range
// Ends     the free end is higher than goal_height above the bar: -cos(theta_1) - cos(theta_1 + theta_2) > goal_height
// Limit    500 steps
#include "port.cuh"

#define NUM_ACTIONS 3
#define ACTION_NAMES {"negative", "none", "positive"}
#define ACTION_FEATURE_SIZE 1
#define OBSERVATION_SIZE 6
#define TIME_LIMIT 500
#define PARAMETERS(P)            \
  P(gravity, 9.8f)               \
  P(length_1, 1.0f)              \
  P(mass_1, 1.0f)                \
  P(mass_2, 1.0f)                \
  P(center_1, 0.5f)              \
  P(center_2, 0.5f)              \
  P(inertia_1, 1.0f)             \
  P(inertia_2, 1.0f)             \
  P(torque, 1.0f)                \
  P(time_step, 0.2f)             \
  P(max_speed_1, 12.566371f)     \
  P(max_speed_2, 28.274334f)     \
  P(goal_height, 1.0f)           \
  P(start_range, 0.1f)
#define STATE(FIELD, ARRAY) FIELD(float, theta_1) FIELD(float, theta_2) FIELD(float, omega_1) FIELD(float, omega_2)
DECLARE_ENVIRONMENT

DEVICE float torque_of(int action) { return float(action - 1) * torque; }

DEVICE void action_features(int action, float *features) { features[0] = torque_of(action); }

DEVICE void reset(State &s, Random &random) {
  s.theta_1 = uniform(random, -start_range, start_range);
  s.theta_2 = uniform(random, -start_range, start_range);
  s.omega_1 = uniform(random, -start_range, start_range);
  s.omega_2 = uniform(random, -start_range, start_range);
}

DEVICE void observe(const State &s, float *observation) {
  sine_cosine(s.theta_1, &observation[1], &observation[0]);
  sine_cosine(s.theta_2, &observation[3], &observation[2]);
  observation[4] = s.omega_1;
  observation[5] = s.omega_2;
}

// s + dt * rate
DEVICE State moved(const State &s, const State &rate, float dt) {
  return State{s.theta_1 + dt * rate.theta_1, s.theta_2 + dt * rate.theta_2, s.omega_1 + dt * rate.omega_1,
               s.omega_2 + dt * rate.omega_2};
}

// Time derivative of the state under a torque; d and phi as in the book, cos(x - pi/2) written as sin(x).
DEVICE State rate_of(const State &s, float tau) {
  constexpr float coupling = mass_2 * length_1 * center_2;
  constexpr float still_1 =
      mass_1 * center_1 * center_1 + mass_2 * (length_1 * length_1 + center_2 * center_2) + inertia_1 + inertia_2;
  constexpr float still_2 = mass_2 * center_2 * center_2 + inertia_2;
  float sin_2, cos_2;
  sine_cosine(s.theta_2, &sin_2, &cos_2);
  float d_1 = still_1 + 2.0f * coupling * cos_2;
  float d_2 = still_2 + coupling * cos_2;
  float phi_2 = mass_2 * center_2 * gravity * sine(s.theta_1 + s.theta_2);
  float phi_1 = -coupling * s.omega_2 * (s.omega_2 + 2.0f * s.omega_1) * sin_2 +
                (mass_1 * center_1 + mass_2 * length_1) * gravity * sine(s.theta_1) + phi_2;
  float ratio = d_2 / d_1;
  float pull = tau + ratio * phi_1 - coupling * s.omega_1 * s.omega_1 * sin_2 - phi_2;
  float rate_2 = pull / (still_2 - ratio * d_2);
  float rate_1 = -(d_2 * rate_2 + phi_1) / d_1;
  return State{s.omega_1, s.omega_2, rate_1, rate_2};
}

DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  float tau = torque_of(action);
  State k_1 = rate_of(s, tau);
  State k_2 = rate_of(moved(s, k_1, 0.5f * time_step), tau);
  State k_3 = rate_of(moved(s, k_2, 0.5f * time_step), tau);
  State k_4 = rate_of(moved(s, k_3, time_step), tau);
  State sum = moved(moved(moved(k_1, k_2, 2.0f), k_3, 2.0f), k_4, 1.0f);
  s = moved(s, sum, time_step / 6.0f);
  s.theta_1 = wrap_angle(s.theta_1);
  s.theta_2 = wrap_angle(s.theta_2);
  s.omega_1 = clamp(s.omega_1, -max_speed_1, max_speed_1);
  s.omega_2 = clamp(s.omega_2, -max_speed_2, max_speed_2);
  terminated = -cosine(s.theta_1) - cosine(s.theta_1 + s.theta_2) > goal_height;
  return terminated ? 0.0f : -1.0f;
}
