"""
Multi-Head Attention Residuals (MHAR): the whole model.

A Transformer adds each sublayer's output to one running sum, the residual stream. Here every
sublayer instead *reads a learned mix of all earlier sublayer outputs*: a softmax over depth, taken
in H independent heads over the width.

    H = 0   the plain residual Transformer
    H = 1   Attention Residuals (AttnRes): one softmax over depth for the whole width
    H = k   MHAR: k of them, each for its own slice of the width; not one parameter more than H = 1

With `delta_blocks` the running sum stays, and what a sublayer reads of the depth is added to it:
the *delta form*, which can be grafted onto a trained plain model (Transformer.from_pretrained,
.graft).

Depth routing comes first, then Qwen3's Transformer; Transformer.hidden is where they meet.

Paper: "Multi-Head Attention Residuals", Luo, Cai and Hu, 2026. Letters in the shape comments: B
sequences, T tokens, D = n_embd, V = vocab_size, N sources, H heads.
"""
import importlib.util
import math
import os
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


# Depth routing. A router of your own is made in the next five functions: create a parameter, a row
# for each site, in add_routing, return it from site_parameters, take it in fold, route_weights and
# route. (Older checkpoints then lack it.) On a GPU the fused kernels take the place of `route`, and
# all that they know of a site is what `fold` returns: what acts elsewhere needs --router=eager.

def add_routing(model):
    """Gives the model what its routing learns. (All it holds itself: layers hold the rest.)"""
    c, like = model.config, model.wte.weight.detach()
    model.queries = nn.Parameter(like.new_zeros(c.n_site, c.n_embd))
    model.gains = nn.Parameter(like.new_ones(c.n_site, c.n_embd))       # of the norm of the keys
    if c.query_init_std > 0:
        nn.init.normal_(model.queries, std=c.query_init_std)
    if c.delta_blocks > 0:
        model.gates = nn.Parameter(like.new_zeros(c.n_site))    # 0: the running sum alone is read
        model.null = nn.Parameter(like.new_zeros(c.n_embd))     # a source, silent at first


def site_parameters(model):
    """What each site has: the arguments of fold, route_weights and route, in their order."""
    return model.queries, model.gains


def fold(query, gain):
    """u, which makes all scores u . RMSNorm(s_i), of one site, (D,), or of all of them, (N, D)."""
    return query * gain


def route_weights(sources, query, gain, H, eps=1e-6):
    """
    How much each head of one routing site reads of each source: softmax_i(u[h] . RMSNorm(s_i)[h]).

    sources (N, B, T, D), query (D,), gain (D,) -> weights (N, B, T, H), fp32, that sum to 1 over
    the sources. The norm is over the full width D: H changes only the softmax.
    """
    keys = normalize(sources, eps)                                          # (N, B, T, D)
    scores = (keys * fold(query, gain)).unflatten(-1, (H, -1)).sum(-1)      # (N, B, T, H)
    return scores.softmax(dim=0)


def route(sources, query, gain, H, eps=1e-6):
    """
    One site's read: sources, a list of N tensors (B, T, D) or one (N, B, T, D) -> (B, T, D). Each
    head mixes its slice of the *un-normalised* sources with its own weights, in their dtype.
    """
    if not torch.is_tensor(sources):
        sources = torch.stack(tuple(sources))
    weights = route_weights(sources, query, gain, H, eps).to(sources.dtype)     # (N, B, T, H)
    values = sources.unflatten(-1, (H, -1))                             # (N, B, T, H, D / H)
    read = (weights.unsqueeze(-1) * values).sum(0).flatten(-2)          # (B, T, D)
    return read.to(sources.dtype)                                       # autocast sums in fp32


