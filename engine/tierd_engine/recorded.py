"""A decode step as a recording: the calls that a model makes for one token, without its Python.

For one token a model's own Python (modules, arguments, looks at shapes) takes longer than many
of the operators that it calls, and says the same at each step, as tokens and positions are
tensors. So a step is recorded while it runs (PyTorch's function modes) into a `torch.fx` graph of
what it called, and run from that once two recordings, at different positions, are the same.

A position that becomes a number in the model's Python makes the recordings differ; a look at a
tensor's value (`if`, `item`) ends one: such a model goes on as it is. What is ours in a step
(fewrows.py, fewnorms.py, fewrotary.py, cache.py) offers itself to function modes by PyTorch's
protocol (`handle_torch_function`), and is recorded as one call each.

Invariants:
  a graph runs only for one token, in inference mode, with the cache it was recorded with
  a graph's constants are tensors that both recordings met: weights, buffers
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tierd_engine.cache import TierCache, cached_in
from tierd_engine.lowering import EXAMPLE, lowered
from tierd_engine.session import SessionKV
from tierd_engine.wholestep import UnfinishedStep, WholeStep, fits

RECORDINGS_MAX = 4  # of a model whose steps differ, before it is left alone

# What tells of a tensor without looking at its elements: the same for every step of one token.
_ATTRIBUTES = frozenset(
    ("shape", "dtype", "device", "layout", "ndim", "is_cpu", "is_cuda", "is_meta", "requires_grad",
     "itemsize", "nbytes", "is_sparse", "is_nested", "is_quantized")
)  # fmt: skip
_METHODS = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset",
     "is_contiguous", "is_floating_point", "is_complex", "get_device", "__len__", "is_inference")
)  # fmt: skip
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format, type(Ellipsis))  # fmt: skip


class Recorder(TorchFunctionMode):
    """Under it calls run as always, and are written down."""

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.problem: str | None = None  # why this is no recording
        self.constants: dict[str, torch.Tensor] = {}
        self._nodes: dict[int, torch.fx.Node] = {}
        self._kept: list[torch.Tensor] = []  # a tensor's id stands for it while it lives
        for name, tensor in inputs.items():
            self._know(tensor, self.graph.placeholder(name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and write it down unless it only tells what a tensor is like."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.problem is None and not _tells(func):
            try:
                self._results(self._call(func, args, kwargs), result)
            except _NotRecordable as error:
                self.problem = str(error)
        return result

    def end(self, result: torch.Tensor) -> None:
        """Write down what the step returns."""
        node = self._nodes.get(id(result))
        if node is None:
            self.problem = self.problem or "its result is no call's"
        else:
            self.graph.output(node)

    def is_same(self, other: Recorder) -> bool:
        """Whether both made the same calls, with the same constants."""
        names = self.constants.keys()
        return (
            self.problem is None is other.problem
            and names == other.constants.keys()
            and all(self.constants[name] is other.constants[name] for name in names)
            and len(self.graph.nodes) == len(other.graph.nodes)
            and all(map(_is_same_call, self.graph.nodes, other.graph.nodes))
        )

    def _call(self, func: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        args, kwargs = self._argument(tuple(args)), self._argument(kwargs)
        name = func.__name__
        if getattr(torch.Tensor, name, None) is func:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, tuple | list):  # torch.Size too
            made = [self._argument(one) for one in value]
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, dict):
            return {key: self._argument(one) for key, one in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(one) for one in (value.start, value.stop, value.step)))
        raise _NotRecordable(f"it passes a {type(value).__name__}")

    def _node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
            node = self.graph.create_node("get_attr", name)  # what `compiled` gives it
            self._know(tensor, node)
        return node

    def _know(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        self._nodes[id(tensor)] = node
        node.meta[EXAMPLE] = tensor
        self._kept.append(tensor)

    def _results(self, node: torch.fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._know(result, node)
        elif isinstance(result, tuple | list) and all(isinstance(r, torch.Tensor) for r in result):
            node.meta[EXAMPLE] = tuple(result)
            for index, one in enumerate(result):
                self._know(one, self.graph.call_function(operator.getitem, (node, index)))
        elif result is not None:
            raise _NotRecordable(f"{node.target} gives a {type(result).__name__}")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices an operator whose result's shape, or a number, comes of its elements' values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _TAGS.isdisjoint(func.tags) and not _is_gather(func, args):
            self._recorder.problem = f"{func} looks at a tensor's values"
        return func(*args, **(kwargs or {}))


_TAGS = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))


def _is_gather(func: Any, args: Any) -> bool:
    """Whether an indexing is by numbers alone: its result's shape is the index's."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype in (torch.int64, torch.int32) for index in args[1])


