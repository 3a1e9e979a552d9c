"""Give passes all that they must know in a `Context`; passes ask nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.mixer_plan import MixerPlan, MixerStrategy
from cpcompile.cost.plans import Latents, Plan, Strategy
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.masks import Mask
from cpcompile.options import GradSync
from cpcompile.ranks.digests import value_text
from cpcompile.ranks.layout_marks import mark
from cpcompile.ranks.mesh_factors import HybridGroups, hybrid_groups, known_groups

IN_WINDOWS = "its tokens are in windows, of which every rank has whole ones"


@dataclass(frozen=True)
class AttentionCall:
    """One attention call, read from the graph; nothing is changed by reading it.

    q is [B, H, Sq, D], k is [B, G, Sk, D], v is [B, G, Sk, E], or all without H and G.
    `dtype` is the dtype of the result: under autocast q, k and v may have another one.
    softcap and sinks are set for attention that was written by hand, see
    plain_attention. `unsupported` says why the call cannot be rewritten, in words for
    the user.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    dropout_p: float
    is_causal: bool
    scale: float
    path: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    dtype: torch.dtype
    softcap: float = 0.0
    sinks: fx.Node | None = None  # [H]
    score_mod: str = ""  # the text of a function of its scores, see score_mod.py
    values: fx.Node | None = None  # what score_mod reads, [1, 1, n]
    lse: fx.Node | None = None  # the log-sum-exp of its scores, if that is read
    unsupported: str | None = None
    already_local: str | None = None  # nothing to do here, and why

    @property
    def in_windows(self) -> bool:
        """Tell whether every rank has whole windows of tokens, which see each other."""
        return self.already_local == IN_WINDOWS

    @property
    def changes_scores(self) -> bool:
        """Tell whether scores are changed, and so are computed under key ranges."""
        return bool(self.softcap or self.dropout_p or self.score_mod)


class InputKind(Enum):
    """The way in which a graph input enters the sharded program."""

    PLAIN = "plain"  # the same on every rank; used as it is
    PARAMETER = "parameter"  # a plain parameter
    ACTIVATION = "activation"  # plain, differentiable, from the graph before a break
    FULL = "full"  # plain and full, to be sharded along `dim`
    DTENSOR = "dtensor"  # already distributed with `placements`
    KEPT = "kept"  # a DTensor that is memory of the caller, as a cache of keys
    OTHER_AXES = "other axes"  # a DTensor on other axes, as tensor parallelism makes
    LOCAL_PART = "local part"  # of a parameter that the graph gathers


PARAMETERS = (InputKind.PARAMETER, InputKind.OTHER_AXES)
_DTENSORS = (InputKind.DTENSOR, InputKind.KEPT, InputKind.OTHER_AXES)


@dataclass(frozen=True)
class GraphInput:
    """A graph input, and what is known of it in addition to its shape."""

    kind: InputKind
    dim: int | None = None
    placements: tuple[Placement, ...] = ()
    gradient: GradSync = GradSync.REDUCE  # what the gradient that leaves the graph is
    reducer: str | None = None  # in words, what reduces the gradient after the graph
    layout: Layout = Layout.CONTIGUOUS  # of the tokens of a DTensor
    tokens: int = 0  # their number, in another layout
    name: str | None = None  # of the argument, "batch.tokens"
    inferred: bool = False  # whether `dim` was read from the graph
    chunks: DeviceMesh | None = None  # whose ranks have chunks of this rank's tokens

    @property
    def is_dtensor(self) -> bool:
        """Tell whether the input is a DTensor to the graph."""
        return self.kind in _DTENSORS

    @property
    def has_local_part(self) -> bool:
        """Tell whether it is a DTensor outside, whose local part enters the program."""
        return self.is_dtensor or self.kind is InputKind.LOCAL_PART


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor of a module that has no gradient, with the value that it has now.

    source: the way in which Dynamo finds the tensor.
    """

    name: str  # "buffer layers.0.mask"
    value: Tensor
    source: Any


@dataclass(frozen=True)
class OutputPlacement:
    """The placement of a result that leaves the graph as a local tensor.

    It makes a DTensor of that tensor again. shape and stride are None where all shards
    are equal: then they follow from the local tensor. mesh: the mesh of a user's
    DTensor on other axes.
    """

    placements: tuple[Placement, ...]
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    layout: Layout = Layout.CONTIGUOUS
    mesh: DeviceMesh | None = None

    def wrap(self, result: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor whose local part here is `result`; differentiable."""
        whole = DTensor.from_local(
            result,
            self.mesh or mesh,
            self.placements,
            run_check=False,
            shape=None if self.shape is None else torch.Size(self.shape),
            stride=self.stride,
        )
        mark(whole, self.layout)
        return whole


