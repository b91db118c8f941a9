"""What stands in the place of Megatron's three functions while installed: signatures, and nothing of the schedule.

Each asks the installation for the model's cut, the options and what has to be said once, and hands the rest to the
driver of its kind of pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import find_megatron_fsdp
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from combined_1f1b.config import FLAG, check_config
from combined_1f1b.errors import ConfigError, OverlapError
from combined_1f1b.schedule.interleaved import InterleavedIteration
from combined_1f1b.schedule.iteration import check_plan, pipeline_of
from combined_1f1b.schedule.no_pipelining import run_iteration
from combined_1f1b.schedule.pipeline_order import Call
from combined_1f1b.schedule.pipelining import PipelineCall, run_pipeline
from combined_1f1b.schedule.step import StepInputs

if TYPE_CHECKING:
    from combined_1f1b.registration import Installation

_KEEPS_ITS_OWN = "the model is wrapped in MFSDP v1: Megatron's own combined schedule runs it"


def no_pipelining(installation: Installation, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `combined_1f1b_schedule_for_no_pipelining`."""

    @wraps(original)
    def driver(
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: torch.nn.Module,
        num_microbatches: int,
        input_tensor: Any,
        output_tensor_grad: Any,
        forward_data_store: list[Any],
        config: TransformerConfig,
        collect_non_loss_data: bool,
        first_val_step: bool | None,
        forward_only: bool,
        no_sync_func: Callable[..., Any],
        total_num_tokens: torch.Tensor,
        check_first_val_step: Callable[[bool], bool],
    ) -> tuple[list[Any], torch.Tensor]:
        if find_megatron_fsdp(model) is not None:
            installation.tell_once(_KEEPS_ITS_OWN)
            return original(
                forward_step_func, data_iterator, model, num_microbatches, input_tensor, output_tensor_grad,
                forward_data_store, config, collect_non_loss_data, first_val_step, forward_only, no_sync_func,
                total_num_tokens, check_first_val_step,
            )  # fmt: skip
        check_config(config)
        chunk = installation.chunk(model)
        installation.agree(num_microbatches, model=model)
        inputs = StepInputs(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            config=config,
            forward_data_store=forward_data_store,
            collect_non_loss_data=collect_non_loss_data,
            is_first_microbatch=lambda index: check_first_val_step(index == 0),
            no_sync=no_sync_func,
        )
        installation.last_step, num_tokens = run_iteration(inputs, chunk=chunk, options=installation.options)
        for tokens in num_tokens:
            total_num_tokens += tokens
        return forward_data_store, total_num_tokens

    return driver


