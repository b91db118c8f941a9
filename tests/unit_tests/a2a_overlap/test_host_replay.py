"""A graph captured on the host device replays its operations on the same tensors and does not run Python again."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from combined_1f1b import host

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host device is for machines without a GPU")


@pytest.fixture(autouse=True)
def active():
    with host.activate():
        yield


def capture(function, *generators):
    """A graph of the function, and what the function returned."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


class TestTensors:
    pytestmark = pytest.mark.world_size(1)

    def test_python_does_not_run_again(self):
        calls, weight = [], torch.ones(2)

        def function():
            calls.append(None)
            return (weight * 3).relu().sum()

        graph, result = capture(function)
        for value in (1.0, -1.0, 2.0):
            weight.fill_(value)
            graph.replay()
            assert result.item() == max(6 * value, 0)
        assert len(calls) == 1

    def test_a_capture_computes_nothing(self):
        total, weight = torch.zeros(2), torch.ones(2, requires_grad=True)
        weight.grad = torch.ones(2)

        def function():
            total.add_(1)
            loss = (weight * 2).sum()
            loss.backward()
            return loss

        graph, loss = capture(function)
        assert total.tolist() == [0.0, 0.0]
        assert weight.grad.tolist() == [1.0, 1.0]
        assert loss.isnan()  # memory of the graph, that no replay has written yet
        graph.replay()
        assert (total.tolist(), weight.grad.tolist(), loss.item()) == ([1.0, 1.0], [3.0, 3.0], 4.0)

    def test_views_share_and_are_not_recomputed(self):
        source = torch.arange(4.0)

        def function():
            doubled = source * 2
            view = doubled.view(2, 2).t()
            doubled[:2].add_(1)
            return view, view.unsqueeze_(0) + 0

        graph, (view, copy) = capture(function)
        for _ in range(2):
            graph.replay()
            assert view.flatten().tolist() == copy.flatten().tolist() == [1.0, 4.0, 3.0, 6.0]

    def test_what_python_does_to_a_tensor_later_does_not_reach_the_replay(self):
        source = torch.ones(2)

        def function():
            hidden = source * 2
            result = hidden + 1
            hidden.data = torch.empty(1)  # Megatron's pipelines release outputs so
            return result

        graph, result = capture(function)
        source.fill_(4)
        graph.replay()
        assert result.tolist() == [9.0, 9.0]

    def test_several_results_and_lists(self):
        source = torch.tensor([3.0, 1.0, 2.0])

        def function():
            values, indices = source.sort()
            torch._foreach_add_([values], 1)
            return values, indices, torch._foreach_mul([values, source], 2)

        graph, (values, indices, products) = capture(function)
        source.copy_(torch.tensor([1.0, 3.0, 2.0]))
        graph.replay()
        assert values.tolist() == [2.0, 3.0, 4.0]
        assert indices.tolist() == [0, 2, 1]
        assert products[0].tolist() == [4.0, 6.0, 8.0]

    def test_fresh_memory_is_not_overwritten_before_its_use(self):
        source = torch.ones(2)

        def function():
            buffer = torch.empty(2, device="cuda")
            buffer.copy_(source)
            return buffer

        graph, buffer = capture(function)
        source.fill_(5)
        graph.replay()
        assert buffer.tolist() == [5.0, 5.0]

    def test_autocast_and_grad_mode_are_those_of_the_capture(self):
        left, right = torch.eye(2, requires_grad=True), torch.full((2, 2), 1.001)

        def function():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return left @ right

        graph, product = capture(function)
        graph.replay()
        expected = product.clone()
        with torch.autocast("cuda", dtype=torch.float16):
            graph.replay()
        assert product.dtype == torch.bfloat16
        assert torch.equal(product, expected)

    def test_memory_that_an_operator_allocates_by_itself_is_fresh_at_every_replay(self):
        """The backward of topk fills zeros, made in C++, where the values came from."""
        scores = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)

        def function():
            (gradient,) = torch.autograd.grad(scores.topk(1).values.sum(), scores)
            return gradient

        graph, gradient = capture(function)
        for largest in (0, 1, 2):
            with torch.no_grad():
                scores.zero_()[largest] = 5
            graph.replay()
            assert gradient.tolist() == [float(index == largest) for index in range(3)]

    def test_what_is_made_without_a_device_is_not_in_the_graph(self):
        def function():
            named, unnamed = torch.zeros(1, device="cuda"), torch.zeros(1)
            with torch.device("cuda"):
                default = torch.zeros(1)
            return named, default, torch.zeros(1, device=named.device), unnamed, torch.zeros(1, device="cpu")

        graph, results = capture(function)
        for result in results:
            result.fill_(7)
        graph.replay()
        assert [result.item() for result in results] == [0.0, 0.0, 0.0, 7.0, 7.0]

    def test_gradients_and_recomputation(self):
        weight, source = torch.full((2,), 3.0, requires_grad=True), torch.ones(2)

        def function():
            hidden = checkpoint(lambda tensor: tensor * tensor, weight * source, use_reentrant=False)
            hidden.sum().backward()

        graph, _ = capture(function)
        source.fill_(2)
        for _ in range(2):
            graph.replay()
            assert weight.grad.tolist() == [24.0, 24.0]


