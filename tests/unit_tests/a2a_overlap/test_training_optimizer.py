"""The optimizer's pieces that need no ranks: the learning rate, and main weights of 16-bit parameters."""

from __future__ import annotations

import pytest
import torch

from combined_1f1b.training.config import OptimizerConfig
from combined_1f1b.training.optimizer import MainWeights, learning_rate

pytestmark = pytest.mark.world_size(1)


def test_the_rate_warms_up_and_stays():
    config = OptimizerConfig(lr=1.0, lr_warmup_iters=4)
    assert [learning_rate(config, iteration, 10) for iteration in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rate_falls_by_half_a_cosine():
    config = OptimizerConfig(lr=1.0, min_lr=0.2, lr_warmup_iters=2, lr_decay_style="cosine")
    rates = [learning_rate(config, iteration, 10) for iteration in range(2, 13)]
    assert rates[0] == 1.0
    assert rates[4] == pytest.approx(0.6)  # half-way, the mean of both ends; the cosine is rounded
    assert rates[8] == rates[10] == 0.2
    assert rates == sorted(rates, reverse=True)


def test_main_weights_keep_what_sixteen_bits_lose():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.allreduce = False
    parameter.main_grad = torch.full((3,), 1.0)
    weights = MainWeights([parameter])
    (main,) = weights.parameters
    assert main.dtype is torch.float32
    assert main.allreduce is False
    optimizer = torch.optim.SGD(weights.parameters, lr=0.001)
    for _ in range(4):
        weights.take_gradients()
        assert main.grad.data_ptr() == parameter.main_grad.data_ptr()
        optimizer.step()
        weights.publish()
    # One step is below the resolution of bf16 at 1.0; four together are not.
    assert torch.equal(main, torch.full((3,), 1.0).sub(0.001).sub(0.001).sub(0.001).sub(0.001))
    assert torch.equal(parameter, main.to(torch.bfloat16))
    assert not torch.equal(parameter, torch.ones(3, dtype=torch.bfloat16))


def test_fp32_parameters_stand_for_themselves():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert MainWeights([parameter]).parameters[0] is parameter
