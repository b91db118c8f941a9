"""install() and uninstall(): the only contact with Megatron's entry points, for the bench too (`set_aside`).

Five names are rebound while installed, and put back exactly by `uninstall`:

    megatron.core.pipeline_parallel.schedules.combined_1f1b_schedule_for_no_pipelining            PP=1
    megatron.core.pipeline_parallel.schedules.combined_1f1b_schedule_for_interleaved_pipelining   PP>1 with VPP
    megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving    PP>1 without VPP
    megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving       notes on failures
    megatron.core.transformer.TransformerConfig.__post_init__                                     checks flags our way

The first two are looked up at each call. The next two are what `get_forward_backward_func` returns, so what was fetched
before stays Megatron's. The state lives on one object that the replacements close over, and is found through them; with
the flag off they are never reached, or call straight on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from combined_1f1b import entry_points
from combined_1f1b.config import FLAG, OverlapOptions, check_config, check_disabled
from combined_1f1b.errors import ConfigError, OverlapError, SurfaceError
from combined_1f1b.schedule.interleaved import InterleavedIteration
from combined_1f1b.schedule.iteration import StepReport
from combined_1f1b.schedule.layer_plan import ModelChunk
from combined_1f1b.schedule.links import PipelineLinks
from combined_1f1b.schedule.model_check import check_hooks, check_model, innermost_model

logger = logging.getLogger(__name__)

_DRIVER = "combined_1f1b_schedule_for_no_pipelining"
_ENTRY_POINTS: dict[str, Callable[[Installation, Callable[..., Any]], Callable[..., Any]]] = {
    _DRIVER: entry_points.no_pipelining,
    "combined_1f1b_schedule_for_interleaved_pipelining": entry_points.interleaved,
    "forward_backward_pipelining_with_interleaving": entry_points.around_interleaved,
    "forward_backward_pipelining_without_interleaving": entry_points.pipelining,
}
_CHUNK = "_combined_1f1b_chunk"
_NEEDS_FLAG = ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release")


class Installation:
    """What `install` puts in place of Megatron's names, and what was there before.

    Also a context manager: leaving it uninstalls.

    Attributes:
        options: what Megatron's config has no field for.
        last_step: the report of the last iteration that ran to its end.
        interleaved: the iteration that Megatron's interleaved driver is in the middle of.
        is_cut_off: whether such an iteration failed, with transfers of Megatron's on their way.
    """

    def __init__(self, options: OverlapOptions) -> None:
        self.options = options
        self.last_step: StepReport | None = None
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._entered: list[OverlapOptions | None] = []
        self.replaced_options: OverlapOptions | None = None
        self._agreed: tuple[int, list[Any]] | None = None
        self._told: set[str] = set()
        self.interleaved: InterleavedIteration | None = None
        self.is_cut_off = False
        self._links: dict[Any, PipelineLinks] = {}
        for name in _ENTRY_POINTS:
            _require(name)
        self._originals = {name: getattr(schedules, name) for name in _ENTRY_POINTS}
        self.original_post_init: Callable[[Any], None] = TransformerConfig.__post_init__
        for name, make in _ENTRY_POINTS.items():
            entry_point = make(self, self._originals[name])
            entry_point.installation = self  # type: ignore[attr-defined]
            setattr(schedules, name, entry_point)
        TransformerConfig.__post_init__ = self._make_post_init()  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put Megatron's own names back."""
        for name, original in self._originals.items():
            setattr(schedules, name, original)
        TransformerConfig.__post_init__ = self.original_post_init  # type: ignore[method-assign]
        for model in self._models:
            vars(model).pop(_CHUNK, None)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Megatron's own entry points for a block, flag or not: to run its combined schedule beside this package's."""
        ours = {name: getattr(schedules, name) for name in self._originals}
        try:
            vars(schedules).update(self._originals)
            yield
        finally:
            vars(schedules).update(ours)

    def __enter__(self) -> Installation:
        self._entered.append(self.replaced_options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        outer = self._entered.pop()
        if outer is not None:
            self.options = outer
        elif _current() is self:  # not one that was installed since
            self.remove()

    def chunk(self, model: torch.nn.Module, *, is_whole: bool = True) -> ModelChunk:
        """The model, cut into nodes. It is kept on the model itself: it refers to the model and should end with it."""
        inner = innermost_model(model)
        chunk: ModelChunk | None = vars(inner).get(_CHUNK)
        if chunk is None or not chunk.is_current():
            check_model(inner, is_whole=is_whole)
            chunk = vars(inner)[_CHUNK] = ModelChunk(inner)
            self._models.add(inner)
        check_hooks(model, inner)
        return chunk

    def links(self, communicator: Any) -> PipelineLinks:
        """The links to the neighbouring pipeline stages, made once for each group."""
        group = communicator.pp_group
        if group not in self._links:
            self._links[group] = PipelineLinks(communicator)
        return self._links[group]

    def agree(self, num_microbatches: int, *, model: torch.nn.Module, across_stages: bool = False) -> None:
        """Compare the number of micro-batches across ranks at the first iteration and whenever it changes here.

        Ranks that disagree would wait for each other inside an all-to-all. A rank that changes alone gets an error from
        this comparison, and the others from the collective that it is missing in.

        Args:
            model: whose process groups take part.
            across_stages: compare the stages of the pipeline too. In the slots of Megatron's interleaved driver it is
                too late for that: a stage comes there only when the one before has sent.
        """
        if torch.cuda.is_current_stream_capturing():
            return  # reading the answer would synchronise; the iterations that warmed up have compared
        groups = groups_of(model)
        kinds = {"data-parallel": groups.dp_cp, "tensor-parallel": groups.tp}
        if across_stages:
            kinds["pipeline-parallel"] = groups.pp
        compared = list(kinds.values())
        if (
            self._agreed is not None
            and self._agreed[0] == num_microbatches
            and all(group in self._agreed[1] for group in compared)
        ):
            return
        self._agreed = None
        counts = {kind: _gathered(num_microbatches, group) for kind, group in kinds.items()}
        for kind, found in counts.items():
            if len(set(found)) > 1:
                raise ConfigError.of(
                    "num_microbatches", num_microbatches, f"ranks disagree, by rank of the {kind} group: {found}",
                    "give every rank the same number of micro-batches",
                )  # fmt: skip
        self._agreed = (num_microbatches, compared)

    def cut_off(self, error: BaseException) -> None:
        """Megatron's interleaved driver has ended early. What it had on its way has no tags: a retry would take it."""
        left, self.interleaved = self.interleaved, None
        if left is not None:
            self.is_cut_off = not left.is_over
            left.abort(error)

    def refuse_if_cut_off(self) -> None:
        """Before an iteration of Megatron's interleaved driver.

        Raises:
            OverlapError: what an earlier one has left on its way would be taken for this one's.
        """
        if self.is_cut_off:
            raise OverlapError(
                "an iteration failed, and what Megatron had on its way between pipeline stages would be taken for this "
                "iteration's; start the processes again"
            )

    def tell_once(self, message: str) -> None:
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


def groups_of(model: torch.nn.Module) -> Any:
    """The ProcessGroupCollection that a model was built with."""
    return innermost_model(model).pg_collection


def _gathered(num_microbatches: int, group: Any) -> list[int]:
    mine = torch.tensor([num_microbatches], dtype=torch.int64, device=torch.cuda.current_device())
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    try:
        torch.distributed.all_gather(everyone, mine, group=group)
    except RuntimeError as error:
        error.add_note(f"num_microbatches={num_microbatches} on this rank: ranks may disagree on it")
        raise
    return [int(count) for count in everyone]


def _require(name: str) -> None:
    if not hasattr(schedules, name):
        raise SurfaceError(f"megatron.core.pipeline_parallel.schedules.{name} has gone: use megatron-core 0.19.x")


def _current() -> Installation | None:
    """The installation behind Megatron's entry point, if there is one: what is rebound is the only state."""
    _require(_DRIVER)
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
