// Choices alone: draws the actions of environments that are stepped elsewhere, such as Gymnasium's.
//
// Actions  number_of_actions; all are allowed unless the call has a mask
#include "port.cuh"

#define PARAMETERS(P) P(number_of_actions, 2.0f)
#define NUM_ACTIONS int(number_of_actions)
#define OBSERVATION_SIZE 1
#define TIME_LIMIT 1
#define STATE(FIELD, ARRAY) FIELD(int, unused)
DECLARE_ENVIRONMENT

DEVICE void reset(State &s, Random &random) { s.unused = 0; }

DEVICE void observe(const State &s, float *observation) { observation[0] = 0.0f; }

DEVICE float step(State &s, int action, Random &random, bool &terminated) { return 0.0f; }
