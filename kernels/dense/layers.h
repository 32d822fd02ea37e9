// Layers, and a block of a few dozen rows through all of them: forward, and back with the weights' gradients.
#pragma once

#include "product.h"

struct Layer {
  long inputs, outputs, relu;
  const float *weight, *bias;              // [outputs, inputs], [outputs]
  float *output;                           // [rows, outputs], or null where nobody wants it
  float *weight_gradient, *bias_gradient;  // of their shapes
};

constexpr long ROWS = 8 * TILE_ROWS;
constexpr long MOST_LAYERS = 32;

static long widest(const Layer *layers, long count) {
  long most = padded(layers[0].inputs);
  for (long l = 0; l < count; ++l)
    if (padded(layers[l].outputs) > most) most = padded(layers[l].outputs);
  return most;
}

// Floats that weights and biases take in either order that they are read in.
static long packed_size(const Layer *layers, long count) {
  long size = 0;
  for (long l = 0; l < count; ++l) size += (padded(layers[l].inputs) + 1) * padded(layers[l].outputs);
  return size;
}

// A layer's weights and biases as outputs read them.
struct Forth {
  Right weight;
  const float *bias;
};

// Fills `forth` and returns the scratch memory that is left.
static float *pack_forth(const Layer *layers, long count, Forth *forth, float *scratch) {
  for (long l = 0; l < count; ++l) {
    const Layer &y = layers[l];
    forth[l].weight = packed(y.weight, 1, y.inputs, y.inputs, y.outputs, scratch);
    scratch += y.inputs * padded(y.outputs);
    forth[l].bias = scratch;
    for (long o = 0; o < padded(y.outputs); ++o) scratch[o] = o < y.outputs ? y.bias[o] : 0.0f;
    scratch += padded(y.outputs);
  }
  return scratch;
}

// Writes every layer's output of `num` rows.
static void go_forth(const Layer *layers, long count, const Forth *forth, const float *x, long num,
                     float *const *outputs) {
  for (long l = 0; l < count; ++l) {
    const Layer &y = layers[l];
    product(num, y.inputs, Left{x, y.inputs, 1}, forth[l].weight,
            Result{outputs[l], y.outputs, y.outputs, forth[l].bias, y.relu != 0, false});
    x = outputs[l];
  }
}

// Fills `back` with the weights as the gradients of inputs read them, clears the layers' gradients and returns the
// scratch memory that is left.
static float *pack_back(const Layer *layers, long count, bool of_x, Right *back, float *scratch) {
  for (long l = 0; l < count; ++l) {
    const Layer &y = layers[l];
    if (l || of_x) {
      back[l] = packed(y.weight, y.inputs, 1, y.outputs, y.inputs, scratch);
      scratch += y.outputs * padded(y.inputs);
    }
    for (long i = 0; i < y.outputs * y.inputs; ++i) y.weight_gradient[i] = 0.0f;
    for (long o = 0; o < y.outputs; ++o) y.bias_gradient[o] = 0.0f;
  }
  return scratch;
}

static void add_rows(const float *gradient, long rows, long columns, float *sums) {
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < columns; ++c) sums[c] += gradient[r * columns + c];
}

static void pass(const float *gradient, const float *output, long count, float *to) {
  long i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, passed(load(gradient + i), load(output + i)));
  for (; i < count; ++i) to[i] = output[i] <= 0.0f ? 0.0f : gradient[i];
}

// Adds `num` rows to the gradients, and writes that of x where x_gradient is not null. What lies between layers is kept
// in three rooms of ROWS rows of the widest layer.
static void go_back(const Layer *layers, long count, const Right *back, const float *x, long num,
                    float *const *outputs, const float *gradient, float *x_gradient, float *rooms, long room_size) {
  float *own = rooms, *next = own + room_size, *inputs = next + room_size;
  for (long l = count - 1; l >= 0; --l) {
    const Layer &y = layers[l];
    if (y.relu) {
      pass(gradient, outputs[l], num * y.outputs, own);
      gradient = own;
    }
    add_rows(gradient, num, y.outputs, y.bias_gradient);
    const float *input = l ? outputs[l - 1] : x;
    Right right{input, PANEL, y.inputs};
    if (y.inputs % LANES) right = packed(input, y.inputs, 1, num, y.inputs, inputs);
    product(y.outputs, num, Left{gradient, 1, y.outputs}, right,
            Result{y.weight_gradient, y.inputs, y.inputs, nullptr, false, true});
    if (!l && !x_gradient) break;
    float *to = l ? next : x_gradient;
    product(num, y.outputs, Left{gradient, y.outputs, 1}, back[l],
            Result{to, y.inputs, y.inputs, nullptr, false, false});
    gradient = to;
    next = own; // of what the gradient was
    own = to;   // is changed in place
  }
}
