"""
Train a plain (H=0), AttnRes (H=1) or MHAR (H=k) Transformer.

    python train.py                                         tiny MHAR on a laptop's CPU, a few minutes
    python train.py --H=0                                   the same model without depth routing
    python train.py --preset 100m --data data/fineweb-edu   the paper's 100M recipe, one GPU
    torchrun --nproc_per_node=8 train.py --preset 1b ...    the same step, cut over 8 GPUs
    torchrun --nproc_per_node=8 train.py --fsdp ...         and the weights and AdamW's state as well: for what one GPU
                                                            cannot hold
    python train.py --init_from DIR --graft ...             put MHAR onto a trained model, and train on
    python train.py ... --resume                            go on from OUT/ckpt.pt (on a CPU bit for bit)

Writes OUT/ckpt.pt (torch.load(weights_only=True) reads it) and OUT/log.jsonl, one record a line. Ctrl-C saves and
exits.
"""
import argparse
import copy
import difflib
import importlib.util
import inspect
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Optional, get_args

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

import data
from eval import (EvalError, autocast, bytes_per_token, check_tokenizer, make_printable, read_checkpoint, read_log,
                  sample_text, uses_bf16, window_losses)
from model import (PRESETS, ROUTERS, ConfigError, Transformer, config_of, fold, pretrained_config, route,
                   site_parameters, triton_runs)


@dataclass
class Flags:
    preset: Optional[str] = 'tiny'          # shape and recipe: tiny, 100m, 350m or 1b
    init_from: Optional[str] = None         # instead: trained weights, with the recipe for training them on (MIDTRAIN):
                                            # a Llama or Qwen3 checkpoint (folder or OWNER/NAME), or a RUN of train.py
    graft: bool = False                     # put depth routing onto these weights, in delta form
    data: str = 'data/stdlib'               # a dataset folder made by data.py
    out: Optional[str] = None               # where ckpt.pt and log.jsonl go; default out/[DATASET-]PRESET-H<H>
    resume: bool = False                    # go on from OUT/ckpt.pt
    overwrite: bool = False                 # start anew in an OUT that holds a run
    seed: int = 1337                        # of the weights and of the order of the batches

    H: int = -1                             # routing heads: 0 plain, 1 AttnRes, k MHAR, -1 = n_kv_head
    delta_blocks: Optional[int] = None      # k: reads are added to the running sum (delta form); 0: they replace it;
                                            # default 0, with --graft 8
    query_init_std: float = 0.0             # of the routing queries at the start; 0 = the plain Transformer
    query_lr: float = 1.0                   # learning rate of the routing queries, in multiples of lr
    router: str = 'auto'                    # what computes the reads: auto, eager (model.route) or fused (kernel.py)
    block_size: Optional[int] = None        # these seven: the preset's, where not given
    n_layer: Optional[int] = None
    n_head: Optional[int] = None
    n_kv_head: Optional[int] = None
    n_embd: Optional[int] = None
    ffn_dim: Optional[int] = None
    rope_theta: Optional[float] = None

    batch: Optional[int] = None             # sequences a step, over all processes; default the preset's
    micro_batch: Optional[int] = None       # sequences a forward pass of one process; default the preset's
    steps: Optional[int] = None             # default the preset's
    tokens: Optional[int] = None            # instead of --steps
    lr: Optional[float] = None              # peak learning rate; default the preset's
    warmup: Optional[int] = None            # steps; default a tenth of --steps, 1,000 at most
    min_lr: Optional[float] = None          # where the cosine ends, as a fraction of lr; default the recipe's
    weight_decay: Optional[float] = None    # of matrices; vectors do not decay; default the recipe's
    decay_embedding: Optional[bool] = None  # whether the embedding does; default the recipe's
    z_loss: Optional[float] = None          # x logsumexp^2 is added to the training loss; default the recipe's
    ema: Optional[float] = None             # decay a step of an average of the weights, saved too (eval.py --ema);
                                            # 0 = none; default the recipe's
    beta1: float = 0.9                      # AdamW's
    beta2: float = 0.95
    clip: float = 1.0                       # largest gradient norm; 0 = no clipping

    fsdp: bool = False                      # with torchrun: each process holds its part of the weights and their state
    device: str = 'auto'                    # cpu, cuda, or auto = a GPU if there is one
    dtype: str = 'auto'                     # compute in bf16 or fp32; auto = bf16 on GPUs that have it
    compile: Optional[bool] = None          # torch.compile; default on a GPU where it works
    checkpoint_sublayers: bool = False      # recompute activations in backward: less memory, slower
    log_interval: int = 10                  # steps
    eval_interval: Optional[int] = None     # steps; default a tenth of --steps; 0 = only at the end
    eval_windows: int = 64                  # validation windows (fixed; 0 = all)
    save_interval: Optional[int] = None     # steps; default a tenth of --steps
    stop_at: Optional[int] = None           # save and exit after this step; the schedule still spans --steps
    max_minutes: Optional[float] = None     # save and exit after this long
    wandb: Optional[str] = None             # log to this Weights & Biases project as well


