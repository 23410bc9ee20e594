"""
Multi-Head Attention Residuals (MHAR): the whole model.

A Transformer adds each sublayer's output to one running sum, the residual stream. Here every sublayer instead *reads
a learned mix of all earlier sublayer outputs*: a softmax over depth, taken in H independent heads over the width.

    H = 0   the plain residual Transformer
    H = 1   Attention Residuals (AttnRes): one softmax over depth for the whole width
    H = k   MHAR: k of them, each for its own slice of the width; not one parameter more than H = 1

With `delta_blocks` the running sum stays, and what a sublayer reads of the depth is added to it: the *delta form*,
which can be grafted onto a trained plain model (Transformer.from_pretrained, .graft).

Paper: "Multi-Head Attention Residuals", Luo, Cai and Hu, 2026. The blocks around the routing are Qwen3's.
Letters in the shape comments: B sequences, T tokens, D = n_embd, V = vocab_size, N sources, H routing heads.
"""
import importlib.util
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

ROUTERS = ('auto', 'eager', 'fused_simple', 'fused')
ROPE_SCALING = ('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')


def triton_runs(device):
    """Triton, and so torch.compile on a GPU and kernel.py, needs CUDA and compute capability 7.0 or more."""
    return (device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (7, 0)
            and importlib.util.find_spec('triton') is not None)


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field, its value and what is allowed."""


@dataclass
class Config:
    vocab_size: int
    block_size: int                 # the longest sequence, in tokens
    n_layer: int                    # blocks; each holds two sublayers, attention and MLP
    n_head: int                     # query heads of the attention
    n_kv_head: int                  # key/value heads, each shared by n_head / n_kv_head query heads
    n_embd: int
    ffn_dim: int
    H: int = -1                     # routing heads: 0 plain, 1 AttnRes, k MHAR, -1 = n_kv_head
    delta_blocks: int = 0           # 0: reads replace the running sum; k: they are added to it (delta form, k groups)
    query_init_std: float = 0.0     # 0 starts every read at the plain mean of its sources
    head_dim: Optional[int] = None  # of an attention head; None = n_embd / n_head
    rope_theta: float = 1e4
    rope_scaling: Optional[dict] = None     # Llama 3's, see rope_tables
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_embeddings: bool = True
    router: str = 'auto'            # what computes the reads: see Transformer.router_on

    def __post_init__(self):
        if self.H == -1:
            self.H = self.n_kv_head
        def require(ok, field, allowed):
            if not ok:
                raise ConfigError(f"{field} = {getattr(self, field)!r}: must be {allowed}")
        for field in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'ffn_dim'):
            value = getattr(self, field)
            require(type(value) is int and value > 0, field, "a positive whole number")
        require(self.n_head % self.n_kv_head == 0, 'n_kv_head', f"a divisor of n_head = {self.n_head}")
        if self.head_dim is None:
            require(self.n_embd % self.n_head == 0, 'n_head', f"a divisor of n_embd = {self.n_embd}")
            require(self.n_embd // self.n_head % 2 == 0, 'n_head',
                    f"such that n_embd / n_head is even (RoPE turns pairs), but {self.n_embd} / {self.n_head} is odd")
        else:
            require(type(self.head_dim) is int and self.head_dim > 0 and self.head_dim % 2 == 0, 'head_dim',
                    "a positive even number (RoPE turns pairs) or None")
        require(type(self.H) is int and self.H >= 0, 'H', "-1 (= n_kv_head), 0 (plain) or a divisor of n_embd")
        require(self.H == 0 or self.n_embd % self.H == 0, 'H', f"0 or a divisor of n_embd = {self.n_embd}")
        require(type(self.delta_blocks) is int and 0 <= self.delta_blocks <= self.n_layer, 'delta_blocks',
                f"0 (no delta form) or the number of groups that the {self.n_layer} layers are cut into")
        require(self.delta_blocks == 0 or self.H > 0, 'delta_blocks', "0 where H = 0, since then there is no routing")
        require(self.query_init_std >= 0, 'query_init_std', "0 or more")
        require(self.norm_eps >= 0, 'norm_eps', "0 or more")
        require(self.norm_eps > 0 or self.delta_blocks == 0, 'norm_eps',
                "more than 0 in delta form, whose null source is 0 at first")
        require(self.rope_theta > 0, 'rope_theta', "more than 0")
        require(self.rope_scaling is None or self.rope_scaling.keys() == set(ROPE_SCALING), 'rope_scaling',
                f"None or numbers for {', '.join(ROPE_SCALING)}")
        require(self.router in ROUTERS, 'router', f"one of {', '.join(ROUTERS)}")
        require(self.router != 'fused_simple' or self.delta_blocks == 0, 'router',
                "auto, eager or fused in delta form, whose sites come in groups")

    @property
    def head_size(self):
        return self.head_dim or self.n_embd // self.n_head

    @property
    def n_source(self):
        return 2 * self.n_layer + 1     # the embedding and every sublayer's output

    @property
    def n_site(self):
        return 2 * self.n_layer + (self.delta_blocks == 0)      # in delta form the final norm reads the running sum

    @property
    def delta_groups(self):
        """Delta form: {the first layer of a group of layers: the group's sites, a slice}."""
        bounds = [i * self.n_layer // max(1, self.delta_blocks) for i in range(self.delta_blocks + 1)]
        return {first: slice(2 * first, 2 * end) for first, end in zip(bounds, bounds[1:])}

    @property
    def padded_vocab(self):
        return math.ceil(self.vocab_size / 64) * 64     # matrix products like round sizes


# The shapes of the paper (its section on shapes and recipe), with GPT-2's vocabulary instead of Qwen's 151,936: so
# '100m' has 63.5M parameters here. 'tiny' is ours: bytes in, bytes out, for a laptop's CPU.
PRESETS = {
    'tiny': Config(vocab_size=257, block_size=256, n_layer=4, n_head=4, n_kv_head=4, n_embd=128, ffn_dim=384),
    '100m': Config(vocab_size=50257, block_size=2048, n_layer=12, n_head=8, n_kv_head=4, n_embd=512, ffn_dim=1536),
    '350m': Config(vocab_size=50257, block_size=1024, n_layer=24, n_head=16, n_kv_head=8, n_embd=1024, ffn_dim=4096),
    '1b': Config(vocab_size=50257, block_size=1024, n_layer=36, n_head=16, n_kv_head=8, n_embd=1280, ffn_dim=5120),
}


# Depth routing: the idea of this repository.

def at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalize(x, eps):
    """x / RMS(x) over the last dimension, computed and returned in fp32 (or in float64 if x is)."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def route_weights(sources, query, gain, H, eps=1e-6):
    """
    How much each head of one routing site reads of each source.

    sources (N, B, T, D), query (D,), gain (D,) -> weights (N, B, T, H), fp32, that sum to 1 over the sources:
    softmax_i(query[h] . (gain * RMSNorm(s_i))[h]). The norm is over the full width D: H changes only the softmax.
    """
    keys = normalize(sources, eps)                                      # (N, B, T, D)
    scores = (keys * (query * gain)).unflatten(-1, (H, -1)).sum(-1)     # (N, B, T, H)
    return scores.softmax(dim=0)


def route(sources, query, gain, H, eps=1e-6):
    """
    One routing site's read: sources, a list of N tensors (B, T, D) or one (N, B, T, D) -> (B, T, D) in their dtype.

    Each of the H heads mixes its slice of the *un-normalised* sources with its own weights, in the sources' dtype.
    """
    if not torch.is_tensor(sources):
        sources = torch.stack(tuple(sources))
    weights = route_weights(sources, query, gain, H, eps).to(sources.dtype)     # (N, B, T, H)
    values = sources.unflatten(-1, (H, -1))                                     # (N, B, T, H, D / H)
    read = (weights.unsqueeze(-1) * values).sum(0).flatten(-2)                  # (B, T, D)
    return read.to(sources.dtype)                                               # autocast sums in fp32


def read_eagerly(route, sources, query, gain, H, eps):
    """`route`. On a GPU it is recomputed in backward: what all sites save, N^2 hidden states, would not fit there."""
    if not sources[0].is_cuda:
        return route(sources, query, gain, H, eps)
    return checkpoint(route, sources, query, gain, H, eps, use_reentrant=False, preserve_rng_state=False)


class EagerRouter:
    """All routing sites of one forward pass: call n appends source n and returns the read of site n, by `route`."""
    route = staticmethod(route)

    def __init__(self, queries, gains, H, eps):     # queries and gains (N, D): a row a site
        self.sites, self.H, self.eps = list(zip(queries, gains)), H, eps
        self.sources = []

    def __call__(self, source):
        query, gain = self.sites[len(self.sources)]
        self.sources.append(source)
        return read_eagerly(self.route, list(self.sources), query, gain, self.H, self.eps)


# The two sublayers.

class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return (normalize(x, self.eps) * self.weight).to(x.dtype)


def rope_tables(config):
    """
    Rotary embedding (Su et al. 2021): the cos and the signed sin of every position, each (block_size, head_size).

    Element i turns together with element i + head_size / 2, as in Llama and Qwen: (a, b) -> (a cos - b sin, b cos +
    a sin). With sin negative in the first half that is x * cos + roll(x) * sin, without cutting x up.

    Llama 3.1's rope_scaling stretches positions for a longer context: a pair that turns less than low_freq_factor times
    in the original context turns `factor` times slower, one that turns more than high_freq_factor times as before, and
    those between them in between.
    """
    pairs = torch.arange(0, config.head_size, 2) / config.head_size
    frequencies = config.rope_theta ** -pairs           # in radians a token
    if config.rope_scaling:
        factor, low, high, context = (config.rope_scaling[key] for key in ROPE_SCALING)
        keep = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    angles = torch.arange(config.block_size)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.cos()), dim=1), torch.cat((-angles.sin(), angles.sin()), dim=1)


def rotate(x, rope):
    """x (B, T, heads, head_size), rope = the tables' rows of these T positions."""
    cos, sin = (table[:, None] for table in rope)       # (T, 1, head_size), fp32
    return (x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin).to(x.dtype)


class KVCache:
    """
    Keys and values of one attention layer for the tokens so far, each (B, n_kv_head, T, head_size).

    Attention is all that needs a cache. Depth routing mixes the sources *of one token*: a new token brings all of
    its own sources along as it passes through the layers, and no token ever reads another token's.
    """

    def __init__(self):
        self.k = self.v = None

    def append(self, k, v):
        if self.k is not None:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.k, self.v = k, v
        return k, v

    def __len__(self):
        return 0 if self.k is None else self.k.size(2)


# cuDNN's attention is the fastest on Hopper, then FlashAttention-2; the rest serve older GPUs and CPUs.
ATTENTION_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
                      SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_size = config.head_size
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.q = nn.Linear(config.n_embd, config.n_head * config.head_size, bias=False)
        self.k = nn.Linear(config.n_embd, config.n_kv_head * config.head_size, bias=False)
        self.v = nn.Linear(config.n_embd, config.n_kv_head * config.head_size, bias=False)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.proj = nn.Linear(config.n_head * config.head_size, config.n_embd, bias=False)

    def forward(self, x, rope, cache=None):
        B, T, _ = x.shape
        x = self.norm(x)
        q, k, v = (linear(x).view(B, T, -1, self.head_size) for linear in (self.q, self.k, self.v))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))        # (B, heads, T, head_size)
        mask = None
        if cache is not None:
            k, v = cache.append(k, v)
            if 1 < T < k.size(2):   # new token t may see all cached ones, and the new ones up to itself
                mask = torch.ones(T, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - T)
        # cuDNN plans anew for each shape, and a cache has another length at every token.
        with sdpa_kernel(ATTENTION_BACKENDS[cache is not None:], set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T > 1 and mask is None,
                                               enable_gqa=q.size(1) != k.size(1))
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.gate = nn.Linear(config.n_embd, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.n_embd, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.n_embd, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)


