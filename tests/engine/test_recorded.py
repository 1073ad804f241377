"""Recorded decode steps: the model's own bits, and what cannot be recorded is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

from tests.engine.support import TierRig, random_tokens, tiny_model
from tierd.errors import PageMiss, UnsupportedModel
from tierd_engine import hf, recorded
from tierd_engine.cache import ATTENTION_NAME, TierCache
from tierd_engine.lowering import Lowered
from tierd_engine.recorded import RECORDINGS_MAX, DecodeStep, Recorder
from tierd_engine.weightonly import Weights, apply_weights

VOCABULARY = 251
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.2, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512,
    "ffn_dim": 96, "word_embed_proj_dim": 64, "rotary_dim": 8, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "sliding_window": None, "pad_token_id": 0,
}  # fmt: skip
# Kinds that differ in where positions and norms stand, in biases, experts and scaled residuals.
RECORDED = (
    "LlamaConfig", "Qwen2Config", "Qwen3Config", "GemmaConfig", "PhiConfig", "Phi3Config",
    "GPTNeoXConfig", "GPTJConfig", "CohereConfig", "GraniteConfig", "Olmo2Config", "MixtralConfig",
    "Qwen3MoeConfig", "Starcoder2Config", "NemotronConfig", "Glm4Config",
)  # fmt: skip
AS_ONE_JOB = (
    "LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Phi3Config", "GraniteConfig",
    "Olmo2Config",
)  # fmt: skip
LEFT_ALONE = ("GPT2Config", "OPTConfig")  # a tensor's value is asked for; a position is a number


def tiny(kind: str) -> tuple[Any, hf.ModelShape]:
    """Return a random model of a config class, with tiers as its attention, and its shape."""
    config_class = getattr(tf, kind)
    known = {*config_class().to_dict(), *config_class.attribute_map}
    config = config_class(**{name: size for name, size in _SIZES.items() if name in known})
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval().to(torch.float32)
    model.config._attn_implementation = ATTENTION_NAME
    apply_weights(model, Weights.AUTO)
    return model, hf.model_shape(model.config)


def decoded(model: Any, shape: hf.ModelShape, *, record: bool) -> tuple[torch.Tensor, bool]:
    """Return logits [40, vocab] of steps past block ends and demotions, and if any was recorded."""
    with TierRig(shape, model, 60, 60, hot="60%", block_tokens=16) as rig:
        step = rig.generator.decode_step
        if not record:
            step._left = 0
        rig.generator.feed(random_tokens(40, 1))
        rows = [rig.generator.feed([token]) for token in random_tokens(40, 2)]
        rig.kv.check_integrity()
        return torch.stack(rows), step.is_recorded


@pytest.mark.parametrize("kind", [*RECORDED, *LEFT_ALONE])
def test_steps_from_a_recording_give_the_bits_of_the_models_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shape = tiny(kind)
    own, _ = decoded(model, shape, record=False)
    found, is_recorded = decoded(model, shape, record=True)
    assert is_recorded == (kind in RECORDED)
    # Operators of stretches round otherwise than PyTorch's (silu, by a few units of 2^-24).
    torch.testing.assert_close(found, own, rtol=0, atol=2**-17 * float(own.abs().max()))
    monkeypatch.setattr(recorded, "lowered", lambda graph: Lowered(graph, {}, [], [], ""))
    assert torch.equal(decoded(model, shape, record=True)[0], own)


class Wrapped(torch.nn.Module):
    """A model to whose logits something is done."""

    def __init__(self, model: Any, change: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.change, self.device = model, change, torch.device("cpu")

    def get_input_embeddings(self) -> Any:
        """Return the model's."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the model's."""
        return self.model.get_output_embeddings()

    def forward(self, position_ids: Any = None, cache: Any = None, **arguments: Any) -> Any:
        """Return the model's output, its logits changed."""
        output = self.model(position_ids=position_ids, cache=cache, **arguments)
        output.logits = self.change(output.logits, cache)
        return output


def by_value(logits: torch.Tensor, cache: Any) -> torch.Tensor:
    """Branch on a value."""
    return logits * 2 if logits[0, 0, 0] > 0 else logits


def by_item(logits: torch.Tensor, cache: Any) -> torch.Tensor:
    """Compute with a value in Python."""
    return logits * (1 + logits[0, 0, 0].item())


def by_mask(logits: torch.Tensor, cache: Any) -> torch.Tensor:
    """Compute with a shape that values make."""
    return logits + logits[logits > 0].shape[0]


def by_listing(logits: torch.Tensor, cache: Any) -> torch.Tensor:
    """Go over what values pick."""
    for row in (logits[0, 0] > 0).nonzero()[:2]:
        logits = logits + row
    return logits


def by_position(logits: torch.Tensor, cache: Any) -> torch.Tensor:
    """Compute with the position in Python."""
    return logits * cache.get_seq_length()


def by_array(logits: torch.Tensor, cache: Any) -> torch.Tensor:
    """Leave PyTorch and come back."""
    return torch.from_numpy(logits.numpy() * 2)