@dataclass(frozen=True, eq=False)
class LaterResult:
    """A result that is made after the program, of a DTensor that is in its place.

    number: which result. program: makes it of that DTensor, and of some inputs of the
    graph. inputs: which. name: with its shape, "logits [1, 8192, 32000]".
    """

    number: int
    program: fx.Graph
    inputs: tuple[int, ...]
    name: str

    def run(
        self, source: DTensor, args: Sequence[Any], placement: OutputPlacement
    ) -> DTensor:
        """Return the result, differentiable; args: those of the graph."""
        operands = (source, *(args[i] for i in self.inputs))
        # A graph's code could not name the axis of the mesh that is among arguments.
        call = fx.Interpreter(torch.nn.Module(), graph=self.program)
        result: DTensor = call.run(*operands)
        mark(result, placement.layout)
        return result


@dataclass(frozen=True)
class MaskSource:
    """The nodes that compute a mask, in order, and the inputs that they start from.

    `outer` says what the placeholders of checkpoint regions stand for. `until` is the
    first write to memory of the inputs after its last use: the mask is read before it.
    """

    mask: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outer: dict[fx.Node, fx.Node]
    until: fx.Node | None = None


@dataclass
class Findings:
    """All that passes find out, each field with the pass that writes it.

    A pass says by `graph_pass` which of these fields it reads and writes.
    """

    # fold_attention_patterns: attention over a sequence that stays as it is, with why
    unmatched_attention: list[tuple[fx.Node, str]] = field(default_factory=list)
    # fold_attention_patterns: softmaxes over windows, heads or channels
    other_softmaxes: list[fx.Node] = field(default_factory=list)
    # fold_attention_patterns: softmaxes that are computed by rows, with why
    row_parallel: list[tuple[fx.Node, str]] = field(default_factory=list)
    # find_attention
    calls: list[AttentionCall] = field(default_factory=list)
    # rewrite_masks: what the masks of calls say; calls that are merely causal have none
    masks: dict[AttentionCall, Mask] = field(default_factory=dict)
    # rewrite_masks: the `buffers` for whose present value alone the program is right
    read_by_value: set[fx.Node] = field(default_factory=set)
    # rewrite_masks: the nodes that compute masks that were read, to be erased when
    # nothing reads them
    mask_sources: list[MaskSource] = field(default_factory=list)
    # find_latents: of calls whose keys and values are made of something narrower
    key_sources: dict[AttentionCall, KeySources] = field(default_factory=dict)
    # choose_strategy, and localise for the order of tokens that it chooses: one entry
    # per call that is rewritten
    plans: dict[AttentionCall, Plan] = field(default_factory=dict)
    # choose_strategy: the best plans on either side of a relayout
    contiguous_plans: dict[AttentionCall, Plan] = field(default_factory=dict)
    balanced_plans: dict[AttentionCall, Plan] = field(default_factory=dict)
    # exchange_mixers: what mixes tokens and is no attention
    mixers: list[MixerPlan] = field(default_factory=list)
    # enter_other_axes, then localise: one entry per result; None stays what it is
    outputs: list[OutputPlacement | None] = field(default_factory=list)
    # leave_for_later: results that are made after the program
    later_results: list[LaterResult] = field(default_factory=list)
    # localise: results that leave whole: "add [2, 16, 8]"
    gathered_results: list[str] = field(default_factory=list)
    # localise: softmaxes by hand, by name, with the dimension that is cut
    rows_by_hand: dict[str, int] = field(default_factory=dict)
    # localise: which ranks have what of a mask that was not read, by its plan's place
    mask_forms: dict[int, str] = field(default_factory=dict)
    # localise: how many calls ranks have parts of
    localised: int = 0
    # begin_tokens: values in which tokens begin, that no input has: "conv1d [2, 9, 8]"
    token_origins: list[str] = field(default_factory=list)
    # localise: relayouts of the forward, and how many it has less than if each call in
    # a balanced layout were laid out by itself
    relayouts: int = 0
    relayouts_cancelled: int = 0