# The loss.

def chunk_loss(logits, targets, z_loss=0.0):
    """
    logits (C, V), targets (C,) -> losses (C,) in fp32 and d loss / d logits; both 0 where the target is -1.
    Added is z_loss x logsumexp^2, which keeps the logits from drifting (PaLM, Chowdhery et al. 2022, section 5).
    """
    logits32 = at_least_fp32(logits)
    # In two steps, over 64 pieces of a row and then over the pieces: a piece fits in registers, so it is read once.
    lse = logits32.view(-1, 64, logits.size(1) // 64).logsumexp(-1).logsumexp(-1, keepdim=True)
    target, keep = targets.clamp(min=0)[:, None], (targets >= 0)[:, None]
    cross_entropy, z_slope = lse - logits32.gather(1, target), 2 * z_loss * lse
    losses = torch.where(keep, cross_entropy + z_loss * lse.square(), 0.0)
    # Probabilities, less 1 at the target: a number a row, put in its place at the end, costs the others no comparison.
    grad = ((logits32 - lse).exp() * ((1 + z_slope) * keep)).to(logits.dtype)
    at_target = (torch.expm1(-cross_entropy) + z_slope * (-cross_entropy).exp()) * keep
    return losses[:, 0], grad.scatter(1, target, at_target.to(logits.dtype))


class LinearCrossEntropy(torch.autograd.Function):
    """
    Sum of the cross-entropies of `x @ weight.T` against targets, without ever holding all of the logits.

    x (M, D), weight (padded V, D), targets (M,) with -1 = ignored -> losses (M,), fp32. At 65,536 tokens and GPT-2's
    vocabulary fp32 logits would take 13 GB, and their gradient as much. So the rows go through in chunks, and each
    chunk's gradient is taken while its logits are there: d(sum of losses)/dx and /dweight are ready before backward
    is called, which only scales them. That is why every loss must get the same upstream gradient (as in a mean).
    """
    CHUNK = 16384   # tokens

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, z_loss, with_grad, chunk_loss):
        w = weight.to(x.dtype)
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight)) if with_grad else (None, None)
        losses = []
        for start in range(0, x.size(0), LinearCrossEntropy.CHUNK):
            rows = slice(start, start + LinearCrossEntropy.CHUNK)
            logits = x[rows] @ w.T
            logits[:, vocab_size:] = -math.inf      # padding rows of the vocabulary: probability 0
            chunk_losses, dlogits = chunk_loss(logits, targets[rows], z_loss)
            losses.append(chunk_losses)
            if with_grad:
                dx[rows] = dlogits @ w
                dw += dlogits.T @ x[rows]
        ctx.save_for_backward(dx, dw)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, dlosses):
        dx, dw = ctx.saved_tensors
        scale = dlosses[0]      # in fp32: rounded to dx's dtype, 1 / tokens would be off by up to 0.4 %
        return (at_least_fp32(dx) * scale).to(dx.dtype), dw * scale, None, None, None, None, None


