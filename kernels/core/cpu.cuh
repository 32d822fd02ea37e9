// Entry points of a CPU: slices [begin, end) of the environments, in blocks that stay in the first cache.
//
//   block ─► step all, in vectors ─► next_observation ─► list the ended ─► restart these, in vectors ─► observation
//
// Calls are passed by value: g++ has to see that no store can change them, otherwise it reloads every pointer and does
// not vectorize.
#pragma once

namespace reagent_lite::environment {

#define ENTRY extern "C" __attribute__((visibility("default")))

ENTRY const Description env_description;
const Description env_description = describe();

ENTRY void env_describe(float *parameters, float *features, int *agent_types, int *observed) {
  write_numbers<(1 << 16)>(parameters, features, agent_types, observed);
}

constexpr int block_size = 1024;
constexpr int lanes = 16;  // floats of the widest vector

// Loop bodies are functions of their own: g++ keeps a structure declared inside an `omp simd` loop in memory, one copy
// for each lane, and then does not vectorize.
DEVICE unsigned step_one(const Call &c, long i) {
  State s = load(c.state, c.num, i);
  int done = c.step_count[i];
  int action;
  float reward;
  unsigned flags = advance(c, i, c.episode[i], done, s, &action, &reward);
  store(c.state, c.num, i, s);
  c.step_count[i] = done + 1;
  c.episode_return[i] += reward;
  c.reward[i] = reward;
  return flags;
}

DEVICE void observe_one(const Call &c, float *observation, long i) {
  float row[observation_width];
  observe_agent(load(c.state, c.num, i), 0, row);
  store_row<observation_width>(observation + i * observation_width, row);
}

DEVICE void start_one(const Call &c, int i, unsigned episode, unsigned *fresh, int j) {
  State s;
  begin_episode(c, i, episode, s);
  store(fresh, block_size, j, s);
}

template <int width, int columns>
DEVICE bool choose_one(const Call &c, long i, int k, float *feature) {
  Random random = random_of(c, i, c.episode[i], c.step_count[i], FOR_STEP);
  float row[feature_width];
  bool open = choice(load(c.state, c.num, i), k, random, row);
  for (int f = 0; f < width; ++f) feature[f * columns] = row[f];
  return open;
}

static void step_all(Call c, long begin, int count, unsigned char *flags) {
  VECTORIZE
  for (int j = 0; j < count; ++j) flags[j] = (unsigned char)step_one(c, begin + j);
}

static void observe_all(Call c, float *observation, long begin, int count) {
  VECTORIZE
  for (int j = 0; j < count; ++j) observe_one(c, observation, begin + j);
}

// Choices of a block, slot by slot in columns, which are then turned into rows.
template <bool with_features>
static void choose_all(Call c, unsigned char *mask, float *features, long begin, int count) {
  constexpr int width = with_features ? feature_width : 0;
  constexpr int columns = 128;
  unsigned char open[columns];
  float feature[(width + 1) * columns];
  for (int k = 0; k < num_choices; ++k) {
    for (int first = 0; first < count; first += columns) {
      int size = minimum(columns, count - first);
      VECTORIZE
      for (int j = 0; j < size; ++j) open[j] = choose_one<width, columns>(c, begin + first + j, k, feature + j);
      for (int j = 0; j < size; ++j) {
        long slot = (begin + first + j) * num_choices + k;
        if (mask) mask[slot] = open[j];
        for (int f = 0; f < width; ++f) features[slot * width + f] = feature[f * columns + j];
      }
    }
  }
}

static void show_choices(Call c, unsigned char *mask, float *features, long begin, int count) {
  if constexpr (is_masked || has_candidates) {
    if (features) {
      choose_all<has_candidates>(c, mask, features, begin, count);
    } else if (mask) {
      choose_all<false>(c, mask, nullptr, begin, count);
    }
  }
}

// Lists the environments of a block that ended, and counts the faults; flags are 0 up to a multiple of 64.
//   word                  flags of eight environments, a byte each
//   (word | word >> 1)    bit 8 n: environment n is terminated (bit 0 of its flags) or truncated (bit 1)
//   * 0x0102…80 >> 56     moves bit 8 n to bit n, without carries, as 8 n + (56 - 7 n) = 56 + n
static int list_ended(Call c, const unsigned char *flags, long begin, int count, int *list) {
  constexpr unsigned long long bytes = 0x0101010101010101ull;
  unsigned long long faults = 0;
  int num_ended = 0;
  for (int j = 0; j < count; j += 64) {
    unsigned long long ended = 0;  // bit n: environment j + n
    for (int eighth = 0; eighth < 8; ++eighth) {
      unsigned long long word;
      __builtin_memcpy(&word, flags + j + 8 * eighth, 8);
      faults |= word & FAULT * bytes;
      ended |= ((word | word >> 1) & bytes) * 0x0102040810204080ull >> 56 << 8 * eighth;
    }
    for (; ended; ended &= ended - 1) list[num_ended++] = int(begin) + j + __builtin_ctzll(ended);
  }
  for (int j = 0; faults && j < count; ++j) {
    if (flags[j] & FAULT) count_fault(c.fault, c.first_env + unsigned(begin + j));
  }
  return num_ended;
}

static void finish(Call c, const int *list, int count) {
  for (int j = 0; j < count; ++j) {
    int i = list[j];
    if (c.last_return) c.last_return[i] = c.episode_return[i];
    if (c.last_length) c.last_length[i] = c.step_count[i];
    c.episode[i] += 1u;
  }
}

// Starts the current episodes of the listed environments, in vectors; with `stay`, their states are not overwritten.
static void start(Call c, const int *list, int count, bool stay = false) {
  unsigned fresh[state_words * block_size];
  unsigned episode[block_size];
  int env[block_size];
  int whole = (count + lanes - 1) / lanes * lanes;  // spare lanes are cheaper than a scalar remainder
  for (int j = 0; j < whole; ++j) {
    env[j] = list[minimum(j, count - 1)];
    episode[j] = c.episode[env[j]];
  }
  VECTORIZE
  for (int j = 0; j < whole; ++j) start_one(c, env[j], episode[j], fresh, j);
  for (int j = 0; j < count; ++j) {
    for (int row = 0; !stay && row < state_words; ++row) {
      c.state[long(row) * c.num + list[j]] = fresh[row * block_size + j];
    }
    c.step_count[list[j]] = 0;
    c.episode_return[list[j]] = 0.0f;
  }
}

template <class T>
static void copy_rows(T *to, const T *from, long begin, int count, int width) {
  VECTORIZE
  for (long n = begin * width; n < (begin + count) * width; ++n) to[n] = from[n];
}

// Writes observation, mask and features: copies of those at the end of the transition, except in environments that have
// just started an episode.
static void show_next(Call c, const int *started, int num_started, long begin, int count) {
  if (c.observation && c.next_observation) {
    copy_rows(c.observation, c.next_observation, begin, count, observation_width);
    for (int j = 0; j < num_started; ++j) observe_one(c, c.observation, started[j]);
  } else if (c.observation) {
    observe_all(c, c.observation, begin, count);
  }
  bool led = (!c.mask || c.next_mask) && (!c.features || c.next_features);
  if ((is_masked || has_candidates) && led && (c.mask || c.features)) {
    if (c.mask) copy_rows(c.mask, c.next_mask, begin, count, num_choices);
    if (c.features) copy_rows(c.features, c.next_features, begin, count, num_choices * feature_width);
    for (int j = 0; j < num_started; ++j) {
      int i = started[j];
      write_choices(c.mask, c.features, nullptr, nullptr, c, i, c.episode[i], 0, load(c.state, c.num, i));
    }
  } else {
    show_choices(c, c.mask, c.features, begin, count);
  }
}

static void step_block(Call c, long begin, int count) {
  unsigned char flags[block_size + 64] = {};
  int list[block_size];
  step_all(c, begin, count, flags);
  if (c.ended) {
    for (int j = 0; j < count; ++j) c.ended[begin + j] = flags[j] & (TERMINATED | TRUNCATED);
  }
  if (c.next_observation) observe_all(c, c.next_observation, begin, count);
  show_choices(c, c.next_mask, c.next_features, begin, count);
  int num_ended = list_ended(c, flags, begin, count, list);
  finish(c, list, num_ended);
  start(c, list, num_ended, c.stay);
  show_next(c, list, num_ended, begin, count);
}

// Environments of several agents one by one: vectors run over their agents.
template <auto entry>
static void run(Call c, long begin, long end) {
  for (long i = begin; i < end; ++i) {
    Scratch scratch;
    entry(c, i, scratch);
  }
}

ENTRY void env_step(const Call *call, int begin, int end) {
  if constexpr (has_agents) return run<step_whole>(*call, begin, end);
  for (int i = begin; i < end; i += block_size) step_block(*call, i, minimum(block_size, end - i));
}

ENTRY void env_observe(const Call *call, int begin, int end) {
  if constexpr (has_agents) return run<observe_whole>(*call, begin, end);
  if (call->observation) observe_all(*call, call->observation, begin, end - begin);
  show_choices(*call, call->mask, call->features, begin, end - begin);
}

ENTRY void env_reset(const Call *call, int begin, int end) {
  if constexpr (has_agents) return run<reset_whole>(*call, begin, end);
  for (int i = begin; i < end; i += block_size) {
    int list[block_size];
    int count = minimum(block_size, end - i);
    for (int j = 0; j < count; ++j) list[j] = i + j;
    start(*call, list, count);
  }
  env_observe(call, begin, end);
}

constexpr int draw_size = num_choices <= 32 ? 128 : 16;  // rows of choices that are turned into columns at once

template <Rule rule>
static void draw_block(ActCall c, long begin, int count, float epsilon, float sharpness) {
  float value[num_choices * draw_size];
  float open[num_choices * draw_size];
  bool none[draw_size];
  const unsigned char *mask = c.mask ? c.mask + begin * num_choices : nullptr;
  const float *q = c.q + begin * num_choices;
  for (int k = 0; k < num_choices; ++k) {
    for (int j = 0; j < count; ++j) open[k * draw_size + j] = mask ? float(mask[j * num_choices + k] != 0) : 1.0f;
    for (int j = 0; rule != ANY && j < count; ++j) {
      value[k * draw_size + j] = value_of(q[j * num_choices + k], open[k * draw_size + j]);
    }
  }
  VECTORIZE
  for (int j = 0; j < count; ++j) {
    none[j] = draw_action<rule>(c, begin + j, value + j, open + j, draw_size, epsilon, sharpness);
  }
  for (int j = 0; mask && j < count; ++j) {
    if (none[j]) count_fault(c.fault, c.first_env + unsigned((begin + j) / agents));
  }
}

ENTRY void env_act(const ActCall *call, int begin, int end) {
  const ActCall &c = *call;
  for (long i = long(begin) * agents; i < long(end) * agents; i += draw_size) {
    int count = int(long(end) * agents - i < draw_size ? long(end) * agents - i : draw_size);
    if (!c.q) {
      draw_block<ANY>(c, i, count, 1.0f, 0.0f);
    } else if (c.temperature > 0.0f) {
      draw_block<SOFTMAX>(c, i, count, 0.0f, 1.0f / c.temperature);
    } else {
      draw_block<GREEDY>(c, i, count, c.epsilon[0], 0.0f);
    }
  }
}

}  // namespace reagent_lite::environment
