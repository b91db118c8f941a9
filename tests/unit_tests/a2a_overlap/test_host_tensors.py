"""Calls that name a CUDA device work on the host device: factories, conversions, random state, autocast, compile."""

from __future__ import annotations

import io

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from combined_1f1b import host
from combined_1f1b.host.tensors import redirected

pytestmark = [
    pytest.mark.world_size(1),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the host device is for machines without a GPU"),
]

CPU = torch.device("cpu")
DEVICES = ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)]
FACTORIES = {
    "arange": (3,),
    "as_tensor": ([1.0],),
    "asarray": ([1.0],),
    "empty": (2,),
    "empty_like": (torch.ones(2),),
    "empty_strided": ((2, 2), (2, 1)),
    "eye": (2,),
    "full": ((2,), 1.0),
    "full_like": (torch.ones(2), 2.0),
    "linspace": (0, 1, 3),
    "ones": (2,),
    "ones_like": (torch.ones(2),),
    "rand": (2,),
    "rand_like": (torch.ones(2),),
    "randint": (3, (2,)),
    "randint_like": (torch.ones(2), 3),
    "randn": (2,),
    "randn_like": (torch.ones(2),),
    "randperm": (3,),
    "scalar_tensor": (1.0,),
    "tensor": ([1.0],),
    "tril_indices": (2, 2),
    "triu_indices": (2, 2),
    "zeros": (2,),
    "zeros_like": (torch.ones(2),),
}
METHODS = {
    "new_empty": ((2,),),
    "new_empty_strided": ((2, 2), (2, 1)),
    "new_full": ((2,), 1.0),
    "new_ones": ((2,),),
    "new_tensor": ([1.0],),
    "new_zeros": ((2,),),
}


@pytest.fixture(autouse=True)
def active():
    with host.activate():
        yield


@pytest.mark.parametrize("device", DEVICES, ids=repr)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_cpu_tensors(name, device):
    assert getattr(torch, name)(*FACTORIES[name], device=device).device == CPU


@pytest.mark.parametrize("name", METHODS)
def test_factory_methods_make_cpu_tensors(name):
    assert getattr(torch.ones(1), name)(*METHODS[name], device="cuda").device == CPU


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_conversions_stay_on_the_cpu(device):
    tensor = torch.ones(2)
    assert tensor.cuda(device) is tensor
    assert tensor.to(device).device == CPU
    assert tensor.to(device=device, dtype=torch.int32).dtype == torch.int32
    assert tensor.to(device, torch.float64, non_blocking=True).dtype == torch.float64
    assert tensor.is_cuda is False


def test_other_arguments_pass_through():
    assert torch.ones(2).to(torch.float16).dtype == torch.float16
    assert torch.ones(2).to(torch.ones(1, dtype=torch.int64)).dtype == torch.int64
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert redirected(True) is True
    assert redirected(None) is None


def test_modules_move():
    for module in (torch.nn.Linear(2, 2).cuda(), torch.nn.Linear(2, 2).to("cuda:0"), torch.nn.Linear(2, 2, device=0)):
        assert module.weight.device == CPU
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    assert module.weight.device.type == "meta"
    assert module.to_empty(device="cuda").weight.device == CPU


@pytest.mark.parametrize("device", ["cuda", 0], ids=repr)
def test_a_default_device_of_cuda_means_the_cpu(device):
    with torch.device(device):
        assert torch.ones(1).device == CPU
        assert torch.ones(1, device="meta").device.type == "meta"


def test_device_blocks_still_work_after_the_end():
    # torch caches the constructors that a device block covers; ours among them would break it for good.
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"


def test_type_names_are_those_of_cuda():
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.nn.Parameter(torch.ones(1)).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.ones(1).type(torch.cuda.DoubleTensor).dtype == torch.float64
    assert torch.ones(1).type(torch.int32).dtype == torch.int32
    assert torch.ones(1).type(dtype=torch.int32).dtype == torch.int32


def test_page_locking_is_left_out():
    tensor = torch.ones(2)
    assert tensor.pin_memory() is tensor
    assert torch.zeros(2, pin_memory=True).tolist() == [0.0, 0.0]


def test_files_load_where_a_cuda_device_is_named():
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, file)
    for location in ("cuda", torch.device("cuda", 0), None):
        file.seek(0)
        assert torch.load(file, map_location=location)["weight"].device == CPU


def test_generators_for_a_cuda_device():
    generator = torch.Generator(device="cuda")
    assert generator.device == CPU
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance("generator", torch.Generator)


