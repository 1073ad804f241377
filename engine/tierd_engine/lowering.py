"""Stretches of a recorded decode step become jobs of the team: what lies between two attentions.

A stretch is a run of calls of a recording (recorded.py) that we have operators for
(attention/stretch.py), with a product among them. Its results stand at fixed addresses, so that
it is all written down once; a step copies in what comes from elsewhere (the attention's output)
and runs it. Every other call of the recording stays as it is, at its place.

Products of the same rows in one stretch are one phase: queries, keys and values; gate and up.

Invariants:
  each result of a stretch has memory of its own, which nothing writes to until the next step
  calls keep their order: a stretch holds calls that were next to each other
  what a recording returns is no memory of a stretch
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tierd_engine.attention.stretch import ADD, DIVIDE, MULTIPLY, NORM, ROTARY, SCALE, SILU
from tierd_engine.cache import TierLayer
from tierd_engine.fewnorms import FewRowsNorm
from tierd_engine.fewrotary import are_one_token, is_ours
from tierd_engine.fewrows import RowsLinear
from tierd_engine.rowproduct import KINDS
from tierd_engine.stretches import Stretch
from tierd_engine.wholestep import Attended

T = TypeVar("T")
Node = Any  # a torch.fx.Node, whose arguments have all the types that there are
EXAMPLE = "example"  # of a node's `meta`: the tensor, or tuple of tensors, that it gave

_VIEWS = frozenset(
    ("view", "reshape", "transpose", "contiguous", "unsqueeze", "squeeze", "flatten", "permute",
     "__getitem__", "chunk", "split")
)  # fmt: skip
_NOTHING = torch.nn.functional.dropout  # in a model that is not trained
_NO_WRITES = frozenset(("__invert__", "__index__", "__int__"))
_METHODS = {"add": ADD, "__add__": ADD, "mul": MULTIPLY, "__mul__": MULTIPLY}
_BY_NUMBER = {
    "mul": SCALE,
    "__mul__": SCALE,
    "__rmul__": SCALE,
    "div": DIVIDE,
    "__truediv__": DIVIDE,
}
_FUNCTIONS = {torch.add: ADD, torch.mul: MULTIPLY, torch.nn.functional.silu: SILU}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A recording with its stretches as calls, the constants that it gained, and the stretches.

    `attended`: what stands between each of them and the next, if that is attention and nothing
    else from the first of them on; else empty, and `problem` says why.
    """

    graph: torch.fx.Graph
    constants: dict[str, torch.Tensor]
    stretches: list[Stretch]
    attended: list[Attended]
    problem: str | None

    def as_one(self, run: Callable[..., None]) -> torch.fx.Graph:
        """Return the recording with one call in place of all from the first stretch on."""
        graph = torch.fx.Graph()
        nodes: dict[Node, Node] = {}
        *calls, memory, own, output = self.graph.nodes
        for node in calls:
            if node.target == self.stretches[0].run:
                graph.call_function(run, tuple(nodes[one] for one in node.args))
                break
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
        for node in (memory, own, output):
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
        return graph


def lowered(graph: torch.fx.Graph) -> Lowered:
    """Lower a recording. One with writes to tensors that are there stays as it is."""
    if any(map(_writes, graph.nodes)):
        return Lowered(graph, {}, [], [], "it writes to tensors that are there")
    lowering = _Lowering()
    for node in graph.nodes:
        lowering.add(node)
    attended = lowering.attended()
    problem = None if attended else lowering.problem()
    return Lowered(lowering.graph, lowering.constants, lowering.stretches, attended, problem)


def _writes(node: Node) -> bool:
    """Whether a call may write to a tensor that is there: copies would miss it."""
    if node.op not in ("call_method", "call_function"):
        return False
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
        return True
    name = node.target if node.op == "call_method" else node.target.__name__
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITES)
    return bool(name.endswith("_"))


