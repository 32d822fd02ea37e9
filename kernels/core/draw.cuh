// Draws of actions.
//
// Epsilon-greedy: epsilon / n for each of the n allowed choices, and the rest for the first choice with the largest q.
// Softmax: exp(q / temperature), divided by their sum. In both, a NaN counts as the least float.
#pragma once

namespace reagent_lite::environment {

enum Rule { ANY, GREEDY, SOFTMAX };

DEVICE float value_of(float q, float open) { return select(open != 0.0f, maximum(least_number, q), -infinity); }

// Draws for row i by inverting the distribution function, in order of the choices, at one uniform number.
// Choice k has value[k * stride] and open[k * stride], 1 or 0. Returns whether none is open; then the action is 0.
// It has only comparisons of floats and no branches, so that g++ vectorizes over i.
template <Rule rule>
DEVICE bool draw_action(const ActCall &c, long i, const float *value, const float *open, long stride, float epsilon,
                        float sharpness) {
  float count = 0.0f, best = -infinity;
  int greedy = 0;
  UNROLL
  for (int k = 0; k < num_choices; ++k) {
    count += open[k * stride];
    if constexpr (rule != ANY) {
      float own = value[k * stride];
      greedy = own > best ? k : greedy;
      best = maximum(best, own);
    }
  }
  bool none = count == 0.0f;

  float share = epsilon / maximum(count, 1.0f);
  float weight[num_choices];
  float total = 0.0f;
  UNROLL
  for (int k = 0; k < num_choices; ++k) {
    float own = share;
    if constexpr (rule == GREEDY) own += k == greedy ? 1.0f - epsilon : 0.0f;
    if constexpr (rule == SOFTMAX) {
      float value_k = value[k * stride];
      own = select(value_k == best, 1.0f, exponential((value_k - best) * sharpness));  // equal also where infinite
    }
    weight[k] = own * open[k * stride];
    total += weight[k];
  }
  if constexpr (rule != SOFTMAX) total = 1.0f;

  long env = i / agents;
  unsigned step_count = unsigned(c.step_count[env]);
  Random random = random_for(c.seed, c.stream, c.first_env + unsigned(env), c.episode[env], step_count, FOR_ACT,
                             step_count << 8, unsigned(i % agents));
  float threshold = uniform(random) * total;
  float before = 0.0f, chosen_weight = 0.0f;
  int chosen = 0;
  UNROLL
  for (int k = 0; k < num_choices; ++k) {
    bool reached = (weight[k] > 0.0f) & (before <= threshold);
    chosen = reached ? k : chosen;
    chosen_weight = reached ? weight[k] : chosen_weight;
    before += weight[k];
  }
  c.action[i] = Action(chosen);
  c.propensity[i] = none ? 1.0f : chosen_weight / total;
  return none;
}

}  // namespace reagent_lite::environment