def normalize(x, eps):
    """x / RMS(x) over the last dimension, computed and returned in fp32 (or in float64 if x is)."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def recomputed(f, *args):
    """f(*args), which is computed once more in backward instead of keeping what it needs there."""
    return checkpoint(f, *args, use_reentrant=False, preserve_rng_state=False)


def read_eagerly(f, sources, *site):
    """f is `route`. What all sites would keep for backward, N^2 hidden states, fits no GPU."""
    return recomputed(f, sources, *site) if sources[0].is_cuda else f(sources, *site)


# What stands between the sublayers, in three forms: each takes the newest output, (B, T, D), and
# returns what the next sublayer reads (Delta: in two parts, which RMSNorm adds).

class Plain:
    """H = 0: one running sum."""
    x = 0.0

    def __call__(self, out):
        self.x = self.x + out
        return self.x


class EagerRouter:
    """H > 0: site n reads a mix of the n + 1 outputs so far. (Fused: kernel.DepthRouter.)"""
    route = staticmethod(route)     # the benchmark compiles it

    def __init__(self, parameters, H, eps):         # site_parameters: a row a site in each
        self.sites, self.H, self.eps, self.sources = list(zip(*parameters)), H, eps, []

    def __call__(self, out):
        site = self.sites[len(self.sources)]
        self.sources.append(out)
        return read_eagerly(self.route, list(self.sources), *site, self.H, self.eps)


class Delta:
    """
    Delta form: the running sum, and on top of it a gated read of the null source, the embedding,
    and what each finished group of layers has added. The sites of a group share their sources, and
    read at once: read_group(sources, sites) -> (B, T, D) for each site of a slice.
    """

    def __init__(self, config, null, read_group):
        k = config.delta_blocks
        starts = [2 * (i * config.n_layer // k) for i in range(k + 1)]      # two sites a layer
        self.groups = {first: slice(first, end) for first, end in zip(starts, starts[1:])}
        self.null, self.read_group, self.sources = null, read_group, []
        self.site, self.x, self.before = 0, 0.0, 0.0

    def __call__(self, out):
        self.x = self.x + out
        if self.site in self.groups:            # a group begins: what the last added is a source
            self.sources = self.sources or [self.null.to(out.dtype).expand_as(out)]
            self.sources.append(self.x - self.before)
            self.reads = iter(self.read_group(self.sources, self.groups[self.site]))
            self.before = self.x
        self.site += 1
        return self.x, next(self.reads, 0.0)    # RMSNorm, which compiles, adds them


# The configuration.

class ConfigError(ValueError):
    """What cannot work; the message says what is allowed."""


class SameAsKV(int):
    """H = -1, resolved: n_kv_head, also after a dataclasses.replace of that. A copy is an int."""

    def __reduce__(self):
        return int, (int(self),)


@dataclass(frozen=True)
class Config:
    vocab_size: int
    block_size: int                 # the longest sequence, in tokens
    n_layer: int                    # blocks; each holds two sublayers, attention and MLP
    n_head: int                     # query heads of the attention
    n_kv_head: int                  # key/value heads, each shared by n_head / n_kv_head query heads
    n_embd: int
    ffn_dim: int
    H: int = -1                     # routing heads: 0 plain, 1 AttnRes, k MHAR, -1 = n_kv_head
    delta_blocks: int = 0           # delta form: its groups of layers; 0: reads replace the sum
    query_init_std: float = 0.0     # 0 starts every read at the plain mean of its sources
    head_dim: Optional[int] = None  # of an attention head; None = n_embd / n_head
    rope_theta: float = 1e4
    rope_scaling: Optional[dict] = None     # Llama 3's, see rope_tables
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_embeddings: bool = True

    def __post_init__(self):
        if self.H == -1 or isinstance(self.H, SameAsKV):
            object.__setattr__(self, 'H', SameAsKV(self.n_kv_head))
        def require(ok, field, allowed):
            if not ok:
                raise ConfigError(f"{field} = {getattr(self, field)!r}: must be {allowed}")
        for field in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd',
                      'ffn_dim') + ('head_dim',) * (self.head_dim is not None):
            value = getattr(self, field)
            require(type(value) is int and value > 0, field, "a positive whole number")
        for field in ('H', 'delta_blocks'):
            require(type(getattr(self, field)) in (int, SameAsKV), field, "a whole number")
        require(self.n_head % self.n_kv_head == 0, 'n_kv_head', f"a divisor of {self.n_head} heads")
        require(self.head_dim or self.n_embd % self.n_head == 0, 'n_head',
                f"a divisor of n_embd = {self.n_embd}")
        require(self.head_size % 2 == 0, 'head_dim' if self.head_dim else 'n_head',
                "such that an attention head has an even width: RoPE turns pairs")
        require(self.H >= 0 and self.n_embd % (self.H or 1) == 0, 'H',
                f"0 or a divisor of n_embd = {self.n_embd}")
        require(0 <= self.delta_blocks <= self.n_layer * (self.H > 0), 'delta_blocks',
                f"from 0 to n_layer = {self.n_layer}, and 0 where H = 0")
        require(self.query_init_std >= 0, 'query_init_std', "0 or more")
        require(self.rope_theta > 0, 'rope_theta', "more than 0")
        require(self.norm_eps > 0 or self.norm_eps == self.delta_blocks == 0, 'norm_eps',
                "0 or more, and more in delta form, whose null source is 0 at first")

    @property
    def head_size(self):
        return self.head_dim or self.n_embd // self.n_head

    @property
    def n_site(self):
        return 2 * self.n_layer + (self.delta_blocks == 0)      # delta form: none at the end

    @property
    def padded_vocab(self):
        return math.ceil(self.vocab_size / 64) * 64     # matrix products like round sizes


# The shapes of the paper (its section on shapes and recipe), with GPT-2's vocabulary instead of
# Qwen's 151,936: so '100m' has 63.5M parameters here. 'tiny' is ours: bytes, on a laptop's CPU.
PRESETS = {
    #               V   block  n_layer n_head n_kv_head  n_embd ffn_dim
    'tiny': Config(257,   256,       4,     4,        4,    128,    384),
    '100m': Config(50257, 2048,     12,     8,        4,    512,   1536),
    '350m': Config(50257, 1024,     24,    16,        8,   1024,   4096),
    '1b':   Config(50257, 1024,     36,    16,        8,   1280,   5120),
}
ROUTERS = 'auto', 'eager', 'fused'


# The two sublayers.

Linear = partial(nn.Linear, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        x = x[0] + x[1] if isinstance(x, tuple) else x      # Delta's
        return (normalize(x, self.eps) * self.weight).to(x.dtype)


ROPE_SCALING = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'


def rope_tables(config):
    """
    Rotary embedding (Su et al. 2021): cos and signed sin, each (block_size, head_size).

    Element i turns together with element i + head_size / 2, as in Llama and Qwen: (a, b) -> (a cos
    - b sin, b cos + a sin). With sin negative in the first half that is x * cos + roll(x) * sin.

    Llama 3.1's rope_scaling stretches positions for a longer context: a pair that turns less than
    low_freq_factor times in the original context turns `factor` times slower, one that turns more
    than high_freq_factor times as before, and those between them in between.
    """
    pairs = torch.arange(0, config.head_size, 2) / config.head_size
    frequencies = config.rope_theta ** -pairs           # in radians a token
    if config.rope_scaling:
        factor, low, high, context = (config.rope_scaling[key] for key in ROPE_SCALING)
        keep = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    angles = torch.arange(config.block_size)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def rotate(x, rope):
    """x (B, T, heads, head_size), rope = the tables' rows of these T positions."""
    cos, sin = (table[:, None] for table in rope)       # (T, 1, head_size), fp32
    return (x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin).to(x.dtype)