class _Lowering:
    """Goes over a recording once, and makes another."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._nodes: dict[Node, Node] = {}  # of the recording: in the other one
        self._fixed: dict[Node, Any] = {}  # what stands at an address: a tensor, or a pair
        self.stretches: list[Stretch] = []
        self._between: list[list[Node]] = [[]]  # the calls before, between and behind stretches
        self._run: list[Node] = []
        self._dtype: torch.dtype | None = None  # of the run's operators

    def add(self, node: Node) -> None:
        """Take the next call."""
        if _is_lowerable(node):
            dtype = node.args[0].meta[EXAMPLE].dtype
            if self._dtype not in (None, dtype):
                self._end_run()
            self._dtype = dtype
            self._run.append(node)
        elif _is_view(node):
            self._run.append(node)
        else:
            self._end_run()
            if node.op == "output" and node.args[0] in self._fixed:
                own = self.graph.call_method("clone", (self._node(node.args[0]),))
                self.graph.output(own)
                self._between[-1].append(node)
            else:
                self._copy(node)

    def _end_run(self) -> None:
        run, dtype = self._run, self._dtype
        self._run, self._dtype = [], None
        if dtype is None or not any(_ours(node, RowsLinear) for node in run):
            for node in run:
                self._copy(node)
            return
        stretch, inputs = Stretch(dtype), []

        def tensor(node: Node) -> Any:
            if node not in self._fixed:
                inputs.append(self._nodes[node])
                self._fixed[node] = stretch.take(node.meta[EXAMPLE])
            return self._fixed[node]

        for node in run:
            self._fixed[node] = _put(node, stretch, tensor)
        stretch.end()
        self.stretches.append(stretch)
        self._between.append([])
        self.graph.call_function(stretch.run, tuple(inputs))

    def attended(self) -> list[Attended]:
        """See Lowered."""
        *inner, last = self._between[1:] or [[]]
        if not inner or [node.op for node in last] != ["output"]:
            return []
        if any(len(stretch.inputs) != 1 for stretch in self.stretches[1:]):
            return []
        found = [self._attention(calls) for calls in inner]
        return [one for one in found if one is not None] if None not in found else []

    def problem(self) -> str:
        """Why there is something else between the stretches."""
        calls = {
            _name_of(node)
            for run in self._between[1:]
            for node in run
            if node.op in ("call_function", "call_method") and _ours(node, TierLayer) is None
        }
        if not self.stretches:
            return "none of its calls is a product of ours"
        if calls:
            return f"there is no operator of ours for {', '.join(sorted(calls))}"
        return "its layers are not one attention each"

    def _attention(self, calls: list[Node]) -> Attended | None:
        """What two calls are that append to a layer and attend; None if they are others."""
        layers = [_ours(node, TierLayer) for node in calls]
        if len(calls) != 2 or layers[0] is None or layers[0] is not layers[1]:
            return None
        take, attend = calls
        keys, values = take.args
        query, scale = attend.args[0], attend.args[3]
        parts: Any = [self._fixed.get(node) for node in (query, keys, values, attend)]
        if any(part is None or not part.is_contiguous() for part in parts):
            return None
        q, k, v, o = parts
        return Attended(layers[0].layer, q, k, v, o, scale)

    def _copy(self, node: Node) -> None:
        self._between[-1].append(node)
        self._nodes[node] = self.graph.node_copy(node, self._node)

    def _node(self, node: Node) -> Node:
        """The other recording's node for a value of this one's."""
        if node not in self._nodes:
            name = f"fixed_{len(self.constants)}"
            self.constants[name] = self._fixed[node]
            self._nodes[node] = self.graph.create_node("get_attr", name)
        return self._nodes[node]


def _ours(node: Node, kind: type[T]) -> T | None:
    """Whose method a call is, if an object of `kind`'s."""
    owner = getattr(node.target, "__self__", None)
    return owner if isinstance(owner, kind) else None


