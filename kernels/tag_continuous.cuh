// Tag on a square: taggers hunt runners; all accelerate and turn at once.
//
// Source   rules and parameter names of tag_continuous in Lan et al., "WarpDrive: Extremely Fast End-to-End Deep
//          Multi-Agent Reinforcement Learning on a GPU" (2021); truth in tests/oracles/tag.py
// Agents   num_taggers taggers, then num_runners runners, who leave when tagged if runner_exits_game_after_tagged
// State    per agent: x, y in 0 ... grid_length, speed (length per step), direction (rad, from 0 to 2 pi), acceleration;
//          whether it plays, and whether it played before the last step's tags, which observations show; steps done
// Observed other agents, feature by feature: x and y / (sqrt(2) grid_length), speed and acceleration / (max_speed +
//          1e-10), direction / 2 pi, each minus the agent's own; type (tagger 1); 1 in the game, 0 out of it. Last,
//          steps / episode_length. With use_full_observation, all other agents in order (7 (N - 1) + 1 numbers for N
//          agents); an agent out of the game sees 0 except for types and who plays. Without it, the
//          num_other_agents_observed nearest agents in the game, ties in order (7 K + 1 numbers; 0 if there are fewer,
//          and all 0 for an agent out of the game)
// Actions  (num_turn_levels + 1) * i + j: the i-th acceleration and the j-th turn; each list is 0, then levels evenly
//          spaced from the least to the greatest
// Motion   direction += turn; acceleration += the chosen one; speed += acceleration, clamped to 0 ... max_speed * skill;
//          at either limit acceleration becomes 0; then a move by speed along direction, which stops at an edge
// Reward   for agents in the game: edge_hit_penalty at an edge; step_penalty_for_tagger or step_reward_for_runner; if
//          a runner's nearest tagger (ties in order) is closer than tagging_distance * grid_length,
//          tag_penalty_for_runner to the runner and tag_reward_for_tagger to that tagger; after episode_length steps
//          end_of_game_reward_for_runner to each runner still in the game
// Start    at rest, uniform in the square, heading along an axis, each of the four directions equally likely
// Ends     when no runner is left
// Limit    episode_length steps
#include "port.cuh"

#define AGENTS (int(num_taggers) + int(num_runners))
#define AGENT_TYPES {"tagger", "runner"}
#define NUM_ACTIONS ((int(num_acceleration_levels) + 1) * (int(num_turn_levels) + 1))
#define NUM_OBSERVED (use_full_observation != 0.0f ? AGENTS - 1 : int(num_other_agents_observed))
#define OBSERVATION_SIZE (7 * NUM_OBSERVED + 1)
#define TIME_LIMIT int(episode_length)
#define PARAMETERS(P)                        \
  P(num_taggers, 1.0f)                       \
  P(num_runners, 10.0f)                      \
  P(grid_length, 10.0f)                      \
  P(episode_length, 100.0f)                  \
  P(max_speed, 1.0f)                         \
  P(skill_level_runner, 1.0f)                \
  P(skill_level_tagger, 1.0f)                \
  P(max_acceleration, 1.0f)                  \
  P(min_acceleration, -1.0f)                 \
  P(max_turn, 1.57079633f)                   \
  P(min_turn, -1.57079633f)                  \
  P(num_acceleration_levels, 10.0f)          \
  P(num_turn_levels, 10.0f)                  \
  P(edge_hit_penalty, 0.0f)                  \
  P(use_full_observation, 1.0f)              \
  P(num_other_agents_observed, 2.0f)         \
  P(tagging_distance, 0.01f)                 \
  P(tag_reward_for_tagger, 1.0f)             \
  P(step_penalty_for_tagger, 0.0f)           \
  P(tag_penalty_for_runner, -1.0f)           \
  P(step_reward_for_runner, 0.0f)            \
  P(end_of_game_reward_for_runner, 1.0f)     \
  P(runner_exits_game_after_tagged, 1.0f)
