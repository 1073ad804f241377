"""Stretches of a recording: the same numbers, in memory of their own, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tierd_engine import lowering
from tierd_engine.attention import stretch as stretches
from tierd_engine.fewnorms import replace_norms
from tierd_engine.fewrotary import _standing_for
from tierd_engine.fewrows import FewRowsLinear, replace_linears
from tierd_engine.lowering import lowered
from tierd_engine.recorded import Recorder, compiled
from tierd_engine.stretches import Stretch
from tierd_engine.weightonly import Int8Linear

WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 48, 4, 2, 16, 112
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """A decoder's layer with grouped queries, its attention a stand-in."""

    def __init__(self) -> None:
        super().__init__()
        for name, width, outputs in (
            ("q", WIDTH, HEADS * HEAD_DIM), ("k", WIDTH, KV_HEADS * HEAD_DIM),
            ("v", WIDTH, KV_HEADS * HEAD_DIM), ("o", HEADS * HEAD_DIM, WIDTH),
            ("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH),
        ):  # fmt: skip
            setattr(self, name, torch.nn.Linear(width, outputs, bias=name == "k"))
        self.first, self.second = LlamaRMSNorm(WIDTH), LlamaRMSNorm(WIDTH)
        self.rotate: Any = _standing_for(apply_rotary_pos_emb)

    def forward(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attention) -> torch.Tensor:
        """One token."""
        h = self.first(x)
        q, k, v = (
            project(h).view(1, 1, -1, HEAD_DIM).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = self.rotate(q, k, cos, sin)
        x = x + self.o(attend(q, k, v).reshape(1, 1, -1).contiguous())
        h = self.second(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


class Decoder(torch.nn.Module):
    """Layers and a head."""

    def __init__(self, layers: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(layers)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, 33, bias=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attention) -> torch.Tensor:
        """Return logits [1, 1, 33]."""
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.head(x[:, -1:, :])


def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stand for attention: something of all three."""
    return (q * k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)).tanh().transpose(1, 2)


def draw(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, 1, WIDTH), (1, 1, HEAD_DIM), (1, 1, HEAD_DIM)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def recorded(model: Any, dtype: torch.dtype, attend: Attention = mix) -> Callable[..., Any]:
    x, cos, sin = draw(dtype, 0)
    recorder = Recorder({"x": x, "cos": cos, "sin": sin})
    with torch.inference_mode():
        with recorder:
            result = model(x, cos, sin, attend)
        recorder.end(result)
        assert recorder.problem is None
        found = lowered(recorder.graph)
        assert not found.attended  # no session's layer is attended to
        return compiled(found.graph, recorder.constants | found.constants)


def ours(layers: int, dtype: torch.dtype, make: Any = FewRowsLinear) -> Decoder:
    model = Decoder(layers, dtype)
    replace_norms(model)
    replace_linears(model, make)
    return model


def check(run: Callable[..., Any], model: Any, dtype: torch.dtype, attend: Attention = mix) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for seed in range(1, 8):
        values = draw(dtype, seed)
        with torch.inference_mode():
            found, expected = run(*values), model(*values, attend)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def made(monkeypatch: pytest.MonkeyPatch) -> list[Stretch]:
    """Return a list that stretches come into as they are made."""
    found: list[Stretch] = []
    end = Stretch.end
    monkeypatch.setattr(Stretch, "end", lambda self: (found.append(self), end(self))[1])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [FewRowsLinear, Int8Linear])
def test_a_recording_with_stretches_gives_the_models_numbers(
    dtype: torch.dtype, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(monkeypatch)
    model = ours(3, dtype, make)
    check(recorded(model, dtype), model, dtype)
    assert len(found) == 4  # before, between and behind three attentions


def test_products_of_the_same_rows_are_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    recorded(ours(2, torch.float32), torch.float32)
    phases = [[len(phase.linears) for phase in one._phases] for one in found]
    # A norm, then queries, keys and values; the output, gate and up, down; the head.
    assert phases == [[0, 3], [1, 2, 1, 3], [1, 2, 1, 1]]


def test_only_what_comes_from_elsewhere_is_copied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    recorded(ours(3, torch.float32), torch.float32)
    assert [len(one.inputs) for one in found] == [3, 1, 1, 1]  # x, cos, sin; what was attended


def test_what_a_step_returned_stays_as_it_was() -> None:
    model = ours(1, torch.float32)
    run = recorded(model, torch.float32)
    with torch.inference_mode():
        first = run(*draw(torch.float32, 1))
        kept = first.clone()
        run(*draw(torch.float32, 2))
    assert torch.equal(first, kept)


def test_a_model_whose_linear_layers_are_pytorchs_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = made(monkeypatch)
    model = Decoder(2)
    check(recorded(model, torch.float32), model, torch.float32)
    assert not found


class Writing(torch.nn.Module):
    """A model that writes into what a product read, between two products of it."""

    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.write = write

    def forward(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attention) -> torch.Tensor:
        """Return a sum of both."""
        x = x + 1
        first = self.a(x)
        self.write(x)
        return first + self.b(x)


def fill_first(x: torch.Tensor) -> None:
    """Write by an index."""
    x[..., 0] = 3.0


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1), lambda x: x.__imul__(2), fill_first,
        lambda x: torch.nn.functional.silu(x, inplace=True), lambda x: torch.neg(x, out=x),
    ],
)  # fmt: skip
def test_writes_between_products_are_seen(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    model = Writing(write)
    replace_linears(model)
    check(recorded(model, torch.float32), model, torch.float32)
    assert not found


class Wide(torch.nn.Module):
    """Operators that we have not, of other shapes and other dtypes, among those that we have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.factor = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attention) -> torch.Tensor:
        """Return a row."""
        x = self.a(x) * self.factor  # another shape
        x = self.b(torch.nn.functional.gelu(x) + 1) * 0.5  # numbers
        wide = x.double()
        low = x.bfloat16()
        x = x + (low * low + low).float() + (wide + wide).float()
        pair = torch.cat((x, x)).view(2, WIDTH)  # two rows
        rows = self.c(pair)
        return (rows[0] + rows[1]).view(1, 1, WIDTH).expand(1, 1, WIDTH)


class Fused(torch.nn.Module):
    """Products that are cut apart, numbers, and what does nothing: all of them have operators."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attention) -> torch.Tensor:
        """Return a row."""
        for p in (0.1, 0.9):
            gate, up = self.both(x).chunk(2, dim=-1)
            first, _, last = self.both(x).split(WIDTH // 2, -1)[1:]
            h = self.down(torch.nn.functional.silu(gate) * up) * 0.22 + 0.5 * x / 3
            h = torch.nn.functional.dropout(h, p=p, training=False) + torch.cat((first, last), -1)
            x = self.down(h)
        return x


def test_parts_of_a_product_and_numbers_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    model = Fused()
    replace_linears(model)
    check(recorded(model, torch.float32), model, torch.float32)
    assert [len(one._phases) for one in found] == [2, 4, 2]  # cut by what joins two parts


class Noisy(torch.nn.Module):
    """A model in training: what it drops is drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: Any, sin: Any, attend: Attention) -> torch.Tensor:
        """Return a row."""
        return self.b(torch.nn.functional.dropout(self.a(x), 0.5, training=True))


def test_what_is_dropped_is_drawn_anew() -> None:
    model = Noisy()
    replace_linears(model)
    run = recorded(model, torch.float32)
    x = draw(torch.float32, 1)
    with torch.inference_mode():
        assert len({float(run(*x).sum()) for _ in range(8)}) > 1


def test_operators_of_other_kinds_stand_between_stretches() -> None:
    model = Wide()
    replace_linears(model)
    check(recorded(model, torch.float32), model, torch.float32)


def test_sessions_that_share_a_model_have_memory_of_their_own() -> None:
    model = ours(2, torch.float32)
    runs = [recorded(model, torch.float32) for _ in range(3)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for seed in range(40):
            values = draw(torch.float32, 100 * number + seed)
            with torch.inference_mode():
                found, expected = runs[number](*values), model(*values, mix)
            if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_every_operator_has_a_test_of_its_numbers() -> None:
    tables = lowering._METHODS, lowering._FUNCTIONS, lowering._BY_NUMBER
    kinds = {kind for table in tables for kind in table.values()}
    assert kinds | {stretches.NORM, stretches.ROTARY, stretches.WRITE} == set(range(8))
