// The temporal-difference loss of a Q-network over fixed actions and its gradients, a few rows at a time.
//
//   next states ─► Q, Q_target ─► a' ─► y = r + d Q_target(s', a')
//   states ─► Q ─► Q(s, a) ─► loss ─► gradient ─► back through Q      nothing of a row is written but its loss
//
// The formulas are those of reagent_lite/rl/td.py and losses.py. Called by reagent_lite/models/q_loss_kernel.py.
#include "layers.h"

enum Rule : long { LOGGED, GREEDY, DOUBLE };

// Layers of a network and of its target network, of the same shapes. Plain: all of them are the trunk. Dueling: the
// trunk is followed by a stream of one value and a stream of advantages, Q = V + A - mean of A over what is allowed.
struct Networks {
  long trunk, value, advantage; // numbers of layers; the last two are 0 where the network is plain
  const Layer *online, *target;
};

// Which choices are allowed, [rows, choices] in any layout.
struct Mask {
  const unsigned char *values;
  long row, column; // distances of neighbours in a column and in a row
};

struct Transitions {
  long rows;
  const float *state, *next_state;         // [rows, inputs of the first layer]
  const long *action, *next_action;        // [rows]; a next action below 0 is 0
  Mask mask, next_mask;
  const float *reward, *discount, *weight; // [rows]
  Rule rule;                               // who chooses the next action
  long huber;                              // else the squared error
  float *losses, *loss;                    // [rows], and their sum by weight
};

static long count_of(const Networks &n) { return n.trunk + n.value + n.advantage; }

// Returns the floats of scratch memory.
extern "C" long q_loss_scratch(const Layer *layers, long count) {
  long size = 3 * packed_size(layers, count) + 7 * ROWS * widest(layers, count);
  for (long l = 0; l < count; ++l) size += ROWS * padded(layers[l].outputs);
  return size;
}

static bool allowed(Mask m, long row, long choice) { return m.values[row * m.row + choice * m.column] != 0; }

// Writes q [num, choices] from values and advantages of rows from `begin` on.
static void join(const float *value, const float *advantage, Mask mask, long begin, long num, long choices, float *q) {
  for (long r = 0; r < num; ++r, advantage += choices, q += choices) {
    float sum = 0.0f, count = 0.0f;
    for (long k = 0; k < choices; ++k) {
      const float counts = allowed(mask, begin + r, k) ? 1.0f : 0.0f;
      sum += counts * advantage[k]; // what is not finite shows even where it is not allowed, as in q_networks.py
      count += counts;
    }
    const float base = value[r] - sum / (count < 1.0f ? 1.0f : count);
    for (long k = 0; k < choices; ++k) q[k] = base + advantage[k];
  }
}

// Turns the gradient of q [num, choices] into that of advantages, in place, and that of values [num].
static void part(float *gradient, Mask mask, long begin, long num, long choices, float *of_value) {
  for (long r = 0; r < num; ++r, gradient += choices) {
    float sum = 0.0f, count = 0.0f;
    for (long k = 0; k < choices; ++k) {
      sum += gradient[k];
      count += allowed(mask, begin + r, k) ? 1.0f : 0.0f;
    }
    of_value[r] = sum;
    const float share = sum / (count < 1.0f ? 1.0f : count);
    for (long k = 0; k < choices; ++k) gradient[k] -= (allowed(mask, begin + r, k) ? 1.0f : 0.0f) * share;
  }
}

// Writes every layer's output of `num` rows from `begin` on and returns q [num, choices], in `room` where it is joined.
static const float *values(const Networks &n, const Layer *layers, const Forth *forth, const float *x, Mask mask,
                           long begin, long num, float *const *outputs, float *room) {
  go_forth(layers, n.trunk, forth, x + begin * layers[0].inputs, num, outputs);
  if (!n.value) return outputs[n.trunk - 1];
  const float *hidden = outputs[n.trunk - 1];
  const long streams[2] = {n.trunk, n.trunk + n.value}, counts[2] = {n.value, n.advantage}, last = count_of(n) - 1;
  for (int i = 0; i < 2; ++i)
    go_forth(layers + streams[i], counts[i], forth + streams[i], hidden, num, outputs + streams[i]);
  join(outputs[streams[1] - 1], outputs[last], mask, begin, num, layers[last].outputs, room);
  return room;
}

// Adds the gradients of `num` rows from `begin` on, for the gradient of their q. Scratch: six rooms.
static void learn(const Networks &n, const Right *back, const float *x, Mask mask, long begin, long num,
                  float *const *outputs, float *gradient, float *rooms, long room_size) {
  const Layer *y = n.online;
  float *of_value = rooms + 3 * room_size, *of_hidden = of_value + room_size, *of_hidden_too = of_hidden + room_size;
  const float *of_trunk = gradient;
  if (n.value) {
    const float *hidden = outputs[n.trunk - 1];
    const long value = n.trunk, advantage = n.trunk + n.value, width = y[n.trunk].inputs;
    part(gradient, mask, begin, num, y[count_of(n) - 1].outputs, of_value);
    go_back(y + value, n.value, back + value, hidden, num, outputs + value, of_value, of_hidden, rooms, room_size);
    go_back(y + advantage, n.advantage, back + advantage, hidden, num, outputs + advantage, gradient, of_hidden_too,
            rooms, room_size);
    for (long i = 0; i < num * width; ++i) of_hidden[i] += of_hidden_too[i];
    of_trunk = of_hidden;
  }
  go_back(y, n.trunk, back, x + begin * y[0].inputs, num, outputs, of_trunk, nullptr, rooms, room_size);
}

