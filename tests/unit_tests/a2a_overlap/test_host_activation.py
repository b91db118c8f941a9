"""Activating the host device replaces what its table says and puts back exactly what stood there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo import eval_frame

from combined_1f1b import host
from combined_1f1b.host import activation
from combined_1f1b.host.patch import AppliedPatches, Patch
from combined_1f1b.host.streams import StreamState, active_state

pytestmark = [
    pytest.mark.world_size(1),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the host device is for machines without a GPU"),
]

ABSENT = object()
WATCHER = "megatron.core.tensor_parallel.random"

type Found = dict[tuple[str, str], object]


@pytest.fixture
def inactive() -> Iterator[None]:
    """Take the host device away for a test, also where other tests of the run hold it."""
    state = active_state()
    if state is None:
        yield
        return
    state.resources.close()
    try:
        yield
    finally:
        state.install()


@pytest.fixture
def look(inactive: None) -> Callable[[], Found]:
    """A function that says what stands under every name of the table, and the other traces of an activation."""
    names = [(patch.owner, patch.name) for patch in host.patches(StreamState())]

    def found() -> Found:
        entries = {(str(owner), name): vars(owner).get(name, ABSENT) for owner, name in names}
        entries["", "stance of torch.compile"] = eval_frame._stance.stance
        entries["", "log filters"] = len(logging.getLogger(WATCHER).filters)
        return entries

    return found


def assert_same_objects(before: Found, after: Found) -> None:
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []


class TestActivate:
    def test_names_are_replaced_and_come_back(self, look):
        before = look()
        with host.activate() as device:
            assert device == torch.device("cpu")
            assert host.is_active()
            during = look()
            assert [key for key in before if before[key] is during[key]] == []
        assert not host.is_active()
        assert_same_objects(before, look())

    def test_no_other_name_is_touched(self, inactive):
        table = {(str(patch.owner), patch.name) for patch in host.patches(StreamState())}
        owners = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.distributed, torch.amp]
        before = {(str(owner), name): value for owner in owners for name, value in vars(owner).items()}
        with host.activate():
            during = {(str(owner), name): value for owner in owners for name, value in vars(owner).items()}
        changed = {key for key in before.keys() | during.keys() if before.get(key) is not during.get(key)}
        assert changed == {key for key in table if key[0] in {str(owner) for owner in owners}}

    def test_they_come_back_after_an_exception(self, look):
        before = look()
        with pytest.raises(KeyError, match="mine"), host.activate():
            raise KeyError("mine")
        assert_same_objects(before, look())

    def test_only_the_outermost_block_restores(self, look):
        before = look()
        with host.activate():
            during = look()
            with pytest.raises(KeyError), host.activate():
                raise KeyError
            assert host.is_active()
            assert_same_objects(during, look())
        assert_same_objects(before, look())

    def test_blocks_that_overlap_restore_at_the_last_end(self, look):
        before = look()
        first, second = host.activate(), host.activate()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert host.is_active()
        second.__exit__(None, None, None)
        assert_same_objects(before, look())

    def test_it_can_be_activated_again(self, inactive):
        with host.activate():
            old = torch.cuda.Stream()
        with host.activate():
            new = torch.cuda.Stream()
            assert old.stream_id == new.stream_id
            assert old != new
            assert torch.zeros(1, device="cuda").device.type == "cpu"

    def test_a_failed_activation_leaves_nothing(self, look, monkeypatch):
        before = look()

        read_only = Patch(owner=int, name="name", value=1, reason="built-in types are read-only")
        monkeypatch.setattr(activation, "collective_patches", lambda: (read_only,))
        with pytest.raises(TypeError, match="immutable"), host.activate():
            pass
        assert not host.is_active()
        assert_same_objects(before, look())

    def test_where_cuda_is_available_nothing_happens(self, look, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        before = look()
        with host.activate() as device:
            assert device == torch.device("cuda", 3)
            assert not host.is_active()
            assert_same_objects(before, look())
            with host.activate() as again:
                assert again == torch.device("cuda", 3)

    def test_objects_need_an_active_host(self, inactive):
        for build in (host.HostStream, host.HostEvent):
            with pytest.raises(RuntimeError, match="not active"):
                build()
        with pytest.raises(RuntimeError, match="not active"), host.observing(print):
            pass


def test_every_patch_says_why_and_where(inactive):
    table = host.patches(StreamState())
    assert all(patch.reason for patch in table)
    texts = [str(patch) for patch in table]
    assert "torch.cuda.current_stream" in texts
    assert "torch.Tensor.record_stream" in texts
    assert len(set(texts)) == len(texts)


def test_cuda_stays_unavailable():
    with host.activate():
        assert torch.cuda.is_available() is False
        assert torch.cuda.is_initialized() is True


class TestAppliedPatches:
    def test_inherited_and_missing_names_disappear_again(self):
        class Parent:
            inherited = 1

        class Child(Parent):
            own = staticmethod(len)

        own = vars(Child)["own"]
        applied = AppliedPatches(
            [
                Patch(owner=Child, name="inherited", value=2, reason="test"),
                Patch(owner=Child, name="missing", value=3, reason="test"),
                Patch(owner=Child, name="own", value=4, reason="test"),
                Patch(owner=Child, name="own", value=5, reason="patched twice"),
            ]
        )
        assert (Child.inherited, Child.missing, Child.own) == (2, 3, 5)
        applied.restore()
        assert set(vars(Child)) & {"inherited", "missing"} == set()
        assert vars(Child)["own"] is own

    def test_a_patch_that_cannot_be_set_undoes_those_before(self):
        class Owner:
            name = 1

        patches = [
            Patch(owner=Owner, name="name", value=2, reason="test"),
            Patch(owner=int, name="name", value=3, reason="built-in types are read-only"),
        ]
        with pytest.raises(TypeError):
            AppliedPatches(patches)
        assert Owner.name == 1
