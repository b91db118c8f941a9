"""Pipelines without virtual stages: bitwise parity with Megatron's 1F1B, on 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from host_models import config_of, parallel
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from parity_testing import forward_step
from pipeline_testing import Stages, assert_same_run, run_pipeline, set_flags, train

import combined_1f1b
from combined_1f1b.errors import ConfigError

TIED = {"share_embeddings_and_output_weights": True}
CASES: dict[str, dict[str, Any]] = {
    "two layers each": {"num_layers": 4},
    "one layer each": {},
    "dense last": {"num_layers": 4, "moe_layer_freq": [1, 1, 1, 0]},
    "tied": TIED,
    "multi-token prediction, tied": {"mtp_num_layers": 1, **TIED},
    "shared experts": {"moe_shared_expert_intermediate_size": 16},
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    "delayed weight gradients": {"delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": True},
    "dropout": {"hidden_dropout": 0.1},
    "uneven": {"num_layers": 3, "num_layers_in_first_pipeline_stage": 1},
    "the embedding alone": {"pipeline_model_parallel_layout": "E|ttL"},
    "outputs deallocated": {"deallocate_pipeline_outputs": True},
}


@pytest.fixture(autouse=True)
def installed(device):
    with combined_1f1b.install():
        yield


def two_stages() -> Any:
    return parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=torch.distributed.get_world_size() // 2)


@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_two_stages(changes):
    if torch.distributed.get_world_size() == 4 and changes not in (CASES["one layer each"], TIED):
        pytest.skip("runs on 2 ranks")
    with two_stages():
        stages = Stages(pp=2, changes=changes)
        reference = train(stages, combined=False)
        assert_same_run(reference, train(stages, combined=True))
        report = combined_1f1b.last_step()
        if "pipeline_model_parallel_layout" not in changes:  # a stage without layers pairs with nothing
            assert report.forward_backward_pairs == 4 - (2 * (1 - report.plan.shape.rank) + 1)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 9])
def test_four_stages(num_microbatches):
    with parallel(pipeline_model_parallel_size=4):
        stages = Stages(pp=4)
        reference = train(stages, combined=False, num_microbatches=num_microbatches)
        assert_same_run(reference, train(stages, combined=True, num_microbatches=num_microbatches))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("num_microbatches", [2, 6])
@pytest.mark.parametrize("changes", [{}, {"hidden_dropout": 0.1}, {"delay_wgrad_compute": True, **TIED}])
def test_head_and_tail_paired(changes, num_microbatches):
    with two_stages():
        if "delay_wgrad_compute" in changes:
            changes = {**changes, "overlap_moe_expert_parallel_comm": True}
        stages = Stages(pp=2, changes=changes)
        reference = train(stages, combined=False, num_microbatches=num_microbatches)
        combined_1f1b.install(combined_1f1b.OverlapOptions(pair_head_and_tail=True))
        assert_same_run(reference, train(stages, combined=True, num_microbatches=num_microbatches))
        report = combined_1f1b.last_step()
        assert report.head_pairs + report.tail_pairs > 0


@pytest.mark.world_size(4)
@pytest.mark.parametrize("with_function", [False, True], ids=["own synchronisation", "grad_sync_func"])
def test_megatrons_ddp(with_function):
    """Later stages synchronise in the pipeline's bubble when there is a grad_sync_func; tied embeddings add up."""

    def prepare(chunks: list[Any]) -> list[Any]:
        config = config_of(chunks[0])
        settings = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=400)
        model = DistributedDataParallel(config, settings, chunks[0])
        config.no_sync_func, config.finalize_model_grads_func = model.no_sync, finalize_model_grads
        config.grad_sync_func = model.start_grad_sync if with_function else None
        return [model]

    def gradients(*, combined: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        chunks = prepare(Stages(pp=2, changes=TIED).build())
        set_flags(chunks, combined)
        losses = []
        for _ in range(2):
            chunks[0].zero_grad_buffer()
            losses += [report["loss"] for report in run_pipeline(chunks, num_microbatches=4)]
        return losses, {name: p.main_grad.clone() for name, p in chunks[0].named_parameters()}

    with two_stages():
        torch.testing.assert_close(gradients(combined=True), gradients(combined=False), rtol=0, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("with_function", [False, True], ids=["own synchronisation", "grad_sync_func"])
def test_what_megatrons_function_does_around_its_schedule_happens_here_too(with_function):
    def told(*, combined: bool) -> tuple[list[Any], dict[str, list[bool]]]:
        (chunk,) = Stages(pp=2, changes={"calculate_per_token_loss": True}).build()
        set_flags([chunk], combined)
        config, events, inside = config_of(chunk), [], []
        synchronised: dict[str, list[bool]] = {}

        @contextmanager
        def no_sync() -> Iterator[None]:
            inside.append(chunk)
            yield
            inside.pop()

        def finalize(models: list[Any], tokens: torch.Tensor, *, force_all_reduce: bool, **_: Any) -> None:
            events.append(("finalize", len(models), int(tokens), force_all_reduce, len(inside)))

        def synchronise(parameters: Any) -> None:
            events.append(("synchronise", len(list(parameters)), len(inside)))

        def step(data: Any, model: Any) -> Any:
            def loss(output: torch.Tensor) -> Any:
                return output.float().sum(), torch.tensor(output.numel()), {"loss": output.detach().sum()}

            return forward_step(data, model, loss=loss)

        config.no_sync_func, config.finalize_model_grads_func = no_sync, finalize
        config.grad_sync_func = synchronise if with_function else None
        chunk.set_is_first_microbatch = lambda: events.append("first micro-batch")
        for name, parameter in chunk.named_parameters():
            seen = synchronised.setdefault(name, [])
            parameter.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append(not inside))
        run_pipeline([chunk], num_microbatches=3, step=step, force_all_reduce=True)
        return events, synchronised

    with two_stages():
        reference = told(combined=False)
        assert told(combined=True) == reference
        # Of the later stages' gradients none is synchronised in a backward when there is a function for it.
        is_later = not parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        assert any(any(seen) for seen in reference[1].values()) == (not (with_function and is_later))


@pytest.mark.world_size(2)
def test_groups_communicators_and_shapes_may_be_given():
    with two_stages():
        chunks = Stages(pp=2).build()
        set_flags(chunks, True)
        group = parallel_state.get_pipeline_model_parallel_group()
        given = {
            "p2p_communicator": P2PCommunicator(pp_group=group, config=config_of(chunks[0])),
            "pg_collection": schedules._build_default_pg_collection(),
        }
        shapes = []

        def adjust(received: Any, sent: Any) -> Any:
            shapes.append((received, sent))
            return received, sent

        run_pipeline(chunks, num_microbatches=2, adjust_tensor_shapes_fn=adjust, **given)
        assert len(shapes) == 1
        with pytest.raises(ConfigError, match="adjust_tensor_shapes_fn"):
            run_pipeline(chunks, num_microbatches=2, adjust_tensor_shapes_fn=lambda a, b: (a * 2, b * 2), **given)
        with pytest.raises(ValueError, match="both"):
            run_pipeline(chunks, num_microbatches=2, p2p_communicator=given["p2p_communicator"])


@pytest.mark.world_size(2)
def test_a_function_fetched_before_install_stays_megatrons():
    with two_stages():
        combined_1f1b.uninstall()
        before = get_forward_backward_func()
        with combined_1f1b.install():
            assert get_forward_backward_func() is not before
            chunks = Stages(pp=2).build()
            set_flags(chunks, False)
            run_pipeline(chunks, num_microbatches=2)
            assert combined_1f1b.last_step() is None
        assert get_forward_backward_func() is before