class _NotRecordable(Exception):
    """A call that a graph does not hold."""


def _tells(func: Any) -> bool:
    """Whether a function only tells what a tensor is like: nothing that a step changes."""
    if func.__name__ == "__get__":
        return func.__self__.__name__ in _ATTRIBUTES
    return func.__name__ in _METHODS


def compiled(graph: torch.fx.Graph, constants: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """Return a recording as a function of its inputs. Raises RuntimeError: torch.fx cannot."""
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    for name, tensor in constants.items():
        setattr(module, name, tensor)
    module.graph = graph
    run: Callable[..., Any] = module.forward
    return run


def _is_same_call(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    def arguments(node: torch.fx.Node) -> Any:
        return map_arg((node.args, node.kwargs), lambda one: one.name)  # names count the calls

    return a.op == b.op and a.target == b.target and bool(arguments(a) == arguments(b))


class DecodeStep:
    """A model's step of one token over a TierCache: from its recording once there is one.

    `problem`: why there is none; None where there is one. `recorded_steps`: how many ran from it,
    and of these `whole_steps` as one job (wholestep.py); `whole_problem`: why none can.
    """

    def __init__(self, model: Any, cache: TierCache) -> None:
        self._model = model
        self._kv, self._cache = cache.kv, cache
        self._arguments = {"use_cache": True, "logits_to_keep": 1, **cached_in(model, cache)}
        self._run: Callable[..., Any] | None = None
        self._whole: WholeStep | None = None
        self._run_whole: Callable[..., Any] | None = None
        self._before: Recorder | None = None
        self._left = RECORDINGS_MAX
        self.problem: str | None = "there were too few steps"
        self.whole_problem: str | None = self.problem
        self.recorded_steps = self.whole_steps = 0
        call = getattr(type(model), "forward", type(model).__call__)
        if "position_ids" not in inspect.signature(call).parameters:
            self._leave_alone("it takes no position_ids")

    @property
    def is_recorded(self) -> bool:
        """Whether the next step runs from a recording."""
        return self._run is not None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, 1, vocab] for a token [1, 1]. In inference mode."""
        logits: torch.Tensor
        if self._run is not None:
            positions, run = ids.new_full((1, 1), self._kv.position), self._run
            if self._whole is not None and self._run_whole is not None:
                if self._whole.begin():
                    run = self._run_whole
                    self.whole_steps += 1
                else:
                    self._cache.layers[0].has_begun = True
            self.recorded_steps += 1
            try:
                logits = run(ids, positions)
            except UnfinishedStep:
                self._kv.cancel()
                self.whole_steps -= 1
                logits = self._run(ids, positions)
        elif self._left:
            logits = self._recorded(ids, ids.new_full((1, 1), self._kv.position))
        else:
            logits = self._model(input_ids=ids, **self._arguments).logits
        return logits

    def _recorded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        recorder, before = Recorder({"ids": ids, "positions": positions}), self._before
        with _Watch(recorder), recorder:
            output = self._model(input_ids=ids, position_ids=positions, **self._arguments)
        recorder.end(output.logits)
        self._before = recorder
        if recorder.problem is not None:
            self._leave_alone(recorder.problem)
        elif before is not None and recorder.is_same(before):
            self._compile(recorder)
        elif not self._left:
            self._leave_alone("its steps differ")
        logits: torch.Tensor = output.logits
        return logits

    def _compile(self, recorder: Recorder) -> None:
        found = lowered(recorder.graph)
        constants = recorder.constants | found.constants
        try:
            self._run = compiled(found.graph, constants)
        except RuntimeError as error:  # of torch.fx: a function that it has no name for
            self._leave_alone(f"torch.fx: {error}")
            return
        self._before = self.problem = None
        kv = self._kv
        if not isinstance(kv, SessionKV):
            self.whole_problem = "its KV is no session's"
        elif found.problem is not None or not fits(kv, found.stretches, found.attended):
            self.whole_problem = found.problem or "its dtype is not the hot tier's"
        else:
            self.whole_problem = None
            self._whole = WholeStep(kv, found.stretches, found.attended)
            self._run_whole = compiled(found.as_one(self._whole.run), constants)

    def _leave_alone(self, problem: str) -> None:
        self._left, self._before, self.problem = 0, None, problem
        self.whole_problem = problem
