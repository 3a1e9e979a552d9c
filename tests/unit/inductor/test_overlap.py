"""The order of shifts, steps and waits is read from code as Inductor writes it."""

from textwrap import dedent

import pytest

from cpcompile.compile.overlap import check_overlap, shifts
from cpcompile.errors import RingOverlapError
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT

KV_0 = "keys and values of the forward of ring attention, step 0"
KV_1 = "keys and values of the forward of ring attention, step 1"
DKDV = "dk and dv of the backward of ring attention, step 0"


def shift(result, where=KV_0):
    return f"""
        # Source Nodes: [ring_shift], Original ATen: [cp.ring_shift]
        {result} = torch.ops.cp.ring_shift.default([arg1_1, buf0], '0', '{where}')
        {result}_k = {result}[0]
        assert_size_stride({result}_k, (2, 4, 8, 16), (512, 128, 16, 1))
        {result}_v = {result}[1]
    """


def wait(result, *parts):
    lines = [
        f"torch.ops._c10d_functional.wait_tensor.default({result}_{part})"
        for part in parts or "kv"
    ]
    return "\n        ".join(["", *lines, f"del {result}_k"])


OPERATOR = """
        buf9 = torch.ops.cp.attention_step.default(arg0_1, buf7, buf8, None, None)
        buf10 = buf9[0]
"""
TEMPLATE = """
        buf9 = empty_strided_cuda((2, 4, 8, 16), (512, 128, 16, 1), torch.float32)
        stream0 = get_raw_stream(0)
        triton_tem_fused_attention_step_3.run(arg0_1, buf9, 1, 4, 2, stream=stream0)
"""
STEPS = {
    "operator": OPERATOR,
    "operator of a backward": OPERATOR.replace("step.", "step_backward."),
    "template": TEMPLATE,
    "template of a backward": TEMPLATE.replace("step_3", "step_backward_11"),
    "template without a number": TEMPLATE.replace("step_3", "step_backward"),
    "template with its name": TEMPLATE.replace("fused", "fused_add_cp"),
}
OTHERS = {
    "nothing": "",
    "a pointwise kernel": TEMPLATE.replace("tem_fused_attention_step", "poi_fused_add"),
    "a fused kernel of that name": TEMPLATE.replace("triton_tem", "triton_poi"),
    "another template": TEMPLATE.replace("attention_step", "mm"),
    "a definition": "triton_tem_fused_attention_step_3 = async_compile.triton('x', '''",
    "a comment": "# Source Nodes: [attention_step], Original ATen: [cp.attention_step]",
    "a whole ring": "buf9 = torch.ops.cp.ring_attention.default(arg0_1, arg1_1)",
}


def module(*parts):
    """A generated module whose `call` has these lines."""
    body = "".join(parts)
    return (
        f"import torch\n\ndef call(args):\n    with stream:\n{body}\n    return (x,)\n"
    )


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_right_order(step):
    code = module(shift("buf1"), step, wait("buf1"))
    (found,) = check_overlap(code)
    lines = code.splitlines()
    assert found.where == KV_0
    assert "ring_shift.default(" in lines[found.started]
    assert "wait_tensor.default(buf1_k)" in lines[found.waited]
    (launched,) = found.steps
    assert "attention_step" in lines[launched]
    assert found.started < launched < found.waited


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("step", [OPERATOR, TEMPLATE], ids=["operator", "template"])
def test_a_step_before_or_after_hides_nothing(step, other):
    code = module(step, shift("buf1"), other, wait("buf1"), step)
    (found,) = shifts(code)
    assert found.steps == () and not found.is_hidden
    with pytest.raises(RingOverlapError):
        check_overlap(code)


BEYOND = (
    "; needed: shift, step, wait. An option of Inductor that reorders nodes may be the "
    "cause; cpcompile.config.unroll = 0 runs a ring as one operator"
)
NEVER = f"is never waited for, or not all of it{BEYOND}"
EARLY = (
    "is sent in line 10 and waited for in line 15, with no attention step in between"
    f"{BEYOND}"
)
WRONG = {
    "too early": (
        module(OPERATOR, shift("buf1"), wait("buf1"), OPERATOR),
        f"the message with {KV_0} {EARLY}",
    ),
    "never": (
        module(shift("buf1", DKDV), OPERATOR),
        f"the message with {DKDV} {NEVER}",
    ),
    # What arrives together is waited for together.
    "a part too early": (
        module(shift("buf1"), wait("buf1", "k"), OPERATOR, wait("buf1", "v")),
        f"the message with {KV_0} is sent",
    ),
    "a part never": (
        module(shift("buf1"), OPERATOR, wait("buf1", "k")),
        f"the message with {KV_0} {NEVER}",
    ),
    "one of several": (
        module(
            *(shift("buf1"), OPERATOR, wait("buf1")),
            *(shift("buf2", KV_1), wait("buf2"), OPERATOR),
        ),
        f"the message with {KV_1} is sent",
    ),
}


@pytest.mark.parametrize(("code", "text"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(code, text):
    with pytest.raises(RingOverlapError) as caught:
        check_overlap(code)
    message = str(caught.value)
    assert message.startswith(f"in the generated code {text}")
    assert message.endswith(BEYOND)
    if "line 10" in text:
        lines = code.splitlines()
        assert "ring_shift" in lines[10 - 1] and "wait_tensor" in lines[15 - 1]


def test_other_messages():
    # Where the rank sees nothing of the chunk, there is no step to wait for.
    code = module(shift("buf1", KV_0 + NOTHING_TO_HIDE_IT), wait("buf1"))
    (found,) = check_overlap(code)
    assert found.steps == () and found.is_hidden
    # It still has to be waited for.
    with pytest.raises(RingOverlapError, match="is never waited for"):
        check_overlap(module(shift("buf1", KV_0 + NOTHING_TO_HIDE_IT)))
    code = dedent("""
        buf0 = torch.ops._c10d_functional.all_reduce_.default(arg0_1, 'sum', '0')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        buf1 = torch.ops._c10d_functional.all_to_all_single.default(buf0, [1], [1], '0')
        buf2 = buf1[0]
        torch.ops._c10d_functional.wait_tensor.default(buf2)
    """)
    assert check_overlap(code) == ()


def test_a_ring():
    """The next message may be sent before the last one is waited for."""
    code = module(
        shift("buf1"),
        OPERATOR,
        shift("buf2", DKDV),
        wait("buf1"),
        shift("buf3", KV_1),
        TEMPLATE,
        wait("buf2"),
        wait("buf3"),
    )
    found = check_overlap(code)
    assert [x.where for x in found] == [KV_0, DKDV, KV_1]
    assert [len(x.steps) for x in found] == [1, 1, 1]
    assert found[1].steps == found[2].steps
