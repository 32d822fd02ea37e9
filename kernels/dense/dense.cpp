// Fully connected layers with ReLUs on one processor core: outputs and gradients, a few rows at a time.
//
//   ROWS rows of x ─► layer ─► layer ─► ...                what lies between two layers stays in the nearest cache
//   their gradient ◄─ layer ◄─ layer ◄─ ...                weights' gradients grow by ROWS rows at once
//
// Called by reagent_lite/models/dense_kernel.py, which owns all memory. Matrices are row-major float32.
#include "layers.h"

// Returns the floats of scratch memory that either function needs.
extern "C" long dense_scratch(const Layer *layers, long count) {
  return 3 * ROWS * widest(layers, count) + packed_size(layers, count);
}

// Writes each layer's output that is wanted.
extern "C" void dense_forward(const Layer *layers, long count, const float *x, long rows, float *scratch) {
  Forth forth[MOST_LAYERS];
  float *room = pack_forth(layers, count, forth, scratch), *outputs[MOST_LAYERS];
  long room_size = ROWS * widest(layers, count);
  for (long begin = 0; begin < rows; begin += ROWS) {
    for (long l = 0; l < count; ++l)
      outputs[l] = layers[l].output ? layers[l].output + begin * layers[l].outputs : room + l % 2 * room_size;
    long num = rows - begin < ROWS ? rows - begin : ROWS;
    go_forth(layers, count, forth, x + begin * layers[0].inputs, num, outputs);
  }
}

// Writes the gradients of weights and biases, and of x [rows, inputs] where x_gradient is not null. Every layer's
// output is given.
extern "C" void dense_backward(const Layer *layers, long count, const float *x, long rows, const float *gradient,
                               float *x_gradient, float *scratch) {
  Right back[MOST_LAYERS];
  float *outputs[MOST_LAYERS], *rooms = pack_back(layers, count, x_gradient != nullptr, back, scratch);
  for (long begin = 0; begin < rows; begin += ROWS) {
    for (long l = 0; l < count; ++l) outputs[l] = layers[l].output + begin * layers[l].outputs;
    long num = rows - begin < ROWS ? rows - begin : ROWS, inputs = layers[0].inputs;
    go_back(layers, count, back, x + begin * inputs, num, outputs, gradient + begin * layers[count - 1].outputs,
            x_gradient ? x_gradient + begin * inputs : nullptr, rooms, ROWS * widest(layers, count));
  }
}
