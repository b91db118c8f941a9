"""What a FullIterationGraph reads: static buffers for batches of any nesting, and one iterator for each model chunk."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from host_models import build, parallel, seed

from combined_1f1b.errors import ConfigError
from combined_1f1b.schedule import static_batches
from combined_1f1b.schedule.cuda_graph import FullIterationGraph
from combined_1f1b.schedule.static_batches import StaticBatches

STATIC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
pytestmark = pytest.mark.world_size(1)


@pytest.fixture(autouse=True)
def installed(device):
    with parallel(expert_model_parallel_size=1, graphable_random_state=True):
        yield


class TestBatches:
    Pair = namedtuple("Pair", ["first", "second"])

    @dataclass
    class Packed:
        lengths: torch.Tensor
        kind: str = "thd"

    def batch(self, value=0.0, **changes):
        tensor = torch.full((2,), value)
        fields = {"pair": self.Pair(tensor, None), "nested": {"list": [tensor, 3]}, "packed": self.Packed(tensor)}
        return {**fields, "tuple": (tensor, "text"), "absent": None, **changes}

    def test_any_nesting_keeps_its_form_and_its_addresses(self):
        static, pointers = StaticBatches(), set()
        for value in (1.0, 2.0):
            found = list(static.load(iter([self.batch(value), self.batch(-value)]), 2))
            for sign, batch in zip((1, -1), found, strict=True):
                tensors = (batch["pair"].first, batch["nested"]["list"][0], batch["packed"].lengths, batch["tuple"][0])
                assert [tensor.tolist() for tensor in tensors] == [[sign * value] * 2] * 4
                pointers.update(tensor.data_ptr() for tensor in tensors)
                assert (batch["pair"].second, batch["nested"]["list"][1], batch["absent"]) == (None, 3, None)
                assert (batch["packed"].kind, batch["tuple"][1]) == ("thd", "text")
        assert len(pointers) == 8  # every tensor of every micro-batch has a buffer, and keeps it

    def test_what_forward_step_does_to_a_batch_is_forgotten(self):
        static = StaticBatches()
        for _ in range(2):
            (batch,) = static.load(iter([self.batch()]), 1)
            batch.pop("absent")
            batch["nested"].clear()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tuple": (torch.ones(3), "text")}, r"micro-batch 0, 'tuple', 0.*\(3,\)"),
            ({"tuple": (torch.ones(2).double(), "text")}, "float64"),
            ({"tuple": (torch.ones(2), "other")}, "'tuple', 1.*other"),
            ({"tuple": (torch.ones(2),)}, "'tuple'.*tuple of 0"),
            ({"tuple": [torch.ones(2), "text"]}, "list of 0, 1"),
            ({"absent": torch.ones(2)}, r"'absent'.*this was None"),
            ({"pair": Pair(None, None)}, "'pair', 'first'.*=None"),
            ({"more": 1}, "more"),
            ({"nested": {"list": [torch.ones(2), 4]}}, "=4: "),
            ({"nested": None}, "'nested'.*=None"),
            ({"packed": {"lengths": torch.ones(2), "kind": "thd"}}, "'packed'"),
        ],
    )
    def test_a_batch_that_changes_is_refused(self, change, message):
        static = StaticBatches()
        static.load(iter([self.batch()]), 1)
        with pytest.raises(ConfigError, match=rf"(?s){message}.*reset"):
            static.load(iter([self.batch(**change)]), 1)

    def test_an_iterator_that_comes_or_goes_or_ends_is_refused(self):
        for before, after in ((None, iter([1])), (iter([1]), None)):
            static = StaticBatches()
            static.load(before, 1)
            with pytest.raises(ConfigError, match="data_iterator"):
                static.load(after, 1)
        with pytest.raises(StopIteration) as caught:
            StaticBatches().load(iter([1]), 2)
        assert "ended at micro-batch 1 of 2" in caught.value.__notes__[0]

    def test_an_array_is_refused(self):
        with pytest.raises(ConfigError, match="ndarray"):
            StaticBatches().load(iter([torch.ones(1).numpy()]), 1)


class TestChunks:
    """Several model chunks: one iterator each, None where a chunk reads no data."""

    def graph(self):
        chunks = [build(expert_model_parallel_size=1, **STATIC) for _ in range(3)]
        seed(3, graphable=True)
        weights = [next(chunk.parameters()) for chunk in chunks]

        def function(*, model, data_iterator, num_microbatches):
            for iterator, weight in zip(data_iterator, weights, strict=True):
                for _ in range(num_microbatches):
                    value = 1.0 if iterator is None else next(iterator)["x"]
                    (weight.float().sum() * value).backward()
            return [weight.grad.flatten()[0] * 1 for weight in weights]

        return FullIterationGraph(function, warmup_iterations=1), chunks

    def test_each_chunk_reads_its_own_iterator(self):
        graph, chunks = self.graph()
        for turn in range(1, 5):
            data = [iter([{"x": torch.tensor(x * turn)} for x in values]) for values in ((1.0, 2.0), (4.0, 4.0))]
            found = graph(model=chunks, data_iterator=[data[0], None, data[1]], num_microbatches=2)
            assert [value.item() for value in found] == [3.0 * turn, 2.0, 8.0 * turn]

    def losses_of_a_loader_with_one_buffer(self):
        """The loader refills the tensor that it has handed out, while earlier micro-batches are still to be read."""
        graph, chunks = self.graph()
        tensor, found = torch.zeros(1), []

        def loader(turn):
            for value in (1.0, 2.0):
                yield {"x": tensor.fill_(value * turn)}

        for turn in range(1, 4):
            result = graph(model=chunks, data_iterator=[loader(turn), None, None], num_microbatches=2)
            found.append(result[0].item())
        return found

    def test_a_batch_is_copied_when_it_is_read(self):
        assert self.losses_of_a_loader_with_one_buffer() == [3.0, 6.0, 9.0]

    def test_a_buffer_for_several_micro_batches_would_be_noticed(self, monkeypatch):
        """Mutation: a buffer is filled again before the graph has read it."""
        shared = torch.zeros(1, device="cuda")
        monkeypatch.setattr(static_batches, "_allocate", lambda value: shared)
        assert self.losses_of_a_loader_with_one_buffer() == [4.0, 8.0, 12.0]

    def test_a_missing_iterator_is_refused(self):
        graph, chunks = self.graph()
        with pytest.raises(ConfigError, match=r"data_iterator='1 iterators'.*3 chunks"):
            graph(model=chunks, data_iterator=[iter([])], num_microbatches=2)
        with pytest.raises(TypeError, match="num_microbatches"):
            graph(model=chunks, data_iterator=[None] * 3)