# What the paper trains with (its recipe section): lr 1e-3 for all sizes, 20,000 steps. micro_batch suits 80 GB.
SCRATCH = dict(min_lr=0.1, weight_decay=0.1, decay_embedding=True, z_loss=0.0, ema=0.0)
RECIPES = {
    'tiny': SCRATCH | dict(batch=16, micro_batch=16, steps=400, lr=3e-3),
    '100m': SCRATCH | dict(batch=64, micro_batch=32, steps=20_000, lr=1e-3),
    '350m': SCRATCH | dict(batch=32, micro_batch=16, steps=20_000, lr=1e-3),
    '1b': SCRATCH | dict(batch=32, micro_batch=8, steps=20_000, lr=1e-3),
}
# With --init_from: the paper's mid-training of an 8B model, 1.05M tokens a step at 4,096 tokens a sequence.
MIDTRAIN = dict(min_lr=0.01, weight_decay=0.05, decay_embedding=False, z_loss=1e-4, ema=0.999,
                batch=256, micro_batch=1, steps=9_500, lr=4e-4)
SHAPE = ('block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'ffn_dim', 'rope_theta')
MAY_CHANGE_ON_RESUME = {'resume', 'out', 'data', 'steps', 'tokens', 'micro_batch', 'compile', 'checkpoint_sublayers',
                        'log_interval', 'eval_interval', 'eval_windows', 'save_interval', 'stop_at', 'max_minutes',
                        'wandb', 'router', 'fsdp', 'device'}
NOT_INHERITED = {'resume', 'overwrite', 'out', 'stop_at', 'max_minutes', 'compile', 'fsdp'}     # not of the run
PEAK_BF16_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'RTX 4090': 165e12}    # dense


# Flags.

def whole_number(text):
    try:
        value = int(text)
    except ValueError:
        value = float(text)     # so that 1e3 is a whole number too
    if not abs(value) < 2**63 or value != int(value):
        raise ValueError
    return int(value)


def true_or_false(text):
    if text.lower() not in ('true', 'false', '1', '0', 'yes', 'no'):
        raise ValueError
    return text.lower() in ('true', '1', 'yes')


# argparse names them in its message about a value that they do not take
whole_number.__name__, true_or_false.__name__ = 'whole number', 'true or false'