#define STATE(FIELD, ARRAY)           \
  ARRAY(float, x, AGENTS)             \
  ARRAY(float, y, AGENTS)             \
  ARRAY(float, speed, AGENTS)         \
  ARRAY(float, direction, AGENTS)     \
  ARRAY(float, acceleration, AGENTS)  \
  ARRAY(int, playing, AGENTS)         \
  ARRAY(int, shown, AGENTS)           \
  ARRAY(int, tagger, AGENTS)          \
  FIELD(int, steps)
DECLARE_ENVIRONMENT

static_assert(num_taggers >= 0 && num_taggers == int(num_taggers), "num_taggers is a number of agents");
static_assert(num_runners >= 1 && num_runners == int(num_runners), "num_runners is a number of agents, at least 1");
static_assert(episode_length >= 1 && episode_length == int(episode_length), "episode_length is a number of steps");
static_assert(num_acceleration_levels >= 1 && num_turn_levels >= 1, "there is at least one level of each");
static_assert(num_other_agents_observed >= 0, "num_other_agents_observed is a number of agents");
static_assert(edge_hit_penalty <= 0, "edge_hit_penalty is added to the reward: at most 0");

constexpr int num_hunters = int(num_taggers);
constexpr float circle = 6.2831855f;
constexpr unsigned long long none = ~0ull;

DEVICE int agent_type(int agent) { return agent >= num_hunters; }
DEVICE bool in_game(const State &s, int agent) { return s.playing[agent] != 0; }

// 0, then levels from the least to the greatest, in double precision and while compiling: speeds of a few steps add up to
// exactly 0 or the limit or just miss them.
template <int count>
struct Levels {
  float value[count + 1] = {};

  constexpr Levels(double least, double greatest) {
    for (int k = 0; k < count; ++k) value[k + 1] = float(least + k * ((greatest - least) / (count > 1 ? count - 1 : 1)));
    if (count > 1) value[count] = float(greatest);
  }
};

TABLE Levels<int(num_acceleration_levels)> pushes(min_acceleration, max_acceleration);
TABLE Levels<int(num_turn_levels)> turns(min_turn, max_turn);

DEVICE float squared_distance(const State &s, int a, int b) {
  float across = s.x[a] - s.x[b], along = s.y[a] - s.y[b];
  return across * across + along * along;
}

DEVICE void reset(State &s, Random &random) {
  for (int a = 0; a < AGENTS; ++a) {
    s.x[a] = uniform(random, 0.0f, grid_length);
    s.y[a] = uniform(random, 0.0f, grid_length);
    s.direction[a] = float(below(random, 4)) * 1.57079633f;
    s.speed[a] = s.acceleration[a] = 0.0f;
    s.playing[a] = s.shown[a] = 1;
    s.tagger[a] = -1;
  }
  s.steps = 0;
}

// Writes what `agent` observes of `other` to slot `slot` of `observed`; place and motion are 0 if `visible` is 0.
DEVICE void write_other(const State &s, int agent, int other, int slot, int observed, float visible, float *observation) {
  constexpr float diagonal = 1.41421356f * grid_length, pace = max_speed + 1e-10f;
  observation[slot] = visible * (s.x[other] / diagonal - s.x[agent] / diagonal);
  observation[observed + slot] = visible * (s.y[other] / diagonal - s.y[agent] / diagonal);
  observation[2 * observed + slot] = visible * (s.speed[other] / pace - s.speed[agent] / pace);
  observation[3 * observed + slot] = visible * (s.acceleration[other] / pace - s.acceleration[agent] / pace);
  observation[4 * observed + slot] = visible * (s.direction[other] / circle - s.direction[agent] / circle);
  observation[5 * observed + slot] = other < num_hunters ? 1.0f : 0.0f;
  observation[6 * observed + slot] = float(s.shown[other]);
}

