"""`flax.linen.MultiHeadDotProductAttention` decoding through a KV cache in host memory.

Parameters have Flax's names and shapes, so checkpoints load both ways; outside decoding everything
is Flax's own. A decoding module keeps its cache in Flax's own place, the `cache` collection.

Under `jax.jit` the cache must be donated, and only the cache, or XLA copies all of it at every
step, host to host and without a word::

  model = Decoder(decode=True)  # any module around this attention
  dummy = jnp.zeros((4, 4096, 512))  # [batch..., max_length, features]
  cache = directkv_jax.linen.init_cache(model, dummy)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(cache, params, x):
      y, state = model.apply({"params": params, "cache": cache}, x, mutable=["cache"])
      return state["cache"], y

  cache, y = step(cache, params, x)  # the old `cache` is gone

`model.init` with a dummy of full length allocates too, as in Flax. Flax's cheaper idiom,
`jax.tree.map(jnp.zeros_like, jax.eval_shape(model.init, ...))`, makes a device cache of zeros where
a host cache was asked for; it is refused, and `init_cache` takes its place.

A stack of layers shares one cache with `num_layers=L`: the cache is the carry of the scan, the
layer index its input, and the collection is not used::

  class Block(nn.Module):
      @nn.compact
      def __call__(self, carry, layer):
          x, cache = carry
          attention = directkv_jax.linen.MultiHeadDotProductAttention(num_heads=8)
          y, cache = attention(x, cache=cache, layer=layer)
          return (x + y, cache), None

  layers = nn.scan(
      Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=L,
      check_constancy_invariants=False,  # Flax's check forgets that the cache is in host memory
  )
  (x, cache), _ = layers(name="layers")((x, cache), jnp.arange(L))
  cache = cache.advance(x.shape[1])  # once per step, after all layers

Never name `cache` in `variable_axes`: a host cache that is a scanned input is copied to the device,
layer by layer. `init` of such a stack copies the cache it is given: give it a small one.

To act on the held caches of a whole model, map over the collection: `jax.tree.map(lambda c:
c.reset(), cache, is_leaf=lambda x: isinstance(x, KVCache))`.
"""

from directkv_jax.linen._attention import MultiHeadAttention, MultiHeadDotProductAttention
from directkv_jax.linen._init_cache import init_cache

__all__ = ["MultiHeadAttention", "MultiHeadDotProductAttention", "init_cache"]
