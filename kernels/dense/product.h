// Products of small matrices: c [rows, columns] (+)= a [rows, depth] b [depth, columns].
//
//   b ─► panels of TILE_VECTORS vectors of columns ─► tiles of TILE_ROWS rows, whose sums stay in registers
//
// Every element is one sum over depth in ascending order, whatever tile it falls in: the same row gives the same bits
// in any batch.
#pragma once

#include "vectors.h"

constexpr long PANEL = TILE_VECTORS * LANES;

static inline long padded(long columns) { return (columns + LANES - 1) / LANES * LANES; }

// a, in any layout.
struct Left {
  const float *values;
  long row, depth; // distances of neighbours in a column and in a row
};

// b, whose columns are padded to whole vectors.
struct Right {
  const float *values;
  long panel, depth; // distances of panels, and of rows inside a panel; depth 0: panels are as wide as they are
};

// c, row-major.
struct Result {
  float *values;
  long stride, columns;
  const float *bias; // padded, or null
  bool rectify, add;
};

template <int ROWS, int VECTORS>
static void tile(long depth, Left a, long row, const float *b, long b_depth, Result c, long column) {
  const float *a_values = a.values + row * a.row;
  const long a_row = a.row, a_depth = a.depth;
  float *to = c.values + row * c.stride;
  Vector sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = c.bias ? load(c.bias + column + v * LANES) : zero();
  for (long k = 0; k < depth; ++k) {
    Vector right[VECTORS];
    for (int v = 0; v < VECTORS; ++v) right[v] = load(b + k * b_depth + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      Vector left = zero() + a_values[r * a_row + k * a_depth];
      for (int v = 0; v < VECTORS; ++v) sums[r][v] += left * right[v];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) {
      Vector sum = c.rectify ? rectified(sums[r][v]) : sums[r][v];
      long at = column + v * LANES;
      float *place = to + r * c.stride + at;
      if (at + LANES <= c.columns) {
        store(place, c.add ? sum + load(place) : sum);
      } else {
        for (int i = 0; at + i < c.columns; ++i) place[i] = c.add ? sum[i] + place[i] : sum[i];
      }
    }
}

// Tiles of six rows, then of two and one: another size takes a twentieth of a second more to compile and gains nothing.
template <int VECTORS>
static void panel(long rows, long depth, Left a, const float *b, long b_depth, Result c, long column) {
  long r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
    tile<TILE_ROWS, VECTORS>(depth, a, r, b, b_depth, c, column);
  for (; r + 2 <= rows; r += 2)
    tile<2, VECTORS>(depth, a, r, b, b_depth, c, column);
  if (r < rows)
    tile<1, VECTORS>(depth, a, r, b, b_depth, c, column);
}

static void product(long rows, long depth, Left a, Right b, Result c) {
  for (long column = 0; column < c.columns; column += PANEL) {
    long width = padded(c.columns - column);
    const float *values = b.values + column / PANEL * b.panel;
    if (width > PANEL) width = PANEL;
    long b_depth = b.depth ? b.depth : width;
    switch (width / LANES) {
    case 4: panel<4>(rows, depth, a, values, b_depth, c, column); break;
    case 3: panel<3>(rows, depth, a, values, b_depth, c, column); break;
    case 2: panel<2>(rows, depth, a, values, b_depth, c, column); break;
    case 1: panel<1>(rows, depth, a, values, b_depth, c, column); break;
    }
  }
}

// Copies m [depth, columns] into panels and returns them; `m` may be stored transposed.
static Right packed(const float *m, long row, long column, long depth, long columns, float *to) {
  Right result{to, PANEL * depth, 0};
  for (long first = 0; first < columns; first += PANEL) {
    long filled = columns - first < PANEL ? columns - first : PANEL, width = padded(filled);
    if (column == 1) {
      for (long k = 0; k < depth; ++k)
        for (long c = 0; c < width; ++c) to[k * width + c] = c < filled ? m[k * row + first + c] : 0.0f;
    } else {
      for (long c = 0; c < width; ++c)
        for (long k = 0; k < depth; ++k) to[k * width + c] = c < filled ? m[k * row + (first + c) * column] : 0.0f;
    }
    to += depth * width;
  }
  return result;
}
