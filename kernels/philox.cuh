// Random numbers by counting: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011, section 3.3 and the constants of its reference. No state is stored: a draw is a function of
// (seed, stream) and of (global environment id, episode, purpose, position), so results depend neither on the number of
// threads, blocks and processes nor on what other environments drew.
#pragma once
#include "port.cuh"

namespace reagent_lite {

struct Words {
  unsigned x, y, z, w;
};

DEVICE Words philox(Words counter, unsigned key_x, unsigned key_y) {
  for (int round = 0; round < 10; ++round) {
    unsigned high_x = high_product(0xD2511F53u, counter.x), low_x = 0xD2511F53u * counter.x;
    unsigned high_z = high_product(0xCD9E8D57u, counter.z), low_z = 0xCD9E8D57u * counter.z;
    counter = Words{high_z ^ counter.y ^ key_x, low_z, high_x ^ counter.w ^ key_y, low_x};
    key_x += 0x9E3779B9u;
    key_y += 0xBB67AE85u;
  }
  return counter;
}

// Purpose of a draw: sequences of different purposes never overlap.
enum Purpose : unsigned { FOR_RESET = 0, FOR_STEP = 1, FOR_ACT = 2, FOR_CANDIDATES = 3 };

// The draws of one environment for one purpose at one step.
struct Random {
  unsigned seed, stream, env, episode, step;
  unsigned purpose;  // purpose in the low 8 bits, number of the agent above
  unsigned base;  // first value of the counter's last word, which counts blocks of four words
  unsigned drawn;  // words used so far
  unsigned x, y, z, w;  // block of the last word
};

DEVICE Random random_for(unsigned seed, unsigned stream, unsigned env, unsigned episode, unsigned step, Purpose purpose,
                         unsigned base, unsigned agent = 0u) {
  return Random{seed, stream, env, episode, step, purpose | agent << 8, base, 0u, 0u, 0u, 0u, 0u};
}

// Random numbers of one agent at a step; with one Random for all agents, draws would depend on the agents' order.
DEVICE Random random_of_agent(const Random &random, int agent) {
  Random own = random;
  own.purpose |= unsigned(agent + 1) << 8;
  own.drawn = 0u;
  return own;
}

DEVICE unsigned draw(Random &random) {
  unsigned lane = random.drawn & 3u;
  if (lane == 0u) {
    Words counter{random.env, random.episode, random.purpose, random.base + (random.drawn >> 2)};
    Words block = philox(counter, random.seed, random.stream);
    random.x = block.x;  // one by one: a copied structure stops g++ from vectorizing
    random.y = block.y;
    random.z = block.z;
    random.w = block.w;
  }
  random.drawn += 1u;
  return lane == 0u ? random.x : lane == 1u ? random.y : lane == 2u ? random.z : random.w;
}

// In [0, 1), a multiple of 2^-24.
DEVICE float uniform(Random &random) { return float(int(draw(random) >> 8)) * 5.9604644775390625e-8f; }
DEVICE float uniform(Random &random, float low, float high) { return low + uniform(random) * (high - low); }
DEVICE bool bernoulli(Random &random, float p) { return uniform(random) < p; }

// Integer in [0, n); off uniform by less than n / 2^32 (Lemire, "Fast Random Integer Generation in an Interval", 2019).
DEVICE int below(Random &random, int n) { return int(high_product(draw(random), unsigned(n))); }

}  // namespace reagent_lite