# The model.

class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        for name, table in zip(('cos', 'sin'), rope_tables(config)):
            self.register_buffer(name, table, persistent=False)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if config.H > 0:    # last, so that all H of one seed start from the same weights
            self.add_routing()
        self.checkpoint_sublayers = False   # recompute each sublayer in backward instead of keeping its activations
        self.z_loss = 0.0                   # of the training loss, see chunk_loss
        self.chunk_loss = chunk_loss        # replaced by a compiled one in compile_parts

    def add_routing(self):
        c, like = self.config, self.wte.weight.detach()
        self.queries = nn.Parameter(like.new_zeros(c.n_site, c.n_embd))     # a row a site
        self.gains = nn.Parameter(like.new_ones(c.n_site, c.n_embd))        # its key norm's weight
        if c.query_init_std > 0:
            nn.init.normal_(self.queries, std=c.query_init_std)
        if c.delta_blocks > 0:
            self.gates = nn.Parameter(like.new_zeros(c.n_site))             # 0: the site reads the running sum alone
            self.null = nn.Parameter(like.new_zeros(c.n_embd))              # a source that says nothing at first

    def router_on(self, device):
        """
        What config.router comes to on a device: 'eager' (`route`, anywhere), or one of the Triton operators of
        kernel.py, 'fused' or 'fused_simple'. 'auto' is fused where Triton runs and eager elsewhere. ConfigError if a
        fused one is asked for where it cannot run.
        """
        router = self.config.router
        if router == 'auto':
            return 'fused' if triton_runs(device) else 'eager'
        interpreted = os.environ.get('TRITON_INTERPRET') == '1' and importlib.util.find_spec('triton') is not None
        if router != 'eager' and not (triton_runs(device) or interpreted):
            raise ConfigError(f"router = {router!r}: needs Triton and a CUDA GPU of compute capability 7.0 or more, "
                              f"which {device} is not; 'eager' and 'auto' run anywhere")
        return router

    def new_router(self, x):
        """One forward pass's router: `router(source)` appends a source like x and returns the next site's read."""
        c, name = self.config, self.router_on(x.device)
        if name == 'eager' or x.dtype == torch.float64:     # the kernels compute in fp32
            return EagerRouter(self.queries, self.gains, c.H, c.norm_eps)
        import kernel
        return kernel.OPERATORS[name](self.queries * self.gains, c.H, c.norm_eps)

    def read_group(self, sources, sites):
        """
        Delta form: what a group's sites (a slice) read of these sources, a list, times their gates -> a tensor
        (B, T, D) for each site.
        """
        c, queries, gains, gates = self.config, self.queries[sites], self.gains[sites], self.gates[sites]
        if self.router_on(sources[0].device) == 'eager' or sources[0].dtype == torch.float64:
            sources = torch.stack(sources)
            return [gate * read_eagerly(route, sources, query, gain, c.H, c.norm_eps)
                    for query, gain, gate in zip(queries, gains, gates)]
        import kernel
        return kernel.group_reads(sources, queries * gains, gates, c.H, c.norm_eps)

    def hidden(self, idx, caches=None):
        """idx (B, T) -> the last hidden states, normalised, (B, T, D). This is where plain and MHAR differ."""
        start = len(caches[0]) if caches else 0
        positions = slice(start, start + idx.size(1))
        rope = self.cos[positions], self.sin[positions]
        x = self.wte(idx)
        if torch.is_autocast_enabled(x.device.type):
            # As small as the sublayers' outputs. For H = 0 this makes the running sum itself bf16: each sum rounds.
            x = x.to(torch.get_autocast_dtype(x.device.type))

        delta, groups = self.config.delta_blocks > 0, self.config.delta_groups
        router = self.new_router(x) if self.config.H > 0 and not delta else None
        if router:
            x = router(x)                               # site 0 has one source to read, the embedding itself
        if delta:
            sources, before = [self.null.to(x.dtype).expand_as(x)], 0
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches else None
            if i in groups:     # delta form: a group of layers starts; its sites all read what there is now
                sources.append(x - before)              # first the embedding, then what each group has added to x
                before, reads = x, iter(self.read_group(sources, groups[i]))
            if delta:
                x = self.delta_layer(block, x, next(reads), next(reads), rope, cache)
                continue
            out = self.maybe_checkpoint(block.attn, x, rope, cache)
            x = router(out) if router else x + out      # the whole difference: read a mix of all, or add to one sum
            out = self.maybe_checkpoint(block.mlp, x)
            x = router(out) if router else x + out
        return self.norm(x)

    def delta_layer(self, block, x, for_attn, for_mlp, rope, cache):
        """Delta form, all (B, T, D): x is the running sum; each sublayer gets it with its site's gated read on top."""
        x = x + self.maybe_checkpoint(block.attn, x + for_attn, rope, cache)
        return x + self.maybe_checkpoint(block.mlp, x + for_mlp)

    def maybe_checkpoint(self, sublayer, x, *args):
        if self.checkpoint_sublayers and torch.is_grad_enabled():
            return checkpoint(sublayer, x, *args, use_reentrant=False, preserve_rng_state=False)
        return sublayer(x, *args)

    def forward(self, idx, targets=None, reduction='mean', caches=None):
        """
        idx (B, T) token ids -> logits (B, T, V).

        With targets (B, T), -1 = ignored: the mean cross-entropy in nats instead (under grad mode with the z-loss, if
        it is on); reduction='none' gives all losses (B, T), 0 where ignored, and no gradient. `caches`, one KVCache a
        layer, lets idx go on where they end.
        """
        length = idx.size(1) + (len(caches[0]) if caches else 0)
        if length > self.config.block_size:
            raise ValueError(f"a sequence of {length} tokens is longer than block_size = {self.config.block_size}")
        x = self.hidden(idx, caches)
        weight = self.wte.weight if self.config.tie_embeddings else self.lm_head.weight
        if targets is None:
            # The embedding has padding rows that stand for no token. Cutting them off here, and giving them
            # probability 0 in the loss, makes them invisible: they are never sampled and never trained.
            return F.linear(x, weight)[..., :self.config.vocab_size]
        with_grad = torch.is_grad_enabled() and reduction == 'mean'
        losses = LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), self.config.vocab_size,
                                          self.z_loss if with_grad else 0.0, with_grad, self.chunk_loss)
        if reduction == 'none':
            return losses.detach().view(targets.shape)
        return losses.sum() / (targets >= 0).sum()

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """
        idx (B, T >= 1), the prompt -> (B, T + new), prompt included. Temperature 0 takes the likeliest token; top_k
        keeps the k likeliest (None, 0 or k >= V: all). Stops when the sequence reaches block_size: the result is then
        shorter than asked for. A prompt longer than block_size is a ValueError.
        """
        room = self.config.block_size - idx.size(1)
        if room < 0:
            raise ValueError(f"the prompt has {idx.size(1)} tokens, more than block_size = {self.config.block_size}")
        was_training = self.training
        self.eval()
        try:
            caches = [KVCache() for _ in self.blocks]
            new = idx
            for _ in range(min(max_new_tokens, room)):
                logits = self(new, caches=caches)[:, -1].float()    # (B, V)
                if temperature < 1e-6:      # dividing by it would overflow
                    new = logits.argmax(-1, keepdim=True)
                else:
                    if top_k and top_k < logits.size(-1):
                        kth = logits.topk(top_k).values[:, -1:]
                        logits = logits.masked_fill(logits < kth, -math.inf)
                    new = torch.multinomial((logits / temperature).softmax(-1), 1)
                idx = torch.cat((idx, new), dim=1)
            return idx
        finally:
            self.train(was_training)

    def compile_parts(self, whole=True):
        """
        torch.compile, in place (parameter names stay). The plain model compiles as a whole. With routing each sublayer
        compiles on its own, in delta form each layer, and one graph serves all of them: the sites between them, which
        each see one source more, stay outside. With activation checkpointing, or if not `whole`, it is always
        sublayers. -> whether the model compiled as a whole.
        """
        self.chunk_loss = torch.compile(chunk_loss)
        whole = whole and not self.checkpoint_sublayers
        if whole and self.config.H == 0:
            self.hidden = torch.compile(self.hidden)
        elif whole and self.config.delta_blocks > 0:
            self.delta_layer = torch.compile(self.delta_layer)
        else:
            for block in self.blocks:
                block.attn.compile()
                block.mlp.compile()
        return whole and self.config.H == 0

    def parameter_groups(self, weight_decay, decay_embedding=True, query_lr=1.0):
        """
        For AdamW: matrices decay; norm weights and all of the routing (vectors, a row a site) do not. A group's
        'lr_scale', query_lr for the routing queries and 1 for the others, is for the caller to multiply its 'lr' by.
        """
        matrices, vectors, queries = [], [], []
        spared = ['gains'] + ['wte.weight'] * (not decay_embedding)
        for name, p in self.named_parameters():
            decays = p.dim() == 2 and name not in spared
            (queries if name == 'queries' else matrices if decays else vectors).append(p)
        groups = [{'params': matrices, 'weight_decay': weight_decay, 'lr_scale': 1.0},
                  {'params': vectors, 'weight_decay': 0.0, 'lr_scale': 1.0},
                  {'params': queries, 'weight_decay': 0.0, 'lr_scale': query_lr}]
        return [group for group in groups if group['params']]       # H = 0 has no queries

    def count_parameters(self):
        """(embedding, rest): a tied embedding counts once; padding rows are not counted."""
        copies = 1 if self.config.tie_embeddings else 2
        padding = copies * (self.config.padded_vocab - self.config.vocab_size) * self.config.n_embd
        embedding = copies * self.config.vocab_size * self.config.n_embd
        return embedding, sum(p.numel() for p in self.parameters()) - embedding - padding

    def flops_per_token(self):
        """
        FLOPs of one training step per token, forward and backward: 6 a parameter (of the embedding only the head's
        product), and 6 * n_layer * n_head * head_size * block_size for causal attention, which sees half of the block
        on average. Routing's own are left out on purpose: MFU then compares H = 0, 1 and k as tokens a second do.
        """
        c = self.config
        attention = c.n_layer * c.n_head * c.head_size * c.block_size
        return 6 * (c.vocab_size * c.n_embd + self.count_parameters()[1] + attention)

    def describe(self):
        c, (embedding, rest) = self.config, self.count_parameters()
        kind = {0: 'plain residual', 1: 'AttnRes'}.get(c.H, 'MHAR')
        form = f" in delta form ({c.delta_blocks} groups)" if c.delta_blocks else ''
        total, embedding, rest = (f"{n / 1e6:.2f}M" for n in (embedding + rest, embedding, rest))
        return (f"{kind} (H={c.H}){form}, {c.n_layer} layers, width {c.n_embd}: "
                f"{total} parameters = {embedding} embedding + {rest} rest")

    def graft(self, H, delta_blocks, query_init_std=0.0):
        """
        This plain model in delta form: a new model on the very same weights, which computes exactly what this one does
        until training moves its gates from 0. ConfigError if this one is not plain, or for what Config does not allow.
        """
        if self.config.H > 0:
            raise ConfigError(f"H = {self.config.H}: only a plain model (H = 0) can be grafted onto")
        config = replace(self.config, H=H, delta_blocks=delta_blocks, query_init_std=query_init_std)
        with torch.device('meta'):
            model = Transformer(self.config)
        model.load_state_dict(self.state_dict(keep_vars=True), assign=True)     # shared, not copied
        model.cos, model.sin, model.config = self.cos, self.sin, config
        model.add_routing()
        return model

    @classmethod
    def from_checkpoint(cls, checkpoint, device='cpu', weights='model'):
        """A model from what train.py saved (the dictionary in OUT/ckpt.pt); weights='ema' takes their average."""
        model = cls.empty(Config(**checkpoint['model_config'] | {'router': 'auto'}), device)    # this machine's router
        model.load_state_dict(checkpoint[weights])
        return model

    @classmethod
    def empty(cls, config, device, dtype=torch.float32):
        """A model whose parameters hold anything, for weights that are about to be copied in."""
        with torch.device('meta'):
            model = cls(config).to(dtype)
        model.to_empty(device=device)
        model.cos, model.sin = (table.to(device) for table in rope_tables(config))      # fp32, whatever dtype is
        return model

    @classmethod
    def from_pretrained(cls, source, block_size=None, dtype=torch.float32, device='cpu'):
        """
        A plain model with the weights of a Llama or Qwen3 checkpoint in Hugging Face's layout. source is a folder with
        config.json and .safetensors files, or OWNER/NAME on the hub (which needs huggingface_hub). block_size: see
        pretrained_config. Memory: the weights in dtype, and one tensor. ConfigError lists whatever does not fit.
        """
        folder = pretrained_folder(source)
        model = cls.empty(pretrained_config(folder, block_size), device, dtype)
        copy_pretrained(model, folder)
        return model