class TestStorages:
    pytestmark = pytest.mark.world_size(1)

    def test_memory_from_before_is_freed_and_materialised_again(self):
        """As MFSDP v2 treats the full weights of a unit."""
        shard, full = torch.ones(4), torch.empty(4)
        storage = full.untyped_storage()
        storage.resize_(0)

        def function():
            storage.resize_(16)
            full.copy_(shard)
            result = full.view(2, 2).sum()
            storage.resize_(0)
            return result

        graph, result = capture(function)
        assert storage.nbytes() == 0
        for value in (2.0, 3.0):
            shard.fill_(value)
            graph.replay()
            assert result.item() == 4 * value
            assert storage.nbytes() == 0

    def test_memory_of_the_graph_is_there_at_every_replay(self):
        source = torch.ones(4)

        def function():
            hidden = source * 2
            result = hidden.sum()
            hidden.untyped_storage().resize_(0)
            return result

        graph, result = capture(function)
        for _ in range(2):
            graph.replay()
            assert result.item() == 8.0

    def test_a_capture_leaves_sizes_as_they_were(self):
        full = torch.arange(4.0)
        capture(lambda: full.untyped_storage().resize_(0))
        assert full.tolist() == [0.0, 1.0, 2.0, 3.0]


class TestRandomState:
    pytestmark = pytest.mark.world_size(1)

    def test_replays_go_on_where_eager_draws_stopped(self):
        torch.cuda.manual_seed(5)
        expected = [torch.rand(3, device="cuda") for _ in range(4)]
        torch.cuda.manual_seed(5)
        draws = [torch.rand(3, device="cuda")]
        graph, drawn = capture(lambda: torch.rand(3, device="cuda"))
        for _ in range(2):
            graph.replay()
            draws.append(drawn.clone())
        draws.append(torch.rand(3, device="cuda"))
        assert torch.equal(torch.stack(draws), torch.stack(expected))

    def test_every_state_advances_by_itself(self):
        default = torch.cuda.default_generators[0]

        def draw(first, second):
            drawn = []
            for state in (first, second, first):
                default.graphsafe_set_state(state)
                drawn.append(torch.rand(2, device="cuda"))
            return drawn

        def states():
            torch.cuda.manual_seed(5)
            return default.graphsafe_get_state(), default.clone_state().manual_seed(6)

        eager = states()
        expected = [torch.stack(draw(*eager)) for _ in range(3)]
        default.graphsafe_set_state(eager[0])
        captured = states()
        graph, drawn = capture(lambda: draw(*captured), captured[1])
        third = default.clone_state()
        for turn, before in zip(expected, itertools.cycle((captured[1], third)), strict=False):
            default.graphsafe_set_state(before)  # whatever is current outside
            graph.replay()
            assert torch.equal(torch.stack(drawn), turn)
            assert default.graphsafe_get_state() is before
        default.graphsafe_set_state(captured[0])


@pytest.mark.world_size(1, 2)
class TestCollectives:
    def test_collectives_run_again(self, device):
        group = torch.distributed.group.WORLD
        ranks, rank = group.size(), group.rank()
        source = torch.zeros(ranks)

        def function():
            gathered, moved = torch.empty(ranks * ranks, device="cuda"), torch.empty(ranks, device="cuda")
            scattered, summed = torch.empty(1, device="cuda"), source + 0
            torch.distributed.all_gather_into_tensor(gathered, source)
            torch.distributed.all_to_all_single(moved, source)
            torch.distributed.reduce_scatter_tensor(scattered, source, op=torch.distributed.ReduceOp.AVG)
            work = torch.distributed.all_reduce(summed, async_op=True)
            work.wait()
            parts = [torch.empty(ranks, device="cuda") for _ in range(ranks)]
            torch.distributed.all_gather(parts, source)
            return gathered, moved, scattered, summed * 1, torch.stack(parts)

        graph, results = capture(function)
        for turn in range(1, 3):
            source.copy_(torch.arange(ranks) + 10.0 * rank + 100 * turn)
            everyone = torch.stack([torch.arange(ranks) + 10.0 * other + 100 * turn for other in range(ranks)])
            graph.replay()
            gathered, moved, scattered, summed, parts = results
            assert torch.equal(gathered.view(ranks, ranks), everyone)
            assert torch.equal(moved, everyone[:, rank])
            assert torch.equal(scattered, everyone[:, rank].mean(0, keepdim=True))
            assert torch.equal(summed, everyone.sum(0))
            assert torch.equal(parts, everyone)

    @pytest.mark.world_size(2)
    def test_transfers_between_ranks_wait_where_python_waited(self, device):
        """Each rank sends more than any buffer of the transport holds before it receives."""
        rank = torch.distributed.get_rank()
        source, other = torch.zeros(1 << 20), 1 - rank

        def function():
            received = torch.empty(1 << 20, device="cuda")
            works = [torch.distributed.isend(source, other), torch.distributed.irecv(received, other)]
            for work in works:
                work.wait()
            return received * 2

        graph, result = capture(function)
        for turn in (1.0, 2.0):
            source.fill_(rank + turn)
            graph.replay()
            assert result.unique().tolist() == [2 * (other + turn)]

    def test_sharded_tensors_record_their_local_work(self, device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        local = torch.ones(2)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        graph, doubled = capture(lambda: sharded * 2)
        local.fill_(4)
        graph.replay()
        assert doubled.to_local().tolist() == [8.0, 8.0]
