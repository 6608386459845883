"""Flax models that decode through a `directkv_jax.KVCache`, and text generation with them.

Needs the `models` extra. Letters of shapes, as everywhere in the package: B batch, T new tokens,
N query heads, K KV heads, G = N/K, H head dim, D model dim, L layers.
"""

from directkv_jax.models.cache import ModelCache
from directkv_jax.models.config import ModelConfig
from directkv_jax.models.conversation import Chat, chat
from directkv_jax.models.generate import complete, generate, stream
from directkv_jax.models.loading import load
from directkv_jax.models.request import Options
from directkv_jax.models.result import Generation, Piece, Stats
from directkv_jax.models.sampling import Sampling
from directkv_jax.models.session import Session
from directkv_jax.models.tokenizer import Tokenizer
from directkv_jax.models.transformer import Transformer

__all__ = [
    "Chat",
    "Generation",
    "ModelCache",
    "ModelConfig",
    "Options",
    "Piece",
    "Sampling",
    "Session",
    "Stats",
    "Tokenizer",
    "Transformer",
    "chat",
    "complete",
    "generate",
    "load",
    "stream",
]