class KVCache:
    """
    Keys and values of one attention layer for the tokens so far, each (B, n_kv_head, T, head_size).

    Attention is all that needs a cache. Depth routing mixes the sources *of one token*: a new token
    brings its own along as it passes through the layers, and none ever reads another token's.
    """
    kv = None

    def append(self, *kv):
        self.kv = [torch.cat(pair, dim=2) for pair in zip(self.kv, kv)] if self.kv else kv
        return self.kv

    def __len__(self):
        return self.kv[0].size(2) if self.kv else 0


# cuDNN's attention is the fastest on Hopper, then FlashAttention-2; the rest serve other machines.
ATTENTION_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
                      SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_size = config.head_size
        queries, keys = config.n_head * config.head_size, config.n_kv_head * config.head_size
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.q = Linear(config.n_embd, queries)
        self.k = Linear(config.n_embd, keys)
        self.v = Linear(config.n_embd, keys)
        self.q_norm, self.k_norm = (RMSNorm(config.head_size, config.norm_eps) if config.qk_norm
                                    else nn.Identity() for _ in range(2))
        self.proj = Linear(queries, config.n_embd)

    def forward(self, x, rope, cache=None):
        x = self.norm(x)
        B, T, _ = x.shape
        q, k, v = (linear(x).view(B, T, -1, self.head_size) for linear in (self.q, self.k, self.v))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))        # (B, heads, T, head_size)
        mask = None
        if cache is not None:
            k, v = cache.append(k, v)
            if 1 < T < k.size(2):   # a new token sees the cached ones, and the new up to itself
                mask = x.new_ones(T, k.size(2), dtype=torch.bool).tril(k.size(2) - T)
        # cuDNN plans anew for each shape, and a cache has another length at every token.
        with sdpa_kernel(ATTENTION_BACKENDS[cache is not None:], set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=T > 1 and mask is None,
                                               enable_gqa=q.size(1) != k.size(1))
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.gate = Linear(config.n_embd, config.ffn_dim)
        self.up = Linear(config.n_embd, config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.n_embd)

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)


