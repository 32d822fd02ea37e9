// CartPole-v0: CartPole-v1 with 200 steps at most.
#define TIME_LIMIT 200
#include "cartpole_v1.cuh"