@dataclass(frozen=True)
class KeySources:
    """What the keys and values of an attention call are made of, if it is narrower.

    gathered: values, each with the dimension that has its tokens.
    computed: the calls that make the keys and values of them, token by token.
    share: bytes of what is gathered over those of keys and values.
    sizes: of all this, for the cost model.
    """

    gathered: dict[fx.Node, int]
    computed: set[fx.Node]
    share: float
    sizes: Latents


@dataclass(frozen=True, eq=False)
class Context:
    """All that a program is compiled for; `findings` goes from pass to pass."""

    mesh: DeviceMesh
    axis: int
    inputs: dict[fx.Node, GraphInput]
    profile: HardwareProfile
    strategy: Strategy | None = None
    mixer_strategy: MixerStrategy | None = None
    memory_budget: int | None = None
    degrees: CPDegrees | None = None  # the user's mesh factorises the axis so
    layout: Layout | None = None  # the user's; None leaves it to the plan
    tie_fraction: float = 0.05
    whole_mask_share: float = 1.0  # see unread_masks.is_large
    strict: bool = True
    gather_limit: float = math.inf  # bytes of a result that leaves as a plain tensor
    later_bytes: float = math.inf  # per rank, of results that may be made later
    keeps_layout: bool = False  # results leave in the layout in which inputs lie
    backward: bool = True
    length: torch.SymInt | None = None  # of the sequence, where it stays a symbol
    rows: torch.SymInt | None = None  # of the batch, where it stays a symbol
    # inputs whose value may become a part of the program
    buffers: dict[fx.Node, Buffer] = field(default_factory=dict)
    # compares texts with those of the other ranks, item by item
    compare: Callable[[dict[str, str]], None] = lambda items: None
    # gives the texts of all ranks for the text of this rank
    all_gather_text: Callable[[str], Sequence[str]] = lambda text: [text]

    findings: Findings = field(default_factory=Findings)

    @property
    def attention_bytes(self) -> float:
        """Extra bytes per rank that an attention call may take."""
        budget = self.memory_budget
        return self.profile.memory_bytes if budget is None else budget

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return self.mesh.size(self.axis)

    @property
    def takes_dtensors(self) -> bool:
        """Tell whether an input is a DTensor on the mesh of the sequence."""
        return any(x.kind is InputKind.DTENSOR for x in self.inputs.values())

    def leave_other_axes(self) -> None:
        """Let DTensors on other axes go through the graph as they are."""
        for node, graph_input in self.inputs.items():
            if graph_input.kind is InputKind.OTHER_AXES:
                self.inputs[node] = replace(graph_input, kind=InputKind.PLAIN)

    @property
    def group_name(self) -> str:
        return str(self.mesh.get_group(self.axis).group_name)

    def hybrid_groups(self, degrees: CPDegrees) -> HybridGroups:
        """Return the groups of a factorisation of the axis, and make them if need be.

        All ranks make them together, so the plans are compared before.
        """
        groups = known_groups(self.mesh, self.axis, degrees)
        if groups is not None:
            return groups
        self.compare(self.plan_texts())
        return hybrid_groups(self.mesh, self.axis, degrees)

    def plan_texts(self) -> dict[str, str]:
        """Return the plan of every attention call in words; the same on every rank.

        The values of buffers that masks were read from are included.
        """
        read = [
            x for node, x in self.buffers.items() if node in self.findings.read_by_value
        ]
        return {f"value of {x.name}": value_text(x.value) for x in read} | {
            f"plan of call {number} at {call.path}": plan.chosen.label
            for number, (call, plan) in enumerate(self.findings.plans.items())
        }

    @property
    def has_symbols(self) -> bool:
        """Tell whether some sizes are symbols."""
        return self.length is not None or self.rows is not None

    def sequence_lengths(self) -> list[int]:
        """Return the sequence lengths that attention calls share out over the ranks."""
        lengths = []
        for call in self.findings.calls:
            plan = self.findings.plans.get(call)
            if plan is None or plan.strategy is not Strategy.SPLIT_KV:
                lengths.append(call.q_shape[-2])
            lengths.append(call.k_shape[-2])
        return lengths
