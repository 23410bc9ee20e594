"""
Look at trained models. RUN is what train.py wrote: a folder with ckpt.pt and log.jsonl.

    python eval.py val RUN                          validation loss, nats per token and bits per byte
    python eval.py sample RUN --prompt "def main("  text, continued from the prompt
    python eval.py compare RUN RUN ...              a table, each delta to the first RUN with its paired standard error
    python eval.py probe RUN                        what the routing reads: numbers in RUN/probe.json, maps in probe.png

Every evaluation reads the same validation windows, so that two models of one block_size can be compared window by
window: most of what makes a window hard is common to both and cancels in the difference.
"""
import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import torch

import data
from model import ConfigError, EagerRouter, Transformer, route_weights


class EvalError(ValueError):
    """Runs that cannot be read or compared; the message says why."""


def read_checkpoint(run):
    """RUN -> the dictionary that train.py saved, on the CPU."""
    path = Path(run, 'ckpt.pt')
    if not path.exists():
        raise EvalError(f"there is no {path}; a run is a folder that train.py wrote")
    try:
        # Mapped, not read: all processes of a machine share it, and what nobody looks at never leaves the disk.
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except Exception as error:      # torch's own are of many types
        raise EvalError(f"{path} cannot be read: {error}") from error
    needed = {'step', 'tokens', 'model', 'model_config', 'flags', 'tokenizer', 'batch_hash'}
    if not isinstance(checkpoint, dict) or not needed <= checkpoint.keys():
        raise EvalError(f"{path} is no checkpoint of train.py, which holds {', '.join(sorted(needed))}")
    return checkpoint


def load_run(run, device, ema=False):
    """RUN -> (model in eval mode, the checkpoint's dictionary). ema: with the average of the weights."""
    checkpoint = read_checkpoint(run)
    if ema and not checkpoint.get('ema'):
        raise EvalError(f"--ema: {run} holds no average of the weights; train.py --ema=0.999 keeps one")
    try:
        return Transformer.from_checkpoint(checkpoint, device, 'ema' if ema else 'model').eval(), checkpoint
    except (TypeError, RuntimeError) as error:      # another version's Config, or tensors that do not fit it
        raise EvalError(f"{run}/ckpt.pt does not fit this model.py: {error}") from error


def check_tokenizer(checkpoint, folder):
    """A model only means something on tokens of the tokenizer it was trained with: DataError if folder has others."""
    meta, vocab_size = data.read_meta(folder), checkpoint['model_config']['vocab_size']
    if meta['tokenizer'] != checkpoint['tokenizer'] or meta['vocab_size'] > vocab_size:     # some models have rows to spare
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
    text = b''
    for token in out[0, 1:].tolist():
        try:
            text += tokenizer.decode_single_token_bytes(token)
        except KeyError:        # some vocabularies have gaps, and a young model samples them too
            text += '\ufffd'.encode()
    return text.decode('utf-8', errors='replace')


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


def compare(args, device):
    rows, first = [], None
    for run in args.runs:
        model, checkpoint, windows, indices, losses = run_losses(run, args, device)
        setting = (checkpoint['tokenizer'], windows.block_size, folder_of(checkpoint, args))
        first = first or (setting, losses)
        if setting != first[0]:
            raise EvalError(f"{run} and {args.runs[0]} cannot be paired: they have (tokenizer, block_size, data) = "
                            f"{setting} and {first[0]}; --data can name one dataset for all")
        train = [r for r in read_log(run) if r['kind'] == 'train' and r['step'] <= checkpoint['step']]
        if not train:
            raise EvalError(f"{run}/log.jsonl has no record of the training up to the checkpoint")
        delta = losses - first[1]
        rows.append({
            'run': run, 'H': str(model.config.H), 'params': f'{sum(model.count_parameters()) / 1e6:.2f}M',
            'tokens': f"{checkpoint['tokens'] / 1e6:.1f}M", 'val loss': f'{losses.double().mean():.4f}',
            'delta': '' if run == args.runs[0] else f'{delta.double().mean():+.4f}',
            '+- s.e.': '' if run == args.runs[0] else f'{standard_error(delta):.4f}',
            # the first record holds compilation and warm-up
            'tok/s': f"{statistics.median(r['tokens_per_s'] for r in train[1:] or train):,.0f}",
            'GiB': f"{max(r['memory_gib'] for r in train):.2f}", 'batches': f"{checkpoint['batch_hash']:x}"})
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for row in [dict(zip(widths, widths))] + rows:
        print('  '.join(f'{row[key]:<{width}}' if key == 'run' else f'{row[key]:>{width}}'
                        for key, width in widths.items()))
    print(f"{len(indices)} windows of {windows.block_size} tokens; delta to the first run, paired over windows. "
          f"Equal 'batches' = trained on the same batches.")
    plot_curves(args.runs, args.png)


