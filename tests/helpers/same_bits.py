"""The same play in several environments, every buffer of which must have the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from helpers.pretended_gpu import GPU
from torch import Tensor

from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda import CudaBackend
from reagent_lite.sim.env import VectorEnv

# Whatever may come out differently on two machines: NaN and -0 among numbers that are compared, chosen, clamped and
# rounded, whole numbers that wrap around, arrays that are indexed by what is drawn.
CORNERS = """
#include "port.cuh"
#define NUM_ACTIONS 3
#define CANDIDATES
#define ACTION_FEATURE_SIZE 2
#define OBSERVATION_SIZE 32
#define TIME_LIMIT 40
#define PARAMETERS(P) P(scale, 3.7f)
#define STATE(FIELD, ARRAY) ARRAY(float, x, 3) ARRAY(int, n, 3) FIELD(unsigned, bits)
DECLARE_ENVIRONMENT
DEVICE float special(Random &random) {
  const float known[8] = {0.0f, -0.0f, infinity, -infinity, 1e-42f, -1.0f, 3.4e38f, infinity - infinity};
  float any = float_of(draw(random) & 0xbfffffffu);
  return bernoulli(random, 0.5f) ? known[below(random, 8)] : any;
}
DEVICE void reset(State &s, Random &random) {
  for (int k = 0; k < 3; ++k) s.x[k] = special(random);
  for (int k = 0; k < 3; ++k) s.n[k] = int(draw(random));
  s.bits = draw(random);
}
DEVICE void observe(const State &s, float *observation) {
  const float a = s.x[0], b = s.x[1], c = s.x[2], d = s.x[s.bits % 3u];
  float values[] = {maximum(a, b), minimum(a, b), maximum(a, 0.0f), maximum(0.0f, a), minimum(a, 0.0f),
                    minimum(0.0f, a), maximum(-0.0f, a), minimum(-0.0f, a), clamp(a, 0.0f, 1.0f), clamp(a, -1.0f, 0.0f),
                    clamp(a, b, c), select(a < b, a, b), select(a < 0.0f, a, 0.0f), select(a > 0.0f, a, 0.0f),
                    a < b ? a : b, a >= b ? a : b, absolute(a), floor_of(a), square_root(absolute(b)), 1.0f / a, a / b,
                    a * b + c, a - b, float(whole_of(a)), float(whole_of(c * 1e-30f)), sine(c), cosine(c),
                    exponential(a), logistic(b), wrap_angle(c), d, float(s.n[s.bits % 3u])};
  for (int k = 0; k < 32; ++k) observation[k] = values[k];
}
DEVICE bool candidate(const State &s, int k, Random &random, float *features) {
  features[0] = maximum(special(random), s.x[k % 3]);
  features[1] = float(s.n[k % 3] >> (draw(random) & 31u));
  return draw(random) % 3u != 0u;
}
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  int i = below(random, 3), j = below(random, 3);
  s.x[j] = bernoulli(random, 0.7f) ? s.x[(j + action) % 3] * scale - s.x[i] : special(random);
  s.n[i] = s.n[(i + 1) % 3] * 3 - minimum(s.n[action], i) + (s.n[i] / 7) % 5;
  s.bits = (s.bits << (s.bits & 7u)) ^ (s.bits >> 3) ^ high_product(s.bits, unsigned(s.n[i]));
  float features[ACTION_FEATURE_SIZE];
  terminated = candidate_of(s, action, random, features) & bernoulli(random, 0.05f);
  return maximum(minimum(s.x[j], 10.0f), -10.0f);
}
"""


def backends(path: Path, parameters: dict[str, float] | None = None) -> tuple[CudaBackend, CpuBackend]:
    return CudaBackend(path, parameters or {}, "exact", GPU), CpuBackend(path, parameters or {}, "exact")


def known_nan(tensor: Tensor) -> bytes:
    """A tensor's bits; a NaN's payload may differ from machine to machine (kernels/port.cuh)."""
    whole = tensor.cpu()
    return (whole.where(~whole.isnan(), torch.nan) if whole.is_floating_point() else whole).numpy().tobytes()


def bits(env: VectorEnv) -> dict[str, bytes]:
    tensors = env.state_dict() | {field.name: env.field(field.name) for field in env.spec.fields}
    return {name: known_nan(tensor) for name, tensor in tensors.items() if name != "state"}


def require_same(envs: Sequence[VectorEnv], when: object) -> None:
    first, *others = map(bits, envs)
    for other in others:
        assert first == other, (when, [name for name in first if first[name] != other[name]])


def step(env: VectorEnv, number: int, q: Tensor) -> None:
    """At random, by softmax and by epsilon-greedy, in turn."""
    env.act(
        None if number % 3 == 0 else q.to(env.device),
        epsilon=torch.tensor([0.3], device=env.device),
        temperature=0.5 if number % 3 == 1 else 0.0,
    )
    env.step()


def play(envs: Sequence[VectorEnv], steps: int, every: int = 10) -> None:
    """Plays the same in all and compares every buffer; q has ties, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    for env in envs:
        env.reset()
    require_same(envs, "reset")
    for number in range(steps):
        q = torch.randn(envs[0].num_rows, envs[0].spec.num_actions, generator=generator).round(decimals=1)
        q[number % 7 :: 50] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0])[number % 5]
        q[number % 11 :: 60, 0] = torch.nan
        for env in envs:
            step(env, number, q)
        if number % every == every - 1:
            require_same(envs, number)
