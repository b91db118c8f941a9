"""Weights that several nodes of a micro-batch use: their contributions are added up before they accumulate.

Autograd over a whole micro-batch first adds the gradients that a weight gets in several places, and accumulates the
sum. Segment by segment, each contribution would accumulate by itself: another order of rounding, and a data-parallel
hook that fires several times. So the later users of a weight see an alias of it. The alias's gradient is held, and
joins the first user's gradient (the embedding's, the last in backward order) just before that one accumulates:

    ((output layer) + multi-token prediction's embedding) + embedding  ->  accumulated once, hooks fire once

Under MFSDP nothing of this is needed: a unit's `.grad` starts empty at each micro-batch, and builds up the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


class SharedWeights:
    """The held contributions of one micro-batch. A weight is known by the parameter that owns it."""

    def __init__(self) -> None:
        self._aliases: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def alias(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return a leaf that aliases `weight`, for one node's use of it. A frozen weight is returned as it is."""
        if not weight.requires_grad:
            return weight
        leaf = weight.detach().requires_grad_()
        vars(leaf).update(vars(weight))  # tensor-parallel marks, and main_grad for fused accumulation
        self._aliases.append((weight, leaf))
        return leaf

    def _take(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Add up what arrived, per weight, in the order of arrival: the last node of the forward comes first."""
        held: dict[torch.nn.Parameter, torch.Tensor] = {}
        for weight, leaf in reversed(self._aliases):
            if leaf.grad is None or getattr(leaf, "grad_added_to_main_grad", False):
                continue  # a fused kernel has written main_grad already
            held[weight] = leaf.grad if weight not in held else held[weight] + leaf.grad
        self._aliases.clear()
        return held

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Around the backward of the weights' first user: its gradient becomes (held contributions) + gradient.

        A weight that gets no gradient there (decoder_input was given, say) accumulates the held contributions alone.
        """
        held = self._take()
        joined: set[torch.nn.Parameter] = set()

        def make_hook(weight: torch.nn.Parameter) -> Any:
            def add_held(gradient: torch.Tensor) -> torch.Tensor:
                joined.add(weight)
                return held[weight] + gradient

            return add_held

        with ExitStack() as hooks:
            for weight in held:
                of_the_user = dict(weight._backward_hooks or {})
                hooks.callback(weight.register_hook(make_hook(weight)).remove)
                for key, hook in of_the_user.items():  # behind ours, so that they get the sum
                    del weight._backward_hooks[key]
                    weight._backward_hooks[key] = hook
            yield
        _accumulate({weight: gradient for weight, gradient in held.items() if weight not in joined})

    def deliver(self) -> None:
        """After the backward of the weights' first user, which used an alias as well."""
        _accumulate(self._take())


def _accumulate(gradients: dict[torch.nn.Parameter, torch.Tensor]) -> None:
    for weight, gradient in gradients.items():
        torch.autograd.backward([get_gradient_edge(weight)], [gradient])