# Weights that others have trained.

ARCHITECTURES = ('LlamaForCausalLM', 'Qwen3ForCausalLM')
HF_NAMES = {'attn.norm': 'input_layernorm', 'attn.q': 'self_attn.q_proj', 'attn.k': 'self_attn.k_proj',
            'attn.v': 'self_attn.v_proj', 'attn.q_norm': 'self_attn.q_norm', 'attn.k_norm': 'self_attn.k_norm',
            'attn.proj': 'self_attn.o_proj', 'mlp.norm': 'post_attention_layernorm', 'mlp.gate': 'mlp.gate_proj',
            'mlp.up': 'mlp.up_proj', 'mlp.down': 'mlp.down_proj'}
VOCABULARY = ('model.embed_tokens.weight', 'lm_head.weight')    # a row a token; ours are padded to a round size


def hf_name(name):
    """'blocks.3.attn.q.weight' -> 'model.layers.3.self_attn.q_proj.weight', as Llama and Qwen3 call it."""
    first, *rest = name.removesuffix('.weight').split('.', 2)
    if first == 'blocks':
        return f'model.layers.{rest[0]}.{HF_NAMES[rest[1]]}.weight'
    return {'wte': 'model.embed_tokens.weight', 'norm': 'model.norm.weight', 'lm_head': 'lm_head.weight'}[first]


