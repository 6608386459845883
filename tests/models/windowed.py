"""A model with layers of three kinds: all tokens kept, and two that keep a window."""

from directkv_jax import models
from directkv_jax.models.config import LayerConfig, RopeConfig

ROPE = RopeConfig()
GLOBAL = LayerConfig(4, 2, 32, 96, ROPE)
LOCAL = LayerConfig(4, 2, 32, 96, ROPE, window=20)
WIDE = LayerConfig(3, 1, 64, 96, ROPE, window=20)
CONFIG = models.ModelConfig("test", 80, 64, (LOCAL, GLOBAL, WIDE, LOCAL), tie_word_embeddings=True)
