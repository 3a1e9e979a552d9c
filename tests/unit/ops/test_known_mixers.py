"""Calls of mixers as text and as an operator, and what is claimed of functions."""

import functools
import sys

import pytest
import torch

import cpcompile as cp
import cpcompile.ops
from cpcompile.errors import InputError
from cpcompile.ops.mixers.in_torch import causal_convolution
from cpcompile.ops.mixers.keep_mixers import keep
from cpcompile.ops.mixers.mixer_call import MixerCall, UnknownForm
from cpcompile.ops.mixers.mixer_work import forward_work, shapes_of
from cpcompile.ops.mixers.registry import mixer_of
from cpcompile.ops.mixers.state_passing import _summary, passes_states
from tests.support.stand_in_kernels import causal_conv1d_fn, stand_ins

TOKENS, HEADS, DIM = 7, 2, 4


def running(x, gate, s=None, return_state=False, power=1):
    """s[t] = gate[t] s[t - 1] + x[t]: [B, S, C]."""
    state, results = torch.zeros_like(x[:, 0]) if s is None else s, []
    for i in range(x.shape[1]):
        state = gate[:, i] ** power * state + x[:, i]
        results.append(state)
    y = torch.stack(results, 1)
    return (y, state) if return_state else y


def register(**changed):
    claims = {
        "tokens": {"x": 1, "gate": 1, "return": 1},
        "independent": {
            "channels": {"x": 2, "gate": 2, "s": 1, "return": 2, "return[1]": 1},
            "batch": dict.fromkeys(("x", "gate", "s", "return", "return[1]"), 0),
        },
        "state": cp.MixerState(
            initial="s", final="return_state", result="return[1]", values=("x",)
        ),
    }  # fmt: skip
    cp.register_mixer(running, **(claims | changed))


@pytest.fixture
def operands():
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    return x, gate


def test_the_text_of_a_call_makes_it_again(operands):
    register()
    call, tensors = MixerCall.of(running, (operands[0],), {"gate": operands[1]})
    again = MixerCall.of_text(str(call))
    assert again == call
    assert call.names == ("x", "gate")
    assert call.result_names == ["return[0]"]
    assert torch.equal(again.run(tensors)[0], running(*operands))
    register()
    call, tensors = MixerCall.of(running, operands, {})
    torch.library.opcheck(torch.ops.cp.mixer.default, (tensors, str(call)))
    with torch.autocast("cpu", torch.bfloat16), stand_ins() as kernels:
        x = torch.randn(1, 4, 4)
        call, _ = MixerCall.of(kernels["causal_conv1d_fn"], (x, x[0]), {})
    assert call.autocast == (("cpu", "bfloat16"),)


@pytest.mark.parametrize("read", [slice(2), slice(1, 2)])
def test_the_operator_has_the_results_and_gradients_of_the_function(operands, read):
    """read: which of the results a loss reads."""
    register()
    kwargs = {"return_state": True, "power": 2}
    call, tensors = MixerCall.of(running, operands, kwargs)
    assert call.results == (True, True)
    results = torch.ops.cp.mixer(tensors, str(call)), running(*operands, **kwargs)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    losses = [sum((i + 2) * y.square().sum() for i, y in enumerate(ys[read]))
              for ys in results]  # fmt: skip
    grads = [torch.autograd.grad(x, operands) for x in losses]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (([torch.ones(1)],), "a list of tensors"),
        ((object(),), "type object"),
        ((), "gate"),
    ],
)
def test_other_forms_are_not_known(args, why):
    register()
    with pytest.raises(UnknownForm, match=why):
        MixerCall.of(running, (torch.ones(1, 2, 3), *args), {})