def pretrained_folder(source):
    """A folder as it is; OWNER/NAME is downloaded from the hub, into its cache -> Path."""
    if Path(source).is_dir():
        return Path(source)
    if str(source).count('/') != 1 or str(source).startswith(('.', '/')):
        raise ConfigError(f"{source} is neither a folder nor OWNER/NAME of a repository on the hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(f"there is no folder {source}; downloading it from the hub needs the huggingface_hub "
                          f"package: pip install huggingface_hub")
    try:
        return Path(snapshot_download(str(source), allow_patterns=['*.safetensors', '*.json'],
                                      ignore_patterns='original/*'))
    except (OSError, ValueError) as error:      # no network, no such repository, no permission
        raise ConfigError(f"{source} cannot be downloaded: {str(error).splitlines()[0]}") from error


def pretrained_config(folder, block_size=None):
    """
    The Config of a checkpoint, from its config.json. block_size defaults to 4,096, or to the checkpoint's longest
    sequence if that is shorter. ConfigError for what this model cannot compute.
    """
    path = Path(folder, 'config.json')
    def require(ok, problem):
        if not ok:
            raise ConfigError(f"{path}: {problem}")
    require(path.is_file(), "there is no such file; a checkpoint has one beside its .safetensors files")
    try:
        hf = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    require(isinstance(hf, dict), "must hold a JSON object")
    architectures = hf.get('architectures')
    require(architectures in [[name] for name in ARCHITECTURES],
            f"architectures = {architectures}: must be one of {', '.join(ARCHITECTURES)}, in a list")
    for key, wanted in dict(attention_bias=False, mlp_bias=False, use_sliding_window=False, hidden_act='silu',
                            quantization_config=None, pretraining_tp=1).items():
        require(hf.get(key, wanted) == wanted, f"{key} = {hf.get(key)}: only {wanted} is implemented")
    rope = hf.get('rope_parameters') or hf.get('rope_scaling') or {}        # the first since transformers 5
    require(isinstance(rope, dict), f"rope_parameters or rope_scaling = {rope!r}: must be an object")
    kind = rope.get('rope_type', rope.get('type', 'default'))
    require(kind in ('default', 'llama3'), f"rope_type {kind!r}: must be 'default' or 'llama3'")
    values = {'rope_theta': 1e4} | hf | rope
    needed = ('vocab_size', 'max_position_embeddings', 'num_hidden_layers', 'num_attention_heads', 'hidden_size',
              'intermediate_size', 'rms_norm_eps', 'rope_theta') + (ROPE_SCALING if kind == 'llama3' else ())
    wrong = [f"{key} = {values[key]!r}" if key in values else f"{key} is missing"
             for key in needed if type(values.get(key)) not in (int, float)]
    require(not wrong, f"{', '.join(wrong)}: must be a number")
    longest = hf['max_position_embeddings']
    require(block_size is None or block_size <= longest, f"block_size = {block_size}: must be {longest} or less")
    return Config(
        vocab_size=hf['vocab_size'], block_size=block_size or min(longest, 4096), n_layer=hf['num_hidden_layers'],
        n_head=hf['num_attention_heads'], n_kv_head=hf.get('num_key_value_heads') or hf['num_attention_heads'],
        n_embd=hf['hidden_size'], ffn_dim=hf['intermediate_size'], H=0, head_dim=hf.get('head_dim'),
        rope_theta=values['rope_theta'],
        rope_scaling={key: values[key] for key in ROPE_SCALING} if kind == 'llama3' else None,
        norm_eps=hf['rms_norm_eps'], qk_norm=architectures == ['Qwen3ForCausalLM'],
        tie_embeddings=bool(hf.get('tie_word_embeddings')))


