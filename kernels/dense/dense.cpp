// Fully connected layers with ReLUs on one processor core: outputs and gradients, a few rows at a time.
//
//   ROWS rows of x ─► layer ─► layer ─► ...                what lies between two layers stays in the nearest cache
//   their gradient ◄─ layer ◄─ layer ◄─ ...                weights' gradients grow by ROWS rows at once
//
// Called by reagent_lite/models/dense_kernel.py, which owns all memory. Matrices are row-major float32.
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

// Returns the floats of scratch memory that either function needs.
extern "C" long dense_scratch(const Layer *layers, long count) {
  long size = 3 * ROWS * widest(layers, count);
  for (long l = 0; l < count; ++l) size += (padded(layers[l].inputs) + 1) * padded(layers[l].outputs);
  return size;
}

// Writes each layer's output that is wanted.
extern "C" void dense_forward(const Layer *layers, long count, const float *x, long rows, float *scratch) {
  Right weights[MOST_LAYERS];
  const float *biases[MOST_LAYERS];
  for (long l = 0; l < count; ++l) {
    const Layer &y = layers[l];
    weights[l] = packed(y.weight, 1, y.inputs, y.inputs, y.outputs, scratch);
    scratch += y.inputs * padded(y.outputs);
    biases[l] = scratch;
    for (long o = 0; o < padded(y.outputs); ++o) scratch[o] = o < y.outputs ? y.bias[o] : 0.0f;
    scratch += padded(y.outputs);
  }
  float *room[2] = {scratch, scratch + ROWS * widest(layers, count)};
  for (long begin = 0; begin < rows; begin += ROWS) {
    long num = rows - begin < ROWS ? rows - begin : ROWS;
    const float *input = x + begin * layers[0].inputs;
    for (long l = 0; l < count; ++l) {
      const Layer &y = layers[l];
      float *output = y.output ? y.output + begin * y.outputs : room[l % 2];
      product(num, y.inputs, Left{input, y.inputs, 1}, weights[l],
              Result{output, y.outputs, y.outputs, biases[l], y.relu != 0, false});
      input = output;
    }
  }
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

// Writes the gradients of weights and biases, and of x [rows, inputs] where x_gradient is not null. Every layer's
// output is given.
extern "C" void dense_backward(const Layer *layers, long count, const float *x, long rows, const float *gradient,
                               float *x_gradient, float *scratch) {
  Right weights[MOST_LAYERS];
  for (long l = 0; l < count; ++l) {
    const Layer &y = layers[l];
    if (l || x_gradient) {
      weights[l] = packed(y.weight, y.inputs, 1, y.outputs, y.inputs, scratch);
      scratch += y.outputs * padded(y.inputs);
    }
    for (long i = 0; i < y.outputs * y.inputs; ++i) y.weight_gradient[i] = 0.0f;
    for (long o = 0; o < y.outputs; ++o) y.bias_gradient[o] = 0.0f;
  }
  long room_size = ROWS * widest(layers, count);
  float *own = scratch, *next = scratch + room_size, *inputs = scratch + 2 * room_size;
  for (long begin = 0; begin < rows; begin += ROWS) {
    long num = rows - begin < ROWS ? rows - begin : ROWS;
    const float *g = gradient + begin * layers[count - 1].outputs;
    for (long l = count - 1; l >= 0; --l) {
      const Layer &y = layers[l];
      if (y.relu) {
        pass(g, y.output + begin * y.outputs, num * y.outputs, own);
        g = own;
      }
      add_rows(g, num, y.outputs, y.bias_gradient);
      const float *input = l ? layers[l - 1].output + begin * y.inputs : x + begin * y.inputs;
      Right right{input, PANEL, y.inputs};
      if (y.inputs % LANES) right = packed(input, y.inputs, 1, num, y.inputs, inputs);
      product(y.outputs, num, Left{g, 1, y.outputs}, right,
              Result{y.weight_gradient, y.inputs, y.inputs, nullptr, false, true});
      if (!l && !x_gradient) break;
      float *to = l ? next : x_gradient + begin * y.inputs;
      product(num, y.outputs, Left{g, y.outputs, 1}, weights[l], Result{to, y.inputs, y.inputs, nullptr, false, false});
      g = to;
      next = own; // of what g was
      own = to;   // is changed in place
    }
    own = scratch;
    next = scratch + room_size;
  }
}