DEVICE void observe(const State &s, int agent, float *observation) {
  float sees = float(s.shown[agent]);
  if constexpr (use_full_observation != 0.0f) {
    for (int other = 0; other < agent; ++other) write_other(s, agent, other, other, NUM_OBSERVED, sees, observation);
    for (int other = agent + 1; other < AGENTS; ++other) {
      write_other(s, agent, other, other - 1, NUM_OBSERVED, sees, observation);
    }
  } else {
    for (int k = 0; k < 7 * NUM_OBSERVED; ++k) observation[k] = 0.0f;
    unsigned long long written = 0;  // (distance, number) of the last written agent, as bits that sort like this pair
    for (int slot = 0; slot < NUM_OBSERVED && s.shown[agent]; ++slot) {
      unsigned long long nearest = none;
      for (int other = 0; other < AGENTS; ++other) {
        unsigned long long one = (unsigned long long)bits_of(squared_distance(s, other, agent)) << 32 | unsigned(other + 1);
        bool open = (other != agent) & (s.shown[other] != 0) & (one > written);
        one = open ? one : none;
        nearest = one < nearest ? one : nearest;
      }
      if (nearest == none) break;
      write_other(s, agent, int(unsigned(nearest)) - 1, slot, NUM_OBSERVED, 1.0f, observation);
      written = nearest;
    }
  }
  observation[7 * NUM_OBSERVED] = sees * (float(s.steps) / episode_length);
}

// Returns the tagger that is near enough to tag a runner, or -1.
DEVICE int tagger_of(const State &s, int agent) {
  constexpr float reach = tagging_distance * grid_length;
  float least = infinity;
  int nearest = -1;
  for (int a = 0; a < num_hunters; ++a) {
    float distance = squared_distance(s, a, agent);
    nearest = distance < least ? a : nearest;
    least = distance < least ? distance : least;
  }
  return square_root(least) < reach ? nearest : -1;
}

DEVICE void step(State &s, const int *action, float *reward, Random &random, bool &terminated) {
  constexpr int num_turns = int(num_turn_levels) + 1;
  ONCE s.steps += 1;
  FOR_AGENTS(a) {
    float limit = max_speed * (a < num_hunters ? skill_level_tagger : skill_level_runner);
    float plays = float(s.playing[a]);
    float turned = s.direction[a] + turns.value[action[a] % num_turns];
    turned -= circle * floor_of(turned * 0.15915494f);
    s.direction[a] = clamp(turned, 0.0f, circle) * plays;
    float faster = s.acceleration[a] + pushes.value[action[a] / num_turns];
    s.speed[a] = clamp(s.speed[a] + faster, 0.0f, limit) * plays;
    s.acceleration[a] = (s.speed[a] <= 0.0f) | (s.speed[a] >= limit) ? 0.0f : faster;
    float x = s.x[a] + s.speed[a] * cosine(s.direction[a]);
    float y = s.y[a] + s.speed[a] * sine(s.direction[a]);
    s.x[a] = clamp(x, 0.0f, grid_length);
    s.y[a] = clamp(y, 0.0f, grid_length);
    float edge = (s.x[a] != x) | (s.y[a] != y) ? edge_hit_penalty : 0.0f;
    reward[a] = plays * (edge + (a < num_hunters ? step_penalty_for_tagger : step_reward_for_runner));
    s.shown[a] = s.playing[a];
  }
  FOR_AGENTS(a) s.tagger[a] = (a >= num_hunters) & s.playing[a] ? tagger_of(s, a) : -1;
  FOR_AGENTS(a) {
    bool tagged = s.tagger[a] >= 0;
    for (int other = num_hunters; a < num_hunters && other < AGENTS; ++other) {
      reward[a] += s.tagger[other] == a ? tag_reward_for_tagger : 0.0f;
    }
    reward[a] += tagged ? tag_penalty_for_runner : 0.0f;
    s.playing[a] = s.playing[a] & !(tagged & (runner_exits_game_after_tagged != 0.0f));
    bool ran = (a >= num_hunters) & s.playing[a] & (s.steps == int(episode_length));
    reward[a] += ran ? end_of_game_reward_for_runner : 0.0f;
  }
  bool left = false;
  for (int a = num_hunters; a < AGENTS; ++a) left |= s.playing[a] != 0;
  terminated = !left;
}
