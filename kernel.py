"""
Fused depth routing: attention over the sources of one token, for every token, in Triton.

Site n of a routed network reads sources s_0 .. s_n (the embedding and the raw outputs of the
sublayers so far) in H heads. u_n (query * gain) is what `fold` in model.py returns, r_i = 1 / RMS:

    logit[i, h] = u_n[h] . s_i[h] * r_i        read_n[h] = sum_i softmax_i(logit[i, h]) s_i[h]

There is next to no arithmetic in it: a GPU spends its time moving rows (a row: the D numbers of one
source of one token). Site by site, as `route` in model.py does it, site n moves n + 1 rows: N^2 / 2
forward, and more than that backward. Here they move in groups of S sites (drawn with S = 4):

    sources   0 1 2 3 4 5 6 7 8    forward       0 1 2 3 4 5 6 7 8    backward
    site 0    f                                  f
         1    f f                                f f
         2    f f f                              f f f
         3    f f f f                            f f f f
         4    f f f f f                          G G G f f
         5    G G G G G G                        G G G G f f
         6    G G G G G G f                      G G G G f f f
         7    G G G G G G f f                    G G G G f f f f
         8    G G G G G G f f f                  G G G G f f f f f

Forward. In ordinary attention a query is computed from its token. Here all queries are known before
the first layer runs, so nobody has to wait for site n to start on read n. When source 5 has come,
group_fwd (G) lets sites 5 .. 8 take in sources 0 .. 5 *together*: each row is moved once for four
sites. Read 5 is done. Of the others it leaves partial reads and log-sum-exps, into which finish_fwd
(f) folds the sources born inside the group, one site at a time: exactly, as split-KV attention
merges its parts.

Backward, the mirror image. Sites run in strict reverse order, so when the gradient of source i is
asked for, the gradients dh_n of all reads that ever used it are known: it is *pulled*, whole, and
written once, not pushed piece by piece into an fp32 accumulator. group_bwd (G) takes S sources
under all later sites together, finish_bwd (f) adds the sites of the group, one source at a time,
and query_grad sums over the tokens. With p = exp(logit - lse), dl = p (dh_n . s_i - dh_n . read_n):

    d s_i = sum_n p dh_n + r_i sum_n dl u_n - (r_i^2 / D) (sum over heads and n of dl logit) s_i
    d u_n = sum over tokens and i of dl r_i s_i

A site costs about N / (2 S) rows for older sources and S / 2 for those of its group, either way.
In the code v is a source, dh the gradient of a read, rdl stands for r dl.

    python kernel.py [PRESET ...]       the tests of this file, then its times, alone and in a step
Without a GPU it runs the tests in Triton's interpreter, on tiny shapes, and times nothing.
"""
import os
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
    from triton.language import constexpr
    from triton.runtime.errors import OutOfResources
except ImportError as error:
    raise ImportError("kernel.py needs Triton (on Linux: pip install triton)") from error

from model import PRESETS, EagerRouter, Transformer, fold, route, site_parameters

# Tuned on one H200.
S = 8                   # sites (forward) or sources (backward) of a group
TILE = 16               # sources (forward) or sites (backward) that a group kernel takes at once
PARTS = 64              # partial sums of the query gradient, at most
INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
TOKENS = 2 if INTERPRET.value else 16       # that a program of a group kernel works through
pow2 = triton.next_power_of_2


# A row is a tuple of blocks, since Triton's have powers of two as sides, and 160 columns are none.