class TestRandomState:
    def test_seeding_cuda_seeds_the_draws(self):
        torch.cuda.manual_seed(5)
        one = torch.rand(3, device="cuda")
        torch.cuda.manual_seed_all(5)
        assert torch.equal(one, torch.rand(3, device="cuda"))
        assert torch.cuda.initial_seed() == 5

    @pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda", 0)], ids=repr)
    def test_state_is_saved_and_restored(self, device):
        state = torch.cuda.get_rng_state(device)
        one = torch.rand(3)
        torch.cuda.set_rng_state(state, device)
        assert torch.equal(one, torch.rand(3))

    def test_forked_state_comes_back(self):
        state = torch.cuda.get_rng_state()
        with torch.random.fork_rng(devices=[0]):
            torch.rand(3)
        assert torch.equal(state, torch.cuda.get_rng_state())

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_recompute_draws_the_same(self, use_reentrant):
        leaf = torch.ones(64, requires_grad=True)
        result = checkpoint(torch.nn.functional.dropout, leaf, 0.5, use_reentrant=use_reentrant)
        result.sum().backward()
        assert torch.equal(result, leaf.grad)

    def test_the_default_generator_draws_the_live_values(self):
        torch.cuda.manual_seed(5)
        one = torch.rand(3)
        torch.cuda.manual_seed(5)
        assert torch.equal(one, torch.rand(3, generator=torch.cuda.default_generators[0]))

    def test_graph_safe_states_swap(self):
        default = torch.cuda.default_generators[0]
        torch.cuda.manual_seed(5)
        first = default.graphsafe_get_state()
        second = default.clone_state()
        second.manual_seed(6)
        assert isinstance(first, torch.Generator)
        draws_of_five = torch.rand(2)
        default.graphsafe_set_state(second)
        assert second.initial_seed() == torch.cuda.initial_seed() == 6
        draws_of_six = torch.rand(2)
        default.graphsafe_set_state(first)
        draws_of_five = torch.cat([draws_of_five, torch.rand(2)])
        default.graphsafe_set_state(second)
        draws_of_six = torch.cat([draws_of_six, torch.rand(2, generator=second)])
        default.graphsafe_set_state(first)
        for seed, draws in ((5, draws_of_five), (6, draws_of_six)):
            plain = torch.Generator().manual_seed(seed)
            expected = torch.cat([torch.rand(2, generator=plain), torch.rand(2, generator=plain)])
            assert torch.equal(draws, expected)

    def test_a_state_that_is_not_live_keeps_its_values(self):
        default = torch.cuda.default_generators[0]
        state = default.clone_state().manual_seed(9)
        values = state.get_state()
        torch.rand(3)
        assert torch.equal(state.get_state(), values)
        assert torch.equal(state.clone_state().get_state(), values)
        assert state.graphsafe_get_state() is state
        assert state.device.type == default.device.type == "cuda"
        other = default.clone_state().set_state(values)
        assert other.initial_seed() == 9


class TestAutocast:
    def test_cuda_casts_cpu_operators(self):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.get_autocast_gpu_dtype() == torch.bfloat16
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
            with torch.amp.autocast("cuda", enabled=False):
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert not torch.is_autocast_enabled()

    def test_custom_functions_keep_the_state_for_backward(self):
        seen = []

        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, one, other):
                ctx.save_for_backward(one, other)
                return one @ other

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, gradient):
                one, other = ctx.saved_tensors
                product = gradient @ other.t()
                seen.append(product.dtype)
                return product, one.t() @ gradient

        leaf = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result = Product.apply(leaf, torch.ones(2, 2))
        result.sum().backward()
        assert result.dtype == torch.bfloat16
        assert seen == [torch.bfloat16]


def test_compiled_functions_run_eagerly():
    calls = []

    @torch.compile
    def double(tensor):
        calls.append(tensor)
        return tensor * 2

    for _ in range(2):
        assert double(torch.ones(1)).tolist() == [2.0]
    assert len(calls) == 2


@pytest.mark.parametrize("convert", [torch.tensor, numpy.array, list], ids=["tensor", "numpy", "list"])
def test_all_to_all_takes_splits_of_any_kind(device, convert):
    source, target = torch.arange(3.0), torch.empty(3)
    torch.distributed.all_to_all_single(target, source, convert([3]), convert([3]))
    assert torch.equal(source, target)
    work = torch.distributed.all_to_all_single(
        target, source * 2, output_split_sizes=convert([3]), input_split_sizes=convert([3]), async_op=True
    )
    work.wait()
    assert torch.equal(source * 2, target)
