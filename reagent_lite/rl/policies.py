"""Policies over [B, K] choices: from values to propensities, and to draws."""

import torch
from torch import Tensor


def softmax_policy(q: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Returns softmax(q / temperature) over allowed choices, [B, K]; a row with none allowed gives zeros."""
    masked = q.masked_fill(~mask, torch.finfo(q.dtype).min)
    # the largest is subtracted first: large values divided by a small temperature leave no digits
    return ((masked - masked.amax(1, keepdim=True)) / temperature).softmax(1) * mask


def epsilon_greedy_policy(q: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Returns epsilon / (number allowed) on each allowed choice and the rest on the greedy one, [B, K]."""
    allowed = mask.to(q.dtype)
    uniform = allowed / allowed.sum(1, keepdim=True).clamp(min=1)
    greedy = torch.zeros_like(q).scatter_(1, q.masked_fill(~mask, -torch.inf).argmax(1, keepdim=True), 1.0)
    return epsilon * uniform + (1 - epsilon) * greedy * allowed


def likely_enough(logits: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Returns the allowed choices whose probability is at least threshold times the largest, [B, K] bool.

    Discrete BCQ's filter: Fujimoto et al. (2019), Benchmarking Batch Deep RL, eq. 10. Softmax ratios are
    exp(logit - largest logit), so nothing is normalized.
    """
    masked = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    return mask & ((masked - masked.amax(1, keepdim=True)).exp() >= threshold)