@pytest.mark.parametrize(
    "change", [by_value, by_item, by_mask, by_listing, by_position, by_array],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_what_a_recording_would_get_wrong_is_not_recorded(change: Any) -> None:
    tiny_one = tiny_model(3, "llama")
    model = Wrapped(tiny_one.model, change)
    found, is_recorded = decoded(model, tiny_one.shape, record=True)
    assert not is_recorded
    assert torch.equal(found, decoded(model, tiny_one.shape, record=False)[0])


def test_recordings_that_differ_end_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_one = tiny_model(3, "llama")
    made: list[Recorder] = []
    start = Recorder.__init__
    monkeypatch.setattr(
        Recorder, "__init__", lambda self, x: (made.append(self), start(self, x))[1]
    )
    decoded(Wrapped(tiny_one.model, by_position), tiny_one.shape, record=True)
    assert len(made) == RECORDINGS_MAX


def test_a_model_that_takes_no_positions_is_called_as_it_is() -> None:
    class Bare:
        def __call__(self, **arguments: Any) -> Any: ...

    tiny_one = tiny_model(3, "llama")
    with TierRig(tiny_one.shape, tiny_one.model, 60, 60, hot="60%", block_tokens=16) as rig:
        assert DecodeStep(Bare(), TierCache(rig.kv)).problem == "it takes no position_ids"


def test_a_job_tells_how_its_steps_ran() -> None:
    one = tiny_model(5, "llama")
    apply_weights(one.model, Weights.AUTO)
    with TierRig(one.shape, one.model, 60, 60, hot="60%", warm="100%", block_tokens=16) as rig:
        step = rig.generator.decode_step
        rig.generator.feed(random_tokens(40, 3))
        told = []
        for token in random_tokens(5, 4):
            rig.generator.feed([token])
            told.append((step.recorded_steps, step.whole_steps, step.problem, step.whole_problem))
    why = "there were too few steps"
    assert told[0] == (0, 0, why, why)
    assert told[1:] == [(n, n, None, None) for n in range(4)]


@pytest.mark.parametrize("kind", AS_ONE_JOB)
def test_steps_of_the_usual_kinds_are_one_job_each(kind: str) -> None:
    model, shape = tiny(kind)
    with TierRig(shape, model, 60, 60, hot="60%", warm="100%", block_tokens=16) as rig:
        rig.generator.feed(random_tokens(40, 1))
        for token in random_tokens(6, 2):
            rig.generator.feed([token])
        step = rig.generator.decode_step
        assert (step.recorded_steps, step.whole_steps, step.whole_problem) == (4, 4, None)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Starcoder2Config", "there is no operator of ours for gelu, layer_norm"),
        ("MixtralConfig", "it writes to tensors that are there"),
        ("OPTConfig", "its steps differ"),
    ],
)
def test_a_job_tells_why_its_steps_are_not_one_job_each(kind: str, why: str) -> None:
    model, shape = tiny(kind)
    with TierRig(shape, model, 60, 60, hot="60%", block_tokens=16) as rig:
        step = rig.generator.decode_step
        rig.generator.feed(random_tokens(40, 1))
        for token in random_tokens(6, 2):
            rig.generator.feed([token])
        assert (step.whole_steps, step.whole_problem) == (0, why)


def test_a_model_that_gives_other_heads_than_its_config_is_refused_by_name() -> None:
    one = tiny_model(5, "llama")
    other = replace(one.shape, kv_heads=2 * one.shape.kv_heads, heads=2 * one.shape.heads)
    with (
        TierRig(other, one.model, 60, 60, hot="60%", block_tokens=16) as rig,
        pytest.raises(UnsupportedModel, match=r"the model gives .* KV heads of .* its config says"),
    ):
        rig.generator.feed(random_tokens(40, 3))


class Losing:
    """A session's `attend` that finds one page lost, once, after some steps."""

    def __init__(self, attend: Any, steps: int) -> None:
        self.attend, self.left = attend, steps

    def __call__(self, layer: int, *rest: Any) -> Any:
        """Attend, or raise PageMiss."""
        self.left -= layer == 1
        if layer == 1 and self.left == -1:
            raise PageMiss("lost", block=0, layer=1)
        return self.attend(layer, *rest)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_page_lost_in_a_step_is_recovered_recorded_or_not(steps: int) -> None:
    tiny_one = tiny_model(5, "qwen3")
    rows = []
    for loses in (False, True):
        with TierRig(tiny_one.shape, tiny_one.model, 60, 60, hot="60%", block_tokens=16) as rig:
            rig.generator.feed(random_tokens(40, 3))
            if loses:
                rig.kv.attend = Losing(rig.kv.attend, steps)  # type: ignore[method-assign]
            rows.append(torch.stack([rig.generator.feed([t]) for t in random_tokens(30, 4)]))
            assert rig.generator.decode_step.is_recorded
            assert (rig.generator.recomputed_tokens > 0) == loses
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=2e-4)
