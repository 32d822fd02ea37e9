// One environment among many: its state in columns, one step of it, what it shows and what it offers.
#pragma once

namespace reagent_lite::environment {

#define LOAD_FIELD(type, name) s.name = ((const type *)state)[row++ * stride + i];
#define LOAD_ARRAY(type, name, size) \
  for (int j = 0; j < (size); ++j) s.name[j] = ((const type *)state)[row++ * stride + i];
#define STORE_FIELD(type, name) ((type *)state)[row++ * stride + i] = s.name;
#define STORE_ARRAY(type, name, size) \
  for (int j = 0; j < (size); ++j) ((type *)state)[row++ * stride + i] = s.name[j];
#define FIELD_WORDS(type, name) +1
#define ARRAY_WORDS(type, name, size) +(size)

constexpr int state_words = STATE(FIELD_WORDS, ARRAY_WORDS);

DEVICE State load(const unsigned *state, long stride, long i) {
  State s;
  long row = 0;
  STATE(LOAD_FIELD, LOAD_ARRAY)
  return s;
}

DEVICE void store(unsigned *state, long stride, long i, const State &s) {
  long row = 0;
  STATE(STORE_FIELD, STORE_ARRAY)
}

DEVICE Random random_of(const Call &c, long i, unsigned episode, int step_count, Purpose purpose) {
  unsigned base = purpose == FOR_STEP ? unsigned(step_count) << 8 : 0u;
  return random_for(c.seed, c.stream, c.first_env + unsigned(i), episode, unsigned(step_count), purpose, base);
}

// What slot k offers at the step of `random`: the same whenever it is asked for at that step.
DEVICE bool candidate_of(const State &s, int k, const Random &random, float *features) {
  if constexpr (has_candidates) {
    unsigned base = (random.step * unsigned(num_choices) + unsigned(k)) << 4;
    Random own = random_for(random.seed, random.stream, random.env, random.episode, random.step, FOR_CANDIDATES, base);
    return candidate(s, k, own, features);
  }
  return false;
}

DEVICE bool is_open(const State &s, int k, const Random &random) {
  if constexpr (has_candidates) {
    float features[feature_width];
    return candidate_of(s, k, random, features);
  } else if constexpr (is_masked) {
    return allowed(s, k);
  } else {
    return true;
  }
}

// The action to take in place of `wanted`: itself, else the first that is open, else 0.
DEVICE int valid_action(const State &s, int wanted, const Random &random, bool &fault) {
  bool known = unsigned(wanted) < unsigned(num_choices);
  int action = known ? wanted : 0;
  fault = !known;
  if constexpr (is_masked || has_candidates) {
    fault = !known || !is_open(s, action, random);
    if (fault) {
      action = 0;
      while (action < num_choices && !is_open(s, action, random)) ++action;
      action = action < num_choices ? action : 0;
    }
  }
  return action;
}

enum Flag : unsigned { TERMINATED = 1u, TRUNCATED = 2u, FAULT = 4u };

// Takes the action of environment i, which has `done` steps behind it in this episode; returns flags. Resets nothing.
DEVICE unsigned advance(const Call &c, long i, unsigned episode, int done, State &s, float &reward) {
  Random random = random_of(c, i, episode, done, FOR_STEP);
  bool fault = false, terminated = false;
  int action = valid_action(s, int(c.action[i]), random, fault);
  reward = step(s, action, random, terminated);
  unsigned truncated = unsigned(done + 1 >= c.time_limit) & unsigned(!terminated);
  return unsigned(terminated) * TERMINATED | truncated * TRUNCATED | unsigned(fault) * FAULT;
}

DEVICE void write_observation(float *observation, long i, const State &s) {
  float row[observation_width];
  observe(s, row);
  for (int k = 0; k < observation_width; ++k) observation[i * observation_width + k] = row[k];
}

// Whether slot k is open, and its features, zeros where it is closed.
DEVICE bool choice(const State &s, int k, const Random &random, float *features) {
  for (int f = 0; f < feature_width; ++f) features[f] = 0.0f;
  bool open = has_candidates ? candidate_of(s, k, random, features) : is_open(s, k, random);
  for (int f = 0; f < feature_width; ++f) features[f] = open ? features[f] : 0.0f;
  return open;
}

// The choices of environment i; features are written only with candidates.
DEVICE void write_choices(unsigned char *mask, float *features, const Call &c, long i, unsigned episode, int done,
                          const State &s) {
  Random random = random_of(c, i, episode, done, FOR_STEP);
  for (int k = 0; k < num_choices; ++k) {
    float row[feature_width];
    bool open = choice(s, k, random, row);
    if (mask) mask[i * num_choices + k] = open;
    for (int f = 0; has_candidates && features && f < feature_width; ++f) {
      features[(i * num_choices + k) * feature_width + f] = row[f];
    }
  }
}

}  // namespace reagent_lite::environment