@torch.no_grad()
def copy_pretrained(model, folder):
    """The checkpoint's tensors into a plain model of its Config, one at a time; ConfigError lists what does not fit."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError("reading a pretrained checkpoint needs the safetensors package: pip install safetensors")
    index, names = Path(folder, 'model.safetensors.index.json'), ['model.safetensors']
    if index.is_file():
        try:
            names = json.loads(index.read_text())['weight_map'].values()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged: {error!r}") from error
    parameters, V = {hf_name(name): p for name, p in model.named_parameters()}, model.config.vocab_size
    found, wrong = {}, []
    try:
        files = [safe_open(Path(folder, name), framework='pt') for name in sorted(set(names))]
        for file in files:
            for name in file.keys():
                p, shape = parameters.get(name), tuple(file.get_slice(name).get_shape())
                if p is not None:
                    expected = (V, *p.shape[1:]) if name in VOCABULARY else tuple(p.shape)
                    wrong += [f"{name} is {shape}, should be {expected}"] * (shape != expected)
                    found[name] = file
                elif not name.endswith(('rotary_emb.inv_freq', 'lm_head.weight')):      # tied: the embedding again
                    wrong.append(f"{name} is unknown")
        wrong += [f"{name} is missing" for name in parameters.keys() - found.keys()]
        if wrong:
            raise ConfigError(f"{folder} does not fit its config.json: {'; '.join(sorted(wrong))}")
        for name, file in found.items():
            tensor, p = file.get_tensor(name), parameters[name]
            p[:len(tensor)].copy_(tensor)
            p[len(tensor):].zero_()             # the padding rows of the embedding and the head
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{folder}: a .safetensors file is missing or damaged: {error}") from error
