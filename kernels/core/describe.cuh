// What an environment is, as JSON built by the compiler, and the numbers that only running code knows.
#pragma once

namespace reagent_lite::environment {

struct Description {
  char text[8192];
};

struct Writer {
  Description result = {};
  int length = 0;
  bool separate = false;

  constexpr void put(const char *text) {
    while (*text) result.text[length++] = *text++;
  }
  constexpr void put(int value) {
    if (value >= 10) put(value / 10);
    result.text[length++] = char('0' + value % 10);
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
  constexpr void word(const char *text) {
    put(separate ? ",\"" : "\"");
    put(text);
    put("\"");
    separate = true;
  }
};

#define WRITE_FIELD(type, name) writer.field(#type, #name, 1);
#define WRITE_ARRAY(type, name, size) writer.field(#type, #name, size);
#define WRITE_PARAMETER(name, value) writer.word(#name);
#define WRITE_LIST(name, size, value) writer.number(#name, size);

constexpr Description describe() {
  Writer writer;
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
  return writer.result;
}

#define PARAMETER_NUMBER(name, value) *parameters++ = name;

DEVICE void write_numbers(float *parameters, float *features, int *agent_types) {
#ifdef PARAMETERS
  PARAMETERS(PARAMETER_NUMBER)
#endif
  for (int agent = 0; agent < agents; ++agent) agent_types[agent] = type_of(agent);
#ifndef CANDIDATES
  for (int k = 0; k < num_choices; ++k) action_features(k, features + k * feature_width);
#endif
}

}  // namespace reagent_lite::environment
