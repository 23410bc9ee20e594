"""
Fused depth routing: attention over the sources of one token, for every token, in Triton.

Site n of a routed network reads sources s_0 .. s_n (the embedding and the raw outputs of the sublayers so far):

    logit[i, h] = u_n[h] . s_i[h] * r_i     r_i = 1 / RMS(s_i) over the whole width,  u_n = query * gain
    read_n[h]   = sum_i softmax_i(logit[i, h]) s_i[h]

There is next to no arithmetic in it: a GPU spends its time moving rows (one row = the D numbers of one source of one
token). Done site by site, site n moves n + 1 rows, N^2/2 in all, and more than that again in the backward pass.

The idea. In ordinary attention a query is computed from the token; here all N queries are parameters, known before
the first layer runs. So nobody has to wait for site n to start on read n: when sources 0..9 exist, the sites 9..16
can take them in *together*, each row moved once for eight sites. Read 9 is then complete; for the others the few
sources born inside the group are left for later. A softmax over two disjoint sets of sources is merged exactly from
the two partial results and their log-sum-exps (as split-KV attention decoding does).

The backward pass is the mirror image. Site n+1 depends on site n, so sites run backward in strict reverse order, and
when the gradient of source i is asked for, the gradients of all the reads that ever used it are known. So it is
*pulled*: computed whole and written once, instead of being pushed piece by piece into an accumulator. With
p = exp(logit - lse), dh_n the gradient of read n, and dl = p (dh_n . s_i - dh_n . read_n) per head:

    d s_i = sum_n p dh_n + r_i sum_n dl u_n - (r_i^2 / D) (sum over heads and n of dl logit) s_i
    d u_n = sum over tokens and i of dl r_i s_i

Two operators with one interface, router(source) -> read, a lesson in two steps:
    SimpleRouter   a site at a time: the algorithm everybody would write first (it is the MHAR paper's)
                   source_norm, simple_fwd; push_bwd
    DepthRouter    in groups of S sites
                   source_norm, group_fwd, finish_fwd; site_dot, group_bwd, finish_bwd, query_grad
and group_reads for the delta form (see model.py), where all sites of a group read the same sources: there is no
triangle, and the group kernels do it all.
In the code v is a source and dv its gradient, dh the gradient of a read (DO where it arrives), rdl stands for r dl.

    python kernel.py                            the gate, then every arm's times, routing alone and the whole step
    python kernel.py --presets 100m --json out.json
Without a GPU it runs the gate in Triton's interpreter, on tiny shapes, and times nothing.
"""
import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"    # Triton looks when it is imported

try:
    import triton
    import triton.language as tl
    from triton.runtime.errors import OutOfResources
except ImportError as error:
    raise ImportError("kernel.py needs Triton (on Linux: pip install triton)") from error

from model import PRESETS, EagerRouter, Transformer, route, route_weights

# Tuned on one H200. A site costs about N / (2S) rows for its older sources and S / 2 for those of its group.
S = 8                   # sites (forward) or sources (backward) a group; a power of two below TILE
TILE = 16               # sources (forward) or sites (backward) a tensor-core tile
TOKENS = 16             # tokens that a program of the group kernels works through
PARTS = 64              # partial sums of the query gradient
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
if INTERPRET.value:
    TOKENS = 4          # enough to test the loop, at the interpreter's speed


# First the way everybody would write it: a site at a time.

@triton.jit
def address(table, i, like):
    """Sources and read gradients stay where autograd made them; a table in device memory holds their addresses.
    i: one number or a block of them. The pointer has the type of `like`; `aligned` sees to the 16 bytes."""
    return tl.multiple_of(tl.load(table + i).to(like.dtype), 16)


# do_not_specialize: or Triton compiles again for n = 1, and for n divisible by 16.

@triton.jit(do_not_specialize=["n", "BT"])
def source_norm(X, SRC, R, n, BT, D: tl.constexpr, eps, WIDTH: tl.constexpr):
    """A new source X (BT, D), one token: writes its address to SRC (N,) and 1 / RMS to row n of R (N, BT)."""
    t, w = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    if t == 0:
        tl.store(SRC + n, X.to(tl.int64))
    x = tl.load(X + t * D + w, mask=w < D, other=0.).to(tl.float32)
    tl.store(R + n * tl.cast(BT, tl.int64) + t, tl.rsqrt(tl.sum(x * x) / D + eps))


