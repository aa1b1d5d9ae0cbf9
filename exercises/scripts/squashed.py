# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[classic-control,toy-text,box2d]==1.4.0", "numpy==2.4.6"]
# ///
"""Squashed actions: a Gaussian that goes through tanh, as soft actor-critic needs it for actions between -1 and 1.

    python exercises/scripts/squashed.py

An action is a = tanh(u) with u drawn from N(mean, std). tanh presses the whole line into (-1, 1), most of all where it
is flat, so the density there is higher than that of u: what is pressed together gets denser. What is printed is the
share of drawn actions between two bounds, beside what the density says it is.
"""

import math

import torch
from torch.nn import functional as F


def log_slope(u):
    """log(1 - tanh(u)^2), the logarithm of the slope of tanh, for a tensor: each number by itself.

    2 (log 2 - u - softplus(-2u)) is the same, and stays exact where tanh(u) is rounded to 1 or -1.
    """
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def squashed_log_prob(mean, log_std, u):
    """log pi(a) (B,) of actions a = tanh(u): the sum over dimensions of log N(u; mean, std) - log(1 - tanh(u)^2).

    mean and u are (B, D), log_std is (D,). It is eq. 21 in appendix C of arXiv 1801.01290.
    """
    log_density = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
    return (log_density - log_slope(u=u)).sum(1)


def sample(mean, log_std, noise):
    """(actions (B, D), their log-probs (B,)) from noise (B, D), standard normal; gradients flow through both."""
    u = mean + log_std.exp() * noise
    return torch.tanh(u), squashed_log_prob(mean=mean, log_std=log_std, u=u)


def main():
    """Print how often actions fall between bounds, and how often they should."""
    torch.manual_seed(1)
    mean, log_std = torch.full((100_000, 1), 0.5), torch.zeros(1)
    actions, log_probs = sample(mean, log_std, torch.randn(100_000, 1))
    fine = torch.linspace(-1, 1, 200_001)[1:-1, None]  # of each action u = atanh(a)
    density = squashed_log_prob(mean=torch.full_like(fine, 0.5), log_std=log_std, u=torch.atanh(fine)).exp()
    print(" action between    drawn   density says")
    for i in range(10):
        low, high = -1 + 0.2 * i, -0.8 + 0.2 * i
        drawn = ((actions >= low) & (actions < high)).float().mean().item()
        told = density[(fine[:, 0] >= low) & (fine[:, 0] < high)].sum().item() * 2 / 200_000
        print(f"  {low:4.1f} and {high:4.1f}    {drawn:5.3f}          {told:5.3f}  {'#' * round(100 * told)}")
    print(f"entropy: {-log_probs.mean().item():.3f}; that of u is {0.5 * math.log(2 * math.pi * math.e):.3f}")


if __name__ == "__main__":
    main()
