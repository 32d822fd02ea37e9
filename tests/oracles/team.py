"""A small environment of several agents whose every number can be worked out by hand."""

# Each agent adds 1 + action to its count, and leaves once it is at `goal`; the episode ends when all have left.
# Reward of those still in: own count + 10 * the leader's, both after the step.
TEAM = """
#include "port.cuh"
#define AGENTS int(size)
#define AGENT_TYPES {"leader", "follower"}
#define NUM_ACTIONS 3
#define OBSERVATION_SIZE 3
#define TIME_LIMIT 100
#define PARAMETERS(P) P(size, 2.0f) P(goal, 4.0f)
#define STATE(FIELD, ARRAY) ARRAY(int, count, AGENTS) ARRAY(float, luck, AGENTS) FIELD(int, left) FIELD(unsigned, lot)
DECLARE_ENVIRONMENT
DEVICE int agent_type(int agent) { return agent == 0 ? 0 : 1; }
DEVICE bool in_game(const State &s, int agent) { return s.count[agent] < int(goal); }
DEVICE void reset(State &s, Random &random) {
  for (int a = 0; a < AGENTS; ++a) {
    s.count[a] = 0;
    s.luck[a] = uniform(random);
  }
  s.left = 0;
  s.lot = draw(random);
}
DEVICE void observe(const State &s, int agent, float *observation) {
  observation[0] = float(s.count[agent]);
  observation[1] = float(s.left);
  observation[2] = s.luck[agent];
}
DEVICE void step(State &s, const int *action, float *reward, Random &random, bool &terminated) {
  unsigned lot = draw(random);
  FOR_AGENTS(a) {
    Random own = random_of_agent(random, a);
    s.luck[a] = uniform(own);
    reward[a] = in_game(s, a) ? 1.0f : 0.0f;
    s.count[a] += in_game(s, a) ? 1 + action[a] : 0;
  }
  ONCE {
    s.lot = lot;
    s.left = 0;
    for (int a = 0; a < AGENTS; ++a) s.left += !in_game(s, a);
  }
  FOR_AGENTS(a) reward[a] *= float(s.count[a] + 10 * s.count[0]);
  terminated = s.left == AGENTS;
}
"""