@triton.jit(do_not_specialize=["n", "BT"])
def simple_fwd(SRC, R, U, O, LSE, n, BT, D: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, KB: tl.constexpr):
    """Read n for one token, all heads, over sources 0 .. n: reads them through SRC, their R (N, BT) and row n of
    U (N, D); writes O (BT, D) and row n of LSE (N, BT, H), the log of the sum of exp(logit). A row of D numbers is a
    block (HB, KB): the powers of two that hold H heads of D / H columns."""
    BT, t = tl.cast(BT, tl.int64), tl.program_id(0).to(tl.int64)  # N * BT * D passes 2^31
    h, k = tl.arange(0, HB), tl.arange(0, KB)[None, :]
    at, real = h[:, None] * (D // H) + k, (h < H)[:, None] & (k < D // H)
    u = tl.load(U + n * D + at, mask=real, other=0.)
    m, l, acc = tl.full((HB,), -1e30, tl.float32), tl.zeros((HB,), tl.float32), tl.zeros((HB, KB), tl.float32)
    for i in range(0, n + 1):           # online softmax: m is the largest logit so far, sums are of exp(logit - m)
        v = tl.load(address(SRC, i, O) + t * D + at, mask=real, other=0.).to(tl.float32)
        logit = tl.sum(u * v, 1) * tl.load(R + i * BT + t)
        top = tl.maximum(m, logit)
        old, new = tl.exp(m - top), tl.exp(logit - top)
        m, l, acc = top, l * old + new, acc * old[:, None] + v * new[:, None]
    tl.store(O + t * D + at, (acc / l[:, None]).to(O.dtype.element_ty), mask=real)
    tl.store(LSE + (n * BT + t) * H + h, m + tl.log(l), mask=h < H)


@triton.jit(do_not_specialize=["n", "BT"])
def push_bwd(DO, O, SRC, R, U, LSE, DV, DQ, n, BT, D: tl.constexpr, H: tl.constexpr, FIRST: tl.constexpr,
             HB: tl.constexpr, KB: tl.constexpr):
    """Backward of site n for one token, all heads: add this site's part to the gradient of each of its sources,
    DV (N, BT, D) fp32 (FIRST: the first site to do so overwrites), and write the token's part of the query gradient,
    DQ (BT, D). Reads DO and read n, O (BT, D), the sources 0 .. n through SRC, R, row n of U and LSE."""
    BT, t = tl.cast(BT, tl.int64), tl.program_id(0).to(tl.int64)
    h, k = tl.arange(0, HB), tl.arange(0, KB)[None, :]
    at, real = h[:, None] * (D // H) + k, (h < H)[:, None] & (k < D // H)
    dh = tl.load(DO + t * D + at, mask=real, other=0.).to(tl.float32)
    u = tl.load(U + n * D + at, mask=real, other=0.)
    lse = tl.load(LSE + (n * BT + t) * H + h, mask=h < H, other=0.)
    dhr = tl.sum(dh * tl.load(O + t * D + at, mask=real, other=0.).to(tl.float32), 1)      # dh . read
    dq = tl.zeros((HB, KB), tl.float32)
    for i in range(0, n + 1):
        v = tl.load(address(SRC, i, O) + t * D + at, mask=real, other=0.).to(tl.float32)
        r = tl.load(R + i * BT + t)
        logit = tl.sum(u * v, 1) * r
        p = tl.exp(logit - lse)
        dl = p * (tl.sum(dh * v, 1) - dhr)
        dq += (dl * r)[:, None] * v
        dv = p[:, None] * dh + (dl * r)[:, None] * u - (r * r / D * tl.sum(dl * logit)) * v
        to = DV + (i * BT + t) * D + at
        if not FIRST:
            dv += tl.load(to, mask=real, other=0.)
        tl.store(to, dv, mask=real)
    tl.store(DQ + t * D + at, dq, mask=real)


# Why that is slow: site n moves n + 3 rows forward, and 5 (n + 1) + 6 backward, where gradients are fp32, read and
# written. For the 49 sites of a 24-layer model that is 7,742 rows a token. Everything from here on is for the 1,075
# rows of the grouped way, and for moving them at the speed of memory.
#
# A row is now a tuple of blocks, since Triton's are powers of two and 160 columns are not.

@triton.jit
def columns_of_heads(HB: tl.constexpr, H, K: tl.constexpr, W: tl.constexpr):
    """All heads of a row as blocks (HB, W), a slice of every head each: column numbers, and which of them are real.
    A block is as much as a program's threads load at once, so that a thread meets one head only."""
    h, w = tl.arange(0, HB)[:, None], tl.arange(0, W)[None, :]
    at, real = (), ()
    for i in tl.static_range((K + W - 1) // W):
        at += (h * K + i * W + w,)
        real += ((h < H) & (i * W + w < K),)
    return at, real


@triton.jit
def columns_of_head(h, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W2: tl.constexpr):
    """One head's slice of a row in C chunks, each of one or two blocks, (C, 1, W) and (C, 1, W2): column numbers, and
    which of them are real. 160 is 128 + 32, not 256 with holes."""
    CW: tl.constexpr = (K + C - 1) // C
    c, w = tl.arange(0, C)[:, None, None] * CW, tl.arange(0, W)[None, None, :]
    at, real = (h * K + c + w,), ((w < CW) & (c + w < K),)
    if W2:
        w = W + tl.arange(0, W2)[None, None, :]
        at, real = at + (h * K + c + w,), real + ((w < CW) & (c + w < K),)
    return at, real


@triton.jit
def load(pointer, at, real):
    row = ()
    for i in tl.static_range(len(at)):
        row += (tl.load(pointer + at[i], mask=real[i], other=0.),)
    return row


@triton.jit
def store(pointer, at, real, row):
    for i in tl.static_range(len(at)):
        tl.store(pointer + at[i], row[i].to(pointer.dtype.element_ty), mask=real[i])


@triton.jit
def both(a, b):
    return (a & b) != 0     # a & b is all in Triton; its interpreter makes integers, no mask, of a number and a block


@triton.jit
def only(condition, real):
    """Those of the real columns for which the condition holds."""
    out = ()
    for i in tl.static_range(len(real)):
        out += (both(condition, real[i]),)
    return out


@triton.jit
def inner(a, b):
    """Inner product of two rows per head, (HB,), in fp32."""
    product = a[0].to(tl.float32) * b[0].to(tl.float32)
    for i in tl.static_range(1, len(a)):
        product += a[i].to(tl.float32) * b[i].to(tl.float32)
    return tl.sum(product, 1)


@triton.jit
def times(a, x):
    """a x, with a number a head."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (a[:, None] * x[i].to(tl.float32),)
    return out


@triton.jit
def combine(a, x, b, y):
    """a x + b y, with a number a head."""
    out = ()
    for i in tl.static_range(len(x)):
        out += (a[:, None] * x[i].to(tl.float32) + b[:, None] * y[i].to(tl.float32),)
    return out


@triton.jit
def dot(a, b, acc=None):
    """Batched matrix product (C, M, K) @ (C, K, N) in full precision: fp32 operands must not become TF32."""
    if INTERPRET:  # its bfloat16 is a bit pattern that it cannot multiply
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def upright(rows):
    """(C, S, W) -> (C, W, S)."""
    out = ()
    for i in tl.static_range(len(rows)):
        out += (tl.trans(rows[i], 0, 2, 1),)
    return out


@triton.jit
def products(a, b, acc=None):
    """Inner products of M rows (C, M, W) with S upright ones (C, W, S): (C, M, S), summed over the blocks."""
    for i in tl.static_range(len(a)):
        acc = dot(a[i], b[i], acc)
    return acc


@triton.jit
def own_block(x, P: tl.constexpr):
    """The diagonal blocks: x (C, P M, P S) has every pair of tokens -> (C, P, M, S), each token with itself."""
    x = x.reshape(x.shape[0], P, x.shape[1] // P, P, x.shape[2] // P)
    p = tl.arange(0, P)
    same = p[:, None, None, None] == p[None, None, :, None]
    return tl.sum(tl.where(same[None], x, 0.), 3)


@triton.jit
def block_diagonal(p, rows):
    """Weights p (P, M, S) of P tokens for their rows (C, P M, W): (C, P S, P M), zero between different tokens."""
    P: tl.constexpr = p.shape[0]
    M: tl.constexpr = p.shape[1]
    S: tl.constexpr = p.shape[2]
    same = tl.arange(0, P)[:, None, None, None] == tl.arange(0, P)[None, None, :, None]
    p = tl.where(same, p.trans(0, 2, 1)[:, :, None, :], 0.).to(rows[0].dtype)      # (P, S, P, M)
    return tl.broadcast_to(p.reshape(P * S, P * M)[None], (rows[0].shape[0], P * S, P * M))


@triton.jit
def scaled(acc, a):
    """acc (C, P S, W) times a (P, S)."""
    out = ()
    for i in tl.static_range(len(acc)):
        out += (acc[i] * a.reshape(a.shape[0] * a.shape[1])[None, :, None],)
    return out


@triton.jit
def mix(p, rows, acc):
    """acc (C, S, W) + p (C, S, M) times (C, M, W), for each block of the row."""
    out = ()
    for i in tl.static_range(len(rows)):
        out += (dot(p, rows[i], acc[i]),)
    return out


@triton.jit
def zeros(C: tl.constexpr, S: tl.constexpr, W: tl.constexpr, W2: tl.constexpr):
    row = (tl.zeros((C, S, W), tl.float32),)
    if W2:
        row += (tl.zeros((C, S, W2), tl.float32),)
    return row


@triton.jit
def token(t, BT):
    """Token numbers as 64-bit numbers, since N * BT * D passes 2^31. Those beyond the end do the last one again."""
    return tl.minimum(t, BT - 1).to(tl.int64)


# Forward.

@triton.jit
def fold(m, l, acc, logit, value):
    """Online softmax, one more source. Per head: m the largest logit so far, l the sum of exp(logit - m), acc, a row,
    the sum of exp(logit - m) * value. A finished softmax is such a state too: m its lse, l = 1, acc its read."""
    top = tl.maximum(m, logit)
    old, new = tl.exp(m - top), tl.exp(logit - top)
    return top, l * old + new, combine(old, acc, new, value)


@triton.jit(do_not_specialize=["n", "older", "BT"])
def finish_fwd(X, SRC, R, U, O, LSE, n, older, BT, D: tl.constexpr, H: tl.constexpr, eps, HB: tl.constexpr,
               W: tl.constexpr):
    """Finish site n for one token, all heads. group_fwd has left the partial read over sources 0 .. older-1 in
    O (BT, D), its lse in row n of LSE (N, BT, H); nothing, if older = 0. This folds in the new source X (BT, D) and the
    sources older .. n-1, through SRC and R (N, BT), with row n of U (N, D). Writes the read and its lse in their
    places, X's address to SRC, row n of R."""
    BT, t = tl.cast(BT, tl.int64), tl.program_id(0).to(tl.int64)
    if t == 0:
        tl.store(SRC + n, X.to(tl.int64))
    h = tl.arange(0, HB)
    at, real = columns_of_heads(HB, H, D // H, W)
    stat = LSE + (n * BT + t) * H + h
    out = O + t * D
    # All loads first: none waits for another, or for a store.
    x, u, partial = load(X + t * D, at, real), load(U + n * D, at, real), load(out, at, only(older > 0, real))
    lse = tl.load(stat, mask=both(older > 0, h < H), other=-1e30)        # -1e30: weight 0
    r = tl.rsqrt(tl.sum(inner(x, x), 0) / D + eps)
    tl.store(R + n * BT + t, r)
    m, l, acc = fold(lse, tl.full((HB,), 1., tl.float32), partial, inner(u, x) * r, x)
    for i in tl.range(older, n, num_stages=3):      # two rows ahead
        v = load(address(SRC, i, O) + t * D, at, real)
        m, l, acc = fold(m, l, acc, inner(u, v) * tl.load(R + i * BT + t), v)
    store(out, at, real, times(1 / l, acc))
    tl.store(stat, m + tl.log(l), mask=h < H)


@triton.jit(do_not_specialize=["sources", "first", "sites", "BT"])
def group_fwd(SRC, R, UH, UL, GATE, O, LSE, sources, first, sites, BT, D: tl.constexpr, H: tl.constexpr,
              TOKENS: tl.constexpr, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W2: tl.constexpr,
              S: tl.constexpr, TILE: tl.constexpr, HALVES: tl.constexpr):
    """Sites first .. first+sites-1 over the sources that exist, 0 .. sources-1, for one head of TOKENS tokens.
    Reads the sources (BT, D) through SRC, R (sources, BT), and the queries as UH + UL (N, D), for 16-bit sources in
    two parts (HALVES); at fp32 UH is all. Writes the reads, times their GATE (N,) if there is one, to O (sites, BT, D)
    and their lse to rows first .. of LSE (N, BT, H).
    Works on P tokens at once, so that their P S sites are 16 rows, the least that a tensor core multiplies. A head is
    C chunks of the width, a warp each. One loop goes through (tokens, tile of sources), so that the next tile is on its
    way while this one is worked on, also from one token to the next."""
    h, BT64 = tl.program_id(0) % H, tl.cast(BT, tl.int64)
    # j: a site; js: (token, site); e: (token, source of the tile)
    j, e, js = tl.arange(0, S), tl.arange(0, P * TILE), tl.arange(0, P * S)
    at, real = columns_of_head(h, D // H, C, W, W2)
    asked = only((j < sites)[None, :, None], real)                                 # (C, S, W)
    to_u = ((first + j) * D)[None, :, None]
    uh, ul = upright(load(UH + to_u, at, asked)), upright(load(UL + to_u, at, asked))      # (C, W, S)
    l = tl.zeros((P, S), tl.float32)
    m, acc = l - 1e30, zeros(C, P * S, W, W2)
    tiles = tl.cdiv(sources, TILE)
    for it in range(0, TOKENS // P * tiles):
        t = tl.program_id(0) // H * TOKENS + it // tiles * P
        te, i = token(t + e // TILE, BT), it % tiles * TILE + e % TILE
        alive = i < sources
        r = tl.load(R + i * BT64 + te, mask=alive, other=0.)
        v = load((address(SRC, i, O) + te * D)[None, :, None], at, only(alive[None, :, None], real))    # (C, P TILE, W)
        logit = products(v, uh)                                                    # (C, P TILE, S)
        if HALVES:
            logit = products(v, ul, logit)
        logit = tl.where(alive[:, None], tl.sum(logit, 0) * r[:, None], -1e30).reshape(P, TILE, S)
        top = tl.maximum(m, tl.max(logit, 1))
        old, p = tl.exp(m - top), tl.exp(logit - top[:, None, :])
        m, l = top, l * old + tl.sum(p, 1)
        acc = mix(block_diagonal(p, v), v, scaled(acc, old))
        if it % tiles == tiles - 1:
            out = O + (js % S * BT64 + token(t + js // S, BT))[None, :, None] * D
            scale = 1 / l
            if GATE is not None:
                scale *= tl.load(GATE + first + j, mask=j < sites, other=0.)[None, :]
            store(out, at, only((js % S < sites)[None, :, None], real), scaled(acc, scale))
            stat = LSE + ((first + j)[None, :] * BT64 + token(t + tl.arange(0, P), BT)[:, None]) * H + h
            tl.store(stat, m + tl.log(l), mask=(j < sites)[None, :])
            l = tl.zeros((P, S), tl.float32)
            m, acc = l - 1e30, zeros(C, P * S, W, W2)


# Backward.

@triton.jit(do_not_specialize=["n", "BT"])
def site_dot(DO, O, GRAD, DHR, n, BT, D: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, W: tl.constexpr):
    """A new read gradient DO (BT, D) of read O (BT, D), one token: writes its address to GRAD (N,) and dh . read, a
    number a head, to row n of DHR (N, BT, H)."""
    BT, t = tl.cast(BT, tl.int64), tl.program_id(0).to(tl.int64)
    if t == 0:
        tl.store(GRAD + n, DO.to(tl.int64))
    h = tl.arange(0, HB)
    at, real = columns_of_heads(HB, H, D // H, W)
    dhr = inner(load(DO + t * D, at, real), load(O + t * D, at, real))
    tl.store(DHR + (n * BT + t) * H + h, dhr, mask=h < H)


@triton.jit(do_not_specialize=["first", "count", "split", "stop", "BT"])
def group_bwd(SRC, R, UH, UL, GATE, GRAD, LSE, DHR, DX, DC, RDL, first, count, split, stop, BT, D: tl.constexpr,
              H: tl.constexpr, NP, ALL: tl.constexpr, TOKENS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
              W: tl.constexpr, W2: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, HALVES: tl.constexpr):
    """Sources first .. first+count-1 under the sites split .. stop-1, which all read them; one head of TOKENS tokens.
    Reads the sources through SRC and R, UH, UL as group_fwd does, the read gradients dh (BT, D) through GRAD (N,), LSE
    and DHR = dh . read (N, BT, H). Writes p @ dh + r dl @ u to DX (count, BT, D), the norm's sum of dl * logit to
    DC (count, BT, H), r dl to RDL (count, BT, H, NP), where site split is column TILE. P tokens at once share the
    queries of a tile. Otherwise like group_fwd.
    If these are ALL of the sources, it computes DHR itself and writes it. With a GATE (N,), dh is the gradient of
    gate * read: p and dl get the gate, and DHR, without it, summed is the gradient of the gate."""
    h, BT64 = tl.program_id(0) % H, tl.cast(BT, tl.int64)
    # as_: (token, source); e: (token, site of the tile); p3, e3, a3: token, site and source, (P, TILE, S)
    e, as_ = tl.arange(0, P * TILE), tl.arange(0, P * S)
    p3, e3, a3 = tl.arange(0, P)[:, None, None], tl.arange(0, TILE)[None, :, None], tl.arange(0, S)[None, None, :]
    at, real = columns_of_head(h, D // H, C, W, W2)
    source = first + tl.minimum(as_ % S, count - 1)
    src = address(SRC, source, DX)
    dv, dc = zeros(C, P * S, W, W2), tl.zeros((P, S), tl.float32)
    tiles = tl.cdiv(stop - split, TILE)
    for it in range(0, TOKENS // P * tiles):
        t, site = tl.program_id(0) // H * TOKENS + it // tiles * P, split + it % tiles * TILE + e % TILE
        ta, te, t3 = token(t + as_ // S, BT), token(t + e // TILE, BT), token(t + p3, BT)
        alive = site < stop
        site3 = split + it % tiles * TILE + e3
        v = upright(load((src + ta * D)[None, :, None], at, real))                 # (C, W, P S)
        r = tl.load(R + source * BT64 + ta)
        dh = load((address(GRAD, site, DX) + te * D)[None, :, None], at, only(alive[None, :, None], real))
        stat = (site * BT64 + te) * H + h
        lse = tl.load(LSE + stat, mask=alive, other=0.).reshape(P, TILE, 1)
        if GATE is not None:
            gate = tl.load(GATE + site, mask=alive, other=0.).reshape(P, TILE, 1)
        if not ALL:
            dhr = tl.load(DHR + stat, mask=alive, other=0.).reshape(P, TILE, 1)
        to_u = site3 * D
        uh, ul = load(UH + to_u, at, real), load(UL + to_u, at, real)              # (C, TILE, W)
        logit = products(uh, v)                                                    # (C, TILE, P S)
        if HALVES:
            logit = products(ul, v, logit)
        logit = (tl.sum(logit, 0) * r[None, :]).reshape(TILE, P, S).trans(1, 0, 2)  # (P, TILE, S)
        g = tl.sum(own_block(products(dh, v), P), 0)                               # (P, TILE, S): dh . v
        p = tl.where(site3 < stop, tl.exp(logit - lse), 0.)
        if ALL:
            dhr = tl.sum(tl.where(a3 < count, p * g, 0.), 2, keep_dims=True)
            tl.store(DHR + stat, dhr.reshape(P * TILE), mask=alive)
        if GATE is not None:
            p *= gate
        dl = p * (g - dhr)
        dc += tl.sum(dl * logit, 1)
        rdl = (dl * r.reshape(P, 1, S)).to(RDL.dtype.element_ty).trans(0, 2, 1).reshape(P * S, TILE)
        to_rdl = ((as_ % S * BT64 + ta) * H + h)[:, None] * NP + (it % tiles + 1) * TILE + tl.arange(0, TILE)[None, :]
        tl.store(RDL + to_rdl, rdl, mask=(as_ % S < count)[:, None])
        rdl = tl.broadcast_to(rdl[None], (C, P * S, TILE))
        dv = mix(rdl, uh, mix(block_diagonal(p, dh), dh, dv))                      # uh is enough: dv gets rounded
        if it % tiles == tiles - 1:
            out = DX + (as_ % S * BT64 + ta)[None, :, None] * D
            store(out, at, only((as_ % S < count)[None, :, None], real), dv)
            tl.store(DC + (a3 * BT64 + t3) * H + h, dc.reshape(P, 1, S), mask=a3 < count)
            dv, dc = zeros(C, P * S, W, W2), tl.zeros((P, S), tl.float32)


@triton.jit
def pull(dv, dc, v, r, u, dh, lse, dhr):
    """-> the gradient dv of source v and the norm's sum dc of dl * logit, with one site's part added; and its r dl."""
    logit = inner(u, v) * r
    p = tl.exp(logit - lse)
    dl = p * (inner(dh, v) - dhr)
    one = tl.full(p.shape, 1., tl.float32)
    return combine(one, combine(one, dv, p, dh), dl * r, u), dc + dl * logit, dl * r


@triton.jit(do_not_specialize=["n", "first", "split", "stop", "BT"])
def finish_bwd(DO, O, SRC, R, U, GRAD, LSE, DHR, DX, DC, RDL, n, first, split, stop, BT, D: tl.constexpr,
               H: tl.constexpr, NP, HB: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr):
    """Finish source n, of the group that begins with `first`, for one token, all heads. group_bwd has left its gradient
    under the sites split .. stop-1 in row n - first of DX, DC; nothing, if split = stop. This adds what the sites
    n .. split-1 make of it. If there are any, DO (BT, D), the gradient of read n, has just arrived: its address goes to
    GRAD (N,), dh . read (the read is O) to row n of DHR. The later ones come through GRAD. Reads source n through SRC,
    and R, U, LSE, DHR. Writes r dl to columns 0 .. TILE-1 of row n - first of RDL, where site `split` would be column
    TILE, and the finished gradient to DX."""
    BT, t = tl.cast(BT, tl.int64), tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HB)
    live = h < H
    at, real = columns_of_heads(HB, H, D // H, W)
    here, row = n * BT + t, (n - first) * BT + t
    # All loads first: none waits for another, or for a store.
    now, later = only(n < split, real), only(split < stop, real)
    v, partial = load(address(SRC, n, O) + t * D, at, real), load(DX + row * D, at, later)
    dh, read, u = load(DO + t * D, at, now), load(O + t * D, at, now), load(U + n * D, at, now)
    r, dc = tl.load(R + here), tl.load(DC + row * H + h, mask=both(split < stop, live), other=0.)
    lse = tl.load(LSE + here * H + h, mask=both(n < split, live), other=1e30)      # 1e30: weight 0
    dhr = inner(dh, read)
    tl.store(DHR + here * H + h, dhr, mask=both(n < split, live))
    if (t == 0) & (n < split):
        tl.store(GRAD + n, DO.to(tl.int64))
    c, rdl = tl.arange(0, TILE)[None, :], tl.zeros((HB, TILE), RDL.dtype.element_ty)
    one = tl.full((HB,), 1., tl.float32)
    dv, dc, x = pull(times(one, partial), dc, v, r, u, dh, lse, dhr)
    rdl = tl.where(c == n - split + TILE, x.to(rdl.dtype)[:, None], rdl)
    for q in range(n + 1, split):
        there = (q * BT + t) * H + h
        dh = load(address(GRAD, q, O) + t * D, at, real)
        u = load(U + q * D, at, real)
        lse, dhr = tl.load(LSE + there, mask=live, other=0.), tl.load(DHR + there, mask=live, other=0.)
        dv, dc, x = pull(dv, dc, v, r, u, dh, lse, dhr)
        rdl = tl.where(c == q - split + TILE, x.to(rdl.dtype)[:, None], rdl)
    tl.store(RDL + (row * H + h)[:, None] * NP + c, rdl, mask=live[:, None])
    through_rms = r * r / D * tl.sum(tl.where(live, dc, 0.), 0)  # which all heads share
    store(DX + row * D, at, real, combine(one, dv, -through_rms * one, v))


@triton.jit(do_not_specialize=["first", "count", "split", "stop", "BT"])
def query_grad(SRC, RDL, DU, first, count, split, stop, N, BT, D: tl.constexpr, H: tl.constexpr, NP,
               SITES: tl.constexpr, TB: tl.constexpr, W: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Add sum over tokens of (r dl)^T @ s_i, for the sources first .. first+count-1, to the query gradients.
    Program (part, chunk of a head, block of sites) takes every PARTS-th block of TB tokens and owns its slice of
    DU (PARTS, N, D), so that the sum has one order: no atomics. Reads the sources through SRC and RDL (count, BT, H,
    NP), whose column TILE is site split."""
    K: tl.constexpr = D // H
    CW: tl.constexpr = (K + CHUNKS - 1) // CHUNKS
    part, parts, BT64 = tl.program_id(0), tl.num_programs(0), tl.cast(BT, tl.int64)
    h, k = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS * CW
    w = tl.arange(0, W)
    inside = ((w < CW) & (k + w < K))[None, :]
    at = h * K + k + w
    c = tl.program_id(2) * SITES + tl.arange(0, SITES)
    site = split - TILE + c
    acc = tl.zeros((SITES, W), tl.float32)
    for t0 in range(part * TB, BT, parts * TB):
        t = tl.cast(t0 + tl.arange(0, TB), tl.int64)
        live = (t < BT)[:, None]
        for a in range(count):
            v = tl.load(address(SRC, first + a, RDL) + t[:, None] * D + at[None, :], mask=live & inside, other=0.)
            # A mask that changes at a multiple of 16 only keeps the load wide.
            rdl = tl.load(RDL + ((a * BT64 + t) * H + h)[:, None] * NP + c[None, :], mask=live & (c < NP)[None, :])
            rdl = tl.where(live & (site < stop)[None, :], rdl, 0.).to(v.dtype)
            acc = dot(tl.trans(rdl), v, acc)
    out = DU + (part * N + site[:, None]) * D + at[None, :]
    mask = ((site >= 0) & (site < stop))[:, None] & inside
    tl.store(out, acc + tl.load(out, mask=mask, other=0.), mask=mask)


# What a pass keeps, and how its kernels are configured.

pow2 = triton.next_power_of_2


def blocks(width):
    """Widths of the one or two blocks, powers of two from 16 on, that cover a chunk of a head."""
    W = max(16, pow2(width))
    W2 = max(16, pow2(width - W // 2))
    return dict(W=W // 2, W2=W2) if W // 2 + W2 < W else dict(W=W, W2=0)


def aligned(x):
    """The kernels take an address on trust: rows one after the other, from a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def check_queries(queries, H):
    if H < 1 or queries.dim() != 2 or queries.size(1) % H:
        raise ValueError(f"depth routing: queries must be (N, D) with D a multiple of H > 0, "
                         f"not {tuple(queries.shape)} with H = {H}")


def check_source(source):
    if source.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise RuntimeError(f"depth routing: a source of {source.dtype}, must be float32, bfloat16 or float16")
    if source.is_cuda and source.device.index != torch.cuda.current_device():
        raise RuntimeError(f"depth routing: Triton launches on the current device, and that is not {source.device}")


class Tape:
    """What one forward and backward pass of a router keeps, made on the first read, emptied by the last gradient (state
    on an autograd context lives as long as somebody holds the loss), or of one group_reads."""

    def __init__(self, queries, H, eps, source, group_size, n_source=None):
        self.N, self.D = queries.shape                             # sites, and as many sources if not told otherwise
        self.shape, self.dtype, self.H, self.eps, self.S = source.shape, source.dtype, H, eps, group_size
        self.BT, self.K = source.numel() // self.D, self.D // H
        self.C = pow2(triton.cdiv(self.K, 192))                    # chunks a head, a warp each in the group kernels
        device = source.device
        self.new = lambda *shape, dtype=torch.float32: torch.empty(*shape, device=device, dtype=dtype)
        self.U = queries.detach().to(torch.float32, copy=True).contiguous()    # as they are now
        self.halves = source.dtype != torch.float32                # 16-bit matrix products: queries in two parts
        padded = torch.nn.functional.pad(self.U, (0, 0, 0, TILE))  # the last tile may look beyond the end
        self.UH = padded.to(source.dtype)
        self.UL = (padded - self.UH.float()).to(source.dtype)
        n_source = n_source or self.N
        self.SRC = self.new(n_source + TILE, dtype=torch.int64)    # addresses; the last tile looks beyond the end
        self.sources = []                                          # what keeps them valid
        self.R, self.LSE = self.new(n_source, self.BT), self.new(self.N, self.BT, H)
        self.reads = {}                                            # by site; those of a group share a tensor
        self.keep = torch.is_grad_enabled()                        # for a backward pass
        self.versions = []                                         # of the sources, to notice a change in place
        self.last = None                                           # the site whose gradient came last

    def begin_site(self, n, x):
        """Note source n, and give the reads of n's group their place when it begins. -> the group's sites, a range. The
        first group, which has no older sources, has 2 .. S + 1 sites, so that all others have S."""
        self.sources.append(x)
        self.versions.append(x._version if self.keep else None)     # inference tensors have none
        rest = (self.N - 2) % self.S + 2
        first = 0 if n < rest else n - (n - rest) % self.S
        sites = range(first, first + self.S if first else min(rest, self.N))
        if n == first:
            if not self.keep:
                self.reads.clear()
            self.reads |= zip(sites, self.new(len(sites), self.BT, self.D, dtype=self.dtype))
        return sites

    def group_of_sources(self, n):
        """First and last source of n's group, in the backward pass: S sources each, 2 .. S + 1 in the newest, which
        takes in what would be a group of one."""
        first = max(0, min(n, self.stop - 2)) // self.S * self.S
        last = first + self.S - 1
        if last >= self.stop - 2:
            last = self.stop - 1
        return first, last

    def begin_gradient(self, n):
        """Gradients come from the last site that was used down to site 0, once. True for the first to come."""
        if self.last is not None and n != self.last - 1:
            raise RuntimeError("depth routing: its buffers are freed as the backward pass runs, so a second backward "
                               "through the same reads is not possible; run the forward pass again")
        newest = self.last is None
        if newest:
            changed = [i for i, x in enumerate(self.sources) if x._version != self.versions[i]]
            if changed:
                raise RuntimeError(f"depth routing: sources {changed} were modified in place after they were read")
            if any(read._version for read in self.reads.values()):
                raise RuntimeError("depth routing: a read was modified in place")
        self.last = n
        return newest

    def begin_backward(self, stop):
        """Of sites 0 .. stop-1, those that were used."""
        self.stop, self.NP = stop, (triton.cdiv(stop, TILE) + 1) * TILE     # NP: columns of RDL
        self.GRAD, self.grads = self.new(self.N + TILE, dtype=torch.int64), []      # addresses, what keeps them valid
        self.DHR, self.DC = self.new(stop, self.BT, self.H), self.new(self.S + 1, self.BT, self.H)
        self.RDL = self.new(self.S + 1, self.BT, self.H, self.NP, dtype=self.dtype)
        self.DU = torch.zeros(PARTS, self.N, self.D, device=self.U.device)

    def read_gradient(self, do):
        """The gradient of a read as the kernels take it; None, from a read that was not used, is zero."""
        return self.new(self.BT, self.D, dtype=self.dtype).zero_() if do is None else aligned(do.to(self.dtype))

    def clear(self):
        last = self.last
        self.__dict__.clear()
        self.last = last

    def row_config(self, warps=1):
        """The kernels of whole rows: a token a program. Warps do not share a head; a block is 256 numbers, and what a
        thread loads of it is of one head."""
        HB = pow2(self.H)
        return dict(HB=HB, W=min(pow2(self.K), max(1, 256 // HB)), num_warps=min(warps, HB))

    def group_configs(self, forward, few=False):
        """The kernels of one head: what is fastest on an H200, then what needs fewer registers, less shared memory.
        few: at most half a tile of sources, so that P tokens have one tile together."""
        P = TILE // self.S if forward or self.C == 1 else 1
        stages = 3 if self.K <= 128 and not forward else 2
        rest = dict(C=self.C, **blocks(triton.cdiv(self.K, self.C)), S=self.S, TOKENS=TOKENS, HALVES=self.halves,
                    num_warps=self.C)
        choice = ((P, stages), (1, 2), (1, 1)) if self.halves else ((1, 1),)
        return [dict(P=P, TILE=TILE // P if few else TILE, num_stages=stages, **rest) for P, stages in choice]


# The launches that the operators share; s is the tape.

def launch_source_norm(s, x, i):
    width = pow2(s.D)
    source_norm[(s.BT,)](x, s.SRC, s.R, i, s.BT, s.D, s.eps, WIDTH=width, num_warps=min(8, max(1, width // 512)))


def launch_group_kernel(kernel, s, configs, *args):
    for config in configs:
        try:
            return kernel[(triton.cdiv(s.BT, TOKENS) * s.H,)](*args, **config)
        except OutOfResources as error:
            refused = error
    raise RuntimeError(f"depth routing: H = {s.H} at width {s.D} does not fit this GPU ({refused}); the router 'eager' "
                       f"does, and (not in delta form) 'fused_simple'") from refused


def launch_group_fwd(s, O, sources, first, sites, gates=None):
    """Sites first .. first+sites-1, whose reads begin at O, over sources 0 .. sources-1."""
    configs = s.group_configs(forward=True, few=sources <= TILE // 2)
    launch_group_kernel(group_fwd, s, configs, s.SRC, s.R, s.UH, s.UL, gates, O, s.LSE, sources, first, sites, s.BT,
                        s.D, s.H)


def launch_site_dot(s, do, O, n):
    site_dot[(s.BT,)](do, O, s.GRAD, s.DHR, n, s.BT, s.D, s.H, **s.row_config())


def launch_group_bwd(s, first, split, gates=None, all_sources=False):
    """What the sites from split on add to the gradients of sources first .. of as many as DX has rows."""
    launch_group_kernel(group_bwd, s, s.group_configs(forward=False), s.SRC, s.R, s.UH, s.UL, gates, s.GRAD, s.LSE,
                        s.DHR, s.DX, s.DC, s.RDL, first, s.DX.size(0), split, s.stop, s.BT, s.D, s.H, s.NP, all_sources)


def launch_finish_bwd(s, do, O, n, first, split):
    finish_bwd[(s.BT,)](do, O, s.SRC, s.R, s.U, s.GRAD, s.LSE, s.DHR, s.DX, s.DC, s.RDL, n, first, split, s.stop, s.BT,
                        s.D, s.H, s.NP, TILE=TILE, **s.row_config(warps=2))


def launch_query_grad(s, first, split):
    """Of the sources first .. of as many as DX has rows. Column TILE of RDL is site split."""
    chunks = triton.cdiv(s.K, 128)          # of a head
    columns = TILE + s.stop - split
    sites = 64 if columns <= 64 else 128    # a program; two of 64 would both read the sources
    query_grad[(PARTS, s.H * chunks, triton.cdiv(columns, sites))](
        s.SRC, s.RDL, s.DU, first, s.DX.size(0), split, s.stop, s.N, s.BT, s.D, s.H, s.NP, SITES=sites, TB=64,
        W=max(16, pow2(triton.cdiv(s.K, chunks))), CHUNKS=chunks, TILE=TILE, num_warps=4)


# SimpleRouter and DepthRouter.

def simple_config(s):
    HB, KB = pow2(s.H), pow2(s.K)
    return dict(HB=HB, KB=KB, num_warps=min(8, max(1, HB * KB // 256)))     # a thread loads 8 numbers at once


def simple_forward(s, x, n):
    s.begin_site(n, x)
    launch_source_norm(s, x, n)
    simple_fwd[(s.BT,)](s.SRC, s.R, s.U, s.reads[n], s.LSE, n, s.BT, s.D, s.H, **simple_config(s))
    return s.reads[n]


def simple_backward(s, do, n, newest):
    if newest:
        s.DV, s.DU = s.new(n + 1, s.BT, s.D), torch.zeros_like(s.U)[None]
    dq = s.new(s.BT, s.D)
    push_bwd[(s.BT,)](do, s.reads.pop(n), s.SRC, s.R, s.U, s.LSE, s.DV, dq, n, s.BT, s.D, s.H, FIRST=newest,
                      **simple_config(s))
    s.DU[0, n] = dq.sum(0)
    return s.DV[n].to(s.dtype)


def grouped_forward(s, x, n):
    sites = s.begin_site(n, x)
    first, read = sites[0], s.reads[n]
    if n == first > 0:
        launch_source_norm(s, x, n)
        launch_group_fwd(s, read, n + 1, n, len(sites))     # read n whole, and after it in memory its group's, in part
    else:
        older = first + 1 if first else 0
        finish_fwd[(s.BT,)](x, s.SRC, s.R, s.U, read, s.LSE, n, older, s.BT, s.D, s.H, s.eps, **s.row_config())
    return read


def grouped_backward(s, do, n, newest):
    if newest:
        s.begin_backward(n + 1)
    s.grads.append(do)
    first, last = s.group_of_sources(n)
    split = s.stop if last == s.stop - 1 else last      # the sites from here on are pulled together
    read = s.reads.pop(n)
    if n == last:
        s.DX = s.new(last + 1 - first, s.BT, s.D, dtype=s.dtype)
        if split < s.stop:      # nobody beyond the newest group reads its sources
            launch_site_dot(s, do, read, n)
            launch_group_bwd(s, first, split)
    launch_finish_bwd(s, do, read, n, first, split)
    dx = s.DX[n - first]
    if n == first:
        launch_query_grad(s, first, split)
        s.DX = None
    return dx


class Read(torch.autograd.Function):
    """One site. `queries` is an input only for site 0, which returns their gradient. `chain` is an empty tensor that
    ties site n to site n-1, so that autograd runs the sites backward in strict reverse order, all of them, whatever the
    network does with the reads."""

    @staticmethod
    def forward(ctx, source, queries, chain, tape, n, forward, backward):
        ctx.tape, ctx.n, ctx.site_backward = tape, n, backward
        ctx.set_materialize_grads(False)
        # detached: a tape that held the graph, which holds the tape, would never be freed without a backward pass
        return forward(tape, aligned(source.detach()), n).view(source.shape), chain.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, _):
        s, n = ctx.tape, ctx.n
        newest = s.begin_gradient(n)
        do = s.read_gradient(do)
        dx, du, chain = ctx.site_backward(s, do, n, newest).view(s.shape), None, do.new_empty(0)
        if n == 0:
            du = s.DU.sum(0)
            s.clear()
        return dx, du, chain, None, None, None, None


class DepthRouter:
    """router(source) -> read. Call n appends source s_n (..., D) and returns read n, the per-head softmax-weighted mix
    of s_0 .. s_n. queries (N, D) fp32 = query * gain of each site; H divides D. Under autocast a source is first cast.
    A router serves one forward and one backward pass; differentiable in sources and queries. RuntimeError after N
    reads, on another shape or dtype, on a read after the backward pass has begun, on a second backward pass, on a
    source or read that was changed in place. Nothing big outlives the backward pass, once it has come to site 0."""
    S, forward, backward = S, staticmethod(grouped_forward), staticmethod(grouped_backward)

    def __init__(self, queries, H, eps=1e-6):
        check_queries(queries, H)
        self.queries, self.H, self.eps, self.tape, self.n = queries, H, eps, None, 0

    def __call__(self, source):
        kind = source.device.type
        if torch.is_autocast_enabled(kind):
            source = source.to(torch.get_autocast_dtype(kind))
        check_source(source)
        if self.tape is None:
            if source.size(-1) != self.queries.size(1):
                raise RuntimeError(f"depth routing: a source of width {source.size(-1)}, queries of width "
                                   f"{self.queries.size(1)}")
            self.tape, self.chain = Tape(self.queries, self.H, self.eps, source, self.S), source.new_empty(0)
        s = self.tape
        if s.last is not None:
            raise RuntimeError("depth routing: a read after the backward pass has begun")
        if self.n == s.N:
            raise RuntimeError(f"depth routing: all {s.N} reads are done; make a new router for the next forward pass")
        if source.shape != s.shape or source.dtype != s.dtype:
            raise RuntimeError(f"depth routing: source {self.n} is {tuple(source.shape)} {source.dtype}, "
                               f"the first was {tuple(s.shape)} {s.dtype}")
        if s.keep != torch.is_grad_enabled():
            raise RuntimeError("depth routing: some reads under no_grad, some not")
        read, self.chain = Read.apply(source, self.queries, self.chain, s, self.n, self.forward, self.backward)
        self.n += 1
        if self.n == s.N:
            self.chain = None             # or the router would hold the whole graph
        return read


class SimpleRouter(DepthRouter):
    """The same interface, a site at a time."""
    S, forward, backward = 1, staticmethod(simple_forward), staticmethod(simple_backward)


OPERATORS = {"fused": DepthRouter, "fused_simple": SimpleRouter}


# The delta form: the sites of a group of layers all read the same sources, which exist before the group runs.

@triton.jit(do_not_specialize=["n"])
def note(X, TABLE, n):
    """The address of X to entry n of TABLE."""
    tl.store(TABLE + n, X.to(tl.int64))


class GroupRead(torch.autograd.Function):
    """Groups of S, for 9 to 16 sources of TILE (and then a token at a time): all sources are one group, whose group_bwd
    computes dh . read. Of more than TILE sources it would see a part: the backward pass reads again, for site_dot."""

    @staticmethod
    def forward(ctx, queries, gates, H, eps, *sources):
        sources, M = [aligned(x.detach()) for x in sources], len(sources)
        s = Tape(queries, H, eps, sources[0], TILE if S < M <= TILE else S, M)
        s.gates = gates.detach().to(torch.float32, copy=True)     # backward wants them as they are now
        for i, x in enumerate(sources):
            launch_source_norm(s, x, i)
        O = GroupRead.reads(s, M, s.gates)
        ctx.save_for_backward(*sources)
        ctx.tape, ctx.addresses = s, [x.data_ptr() for x in sources]
        ctx.set_materialize_grads(False)
        return tuple(read.view(s.shape) for read in O)

    @staticmethod
    def reads(s, M, gates):
        """All N of the tape s, of its M sources, times their gates if there are any: (N, BT, D)."""
        O = s.new(s.N, s.BT, s.D, dtype=s.dtype)
        for first in range(0, s.N, s.S):
            launch_group_fwd(s, O[first], M, first, min(s.S, s.N - first), gates)
        return O

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        s, sources = ctx.tape, [*map(aligned, ctx.saved_tensors)]
        s.begin_backward(s.N)
        s.grads = [s.read_gradient(do) for do in grads]
        M, gradients = len(sources), []
        for i, x in enumerate(sources):
            if x.data_ptr() != ctx.addresses[i]:    # a checkpoint or a hook has put it elsewhere
                launch_source_norm(s, x, i)
                ctx.addresses[i] = x.data_ptr()
        at_once = M <= s.S
        if at_once:     # group_bwd computes dh . read
            for n, do in enumerate(s.grads):
                note[(1,)](do, s.GRAD, n)
        else:           # from the reads, which are not kept
            for n, (do, read) in enumerate(zip(s.grads, GroupRead.reads(s, M, None))):
                launch_site_dot(s, do, read, n)
        for first in range(0, M, s.S):
            s.DX = s.new(min(s.S, M - first), s.BT, s.D, dtype=s.dtype)
            launch_group_bwd(s, first, 0, s.gates, at_once)
            for i in range(first, first + s.DX.size(0)):
                launch_finish_bwd(s, s.DX, s.DX, i, first, 0)       # split = 0: DO and O are not looked at
            launch_query_grad(s, first, 0)
            gradients += [dx.view(s.shape) for dx in s.DX]
        du, dgates = s.DU.sum(0), s.DHR.sum((1, 2))
        s.GRAD = s.grads = s.DHR = s.DC = s.RDL = s.DU = s.DX = None     # the tape lives as long as the loss is held
        return du, dgates, None, None, *gradients


def group_reads(sources, queries, gates, H, eps=1e-6):
    """
    What N sites that read the same sources read of them, all at once, times the sites' gates. sources: a list of M
    tensors (..., D) of one shape and dtype; queries (N, D) fp32 = query * gain; gates (N,) fp32 -> N tensors (..., D).
    Differentiable in all three. ValueError if shapes, dtypes or devices do not fit or H does not divide D, RuntimeError
    for a dtype that the kernels do not take.
    """
    check_queries(queries, H)
    if not sources:
        raise ValueError("depth routing: there are no sources")
    check_source(sources[0])
    if sources[0].size(-1) != queries.size(1) or len({(x.shape, x.dtype) for x in sources}) > 1:
        raise ValueError(f"depth routing: sources must have one shape and dtype, and the queries' width, "
                         f"{queries.size(1)}; they are {sorted({f'{tuple(x.shape)} {x.dtype}' for x in sources})}")
    if gates.shape != queries.shape[:1]:
        raise ValueError(f"depth routing: gates must be ({len(queries)},), one a query, not {tuple(gates.shape)}")
    if len({x.device for x in (*sources, queries, gates)}) > 1:
        raise ValueError("depth routing: sources, queries and gates must be on one device")
    return GroupRead.apply(queries, gates, H, eps, *sources)


# The gate: no time counts before this is green.

def all_reads(sources, queries, H):
    """Every site's read by the definition: `route` in model.py."""
    one = torch.ones_like(queries[0])       # the gains are already in the queries
    return [route(sources[:n + 1], query, one, H) for n, query in enumerate(queries)]


def with_gradients(reads_of, sources, queries, weights):
    """[reads, source gradients, query gradients] of sum(weights * reads)."""
    sources = [x.detach().clone().requires_grad_() for x in sources]
    queries = queries.detach().clone().requires_grad_()
    reads = reads_of(sources, queries)
    grads = torch.autograd.grad(reads, [*sources, queries], weights)
    return [torch.stack([x.detach() for x in reads]), torch.stack(grads[:-1]), grads[-1]]


def rounding(sources, queries, weights, H):
    """
    dl = p (dh . s - dh . read) takes each read as it was stored, rounded, as FlashAttention does. Where one source has
    all the weight the difference is 0 and the rounding all there is. -> how far that moves [reads, source gradients,
    query gradients], as norms: root mean squares for independent errors as large as the numbers that are rounded.
    """
    sources, one = torch.stack(sources), torch.ones_like(queries[0])
    r = torch.rsqrt(sources.square().mean(-1, keepdim=True))                                # (N, 1, T, 1)
    moved, moved_queries = torch.zeros_like(sources).unflatten(-1, (H, -1)), []
    for n, (query, dh) in enumerate(zip(queries, weights)):
        s = sources[:n + 1]
        p = (route_weights(s, query, one, H) * r[:n + 1]).unsqueeze(-1)                     # (n + 1, 1, T, H, 1)
        dot = (dh * route(s, query, one, H)).square().unflatten(-1, (H, -1)).sum(-1, keepdim=True)     # (1, T, H, 1)
        moved[:n + 1] += dot * p.square() * query.square().unflatten(-1, (H, -1))
        moved_queries.append((dot * (p * s.unflatten(-1, (H, -1))).sum(0).square()).sum())
    return [0.0, moved.sum().sqrt(), sum(moved_queries).sqrt()]


def check_case(router, N, H, K, T, scale, dtype, device):
    """
    -> (errors, allowed errors) of reads, source gradients and query gradients: ||a - b|| / ||b|| against fp64, inf
    where two runs differ in a bit. fp32 may be 1e-5 off, or 4x as far as eager fp32 is; 16 bits 1.2x as far as eager
    and 1e-4; with large logits (scale > 1) or few sources, where the gradient through the softmax is small, both also
    by what `rounding` says. Buffers are poisoned: what nobody writes is NaN.
    """
    g = torch.Generator().manual_seed(N * H + K)
    sources = [(torch.randn(1, T, H * K, generator=g) * (.5 + i % 3)).to(device, dtype) for i in range(N)]
    weights = [torch.randn(1, T, H * K, generator=g).to(device, dtype) for _ in range(N)]
    queries = (torch.randn(N, H * K, generator=g) * scale / K ** .5).to(device)

    def fused(sources, queries):
        read = router(queries, H)
        return [read(x) for x in sources]
    empty = torch.empty
    torch.empty = lambda *a, **k: empty(*a, **k).fill_(float("nan") if k["dtype"].is_floating_point else 0).data
    try:
        got, again = [with_gradients(fused, sources, queries, weights) for _ in range(2)]
    finally:
        torch.empty = empty
    eager = with_gradients(lambda s, q: all_reads(s, q, H), sources, queries, weights)
    exact = [x.double() for x in sources], queries.double(), [w.double() for w in weights]
    truth = with_gradients(lambda s, q: all_reads(s, q, H), *exact)
    norms = [x.norm().clamp_min(1e-9) for x in truth]

    def errors(results):
        return [((a.double() - b).norm() / norm).item() for a, b, norm in zip(results, truth, norms)]
    same = all(torch.equal(a, b) for a, b in zip(got, again))
    allowed = [max(1e-5, 4 * e) if dtype == torch.float32 else 1.2 * e + 1e-4 for e in errors(eager)]
    if scale > 1 or N < 4:
        half_unit = torch.finfo(dtype).eps / 2      # as large as the rounding of a number can be
        allowed = [a + half_unit * float(m / norm) for a, m, norm in zip(allowed, rounding(*exact, H), norms)]
    return errors(got) if same else [float("inf")] * 3, allowed


# (N, H, K, tokens, scale of the queries)
CASES = {
    "all": [(N, *shape, (1, 30)[(i + j) % 2]) for i, N in enumerate((1, 2, 9, 10, 31, 32, 33, 49, 73))
            for j, shape in enumerate(((1, 48, 7), (2, 160, 33), (4, 24, 129), (8, 128, 65)))]
           + [(19, 16, 64, 17, 1), (19, 1, 1024, 17, 1), (19, 1, 1280, 17, 1)],
    "quick": [(33, 8, 128, 65, 30), (19, 2, 160, 33, 1)],
    "interpreter": [(1, 2, 16, 3, 1), (2, 1, 24, 2, 30), (9, 4, 20, 1, 1), (17, 2, 40, 3, 30), (10, 1, 400, 1, 1),
                    (10, 2, 160, 1, 30)],
    "interpreter, 16 bits": [(2, 1, 24, 2, 30), (18, 2, 24, 3, 1)],
}


def check(cases="all"):
    """Both routers against fp64: True if every case passes. Without a GPU: in the interpreter, tiny shapes."""
    gpu, good = torch.cuda.is_available(), True
    torch.backends.cuda.matmul.allow_tf32 = False
    for router in (SimpleRouter, DepthRouter):
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if gpu else (torch.float32, torch.float16):
            some = CASES[cases if gpu else "interpreter" if dtype == torch.float32 else "interpreter, 16 bits"]
            worst = 0.
            for case in some:
                error, allowed = check_case(router, *case, dtype, "cuda" if gpu else "cpu")
                worst = max(worst, *(e / a for e, a in zip(error, allowed)))
                if not all(e <= a for e, a in zip(error, allowed)):     # so written that NaN fails
                    good = False
                    print(f"FAIL {router.__name__} {case} {dtype}: errors {error}, allowed {allowed}")
            print(f"{router.__name__:12} {str(dtype):14} {len(some)} cases, two runs bit-identical, worst error "
                  f"{worst:.2f} of what is allowed", flush=True)
    return good


# The benchmark.

SEQUENCES = {"100m": 32, "350m": 32, "1b": 16}      # of a step
STEPS = 4               # between waits
ARMS = ("plain", "eager", "compiled eager", "fused_simple", "fused", "delta")


def new_router(arm, queries, H):
    """The router of an arm, from queries that hold the gains already."""
    if arm in OPERATORS:
        return OPERATORS[arm](queries, H)
    eager = EagerRouter(queries, torch.ones_like(queries), H, 1e-6)
    if arm == "compiled eager":     # one graph for any number of sources
        eager.route = lambda sources, *rest: compiled_route()(torch.stack(sources), *rest)
    return eager


@functools.cache
def compiled_route():
    return torch.compile(route, dynamic=True)


def rows_moved(arm, N, backward):
    """Rows, D numbers of 2 bytes a token, that the arm's scheme must read and write."""
    triangle = N * (N + 1) // 2
    if arm == "fused_simple":       # backward: sources, fp32 gradients read and written; dh, read, fp32 query gradient
        return triangle + 2 * N + (5 * triangle + 6 * N if backward else 0)
    size = min((N - 2) % S + 2, N)
    rows = 2 * size + size * (size - 1) // 2                            # the first group of sites: finish_fwd
    for first in range(size, N, S):                                     # source_norm, group_fwd, finish_fwd
        rows += 1 + (first + 1 + S) + (3 * (S - 1) + (S - 1) * (S - 2) // 2)
    if backward:
        newest = max(0, N - 2) // S * S
        size = N - newest
        rows += 4 * size + size * (size - 1) // 2 + N                   # the newest sources: finish_bwd; query_grad
        for first in range(0, newest, S):                               # site_dot, group_bwd, finish_bwd
            rows += 2 + (N - first + S + 1) + (5 * S - 2 + (S - 1) * (S - 2) // 2)
    return rows


def milliseconds(run):
    """Of one of STEPS runs that follow each other without a wait, as in training: the GPU has always work ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(STEPS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / STEPS


def medians(runs, rounds):
    """{arm: function} -> {arm: median ms, or why it failed}, one arm after the other, `rounds` times."""
    times = {arm: [] for arm in runs}
    for _ in range(rounds + 1):             # one round to warm up
        for arm, run in runs.items():
            if isinstance(times[arm], list):
                try:
                    times[arm].append(milliseconds(run))
                except Exception as error:      # stays in the table
                    print(f"{arm}: {error}", file=sys.stderr)
                    times[arm] = f"failed: {error}".splitlines()[0][:60]
                    if isinstance(error, torch.cuda.OutOfMemoryError):
                        times[arm] = "out of memory"
                    torch.cuda.empty_cache()
    return {arm: t if isinstance(t, str) else statistics.median(t[1:]) for arm, t in times.items()}


def copy_speed():
    """GB/s, read and written, of a device-to-device copy of 2 GiB."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / medians({"copy": lambda: target.copy_(source)}, 10)["copy"] / 1e6


def bench_routing(preset, arms, copy, rounds):
    """
    Routing alone: forward, and forward + backward, of all sites of one model. -> records. (The eager arms recompute
    each read in backward, as the model does, for lack of memory: one more forward.)
    """
    c = PRESETS[preset]
    N, D, H, tokens = c.n_site, c.n_embd, c.H, SEQUENCES[preset] * c.block_size
    sources = [torch.randn(1, tokens, D, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(N)]
    weights = [torch.randn_like(x) for x in sources]
    queries = (torch.randn(N, D, device="cuda") * .05).requires_grad_()

    def forward(arm, H):
        read = new_router(arm, queries, H)
        return [read(x) for x in sources]

    def inference(arm, H):
        with torch.no_grad():
            forward(arm, H)

    def training(arm, H):
        torch.autograd.grad(forward(arm, H), [*sources, queries], weights)
    runs = [(arm, H) for arm in arms if arm not in ("plain", "delta")] + [("fused", 1)] * ("fused" in arms)
    fwd, both = (medians({key: functools.partial(f, *key) for key in runs}, rounds) for f in (inference, training))
    records = []
    for arm, heads in runs:
        record = {"level": "routing", "preset": preset, "arm": arm, "H": heads, "tokens": tokens,
                  "forward_ms": fwd[arm, heads], "forward_backward_ms": both[arm, heads]}
        if arm in OPERATORS and not isinstance(both[arm, heads], str):
            rate = rows_moved(arm, N, True) * tokens * D * 2 / both[arm, heads] / 1e6
            record |= {"gb_per_s": rate, "of_copy": rate / copy}
        records.append(record)
    return records


def bench_step(preset, arms, rounds):
    """The whole training step, bf16 and compiled, of the model with H = KV (fused also with 1; delta: in delta form, 8
    groups), beside the plain one. -> records"""
    def prepare(arm, H):
        torch.manual_seed(0)
        config = replace(PRESETS[preset], H=H, delta_blocks=8 if arm == "delta" else 0)
        with torch.device("cuda"):
            model = Transformer(config)
        if arm not in ("plain", "delta"):
            model.new_router = lambda x: new_router(arm, model.queries * model.gains, H)
        model.compile_parts()
        optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-4, fused=True)
        shape = SEQUENCES[preset], config.block_size
        idx, targets = (torch.randint(config.vocab_size, shape, device="cuda") for _ in range(2))

        def step():
            before = torch.cuda.memory_allocated() - own
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(idx, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            peak[arm, H] = (torch.cuda.max_memory_allocated() - before) / 2**30
        own = 12 * sum(p.numel() for p in model.parameters())       # its weights and moments, other arms' not counted
        return step
    peak, count = {}, SEQUENCES[preset] * PRESETS[preset].block_size
    runs = [(arm, 0 if arm == "plain" else PRESETS[preset].H) for arm in arms] + [("fused", 1)] * ("fused" in arms)
    times = medians({run: prepare(*run) for run in runs}, rounds)
    plain = times.get(("plain", 0))
    return [{"level": "step", "preset": preset, "arm": arm, "H": H, "tokens": count, "ms": ms,
             "gib": peak.get((arm, H)), **({} if isinstance(ms, str) else {"tokens_per_s": count / ms * 1e3,
                "to_plain": plain / ms if isinstance(plain, float) else None})}
            for (arm, H), ms in times.items()]


def as_row(record):
    cells = [record["level"], record["preset"], record["arm"], f"H={record['H']}", f"{record['tokens']} tokens"]
    forms = {"forward_ms": "forward {:.2f} ms", "forward_backward_ms": "forward+backward {:.2f} ms", "ms": "{:.1f} ms",
             "gb_per_s": "{:.0f} GB/s", "of_copy": "{:.0%} of copy speed", "tokens_per_s": "{:,.0f} tok/s",
             "gib": "{:.1f} GiB", "to_plain": "{:.3f}x plain"}
    for key, form in forms.items():
        if record.get(key) is not None:
            cells.append(record[key] if isinstance(record[key], str) else form.format(record[key]))
    return " | ".join(cells)


def main():
    parser = argparse.ArgumentParser("kernel.py", description="correctness gate, then times on a GPU")
    parser.add_argument("--presets", default=",".join(SEQUENCES), help="shapes to time (default all three)")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {','.join(ARMS)} (default all)")
    parser.add_argument("--levels", default="routing,step", help="routing alone, the whole training step, or both")
    parser.add_argument("--rounds", type=int, default=5, help=f"a time is the median of so many, of {STEPS} runs each")
    parser.add_argument("--gate", choices=("all", "quick"), default="all", help="cases the gate runs")
    parser.add_argument("--json", help="write the records to this file as well")
    args = parser.parse_args()
    asked = {name: getattr(args, name).split(",") for name in ("presets", "arms", "levels")}
    for name, allowed in (("presets", SEQUENCES), ("arms", ARMS), ("levels", ("routing", "step"))):
        for value in asked[name]:
            if value not in allowed:
                parser.error(f"--{name}: {value!r} is not one of {', '.join(allowed)}")
    if not check(args.gate):
        sys.exit("the gate is red: nothing is timed")
    if not torch.cuda.is_available():
        print("the gate is green, in Triton's interpreter; without a GPU nothing is timed")
        return
    copy = copy_speed()
    driver = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True).stdout.strip()
    machine = {"gpu": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
               "triton": triton.__version__, "copy_gb_per_s": copy}
    print(machine)
    records = []
    for preset in asked["presets"]:
        for level in asked["levels"]:
            torch._dynamo.reset()   # or a graph is compiled for the last preset's shapes and this one's, and slower
            found = (bench_routing(preset, asked["arms"], copy, args.rounds) if level == "routing"
                     else bench_step(preset, asked["arms"], args.rounds))
            records += found
            print("\n".join(map(as_row, found)), flush=True)
            torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