def plot_curves(runs, png):
    """Training loss (lines) and validation loss (dots) of each run over its steps."""
    plt = import_pyplot()
    if plt is None:
        print("no picture of the loss curves: pip install matplotlib")
        return
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for run in runs:
        log = read_log(run)
        train = [(r['step'], r['loss']) for r in log if r['kind'] == 'train']
        line, = axes.plot(*zip(*train), linewidth=1, alpha=0.6, label=run)
        validated = [(r['step'], r['val_loss']) for r in log if r['kind'] in ('val', 'final')]
        if validated:
            axes.plot(*zip(*validated), 'o-', color=line.get_color(), markersize=4, label=f'{run}, validation')
    axes.set(xlabel='step', ylabel='loss (nats per token)')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=150, bbox_inches='tight')
    print(f"loss curves: {png}")


# What the routing learned.

class ObservedRouter(EagerRouter):
    """Reads as EagerRouter does, and shows each site to `observe(n, sources (N, B, T, D), query, gain)`."""

    def __init__(self, model, observe):
        super().__init__(model.queries, model.gains, model.config.H, model.config.norm_eps)
        self.observe = observe

    def __call__(self, source):
        read, n = super().__call__(source), len(self.sources) - 1
        self.observe(n, torch.stack(self.sources).float(), *self.sites[n])
        return read


def mean_over_tokens(x):
    """(..., B, T, H) -> (..., H), float64"""
    return x.double().flatten(-3, -2).mean(-2)


def disagreement(sources, query, gain, slices, eps):
    """
    How much the parts of the width of an H = 1 site disagree about what to read (the paper's width-disagreement probe):
    KL(a_s || alpha) in nats, its mean over tokens and slices. a_s are the weights that slice s of the query alone would
    give, which is what `route_weights` computes for H = slices.
    """
    alone, together = (route_weights(sources, query, gain, H, eps).clamp(min=1e-30).log() for H in (slices, 1))
    return mean_over_tokens((alone.exp() * (alone - together)).sum(0)).mean().item()


@torch.no_grad()
def observe_sites(model, windows, indices, args, device):
    """-> one dictionary a site of what it reads of these windows; numbers are means over all tokens."""
    c, sites = model.config, [[] for _ in range(model.config.n_source)]
    noise = torch.Generator().manual_seed(0)
    random_queries = torch.randn(model.queries.shape, generator=noise).to(device)
    random_queries *= model.queries.norm(dim=1, keepdim=True) / random_queries.norm(dim=1, keepdim=True)

    def observe(n, sources, query, gain):
        weights = route_weights(sources, query, gain, c.H, c.norm_eps)                  # (N, B, T, H)
        seen = {'weights': mean_over_tokens(weights),                                   # (N, H)
                'entropy': mean_over_tokens(-(weights * weights.clamp(min=1e-30).log()).sum(0))}    # (H,), nats
        if c.H == 1:
            seen['kl'] = disagreement(sources, query, gain, args.slices, c.norm_eps)
            seen['kl_null'] = disagreement(sources, random_queries[n], gain, args.slices, c.norm_eps)
        if n == c.n_source - 1:
            unit = sources / sources.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            seen['cosine'] = ((unit.sum(0).square().sum(-1) - (n + 1)) / (n * (n + 1))).mean().item()
        sites[n].append(seen)
    model.new_router = lambda x: ObservedRouter(model, observe)
    window_losses(model, windows, indices, args.batch, device)
    del model.new_router        # back to the class's own
    sizes = [min(args.batch, len(indices) - start) for start in range(0, len(indices), args.batch)]
    return [{key: sum(size * seen[key] for size, seen in zip(sizes, batches)) / len(indices) for key in batches[0]}
            for batches in sites]


