// Recommendation: items are shown one after another to a user who tires of what was shown and likes more of what was
// clicked. A recommender that maximises the next click alone wears its user out; one that plans does not.
//
// Source   this project's; truth in tests/oracles/recommend.py. Interest that follows clicks as in Jiang et al.,
//          "Degenerate Feedback Loops in Recommender Systems" (2019); satiation that decays as in Leqi et al.,
//          "Rebounding Bandits for Modeling Satiation Effects" (2021)
// State    interest p in R^8 (unit length), satiation q in R^8, steps done, misses so far, items on offer now
// Observed p, q, steps / session_length. Misses are not: no user tells when they are about to leave
// Actions  one of up to num_candidates items, new ones at every step; how many are on offer is uniform in
//          min_candidates ... num_candidates. An item's features: topics f in R^8 and a quality, uniform in
//          +-quality_range. Topics and a new user's p are mixtures: weights 1/8 + 7/8 uniform, raised to 1, 2, 4, 8 or
//          16, then brought to unit length, so that p.f is a cosine in [0, 1]. Wide mixtures please now and tire the
//          user of many topics; narrow ones tire of one
// Click    with probability logistic(2 p.f + quality - 1.5 q.f)
// Then     q <- 0.8 q + f;  p <- p + 0.1 click f, brought back to unit length
// Reward   1 for a click, else 0
// Start    p a mixture, q 0
// Ends     after session_length steps: a true end, terminated and not truncated, since the user's time is up and the
//          observation tells how much is left; or before, with probability hazard_per_miss * misses at every step
// Limit    session_length steps, so that nothing is truncated unless a shorter limit is given
#include "port.cuh"

#define NUM_TOPICS 8
#define NUM_ACTIONS int(num_candidates)
#define CANDIDATES
#define ACTION_FEATURE_SIZE (NUM_TOPICS + 1)
#define OBSERVATION_SIZE (2 * NUM_TOPICS + 1)
#define TIME_LIMIT int(session_length)
#define PARAMETERS(P)           \
  P(num_candidates, 10.0f)      \
  P(min_candidates, 5.0f)       \
  P(session_length, 50.0f)      \
  P(interest_weight, 2.0f)      \
  P(satiation_weight, 1.5f)     \
  P(satiation_decay, 0.8f)      \
  P(interest_gain, 0.1f)        \
  P(quality_range, 1.0f)        \
  P(hazard_per_miss, 0.005f)
#define STATE(FIELD, ARRAY)            \
  ARRAY(float, interest, NUM_TOPICS)   \
  ARRAY(float, satiation, NUM_TOPICS)  \
  FIELD(int, steps)                    \
  FIELD(int, misses)                   \
  FIELD(int, offered)
DECLARE_ENVIRONMENT

static_assert(num_candidates == NUM_ACTIONS && min_candidates == int(min_candidates), "candidates are counted");
static_assert(1 <= min_candidates && min_candidates <= num_candidates, "needed: 1 <= min_candidates <= num_candidates");
static_assert(1 <= session_length && session_length == int(session_length), "session_length is a number of steps");

DEVICE void to_unit_length(float *topics) {
  float squares = 0.0f;
  for (int t = 0; t < NUM_TOPICS; ++t) squares += topics[t] * topics[t];
  float scale = 1.0f / square_root(squares);
  for (int t = 0; t < NUM_TOPICS; ++t) topics[t] *= scale;
}

// Weights of at least 1/8, so that none of their powers leaves the range of a normal float.
DEVICE void draw_mixture(Random &random, float *topics) {
  int doublings = below(random, 5);
  for (int t = 0; t < NUM_TOPICS; ++t) {
    float weight = uniform(random, 0.125f, 1.0f);
    for (int power = 0; power < 4; ++power) weight *= power < doublings ? weight : 1.0f;
    topics[t] = weight;
  }
  to_unit_length(topics);
}

DEVICE int draw_offer(Random &random) {
  return int(min_candidates) + below(random, NUM_ACTIONS - int(min_candidates) + 1);
}

DEVICE bool candidate(const State &s, int k, Random &random, float *features) {
  draw_mixture(random, features);
  features[NUM_TOPICS] = uniform(random, -quality_range, quality_range);
  return k < s.offered;
}

DEVICE void reset(State &s, Random &random) {
  draw_mixture(random, s.interest);
  for (int t = 0; t < NUM_TOPICS; ++t) s.satiation[t] = 0.0f;
  s.steps = 0;
  s.misses = 0;
  s.offered = draw_offer(random);
}

DEVICE void observe(const State &s, float *observation) {
  for (int t = 0; t < NUM_TOPICS; ++t) {
    observation[t] = s.interest[t];
    observation[NUM_TOPICS + t] = s.satiation[t];
  }
  observation[2 * NUM_TOPICS] = float(s.steps) / session_length;
}

DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  float item[ACTION_FEATURE_SIZE];
  candidate_of(s, action, random, item);
  float liked = 0.0f, tired = 0.0f;
  for (int t = 0; t < NUM_TOPICS; ++t) {
    liked += s.interest[t] * item[t];
    tired += s.satiation[t] * item[t];
  }
  float chance = logistic(interest_weight * liked + item[NUM_TOPICS] - satiation_weight * tired);
  bool clicked = bernoulli(random, chance);
  for (int t = 0; t < NUM_TOPICS; ++t) {
    s.satiation[t] = satiation_decay * s.satiation[t] + item[t];
    s.interest[t] += clicked ? interest_gain * item[t] : 0.0f;
  }
  to_unit_length(s.interest);
  s.misses += !clicked;
  s.steps += 1;
  bool left = bernoulli(random, hazard_per_miss * float(s.misses));
  terminated = left | (s.steps >= int(session_length));
  s.offered = draw_offer(random);
  return clicked ? 1.0f : 0.0f;
}