// Returns the allowed choice of largest value: the lowest of equal ones, 0 where there is none; the first that is not a
// number, if there is one.
static long greedy(const float *q, Mask mask, long row, long choices) {
  long best = 0;
  float most = -__builtin_inff();
  for (long k = 0; k < choices; ++k)
    if (allowed(mask, row, k) && !(q[k] <= most) && most == most) {
      most = q[k];
      best = k;
    }
  return best;
}

static float loss_of(float error, bool huber, float &slope) {
  if (!huber) {
    slope = 2.0f * error;
    return error * error;
  }
  const float size = __builtin_fabsf(error);
  slope = error > 1.0f ? 1.0f : error < -1.0f ? -1.0f : error;
  return size < 1.0f ? 0.5f * error * error : size - 0.5f;
}

// Writes what Q of `num` rows from `begin` on should be.
static void targets(const Networks &n, const Forth *online, const Forth *target, const Transitions &t, long begin,
                    long num, float *const *outputs, float *room, float *y) {
  const long choices = n.online[count_of(n) - 1].outputs;
  long next[ROWS];
  if (t.rule == DOUBLE) {
    const float *q = values(n, n.online, online, t.next_state, t.next_mask, begin, num, outputs, room);
    for (long r = 0; r < num; ++r) next[r] = greedy(q + r * choices, t.next_mask, begin + r, choices);
  }
  const float *q = values(n, n.target, target, t.next_state, t.next_mask, begin, num, outputs, room);
  for (long r = 0; r < num; ++r, q += choices) {
    const long i = begin + r;
    if (t.rule == GREEDY) next[r] = greedy(q, t.next_mask, i, choices);
    if (t.rule == LOGGED) next[r] = t.next_action[i] < 0 ? 0 : t.next_action[i];
    // a logged next action is allowed; a row with no allowed choice has value 0
    const float counts = t.rule == LOGGED || allowed(t.next_mask, i, next[r]) ? 1.0f : 0.0f;
    y[r] = t.reward[i] + t.discount[i] * (counts * q[next[r]]);
  }
}

// Writes losses of `num` rows from `begin` on and the gradient of their q, which may lie in its place, and returns the
// sum of losses by weight.
static double losses(const Transitions &t, const float *q, const float *y, long begin, long num, long choices,
                     float *gradient) {
  double sum = 0;
  for (long r = 0; r < num; ++r, q += choices, gradient += choices) {
    const long i = begin + r;
    float slope;
    t.losses[i] = loss_of(q[t.action[i]] - y[r], t.huber != 0, slope);
    sum += double(t.weight[i]) * t.losses[i];
    for (long k = 0; k < choices; ++k) gradient[k] = 0.0f;
    gradient[t.action[i]] = t.weight[i] * slope;
  }
  return sum;
}

// Writes losses, their sum, and the gradients of the online layers' weights and biases. Returns the first row whose
// action, or next action where the log chooses, is none of the network's, or -1.
extern "C" long q_loss(const Networks *networks, const Transitions *transitions, float *scratch) {
  const Networks &n = *networks;
  const Transitions &t = *transitions;
  const long count = count_of(n), choices = n.online[count - 1].outputs, room_size = ROWS * widest(n.online, count);
  for (long i = 0; i < t.rows; ++i)
    if (t.action[i] < 0 || t.action[i] >= choices || (t.rule == LOGGED && t.next_action[i] >= choices)) return i;

  Forth online[MOST_LAYERS], target[MOST_LAYERS];
  Right back[MOST_LAYERS];
  float *outputs[MOST_LAYERS], y[ROWS];
  scratch = pack_forth(n.online, count, online, scratch);
  scratch = pack_forth(n.target, count, target, scratch);
  scratch = pack_back(n.online, n.trunk, false, back, scratch);
  for (long first = n.trunk, length = n.value; first < count; first += length, length = n.advantage)
    scratch = pack_back(n.online + first, length, true, back + first, scratch);
  for (long l = 0; l < count; ++l) {
    outputs[l] = scratch;
    scratch += ROWS * padded(n.online[l].outputs);
  }
  float *rooms = scratch, *room = scratch + 6 * room_size;

  double sum = 0;
  for (long begin = 0; begin < t.rows; begin += ROWS) {
    const long num = t.rows - begin < ROWS ? t.rows - begin : ROWS;
    targets(n, online, target, t, begin, num, outputs, room, y);
    const float *q = values(n, n.online, online, t.state, t.mask, begin, num, outputs, room);
    sum += losses(t, q, y, begin, num, choices, room);
    learn(n, back, t.state, t.mask, begin, num, outputs, room, rooms, room_size);
  }
  *t.loss = float(sum);
  return -1;
}
