"""
Look at trained models. RUN is what train.py wrote: a folder with ckpt.pt and log.jsonl.

    python eval.py val RUN                          validation loss, nats per token and bits per byte
    python eval.py sample RUN --prompt "def main("  text, continued from the prompt
    python eval.py compare RUN RUN ...              a table, each delta to the first RUN with its paired standard error;
                                                    a RUN that it has seen may later lack its ckpt.pt
    python eval.py probe RUN                        what the routing reads: numbers in RUN/probe.json, maps in probe.png
    python eval.py tasks RUN --tasks hellaswag,...  downstream tasks, item by item in RUN/tasks; --task-file: from files
    python eval.py ceg RUN RUN ...                  compute-equivalent gain: what the gain is worth in training compute

Every evaluation reads the same validation windows, so that two models of one block_size can be compared window by
window: most of what makes a window hard is common to both and cancels in the difference.
"""
import argparse
import hashlib
import itertools
import json
import math
import re
import statistics
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import data
from model import ConfigError, EagerRouter, Transformer, at_least_fp32, config_of, route_weights, site_parameters


class EvalError(ValueError):
    """Runs that cannot be read or compared; the message says why."""


def read_checkpoint(run):
    """RUN -> the dictionary that train.py saved, on the CPU."""
    path = Path(run, 'ckpt.pt')
    if not path.exists():
        why = ("compare and ceg do without where RUN has a val.json, nothing else does"
               if Path(run, 'log.jsonl').exists() else "a run is a folder that train.py wrote")
        raise EvalError(f"there is no {path}; {why}")
    try:
        # Mapped, not read: all processes of a machine share it, and what nobody looks at never leaves the disk.
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except Exception as error:      # torch's own are of many types
        what = str(error) if zipfile.is_zipfile(path) else "torch.save wrote no such file"
        raise EvalError(f"{path} cannot be read: {what}") from error
    needed = {'step', 'tokens', 'model', 'model_config', 'flags', 'tokenizer', 'batch_hash'}
    if not isinstance(checkpoint, dict) or not needed <= checkpoint.keys():
        raise EvalError(f"{path} is no checkpoint of train.py, which holds {', '.join(sorted(needed))}")
    try:
        config_of(checkpoint)
    except TypeError as error:      # another version's
        raise EvalError(f"{path} does not fit this model.py: {error}") from error
    return checkpoint


def load_run(run, device, ema=False):
    """RUN -> (model in eval mode, the checkpoint's dictionary). ema: with the average of the weights."""
    checkpoint = read_checkpoint(run)
    if ema and not checkpoint.get('ema'):
        raise EvalError(f"--ema: {run} holds no average of the weights; train.py --ema=0.999 keeps one")
    try:
        return Transformer.from_checkpoint(checkpoint, device, 'ema' if ema else 'model').eval(), checkpoint
    except RuntimeError as error:       # tensors that do not fit the Config
        raise EvalError(f"{run}/ckpt.pt does not fit this model.py: {error}") from error


def check_tokenizer(checkpoint, folder):
    """A model only means something on tokens of the tokenizer it was trained with: DataError if folder has others."""
    meta, vocab_size = data.read_meta(folder), checkpoint['model_config']['vocab_size']
    if meta['tokenizer'] != checkpoint['tokenizer'] or meta['vocab_size'] > vocab_size:     # some have rows to spare
        raise data.DataError(f"{folder} holds tokens of {meta['tokenizer']} ({meta['vocab_size']} of them), but the "
                             f"checkpoint was trained on {checkpoint['tokenizer']} ({vocab_size})")


def read_log(run):
    """RUN -> the records of its log.jsonl, a list of dictionaries."""
    path = Path(run, 'log.jsonl')
    if not path.exists():
        raise EvalError(f"{run}: there is no {path}; a run is a folder that train.py wrote")
    records, lines = [], path.read_text(encoding='utf-8', errors='replace').splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record['step'], record['kind']
            records.append(record)
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise EvalError(f"{path} line {number} is damaged: repair it or remove it")
            break       # the process died while it wrote the last line
    return records


def uses_bf16(device, dtype):
    """dtype is the flag of train.py: 'auto' is bf16 on GPUs that have it."""
    return dtype == 'bf16' or (dtype == 'auto' and device.type == 'cuda'
                               and torch.cuda.is_bf16_supported(including_emulation=False))


def autocast(device, dtype):
    """The precision a run was trained in, for training and evaluating alike."""
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(device, dtype))


@torch.no_grad()
def window_losses(model, windows, indices, batch_size, device):
    """Mean loss of each of these windows, in nats per token -> (len(indices),), fp32 on the CPU."""
    losses = [torch.empty(0)]
    for start in range(0, len(indices), batch_size):
        tokens = torch.stack([torch.from_numpy(windows[i]) for i in indices[start:start + batch_size]]).to(device)
        losses.append(model(tokens[:, :-1], tokens[:, 1:], reduction='none').mean(1).cpu())
    return torch.cat(losses)


def bytes_per_token(windows, indices, tokenizer):
    """
    Mean bytes of text a target of these windows stands for. Nats per token / ln 2 / bytes per token are bits per byte,
    which no longer depend on the tokenizer.
    """
    size = data.token_bytes(tokenizer, tokenizer.n_vocab).numpy()      # (V,)
    return sum(int(size[windows[i][1:]].sum()) for i in indices) / (len(indices) * windows.block_size)


def decode(tokenizer, tokens):
    text = b''
    for token in tokens:
        try:
            text += tokenizer.decode_single_token_bytes(token)
        except KeyError:        # some vocabularies have gaps, and a young model samples them too
            text += '\ufffd'.encode()
    return text.decode('utf-8', errors='replace')


def sample_text(model, tokenizer, prompt, max_new_tokens, temperature=0.8, top_k=50, seed=0):
    """
    The prompt and its continuation, as text; an empty prompt starts a new document. The global random state is left
    as it was.
    """
    device = model.wte.weight.device
    tokens = [tokenizer.eot_token] + tokenizer.encode_ordinary(prompt)
    with torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []):
        torch.manual_seed(seed)
        out = model.generate(torch.tensor([tokens], device=device), max_new_tokens, temperature, top_k)
    return decode(tokenizer, out[0, 1:].tolist())