def interleaved(installation: Installation, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `combined_1f1b_schedule_for_interleaved_pipelining`, called once for each slot."""

    @wraps(original)
    def driver(
        config: TransformerConfig,
        forward_step_func: Callable[..., Any],
        data_iterator: list[Any],
        model: list[torch.nn.Module],
        num_microbatches: int,
        forward_data_store: list[Any],
        take_input: Callable[..., Any],
        keep_output: Callable[..., Any],
        take_gradient: Callable[..., Any],
        after_backward: Callable[..., Any],
        microbatch_of: Callable[..., int],
        chunk_of: Callable[..., int],
        check_first_val_step: Callable[[bool], bool],
        _is_first_of_chunk: Callable[[int], bool],
        collect_non_loss_data: bool,
        f_virtual_microbatch_id: int | None = None,
        b_virtual_microbatch_id: int | None = None,
        pre_forward: Callable[..., Any] | None = None,
        pre_backward: Callable[..., Any] | None = None,
        post_forward: Callable[..., Any] | None = None,
        post_backward: Callable[..., Any] | None = None,
    ) -> tuple[Any, Any]:
        if any(find_megatron_fsdp(one) is not None for one in model):
            installation.tell_once(_KEEPS_ITS_OWN)
            return original(  # type: ignore[no-any-return]
                config, forward_step_func, data_iterator, model, num_microbatches, forward_data_store, take_input,
                keep_output, take_gradient, after_backward, microbatch_of, chunk_of, check_first_val_step,
                _is_first_of_chunk, collect_non_loss_data, f_virtual_microbatch_id, b_virtual_microbatch_id,
                pre_forward, pre_backward, post_forward, post_backward,
            )  # fmt: skip
        forward = backward = input_tensor = input_of_backward = output_gradient = None
        if f_virtual_microbatch_id is not None:
            turn = f_virtual_microbatch_id
            forward = Call(turn, microbatch_of(turn, forward=True), chunk_of(turn, forward=True))
        if forward is not None and forward.turn == 0:
            _start_interleaved(
                installation,
                [
                    StepInputs(
                        forward_step_func=forward_step_func,
                        data_iterator=data,
                        model=one,
                        num_microbatches=num_microbatches,
                        config=config,
                        forward_data_store=forward_data_store,
                        collect_non_loss_data=collect_non_loss_data,
                        is_first_microbatch=lambda index: check_first_val_step(index == 0),
                    )
                    for one, data in zip(model, data_iterator, strict=True)
                ],
            )
        iteration = installation.interleaved
        assert iteration is not None, "Megatron's first call of an iteration is a forward"
        try:
            if forward is not None:
                input_tensor = take_input(forward.turn, forward.chunk, forward.microbatch)
            if b_virtual_microbatch_id is not None:
                turn = b_virtual_microbatch_id
                # Megatron's table for forwards holds for backwards too, with the chunks in reverse.
                backward = Call(turn, microbatch_of(turn, forward=True), chunk_of(turn, forward=False))
                input_of_backward, _, output_gradient = take_gradient(turn, backward.chunk)

            def before() -> None:
                if forward is not None and pre_forward is not None:
                    pre_forward(forward.chunk)
                if backward is not None and pre_backward is not None:
                    pre_backward(backward.chunk)

            output, num_tokens, input_gradient = iteration.run(
                forward=forward,
                backward=backward,
                input_tensor=input_tensor,
                output_gradient=output_gradient,
                before=before,
            )
            if forward is not None:
                if post_forward is not None:
                    post_forward(output, forward.chunk)
                keep_output(forward.chunk, output, num_tokens)
            if backward is not None:
                assert (input_of_backward is None) == (input_gradient is None), "an input and no gradient"
                if post_backward is not None:
                    post_backward(input_gradient, backward.chunk)
                after_backward(backward.turn)
        except BaseException as error:
            installation.cut_off(error)
            raise
        if iteration.is_over:
            installation.interleaved = None
            installation.last_step = iteration.finish()
        return output, input_gradient

    return driver


def _start_interleaved(installation: Installation, inputs: list[StepInputs]) -> None:
    """A first forward starts an iteration. What `around_interleaved` checks is checked here again: Megatron's function
    may have been fetched before `install`."""
    models = [one.model for one in inputs]
    installation.cut_off(OverlapError("given up between two slots"))
    installation.refuse_if_cut_off()
    check_config(inputs[0].config)
    installation.agree(inputs[0].num_microbatches, model=models[0])
    installation.interleaved = InterleavedIteration(inputs, **_place(installation, models))


def _place(installation: Installation, models: list[torch.nn.Module]) -> dict[str, Any]:
    """What a rank's plan depends on, beside the number of micro-batches."""
    chunks = [installation.chunk(model, is_whole=False) for model in models]
    group = chunks[0].model.pg_collection.pp
    return {
        "chunks": chunks,
        "options": installation.options,
        "pipeline": pipeline_of(get_model_config(models[0]), size=group.size(), rank=group.rank(), chunks=len(models)),
    }


def around_interleaved(installation: Installation, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `forward_backward_pipelining_with_interleaving`.

    It checks before Megatron's first transfer what `interleaved` would find too late, since a stage comes there only
    when the one before has sent; and it says where a failure between slots happened.
    """

    @wraps(original)
    def driver(**arguments: Any) -> Any:
        models, count = arguments["model"], arguments["num_microbatches"]
        config = get_model_config(models[0])
        if (
            getattr(config, FLAG)
            and not arguments.get("forward_only")
            and not any(find_megatron_fsdp(model) is not None for model in models)
        ):
            installation.refuse_if_cut_off()
            check_config(config)
            installation.agree(count, model=models[0], across_stages=True)
            check_plan(models, num_microbatches=count, **_place(installation, models))
        try:
            return original(**arguments)
        except BaseException as error:
            installation.cut_off(error)
            raise

    return driver


def pipelining(installation: Installation, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `forward_backward_pipelining_without_interleaving`."""

    @wraps(original)
    def driver(**arguments: Any) -> Any:
        model, data = arguments["model"], arguments["data_iterator"]
        model = model[0] if isinstance(model, list) and len(model) == 1 else model
        communicator, groups = arguments.get("p2p_communicator"), arguments.get("pg_collection")
        if (
            isinstance(model, list)
            or not getattr(get_model_config(model), FLAG)
            or arguments.get("forward_only")
            or isinstance(communicator, MultiModulePipelineCommunicator)
            or isinstance(groups, MultiModuleProcessGroupCollection)
        ):
            return original(**arguments)
        config = get_model_config(model)
        check_config(config)
        if find_megatron_fsdp(model) is not None:
            # Under the flag its hooks wait for Megatron's combined schedule, which does not exist here.
            raise ConfigError.of(
                FLAG, True, "the model is wrapped in MFSDP v1, which no combined schedule of pipelines can drive",
                "use combined_1f1b.shard_model (MFSDP v2), or set it to False before wrapping",
            )  # fmt: skip
        if communicator is None and groups is None:
            group = parallel_state.get_pipeline_model_parallel_group()
            communicator = P2PCommunicator(pp_group=group, config=config)
            groups = schedules._build_default_pg_collection()
        elif communicator is None or groups is None:
            raise ValueError("Provide both p2p_communicator and pg_collection, or neither")
        links = installation.links(communicator)
        links.begin()  # before whatever can fail on one rank alone: the ranks count iterations alike
        chunk = installation.chunk(model, is_whole=False)
        installation.agree(arguments["num_microbatches"], model=model, across_stages=True)
        installation.last_step, reports = run_pipeline(
            PipelineCall(
                forward_step_func=arguments["forward_step_func"],
                data_iterator=data[0] if isinstance(data, list) else data,
                model=model,
                num_microbatches=arguments["num_microbatches"],
                seq_length=arguments["seq_length"],
                micro_batch_size=arguments["micro_batch_size"],
                decoder_seq_length=arguments.get("decoder_seq_length"),
                collect_non_loss_data=arguments.get("collect_non_loss_data", False),
                adjust_tensor_shapes_fn=arguments.get("adjust_tensor_shapes_fn"),
                communicator=communicator,
                groups=groups,
                force_all_reduce=arguments.get("force_all_reduce", False),
            ),
            chunk=chunk,
            options=installation.options,
            links=links,
        )
        return reports

    return driver