# The loss.

def chunk_loss(logits, targets, vocab_size, z_loss=0.0):
    """
    logits (C, padded V), targets (C,) -> losses (C,) in fp32, d loss / d logits; 0 where a target
    is -1. z_loss x logsumexp^2 keeps the logits from drifting (PaLM, Chowdhery et al. 2022, 5).
    """
    logits32 = at_least_fp32(logits)
    # Over 64 pieces of a row, then over the pieces: a piece fits in registers, so it is read once.
    lse = logits32.unflatten(1, (64, -1)).logsumexp(-1).logsumexp(-1, keepdim=True)
    target, keep = targets.clamp(min=0)[:, None], (targets >= 0)[:, None]
    cross_entropy, z_slope = lse - logits32[:, :vocab_size].gather(1, target), 2 * z_loss * lse
    losses = torch.where(keep, cross_entropy + z_loss * lse.square(), 0.0)
    # Probabilities, less 1 at the target: put in its place at the end, it costs the others nothing.
    grad = ((logits32 - lse).exp() * ((1 + z_slope) * keep)).to(logits.dtype)
    at_target = (torch.expm1(-cross_entropy) + z_slope * (-cross_entropy).exp()) * keep
    return losses[:, 0], grad.scatter(1, target, at_target.to(logits.dtype))