def parse_flags(argv):
    """argv -> (Flags, the names that were given). `--lr=1`, `--lr 1e-3`, `--steps=1e3`, `--compile=false` all work."""
    parser = argparse.ArgumentParser('train.py', usage='python train.py [--flag value | --flag=value] ...',
                                     description=__doc__, epilog=inspect.getsource(Flags), allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    readers = {int: whole_number, float: float, bool: true_or_false, str: str}
    for field in fields(Flags):
        kind = (get_args(field.type) or (field.type,))[0]
        bare = dict(nargs='?', const=True) if kind is bool else {}      # --resume means --resume=true
        parser.add_argument('--' + field.name, type=readers[kind], default=argparse.SUPPRESS, metavar=kind.__name__,
                            help=argparse.SUPPRESS, **bare)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        names = {name.lower(): name for name in vars(Flags())}
        nearest = difflib.get_close_matches(unknown[0].lstrip('-').split('=')[0].lower(), names, n=1, cutoff=0.5)
        hint = f"the nearest flag is --{names[nearest[0]]}; " if nearest else ''
        parser.error(f"unknown argument {unknown[0]}: {hint}--help lists all")
    return Flags(**vars(given)), set(vars(given))


def starting_point(flags, given):
    """-> (flags, the Config that they change): the preset's, or that of the weights to start from."""
    def refuse(names, why):
        for name in names:
            if name in given:
                raise ConfigError(f"--{name} cannot apply: {why}")
    if not flags.init_from:
        refuse(['graft'], "there is no --init_from to graft onto")
        if flags.preset not in RECIPES:
            raise ConfigError(f"preset = {flags.preset!r}: must be one of {', '.join(RECIPES)}")
        return flags, PRESETS[flags.preset]
    shape = set(SHAPE) if is_run(flags.init_from) else set(SHAPE) - {'block_size'}
    refuse(['preset', *sorted(shape)], "the shape is that of --init_from")
    if is_run(flags.init_from):
        config = config_of(read_checkpoint(flags.init_from))
    else:
        config = pretrained_config(flags.init_from, flags.block_size)
    if flags.graft:
        if config.H > 0:
            raise ConfigError(f"--graft needs a plain model (H = 0), and {flags.init_from} has H = {config.H}")
        if flags.delta_blocks == 0:
            raise ConfigError("delta_blocks = 0: must be 1 or more with --graft, which keeps the running sum")
        return replace(flags, preset=None, delta_blocks=flags.delta_blocks or 8), config
    refuse(['H', 'delta_blocks', 'query_init_std'], "without --graft the model stays what it is")
    return replace(flags, preset=None, H=config.H, delta_blocks=config.delta_blocks,
                   query_init_std=config.query_init_std), config


def is_run(folder):
    return Path(folder, 'ckpt.pt').exists()


def complete(flags, base, given, world):
    """Fills in what follows from the recipe and from `base`, the Config to change, and refuses what cannot apply."""
    recipe = MIDTRAIN if flags.init_from else RECIPES[flags.preset]
    changed = {name: getattr(flags, name) for name in SHAPE if getattr(flags, name) is not None}
    # a Config, which checks itself
    shape = replace(base, H=flags.H, delta_blocks=flags.delta_blocks or 0, **changed)
    flags = replace(flags, H=shape.H, delta_blocks=shape.delta_blocks, **{name: getattr(shape, name) for name in SHAPE},
                    **{name: value for name, value in recipe.items() if getattr(flags, name) is None})
    least = dict(tokens=1, steps=1, batch=1, micro_batch=1, log_interval=1, save_interval=1, stop_at=1, seed=0,
                 warmup=0, eval_interval=0, eval_windows=0, lr=0, min_lr=0, clip=0, weight_decay=0, max_minutes=0,
                 query_init_std=0, query_lr=0, beta1=0, beta2=0, ema=0, z_loss=0)
    for name, low in least.items():
        value, high = getattr(flags, name), 1 if name in ('beta1', 'beta2', 'ema') else math.inf
        if value is not None and not low <= value < high:
            raise ConfigError(f"{name} = {value}: must be {low} or more{' and below 1' if high == 1 else ''}")
    if flags.tokens is not None:
        if 'steps' in given:
            raise ConfigError("--steps and --tokens both say how long to train: give one")
        flags.steps = math.ceil(flags.tokens / (flags.batch * flags.block_size))
    flags.warmup = min(1000, flags.steps // 10) if flags.warmup is None else flags.warmup
    for name in ('eval_interval', 'save_interval'):
        if getattr(flags, name) is None:
            setattr(flags, name, max(1, flags.steps // 10))
    for name in ('query_init_std', 'query_lr', 'router'):
        if flags.H == 0 and name in given:
            raise ConfigError(f"--{name} cannot apply: with H = 0 there is no routing")
    if flags.wandb and not importlib.util.find_spec('wandb'):
        raise ConfigError("--wandb needs the wandb package: pip install wandb")
    if flags.router not in ROUTERS:
        raise ConfigError(f"router = {flags.router!r}: must be one of {', '.join(ROUTERS)}")
    if flags.dtype not in ('auto', 'bf16', 'fp32'):
        raise ConfigError(f"dtype = {flags.dtype!r}: must be auto, bf16 or fp32")
    if flags.device not in ('auto', 'cpu', 'cuda'):
        raise ConfigError(f"device = {flags.device!r}: must be auto, cpu or cuda")
    if flags.fsdp and world == 1:
        raise ConfigError("--fsdp cannot apply: there is one process; torchrun --nproc_per_node=N train.py starts N")
    if flags.batch % world:
        raise ConfigError(f"batch = {flags.batch}: must be a multiple of the number of processes, {world}")
    if 'micro_batch' not in given:
        flags.micro_batch = math.gcd(flags.micro_batch, flags.batch // world)
    if flags.batch % (flags.micro_batch * world):
        raise ConfigError(f"micro_batch = {flags.micro_batch}: batch = {flags.batch} must be a multiple of "
                          f"micro_batch x processes = {flags.micro_batch} x {world}")
    dataset = '' if Path(flags.data) == Path(Flags.data) else Path(flags.data).name + '-'
    form = f'H{flags.H}' + (f'-delta{flags.delta_blocks}' if flags.delta_blocks else '')
    flags.out = flags.out or f'out/{dataset}{flags.preset or Path(flags.init_from).name}-{form}'
    return flags


def merge_with_saved(flags, given, saved, config, world):
    """
    On --resume the run keeps its own flags. Those that leave the batches and the recipe alone may change; so may the
    length, and then all that follows from it and was not given again is planned anew.
    """
    if saved.keys() != vars(flags).keys():
        raise ConfigError(f"--resume: the run was made by another version of train.py; its flags differ in "
                          f"{', '.join(sorted(saved.keys() ^ vars(flags).keys()))}")
    kept = {name: value for name, value in saved.items() if name not in given | NOT_INHERITED}
    if given & {'steps', 'tokens'}:
        kept |= {name: None for name in ('steps', 'tokens', 'warmup', 'eval_interval', 'save_interval')
                 if name not in given}
    merged = complete(replace(flags, **kept), config, given, world)
    for name in sorted(given - MAY_CHANGE_ON_RESUME):
        if getattr(merged, name) != saved[name]:
            raise ConfigError(f"--{name}={getattr(merged, name)} cannot apply with --resume: the run has {saved[name]}")
    return merged


def learning_rate(step, flags):
    """Linear warm-up, then half a cosine down to min_lr x lr."""
    if step < flags.warmup:
        return flags.lr * (step + 1) / flags.warmup
    progress = (step - flags.warmup) / max(1, flags.steps - flags.warmup)
    return flags.lr * (flags.min_lr + (1 - flags.min_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


# The machine.

def setup_device(name, world):
    """--device -> this process's torch.device. With more than one process they meet here."""
    device = torch.device('cpu')
    if name == 'cuda' and not torch.cuda.is_available():
        raise ConfigError("device = cuda: there is no CUDA GPU here; must be auto or cpu")
    if name != 'cpu' and torch.cuda.is_available():
        nth = int(os.environ.get('LOCAL_RANK', 0))      # among the processes of this machine
        if nth >= torch.cuda.device_count():
            raise ConfigError(f"process {nth} of this machine has no GPU: there are {torch.cuda.device_count()}")
        device = torch.device('cuda', nth)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    if world > 1:       # nobody waits for a lost machine for ever; the longest honest wait is for rank 0 to save
        dist.init_process_group('gloo' if device.type == 'cpu' else 'nccl', timeout=timedelta(minutes=10))
    return device


def shard(model):
    """
    FSDP2, in place: a process keeps its part of every parameter, a DTensor, and a block's parameters are whole only
    while it runs. What is used between the blocks (embedding, head, routing) is whole from forward to backward. All
    are gathered in fp32: a step is the same as DDP's. At first each process must hold all of the weights, 4 bytes each
    (8 with --ema), but never their gradients or AdamW's state.
    """
    mesh = init_device_mesh(model.wte.weight.device.type, (dist.get_world_size(),))
    for block in model.blocks:      # as a list, since a block has no forward of its own
        fully_shard([block.attn, block.mlp], mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def local(tensor):
    """This process's part of a tensor that FSDP cut up, or all of any other; it shares the memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_gib(device):
    """Peak memory: what tensors took on a GPU, the process on a CPU."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def machine_facts(device, world):
    git = shutil.which('git') and subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=Path(__file__).parent,
                                                 capture_output=True, text=True).stdout.strip()
    return {'python': platform.python_version(), 'torch': torch.__version__, 'processes': world,
            'device': torch.cuda.get_device_name(device) if device.type == 'cuda' else platform.processor() or 'cpu',
            'cuda': torch.version.cuda, 'git': git or None, 'command': ' '.join(sys.argv)}


# Checkpoints and the log.

def save_checkpoint(path, checkpoint):
    """Atomic: a crash while saving leaves the old checkpoint whole. Tensors and plain types only."""
    temporary = path.with_suffix('.tmp')
    try:
        with open(temporary, 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:    # torch hides the disk's error behind one of its own
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be saved ({error.__context__ or error}); an older one is untouched") from error


def as_line(record, steps):
    """A record of the log as a person reads it, in less than 80 columns on a CPU."""
    at = f"step {record['step']}/{steps}"
    if record['kind'] == 'train':
        minutes, seconds = divmod(int(record['eta_s']), 60)
        eta = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
        mfu = f"{record['mfu']:.1%} MFU  " if record['mfu'] else ''
        return (f"{at}  loss {record['loss']:.4f}  lr {record['lr']:.1e}  norm {record['grad_norm']:.2f}  "
                f"{record['tokens_per_s']:,.0f} tok/s  {mfu}{record['memory_gib']:.1f} GiB  ETA {eta}")
    bits = f", {record['val_bpb']:.4f} bits per byte" if record['val_bpb'] else ''
    return f"{at}  val loss {record['val_loss']:.4f} nats per token{bits}"


class Log:
    """OUT/log.jsonl, one record a line; the screen, one line that updates; and Weights & Biases if asked for."""

    def __init__(self, flags, resumed_step=None):
        self.flags, kept, path = flags, [], Path(flags.out, 'log.jsonl')
        if resumed_step is not None and path.exists():      # what came after the checkpoint will happen again: drop it
            kept = [record for record in read_log(flags.out) if record['step'] <= resumed_step]
        data.write_whole(path, ''.join(json.dumps(record) + '\n' for record in kept))
        self.file = open(path, 'a', buffering=1)
        self.wandb = None
        if flags.wandb:
            import wandb
            self.wandb = wandb.init(project=flags.wandb, name=Path(flags.out).name, config=asdict(flags))

    def __call__(self, record):
        self.file.write(json.dumps(record) + '\n')
        if record['kind'] == 'header':
            return
        if self.wandb:
            self.wandb.log(record)
        line = as_line(record, self.flags.steps)
        if sys.stdout.isatty():
            line = '\r\033[K' + line[:shutil.get_terminal_size().columns - 1]
            print(line, end='' if record['kind'] == 'train' else '\n', flush=True)
        else:
            print(line, flush=True)

    def end_line(self):
        """The line that was updated so far stays, and what comes next starts another."""
        if sys.stdout.isatty():
            print(flush=True)


# The run.

@dataclass
class Run:
    """What the functions below share: one training run, in one process."""
    flags: Flags
    rank: int
    world: int                  # processes
    device: torch.device
    meta: dict                  # the dataset's meta.json
    model: Transformer
    ema: Optional[Transformer]  # the average of its weights, if it is asked for
    optimizer: torch.optim.Optimizer
    loader: data.Loader
    val: data.Windows
    val_indices: list           # the validation windows that are read, always the same
    fingerprint: int            # of the training data
    tokenizer: object = None    # None: it could not be loaded
    bytes_per_token: Optional[float] = None     # of those windows; None without tokenizer
    step: int = 0
    log: Optional[Log] = None   # on rank 0 only

    def autocast(self):
        return autocast(self.device, self.flags.dtype)

    def say(self, line):
        if self.rank == 0:
            print(line, flush=True)

    def sum_over_ranks(self, values, dtype=torch.float64):
        total = torch.tensor(values, dtype=dtype, device=self.device)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()


def open_run(flags, given, world):
    """-> (complete flags, the checkpoint to go on from or None), after checking that OUT may be written."""
    if not flags.resume:
        flags = complete(*starting_point(flags, given), given, world)
        out = Path(flags.out)
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out={out} is a file: must be a folder")
        if (out / 'ckpt.pt').exists() and not flags.overwrite:
            raise ConfigError(f"{out} holds a run: --resume goes on with it, --overwrite starts anew, "
                              f"--out=DIR goes elsewhere")
        if (out / 'log.jsonl').exists() and not flags.overwrite:
            raise ConfigError(f"{out} holds a run that stopped before its first checkpoint: --overwrite starts anew, "
                              f"--out=DIR goes elsewhere")
        return flags, None
    if flags.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    flags.out = flags.out or complete(*starting_point(flags, given), given, world).out
    saved = read_checkpoint(flags.out)
    return merge_with_saved(flags, given, saved['flags'], config_of(saved), world), saved


def check_pretrained_tokenizer(source, dataset, meta):
    """DataError if the dataset is not of the tokenizer.json beside the weights, or has tokens they do not know."""
    from transformers.utils import cached_file      # of a folder, or of a repository on the hub
    vocab_size = pretrained_config(source).vocab_size
    tokenizer = cached_file(source, 'tokenizer.json', _raise_exceptions_for_missing_entries=False)
    if tokenizer and meta['tokenizer'] != data.file_tokenizer_name(Path(tokenizer)):
        raise data.DataError(f"{dataset} holds tokens of {meta['tokenizer']}, and not of the model's tokenizer: "
                             f"python data.py ... --tokenizer {tokenizer} makes a dataset that does")
    if meta['vocab_size'] > vocab_size:
        raise data.DataError(f"{dataset} holds {meta['vocab_size']} different tokens, but the model knows {vocab_size}")


def initial_model(flags, saved, meta, device):
    """With the checkpoint's weights, those to start from, or random ones; the data must be of their tokenizer."""
    source = read_checkpoint(flags.init_from) if flags.init_from and not saved and is_run(flags.init_from) else saved
    if source:
        check_tokenizer(source, flags.data)
        model = Transformer.from_checkpoint(source, device)
    elif flags.init_from:
        check_pretrained_tokenizer(flags.init_from, flags.data, meta)
        model = Transformer.from_pretrained(flags.init_from, flags.block_size, device=device)
    else:
        config = replace(PRESETS[flags.preset], vocab_size=meta['vocab_size'], H=flags.H,
                         delta_blocks=flags.delta_blocks, query_init_std=flags.query_init_std,
                         **{name: getattr(flags, name) for name in SHAPE})
        model = Transformer(config).to(device)
    if flags.graft and not saved:
        model = model.graft(flags.H, flags.delta_blocks, flags.query_init_std)
    model.router = flags.router
    if model.config.H > 0 and model.router_on(device) == 'fused' and not fused_is_route(model):
        raise ConfigError("model.py's route was changed, and the fused kernels do not read as it does: "
                          "--router=eager trains it")
    return model


@torch.no_grad()
def fused_is_route(model):
    """Do the fused kernels read, of random sources and at random parameters of a site, what `route` does?"""
    import kernel
    c, device, noise = model.config, model.wte.weight.device, torch.Generator().manual_seed(0)
    def random(*shape):
        return torch.randn(*shape, generator=noise).to(device)
    sources = random(min(4, c.n_site), 1, 8, c.n_embd)
    parameters = [0.3 * random(len(sources), *p.shape[1:]) for p in site_parameters(model)]
    router = kernel.DepthRouter(fold(*parameters), c.H, c.norm_eps)
    fused = [router(x) for x in sources][-1]
    read = route(sources, *(p[-1] for p in parameters), c.H, c.norm_eps)
    return (fused - read).norm() <= 1e-3 * read.norm()      # fp32 rounds some 1e-6 of it


def start(flags, saved, rank, world, device):
    """Data, model and optimizer, fresh or from a checkpoint -> Run."""
    if rank == 0 and flags.data == Flags.data and not Path(flags.data).exists():
        print(f"making {flags.data} from the sources of Python's standard library")
        data.prepare_stdlib()
    if world > 1:
        dist.barrier()      # rank 0 writes to OUT from here on, so everybody must have looked before
    meta = data.read_meta(flags.data)
    torch.manual_seed(flags.seed)
    model = initial_model(flags, saved, meta, device)
    model.checkpoint_sublayers, model.z_loss, config = flags.checkpoint_sublayers, flags.z_loss, model.config
    description = describe(model, flags, device)
    ema = copy.deepcopy(model).requires_grad_(False) if flags.ema else None
    if saved and ema:
        ema.load_state_dict(saved['ema'])
    if flags.fsdp:
        for part in [model, ema] if ema else [model]:
            shard(part)
    groups = model.parameter_groups(flags.weight_decay, flags.decay_embedding, flags.query_lr)
    optimizer = torch.optim.AdamW(groups, lr=flags.lr, betas=(flags.beta1, flags.beta2), eps=1e-8, fused=True)
    windows, val = (data.Windows(flags.data, split, config.block_size) for split in ('train', 'val'))
    run = Run(flags, rank, world, device, meta, model, ema, optimizer, data.Loader(windows, flags.seed, rank, world),
              val, data.fixed_windows(val, flags.eval_windows), fingerprint(windows))
    if saved and saved['fingerprint'] != run.fingerprint:
        raise data.DataError(f"{flags.data} is not what the run was trained on: its batches would not go on where they "
                             f"stopped")
    try:
        run.tokenizer = data.get_tokenizer(meta['tokenizer'], flags.data)
        run.bytes_per_token = bytes_per_token(run.val, run.val_indices, run.tokenizer)
    except data.DataError as error:
        run.say(f"no bits per byte and no sample: {error}")
    if run.sum_over_ranks([float(run.tokenizer is None)])[0]:
        run.tokenizer = None        # under FSDP all processes sample together or none does
    if saved:
        run.step = saved['step']
        set_optimizer_state_dict(model, optimizer, saved['optimizer'], options=StateDictOptions(full_state_dict=True))
        torch.set_rng_state(saved['rng'])
        run.loader.position = saved['position']
        run.loader.batch_hash = saved['batch_hash'] if rank == 0 else 0     # the ranks' hashes add up
    run.say(description)
    if flags.compile:
        # FSDP gathers before sublayers, so these compile each on its own. Its hooks stay outside of the graphs,
        # whichever comes first. optimize_ddp cuts graphs up where a bucket of DDP's is full, so that gradients travel
        # while the backward pass goes on: one graph of the whole model needs that, separate sublayers do not.
        torch._dynamo.config.optimize_ddp = model.compile_parts(whole=not flags.fsdp)
    if rank == 0:
        Path(flags.out).mkdir(parents=True, exist_ok=True)
        if not saved:       # --overwrite: no checkpoint of the old run under the new run's log
            Path(flags.out, 'ckpt.pt').unlink(missing_ok=True)
        run.log = Log(flags, run.step if saved else None)
        run.log({'kind': 'header', 'step': run.step, **machine_facts(device, world), 'flags': asdict(flags),
                 'model_config': asdict(config), 'data': meta})
    return run


def describe(model, flags, device):
    routing = f"{model.router_on(device)} routing, " if model.config.H else ''
    c, (embedding, rest) = model.config, model.count_parameters()
    kind = {0: 'plain residual', 1: 'AttnRes'}.get(c.H, 'MHAR')
    form = f" in delta form ({c.delta_blocks} groups)" if c.delta_blocks else ''
    total, embedding, rest = (f"{n / 1e6:.2f}M" for n in (embedding + rest, embedding, rest))
    return (f"{kind} (H={c.H}){form}, {c.n_layer} layers, width {c.n_embd}: "
            f"{total} parameters = {embedding} embedding + {rest} rest\n"
            f"{'bf16' if uses_bf16(device, flags.dtype) else 'fp32'} on {device}, {routing}"
            f"torch.compile {'on' if flags.compile else 'off' if triton_runs(device) else 'off (it needs a GPU)'}"
            f"{', FSDP' if flags.fsdp else ''}")


def evaluate(run):
    """-> {val_loss, nats per token; val_bpb, bits per byte, None without tokenizer} over the fixed windows."""
    mine = run.val_indices[run.rank::run.world]
    short = len(mine) < len(run.val_indices[::run.world])   # FSDP's forward passes need all: one window more, unused
    # Uncompiled is the code that eval.py runs, and its shapes cost no recompilation.
    with run.autocast(), torch.compiler.set_stance('force_eager'):
        losses = window_losses(run.model, run.val, mine + run.val_indices[:short], run.flags.micro_batch, run.device)
    losses = losses[:len(mine)]
    nats = run.sum_over_ranks([losses.sum().item()])[0] / len(run.val_indices)
    return {'val_loss': nats, 'val_bpb': run.bytes_per_token and nats / math.log(2) / run.bytes_per_token}


def fingerprint(windows):
    """A number that tells two sets of training data apart: their size and a sample of their tokens."""
    return zlib.crc32(b''.join(windows[i].tobytes() for i in data.fixed_windows(windows, 32)), windows.tokens)


def save(run, batch_hash):
    """Refuses to put weights that are no numbers in the place of good ones: the last update may have broken them."""
    broken = not all(local(p).isfinite().all() for p in run.model.parameters())
    if run.sum_over_ranks([float(broken)])[0]:
        stop_non_finite(run, "the weights are no longer finite")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)    # all processes gather, for rank 0
    model = get_model_state_dict(run.model, options=whole)
    ema = get_model_state_dict(run.ema, options=whole) if run.ema else None
    optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=whole)
    if run.rank == 0:
        save_checkpoint(Path(run.flags.out, 'ckpt.pt'), {
            'step': run.step, 'tokens': run.step * run.flags.batch * run.flags.block_size,
            'model': model, 'ema': ema, 'optimizer': optimizer, 'rng': torch.get_rng_state(),
            'position': run.loader.position, 'batch_hash': batch_hash, 'flags': asdict(run.flags),
            'model_config': asdict(run.model.config), 'tokenizer': run.meta['tokenizer'],
            'fingerprint': run.fingerprint})


def stop_non_finite(run, what):
    if run.log:
        run.log.end_line()
    sys.exit(f"step {run.step}: {what}: stopped. {run.flags.out}/ckpt.pt, if there is one, is from before. "
             f"A lower --lr, a longer --warmup or --clip may help")


def train_step(run, model):
    """
    One optimizer step over `batch` sequences -> (loss, gradient norm), tensors that were not waited for. `model` is
    run.model, in DDP's wrapping if there is one.
    """
    flags, loss_sum = run.flags, 0.0
    micro_steps = flags.batch // (flags.micro_batch * run.world)
    for group in run.optimizer.param_groups:
        group['lr'] = learning_rate(run.step, flags) * group['lr_scale']
    for i in range(micro_steps):
        x, y = run.loader.next_batch(flags.micro_batch)
        if run.device.type == 'cuda':
            x, y = (t.pin_memory().to(run.device, non_blocking=True) for t in (x, y))
        # DDP averages gradients in the last backward pass. FSDP does so in each: a process holds its part of them only.
        waits = isinstance(model, DistributedDataParallel) and i < micro_steps - 1
        with model.no_sync() if waits else nullcontext():
            with run.autocast():
                loss = model(x, y) / micro_steps
            loss.backward()
        loss_sum = loss_sum + loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), flags.clip or math.inf)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    if run.ema:
        average, weights = ([local(p) for p in model.parameters()] for model in (run.ema, run.model))
        get_ema_multi_avg_fn(flags.ema)(average, weights, None)
    run.step += 1
    return loss_sum, norm


def train(run):
    """Steps until --steps, --stop_at, --max_minutes or a signal -> whether a signal ended it."""
    flags = run.flags
    model = run.model if run.world == 1 or flags.fsdp else DistributedDataParallel(run.model)
    asked = []                          # signals received; a second Ctrl-C ends the process at once
    def ask_to_stop(signum, frame):
        asked.append(signum)
        print("\nsaving at the next record, then exiting; Ctrl-C again exits at once, unsaved", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = {name: signal.signal(name, ask_to_stop) for name in (signal.SIGINT, signal.SIGTERM)}
    flops = run.model.flops_per_token()
    bf16_gpu = run.device.type == 'cuda' and uses_bf16(run.device, flags.dtype)
    peak = next((f for name, f in PEAK_BF16_FLOPS.items()
                 if bf16_gpu and name in torch.cuda.get_device_name(run.device)), None)
    end = min(flags.steps, flags.stop_at or flags.steps)
    begin = since = time.time()
    losses = []                         # of the steps since the last record
    while run.step < end:
        loss, norm = train_step(run, model)
        losses.append(loss)
        evaluating = bool(flags.eval_interval) and run.step % flags.eval_interval == 0
        saving = run.step % flags.save_interval == 0
        if not (run.step % flags.log_interval == 0 or evaluating or saving or run.step == end):
            continue                    # reading a number makes the CPU wait for the GPU: only here
        mean_loss = sum(losses).item() / len(losses)
        out_of_time = flags.max_minutes is not None and time.time() - begin > flags.max_minutes * 60
        mean_loss, stopping = run.sum_over_ranks([mean_loss / run.world, float(bool(asked) or out_of_time)])
        batch_hash = run.sum_over_ranks([run.loader.batch_hash], torch.int64)[0] % 2**53
        if not (math.isfinite(mean_loss) and math.isfinite(norm.item())):
            stop_non_finite(run, f"loss {mean_loss}, gradient norm {norm.item()}")
        now = time.time()
        speed = len(losses) * flags.batch * flags.block_size / (now - since)
        record = {'kind': 'train', 'step': run.step, 'loss': mean_loss, 'lr': learning_rate(run.step - 1, flags),
                  'grad_norm': norm.item(), 'tokens_per_s': speed, 'mfu': peak and speed * flops / (peak * run.world),
                  'memory_gib': memory_gib(run.device), 'batch_hash': batch_hash,
                  'eta_s': (flags.steps - run.step) * (now - since) / len(losses)}
        if run.log:
            run.log(record)
        if saving or stopping or run.step == end:
            save(run, batch_hash)
        if evaluating and run.step < flags.steps:
            result = evaluate(run)
            if run.log:
                run.log({'kind': 'val', 'step': run.step, **result})
        if stopping:
            break
        losses, since = [], time.time()
    for name, handler in handlers.items():
        signal.signal(name, handler)
    if run.log:
        run.log.end_line()
    return bool(asked)


def finish(run):
    """The last line of a finished run: its validation loss, and what it writes."""
    result = evaluate(run)
    if run.log:
        run.log({'kind': 'final', 'step': run.step, **result})
    run.say(f"(over {len(run.val_indices)} of {len(run.val)} validation windows; eval.py val reads all)")
    if run.tokenizer and (run.rank == 0 or run.flags.fsdp):
        with run.autocast(), torch.compiler.set_stance('force_eager'):
            text = sample_text(run.model, run.tokenizer, '', 200, seed=run.flags.seed)
        run.say(f"sample: {text[:200]}")
    run.say(f"saved {run.flags.out}/ckpt.pt; look at it with: python eval.py sample {run.flags.out}")


def main(argv=None):
    flags, given = parse_flags(argv)
    make_printable()
    # torchrun sets these; without it there is one process
    rank, world = (int(os.environ.get(name, default)) for name, default in (('RANK', 0), ('WORLD_SIZE', 1)))
    try:
        flags, saved = open_run(flags, given, world)
        if saved and saved['step'] >= flags.steps:
            if rank == 0:
                print(f"{flags.out} is finished: step {saved['step']} of {flags.steps}; "
                      f"a larger --steps goes on with it")
            return
        device = setup_device(flags.device, world)
        if flags.compile is None:
            flags.compile = triton_runs(device)
        run = start(flags, saved, rank, world, device)
        interrupted = train(run)
        if run.step == flags.steps:
            finish(run)
        else:
            run.say(f"stopped at step {run.step} of {flags.steps}; --out={flags.out} --resume goes on")
        if world > 1:
            dist.barrier()      # gloo aborts a process whose peer leaves while it tidies up
            dist.destroy_process_group()
        if interrupted:
            sys.exit(130)
    except (ConfigError, EvalError, data.DataError, OSError) as error:
        print(f"train.py: {f'rank {rank}: ' if world > 1 else ''}{error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("train.py: interrupted, nothing more saved", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as error:
        # gloo tells of a lost process in words only. (Under NCCL torchrun ends a process that waits for a lost one.)
        if world == 1 or not (isinstance(error, dist.DistError) or 'connection' in str(error).lower()):
            raise
        print(f"train.py: rank {rank}: another process was lost ({str(error).split('. ')[0]}). --resume goes on from "
              f"what was saved last in {flags.out}, with any number of processes", file=sys.stderr, flush=True)
        os._exit(1)             # at once: tidying up would wait for the lost one


if __name__ == '__main__':
    main()
