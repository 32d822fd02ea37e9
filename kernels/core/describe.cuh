// The description of an environment: JSON that the compiler builds, and numbers that only running code can compute.
#pragma once

namespace reagent_lite::environment {

// Writes to `text`, or only counts the characters if it is null.
struct Writer {
  char *text;
  int length = 0;
  bool separate = false;

  constexpr void put(char letter) {
    if (text) text[length] = letter;
    ++length;
  }
  constexpr void put(const char *letters) {
    while (*letters) put(*letters++);
  }
  constexpr void put(int value) {
    if (value >= 10) put(value / 10);
    put(char('0' + value % 10));
  }
  constexpr void key(const char *name) {
    put(separate ? ",\"" : "\"");
    put(name);
    put("\":");
    separate = true;
  }
  constexpr void number(const char *name, int value) {
    key(name);
    put(value);
  }
  constexpr void flag(const char *name, bool value) {
    key(name);
    put(value ? "true" : "false");
  }
  constexpr void field(const char *type, const char *name, int size) {
    put(separate ? ",[\"" : "[\"");
    put(name);
    put("\",\"");
    put(type);
    put("\",");
    put(size);
    put("]");
    separate = true;
  }
  constexpr void word(const char *letters) {
    put(separate ? ",\"" : "\"");
    for (; *letters; ++letters) {
      if (*letters == '"' || *letters == '\\') put('\\');
      put(*letters);
    }
    put('"');
    separate = true;
  }
};

#define WRITE_FIELD(type, name) writer.field(#type, #name, 1);
#define WRITE_ARRAY(type, name, size) writer.field(#type, #name, size);
#define WRITE_PARAMETER(name, value) writer.word(#name);
#define WRITE_LIST(name, size, value) writer.number(#name, size);

constexpr int write_description(char *text) {
  Writer writer{text};
  writer.put("{");
  writer.number("num_actions", num_choices);
  writer.number("observation_size", observation_width);
  writer.number("time_limit", TIME_LIMIT);
  writer.number("action_feature_size", feature_width);
  writer.number("action_bytes", int(sizeof(Action)));
  writer.number("agents", agents);
  writer.number("threads_per_env", threads_of<agents>);
  writer.flag("candidates", has_candidates);
  writer.flag("masked", is_masked);
  writer.key("state");
  writer.put("[");
  writer.separate = false;
  STATE(WRITE_FIELD, WRITE_ARRAY)
  writer.put("],\"parameters\":[");
  writer.separate = false;
#ifdef PARAMETERS
  PARAMETERS(WRITE_PARAMETER)
#endif
  writer.put("],\"parameter_lists\":{");
  writer.separate = false;
#ifdef PARAMETER_LISTS
  PARAMETER_LISTS(WRITE_LIST)
#endif
  writer.put("},\"action_names\":[");
  writer.separate = false;
#ifdef ACTION_NAMES
  constexpr const char *names[] = ACTION_NAMES;
  static_assert(sizeof(names) / sizeof(names[0]) == num_choices,
                "ACTION_NAMES of an environment must name every action");
  for (const char *name : names) writer.word(name);
#endif
  writer.put("],\"agent_type_names\":[");
  writer.separate = false;
#ifdef AGENT_TYPES
  constexpr const char *types[] = AGENT_TYPES;
  for (const char *name : types) writer.word(name);
#else
  writer.word("agent");
#endif
  writer.put("]}");
  return writer.length;
}

struct Description {
  char text[write_description(nullptr) + 1];
};

constexpr Description describe() {
  Description result = {};
  write_description(result.text);
  return result;
}

#define PARAMETER_NUMBER(name, otherwise) *parameters++ = name;
#define LIST_NUMBERS(name, size, otherwise) \
  for (int k = 0; k < (size); ++k) *parameters++ = name.value[k];

// Sets `observed` to the number of floats that observe() writes for an initial state, up to the first that it omits.
// There is room for `spare` more than it declares.
template <int spare>
DEVICE void write_numbers(float *parameters, float *features, int *agent_types, int *observed) {
#ifdef PARAMETERS
  PARAMETERS(PARAMETER_NUMBER)
#endif
#ifdef PARAMETER_LISTS
  PARAMETER_LISTS(LIST_NUMBERS)
#endif
  for (int agent = 0; agent < agents; ++agent) agent_types[agent] = type_of(agent);
#ifndef CANDIDATES
  for (int k = 0; k < num_choices; ++k) action_features(k, features + k * feature_width);
#endif
  constexpr float unwritten = -1.2345678e30f;
  float row[observation_width + spare];
  State s = {};
  Random random = random_for(0u, 0u, 0u, 0u, 0u, FOR_RESET, 0u);
  reset(s, random);
  *observed = observation_width;
  for (int agent = 0; agent < agents; ++agent) {
    for (float &number : row) number = unwritten;
    observe_agent(s, agent, row);
    int count = 0;
    while (count < observation_width + spare && row[count] != unwritten) ++count;
    if (count != observation_width) *observed = count;
  }
}

}  // namespace reagent_lite::environment
