"""Support for engine tests: tiny random models, and one greedy run over tiers."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tierd.client import Client
from tierd.codec.layout import page_layout
from tierd.config import embedded_config
from tierd.daemon import EmbeddedDaemon
from tierd.types import CodecId, DType, Namespace
from tierd_engine import hf
from tierd_engine.attention.plan import PlanMode
from tierd_engine.cache import ATTENTION_NAME
from tierd_engine.device.opening import DeviceRig
from tierd_engine.fidelity import OwnCacheRun
from tierd_engine.generator import Generator
from tierd_engine.guard import QualityGuard
from tierd_engine.session import SessionKV
from tierd_engine.sizing import JobSizes, size_tiers

VOCABULARY = 251


@dataclass(frozen=True)
class TinyModel:
    """A random model, its config's shape, and the text that names it in a test id."""

    name: str
    model: Any
    shape: hf.ModelShape


def tiny_model(seed: int, family: str | None = None) -> TinyModel:
    """Return a random decoder: family, heads, head_dim and biases chosen by the seed."""
    import transformers as tf

    rng = random.Random(seed)
    family = family or rng.choice(["llama", "qwen2", "qwen3", "mistral"])
    kv_heads = rng.choice([1, 2, 3, 4, 8])
    repeats = rng.choice([1, 2, 3, 4])
    head_dim = rng.choice([16, 20, 32, 48, 64, 80, 128])
    heads = kv_heads * repeats
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if family in ("llama", "qwen3"):
        common["attention_bias"] = rng.random() < 0.5
    if family == "mistral":
        common["sliding_window"] = None
    config_class, model_class = {
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
        "mistral": (tf.MistralConfig, tf.MistralForCausalLM),
    }[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**common)).eval().to(torch.float32)
    model.config._attn_implementation = ATTENTION_NAME
    name = f"{family}-seed{seed}-kv{kv_heads}x{repeats}-d{head_dim}"
    return TinyModel(name, model, hf.model_shape(model.config))


def outlier_model(
    seed: int, *, layers: int = 3, outlier: float = 60.0, spread: float = 0.2
) -> TinyModel:
    """Return a random Qwen2 whose keys of layer 1 have a few channels far larger than the rest.

    As in Qwen2's own weights they come from the key projection's bias. Rotation turns the
    two channels of a pair into each other as tokens go by, so that a channel's range within
    a group of tokens is twice the bias, and what the other channels say of a key drowns in
    its step. `spread`: of the weights; the smaller, the less a step says.
    """
    import transformers as tf

    config = tf.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=spread, head_dim=32,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = tf.Qwen2ForCausalLM(config).eval().to(torch.float32)
    with torch.no_grad():
        bias = model.model.layers[1].self_attn.k_proj.bias.view(2, 32)
        bias[:, 0] = outlier
    model.config._attn_implementation = ATTENTION_NAME
    return TinyModel(f"outlier-seed{seed}", model, hf.model_shape(model.config))


def random_tokens(count: int, seed: int) -> list[int]:
    """Return `count` token ids below VOCABULARY."""
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@dataclass(frozen=True)
class GreedyRun:
    """New tokens, the logits each was chosen from, and the generator (its session closed)."""

    tokens: list[int]
    logits: list[torch.Tensor]
    generator: Generator


def own_greedy(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[Any]]:
    """Return the greedy tokens and logits of the model over its own cache."""
    run = OwnCacheRun(model)
    logits = run.prefill(prompt)
    tokens: list[int] = []
    kept: list[Any] = []
    while True:
        tokens.append(int(logits.argmax()))
        kept.append(logits)
        if len(tokens) == new_tokens:
            return tokens, kept
        logits = run.decode(tokens[-1])


def greedy(generator: Generator, prompt: list[int], new_tokens: int) -> GreedyRun:
    """Prefill and decode greedily with an open generator, checking integrity as it goes."""
    logits = generator.feed(prompt)
    tokens: list[int] = []
    kept: list[torch.Tensor] = []
    while True:
        tokens.append(int(logits.argmax()))
        kept.append(logits)
        if len(tokens) == new_tokens:
            generator.kv.check_integrity()
            return GreedyRun(tokens, kept, generator)
        logits = generator.feed([tokens[-1]])


@dataclass
class TierRig:
    """An embedded daemon, a client and a session sized for one job. Use as a context."""

    shape: hf.ModelShape
    model: Any
    context: int
    new_tokens: int
    hot: str = "25%"
    warm: str = "25%"
    codec: CodecId = CodecId.RAW
    plan: PlanMode = PlanMode.AUTO
    dtype: DType = DType.FLOAT32
    block_tokens: int | None = None
    codec_layers: str = ""
    guarded: bool = False
    rig: DeviceRig | None = None

    def __post_init__(self) -> None:
        self.sizes: JobSizes = size_tiers(
            self.shape, self.dtype, self.codec, context_tokens=self.context,
            max_new_tokens=self.new_tokens, hot=self.hot, warm=self.warm,
            block_tokens=self.block_tokens, codec_layers=self.codec_layers, guarded=self.guarded,
        )  # fmt: skip
        self._stack = ExitStack()

    def __enter__(self) -> TierRig:
        sizes = self.sizes
        geometry = self.shape.geometry(self.dtype, sizes.block_tokens)
        daemon = EmbeddedDaemon(embedded_config(warm_bytes=sizes.warm_budget_bytes))
        self.daemon = self._stack.enter_context(daemon)
        self.client = Client.connect(daemon.socket)
        self._stack.callback(self.client.close)
        namespace = Namespace(
            geometry, weights_digest="test", codec=self.codec, codec_layers=self.codec_layers
        )
        self.handle = self.client.open_session(namespace, sizes.total_tokens)
        guard = QualityGuard(namespace) if self.guarded else None
        self.kv = SessionKV(
            self.client, self.handle, self.shape.heads, sizes.hot_budget_bytes,
            sizes.total_tokens, self.plan, guard, self.rig,
        )  # fmt: skip
        self._stack.callback(self.kv.close)
        self.kv.arena.poison()
        self.generator = Generator(self.model, self.kv)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def slot_bytes(rig: TierRig) -> int:
    """Return the slot size of the rig's codec."""
    return page_layout(rig.kv.geometry, rig.codec).slot_bytes