# Commands.

def folder_of(checkpoint, args):
    """The dataset to use: --data, or what the run was trained on."""
    return args.data or checkpoint['flags']['data']


def validation_windows(model, checkpoint, args):
    """-> (the windows of the model's validation split, the indices of those to read), after checking the tokenizer."""
    folder = folder_of(checkpoint, args)
    check_tokenizer(checkpoint, folder)
    windows = data.Windows(folder, 'val', model.config.block_size)
    return windows, data.fixed_windows(windows, args.windows)


def import_pyplot():
    """matplotlib.pyplot, drawing to files only; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use('Agg')
    import matplotlib.pyplot
    return matplotlib.pyplot


def run_losses(run, args, device):
    """RUN -> (its model, checkpoint, validation windows, their indices, their losses)."""
    model, checkpoint = load_run(run, device, args.ema)
    windows, indices = validation_windows(model, checkpoint, args)
    with autocast(device, checkpoint['flags']['dtype']):
        losses = window_losses(model, windows, indices, args.batch, device)
    return model, checkpoint, windows, indices, losses


def standard_error(values):
    return values.std(correction=1).item() / math.sqrt(len(values)) if len(values) > 1 else math.nan


def val(args, device):
    for run in args.runs:
        model, checkpoint, windows, indices, losses = run_losses(run, args, device)
        nats = losses.double().mean().item()
        error = f" +- {standard_error(losses):.4f}" if len(losses) > 1 else ''
        line = f"{run}: step {checkpoint['step']:,}, val loss {nats:.4f}{error} nats per token"
        try:
            tokenizer = data.get_tokenizer(checkpoint['tokenizer'], folder_of(checkpoint, args))
            line += f", {nats / math.log(2) / bytes_per_token(windows, indices, tokenizer):.4f} bits per byte"
        except data.DataError as error:
            line += f" (no bits per byte: {error})"
        print(f"{line}, {len(indices)} windows of {windows.block_size} tokens")


def sample(args, device):
    model, checkpoint = load_run(args.run, device, args.ema)
    tokenizer = data.get_tokenizer(checkpoint['tokenizer'], folder_of(checkpoint, args))
    prompt_tokens, block_size = 1 + len(tokenizer.encode_ordinary(args.prompt)), model.config.block_size
    if prompt_tokens > block_size:
        raise EvalError(f"--prompt has {prompt_tokens} tokens, more than the model's block_size = {block_size}")
    with autocast(device, checkpoint['flags']['dtype']):
        text = sample_text(model, tokenizer, args.prompt, args.tokens, args.temperature, args.top_k, args.seed)
    print(text)
    if prompt_tokens + args.tokens > block_size:
        print(f"(stopped at block_size = {block_size} tokens)", file=sys.stderr)


def compared(run, args, device):
    """
    What compare and ceg have to know of RUN: a dictionary with its losses, a list. It stays in RUN/val.json (with
    --ema, in val-ema.json), and is read from there where RUN has no checkpoint: a published run is its logs alone.
    """
    path = Path(run, 'val-ema.json' if args.ema else 'val.json')
    known = ('step', 'tokens', 'batch_hash', 'tokenizer')
    if path.exists() and not Path(run, 'ckpt.pt').exists():
        try:
            saved = json.loads(path.read_text())
            record = {key: saved[key] for key in ('H', 'params', 'flops_per_token', *known, 'data', 'windows',
                                                  'block_size', 'losses')}
            torch.tensor(record['losses']).mean()       # numbers, all of them
        except (ValueError, LookupError, TypeError) as error:
            raise EvalError(f"{path} is damaged, and {run} has no checkpoint to make it from") from error
        if args.windows != record['windows'] or args.data not in (None, record['data']):
            raise EvalError(f"{run} has no checkpoint: its losses are those of --windows={record['windows']} "
                            f"--data={record['data']}")
        return record
    model, checkpoint, windows, indices, losses = run_losses(run, args, device)
    record = {'H': model.config.H, 'params': sum(model.count_parameters()), 'flops_per_token': model.flops_per_token(),
              **{key: checkpoint[key] for key in known}, 'data': folder_of(checkpoint, args), 'windows': args.windows,
              'block_size': windows.block_size, 'losses': [round(loss, 6) for loss in losses.tolist()]}
    data.write_whole(path, json.dumps(record) + '\n')
    return record


def compare(args, device):
    rows, steps, logs, tails, first = [], [], [], [], None
    if not args.png.lower().endswith('.png') or not Path(args.png).parent.is_dir():
        raise EvalError(f"--png={args.png}: must be a name that ends in .png, in a folder that exists")
    for run in args.runs:
        record = compared(run, args, device)
        losses, step = torch.tensor(record['losses']), record['step']
        setting = tuple(record[key] for key in ('tokenizer', 'block_size', 'data'))
        first = first or (setting, losses)
        if setting != first[0]:
            raise EvalError(f"{run} and {args.runs[0]} cannot be paired: they have (tokenizer, block_size, data) = "
                            f"{setting} and {first[0]}" + ("; --data can name one dataset for all"
                                                           if setting[:2] == first[0][:2] else ''))
        logs.append(read_log(run))
        log = [r for r in logs[-1] if r['step'] <= step]
        train = [r for r in log if r['kind'] == 'train']
        if not train:
            raise EvalError(f"{run}/log.jsonl has no record of the training up to the checkpoint")
        steps.append(step)
        tail = list(evaluations(log).values())[-4:]
        tails.append(f'{statistics.mean(tail):.4f}' if tail else '-')
        delta = losses - first[1]
        rows.append({
            'run': run, 'H': str(record['H']), 'params': f"{record['params'] / 1e6:.2f}M",
            'tokens': f"{record['tokens'] / 1e6:.1f}M", 'val loss': f'{losses.double().mean():.4f}',
            'delta': '' if run == args.runs[0] else f'{delta.double().mean():+.4f}',
            '+- s.e.': '' if run == args.runs[0] else f'{standard_error(delta):.4f}',
            # the first record holds compilation and warm-up
            'tok/s': f"{statistics.median(r['tokens_per_s'] for r in train[1:] or train):,.0f}",
            'GiB': f"{max(r['memory_gib'] for r in train):.2f}", 'batches': f"{record['batch_hash']:x}"})
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for row in [dict(zip(widths, widths))] + rows:
        print('  '.join(f'{row[key]:<{width}}' if key == 'run' else f'{row[key]:>{width}}'
                        for key, width in widths.items()))
    print(f"{len(losses)} windows of {record['block_size']} tokens; delta to the first run, paired over windows. "
          f"Equal 'batches' = trained on the same batches.\n"
          f"Mean of the last 4 evaluations in each log, over its windows: {', '.join(tails)}")
    plot_curves(args.runs, logs, args.png)
    compare_tasks(args.runs, steps, args.ema)


def evaluations(log):
    """A run's log -> {step: validation loss}"""
    return {r['step']: r['val_loss'] for r in log if r['kind'] in ('val', 'final')}