class LinearCrossEntropy(torch.autograd.Function):
    """
    Cross-entropies of `x @ weight.T` against targets, without ever holding all of the logits: at
    65,536 tokens and GPT-2's vocabulary they would take 13 GB in fp32, and their gradient as much.

    x (M, D), weight (padded V, D), targets (M,), -1 = ignored -> losses (M,), fp32. The rows go
    through in chunks, and each chunk's gradient is taken while its logits are there: backward only
    scales d(sum of losses)/dx and /dweight. So all losses must get one upstream gradient, a mean's.
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
            chunk_losses, dlogits = chunk_loss(logits, targets[rows], vocab_size, z_loss)
            losses.append(chunk_losses)
            if with_grad:
                dx[rows] = dlogits @ w
                dw += dlogits.T @ x[rows]
        ctx.save_for_backward(dx, dw)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, dlosses):
        if torch.is_grad_enabled():         # create_graph=True
            raise RuntimeError("no second derivatives here; F.cross_entropy of model(idx) has them")
        dx, dw = ctx.saved_tensors
        scale = dlosses[0]      # in fp32: in bf16 1 / tokens would be off by up to 0.4 %
        return (at_least_fp32(dx) * scale).to(dx.dtype), dw * scale, None, None, None, None, None


# The model.

def triton_runs(device):
    """Triton, and so torch.compile on a GPU and kernel.py, needs CUDA and capability 7.0."""
    return (device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (7, 0)
            and importlib.util.find_spec('triton') is not None)


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
            self.lm_head = Linear(config.n_embd, config.padded_vocab)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if config.H > 0:    # last, so that all H of one seed start from the same weights
            add_routing(self)
        # How the model computes, not what:
        self.router = 'auto'                # 'eager': reads by `route`; 'fused': by kernel.py
        self.checkpoint_sublayers = False   # recompute each in backward, keep no activations
        self.z_loss = 0.0                   # of the training loss, see chunk_loss
        self.chunk_loss = chunk_loss        # compile_parts puts a compiled one here

    def router_on(self, device, dtype=torch.float32):
        """'eager' or 'fused', what `router` comes to. ConfigError where fused cannot run."""
        if self.router not in ROUTERS:
            raise ConfigError(f"router = {self.router!r}: must be one of {', '.join(ROUTERS)}")
        if self.router == 'eager' or dtype == torch.float64:    # the kernels compute in fp32
            return 'eager'
        can = triton_runs(device) or os.environ.get('TRITON_INTERPRET') == '1'
        if self.router == 'fused' and not can:
            raise ConfigError(f"router = 'fused': needs Triton and a CUDA GPU of compute "
                              f"capability 7.0 or more, not {device}")
        return 'fused' if self.router == 'fused' or triton_runs(device) else 'eager'

    def new_stream(self, x):
        """What stands between the sublayers of one forward pass; x is what it will take."""
        c = self.config
        if c.H == 0:
            return Plain()
        if c.delta_blocks > 0:
            return Delta(c, self.null, self.read_group)
        if self.router_on(x.device, x.dtype) == 'eager':
            return EagerRouter(site_parameters(self), c.H, c.norm_eps)
        import kernel
        return kernel.DepthRouter(fold(*site_parameters(self)), c.H, c.norm_eps)

    def read_group(self, sources, sites):
        """Delta form: what these sites (a slice) read of sources, times their gates, as a list."""
        c, gates = self.config, self.gates[sites]
        parameters = [p[sites] for p in site_parameters(self)]
        if self.router_on(sources[0].device, sources[0].dtype) == 'eager':
            sources = torch.stack(sources)
            return [gate * read_eagerly(route, sources, *site, c.H, c.norm_eps)
                    for gate, site in zip(gates, zip(*parameters))]
        import kernel
        return kernel.group_reads(sources, fold(*parameters), gates, c.H, c.norm_eps)

    def hidden(self, idx, caches=None):
        """idx (B, T) -> the last hidden states, normalised, (B, T, D)."""
        start = len(caches[0]) if caches else 0
        rope = self.cos[start:start + idx.size(1)], self.sin[start:start + idx.size(1)]
        # Rows that pad the vocabulary stand for no token: they are left out here and as logits.
        x = F.embedding(idx, self.wte.weight[:self.config.vocab_size])
        if torch.is_autocast_enabled(x.device.type):
            # As small as the sublayers' outputs. For H = 0 each running sum now rounds.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        stream = self.new_stream(x)
        x = stream(x)
        for i, block in enumerate(self.blocks):
            x = stream(self.run(block.attn, x, rope, caches[i] if caches else None))
            x = stream(self.run(block.mlp, x))
        return self.norm(x)

    def run(self, sublayer, *args):
        again = self.checkpoint_sublayers and torch.is_grad_enabled()
        return recomputed(sublayer, *args) if again else sublayer(*args)

    def forward(self, idx, targets=None, reduction='mean', caches=None):
        """
        idx (B, T) token ids -> logits (B, T, V).

        With targets (B, T), -1 = ignored: the mean cross-entropy in nats instead (under grad mode
        with the z-loss, if it is on); reduction='none' gives all losses (B, T), 0 where ignored,
        and no gradient. `caches`, one KVCache a layer, lets idx go on where they end. ValueError
        for other shapes, IndexError or RuntimeError for what is no token.
        """
        self.check(idx, len(caches[0]) if caches else 0)
        if reduction not in ('mean', 'none'):
            raise ValueError(f"reduction = {reduction!r}: must be 'mean' or 'none'")
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets are {tuple(targets.shape)}, idx is {tuple(idx.shape)}")
        V, x = self.config.vocab_size, self.hidden(idx, caches)
        weight = self.wte.weight if self.config.tie_embeddings else self.lm_head.weight
        if targets is None:
            return F.linear(x, weight)[..., :V]
        with_grad = torch.is_grad_enabled() and reduction == 'mean'
        z_loss = self.z_loss if with_grad else 0.0
        losses = LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), V, z_loss,
                                          with_grad, self.chunk_loss)
        if reduction == 'none':
            return losses.detach().view(targets.shape)
        return losses.sum() / (targets >= 0).sum()

    def check(self, idx, cached=0):
        longest = self.config.block_size
        if idx.dim() != 2 or not 1 <= idx.size(1) <= longest - cached:
            raise ValueError(f"idx is {tuple(idx.shape)}, after {cached} cached tokens: it must be "
                             f"(B, T), and both together 1 to block_size = {longest} tokens")

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """
        idx (B, T >= 1), the prompt -> (B, T + new), prompt included, block_size tokens at most.
        Temperature 0 takes the likeliest token; top_k keeps the k likeliest (None or 0: all).
        """
        self.check(idx)
        caches, new = [KVCache() for _ in self.blocks], idx
        for _ in range(min(max_new_tokens, self.config.block_size - idx.size(1))):
            logits = self(new, caches=caches)[:, -1].float()    # (B, V)
            if top_k:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature < 1e-6:      # dividing by it would overflow
                new = logits.argmax(-1, keepdim=True)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            idx = torch.cat((idx, new), dim=1)
        return idx

    def compile_parts(self, whole=True):
        """
        torch.compile, in place (parameter names stay). The plain model compiles as a whole. With
        routing each sublayer compiles on its own, and one graph serves all of them: the sites
        between them, which each see one source more, stay outside. With activation checkpointing,
        or if not `whole`, it is always sublayers. -> whether the model compiled as a whole.
        """
        self.chunk_loss = torch.compile(chunk_loss)
        whole = whole and not self.checkpoint_sublayers and self.config.H == 0
        if whole:
            self.hidden = torch.compile(self.hidden)
        else:
            for block in self.blocks:
                block.attn.compile()
                block.mlp.compile()
        return whole

    def parameter_groups(self, weight_decay, decay_embedding=True, query_lr=1.0):
        """
        For AdamW: matrices decay; norm weights do not, and neither does the routing, which is
        whatever the model holds itself. A group's 'lr_scale', query_lr for the routing queries and
        1 for the others, is for the caller to multiply its 'lr' by.
        """
        groups = [dict(params=[], weight_decay=decay, lr_scale=scale)
                  for decay, scale in ((weight_decay, 1.0), (0.0, 1.0), (0.0, query_lr))]
        for name, p in self.named_parameters():
            in_layer = '.' in name
            decays = in_layer and p.dim() == 2 and (decay_embedding or name != 'wte.weight')
            groups[2 if name == 'queries' else 0 if decays else 1]['params'].append(p)
        return [group for group in groups if group['params']]       # H = 0 has no queries

    def count_parameters(self):
        """(embedding, rest): a tied embedding counts once; padding rows are not counted."""
        c, total = self.config, sum(p.numel() for p in self.parameters())
        width = c.n_embd if c.tie_embeddings else 2 * c.n_embd
        return c.vocab_size * width, total - c.padded_vocab * width

    def flops_per_token(self):
        """
        FLOPs of one training step per token, forward and backward: 6 a parameter (of the embedding
        only the head's product), and for causal attention, which sees half of the block on average,
        6 * n_layer * n_head * head_size * block_size. The mixing of sources is left out.
        """
        c = self.config
        attention = c.n_layer * c.n_head * c.head_size * c.block_size
        return 6 * (c.vocab_size * c.n_embd + self.count_parameters()[1] + attention)

    # Models from weights.

    def graft(self, H, delta_blocks, query_init_std=0.0):
        """
        This plain model in delta form: a new one on the very same weights, which computes exactly
        the same until training moves its gates from 0. ConfigError if this one is not plain.
        """
        if self.config.H > 0:
            raise ConfigError(f"H = {self.config.H}: only a plain model (H = 0) can be grafted on")
        config = replace(self.config, H=int(H), delta_blocks=delta_blocks,
                         query_init_std=query_init_std)
        model = Transformer.on(self.config, self.state_dict(keep_vars=True))
        model.cos, model.sin, model.router, model.config = self.cos, self.sin, self.router, config
        add_routing(model)
        return model

    @classmethod
    def on(cls, config, weights):
        """A model on these tensors, name -> tensor, all on one device: shared, not copied."""
        with torch.device('meta'):
            model = cls(config)
        model.load_state_dict(weights, assign=True)
        model.cos, model.sin = (t.to(model.wte.weight.device) for t in rope_tables(config))
        return model

    @classmethod
    def from_checkpoint(cls, source, device='cpu', weights='model'):
        """What train.py saved: OUT, or its ckpt.pt's dictionary. weights='ema': their average."""
        if not isinstance(source, dict):
            path = Path(source)
            path = path / 'ckpt.pt' if path.is_dir() else path
            source = torch.load(path, map_location='cpu', weights_only=True)
        tensors = {name: tensor.to(device, copy=True) for name, tensor in source[weights].items()}
        return cls.on(config_of(source), tensors)

    @classmethod
    def from_pretrained(cls, source, block_size=None, dtype=torch.float32, device='cpu'):
        """
        A plain model with the weights of a Llama or Qwen3: a folder in Hugging Face's layout, or
        OWNER/NAME on the hub. block_size: see pretrained_config. ConfigError for what does not fit.
        """
        config = pretrained_config(source, block_size)
        # As not tied: transformers may drop the head of a tied model that has one of its own.
        hf, found = from_hub('AutoModelForCausalLM', source, dtype=dtype, tie_word_embeddings=False,
                             ignore_mismatched_sizes=True, output_loading_info=True)
        weights = {our_name(name): tensor.to(device) for name, tensor in hf.state_dict().items()}
        wrong = set(found['missing_keys']) | set(found['unexpected_keys'])
        wrong |= set(map(str, found['mismatched_keys']))
        if config.tie_embeddings:
            head, tied = weights.pop('lm_head.weight'), 'lm_head.weight' in wrong
            if not tied and not torch.equal(head, weights['wte.weight']):
                raise ConfigError(f"{source} is tied, and yet has a head that is not the embedding")
            wrong.discard('lm_head.weight')
        with torch.device('meta'):
            wrong |= cls(config).state_dict().keys() ^ weights.keys()
        if wrong:
            raise ConfigError(f"{source} does not fit its config: {', '.join(sorted(wrong))}")
        for name in {'wte.weight', 'lm_head.weight'} & weights.keys():
            weights[name] = F.pad(weights[name], (0, 0, 0, config.padded_vocab - config.vocab_size))
        return cls.on(config, weights)


def config_of(checkpoint):
    """A checkpoint's Config; keys that are no longer known are dropped."""
    known, saved = {field.name for field in fields(Config)}, checkpoint['model_config']
    return Config(**{key: value for key, value in saved.items() if key in known})


# Weights that others have trained.

def from_hub(kind, source, **options):
    """transformers.kind.from_pretrained(source); ConfigError for whatever it cannot load."""
    try:
        import transformers
        transformers.logging.set_verbosity_error()      # from_pretrained tells what does not fit
        return getattr(transformers, kind).from_pretrained(source, **options)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install {error.name}") from error
    except Exception as error:      # no such file, a damaged one, no network: of many types
        problem = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(f"{source} cannot be loaded with transformers: {problem}") from error


def our_name(name):
    """'model.layers.3.self_attn.q_proj.weight' -> 'blocks.3.attn.q.weight'"""
    for theirs, ours in (('model.', ''), ('embed_tokens', 'wte'), ('layers', 'blocks'),
                         ('input_layernorm', 'attn.norm'), ('post_attention_layernorm', 'mlp.norm'),
                         ('self_attn', 'attn'), ('o_proj', 'proj'), ('_proj', '')):
        name = name.replace(theirs, ours)
    return name


def pretrained_config(source, block_size=None):
    """
    The Config of a Llama or Qwen3. block_size defaults to 4,096, or to the longest sequence of the
    checkpoint if that is shorter. ConfigError for what this model cannot compute.
    """
    hf = from_hub('AutoConfig', source)
    rope = dict(getattr(hf, 'rope_parameters', None) or getattr(hf, 'rope_scaling', None) or {})
    kind, architecture = rope.get('rope_type', 'default'), (hf.architectures or [None])[0]
    def require(ok, problem):
        if not ok:
            raise ConfigError(f"{source}: {problem}")
    require(architecture in ('LlamaForCausalLM', 'Qwen3ForCausalLM'),
            f"{architecture} is no Llama or Qwen3")
    require(kind in ('default', 'llama3') and hf.hidden_act == 'silu'
            and not getattr(hf, 'use_sliding_window', False),
            f"{kind} RoPE, {hf.hidden_act} or a sliding window; known are default, llama3, silu")
    longest = hf.max_position_embeddings
    require((block_size or 0) <= longest, f"block_size = {block_size}: must be {longest} or less")
    return Config(
        hf.vocab_size, block_size or min(longest, 4096), hf.num_hidden_layers,
        hf.num_attention_heads, hf.num_key_value_heads, hf.hidden_size, hf.intermediate_size,
        H=0, head_dim=hf.head_dim, norm_eps=hf.rms_norm_eps,
        rope_theta=rope.get('rope_theta') or hf.rope_theta,
        rope_scaling={key: rope[key] for key in ROPE_SCALING} if kind == 'llama3' else None,
        qk_norm=architecture == 'Qwen3ForCausalLM', tie_embeddings=hf.tie_word_embeddings)
