// One environment among many: loads and stores its state, takes a step, writes its observations and choices.
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

DEVICE void begin_episode(const Call &c, long i, unsigned episode, State &s) {
  Random random = random_of(c, i, episode, 0, FOR_RESET);
  s = State{};  // what reset() does not write is 0
  reset(s, random);
}

// Candidate k at the step of `random`; all calls at the same step give the same candidate.
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

// Working memory of one environment; on a GPU, registers of its thread or shared memory of its block.
struct Scratch {
  State state;
  int action[agents];
  float reward[agents];
};

// Takes the actions of environment i after `done` steps of its episode; returns flags. Does not start a next episode.
DEVICE unsigned advance(const Call &c, long i, unsigned episode, int done, State &s, int *action, float *reward) {
  Random random = random_of(c, i, episode, done, FOR_STEP);
  bool fault = false, terminated = false;
  FOR_AGENTS(agent) {
    bool wrong;
    reward[agent] = 0.0f;
    action[agent] = valid_action(s, int(c.action[i * agents + agent]), random, wrong);
    if (has_agents && wrong) count_fault(c.fault, c.first_env + unsigned(i));
    fault |= wrong & !has_agents;
  }
  step_agents(s, action, reward, random, terminated);
  unsigned truncated = unsigned(done + 1 >= c.time_limit) & unsigned(!terminated);
  return unsigned(terminated) * TERMINATED | truncated * TRUNCATED | unsigned(fault) * FAULT;
}

// Returns whether slot k has an allowed choice, and writes its features; zeros if it has none.
DEVICE bool choice(const State &s, int k, const Random &random, float *features) {
  for (int f = 0; f < feature_width; ++f) features[f] = 0.0f;
  bool open = has_candidates ? candidate_of(s, k, random, features) : is_open(s, k, random);
  for (int f = 0; f < feature_width; ++f) features[f] = open ? features[f] : 0.0f;
  return open;
}

// Computes the choices of environment i and writes them to one or two buffers; features only with candidates.
DEVICE void write_choices(unsigned char *mask, float *features, unsigned char *second_mask, float *second_features,
                          const Call &c, long i, unsigned episode, int done, const State &s) {
  if (!mask && !features && !second_mask && !second_features) return;
  Random random = random_of(c, i, episode, done, FOR_STEP);
  for (int k = 0; k < num_choices; ++k) {
    float row[feature_width];
    bool open = choice(s, k, random, row);
    long slot = i * num_choices + k;
    if (mask) mask[slot] = open;
    if (second_mask) second_mask[slot] = open;
    if (has_candidates && features) store_row<feature_width>(features + slot * feature_width, row);
    if (has_candidates && second_features) store_row<feature_width>(second_features + slot * feature_width, row);
  }
}

// -- Whole environments: the entry points of a GPU, and of a CPU where environments have several agents ---------------

typedef unsigned __attribute__((may_alias)) Word;

// If a block of threads reads an environment, the words of its state are adjacent; otherwise those of each variable.
DEVICE void load_whole(const Call &c, long i, State &s) {
  if constexpr (by_block) {
    for (int word = first_agent<agents>(); word < state_words; word += agent_stride<agents>) {
      ((Word *)&s)[word] = c.state[i * state_words + word];
    }
    ONCE {}
  } else {
    s = load(c.state, c.num, i);
  }
}

DEVICE void store_whole(const Call &c, long i, const State &s) {
  if constexpr (by_block) {
    for (int word = first_agent<agents>(); word < state_words; word += agent_stride<agents>) {
      c.state[i * state_words + word] = ((const Word *)&s)[word];
    }
  } else {
    store(c.state, c.num, i, s);
  }
}

// Computes the observations of environment i and writes them to one or two buffers; a null buffer is left out.
DEVICE void write_seen(float *first, float *second, unsigned char *in_first, unsigned char *in_second, long i,
                       const State &s) {
  FOR_AGENTS(agent) {
    long row = i * agents + agent;
    if (in_first) in_first[row] = in_game(s, agent);
    if (in_second) in_second[row] = in_game(s, agent);
    if (!first && !second) continue;
    if constexpr (has_agents) {
      float *one = (first ? first : second) + row * observation_width;
      observe_agent(s, agent, one);
      for (int k = 0; first && second && k < observation_width; ++k) second[row * observation_width + k] = one[k];
    } else {
      float own[observation_width];
      observe_agent(s, agent, own);
      if (first) store_row<observation_width>(first + row * observation_width, own);
      if (second) store_row<observation_width>(second + row * observation_width, own);
    }
  }
}

DEVICE void observe_whole(const Call &c, long i, Scratch &scratch) {
  State &s = scratch.state;
  load_whole(c, i, s);
  write_seen(c.observation, nullptr, c.in_game, nullptr, i, s);
  write_choices(c.mask, c.features, nullptr, nullptr, c, i, c.episode[i], c.step_count[i], s);
}

DEVICE void reset_whole(const Call &c, long i, Scratch &scratch) {
  State &s = scratch.state;
  ONCE {
    begin_episode(c, i, c.episode[i], s);
    c.step_count[i] = 0;
  }
  FOR_AGENTS(agent) c.episode_return[i * agents + agent] = 0.0f;
  store_whole(c, i, s);
  write_seen(c.observation, nullptr, c.in_game, nullptr, i, s);
  write_choices(c.mask, c.features, nullptr, nullptr, c, i, c.episode[i], 0, s);
}

DEVICE void step_whole(const Call &c, long i, Scratch &scratch) {
  State &s = scratch.state;
  load_whole(c, i, s);
  unsigned episode = c.episode[i];
  int done = c.step_count[i];
  unsigned flags = advance(c, i, episode, done, s, scratch.action, scratch.reward);
  unsigned ended = flags & (TERMINATED | TRUNCATED);
  done += 1;
  FOR_AGENTS(agent) {
    long row = i * agents + agent;
    float episode_return = c.episode_return[row] + scratch.reward[agent];
    c.reward[row] = scratch.reward[agent];
    if (ended && c.last_return) c.last_return[row] = episode_return;
    c.episode_return[row] = ended ? 0.0f : episode_return;
  }
  write_seen(c.next_observation, ended ? nullptr : c.observation, c.next_in_game, ended ? nullptr : c.in_game, i, s);
  write_choices(c.next_mask, c.next_features, ended ? nullptr : c.mask, ended ? nullptr : c.features, c, i, episode,
                done, s);
  ONCE {
    if (flags & FAULT) count_fault(c.fault, c.first_env + unsigned(i));
    if (c.ended) c.ended[i] = (unsigned char)ended;
    if (ended) {
      if (c.last_length) c.last_length[i] = done;
      c.episode[i] = episode + 1u;
      if (!c.stay) begin_episode(c, i, episode + 1u, s);
    }
    c.step_count[i] = ended ? 0 : done;
  }
  store_whole(c, i, s);
  if (ended) {
    write_seen(c.observation, nullptr, c.in_game, nullptr, i, s);
    write_choices(c.mask, c.features, nullptr, nullptr, c, i, episode + 1u, 0, s);
  }
}

}  // namespace reagent_lite::environment
