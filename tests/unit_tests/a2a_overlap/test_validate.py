"""Each rule of the validator has a plan that breaks it, and the error names the op that does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import plans

from combined_1f1b.errors import PlanError
from combined_1f1b.schedule import Op, Plan, build_plan

pytestmark = pytest.mark.world_size(1)


def sharded_plan(**arguments) -> Plan:
    return build_plan(**{"num_layers": 2, "num_microbatches": 2, "sharded": True} | arguments)


class Editor:
    """Edits the lines of a plan by the names of its ops; `after` picks a later occurrence of a name."""

    def __init__(self, plan: Plan) -> None:
        self.shape = plan.shape
        self.ops = list(plan.ops)

    def find(self, name: str, after: str | None = None) -> int:
        names = [op.name for op in self.ops]
        return names.index(name, names.index(after) if after else 0)

    def drop(self, name: str, after: str | None = None) -> Op:
        return self.ops.pop(self.find(name, after))

    def insert(self, name: str, *, before: str, after: str | None = None) -> None:
        self.ops.insert(self.find(before, after), Op.parse(name))

    def move(self, name: str, *, before: str, after: str | None = None) -> None:
        self.insert(self.drop(name, after).line, before=before)

    def swap(self, first: str, second: str) -> None:
        one, two = self.find(first), self.find(second)
        self.ops[one], self.ops[two] = self.ops[two], self.ops[one]

    def wait(self, name: str, *waits: str) -> None:
        index = self.find(name)
        self.ops[index] = self.ops[index].with_waits(waits)

    def refused(self, op: str, reason: str) -> None:
        """The plan is refused at this op, for this reason, and the arrow points at it."""
        with pytest.raises(PlanError) as caught:
            Plan(self.shape, tuple(self.ops)).validate()
        message = str(caught.value)
        first, *around = message.splitlines()
        assert op in first, message
        assert re.search(reason, first), message
        if not first.startswith("end of the plan"):
            arrows = [line for line in around if line.startswith("-->")]
            assert len(arrows) == 1, message
            assert op in arrows[0], message
            assert 4 <= len(around) <= 11, message


@pytest.fixture
def edit() -> Editor:
    return Editor(sharded_plan())


def test_the_unchanged_plan_is_valid(edit):
    Plan(edit.shape, tuple(edit.ops)).validate()


# Nodes


def test_swapped_nodes(edit):
    edit.swap("F0.L0.attention", "F0.L0.dispatch")
    edit.refused("F0.L0.dispatch", r"needs F0\.L0\.attention first")


def test_missing_node(edit):
    edit.drop("F0.L1.experts")
    edit.refused("F0.L1.combine", r"needs F0\.L1\.experts first")


def test_missing_last_node(edit):
    edit.drop("REDUCE.embedding", after="B1.embedding")
    edit.drop("B1.embedding")
    edit.refused("B1.embedding", "is missing")


def test_node_twice(edit):
    edit.insert("F0.L0.experts", before="F0.L0.combine")
    edit.refused("F0.L0.experts", "issued a second time")


def test_unknown_node(edit):
    edit.insert("F0.L2.attention", before="F0.final_norm")
    edit.refused("F0.L2.attention", "the model has no such node")


def test_unknown_microbatch(edit):
    edit.insert("F2.embedding", before="F0.L0.attention")
    edit.refused("F2.embedding", "the plan has 2 micro-batches")


def test_backward_before_its_forward(edit):
    edit.move("F1.loss", before="B1.output_layer")
    edit.refused("B1.loss", "needs the whole forward of micro-batch 1 first")


def test_gradients_out_of_order():
    plan = build_plan(num_layers=1, num_microbatches=2, pair_head_and_tail=True)
    swapped = [op.line.replace("B0", "B#").replace("B1", "B0").replace("B#", "B1") for op in plan.ops]
    edit = Editor(plan)
    edit.ops = [Op.parse(line) for line in swapped]
    edit.move("BEGIN_BACKWARD.1", before="B1.loss")
    edit.refused("B1.loss", "needs the same node of micro-batch 0 first")


def test_weight_gradients_before_their_backward():
    edit = Editor(sharded_plan(delay_wgrad=True))
    edit.move("W0.L1.experts", before="B0.L1.experts")
    edit.refused("W0.L1.experts", r"needs B0\.L1\.experts first")


def test_weight_gradients_out_of_order():
    edit = Editor(build_plan(num_layers=1, num_microbatches=2, delay_wgrad=True))
    edit.ops.append(edit.drop("W0.L0.attention"))
    edit.refused("W1.L0.attention", "needs the same node of micro-batch 0 first")


def test_missing_weight_gradients():
    edit = Editor(build_plan(num_layers=1, num_microbatches=1, delay_wgrad=True))
    edit.drop("W0.L0.experts")
    edit.refused("end of the plan", "weight gradients of micro-batch 0 are missing")


def test_weight_gradients_twice():
    edit = Editor(build_plan(num_layers=1, num_microbatches=1, delay_wgrad=True))
    edit.insert("W0.L0.experts", before="B0.embedding")
    edit.refused("W0.L0.experts", "issued a second time")


def test_weight_gradients_that_are_not_delayed(edit):
    edit.insert("W0.L1.experts", before="B0.L1.dispatch")
    edit.refused("W0.L1.experts", "not delayed")


# BEGIN_BACKWARD


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("microbatch", [0, 1])
def test_missing_begin_backward(sharded, microbatch):
    edit = Editor(sharded_plan(sharded=sharded))
    edit.drop(f"BEGIN_BACKWARD.{microbatch}")
    edit.refused(f"B{microbatch}.loss", rf"needs BEGIN_BACKWARD\.{microbatch} first")


def test_second_begin_backward(edit):
    edit.insert("BEGIN_BACKWARD.0", before="B0.L1.experts")
    edit.refused("BEGIN_BACKWARD.0", "issued a second time")


def test_late_begin_backward(edit):
    edit.move("BEGIN_BACKWARD.1", before="B1.final_norm")
    edit.refused("B1.loss", r"needs BEGIN_BACKWARD\.1 first")


# Units


def test_missing_first_gather(edit):
    edit.drop("GATHER.L1")
    edit.refused("F0.L1.attention", "uses L1, which was never gathered")


def test_missing_later_gather():
    edit = Editor(sharded_plan(num_layers=6))
    edit.drop("GATHER.L2", after="F1.L0.attention")
    edit.refused("F1.L2.attention", r"uses L2, which was freed at op \d+")


def test_double_gather(edit):
    edit.insert("GATHER.L0", before="F0.L0.attention")
    edit.refused("GATHER.L0", "already gathered at op")


def test_missing_free(edit):
    edit.drop("FREE.L0")
    edit.refused("GATHER.L0", "already gathered at op")


def test_unit_left_gathered(edit):
    edit.drop("FREE.L0", after="B1.L0.attention")
    edit.refused("GATHER.L0", "left gathered at the end of the plan")


def test_free_twice():
    edit = Editor(sharded_plan(num_layers=6))
    edit.insert("FREE.L2", before="F0.L4.attention")
    edit.refused("FREE.L2", "not gathered")


def test_free_of_a_unit_in_use():
    edit = Editor(sharded_plan(moe_layers=()))
    edit.move("FREE.L0", before="F0.L0.mlp")
    edit.refused("F0.L0.mlp", r"uses L0, which was freed at op \d+")


def test_free_before_reduce(edit):
    edit.move("FREE.L1.experts", before="REDUCE.L1.experts", after="B0.L1.experts")
    edit.refused("FREE.L1.experts", r"comes before REDUCE\.L1\.experts")


def test_unknown_unit(edit):
    edit.insert("GATHER.L5", before="F0.embedding")
    edit.refused("GATHER.L5", "no such unit")


def test_unit_op_in_a_plan_that_is_not_sharded():
    edit = Editor(sharded_plan(sharded=False))
    edit.insert("GATHER.L0", before="F0.embedding")
    edit.refused("GATHER.L0", "no such unit")


# REDUCE


def test_missing_reduce_before_the_next_gradient(edit):
    edit.drop("REDUCE.L1.experts")
    edit.drop("FREE.L1.experts", after="B0.L1.experts")
    edit.refused("B1.L1.experts", r"gives gradients to L1\.experts before REDUCE\.L1\.experts of micro-batch 0")


def test_missing_last_reduce(edit):
    edit.drop("REDUCE.L0", after="B1.L0.attention")
    edit.wait("B1.embedding")
    edit.refused("FREE.L0", r"comes before REDUCE\.L0")


def test_reduce_before_the_last_gradient():
    edit = Editor(sharded_plan(delay_wgrad=True))
    edit.move("REDUCE.L1.experts", before="W0.L1.experts")
    edit.refused("REDUCE.L1.experts", "micro-batch 0 has given 1 of 2 of its gradients")


def test_reduce_without_gradients(edit):
    edit.insert("REDUCE.L1.experts", before="B0.L1.experts")
    edit.refused("REDUCE.L1.experts", "micro-batch 0 has given 0 of 1 of its gradients")


def test_reduce_twice(edit):
    edit.insert("REDUCE.L0", before="B0.embedding")
    edit.refused("REDUCE.L0", "micro-batch 1 has given 0 of 1 of its gradients")


def test_reduce_of_a_frozen_unit():
    edit = Editor(sharded_plan(trainable_units=("L0", "L1")))
    edit.insert("REDUCE.embedding", before="B1.L1.combine")
    edit.refused("REDUCE.embedding", "not trained")


def test_late_reduce_in_the_tail():
    """The rule that lets two backwards interleave: REDUCE of the first comes before the second writes."""
    edit = Editor(sharded_plan(num_layers=3, num_microbatches=4, pair_head_and_tail=True))
    index = edit.find("REDUCE.L2.experts", after="B2.L2.experts")
    reduce = edit.ops.pop(index)
    edit.ops.insert(edit.find("B3.L2.experts") + 1, reduce)
    edit.refused("B3.L2.experts", r"gives gradients to L2\.experts before REDUCE\.L2\.experts of micro-batch 2")


def test_a_tail_without_lag_is_refused():
    edit = Editor(sharded_plan(num_layers=3, num_microbatches=2, pair_head_and_tail=True))
    edit.move("B1.output_layer", before="REDUCE.output_layer")
    edit.move("B1.loss", before="B1.output_layer")
    edit.move("BEGIN_BACKWARD.1", before="B1.loss")
    edit.refused("B1.output_layer", "gives gradients to output_layer before REDUCE")


# Waits


def test_wait_on_a_later_op(edit):
    edit.wait("F0.L0.dispatch", "F0.L0.experts")
    edit.refused("F0.L0.dispatch", r"waits for F0\.L0\.experts, which no earlier op is")


def test_wait_on_an_op_of_its_own_lane(edit):
    edit.wait("F0.L0.experts", "F0.L0.dispatch", "GATHER.L0.experts", "F0.L0.attention")
    edit.refused("F0.L0.experts", r"waits for F0\.L0\.attention, which is issued on its own lane compute")


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("F0.L0.dispatch", r"F0\.L0\.attention"),
        ("B0.L1.experts", r"B0\.L1\.combine"),
        ("F0.L0.attention", r"GATHER\.L0"),
        ("FREE.L0", r"F0\.L0\.attention"),
        ("FREE.L1.experts", r"REDUCE\.L1\.experts|F1\.L1\.experts"),
    ],
)
def test_missing_wait(edit, name, lacking):
    edit.wait(name)
    edit.refused(name, f"does not wait for {lacking} ")


def test_a_name_means_its_latest_occurrence():
    """Each use waits after the GATHER just before it, not after an older one of the same name."""
    plan = sharded_plan(num_layers=6)
    names = [op.name for op in plan.ops]
    for index, op in enumerate(plan.ops):
        for name, other in zip(op.waits, plan.wait_indices[index], strict=True):
            assert names[other] == name
            assert name not in names[other + 1 : index]
    edit = Editor(plan)
    edit.wait("F1.L2.attention")
    edit.refused("F1.L2.attention", "does not wait for ")


@settings(max_examples=120, deadline=None)
@given(plans(), st.data())
def test_a_plan_without_any_one_op_is_refused(plan, data):
    index = data.draw(st.integers(0, len(plan.ops) - 1))
    with pytest.raises(PlanError):
        Plan(plan.shape, plan.ops[:index] + plan.ops[index + 1 :]).validate()


@settings(max_examples=120, deadline=None)
@given(plans(), st.data())
def test_a_plan_with_any_op_twice_is_refused(plan, data):
    index = data.draw(st.integers(0, len(plan.ops) - 1))
    place = data.draw(st.integers(0, len(plan.ops)))
    with pytest.raises(PlanError):
        Plan(plan.shape, (*plan.ops[:place], plan.ops[index], *plan.ops[place:])).validate()
