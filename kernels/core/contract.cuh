// Checks that an environment file has the required definitions, with an error message for each, and names its sizes.
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
#if defined(AGENTS) && !defined(AGENT_TYPES)
#error "an environment with AGENTS must define AGENT_TYPES, the names of their types: {\"tagger\", \"runner\"}"
#endif
#if defined(AGENTS) && (defined(CANDIDATES) || defined(MASKED))
#error "an environment with AGENTS has neither CANDIDATES nor MASKED"
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

#ifdef AGENTS
constexpr bool has_agents = true;
#else
constexpr bool has_agents = false;
#define AGENTS 1
#endif
constexpr int agents = AGENTS;  // A
constexpr bool by_block = threads_of<agents> > 1;
static_assert(agents >= 1, "AGENTS of an environment must be at least 1");

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

// A template is chosen only if the file has no function with exactly these arguments.
template <class T>
constexpr bool never = false;

// Returned by the templates of functions that are only called if the file defines a macro.
enum NotDefined {};

template <class T>
constexpr bool is_defined = true;
template <>
constexpr bool is_defined<NotDefined> = false;

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
DEVICE void observe(const S &, int, float *) {
  static_assert(never<S>,
                "an environment with AGENTS must define: "
                "DEVICE void observe(const State &s, int agent, float *observation)");
}

template <class S>
DEVICE void step(S &, const int *, float *, Random &, bool &) {
  static_assert(never<S>,
                "an environment with AGENTS must define: "
                "DEVICE void step(State &s, const int *action, float *reward, Random &random, bool &terminated)");
}

template <class I>
DEVICE int agent_type(I) {
  static_assert(never<I>, "an environment with AGENTS must define: DEVICE int agent_type(int agent)");
  return 0;
}

template <class S>
DEVICE bool in_game(const S &, int) {
  return true;
}

// Adapts an environment with one agent to the interface for several.
template <class S>
DEVICE void observe_agent(const S &s, int agent, float *observation) {
  if constexpr (has_agents) {
    observe(s, agent, observation);
  } else {
    observe(s, observation);
  }
}

template <class S>
DEVICE void step_agents(S &s, const int *action, float *reward, Random &random, bool &terminated) {
  if constexpr (has_agents) {
    step(s, action, reward, random, terminated);
  } else {
    reward[0] = step(s, action[0], random, terminated);
  }
}

template <class I>
DEVICE int type_of(I agent) {
  if constexpr (has_agents) return agent_type(agent);
  return 0;
}

template <class S>
DEVICE NotDefined allowed(const S &, int) {
  static_assert(never<S>, "an environment that is MASKED must define: DEVICE bool allowed(const State &s, int action)");
  return {};
}

template <class S>
DEVICE NotDefined candidate(const S &, int, Random &, float *) {
  static_assert(never<S>,
                "an environment with CANDIDATES must define: "
                "DEVICE bool candidate(const State &s, int k, Random &random, float *features)");
  return {};
}

static_assert(is_masked || !is_defined<decltype(allowed(*(const State *)nullptr, 0))>,
              "an environment with allowed() must define MASKED: otherwise all actions are allowed");
static_assert(has_candidates || !is_defined<decltype(candidate(*(const State *)nullptr, 0, *(Random *)nullptr, nullptr))>,
              "an environment with candidate() must define CANDIDATES: otherwise its choices are fixed");

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
