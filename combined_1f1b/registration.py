"""install() and uninstall(): the only contact with Megatron's entry points.

Four names are rebound while installed, and put back exactly by `uninstall`:

    megatron.core.pipeline_parallel.schedules.combined_1f1b_schedule_for_no_pipelining            PP=1
    megatron.core.pipeline_parallel.schedules.combined_1f1b_schedule_for_interleaved_pipelining   PP>1 with VPP
    megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving    PP>1 without VPP
    megatron.core.transformer.TransformerConfig.__post_init__                                     checks flags our way

The first two are looked up at each call. The third is what `get_forward_backward_func` returns, so one that was fetched
before stays Megatron's. The state lives on one object that the replacements close over, and is found through them; with
the flag off they are never reached, or call straight on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import find_megatron_fsdp
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from combined_1f1b.config import FLAG, OverlapOptions, check_config, check_disabled
from combined_1f1b.errors import ConfigError, SurfaceError
from combined_1f1b.schedule.interleaved import InterleavedIteration, pipeline_of
from combined_1f1b.schedule.iteration import StepReport
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.links import PipelineLinks
from combined_1f1b.schedule.model_check import check_hooks, check_model, innermost_model
from combined_1f1b.schedule.no_pipelining import run_iteration
from combined_1f1b.schedule.pipeline_order import Call
from combined_1f1b.schedule.pipelining import PipelineCall, run_pipeline
from combined_1f1b.schedule.step import StepInputs

logger = logging.getLogger(__name__)

_DRIVER = "combined_1f1b_schedule_for_no_pipelining"
_INTERLEAVED = "combined_1f1b_schedule_for_interleaved_pipelining"
_PIPELINING = "forward_backward_pipelining_without_interleaving"
_CHUNK = "_combined_1f1b_chunk"
_NEEDS_FLAG = ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release")


class Installation:
    """What `install` puts in place of Megatron's names, and what was there before.

    Also a context manager: leaving it uninstalls.
    """

    def __init__(self, options: OverlapOptions) -> None:
        self.options = options
        self.last_step: StepReport | None = None
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._entered: list[OverlapOptions | None] = []
        self.replaced_options: OverlapOptions | None = None
        self._agreed: tuple[int, int] | None = None
        self._told: set[str] = set()
        self._interleaved: InterleavedIteration | None = None
        self._links: dict[int, PipelineLinks] = {}
        self.original_driver: Callable[..., Any] = getattr(schedules, _DRIVER)
        self._originals = {name: getattr(schedules, name) for name in (_DRIVER, _INTERLEAVED, _PIPELINING)}
        self.original_post_init: Callable[[Any], None] = TransformerConfig.__post_init__
        setattr(schedules, _DRIVER, self._make_driver())
        setattr(schedules, _INTERLEAVED, self._make_interleaved())
        setattr(schedules, _PIPELINING, self._make_pipelining())
        TransformerConfig.__post_init__ = self._make_post_init()  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put Megatron's own names back."""
        for name, original in self._originals.items():
            setattr(schedules, name, original)
        TransformerConfig.__post_init__ = self.original_post_init  # type: ignore[method-assign]
        for model in self._models:
            vars(model).pop(_CHUNK, None)

    def __enter__(self) -> Installation:
        self._entered.append(self.replaced_options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outer = self._entered.pop()
        if outer is None:
            uninstall()
        else:
            self.options = outer

    def _make_driver(self) -> Callable[..., Any]:
        @wraps(self.original_driver)
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
                self._tell_once("the model is wrapped in MFSDP v1: Megatron's own combined schedule runs it")
                return self.original_driver(
                    forward_step_func, data_iterator, model, num_microbatches, input_tensor, output_tensor_grad,
                    forward_data_store, config, collect_non_loss_data, first_val_step, forward_only, no_sync_func,
                    total_num_tokens, check_first_val_step,
                )  # fmt: skip
            check_config(config)
            chunk = self._chunk(model)
            self._agree(num_microbatches)
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
            self.last_step, num_tokens = run_iteration(inputs, chunk=chunk, options=self.options)
            for tokens in num_tokens:
                total_num_tokens += tokens
            return forward_data_store, total_num_tokens

        driver.installation = self  # type: ignore[attr-defined]
        return driver

    def _make_interleaved(self) -> Callable[..., Any]:
        original = self._originals[_INTERLEAVED]

        @wraps(original)
        def interleaved(
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
            forward = backward = input_tensor = input_of_backward = output_gradient = None
            if f_virtual_microbatch_id is not None:
                turn = f_virtual_microbatch_id
                forward = Call(turn, microbatch_of(turn, forward=True), chunk_of(turn, forward=True))
            if forward is not None and forward.turn == 0:
                self._start_interleaved(
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
                    ]
                )
            iteration = self._interleaved
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
            except BaseException:
                self._interleaved = None
                raise
            if iteration.is_over:
                self._interleaved = None
                self.last_step = iteration.finish()
            return output, input_gradient

        return interleaved

    def _start_interleaved(self, inputs: list[StepInputs]) -> None:
        """A first forward starts an iteration; one that is still open failed in Megatron's part of it."""
        left, self._interleaved = self._interleaved, None
        if left is not None:
            left.abort(RuntimeError("the iteration was not run to its end"))
        config = inputs[0].config
        check_config(config)
        group = parallel_state.get_pipeline_model_parallel_group()
        self._interleaved = InterleavedIteration(
            inputs,
            chunks=[self._chunk(one.model, is_whole=False) for one in inputs],
            options=self.options,
            pipeline=pipeline_of(config, size=group.size(), rank=group.rank(), chunks=len(inputs)),
        )

    def _make_pipelining(self) -> Callable[..., Any]:
        original = self._originals[_PIPELINING]

        @wraps(original)
        def pipelining(**arguments: Any) -> Any:
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
            chunk = self._chunk(model, is_whole=False)
            if communicator is None and groups is None:
                group = parallel_state.get_pipeline_model_parallel_group()
                communicator = P2PCommunicator(pp_group=group, config=config)
                groups = schedules._build_default_pg_collection()
            elif communicator is None or groups is None:
                raise ValueError("Provide both p2p_communicator and pg_collection, or neither")
            links = self._links.setdefault(id(communicator.pp_group), PipelineLinks(communicator))
            self._agree(arguments["num_microbatches"])
            self.last_step, reports = run_pipeline(
                PipelineCall(
                    forward_step_func=arguments["forward_step_func"],
                    data_iterator=data[0] if isinstance(data, list) else data,
                    model=model,
                    num_microbatches=arguments["num_microbatches"],
                    seq_length=arguments["seq_length"],
                    micro_batch_size=arguments["micro_batch_size"],
                    decoder_seq_length=arguments.get("decoder_seq_length"),
                    collect_non_loss_data=arguments.get("collect_non_loss_data", False),
                    first_val_step=arguments.get("first_val_step"),
                    adjust_tensor_shapes_fn=arguments.get("adjust_tensor_shapes_fn"),
                    communicator=communicator,
                    groups=groups,
                    force_all_reduce=arguments.get("force_all_reduce", False),
                ),
                chunk=chunk,
                options=self.options,
                links=links,
            )
            return reports

        return pipelining

    def _chunk(self, model: torch.nn.Module, *, is_whole: bool = True) -> ModelChunk:
        """The model, cut into nodes. It is kept on the model itself: it refers to the model and should end with it."""
        inner = innermost_model(model)
        chunk: ModelChunk | None = vars(inner).get(_CHUNK)
        if chunk is None or not chunk.is_current():
            check_model(inner, is_whole=is_whole)
            chunk = vars(inner)[_CHUNK] = ModelChunk(inner)
            self._models.add(inner)
        check_hooks(model, inner)
        return chunk

    def _agree(self, num_microbatches: int) -> None:
        """Compare the number of micro-batches across ranks at the first iteration and whenever it changes here.

        Ranks that disagree would wait for each other inside an all-to-all. A rank that changes alone gets an error from
        this comparison, and the others from the collective that it is missing in.
        """
        if torch.cuda.is_current_stream_capturing():
            return  # reading the answer would synchronise; the iterations that warmed up have compared
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        if self._agreed == (num_microbatches, id(group)):
            return
        mine = torch.tensor([num_microbatches], dtype=torch.int64, device=torch.cuda.current_device())
        everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
        try:
            torch.distributed.all_gather(everyone, mine, group=group)
        except RuntimeError as error:
            error.add_note(f"num_microbatches={num_microbatches} on this rank: ranks may disagree on it")
            raise
        counts = [int(count) for count in everyone]
        if len(set(counts)) > 1:
            self._agreed = None
            raise ConfigError.of(
                "num_microbatches", num_microbatches, f"ranks disagree, by rank of the data-parallel group: {counts}",
                "give every rank the same number of micro-batches",
            )  # fmt: skip
        self._agreed = (num_microbatches, id(group))

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.info("combined_1f1b: %s", message)

    def _make_post_init(self) -> Callable[[Any], None]:
        original = self.original_post_init

        @wraps(original)
        def post_init(config: Any) -> None:
            if not getattr(config, FLAG):
                check_disabled(config)
                original(config)
                return
            # Megatron's own checks of the flag refuse what this package runs: they see it off, and ours follow.
            hidden = {name: getattr(config, name) for name in (FLAG, *_NEEDS_FLAG)}
            try:
                for name in hidden:
                    setattr(config, name, False)
                original(config)
            finally:
                for name, value in hidden.items():
                    setattr(config, name, value)
            check_config(config)

        return post_init


def _current() -> Installation | None:
    """The installation behind Megatron's entry point, if there is one: what is rebound is the only state."""
    if not hasattr(schedules, _DRIVER):
        raise SurfaceError(f"megatron.core.pipeline_parallel.schedules.{_DRIVER} has gone: use megatron-core 0.19.x")
    installation: Installation | None = getattr(getattr(schedules, _DRIVER), "installation", None)
    return installation


def install(options: OverlapOptions | None = None) -> Installation:
    """Let `overlap_moe_expert_parallel_comm` select this package's schedule.

    Idempotent: a second call replaces the options. The result is a context manager: leaving it uninstalls, or puts the
    options back that the call has replaced.

    Args:
        options: what Megatron's config has no field for; None means the defaults.

    Raises:
        ConfigError: an option cannot work.
        SurfaceError: a name of Megatron has gone.
    """
    options = OverlapOptions() if options is None else options
    installation = _current()
    if installation is None:
        return Installation(options)
    installation.replaced_options, installation.options = installation.options, options
    return installation


def uninstall() -> None:
    """Put Megatron's own entry points back. Does nothing when nothing is installed."""
    installation = _current()
    if installation is not None:
        installation.remove()


def enable(config: TransformerConfig) -> None:
    """Set the flag on a built config, after this package's checks.

    Raises:
        ConfigError: a setting that cannot work with the schedule; the flag stays as it was.
    """
    check_config(config)
    setattr(config, FLAG, True)


def last_step() -> StepReport | None:
    """The report of the last iteration that this package's schedule ran, or None."""
    installation = _current()
    return None if installation is None else installation.last_step