def _name_of(node: Node) -> str:
    """What people call a call."""
    owner = getattr(node.target, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return node.target if isinstance(node.target, str) else str(node.target.__name__)


def _put(node: Node, stretch: Stretch, tensor: Callable[[Node], torch.Tensor]) -> Any:
    """Add a call to a stretch; return where its result will stand."""
    if node.target is operator.getitem:
        source, index = node.args
        return tensor(source)[index]  # of a tuple
    if _is_view(node):
        (source, *rest), named = node.args, node.kwargs
        if node.target is _NOTHING:
            return tensor(source)
        return getattr(tensor(source), node.target)(*rest, **named)
    read = [tensor(argument) for argument in node.args if isinstance(argument, torch.fx.Node)]
    example = node.meta[EXAMPLE]
    if is_ours(node.target):
        queries, keys = read[:2]
        (_, heads, _, head_dim), more = queries.shape, keys.shape[1]
        out = torch.empty((1, heads + more, 1, head_dim), dtype=queries.dtype)
        stretch.operate(ROTARY, [*read, out], rows=heads, more=more, width=head_dim)
        return out[:, :heads], out[:, heads:]
    out = torch.empty(example.shape, dtype=example.dtype)
    if (linear := _ours(node, RowsLinear)) is not None:
        stretch.multiply(linear, read[0], out)
    elif (norm := _ours(node, FewRowsNorm)) is not None:
        rows, width = out.numel() // norm.width, norm.width
        tensors = [read[0], norm.weight, out]
        stretch.operate(NORM, tensors, rows=rows, width=width, epsilon=norm.epsilon)
    elif (kind := _kind_by_number(node)) is not None:
        stretch.operate(kind, [*read, out], width=out.numel(), factor=node.args[1])
    else:
        kind = _kind_of(node)
        assert kind is not None
        stretch.operate(kind, [*read, out], width=out.numel())
    return out


def _kind_of(node: Node) -> int | None:
    """Which operator on elements a call is."""
    kinds: dict[Any, int] = _METHODS if node.op == "call_method" else _FUNCTIONS
    return kinds.get(node.target)


def _kind_by_number(node: Node) -> int | None:
    """Which operator on elements and a number a call is."""
    if node.op != "call_method" or len(node.args) != 2 or type(node.args[1]) not in (int, float):
        return None
    return _BY_NUMBER.get(node.target)


def _is_lowerable(node: Node) -> bool:
    """Whether there is an operator for a call, of these tensors."""
    if node.op not in ("call_function", "call_method"):
        return False
    read = [a.meta[EXAMPLE] for a in node.args if isinstance(a, torch.fx.Node)]
    by_number = _kind_by_number(node) is not None
    if len(read) + by_number != len(node.args) or not read or not all(map(_fits, read)):
        return False
    x = read[0]
    if any(one.dtype is not x.dtype for one in read) or any(node.kwargs.values()):
        return False
    if by_number:
        return True
    if (linear := _ours(node, RowsLinear)) is not None:
        return linear.products.rows_of(x) == 1
    if (norm := _ours(node, FewRowsNorm)) is not None:
        return norm.takes(x)
    if is_ours(node.target):
        return len(read) == 4 and are_one_token(*read)
    wanted = 1 if _kind_of(node) == SILU else 2
    same = all(one.shape == x.shape for one in read)
    return _kind_of(node) is not None and len(read) == wanted and same


def _fits(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in KINDS and x.is_cpu and x.is_contiguous()


def _is_view(node: Node) -> bool:
    """Whether a call gives memory of its first argument, by numbers alone."""
    if node.op not in ("call_function", "call_method"):
        return False
    source = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node) or len(node.all_input_nodes) > 1:
        return False
    if node.target is operator.getitem:
        return _is_view(source) or (is_ours(source.target) and _is_lowerable(source))
    if node.target not in _VIEWS and node.target is not _NOTHING:
        return False
    made = node.meta[EXAMPLE]
    parts = made if isinstance(made, tuple) else (made,)
    memory = {one.untyped_storage().data_ptr() for one in (source.meta[EXAMPLE], *parts)}
    return len(memory) == 1