def plot_curves(runs, logs, png):
    """Training loss (lines) and validation loss (dots) of each run over its steps, and how the latter differ."""
    plt = import_pyplot()
    if plt is None:
        print("no picture of the loss curves: pip install matplotlib")
        return
    figure, (curves, differences) = plt.subplots(1, 2, figsize=(11, 4.5), layout='constrained')
    first = evaluations(logs[0])
    for run, log in zip(runs, logs):
        train = [(r['step'], r['loss']) for r in log if r['kind'] == 'train']
        line, = curves.plot(*zip(*train), linewidth=1, alpha=0.6, label=run)
        validated = evaluations(log)
        both = [step for step in validated if step in first]
        style = dict(color=line.get_color(), markersize=4)
        curves.plot(list(validated), list(validated.values()), 'o-', **style)
        differences.plot(both, [validated[step] - first[step] for step in both], 'o-', **style)
    curves.set(xlabel='step', ylabel='loss (nats per token; dots are validation)')
    differences.set(xlabel='step', ylabel=f'validation loss - that of {runs[0]}')
    curves.legend()
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    figure.savefig(png, dpi=110)
    print(f"loss curves: {png}")


# What the routing learned.

class ObservedRouter(EagerRouter):
    """Reads as EagerRouter does, and shows each site to `observe(n, sources (N, B, T, D), its parameters)`."""

    def __init__(self, model, observe):
        super().__init__(site_parameters(model), model.config.H, model.config.norm_eps)
        self.observe = observe

    def __call__(self, source):
        read, n = super().__call__(source), len(self.sources) - 1
        self.observe(n, torch.stack(self.sources).float(), self.sites[n])
        return read


def mean_over_tokens(x):
    """(..., B, T, H) -> (..., H), float64"""
    return x.double().flatten(-3, -2).mean(-2)


def disagreement(sources, site, slices, eps):
    """
    How much the parts of the width of an H = 1 site disagree about what to read (the paper's width-disagreement probe):
    KL(a_s || alpha) in nats, its mean over tokens and slices. a_s are the weights that slice s of the query alone would
    give, which is what `route_weights` computes for H = slices.
    """
    alone, together = (route_weights(sources, *site, H, eps).clamp(min=1e-30).log() for H in (slices, 1))
    return mean_over_tokens((alone.exp() * (alone - together)).sum(0)).mean().item()


@torch.no_grad()
def observe_sites(model, windows, indices, args, device):
    """-> one dictionary a site of what it reads of these windows; numbers are means over all tokens."""
    c, sites = model.config, [[] for _ in range(model.config.n_site)]
    noise = torch.Generator().manual_seed(0)
    random_queries = torch.randn(model.queries.shape, generator=noise).to(device)
    random_queries *= model.queries.norm(dim=1, keepdim=True) / random_queries.norm(dim=1, keepdim=True)

    def observe(n, sources, site):
        weights = route_weights(sources, *site, c.H, c.norm_eps)                        # (N, B, T, H)
        seen = {'weights': mean_over_tokens(weights),                                   # (N, H)
                'entropy': mean_over_tokens(-(weights * weights.clamp(min=1e-30).log()).sum(0))}    # (H,), nats
        if c.H == 1:
            seen['kl'] = disagreement(sources, site, args.slices, c.norm_eps)
            seen['kl_null'] = disagreement(sources, (random_queries[n], *site[1:]), args.slices, c.norm_eps)
        if n == c.n_site - 1:
            unit = sources / sources.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            seen['cosine'] = ((unit.sum(0).square().sum(-1) - (n + 1)) / (n * (n + 1))).mean().item()
        sites[n].append(seen)
    model.new_stream = lambda x: ObservedRouter(model, observe)
    window_losses(model, windows, indices, args.batch, device)
    del model.new_stream        # back to the class's own
    sizes = [min(args.batch, len(indices) - start) for start in range(0, len(indices), args.batch)]
    return [{key: sum(size * seen[key] for size, seen in zip(sizes, batches)) / len(indices) for key in batches[0]}
            for batches in sites]