def test_results_for_few_tokens_have_other_shapes_and_dtypes(operands):
    # The total has no tokens, whatever is said.

    def total(x, gate):
        return (x * gate).sum(1, keepdim=True)

    cp.register_mixer(total, tokens={"x": 1, "gate": 1, "return": 1}, independent={})
    call, tensors = MixerCall.of(total, operands, {})
    with pytest.raises(RuntimeError, match=r"returned \[2, 1, 4\].*needed \[2, 7, 4\]"):
        torch.ops.cp.mixer(tensors, str(call))
    # A few tokens are one chunk, and meet no product.

    def mixed(x):
        return x if x.shape[1] < 4 else x @ torch.eye(x.shape[-1])

    cp.register_mixer(mixed, tokens={"x": 1, "return": 1}, independent={})
    x = torch.randn(1, 7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        call, tensors = MixerCall.of(mixed, [x], {})
    (found,) = torch.ops.cp.mixer(tensors, str(call))
    assert torch.equal(found, x.bfloat16().float())


def test_claims_about_other_arguments_are_refused():
    with pytest.raises(
        InputError, match=r"running has no argument 'y'; it has x, gate"
    ):
        register(tokens={"y": 1, "return": 1})
    with pytest.raises(InputError, match="of no result"):
        register(tokens={"x": 1})
    with pytest.raises(InputError, match="no argument 'returned'"):
        register(tokens={"x": 1, "returned": 1})
    with pytest.raises(InputError, match="are needed, a name each"):
        register(state=cp.MixerState("s", None, "return[1]", ("x",)))
    with pytest.raises(InputError, match="needed a function"):
        cp.register_mixer(3, tokens={}, independent={})


@pytest.mark.parametrize(
    ("values", "rows", "columns", "problem"),
    [
        ((), None, None, "values is empty"),
        (("x",), 2, None, "both rows and columns"),
        (("x",), 3, 2, "columns = rows \\+ 1"),
        (("x", "z"), 2, 3, "one argument in values"),
        (("x",), -1, 0, "columns = rows \\+ 1"),
    ],
)
def test_states_that_have_no_summary_are_refused(values, rows, columns, problem):
    def stepped(x, z, initial=None, final=False): ...

    state = cp.MixerState("initial", "final", "return[1]", values, rows, columns)
    with pytest.raises(InputError, match=f"state of .*stepped is .*{problem}"):
        cp.register_mixer(
            stepped, tokens={"x": 1, "return[0]": 1}, independent={}, state=state
        )


def test_claims_are_checked(operands):
    register()
    report = cp.verify(running, *operands)
    assert report.ok, report
    assert len(report.tried) == 8
    # Channels are said to be independent where each reads those before it.

    def along_channels(x, gate):
        return torch.cumsum(x, 2) * gate

    cp.register_mixer(
        along_channels,
        tokens={"x": 1, "gate": 1, "return": 1},
        independent={"channels": {"x": 2, "gate": 2, "return": 2}},
    )
    report = cp.verify(along_channels, *operands)
    assert not report.ok
    (false,) = report.false
    assert false.startswith('argument "x", dimension 2 ("channels")')
    assert f"FALSE: {false}" in str(report)

    def squared(x, gate, s=None, return_state=False):
        y, state = running(x, gate, s, True)
        return (y, state.square()) if return_state else y

    cp.register_mixer(
        squared,
        tokens={"x": 1, "gate": 1, "return": 1},
        independent={},
        state=cp.MixerState("s", "return_state", "return[1]", ("x",)),
    )
    assert any("affine" in x for x in cp.verify(squared, *operands).false)


def test_a_summary_is_the_state_of_any_first_state(operands):
    register()
    call, tensors = MixerCall.of(running, operands, {})
    assert passes_states(call)
    part, decay = _summary(call, dict(zip(call.names, tensors, strict=True)))
    first = torch.randn(2, DIM, dtype=torch.float64)
    _, last = running(*operands, first, return_state=True)
    torch.testing.assert_close(decay * first + part, last, rtol=1e-13, atol=1e-13)


def test_what_is_made_in_parts(operands):
    """No call with a first state, none of documents; a last state is not passed on."""
    register()
    first = torch.zeros(2, DIM, dtype=torch.float64)
    q, g = torch.randn(1, TOKENS, HEADS, DIM), -torch.rand(1, TOKENS, HEADS)
    documents = {"cu_seqlens": torch.tensor([0, 3, TOKENS])}
    with stand_ins() as kernels:
        rule = kernels["chunk_gated_delta_rule"]
        for function, args, kwargs, passes in (
            (running, operands, {}, True),
            (running, (*operands, None), {}, True),  # None is no state
            (running, (*operands, first), {}, False),
            (running, operands, {"return_state": True}, False),
            (rule, (q, q, q, g, g), {}, True),
            (rule, (q, q, q, g, g), documents, False),
        ):
            assert passes_states(MixerCall.of(function, args, kwargs)[0]) == passes
    register(state=None)
    assert not passes_states(MixerCall.of(running, operands, {})[0])
    for function in (str.upper, [].append, functools.partial(print)):
        assert mixer_of(function) is None  # Dynamo calls methods of builtin types, too


@pytest.mark.parametrize(
    ("name", "shapes", "more", "why"),
    [
        ("selective_scan_fn", [(1, 8, 5), (1, 8, 5), (8, 3), (1, 2, 3, 5), (1, 3, 5)],
         {}, "B of 4 dimensions"),
        ("selective_scan_fn", [(1, 8, 5), (1, 8, 5), (8, 3), (8, 3), (1, 3, 5)], {},
         "B of 2 dimensions"),
        ("chunk_gated_delta_rule", [(1, 5, 2, 4)] * 3 + [(1, 5, 2)] * 2,
         {"head_first": True}, "head_first is given"),
    ],
)  # fmt: skip
def test_known_functions_have_forms_of_which_nothing_is_known(name, shapes, more, why):
    """Dimensions would be others than those of the table."""
    with stand_ins() as kernels:
        function = kernels[name]
        tensors = [torch.zeros(shape) for shape in shapes]
        with pytest.raises(UnknownForm, match=why):
            MixerCall.of(function, tensors, more)
        if more:  # a switch that is off
            MixerCall.of(function, tensors, dict.fromkeys(more, False))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_convolution_of_documents_stays_a_kernel(by_name):
    """Torch's formula has no documents, however they are given."""
    with stand_ins() as kernels:
        function = kernels["causal_conv1d_fn"]
        x, weight, bias = torch.ones(1, 2, 5), torch.ones(2, 3), torch.ones(2)
        documents = torch.zeros(1, 5, dtype=torch.int32)
        assert keep(function, [x, weight, bias], {}) is causal_convolution
        args = [x, weight, bias, *([] if by_name else [documents])]
        kept = keep(function, args, {"seq_idx": documents} if by_name else {})
        assert isinstance(kept, tuple)
        assert MixerCall.of_text(kept[1]).names[-1] == "seq_idx"


def test_which_calls_become_others(monkeypatch):
    # One of torch would not keep documents apart.
    with stand_ins() as kernels:
        function = kernels["mamba_split_conv1d_scan_combined"]
        args = [torch.ones(1, 5, 2)] + [torch.ones(2, 3)] * 5 + [8]
        plain = keep(function, args, {})
        documents = {"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}
        ours = keep(function, args, documents)
        assert callable(plain) and callable(ours) and ours is not plain
        assert keep(function, args, documents) is ours
        monkeypatch.delitem(sys.modules, "causal_conv1d")
        assert keep(function, args, documents) is None
    with stand_ins() as kernels:

        @functools.wraps(kernels["causal_conv1d_fn"])
        def doubled(x, *args, **kwargs):
            return 2 * kernels["causal_conv1d_fn"](x, *args, **kwargs)

        assert keep(doubled, [torch.ones(1, 2, 5), torch.ones(2, 3)], {}) is None


def test_a_function_may_be_registered_anew(operands):
    """The last of two that have one name is called."""
    for factor in (1, 3):

        def scaled(x, gate, factor=factor):
            return torch.cumsum(x * gate, 1) * factor

        cp.register_mixer(
            scaled, tokens={"x": 1, "gate": 1, "return": 1}, independent={}
        )
        call, tensors = MixerCall.of(scaled, operands, {})
        (computed,) = torch.ops.cp.mixer(tensors, str(call))
        assert torch.equal(computed, scaled(*operands))


def test_work_grows_with_the_tokens():
    def products(x):
        return torch.cumsum(x @ x.new_ones(8, 8), 1)

    cp.register_mixer(products, tokens={"x": 1, "return": 1}, independent={})
    works = []
    for tokens in (128, 1024):
        call, tensors = MixerCall.of(products, (torch.ones(1, tokens, 8),), {})
        works.append(forward_work(str(call), shapes_of(tensors)))
    assert works[0].flops == 2 * 128 * 8 * 8
    assert works[1].flops == 8 * works[0].flops
    assert works[1].bytes > 7 * works[0].bytes > 0


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_causal_convolution_in_torch(activation):
    x, weight, bias = torch.randn(2, 3, 9), torch.randn(3, 4), torch.randn(3)
    torch.testing.assert_close(
        causal_convolution(x, weight, bias, activation=activation),
        causal_conv1d_fn(x, weight, bias, activation=activation),
    )
