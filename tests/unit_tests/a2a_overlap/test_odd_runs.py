"""Runs that are unusual but allowed: long ones, hooks on parameters, changes between steps, one failure at each op."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from host_models import build, config_of, differing, iteration, parallel, seed
from megatron.core.timers import Timers
from parity_testing import EXPERT_SIZE, Training, assert_same, forward_step, run, set_flag, train
from test_parity_mfsdp import assert_same_sharded

import combined_1f1b
from combined_1f1b.schedule import iteration as schedule_iteration

TIED = {"share_embeddings_and_output_weights": True, "mtp_num_layers": 1}


@pytest.fixture(autouse=True, params=[False, True], ids=["pairs", "head and tail too"])
def installed(device, request):
    options = combined_1f1b.OverlapOptions(pair_head_and_tail=request.param)
    with combined_1f1b.install(options), parallel(expert_model_parallel_size=EXPERT_SIZE):
        yield request.param


def steps_of_one_layer(*, combined: bool, sharded: bool, steps: int) -> Any:
    """Losses of every step, gradients of the last, parameters at the end."""
    model = build(expert_model_parallel_size=EXPERT_SIZE, num_layers=1)
    set_flag(model, combined)
    if sharded:
        model = combined_1f1b.shard_model(model, config_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if sharded:
        combined_1f1b.prepare_optimizer(optimizer, model)
    losses, gradients = [], {}
    for step in range(steps):
        losses += iteration(model, combined=combined, num_microbatches=2)
        if step == steps - 1:
            gradients = model.full_gradients() if sharded else {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    parameters = model.full_parameters() if sharded else dict(model.named_parameters())
    return losses, [gradients], parameters


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("sharded", "steps"), [(False, 50), (True, 15)])
def test_many_steps_stay_the_same_to_the_last_bit(installed, sharded, steps):
    runs = [steps_of_one_layer(combined=combined, sharded=sharded, steps=steps) for combined in (False, True)]
    if sharded:
        assert_same_sharded(*runs)
    else:
        assert_same(*(Training(*parts) for parts in runs))
    losses = runs[0][0]
    assert len(losses) == 2 * steps
    assert losses[-2] < losses[0], "it has learned the batch by heart"


@pytest.mark.world_size(1)
@pytest.mark.parametrize("changes", [{}, TIED], ids=["untied", "tied, multi-token prediction"])
def test_hooks_on_parameters_fire_as_often_and_see_the_same_gradients(changes):
    seen: list[dict[str, list[torch.Tensor]]] = []
    for combined in (False, True):
        model = build(expert_model_parallel_size=1, **changes)
        set_flag(model, combined)
        calls: dict[str, list[torch.Tensor]] = {}

        def keep(parameter, *, name, calls=calls):
            calls.setdefault(name, []).append(parameter.grad.clone())

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(keep, name=name))
        run(model, num_microbatches=4)
        seen.append(calls)
    reference, ours = seen
    assert reference.keys() == ours.keys()
    for name, gradients in reference.items():
        assert len(gradients) == 4
        assert all(torch.equal(a, b) for a, b in zip(gradients, ours[name], strict=True)), name


@pytest.mark.world_size(1)
@pytest.mark.parametrize("changes", [{}, TIED], ids=["untied", "tied, multi-token prediction"])
def test_a_hook_that_changes_gradients_changes_the_whole_gradient(changes):
    """A tied weight's hook must get the sum of all contributions, also of those that were held."""

    def hook_all(model):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.37 + 0.001)
        return model

    assert_same(*(train(combined=combined, prepare=hook_all, **changes) for combined in (False, True)))


@pytest.mark.world_size(1)
def test_models_lengths_and_numbers_of_microbatches_that_change_between_steps():
    def shorten(arguments, length):
        short = {name: arguments[name][:, :length] for name in ("input_ids", "labels", "position_ids")}
        return {**short, "attention_mask": arguments["attention_mask"][..., :length, :length]}

    runs = []
    for combined in (False, True):
        models = [build(expert_model_parallel_size=1), build(expert_model_parallel_size=1, num_layers=3, **TIED)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        result = Training()
        for number, (length, count) in enumerate([(8, 1), (5, 4), (3, 2), (1, 5), (7, 3), (8, 6)]):
            model, optimizer = models[number % 2], optimizers[number % 2]
            set_flag(model, combined)
            seed(3 + number)
            step = partial(forward_step, change_batch=partial(shorten, length=length))
            result.losses += [report["loss"] for report in run(model, num_microbatches=count, step=step)]
            optimizer.step()
            optimizer.zero_grad()
        result.parameters = {f"{i}.{name}": p for i, model in enumerate(models) for name, p in model.named_parameters()}
        runs.append(result)
    assert_same(*runs)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_timers_of_level_two_run_and_are_stopped_at_the_end(count):
    model = build(expert_model_parallel_size=1)
    set_flag(model, True)
    config_of(model).timers = timers = Timers(2, "minmax")
    for _ in range(2):
        run(model, num_microbatches=count)
    for name in ("forward-compute", "backward-compute", "forward-backward"):
        assert timers(name).elapsed(reset=False, barrier=False) > 0


@pytest.mark.world_size(1)
def test_timers_do_not_stand_in_the_way_of_a_retry():
    """Started and not stopped, Megatron's would refuse to start."""
    model = build(expert_model_parallel_size=1)
    set_flag(model, True)
    config_of(model).timers = Timers(2, "minmax")
    for _ in range(2):
        with pytest.raises(OSError, match="out of luck"):
            run(model, num_microbatches=3, step=partial(forward_step, loss=raising))
    run(model, num_microbatches=3)


def raising(_output):
    raise OSError("out of luck")


@pytest.mark.world_size(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_after_a_failure_at_any_kind_of_op_a_retry_gives_the_same_bits(monkeypatch, sharded):
    model = build(expert_model_parallel_size=1, num_layers=1, **TIED)
    set_flag(model, True)
    model = combined_1f1b.shard_model(model, config_of(model)) if sharded else model

    def attempt():
        losses = iteration(model, combined=True, num_microbatches=2)
        taken = model.full_gradients() if sharded else {n: p.grad.clone() for n, p in model.named_parameters()}
        return {**taken, **{f"loss {i}": loss for i, loss in enumerate(losses)}}

    def clear():
        if sharded:
            model.zero_grad_buffer()
        else:
            model.zero_grad()

    reference = attempt()
    clear()
    last: dict[str, int] = {}
    for index, op in enumerate(combined_1f1b.last_step().plan.ops):
        last[op.name.translate(str.maketrans("", "", "0123456789"))] = index
    handlers = schedule_iteration.handlers_of

    def failing(*arguments, at):
        def wrap(handler):
            def call(issue):
                references = handler(issue)
                if issue.index == at:
                    raise OSError("out of luck")
                return references

            return call

        return {kind: wrap(handler) for kind, handler in handlers(*arguments).items()}

    assert len(last) > (20 if sharded else 10)
    for name, index in last.items():
        with monkeypatch.context() as patch:
            patch.setattr(schedule_iteration, "handlers_of", lambda *arguments, at=index: failing(*arguments, at=at))
            with pytest.raises(OSError, match="out of luck"):
                attempt()
        clear()
        assert differing(reference, attempt()) == set(), name
        clear()