def probe(args, device):
    model, checkpoint = load_run(args.run, device, args.ema)
    H = model.config.H
    if H == 0:
        raise EvalError(f"{args.run} is a plain model (H = 0): there is no routing to look at")
    if model.config.delta_blocks > 0:
        raise EvalError(f"{args.run} is in delta form: probe looks at reads that replace the running sum, not at what "
                        f"is added to it")
    if model.config.n_embd % args.slices:
        raise EvalError(f"--slices={args.slices}: must be a divisor of the width, {model.config.n_embd}")
    windows, indices = validation_windows(model, checkpoint, args)
    indices = indices[:len(indices) // 2 * 2]
    if not indices:
        raise EvalError("probe needs two or more validation windows, since it compares two halves of them")
    with autocast(device, checkpoint['flags']['dtype']):
        halves = [observe_sites(model, windows, half, args, device) for half in (indices[::2], indices[1::2])]
    weights = [sum(half[n]['weights'] for half in halves) / 2 for n in range(len(halves[0]))]      # (n + 1, H) a site
    numbers = {'windows': len(indices), 'cosine': (halves[0][-1]['cosine'] + halves[1][-1]['cosine']) / 2,
               'entropy': [((a['entropy'] + b['entropy']) / 2).tolist() for a, b in zip(*halves)],
               'weights': [w.tolist() for w in weights]}
    print(f"mean pairwise cosine of the {len(weights)} sources: {numbers['cosine']:.3f}")
    if H == 1:
        for key in ('kl', 'kl_null'):
            numbers[key] = statistics.mean(site[key] for half in halves for site in half[1:])   # site 0 has no choice
        print(f"width disagreement of {args.slices} slices: KL {numbers['kl']:.4f} nats; random queries of the same "
              f"norm {numbers['kl_null']:.4f}; learned excess {numbers['kl'] - numbers['kl_null']:+.4f}")
    else:
        deviations = [torch.cat([(site['weights'] - site['weights'].mean(1, keepdim=True)).flatten() for site in half])
                      for half in halves]
        numbers['replication'] = torch.corrcoef(torch.stack(deviations))[0, 1].item()
        numbers['deviation'] = (sum(deviations) / 2).abs().max().item()
        print(f"heads differ from their mean by up to {numbers['deviation']:.3f}; the deviations on two disjoint "
              f"halves of the windows correlate at {numbers['replication']:.3f}")
    data.write_whole(Path(args.run, 'probe.json'), json.dumps(numbers) + '\n')
    draw_weights(weights, numbers['entropy'], Path(args.run, 'probe.png'))


def draw_weights(weights, entropy, png):
    """Maps of site x source for each head, its deviation from the heads' mean, and the reads' entropy by depth."""
    N, H = len(weights), weights[0].size(1)
    maps = torch.full((H, N, N), math.nan, dtype=torch.float64)
    for n, w in enumerate(weights):
        maps[:, n, :n + 1] = w.T
    plt = import_pyplot()
    if plt is None:
        print("no picture: pip install matplotlib. Rows are sites, columns sources, the darker the more:")
        for h, rows in enumerate(maps):
            print(f"head {h}")
            for row in rows:
                print('  ' + ''.join(' .:-=+*#%@'[min(9, int(10 * x ** 0.5))] * 2 for x in row.tolist() if x == x))
        return
    from matplotlib.colors import PowerNorm
    scale = PowerNorm(0.5, 0, 1)        # site 0 can only read with weight 1; among many sources weights are small
    rows = 2 if H > 1 else 1
    figure, grid = plt.subplots(rows, H + 1, figsize=(3.2 * (H + 1), 3 * rows), squeeze=False, layout='constrained')
    spread = maps - maps.mean(0)
    limit = max(spread.nan_to_num().abs().max().item(), 1e-9)
    for h in range(H):
        image = grid[0][h].imshow(maps[h].numpy(), norm=scale, cmap='viridis')
        grid[0][h].set(title=f'head {h}' if H > 1 else 'AttnRes', xlabel='source', ylabel='site' if h == 0 else '')
        if H > 1:
            change = grid[1][h].imshow(spread[h].numpy(), vmin=-limit, vmax=limit, cmap='RdBu_r')
            grid[1][h].set(xlabel='source', ylabel='site' if h == 0 else '')
    figure.colorbar(image, ax=grid[0][:H].tolist(), label='weight', pad=0.04 / H)
    if H > 1:
        figure.colorbar(change, ax=grid[1][:H].tolist(), label='weight - mean of heads', pad=0.04 / H)
        grid[1][H].axis('off')
    for h in range(H):
        grid[0][H].plot([site[h] for site in entropy], label=f'head {h}' if H > 1 else 'AttnRes')
    grid[0][H].plot([math.log(n + 1) for n in range(N)], 'k--', linewidth=1, label='uniform')
    grid[0][H].set(title='entropy of the reads', xlabel='site', ylabel='nats')
    grid[0][H].legend(fontsize=7)
    figure.savefig(png, dpi=110)
    plt.close(figure)
    print(f"maps: {png}")


# Downstream tasks, by the rules of the LM Evaluation Harness (lm-eval 0.4), with it or without.

class Scorer:
    """
    How likely texts are under a model, and how it continues them. Log-likelihoods are sums over tokens, in nats.

    The network runs in `dtype` (train.py's flag), batch_tokens tokens at a time. The logits are those of the scored
    tokens only, and in fp32: rounded to bf16 the two likeliest would often be equal.
    """

    def __init__(self, model, tokenizer, dtype='auto', batch_tokens=16384):
        self.model, self.tokenizer, self.dtype, self.batch_tokens = model, tokenizer, dtype, batch_tokens
        self.device, self.block_size = model.wte.weight.device, model.config.block_size

    def loglikelihood(self, pairs):
        """[(context, continuation)] -> [(log-likelihood of the continuation, is it what greedy decoding would say?)]"""
        nats, greedy = self.score([self.encode_pair(*pair) for pair in pairs])
        return list(zip(nats.tolist(), greedy.tolist()))

    def rolling(self, texts):
        """[text] -> [log-likelihood of the whole text after an end-of-text token]"""
        encode = self.tokenizer.encode_ordinary
        return self.score([([self.tokenizer.eot_token], encode(text)) for text in texts])[0].tolist()

    def encode_pair(self, context, continuation):
        """
        The tokens of both, encoded together: what the context's own tokens do not cover is the continuation's, and so
        is the white space at the context's end. An empty context is an end-of-text token.
        """
        start = self.tokenizer.encode_ordinary(context.rstrip())
        tokens = self.tokenizer.encode_ordinary(context + continuation)[len(start):]
        if not tokens:
            raise EvalError(f"the continuation {continuation!r} has no token of its own after {context[-40:]!r}")
        return start or [self.tokenizer.eot_token], tokens

    def windows(self, context, continuation):
        """
        Tokens -> windows (tokens, how many at the end are scored) that score each token of the continuation once.
        A long context loses its left end. A continuation longer than block_size takes more than one window.
        """
        tokens, end = context + continuation, len(context)
        while end < len(tokens):
            start, end = end, min(end + self.block_size, len(tokens))
            yield tokens[max(0, end - self.block_size - 1):end], end - start

    @torch.no_grad()
    def score(self, pairs):
        """n pairs of (context, continuation) tokens -> log-likelihoods (n,), float64, and does greedy agree? (n,)"""
        windows = [(item, *window) for item, pair in enumerate(pairs) for window in self.windows(*pair)]
        windows.sort(key=lambda window: -len(window[1]))
        head = self.model.wte if self.model.config.tie_embeddings else self.model.lm_head
        weight, items, found = at_least_fp32(head.weight), [], [torch.empty(2, 0, device=self.device)]
        done = 0
        while done < len(windows):
            T = min(math.ceil((len(windows[done][1]) - 1) / 32) * 32, self.block_size)      # few shapes run fast
            batch = windows[done:done + max(1, self.batch_tokens // T)]
            done += len(batch)
            idx, targets = torch.zeros(len(batch), T, dtype=torch.int64), torch.full((len(batch), T), -1)
            for row, (item, tokens, scored) in enumerate(batch):
                last = len(tokens) - 1
                idx[row, :last], targets[row, last - scored:last] = map(torch.tensor, (tokens[:-1], tokens[-scored:]))
                items += [item] * scored
            with autocast(self.device, self.dtype):
                x = self.model.hidden(idx.to(self.device)).flatten(0, 1)                    # (B T, D)
            targets = targets.flatten()
            for rows in (targets >= 0).nonzero()[:, 0].split(4096):     # chosen on the CPU: a GPU would have to stop
                logits = F.linear(at_least_fp32(x[rows.to(self.device)]), weight)[:, :self.model.config.vocab_size]
                target = targets[rows].to(self.device)
                nats = logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1)
                found.append(torch.stack((nats, logits.argmax(1) != target)))
        sums = torch.zeros(2, len(pairs), dtype=torch.float64)
        sums.index_add_(1, torch.tensor(items, dtype=torch.int64), torch.cat(found, 1).double().cpu())
        return sums[0], sums[1] == 0

    def generate(self, requests):
        """
        [(prompt, strings to stop at, most new tokens)] -> greedy continuations, cut at the first stop or end of text.

        Prompts with equally many tokens go through together, since model.generate knows no padding, and the rest one
        by one. A long prompt loses its left end.
        """
        groups, texts = {}, [''] * len(requests)
        for item, (prompt, _, new) in enumerate(requests):
            if new >= self.block_size:
                raise EvalError(f"a prompt and {new} new tokens do not fit block_size = {self.block_size}; "
                                f"--max_new_tokens can ask for fewer")
            tokens = self.tokenizer.encode_ordinary(prompt)[new - self.block_size:] or [self.tokenizer.eot_token]
            groups.setdefault((len(tokens), new), []).append((item, tokens))
        for (length, new), group in groups.items():
            size = max(1, self.batch_tokens // (length + new))
            for start in range(0, len(group), size):
                items, tokens = zip(*group[start:start + size])
                with autocast(self.device, self.dtype):
                    out = self.model.generate(torch.tensor(tokens, device=self.device), new, temperature=0)
                for item, answer in zip(items, out[:, length:].tolist()):
                    answer = answer[:(answer + [self.tokenizer.eot_token]).index(self.tokenizer.eot_token)]
                    texts[item] = decode(self.tokenizer, answer)
                    for stop in filter(None, requests[item][1]):
                        texts[item] = texts[item].split(stop)[0]
        return texts


def digest(arguments):
    """What tells items apart: a hash of the texts that the model is asked about."""
    texts = [[text for text in argument if isinstance(text, str)] for argument in arguments]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def run_harness(scorer, tasks, fewshot=None, limit=None, max_new_tokens=256):
    """Tasks of lm-eval, names or configurations -> {name: rows of results}; the tasks of a group become one."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
        from lm_eval.models.utils import normalize_gen_kwargs
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise EvalError(f"--tasks needs the LM Evaluation Harness: pip install lm-eval ({error}). --task-file needs "
                        f"only files") from error
    names = [task for task in tasks if isinstance(task, str)]
    manager = TaskManager(include_defaults=bool(names))     # which takes it seconds
    unknown = sorted(set(names) - set(manager.all_tasks))
    if unknown:
        raise EvalError(f"lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` lists what it has")

    class Adapter(LM):
        def loglikelihood(self, requests):
            return scorer.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests):
            return scorer.rolling([request.args[0] for request in requests])

        def generate_until(self, requests):
            settings = [normalize_gen_kwargs(request.args[1], max_new_tokens) for request in requests]
            if any(setting['temperature'] > 0 for setting in settings):
                raise EvalError("a task that samples its answers cannot be run: decoding here is greedy")
            return scorer.generate([(request.args[0], setting['until'], setting['max_gen_toks'])
                                    for request, setting in zip(requests, settings)])

    results = simple_evaluate(Adapter(), tasks=tasks, task_manager=manager, num_fewshot=fewshot, limit=limit,
                              bootstrap_iters=0)
    print(make_table(results))

    def leaves(name):
        parts = results['group_subtasks'].get(name)
        return [leaf for part in parts for leaf in leaves(part)] if parts else [name]
    group_of = {leaf: name for name in names for leaf in leaves(name)}
    found = {}
    for task, samples in results['samples'].items():
        rows = {}
        for sample in samples:      # one an item and filter
            row = rows.setdefault(sample['doc_id'], {'item': f"{task}/{sample['doc_id']}",
                                                     'hash': digest(sample['arguments']), 'scores': {}})
            suffix = '' if sample['filter'] == 'none' else f",{sample['filter']}"
            for metric in sample['metrics']:
                value = sample[metric]
                if metric == 'perplexity':
                    row['scores']['nats'] = -value
                elif metric == 'word_perplexity':
                    row['scores']['nats'], row['words'] = -value[0], value[1]
                elif isinstance(value, (int, float)):       # others, as F1's pairs, are in lm-eval's table only
                    row['scores'][metric + suffix] = value
        found.setdefault(group_of.get(task, task), []).extend(rows.values())
    return found


def detokenize(page):
    """A page of WikiText as it was before its punctuation was set apart, in the steps of lm-eval's wikitext."""
    page = page.replace("s '", "s'")
    for mark in '-,.':
        page = page.replace(f' @{mark}@ ', mark)
    for mark in ':;.!?,':
        page = page.replace(f' {mark} ', f'{mark} ')
    for a, b in ('()', '[]', '{}', '""', "''"):
        page = re.sub(rf'\{a}\s*([^\{b}]*?)\s*\{b}', rf'{a}\1{b}', page)
    for n in (4, 3, 2):
        page = page.replace(' '.join('=' * n), '=' * n)
    for old, new in ((' \u00b0 ', '\u00b0'), (' \n', '\n'), ('\n ', '\n'), (' N ', ' 1 '), (" 's", "'s")):
        page = page.replace(old, new)
    return page


def clean_hellaswag(text):
    return re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. ')).replace('  ', ' ')


def parse_row(row):
    """
    One row of a task file -> (kind, arguments, answer): what lm-eval's task of this kind asks the model, and expects.

    'page': page, or text as WikiText has it.   'last word': text, as LAMBADA has it.   'number': question or context,
    and answer, as GSM8K has them.   'choice': context, choices and gold; query, choices and gold (PIQA, ARC); or ctx,
    activity_label, endings and label (HellaSwag; with ctx_a and ctx_b, from which lm-eval makes another ctx, that one).
    A `context` is asked as it is, so it may hold few-shot examples. ValueError, KeyError for a row that is none of it.
    """
    for key in ('page', 'text', 'context', 'question', 'query', 'ctx', 'ctx_a', 'ctx_b', 'activity_label'):
        if not isinstance(row.get(key, ''), str):
            raise ValueError(f"{key} = {row[key]!r} must be text")
    if 'page' in row:
        return 'page', [(detokenize(row['page']),)], len(re.split(r'\s+', row['page']))
    if 'text' in row:
        context, _, word = row['text'].rpartition(' ')
        if not word:
            raise ValueError(f"text = {row['text']!r} must end in a word")
        return 'last word', [(context, ' ' + word)], None
    if 'answer' in row:
        if not isinstance(row['answer'], (str, int, float)):
            raise ValueError(f"answer = {row['answer']!r} must be text or a number")
        prompt = row['context'] if 'context' in row else f"Question: {row['question']}\nAnswer:"
        return 'number', [(prompt,)], str(row['answer'])
    if 'endings' in row:
        ctx = f"{row['ctx_a']} {row['ctx_b'].capitalize()}" if 'ctx_a' in row else row['ctx']
        context = clean_hellaswag(f"{row['activity_label']}: {ctx}")
        choices, gold = [clean_hellaswag(ending) for ending in row['endings']], int(row['label'])
    else:
        context = row['context'] if 'context' in row else row['query'].removesuffix('\n') + '\nAnswer:'
        choices, gold = row['choices'], int(row['gold'])
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"choices = {choices!r} must be a list of texts, none of them empty")
    if not 0 <= gold < len(choices):
        raise ValueError(f"gold = {gold} must be the number of one of {len(choices)} choices, from 0 on")
    return 'choice', [(context, ' ' + choice) for choice in choices], gold


def read_task(path, limit=None):
    """A task file, .jsonl or WikiText's .raw or .txt, maybe with .gz or .xz on top -> (kind, [(arguments, answer)])."""
    path, items = Path(path), []
    form = re.search(r'(\.jsonl|\.raw|\.txt)(\.gz|\.xz)?$', path.name.lower())
    if not form:
        raise EvalError(f"{path} must be a .jsonl, .raw or .txt file, maybe with .gz or .xz after it")
    try:
        with open(path, 'rb') as raw:
            file = data.unpacked(raw, path)
            if form[1] == '.jsonl':
                rows = (json.loads(line) for line in file if line.strip())
            else:       # a page begins at a heading of the first level
                pages = re.split(r'^(?= = [^=].* = $)', file.read(), flags=re.MULTILINE)
                rows = ({'page': page} for page in pages if page.strip())
            for row in itertools.islice(rows, limit):
                items.append(parse_row(row))
    except (ValueError, LookupError, TypeError, AttributeError, *data.DAMAGED) as error:
        raise EvalError(f"{path} cannot be read as a task (row {len(items) + 1}: {error!r}); see parse_row in "
                        f"eval.py") from error
    if len({kind for kind, _, _ in items}) != 1:
        raise EvalError(f"{path} must hold items, and of one kind, but has {sorted({kind for kind, _, _ in items})}")
    return items[0][0], [item[1:] for item in items]


def bare_number(text):
    for ignored in (',', r'\$', r'(?s).*#### ', r'\.$'):
        text = re.sub(ignored, '', text)
    return text.lower()


def grade(kind, arguments, found, answer):
    """What the model said of one item (found, an entry an argument) -> the item's scores, and what they are made of."""
    if kind == 'page':
        return {'scores': {'nats': -found[0]}, 'words': answer}
    if kind == 'last word':
        return {'scores': {'acc': int(found[0][1]), 'nats': -found[0][0]}}
    if kind == 'number':
        strict = re.findall(r'#### (-?[0-9.,]+)', found[0])[:1]
        flexible = [match.group() for match in re.finditer(r'-?[$0-9.,]{2,}|-?[0-9]+', found[0])][-1:]
        return {'scores': {f'exact_match,{name}': int(bare_number((numbers or ['[invalid]'])[0]) == bare_number(answer))
                           for name, numbers in (('strict-match', strict), ('flexible-extract', flexible))},
                'output': found[0]}
    nats = np.array([loglikelihood for loglikelihood, _ in found])
    characters = np.array([len(choice) - 1 for _, choice in arguments])     # less the space before it
    return {'scores': {'acc': int(nats.argmax() == answer), 'acc_norm': int((nats / characters).argmax() == answer)},
            'loglikelihoods': nats.tolist()}


def run_items(scorer, kind, items, max_new_tokens=256):
    """What read_task found -> rows of results, as of lm-eval's task of the same kind without examples before it."""
    asked = [argument for arguments, _ in items for argument in arguments]
    if kind == 'number':
        found = scorer.generate([(prompt, ('Question:', '</s>', '<|im_end|>'), max_new_tokens) for prompt, in asked])
    elif kind == 'page':
        found = scorer.rolling([page for page, in asked])
    else:
        found = scorer.loglikelihood(asked)
    found = iter(found)
    return [{'item': n, 'hash': digest(arguments)} | grade(kind, arguments, [next(found) for _ in arguments], answer)
            for n, (arguments, answer) in enumerate(items)]


def estimate(values, words):
    """Values and words (n,) -> the mean value a word and its standard error (n = 1: nan). words = 1 is a plain mean."""
    mean = values.sum() / words.sum()
    return mean, standard_error(torch.from_numpy(values - mean * words)) / words.mean()


def describe(metric, values, words):
    mean, error = estimate(values, words)
    form = '.2%' if metric != 'nats' and set(values) <= {0, 1} else '.4f'
    figure = f'{mean:{form}}' + (f' +- {error:{form}}' if len(values) > 1 else '')
    return f"{figure} nats a word (perplexity {np.exp(mean):,.2f})" if metric == 'nats' else f'{metric} {figure}'


def columns(rows, metric):
    """Rows of results -> a metric's values and how many words each stands for, both (n,)."""
    words = [row.get('words', 1) if metric == 'nats' else 1 for row in rows]
    return np.array([row['scores'][metric] for row in rows], dtype=float), np.array(words, dtype=float)


def results_folder(run, ema):
    return Path(run, 'tasks-ema' if ema else 'tasks')


def tasks(args, device):
    if not args.tasks and not args.task_file:
        raise EvalError("which tasks? --tasks=hellaswag,... or --task-file hellaswag=PATH")
    if len(dict(args.task_file)) < len(args.task_file):
        raise EvalError("each --task-file needs a name of its own, under which its results are kept")
    files = {name: read_task(path, args.limit) for name, path in args.task_file}    # all, before anything is asked
    model, checkpoint = load_run(args.run, device, args.ema)
    tokenizer = data.get_tokenizer(checkpoint['tokenizer'], folder_of(checkpoint, args))
    scorer = Scorer(model, tokenizer, checkpoint['flags']['dtype'], args.batch_tokens)

    def save(name, rows):
        folder = results_folder(args.run, args.ema)
        folder.mkdir(exist_ok=True)
        header = {'task': name, 'step': checkpoint['step'], 'items': len(rows)}
        data.write_whole(folder / f'{name}.jsonl', '\n'.join(map(json.dumps, [header, *rows])) + '\n')
        print(f"{name}, {len(rows):,} items: " + ', '.join(describe(metric, *columns(rows, metric))
                                                           for metric in rows[0]['scores']), flush=True)
    if args.tasks:
        for name, rows in run_harness(scorer, args.tasks, args.fewshot, args.limit, args.max_new_tokens).items():
            save(name, rows)
    for name, (kind, items) in files.items():
        save(name, run_items(scorer, kind, items, args.max_new_tokens))


def mcnemar(gained, lost):
    """
    Exact two-sided p of McNemar's test: how likely coins would split the items that only one of two models gets right
    as unevenly as gained : lost, or more so.
    """
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2 ** n)


def read_results(path, step):
    """The file of a task's results -> its rows. EvalError unless it is whole, and of the run's checkpoint."""
    try:
        header, *rows = map(json.loads, path.read_text().splitlines())
        of_step, whole = header['step'], header['items'] == len(rows) > 0
    except (ValueError, LookupError, TypeError) as error:
        raise EvalError(f"{path} is damaged ({error!r}): run eval.py tasks again") from error
    if of_step != step or not whole:
        raise EvalError(f"{path} is of step {of_step} and the checkpoint of step {step}, or it is not whole: "
                        f"run eval.py tasks again")
    return rows


def compare_tasks(runs, steps, ema):
    """What each other run gains and loses against the first, on the items of every task that both have results of."""
    for run, step in zip(runs[1:], steps[1:]):
        for path in sorted(results_folder(runs[0], ema).glob('*.jsonl')):
            other = results_folder(run, ema) / path.name
            if not other.exists():
                continue
            first, rows = read_results(path, steps[0]), read_results(other, step)
            if [row['hash'] for row in rows] != [row['hash'] for row in first]:
                raise EvalError(f"{path} and {other} cannot be paired: they have other items")
            for metric in [metric for metric in first[0]['scores'] if metric in rows[0]['scores']]:
                (a, words), (b, _) = columns(first, metric), columns(rows, metric)
                accuracy = set(a) | set(b) <= {0, 1}
                means = ' -> '.join(f'{mean:.2%}' if accuracy else f'{mean:.4f}'
                                    for mean, _ in (estimate(a, words), estimate(b, words)))
                if accuracy:
                    gained, lost = int((b > a).sum()), int((a > b).sum())
                    paired = f"{gained} gained, {lost} lost, exact McNemar p = {mcnemar(gained, lost):.2g}"
                else:
                    paired = "{:+.4f} +- {:.4f}".format(*estimate(b - a, words))
                name = 'nats a word' if metric == 'nats' else metric
                print(f"{run}  {path.stem}, {len(rows):,} items, {name}: {means}  ({paired})")


# Compute-equivalent gain.

ALPHAS = np.geomspace(0.001, 3, 3000)


def fit_curve(flops, losses):
    """Least squares of losses = A * flops^-alpha + E, A and E >= 0, both (P,) -> (A, alpha, E), alpha from ALPHAS."""
    x = flops ** -ALPHAS[:, None]                                   # (grid, P)
    dx, dy = x - x.mean(1, keepdims=True), losses - losses.mean()
    A = ((dx * dy).sum(1) / (dx * dx).sum(1)).clip(0)
    E = losses.mean() - A * x.mean(1)
    A = np.where(E < 0, (x * losses).sum(1) / (x * x).sum(1), A)    # the best one for E = 0
    E = E.clip(0)
    best = np.square(A[:, None] * x + E[:, None] - losses).sum(1).argmin()
    return A[best], ALPHAS[best], E[best]


def gains(flops, losses, plain, alpha=None):
    """
    By what factor the plain model's compute would have to grow to reach each routed run's loss; inf: it never does.

    Training FLOPs, losses, and whether plain, each (P,) -> (alpha, gains (routed,)). The plain model's curve is fitted
    to its runs. A given alpha goes with E = 0 and a curve through the plain run of the nearest compute.
    """
    C, goal = flops[~plain], losses[~plain]
    if alpha:
        near = np.abs(np.log(flops[plain] / C[:, None])).argmin(1)
        return alpha, (losses[plain][near] / goal) ** (1 / alpha) * flops[plain][near] / C
    A, alpha, E = fit_curve(flops[plain], losses[plain])
    with np.errstate(divide='ignore'):
        return alpha, ((goal - E).clip(0) / A) ** (-1 / alpha) / C


def ceg(args, device):
    flops, losses, plain, settings = [], [], [], set()
    for run in args.runs:
        record = compared(run, args, device)
        flops.append(float(record['flops_per_token'] * record['tokens']))
        losses.append(np.array(record['losses']))
        plain.append(record['H'] == 0)
        settings.add((record['tokenizer'], record['data']))
    flops, plain = np.array(flops), np.array(plain)
    computes = len(set(flops[plain]))
    if len(settings) > 1:
        raise EvalError(f"the losses of these runs are on different tokens or data: {sorted(settings)}")
    if plain.all() or not plain.any():
        raise EvalError("ceg measures routed runs (H > 0) against plain ones (H = 0): name some of both")
    if not args.alpha and computes < 3:
        raise EvalError(f"the plain runs have {computes} different computes, and a curve A * C^-alpha + E needs "
                        f"three or more (other sizes or tokens); --alpha=0.06 would assume one, with E = 0")
    scaled = flops / np.exp(np.log(flops).mean())       # FLOPs as such would overflow
    alpha, found = gains(scaled, np.array([nats.mean() for nats in losses]), plain, args.alpha)
    if not args.alpha and alpha in (ALPHAS[0], ALPHAS[-1]):
        raise EvalError("the plain runs' losses do not determine a curve A * C^-alpha + E; --alpha can assume one")
    rng, resampled = np.random.default_rng(0), []
    for _ in range(1000):       # the same windows for all runs that have equally many: paired
        picks = {n: rng.integers(n, size=n) for n in sorted({len(nats) for nats in losses})}
        means = np.array([nats[picks[len(nats)]].mean() for nats in losses])
        resampled.append(np.append(*gains(scaled, means, plain, args.alpha)))
    low, high = np.quantile(resampled, (0.025, 0.975), axis=0, method='nearest')
    how = 'assumed, with E = 0' if args.alpha else f'fitted to {plain.sum()} plain runs [{low[0]:.3f}, {high[0]:.3f}]'
    print(f"loss = A * C^-alpha + E, alpha = {alpha:.3f} {how}")
    for i, n in enumerate(np.flatnonzero(~plain)):
        print(f"{args.runs[n]}: C = {flops[n]:.3g} FLOPs, loss {losses[n].mean():.4f}, compute-equivalent gain "
              f"{found[i]:.2f}x [{low[i + 1]:.2f}, {high[i + 1]:.2f}]")
    print("[95 % of 1,000 resamplings of the validation windows; what other seeds would do is not in them]")


def make_printable():
    """A young model samples any character, also those that the terminal's encoding does not have."""
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(errors='replace')


def number(kind, least):
    """A type for argparse: numbers of this kind that are not below `least`."""
    def parse(text):
        value = kind(text)
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text}: must be {least} or more, and below 2**63")
        return value
    parse.__name__ = kind.__name__      # for argparse's message about what is no number at all
    return parse