def probe(args, device):
    model, checkpoint = load_run(args.run, device, args.ema)
    H = model.config.H
    if H == 0:
        raise EvalError(f"{args.run} is a plain model (H = 0): there is no routing to look at")
    if model.config.delta_blocks > 0:
        raise EvalError(f"{args.run} is in delta form: probe looks at reads that replace the running sum, not at added ones")
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
        print(f"width disagreement of {args.slices} slices: KL {numbers['kl']:.4f} nats; random queries of the same norm "
              f"{numbers['kl_null']:.4f}; learned excess {numbers['kl'] - numbers['kl_null']:+.4f}")
    else:
        deviations = [torch.cat([(site['weights'] - site['weights'].mean(1, keepdim=True)).flatten() for site in half])
                      for half in halves]
        numbers['replication'] = torch.corrcoef(torch.stack(deviations))[0, 1].item()
        numbers['deviation'] = (sum(deviations) / 2).abs().max().item()
        print(f"heads differ from their mean by up to {numbers['deviation']:.3f}; the deviations on two disjoint halves of "
              f"the windows correlate at {numbers['replication']:.3f}")
    Path(args.run, 'probe.json').write_text(json.dumps(numbers) + '\n')
    draw_weights(weights, numbers['entropy'], Path(args.run, 'probe.png'))


def draw_weights(weights, entropy, png):
    """Maps of site x source for each head, its deviation from the heads' mean, and the entropy of the reads by depth."""
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
                print('  ' + ''.join(' ' if math.isnan(x) else ' .:-=+*#%@'[min(9, int(10 * x))] * 2 for x in row.tolist()))
        return
    rows = 2 if H > 1 else 1
    figure, grid = plt.subplots(rows, H + 1, figsize=(3.2 * (H + 1), 3 * rows), squeeze=False, layout='constrained')
    spread = maps - maps.mean(0)
    limit = max(spread.nan_to_num().abs().max().item(), 1e-9)
    for h in range(H):
        image = grid[0][h].imshow(maps[h].numpy(), vmin=0, vmax=maps.nan_to_num().max().item(), cmap='viridis')
        grid[0][h].set(title=f'head {h}' if H > 1 else 'AttnRes', xlabel='source', ylabel='site' if h == 0 else '')
        if H > 1:
            change = grid[1][h].imshow(spread[h].numpy(), vmin=-limit, vmax=limit, cmap='RdBu_r')
            grid[1][h].set(xlabel='source', ylabel='site' if h == 0 else '')
    figure.colorbar(image, ax=grid[0][:H].tolist(), label='weight')
    if H > 1:
        figure.colorbar(change, ax=grid[1][:H].tolist(), label='weight - mean of heads')
        grid[1][H].axis('off')
    for h in range(H):
        grid[0][H].plot([site[h] for site in entropy], label=f'head {h}')
    grid[0][H].plot([math.log(n + 1) for n in range(N)], 'k--', linewidth=1, label='uniform')
    grid[0][H].set(title='entropy of the reads', xlabel='site', ylabel='nats')
    grid[0][H].legend(fontsize=7)
    figure.savefig(png, dpi=110)
    plt.close(figure)
    print(f"maps: {png}")


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


def main(argv=None):
    parser = argparse.ArgumentParser('eval.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)

    def add(command, text, windows=None):
        sub = commands.add_parser(command.__name__, help=text)
        sub.set_defaults(command=command)
        sub.add_argument('--ema', action='store_true', help="take the average of the weights that train.py --ema kept")
        sub.add_argument('--data', help="dataset folder (default: the one the run was trained on)")
        sub.add_argument('--device', choices=('cpu', 'cuda'), default='cuda' if torch.cuda.is_available() else 'cpu')
        if windows is not None:
            sub.add_argument('--windows', type=number(int, 0), default=windows,
                             help=f"validation windows, evenly spread, 0 = all (default {windows})")
            sub.add_argument('--batch', type=number(int, 1), default=8, help="windows a forward pass (default 8)")
        return sub
    add(val, "validation loss", windows=0).add_argument('runs', nargs='+', metavar='RUN')
    sub = add(compare, "a table, with paired deltas", windows=0)
    sub.add_argument('runs', nargs='+', metavar='RUN')
    sub.add_argument('--png', default='compare.png', help="where the loss curves go (default compare.png)")
    sub = add(probe, "what the routing reads", windows=32)
    sub.add_argument('run', metavar='RUN')
    sub.add_argument('--slices', type=number(int, 1), default=4, help="parts of the width, for H = 1 (default 4)")
    sub = add(sample, "text")
    sub.add_argument('run', metavar='RUN')
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
