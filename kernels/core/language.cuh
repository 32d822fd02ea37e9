// The macros that an environment file uses: PARAMETERS(P), STATE(FIELD, ARRAY), DECLARE_ENVIRONMENT, FOR_AGENTS, ONCE.
#pragma once
#include "../philox.cuh"
#include "../port.cuh"

// PROBE(NAME, (...)) expands NAME(...) if the file defined it; else it becomes PROBE_NAME(...), which may complain.
#define PROBE(name, arguments) PROBE_NOW(name arguments)
#define PROBE_NOW(...) PROBE_JOIN(__VA_ARGS__)
#define PROBE_JOIN(...) PROBE_##__VA_ARGS__
#define PROBE_                     // NAME is defined and empty
#define PROBE_constexpr constexpr  // NAME is defined and begins with a parameter
#define PROBE_static static        // NAME is defined and begins with a list of constants
#define PROBE_PARAMETER_LISTS(L)   // optional
#define PROBE_public public        // NAME is defined and begins with a field
#define PROBE_PARAMETERS(P)        // optional
#define PROBE_STATE(FIELD, ARRAY) \
  static_assert(false, "an environment must define STATE(FIELD, ARRAY), the list of its variables");

#define DECLARE_PARAMETER(name, value) constexpr float name [[maybe_unused]] = parameter_value(#name, value);
#define DECLARE_LIST(name, size, value) TABLE ParameterList<(size)> name(#name, value);
#define DECLARE_FIELD(type, name) \
public:                           \
  type name;                      \
  static_assert(is_word<type>, "a state variable is a float, int or unsigned");
#define DECLARE_ARRAY(type, name, size) \
public:                                 \
  type name[size];                      \
  static_assert(is_word<type> && (size) > 0, "a state variable is a float, int or unsigned, an array has at least 1");

#define DECLARE_ENVIRONMENT                            \
  constexpr bool is_declared [[maybe_unused]] = true;  \
  PROBE(PARAMETERS, (DECLARE_PARAMETER))               \
  PROBE(PARAMETER_LISTS, (DECLARE_LIST))               \
  struct State {                                       \
    PROBE(STATE, (DECLARE_FIELD, DECLARE_ARRAY))       \
  };                                                   \
  DEVICE bool candidate_of(const State &s, int k, const Random &random, float *features);

// FOR_AGENTS(agent) { ... } is a phase of a step: its body runs for every agent, and its writes are visible after it.
// A CPU, and a GPU up to 16 agents, run it as a loop; above that an environment has a block, and each thread some agents.
// All threads run the code outside of phases. ONCE { ... } is a phase that runs in one thread. Neither may be left by
// `break` or `return`, and a body may read another agent's data only if no body of the same phase writes them.
#define FOR_AGENTS(agent) \
  for (int agent = first_agent<(AGENTS)>(); is_in_phase<(AGENTS)>(agent < (AGENTS)); agent += agent_stride<(AGENTS)>)
#define ONCE for (bool once = first_agent<(AGENTS)>() == 0; is_in_phase<(AGENTS)>(once); once = false)

namespace reagent_lite {

// Threads of a GPU that share an environment.
template <int agents>
constexpr int threads_of = agents <= 16 ? 1 : agents < 256 ? (agents + 31) / 32 * 32 : 256;

#ifdef __CUDACC__
template <int agents>
constexpr int agent_stride = threads_of<agents>;
#else
template <int agents>
constexpr int agent_stride = 1;
#endif

template <int agents>
DEVICE int first_agent() {
#ifdef __CUDACC__
  if (threads_of<agents> > 1) return int(threadIdx.x);
#endif
  return 0;
}

// Returns `more`, whether this thread has more to do in a phase; if not, first waits for the other threads.
template <int agents>
DEVICE bool is_in_phase(bool more) {
#ifdef __CUDACC__
  if (threads_of<agents> > 1 && !more) __syncthreads();
#endif
  return more;
}

constexpr bool is_declared = false;  // hidden by DECLARE_ENVIRONMENT

template <class T>
constexpr bool is_word = false;
template <>
constexpr bool is_word<float> = true;
template <>
constexpr bool is_word<int> = true;
template <>
constexpr bool is_word<unsigned> = true;

// Constants that the config gives in place of the file's own: {"name", value}, {"name", value},
struct Override {
  const char *name;
  float value;
};

#ifndef PARAMETER_OVERRIDES
#define PARAMETER_OVERRIDES
#endif
constexpr Override overrides[] = {PARAMETER_OVERRIDES{nullptr, 0.0f}};

constexpr bool same_text(const char *a, const char *b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}

constexpr float parameter_value(const char *name, float otherwise) {
  for (const Override *entry = overrides; entry->name; ++entry) {
    if (same_text(entry->name, name)) return entry->value;
  }
  return otherwise;
}

// n constants that the config gives one by one, {"name[0]", value}, {"name[1]", value}, or as one for all.
template <int n>
struct ParameterList {
  float value[n] = {};

  constexpr ParameterList(const char *name, float otherwise) {
    for (int k = 0; k < n; ++k) value[k] = parameter_value(name, otherwise);
    for (const Override *entry = overrides; entry->name; ++entry) {
      const char *own = entry->name, *given = name;
      while (*own && *own == *given) ++own, ++given;
      if (*given || *own != '[') continue;
      int index = 0;
      while (*++own != ']') index = 10 * index + (*own - '0');
      if (index < n) value[index] = entry->value;
    }
  }
};

}  // namespace reagent_lite