@triton.jit
def all_heads(H: constexpr, K: constexpr, HB: constexpr, W: constexpr):
    """A whole row, in blocks (HB, W) with a slice of every head: columns, and which are real. A
    block is what the threads of a warp load at once, so that a thread meets one head only."""
    h, w = tl.arange(0, HB)[:, None], tl.arange(0, W)[None, :]
    at, real = (), ()
    for i in tl.static_range((K + W - 1) // W):
        at += (h * K + i * W + w,)
        real += ((h < H) & (i * W + w < K),)
    return at, real


@triton.jit
def one_head(h, K: constexpr, C: constexpr, W: constexpr, W2: constexpr):
    """One head's slice of a row in C chunks, a warp each, of one or two blocks, (C, 1, W) and
    (C, 1, W2): columns, and which are real. 160 is 128 + 32, not 256 with holes."""
    CW: tl.constexpr = (K + C - 1) // C
    c, w = tl.arange(0, C)[:, None, None] * CW, tl.arange(0, W)[None, None, :]
    at, real = (h * K + c + w,), ((w < CW) & (c + w < K),)
    if W2:
        w = W + tl.arange(0, W2)[None, None, :]
        at, real = at + (h * K + c + w,), real + ((w < CW) & (c + w < K),)
    return at, real


@triton.jit
def load(pointer, at, real, live):
    row = ()
    for i in tl.static_range(len(at)):
        row += (tl.load(pointer + at[i], mask=real[i] & live, other=0.),)
    return row


@triton.jit
def store(pointer, at, real, live, row):
    for i in tl.static_range(len(at)):
        number = row[i].to(pointer.dtype.element_ty)
        tl.store(pointer + at[i], number, mask=real[i] & live)


@triton.jit
def scaled(row, a):
    out = ()
    for i in tl.static_range(len(row)):
        out += (row[i].to(tl.float32) * a,)
    return out


@triton.jit
def add(a, b):
    out = ()
    for i in tl.static_range(len(a)):
        out += (a[i] + b[i],)
    return out


@triton.jit
def inner(a, b):
    """Inner product of two rows of blocks (HB, W) for each head, (HB,), in fp32."""
    product = a[0].to(tl.float32) * b[0].to(tl.float32)
    for i in tl.static_range(1, len(a)):
        product += a[i].to(tl.float32) * b[i].to(tl.float32)
    return tl.sum(product, 1)


@triton.jit
def dot(a, b, acc):
    """Matrix product, batched over chunks, in full precision: fp32 must not become TF32."""
    if INTERPRET:       # its bfloat16 is a bit pattern that it cannot multiply
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def upright(rows):
    """Blocks (C, S, W) -> (C, W, S)."""
    out = ()
    for i in tl.static_range(len(rows)):
        out += (tl.trans(rows[i], 0, 2, 1),)
    return out


@triton.jit
def products(a, b):
    """Inner products of M rows (C, M, W) with S upright ones (C, W, S): (M, S)."""
    acc = None
    for i in tl.static_range(len(a)):
        acc = dot(a[i], b[i], acc)
    return tl.sum(acc, 0)


@triton.jit
def mix(acc, p, rows):
    """acc, blocks (C, S, W), + p (S, M) times M rows (C, M, W)."""
    out = ()
    for i in tl.static_range(len(rows)):
        weights = p.to(rows[i].dtype)[None]
        weights = tl.broadcast_to(weights, (rows[i].shape[0], p.shape[0], p.shape[1]))
        out += (dot(weights, rows[i], acc[i]),)
    return out


@triton.jit
def zeros(C: constexpr, S: constexpr, W: constexpr, W2: constexpr):
    row = (tl.zeros((C, S, W), tl.float32),)
    if W2:
        row += (tl.zeros((C, S, W2), tl.float32),)
    return row


@triton.jit
def address(table, i, like):
    """Sources and read gradients stay where autograd made them; a table holds their addresses, all
    multiples of 16 bytes. i: a number or a block of them. The pointer has the type of `like`."""
    return tl.multiple_of(tl.load(table + i).to(like.dtype), 16)


# Forward. BT, the number of tokens, has 64 bits, since N * BT * D passes 2^31. do_not_specialize:
# or Triton compiles again for n = 1, and for n divisible by 16.

@triton.jit
def softmax_step(m, l, acc, logit, v):
    """Online softmax, one more source. Per head: m the largest logit so far, l the sum of
    exp(logit - m), acc, a row, the sum of exp(logit - m) v. A finished softmax is such a state too:
    m its log-sum-exp, l = 1, acc its read."""
    top = tl.maximum(m, logit)
    old, new = tl.exp(m - top), tl.exp(logit - top)
    return top, l * old + new, add(scaled(acc, old[:, None]), scaled(v, new[:, None]))


@triton.jit(do_not_specialize=["n", "older", "BT"])
def finish_fwd(X, SRC, R, U, O, LSE, n, older, BT: tl.int64, eps, D: constexpr, H: constexpr,
               HB: constexpr, W: constexpr):
    """Finish read n of one token. O (BT, D) and row n of LSE (N, BT, H) hold it over the sources
    0 .. older-1 (nothing, if older = 0). Fold in the new source X (BT, D), and older .. n-1 through
    the table SRC. X's 1 / RMS goes to row n of R (N, BT), its address to SRC."""
    t, h = tl.program_id(0).to(tl.int64), tl.arange(0, HB)
    if t == 0:
        tl.store(SRC + n, X.to(tl.int64))
    at, real = all_heads(H, D // H, HB, W)
    live, begun = h < H, h < tl.where(older > 0, H, 0)
    out, stat = O + t * D, LSE + (n * BT + t) * H + h
    # All loads first: none waits for another, or for a store.
    x, u = load(X + t * D, at, real, live[:, None]), load(U + n * D, at, real, live[:, None])
    partial, lse = load(out, at, real, begun[:, None]), tl.load(stat, mask=begun, other=-1e30)
    r = tl.rsqrt(tl.sum(inner(x, x), 0) / D + eps)
    tl.store(R + n * BT + t, r)
    m, l, acc = softmax_step(lse, tl.full((HB,), 1., tl.float32), partial, inner(u, x) * r, x)
    for i in tl.range(older, n, num_stages=3):      # two rows ahead
        v = load(address(SRC, i, O) + t * D, at, real, live[:, None])
        m, l, acc = softmax_step(m, l, acc, inner(u, v) * tl.load(R + i * BT + t), v)
    store(out, at, real, live[:, None], scaled(acc, (1 / l)[:, None]))
    tl.store(stat, m + tl.log(l), mask=live)


@triton.jit(do_not_specialize=["sources", "first", "sites", "BT"])
def group_fwd(SRC, R, U, GATE, O, LSE, sources, first, sites, BT: tl.int64, D: constexpr,
              H: constexpr, S: constexpr, TILE: constexpr, TOKENS: constexpr, C: constexpr,
              W: constexpr, W2: constexpr):
    """Sites first .. first+sites-1 over sources 0 .. sources-1, for one head of TOKENS tokens: the
    (partial) reads, times their GATE (N,) if there is one, go to O (sites, BT, D), their lse to
    rows first .. of LSE (N, BT, H). One loop goes through (token, tile of sources), so that the
    next tile is on its way while this one is worked on, from one token to the next, too."""
    h, t0 = tl.program_id(0) % H, tl.program_id(0) // H * TOKENS
    j, e = tl.arange(0, S), tl.arange(0, TILE)
    at, real = one_head(h, D // H, C, W, W2)
    mine = (j < sites)[None, :, None]
    u = upright(load(U + ((first + j) * D)[None, :, None], at, real, mine))     # (C, W, S)
    m, l = tl.full((S,), -1e30, tl.float32), tl.zeros((S,), tl.float32)
    acc, tiles = zeros(C, S, W, W2), tl.cdiv(sources, TILE)
    for it in range(0, TOKENS * tiles):
        t, i = tl.minimum(t0 + it // tiles, BT - 1), it % tiles * TILE + e
        alive = i < sources
        v = load((address(SRC, i, O) + t * D)[None, :, None], at, real, alive[None, :, None])
        r = tl.load(R + i * BT + t, mask=alive, other=0.)
        logit = tl.where(alive[:, None], products(v, u) * r[:, None], -1e30)    # (TILE, S)
        top = tl.maximum(m, tl.max(logit, 0))
        old, p = tl.exp(m - top), tl.exp(logit - top[None, :])
        m, l = top, l * old + tl.sum(p, 0)
        acc = mix(scaled(acc, old[None, :, None]), tl.trans(p), v)              # (C, S, W)
        if it % tiles == tiles - 1:
            scale = 1 / l
            if GATE is not None:
                scale *= tl.load(GATE + first + j, mask=j < sites, other=0.)
            out = O + ((j * BT + t) * D)[None, :, None]
            store(out, at, real, mine, scaled(acc, scale[None, :, None]))
            tl.store(LSE + ((first + j) * BT + t) * H + h, m + tl.log(l), mask=j < sites)
            m, l = tl.full((S,), -1e30, tl.float32), tl.zeros((S,), tl.float32)
            acc = zeros(C, S, W, W2)


# Backward.

@triton.jit(do_not_specialize=["n", "BT"])
def site_dot(DO, O, GRAD, DHR, n, BT: tl.int64, D: constexpr, H: constexpr, HB: constexpr,
             W: constexpr):
    """A new read gradient DO (BT, D), of read O (BT, D), one token: its address goes to GRAD (N,),
    dh . read to row n of DHR (N, BT, H)."""
    t, h = tl.program_id(0).to(tl.int64), tl.arange(0, HB)
    if t == 0:
        tl.store(GRAD + n, DO.to(tl.int64))
    at, real = all_heads(H, D // H, HB, W)
    live = h < H
    dh, read = load(DO + t * D, at, real, live[:, None]), load(O + t * D, at, real, live[:, None])
    tl.store(DHR + (n * BT + t) * H + h, inner(dh, read), mask=live)


@triton.jit(do_not_specialize=["first", "count", "split", "stop", "BT"])
def group_bwd(SRC, R, U, GATE, GRAD, LSE, DHR, DX, DC, RDL, first, count, split, stop, BT: tl.int64,
              NP, D: constexpr, H: constexpr, ALL: constexpr, S: constexpr, TILE: constexpr,
              TOKENS: constexpr, C: constexpr, W: constexpr, W2: constexpr):
    """Sources first .. first+count-1 under sites split .. stop-1, which all read them, for one head
    of TOKENS tokens: sum p dh + r dl u goes to DX (count, BT, D), sum dl logit to DC (count, BT,
    H), r dl to RDL (count, BT, H, NP), where site split is column TILE. If these are ALL sources,
    they give DHR = dh . read (N, BT, H). With a GATE (N,), dh is the gradient of gate * read: p and
    dl get the gate, and DHR, summed, is the gate's gradient."""
    h, t0 = tl.program_id(0) % H, tl.program_id(0) // H * TOKENS
    a, e = tl.arange(0, S), tl.arange(0, TILE)
    at, real = one_head(h, D // H, C, W, W2)
    mine = (a < count)[None, :, None]
    i = first + tl.minimum(a, count - 1)
    src, every = address(SRC, i, DX), (a >= 0)[None, :, None]
    dv, dc = zeros(C, S, W, W2), tl.zeros((S,), tl.float32)
    tiles = tl.cdiv(stop - split, TILE)
    for it in range(0, TOKENS * tiles):
        t, n = tl.minimum(t0 + it // tiles, BT - 1), split + it % tiles * TILE + e
        alive = n < stop
        v = upright(load((src + t * D)[None, :, None], at, real, every))         # (C, W, S)
        r = tl.load(R + i * BT + t)
        dh = load((address(GRAD, n, DX) + t * D)[None, :, None], at, real, alive[None, :, None])
        u = load(U + (n * D)[None, :, None], at, real, alive[None, :, None])     # (C, TILE, W)
        stat = (n * BT + t) * H + h
        lse = tl.load(LSE + stat, mask=alive, other=1e30)                        # 1e30: weight 0
        logit = products(u, v) * r[None, :]                                      # (TILE, S)
        g = products(dh, v)                                                      # dh . v
        p = tl.exp(logit - lse[:, None])
        if ALL:
            dhr = tl.sum(tl.where(a[None, :] < count, p * g, 0.), 1)
            tl.store(DHR + stat, dhr, mask=alive)
        else:
            dhr = tl.load(DHR + stat, mask=alive, other=0.)
        if GATE is not None:
            p *= tl.load(GATE + n, mask=alive, other=0.)[:, None]
        dl = p * (g - dhr[:, None])
        dc += tl.sum(dl * logit, 0)
        rdl = tl.trans((dl * r[None, :]).to(RDL.dtype.element_ty))               # (S, TILE)
        to = RDL + ((a * BT + t) * H + h)[:, None] * NP + (n - split + TILE)[None, :]
        tl.store(to, rdl, mask=(a < count)[:, None])
        dv = mix(mix(dv, tl.trans(p), dh), rdl, u)                               # (C, S, W)
        if it % tiles == tiles - 1:
            store(DX + ((a * BT + t) * D)[None, :, None], at, real, mine, dv)
            tl.store(DC + (a * BT + t) * H + h, dc, mask=a < count)
            dv, dc = zeros(C, S, W, W2), tl.zeros((S,), tl.float32)


@triton.jit
def pull(dv, dc, v, r, u, dh, lse, dhr):
    """Add one site's part to the gradient dv of source v, and to dc, the sum of dl logit. -> both,
    and the site's r dl."""
    logit = inner(u, v) * r
    p = tl.exp(logit - lse)
    dl = p * (inner(dh, v) - dhr)
    dv = add(add(dv, scaled(dh, p[:, None])), scaled(u, (dl * r)[:, None]))
    return dv, dc + dl * logit, dl * r


@triton.jit(do_not_specialize=["n", "first", "split", "stop", "BT"])
def finish_bwd(DO, O, SRC, R, U, GRAD, LSE, DHR, DX, DC, RDL, n, first, split, stop, BT, NP,
               D: constexpr, H: constexpr, HB: constexpr, W: constexpr, TILE: constexpr):
    """Finish the gradient of source n, of the group that begins with `first`, for one token. Row
    n - first of DX and DC has what the sites split .. stop-1 make of it (nothing, if split = stop).
    Add the sites n .. split-1, then the way through the RMS. If there are any, DO (BT, D), the
    gradient of read n, O (BT, D), has just come: it goes to GRAD, dh . read to row n of DHR."""
    BT = tl.cast(BT, tl.int64)      # as an argument of 64 bits it makes this kernel slower
    t, h, c = tl.program_id(0).to(tl.int64), tl.arange(0, HB), tl.arange(0, TILE)[None, :]
    at, real = all_heads(H, D // H, HB, W)
    live, now, begun = h < H, h < tl.where(n < split, H, 0), h < tl.where(split < stop, H, 0)
    here, row = n * BT + t, (n - first) * BT + t
    # All loads first: none waits for another, or for a store.
    v = load(address(SRC, n, O) + t * D, at, real, live[:, None])
    partial = load(DX + row * D, at, real, begun[:, None])
    dh, read = load(DO + t * D, at, real, now[:, None]), load(O + t * D, at, real, now[:, None])
    u = load(U + n * D, at, real, now[:, None])
    r, dc = tl.load(R + here), tl.load(DC + row * H + h, mask=begun, other=0.)
    lse = tl.load(LSE + here * H + h, mask=now, other=1e30)     # 1e30: weight 0
    dhr = inner(dh, read)
    tl.store(DHR + here * H + h, dhr, mask=now)
    if (t == 0) & (n < split):
        tl.store(GRAD + n, DO.to(tl.int64))
    dv, dc, x = pull(scaled(partial, 1.), dc, v, r, u, dh, lse, dhr)
    rdl = tl.where(c == n - split + TILE, x[:, None], 0.).to(RDL.dtype.element_ty)
    for q in range(n + 1, split):
        stat = (q * BT + t) * H + h
        dh = load(address(GRAD, q, O) + t * D, at, real, live[:, None])
        u = load(U + q * D, at, real, live[:, None])
        lse = tl.load(LSE + stat, mask=live, other=0.)
        dhr = tl.load(DHR + stat, mask=live, other=0.)
        dv, dc, x = pull(dv, dc, v, r, u, dh, lse, dhr)
        rdl = tl.where(c == q - split + TILE, x[:, None].to(rdl.dtype), rdl)
    tl.store(RDL + (row * H + h)[:, None] * NP + c, rdl, mask=live[:, None])
    through_rms = r * r / D * tl.sum(tl.where(live, dc, 0.), 0)     # which all heads share
    store(DX + row * D, at, real, live[:, None], add(dv, scaled(v, -through_rms)))


@triton.jit(do_not_specialize=["first", "count", "split", "stop", "BT"])
def query_grad(SRC, RDL, DU, first, count, split, stop, N, BT: tl.int64, NP, D: constexpr,
               H: constexpr, TILE: constexpr, SITES: constexpr, TB: constexpr, C: constexpr,
               W: constexpr):
    """Add the sum over tokens of (r dl)^T s_i, for the sources first .. first+count-1, to DU
    (parts, N, D). Program (part, chunk of a head, block of sites) owns its slice of DU and takes
    every parts-th block of TB tokens, so that the sum has one order, without atomics."""
    K: tl.constexpr = D // H
    CW: tl.constexpr = (K + C - 1) // C
    part, parts = tl.program_id(0), tl.num_programs(0)
    h, k = tl.program_id(1) // C, tl.program_id(1) % C * CW
    w, c = tl.arange(0, W), tl.program_id(2) * SITES + tl.arange(0, SITES)
    inside = ((w < CW) & (k + w < K))[None, :]
    at, site = h * K + k + w, split - TILE + c
    acc = tl.zeros((SITES, W), tl.float32)
    for t0 in range(part * TB, BT, parts * TB):
        t = t0 + tl.arange(0, TB)
        live = (t < BT)[:, None]
        for a in range(count):
            v = address(SRC, first + a, RDL) + t[:, None] * D + at[None, :]
            v = tl.load(v, mask=live & inside, other=0.)
            # A mask that changes at a multiple of 16 only keeps the load wide.
            rdl = RDL + ((a * BT + t) * H + h)[:, None] * NP + c[None, :]
            rdl = tl.load(rdl, mask=live & (c < NP)[None, :])
            rdl = tl.where(live & (site < stop)[None, :], rdl, 0.).to(v.dtype)
            acc = dot(tl.trans(rdl), v, acc)
    out = DU + (part * N + site[:, None]) * D + at[None, :]
    mask = ((site >= 0) & (site < stop))[:, None] & inside
    tl.store(out, acc + tl.load(out, mask=mask, other=0.), mask=mask)


# One pass through the network: its buffers and its launches.

def check(queries, H, sources):
    """ValueError for what the kernels do not take."""
    first, D = sources[0], queries.size(-1)
    def require(ok, problem):
        if not ok:
            raise ValueError(f"depth routing: {problem}")
    require(H > 0 and queries.dim() == 2 and D % H == 0, f"queries must be (N, D) with D a "
            f"multiple of H > 0, not {tuple(queries.shape)} with H = {H}")
    require(len({kind(x) for x in sources}) == 1, "sources must have one shape, dtype and device")
    require(first.size(-1) == D and first.device == queries.device, f"sources are {first.size(-1)} "
            f"wide on {first.device}, queries {D} on {queries.device}")
    require(first.dtype in (torch.float32, torch.bfloat16, torch.float16),
            f"sources of {first.dtype}, must be float32, bfloat16 or float16")
    require(not first.is_cuda or first.device.index == torch.cuda.current_device(),
            f"Triton launches on the current device, and that is not {first.device}")


def kind(source):
    return source.shape, source.dtype, source.device, torch.is_grad_enabled()


def aligned(x):
    """As the kernels take it on trust: rows one after the other, from a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class Tape:
    """What one forward and backward pass keeps; nothing of autograd's graph, or it would stay."""

    def __init__(self, queries, H, eps, source, n_source, group):
        N, D = queries.shape
        self.N, self.H, self.D, self.S, self.eps = N, H, D, group, eps
        self.BT, self.shape, self.dtype = source.numel() // D, source.shape, source.dtype
        self.kind = kind(source)
        device = source.device
        self.new = lambda *n, dtype=torch.float32: torch.empty(*n, device=device, dtype=dtype)
        # The queries as they are now, rounded to the sources' dtype, as autocast does with weights.
        self.U = queries.detach().to(source.dtype, copy=True).contiguous()
        self.U32 = self.U.float()
        # Addresses; the last tile looks beyond the end. The lists keep them valid.
        self.SRC, self.GRAD = (self.new(n + TILE, dtype=torch.int64) for n in (n_source, N))
        self.sources, self.grads = [], []
        self.R, self.LSE = self.new(n_source, self.BT), self.new(N, self.BT, H)
        self.due = None         # the site whose gradient comes next
        K, HB = D // H, pow2(H)
        self.row = dict(D=D, H=H, HB=HB, W=min(pow2(K), max(1, 256 // HB)))
        C = pow2(triton.cdiv(K, 192))
        W = max(16, pow2(triton.cdiv(K, C)))
        W2 = max(16, pow2(triton.cdiv(K, C) - W // 2))      # W = W / 2 + W2, if that is less
        widths = dict(W=W // 2, W2=W2) if W // 2 + W2 < W else dict(W=W, W2=0)
        self.head = dict(D=D, H=H, S=max(8, pow2(group)), TILE=TILE, TOKENS=TOKENS, C=C, **widths)

    def note(self, i, x):
        """Source i, for the group kernels: its address, and 1 / RMS of its rows."""
        self.SRC[i].fill_(x.data_ptr())
        norm = torch.linalg.vector_norm(x.view(self.BT, self.D), dim=1, dtype=torch.float32)
        self.R[i] = (norm.square() / self.D + self.eps).rsqrt()

    def launch(self, kernel, stages, *args, **constants):
        """A group kernel: with what is fastest on an H200, or less shared memory."""
        for num_stages in (stages, 1):
            try:
                return kernel[(triton.cdiv(self.BT, TOKENS) * self.H,)](
                    *args, **self.head, **constants, num_stages=num_stages,
                    num_warps=self.head["C"])
            except OutOfResources as error:
                refused = error
        raise RuntimeError(f"depth routing: H = {self.H} at width {self.D} does not fit this GPU "
                           f"({refused}); the router 'eager' does") from refused

    def group_fwd(self, O, sources, first, sites, gates=None):
        self.launch(group_fwd, 2, self.SRC, self.R, self.U, gates, O, self.LSE, sources, first,
                    sites, self.BT)

    def begin_backward(self, stop):
        """Of sites 0 .. stop-1, those that were used."""
        self.stop, self.NP = stop, (triton.cdiv(stop, TILE) + 1) * TILE     # NP: columns of RDL
        self.DHR, self.DC = (self.new(n, self.BT, self.H) for n in (stop, self.S + 1))
        self.RDL = self.new(self.S + 1, self.BT, self.H, self.NP, dtype=self.dtype)
        parts = min(PARTS, triton.cdiv(self.BT, 64))
        self.DU = torch.zeros(parts, self.N, self.D, device=self.U.device)

    def gradient(self, do):
        """Of a read, as the kernels take it; None, of a read that was not used, is zero."""
        if do is None:
            do = self.new(self.BT, self.D, dtype=self.dtype).zero_()
        self.grads.append(aligned(do.to(self.dtype)))
        return self.grads[-1]

    def group_bwd(self, first, split, gates=None, all_sources=False):
        self.launch(group_bwd, 3, self.SRC, self.R, self.U, gates, self.GRAD, self.LSE, self.DHR,
                    self.DX, self.DC, self.RDL, first, len(self.DX), split, self.stop, self.BT,
                    self.NP, ALL=all_sources)

    def finish_bwd(self, do, read, n, first, split):
        finish_bwd[(self.BT,)](do, read, self.SRC, self.R, self.U32, self.GRAD, self.LSE, self.DHR,
                               self.DX, self.DC, self.RDL, n, first, split, self.stop, self.BT,
                               self.NP, TILE=TILE, **self.row, num_warps=min(2, self.row["HB"]))

    def query_grad(self, first, split):
        K, columns = self.D // self.H, TILE + self.stop - split
        C = triton.cdiv(K, 128)                 # chunks of a head
        sites = 64 if columns <= 64 else 128    # a program; two of 64 would both read the sources
        query_grad[(len(self.DU), self.H * C, triton.cdiv(columns, sites))](
            self.SRC, self.RDL, self.DU, first, len(self.DX), split, self.stop, self.N, self.BT,
            self.NP, self.D, self.H, TILE=TILE, SITES=sites, TB=64, C=C,
            W=max(16, pow2(triton.cdiv(K, C))), num_warps=4)

    def read(self, x):
        """The next source, n, has come -> read n."""
        n = len(self.sources)
        self.sources.append(x)
        first = (n - 1) // self.S * self.S + 1 if n > self.S else 0     # 0 .. S, S+1 .. 2S, ...
        if n == first:
            sites = min(self.S + (first == 0), self.N - first)
            self.O = self.new(sites, self.BT, self.D, dtype=self.dtype)
        read = self.O[n - first]
        if n == first > 0:                      # read n whole, and those of its group in part
            self.note(n, x)
            self.group_fwd(read, n + 1, n, sites)
        else:
            finish_fwd[(self.BT,)](x, self.SRC, self.R, self.U32, read, self.LSE, n,
                                   first + (first > 0), self.BT, self.eps, **self.row, num_warps=1)
        return read

    def pull(self, n, do, read):
        """The gradient of read n has come -> the gradient of source n."""
        if self.due is None:
            self.begin_backward(n + 1)
        elif n != self.due:
            raise RuntimeError("depth routing: its buffers are freed as the backward pass runs, so "
                               "a second one through the same reads is not possible")
        self.due, do = n - 1, self.gradient(do)
        # Groups 0 .. S-1, S .. 2S-1, ...; the newest, which no later site reads, has 2 .. S+1.
        first = max(0, min(n, self.stop - 2)) // self.S * self.S
        last = self.stop - 1 if first + self.S >= self.stop - 1 else first + self.S - 1
        split = self.stop if last == self.stop - 1 else last    # sites from here on come together
        if n == last:
            self.DX = self.new(last + 1 - first, self.BT, self.D, dtype=self.dtype)
            if split < self.stop:
                site_dot[(self.BT,)](do, read, self.GRAD, self.DHR, n, self.BT, **self.row,
                                     num_warps=1)
                self.group_bwd(first, split)
        self.finish_bwd(do, read, n, first, split)
        dx = self.DX[n - first]
        if n == first:
            self.query_grad(first, split)
            self.DX = None
        return dx

    def clear(self):
        vars(self).update({name: None for name in vars(self)}, due=-1)


# The operators, as autograd and model.py see them.

def once():
    if torch.is_grad_enabled():             # a backward pass with create_graph=True
        raise RuntimeError("depth routing: no second derivatives; the router 'eager' has them")


class Read(torch.autograd.Function):
    """One site. `queries` is an input for their gradient, which site 0 returns. `chain`, an empty
    tensor, ties site n to site n-1: autograd then runs all sites backward in strict reverse order,
    whatever the network does with the reads."""

    @staticmethod
    def forward(ctx, source, queries, chain, tape):
        ctx.tape, ctx.n = tape, len(tape.sources)
        read = tape.read(aligned(source.detach())).view(source.shape)
        ctx.save_for_backward(source, read)
        ctx.set_materialize_grads(False)
        return read, chain.new_empty(0)

    @staticmethod
    def backward(ctx, do, _):
        once()
        tape, du = ctx.tape, None
        _, read = ctx.saved_tensors             # autograd looks whether they were changed in place
        dx = tape.pull(ctx.n, do, read).view(read.shape)
        if ctx.n == 0:
            du = tape.DU.sum(0)
            tape.clear()
        return dx, du, dx.new_empty(0), None


class DepthRouter:
    """
    router(source) -> read. Call n appends source s_n (..., D) and returns read n, the mix of
    s_0 .. s_n in each head. queries (N, D): u of each site, used in the sources' dtype; H divides
    D. Under autocast a source is first cast. group=1 goes site by site.

    Differentiable in sources and queries, once. A router serves one forward and one backward pass,
    and nothing big outlives that. ValueError for a first source that does not fit; RuntimeError
    after N reads, for a source unlike the first or after the backward pass has begun, for a second
    backward pass, and, as everywhere in PyTorch, for a source or read that was changed in place.
    """

    def __init__(self, queries, H, eps=1e-6, group=S):
        self.queries, self.H, self.eps, self.group, self.tape = queries, H, eps, group, None

    def __call__(self, source):
        device = source.device.type
        if torch.is_autocast_enabled(device):
            source = source.to(torch.get_autocast_dtype(device))
        if self.tape is None:
            check(self.queries, self.H, [source])
            self.tape = Tape(self.queries, self.H, self.eps, source, len(self.queries), self.group)
            self.chain = source.new_empty(0)
        tape, N = self.tape, len(self.queries)
        if tape.due is not None or len(tape.sources) == N or kind(source) != tape.kind:
            raise RuntimeError(f"depth routing: no read of a source {tuple(source.shape)} "
                               f"{source.dtype} on {source.device}: a router takes N = {N} sources "
                               f"like the first, with or without gradients, before its backward")
        read, self.chain = Read.apply(source, self.queries, self.chain, tape)
        if len(tape.sources) == N:
            self.chain = None       # or the router would hold the whole graph
        return read


class GroupRead(torch.autograd.Function):
    """The delta form: the sites of a group of layers read the same sources, which exist before the
    group runs. No triangle: the group kernels do it all, backward with all sources as one group."""

    @staticmethod
    def forward(ctx, queries, gates, H, eps, *sources):
        tape = ctx.tape = Tape(queries, H, eps, sources[0], len(sources), len(sources))
        for i, x in enumerate(sources):
            tape.note(i, x)
        tape.gates = gates.detach().float().clone()
        O, S = tape.new(tape.N, tape.BT, tape.D, dtype=tape.dtype), tape.head["S"]
        for n in range(0, tape.N, S):
            tape.group_fwd(O[n], len(sources), n, min(S, tape.N - n), tape.gates)
        ctx.save_for_backward(*sources)
        ctx.set_materialize_grads(False)
        return tuple(read.view(tape.shape) for read in O)

    @staticmethod
    def backward(ctx, *grads):
        once()
        tape, tape.sources = ctx.tape, [aligned(x) for x in ctx.saved_tensors]
        for i, x in enumerate(tape.sources):
            tape.SRC[i].fill_(x.data_ptr())     # a hook may have put it elsewhere
        tape.begin_backward(tape.N)
        for n, do in enumerate(grads):
            tape.GRAD[n].fill_(tape.gradient(do).data_ptr())
        M = len(tape.sources)
        tape.DX = tape.new(M, tape.BT, tape.D, dtype=tape.dtype)
        tape.group_bwd(0, 0, tape.gates, all_sources=True)
        for i in range(M):
            tape.finish_bwd(tape.DX, tape.DX, i, 0, 0)      # just the way through the RMS
        tape.query_grad(0, 0)
        dx, du, dgates = tape.DX, tape.DU.sum(0), tape.DHR.sum((1, 2))
        tape.sources, tape.grads = [], []
        tape.DHR = tape.DC = tape.RDL = tape.DU = tape.DX = None    # a held loss holds the tape
        return du, dgates, None, None, *(x.view(tape.shape) for x in dx)


def group_reads(sources, queries, gates, H, eps=1e-6):
    """
    What N sites that read the same sources read of them, times the sites' gates. sources: 1 to 64
    tensors (..., D) of one shape, dtype and device; queries (N, D), u of each site; gates (N,)
    -> N tensors (..., D). Differentiable in all three, once. ValueError for anything else.
    """
    if not 1 <= len(sources) <= 64:
        raise ValueError(f"depth routing: {len(sources)} sources, must be 1 to 64")
    check(queries, H, sources)
    if gates.shape != queries.shape[:1] or gates.device != queries.device:
        raise ValueError(f"depth routing: gates must be ({len(queries)},), one a query and beside "
                         f"them, not {tuple(gates.shape)}")
    return GroupRead.apply(queries, gates, H, eps, *map(aligned, sources))


# The benchmark.

SEQUENCES = {"100m": 32, "350m": 32, "1b": 16}      # of a step


def milliseconds(arms, rounds=5, runs=4):
    """{arm: function} -> {arm: median ms}. Arms take turns. The runs of a turn follow each other
    without a wait, as in training: the GPU always has work ahead."""
    times = {arm: [] for arm in arms}
    for _ in range(rounds + 1):             # the first to warm up
        for arm, run in arms.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(runs):
                run()
            end.record()
            torch.cuda.synchronize()
            times[arm].append(begin.elapsed_time(end) / runs)
    return {arm: statistics.median(t[1:]) for arm, t in times.items()}


def rows_moved(N, S=S):
    """Rows a token that forward and backward must read and write, where N = k S + 1."""
    rows = N + (S + 1) * (S + 6)    # query_grad; finish_fwd and finish_bwd of the largest groups
    for n in range(S + 1, N, S):    # n sources before a group forward, n sites after one backward
        rows += 1 + (n + 1 + S) + 3 * (S - 1) + (S - 1) * (S - 2) // 2      # RMS, group, finish
        rows += 2 + (2 * S + n + 1) + 4 * S - 1 + S * (S - 1) // 2          # dot, group, finish
    return rows


def routing_arms(preset):
    """Forward and backward of all the sites of one model, alone."""
    with torch.device("cuda"):
        model = Transformer(replace(PRESETS[preset], query_init_std=.05))
    c, queries = model.config, fold(*site_parameters(model)).detach().requires_grad_()
    shape = SEQUENCES[preset], c.block_size, c.n_embd
    sources = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in queries]
    compiled = torch.compile(route, dynamic=True)       # one graph for any number of sources

    def run(router, learned=queries):
        torch.autograd.grad([router(x) for x in sources], [*sources, learned], sources)

    def eager():
        router = EagerRouter(site_parameters(model), c.H, c.norm_eps)
        router.route = lambda sources, *site: compiled(torch.stack(sources), *site)
        run(router, model.queries)
    return {"compiled eager": eager,
            "site by site": lambda: run(DepthRouter(queries, c.H, group=1)),
            "fused": lambda: run(DepthRouter(queries, c.H)),
            "fused, H = 1": lambda: run(DepthRouter(queries, 1))}


def training_step(preset, **changes):
    """A function that makes one whole step, bf16 and compiled -> peak memory in GiB."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(replace(PRESETS[preset], **changes))
    model.compile_parts()
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-4, fused=True)
    shape, vocab_size = (SEQUENCES[preset], model.config.block_size), model.config.vocab_size
    idx, targets = (torch.randint(vocab_size, shape, device="cuda") for _ in range(2))
    own = 12 * sum(p.numel() for p in model.parameters())       # weights and moments, of this arm

    def step():
        before = torch.cuda.memory_allocated() - own
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(idx, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    return step


def main():
    presets = sys.argv[1:] or list(SEQUENCES)
    if not set(presets) <= SEQUENCES.keys():
        sys.exit(f"kernel.py: {' '.join(presets)}: must be of {', '.join(SEQUENCES)}")
    tests = [sys.executable, "-m", "pytest", "-q", Path(__file__).with_name("test_mhar.py")]
    if subprocess.run([*tests, "-k", "fused or group_reads"]).returncode:
        sys.exit("the tests are red: nothing is timed")
    if not torch.cuda.is_available():
        sys.exit("the tests are green, in Triton's interpreter; without a GPU nothing is timed")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    for preset in presets:
        for arm, ms in milliseconds(routing_arms(preset)).items():
            print(f"{preset:5} routing {arm:15} {ms:7.2f} ms", flush=True)
        torch._dynamo.reset()   # or graphs are compiled for several presets' shapes, and slower
        steps = {"plain": dict(H=0), "fused": {}, "fused, H = 1": dict(H=1),
                 "delta": dict(delta_blocks=8)}
        steps = {arm: training_step(preset, **changes) for arm, changes in steps.items()}
        times, tokens = milliseconds(steps), SEQUENCES[preset] * PRESETS[preset].block_size
        for arm, ms in times.items():
            print(f"{preset:5} step    {arm:15} {ms:7.1f} ms, {tokens / ms * 1e3:,.0f} tokens/s, "
                  f"{times['plain'] / ms:.3f}x plain, {steps[arm]():.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
