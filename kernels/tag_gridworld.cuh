// Tag on a grid: taggers hunt one runner; all move at once.
//
// Source   rules and parameter names of tag_gridworld in Lan et al., "WarpDrive: Extremely Fast End-to-End Deep
//          Multi-Agent Reinforcement Learning on a GPU" (2021); truth in tests/oracles/tag.py
// Agents   num_taggers taggers, then the runner; nobody leaves before the end
// State    x, y of every agent, integers from 0 to grid_length, both included; steps done
// Observed full (4 N + 1 for N agents): all x / grid_length, all y / grid_length, all types (runner 1), one-hot of self,
//          steps / episode_length; else 6: own x and y, x and y of the other, all / grid_length, own type, steps /
//          episode_length. The other is the runner; for the runner it is the nearest tagger, ties in order
// Actions  stay, x + 1, x - 1, y + 1, y - 1; a move off the grid stops at its edge, which is a hit
// Reward   tagged: tag_reward_for_tagger to each tagger, -tag_penalty_for_runner to the runner; else
//          -step_cost_for_tagger and +step_cost_for_tagger; then -wall_hit_penalty for a hit
// Start    taggers at floor(grid_length / 2) on both axes, the runner at 0; or where the lists
//          starting_location_x and starting_location_y say, an entry for each agent
// Ends     when a tagger stands where the runner does
// Limit    episode_length steps
#include "port.cuh"

#define AGENTS (int(num_taggers) + 1)
#define AGENT_TYPES {"tagger", "runner"}
#define NUM_ACTIONS 5
#define ACTION_NAMES {"stay", "right", "left", "up", "down"}
#define OBSERVATION_SIZE (use_full_observation != 0.0f ? 4 * AGENTS + 1 : 6)
#define TIME_LIMIT int(episode_length)
#define PARAMETERS(P)             \
  P(num_taggers, 10.0f)           \
  P(grid_length, 10.0f)           \
  P(episode_length, 100.0f)       \
  P(wall_hit_penalty, 0.1f)       \
  P(tag_reward_for_tagger, 10.0f) \
  P(tag_penalty_for_runner, 2.0f) \
  P(step_cost_for_tagger, 0.01f)  \
  P(use_full_observation, 1.0f)
#define PARAMETER_LISTS(L) L(starting_location_x, AGENTS, -1.0f) L(starting_location_y, AGENTS, -1.0f)
#define STATE(FIELD, ARRAY) ARRAY(int, x, AGENTS) ARRAY(int, y, AGENTS) FIELD(int, steps)
DECLARE_ENVIRONMENT

static_assert(num_taggers >= 0 && num_taggers == int(num_taggers), "num_taggers is a number of agents");
static_assert(grid_length >= 1 && grid_length == int(grid_length), "grid_length is a number of cells");
static_assert(episode_length >= 1 && episode_length == int(episode_length), "episode_length is a number of steps");

constexpr int runner = AGENTS - 1;

DEVICE int agent_type(int agent) { return agent == runner; }

DEVICE void reset(State &s, Random &random) {
  for (int a = 0; a < AGENTS; ++a) {
    int otherwise = a == runner ? 0 : int(grid_length) / 2;
    s.x[a] = starting_location_x.value[a] >= 0.0f ? whole_of(starting_location_x.value[a]) : otherwise;
    s.y[a] = starting_location_y.value[a] >= 0.0f ? whole_of(starting_location_y.value[a]) : otherwise;
  }
  s.steps = 0;
}

DEVICE int nearest_tagger(const State &s) {
  int nearest = 0, least = 0;
  for (int a = 0; a < runner; ++a) {
    int across = s.x[a] - s.x[runner], along = s.y[a] - s.y[runner];
    int distance = across * across + along * along;
    bool nearer = a == 0 || distance < least;
    least = nearer ? distance : least;
    nearest = nearer ? a : nearest;
  }
  return nearest;
}

DEVICE void observe(const State &s, int agent, float *observation) {
  float time = float(s.steps) / episode_length;
  if constexpr (use_full_observation != 0.0f) {
    for (int a = 0; a < AGENTS; ++a) observation[a] = float(s.x[a]) / grid_length;
    for (int a = 0; a < AGENTS; ++a) observation[AGENTS + a] = float(s.y[a]) / grid_length;
    for (int k = 2 * AGENTS; k < 4 * AGENTS; ++k) observation[k] = 0.0f;
    observation[2 * AGENTS + runner] = 1.0f;
    observation[3 * AGENTS + agent] = 1.0f;
    observation[4 * AGENTS] = time;
  } else {
    int other = agent == runner ? nearest_tagger(s) : runner;
    observation[0] = float(s.x[agent]) / grid_length;
    observation[1] = float(s.y[agent]) / grid_length;
    observation[2] = float(s.x[other]) / grid_length;
    observation[3] = float(s.y[other]) / grid_length;
    observation[4] = agent == runner ? 1.0f : 0.0f;
    observation[5] = time;
  }
}

DEVICE void step(State &s, const int *action, float *reward, Random &random, bool &terminated) {
  ONCE s.steps += 1;
  FOR_AGENTS(a) {
    int x = s.x[a] + (action[a] == 1) - (action[a] == 2);
    int y = s.y[a] + (action[a] == 3) - (action[a] == 4);
    s.x[a] = clamp(x, 0, int(grid_length));
    s.y[a] = clamp(y, 0, int(grid_length));
    reward[a] = (s.x[a] != x) | (s.y[a] != y) ? wall_hit_penalty : 0.0f;
  }
  bool tagged = false;
  for (int a = 0; a < runner; ++a) tagged |= (s.x[a] == s.x[runner]) & (s.y[a] == s.y[runner]);
  FOR_AGENTS(a) {
    float of_tagger = tagged ? tag_reward_for_tagger : -step_cost_for_tagger;
    float of_runner = tagged ? -tag_penalty_for_runner : step_cost_for_tagger;
    reward[a] = (a == runner ? of_runner : of_tagger) - reward[a];
  }
  terminated = tagged;
}
