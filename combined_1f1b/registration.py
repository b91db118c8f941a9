"""install() and uninstall(): the only contact with Megatron's entry points.

Two names are rebound while installed, and put back exactly by `uninstall`:

    megatron.core.pipeline_parallel.schedules.combined_1f1b_schedule_for_no_pipelining    looked up at each call
    megatron.core.transformer.TransformerConfig.__post_init__                             checks the flag our way

The state lives on one object that the replacements close over, and is found through them; with the flag off they are
never reached, or call straight on.
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
from megatron.core.transformer.transformer_config import TransformerConfig

from combined_1f1b.config import FLAG, OverlapOptions, check_config, check_disabled
from combined_1f1b.errors import ConfigError, SurfaceError
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.model_check import check_hooks, check_model, innermost_model
from combined_1f1b.schedule.no_pipelining import StepReport, run_iteration
from combined_1f1b.schedule.step import StepInputs

logger = logging.getLogger(__name__)

_DRIVER = "combined_1f1b_schedule_for_no_pipelining"
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
        self.original_driver: Callable[..., Any] = getattr(schedules, _DRIVER)
        self.original_post_init: Callable[[Any], None] = TransformerConfig.__post_init__
        setattr(schedules, _DRIVER, self._make_driver())
        TransformerConfig.__post_init__ = self._make_post_init()  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put Megatron's own names back."""
        setattr(schedules, _DRIVER, self.original_driver)
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
            self._agree(num_microbatches, next(chunk.model.parameters()).device)
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

    def _chunk(self, model: torch.nn.Module) -> ModelChunk:
        """The model, cut into nodes. It is kept on the model itself: it refers to the model and should end with it."""
        inner = innermost_model(model)
        chunk: ModelChunk | None = vars(inner).get(_CHUNK)
        if chunk is None or not chunk.is_current():
            check_model(inner)
            chunk = vars(inner)[_CHUNK] = ModelChunk(inner)
            self._models.add(inner)
        check_hooks(model, inner)
        return chunk

    def _agree(self, num_microbatches: int, device: torch.device) -> None:
        """Compare the number of micro-batches across ranks at the first iteration and whenever it changes here.

        Ranks that disagree would wait for each other inside an all-to-all. A rank that changes alone gets an error from
        this comparison, and the others from the collective that it is missing in.
        """
        if torch.cuda.is_current_stream_capturing():
            return  # reading the answer would synchronise; the iterations that warmed up have compared
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        if self._agreed == (num_microbatches, id(group)):
            return
        mine = torch.tensor([num_microbatches], dtype=torch.int64, device=device)
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
