// What an environment file must define, checked with a sentence for each omission, and its sizes as constants.
#pragma once

#ifndef NUM_ACTIONS
#error "an environment must define NUM_ACTIONS, the number of its actions"
#endif
#ifndef OBSERVATION_SIZE
#error "an environment must define OBSERVATION_SIZE, the number of floats that observe() writes"
#endif
#ifndef TIME_LIMIT
#error "an environment must define TIME_LIMIT, the steps after which an episode is truncated"
#endif
#if defined(CANDIDATES) && !defined(ACTION_FEATURE_SIZE)
#error "an environment with CANDIDATES must define ACTION_FEATURE_SIZE, the features of a candidate"
#endif
#if defined(CANDIDATES) && defined(MASKED)
#error "an environment has CANDIDATES or is MASKED: candidate() already says which slots are closed"
#endif

namespace reagent_lite::environment {

static_assert(is_declared, "an environment must say DECLARE_ENVIRONMENT after its macros and before its functions");

constexpr int num_choices = NUM_ACTIONS;             // K
constexpr int observation_width = OBSERVATION_SIZE;  // S
#ifdef ACTION_FEATURE_SIZE
constexpr int feature_width = ACTION_FEATURE_SIZE;  // F
#else
constexpr int feature_width = NUM_ACTIONS;
#endif
static_assert(num_choices >= 1, "NUM_ACTIONS of an environment must be at least 1");
static_assert(observation_width >= 1, "OBSERVATION_SIZE of an environment must be at least 1");
static_assert(feature_width >= 1, "ACTION_FEATURE_SIZE of an environment must be at least 1");
static_assert(TIME_LIMIT >= 1, "TIME_LIMIT of an environment must be at least 1");

#ifdef CANDIDATES
constexpr bool has_candidates = true;
#else
constexpr bool has_candidates = false;
#endif
#ifdef MASKED
constexpr bool is_masked = true;
#else
constexpr bool is_masked = false;
#endif

// Templates are chosen only where the file has no function of exactly these arguments.
template <class T>
constexpr bool never = false;

template <class S>
DEVICE void reset(S &, Random &) {
  static_assert(never<S>, "an environment must define: DEVICE void reset(State &s, Random &random)");
}

template <class S>
DEVICE void observe(const S &, float *) {
  static_assert(never<S>, "an environment must define: DEVICE void observe(const State &s, float *observation)");
}

template <class S>
DEVICE float step(S &, int, Random &, bool &) {
  static_assert(never<S>,
                "an environment must define: "
                "DEVICE float step(State &s, int action, Random &random, bool &terminated)");
  return 0.0f;
}

template <class S>
DEVICE bool allowed(const S &, int) {
  static_assert(never<S>, "an environment that is MASKED must define: DEVICE bool allowed(const State &s, int action)");
  return false;
}

template <class S>
DEVICE bool candidate(const S &, int, Random &, float *) {
  static_assert(never<S>,
                "an environment with CANDIDATES must define: "
                "DEVICE bool candidate(const State &s, int k, Random &random, float *features)");
  return false;
}

#ifdef ACTION_FEATURE_SIZE
template <class I>
DEVICE void action_features(I, float *) {
  static_assert(never<I>,
                "an environment with ACTION_FEATURE_SIZE must define: "
                "DEVICE void action_features(int action, float *features)");
}
#else
DEVICE void action_features(int action, float *features) {
  for (int k = 0; k < num_choices; ++k) features[k] = k == action ? 1.0f : 0.0f;
}
#endif

}  // namespace reagent_lite::environment