def task_file(text):
    name, _, path = text.partition('=')
    if not re.fullmatch(r'\w[\w.-]*', name) or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=PATH, with a name of letters, digits, _ . -")
    return name, path


def main(argv=None):
    parser = argparse.ArgumentParser('eval.py', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)

    def add(command, text, windows=None, many=False):
        sub = commands.add_parser(command.__name__, help=text)
        sub.set_defaults(command=command)
        sub.add_argument('runs' if many else 'run', nargs='+' if many else None, metavar='RUN')
        sub.add_argument('--ema', action='store_true', help="take the average of the weights that train.py --ema kept")
        sub.add_argument('--data', help="dataset folder (default: the one the run was trained on)")
        sub.add_argument('--device', choices=('cpu', 'cuda'), default='cuda' if torch.cuda.is_available() else 'cpu')
        if windows is not None:
            sub.add_argument('--windows', type=number(int, 0), default=windows,
                             help=f"validation windows, evenly spread, 0 = all (default {windows})")
            sub.add_argument('--batch', type=number(int, 1), default=8, help="windows a forward pass (default 8)")
        return sub
    add(val, "validation loss", windows=0, many=True)
    sub = add(compare, "a table, with paired deltas", windows=0, many=True)
    sub.add_argument('--png', default='compare.png', help="where the loss curves go (default compare.png)")
    sub = add(probe, "what the routing reads", windows=32)
    sub.add_argument('--slices', type=number(int, 1), default=4, help="parts of the width, for H = 1 (default 4)")
    sub = add(tasks, "downstream tasks")
    sub.add_argument('--tasks', type=lambda names: list(filter(None, names.split(','))),
                     help="of the LM Evaluation Harness: hellaswag,...")
    sub.add_argument('--task-file', type=task_file, action='append', default=[], metavar='NAME=PATH',
                     help="a task in a local file, .jsonl or text, also .xz or .gz (see parse_row); may be repeated")
    sub.add_argument('--limit', type=number(int, 1), help="only the first so many items of each task")
    sub.add_argument('--fewshot', type=number(int, 0), help="examples before an item of --tasks (default: the task's)")
    sub.add_argument('--max_new_tokens', type=number(int, 1), default=256, help="of generated answers (default 256)")
    sub.add_argument('--batch_tokens', type=number(int, 1), default=16384, help="tokens a forward pass (default 16384)")
    sub = add(ceg, "compute-equivalent gain", windows=0, many=True)
    sub.add_argument('--alpha', type=number(float, 1e-3), help="assume this exponent instead of fitting a curve")
    sub = add(sample, "text")
    sub.add_argument('--prompt', default='', help="default: start a new document")
    sub.add_argument('--tokens', type=number(int, 0), default=200, help="tokens to generate")
    sub.add_argument('--temperature', type=number(float, 0), default=0.8, help="0 = always the likeliest token")
    sub.add_argument('--top_k', type=number(int, 0), default=50, help="0 = all tokens")
    sub.add_argument('--seed', type=number(int, 0), default=0)
    args = parser.parse_args(argv)
    make_printable()
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA GPU here")
    try:
        args.command(args, torch.device(args.device))
    except (EvalError, ConfigError, data.DataError, OSError) as error:
        print(f'eval.py: {error}', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print('eval.py: interrupted', file=sys.stderr)
        sys.exit(130)


if __name__ == '__main__':
    main()
