"""
Data: text in, token shards out, and the batches that train.py and eval.py read from them.

    python data.py                          # data/stdlib: Python's own sources, as bytes; no network
    python data.py shakespeare              # data/shakespeare: tiny shakespeare, 1 MB
    python data.py fineweb-edu --shards 10  # data/fineweb-edu: 1B GPT-2 tokens, 2 GB; resumes
    python data.py 'a/*.txt' b.jsonl.gz --name mine --tokenizer gpt2    # data/mine: your own text
    python data.py my_shards --tokenizer gpt2   # llm.c shards you already have: only adds meta.json

A dataset is a folder of train_*.bin and val_*.bin, each in llm.c's layout (256 int32 of header,
then the tokens), next to a meta.json that says which tokenizer made them. Every document opens
with <|endoftext|>. Your own text is .txt (a line holding only <|endoftext|> ends a document,
otherwise a file is one) or .jsonl (the string field "text"), either of them also as .gz or .xz.

A tokenizer is `bytes` (nothing to download), `gpt2`, `cl100k_base`, or a file of BPE ranks in
tiktoken's format (base64 token, space, rank). A ranks file is copied into the dataset as
tokenizer-<hash>.tiktoken; text is pre-split with cl100k's pattern, and <|endoftext|> is one past
the largest rank. The tokenizer.json of a pretrained model, or the folder that it is in, does as well
if it is byte-level BPE, as Llama 3's and Qwen's are (that needs the tokenizers package). Anything
wrong is one line on stderr and exit code 2, and changes no dataset.
"""
import argparse, base64, functools, glob, gzip, hashlib, http.client, io, itertools, json, lzma, os
import re, shutil, ssl, sys, sysconfig, time, tokenize, urllib.error, urllib.request, zlib
from pathlib import Path

import numpy as np
import tiktoken
import torch

EOT = "<|endoftext|>"
PIECE = 64 * 1024  # characters encoded at once: bounds memory, and lets one long text use all cores
HEADER_BYTES = 256 * 4
LAYOUTS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}  # magic: version, token type
HF_REPO = "karpathy/fineweb-edu-100B-gpt2-token-shards"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
ATTEMPTS, RETRY_SECONDS = 6, 1.0  # a download waits 1, 2, 4, 8, 16 s between its attempts
NAMES = ("bytes", "gpt2", "cl100k_base")  # of tokenizers; anything else is a file
READY = ("stdlib", "shakespeare", "fineweb-edu")  # datasets that need no text of yours
CL100K_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
                  r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")


class DataError(ValueError):
    """The input is at fault, not the code: the user gets its message as one line."""


# Tokenizers are tiktoken.Encoding objects, or look like them: the rest of the repo needs to know only that.

OPENERS = (EOT, "<|begin_of_text|>", "<s>", "<bos>")  # what opens a document, the first that a tokenizer.json has


class JsonTokenizer:
    """What this repo uses of a tiktoken.Encoding, from a Hugging Face tokenizer.json of byte-level BPE."""
    def __init__(self, path):
        try:
            import tokenizers
        except ImportError:
            raise DataError(f"reading {path} needs the tokenizers package: pip install tokenizers")
        try:
            self.inner = tokenizers.Tokenizer.from_file(str(path))
            decoder = json.loads(Path(path).read_text(encoding="utf-8")).get("decoder") or {}
        except Exception as e:  # tokenizers has no type of its own for what it cannot read
            raise DataError(f"{path} is not a tokenizer.json: {e}") from e
        self.inner.encode_special_tokens = True  # text that spells a special token stays text
        self.inner.no_truncation()
        self.inner.no_padding()
        # Byte-level BPE writes a byte as a character: itself if it is visible, else the next one from 256 on.
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        other = [b for b in range(256) if b not in visible]
        byte = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(other)}
        added = self.inner.get_added_tokens_decoder()
        ordinary = {i: text for text, i in self.inner.get_vocab(False).items() if i not in added}
        if '"ByteLevel"' not in json.dumps(decoder) or not set().union(*ordinary.values()) <= byte.keys():
            raise DataError(f"{path} is not byte-level BPE, the only kind of tokenizer.json that can be used here")
        self.bytes = {i: bytes(byte[c] for c in text) for i, text in ordinary.items()}
        self.bytes |= {i: token.content.encode() for i, token in added.items()}
        self.special = {i for i, token in added.items() if token.special}
        self.name, self.n_vocab = Path(path).name, max(self.bytes) + 1
        opener = next((text for text in OPENERS if self.inner.token_to_id(text) in self.special), None)
        if opener is None:
            raise DataError(f"{path} has no token to open a document with: none of {', '.join(OPENERS)}")
        self.eot_token = self.inner.token_to_id(opener)

    def encode_ordinary(self, text):
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts, num_threads=None):
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode_single_token_bytes(self, token):
        return self.bytes[token]  # KeyError if there is no such token, as in tiktoken

    def is_special_token(self, token):
        return token in self.special


def get_tokenizer(name, folder=None):
    """name: 'bytes', 'gpt2', 'cl100k_base', the path of a ranks file, of a tokenizer.json or of its folder,
    or the name of such a file in `folder`. Returns a tiktoken.Encoding or a JsonTokenizer. DataError if
    there is no such tokenizer or it cannot be had."""
    if name == "bytes":
        # The pattern takes any 64 characters: with no merges the cut does not matter, only the speed.
        ranks = {bytes([b]): b for b in range(256)}
        return tiktoken.Encoding(name, pat_str=r"[\s\S]{1,64}", mergeable_ranks=ranks, special_tokens={EOT: 256})
    if name in NAMES:
        try:
            return tiktoken.get_encoding(name)
        except (OSError, ValueError) as e:  # no network, or a download with the wrong hash
            raise DataError(f"tiktoken cannot download {name} ({str(e).splitlines()[0][:100]}); without "
                            "network, let TIKTOKEN_CACHE_DIR name a folder that holds its file") from e
    inside = Path(folder or ".") / name
    path = tokenizer_file(inside if inside.is_file() else name)
    if not path.is_file():
        raise DataError(f"unknown tokenizer {name!r}: use {', '.join(NAMES)}, the path of a ranks file or that of a "
                        "tokenizer.json")
    if path.suffix == ".json":
        return JsonTokenizer(path)
    try:  # not tiktoken.load, which caches by path and would not notice that a file has changed
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as e:
        raise DataError(f"{path} is not a ranks file, lines of 'base64 rank': {e}") from e
    # Without every single byte, some text would have no tokens at all.
    if len(set(ranks.values())) != len(pairs) or not ranks.keys() >= {bytes([b]) for b in range(256)}:
        raise DataError(f"{path} must hold all 256 single bytes, and no token or rank twice")
    if not 0 <= min(ranks.values()) <= max(ranks.values()) < 2**31 - 1:
        raise DataError(f"{path} has ranks from {min(ranks.values())} to {max(ranks.values())}: must be 0 to 2**31 - 2")
    return tiktoken.Encoding(path.name, pat_str=CL100K_PATTERN, mergeable_ranks=ranks,
                             special_tokens={EOT: max(ranks.values()) + 1})


def tokenizer_file(path):
    """A tokenizer's file: a folder, as of a pretrained model, stands for the tokenizer.json in it."""
    return Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)


def file_tokenizer_name(path):
    """The name under which a dataset keeps a copy of a tokenizer's file: it changes with the content."""
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return f"tokenizer-{digest}{'.json' if Path(path).suffix == '.json' else '.tiktoken'}"


def token_bytes(tokenizer, vocab_size):
    """How many bytes of text each token stands for, to turn a loss into bits per byte.
    Returns int64 (vocab_size,); 0 for special tokens and for padding of the vocabulary."""
    lengths = torch.zeros(vocab_size, dtype=torch.int64)
    for i in range(min(vocab_size, tokenizer.n_vocab)):
        try:
            if not tokenizer.is_special_token(i):
                lengths[i] = len(tokenizer.decode_single_token_bytes(i))
        except KeyError:
            pass  # some vocabularies have gaps
    return lengths


# Shards and meta.json: the dataset on disk.

def open_shard(path):
    """The tokens of a shard, a read-only array (count,) that stays on disk until it is read.
    DataError unless magic number, version and file size are as they should be."""
    size, header = os.path.getsize(path), np.fromfile(path, "<i4", 256)
    if len(header) < 256:
        raise DataError(f"{path} has {size} bytes, less than a shard's {HEADER_BYTES}-byte header")
    magic, version, count = header[:3].tolist()
    if magic not in LAYOUTS or version != LAYOUTS[magic][0]:
        known = " or ".join(f"{m} version {v}" for m, (v, _) in LAYOUTS.items())
        raise DataError(f"{path} is no llm.c shard: magic {magic} version {version}, should be {known}")
    dtype = LAYOUTS[magic][1]
    if size != HEADER_BYTES + count * dtype.itemsize:
        raise DataError(f"{path} is truncated or damaged: it has {size} bytes, but the {count} tokens in "
                        f"its header need {HEADER_BYTES + count * dtype.itemsize}")
    return np.memmap(path, dtype, "r", HEADER_BYTES, (count,))


def list_shards(folder, split):
    """Sorted shard paths of a split. DataError if there are none."""
    paths = sorted(Path(folder).glob(f"{split}_*.bin"))
    if not paths:
        raise DataError(f"{folder} has no {split}_*.bin shards")
    return paths


class ShardWriter:
    """Writes one split's token stream as shards of `shard_tokens`, in constant memory."""
    def __init__(self, folder, split, vocab_size, shard_tokens):
        self.prefix, self.shard_tokens = f"{folder}/{split}", shard_tokens
        self.magic = 20240520 if vocab_size <= 65536 else 20240801  # uint16 ends at 65535
        self.version, self.dtype = LAYOUTS[self.magic]
        self.file, self.count, self.shards = None, 0, 0

    def add(self, tokens):
        """tokens: list of n ids. A full shard ends at once, so a document may go on in the next."""
        tokens = np.array(tokens, self.dtype)
        while len(tokens):
            if self.file is None:
                self.file, self.count = open(f"{self.prefix}.tmp", "wb"), 0
                self.file.write(bytes(HEADER_BYTES))  # filled in when the count is known
            part = tokens[:self.shard_tokens - self.count]
            self.file.write(part.tobytes())
            self.count, tokens = self.count + len(part), tokens[len(part):]
            if self.count == self.shard_tokens:
                self.close()

    def close(self):
        """Completes the open shard, if any. Only a shard that is whole on disk gets a name in .bin."""
        if self.file is None:
            return
        with self.file as f:
            f.seek(0)
            f.write(np.array([self.magic, self.version, self.count], "<i4").tobytes())
            f.flush()
            os.fsync(f.fileno())  # so that not even a power cut leaves a .bin with a hole in it
        os.replace(f.name, f"{self.prefix}_{self.shards:06d}.bin")
        self.file, self.shards = None, self.shards + 1


def write_whole(path, text):
    """The text to a file, in one step: who reads it, or crashes while writing, finds the old file or the new one."""
    part = Path(f"{path}.tmp")
    part.write_text(text)
    os.replace(part, path)


def write_meta(folder, tokenizer, vocab_size):
    """Counts the tokens in the shards and writes meta.json: the last step in making a dataset."""
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size}
    if tokenizer not in NAMES:  # a file: copied, so that the dataset is whole wherever it moves
        path = tokenizer_file(tokenizer)
        meta["tokenizer"] = file_tokenizer_name(path)
        Path(folder, meta["tokenizer"]).write_bytes(path.read_bytes())
    for split in ("train", "val"):
        meta[f"{split}_tokens"] = sum(len(open_shard(path)) for path in list_shards(folder, split))
    write_whole(Path(folder, "meta.json"), json.dumps(meta, indent=2) + "\n")


def read_meta(folder):
    """The dataset's meta.json as a dict: tokenizer, vocab_size, train_tokens, val_tokens.
    DataError if there is none, with the command that makes the dataset."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        return {key: meta[key] for key in ("tokenizer", "vocab_size", "train_tokens", "val_tokens")}
    except (ValueError, TypeError, KeyError) as e:
        raise DataError(f"{folder}/meta.json is damaged: {e!r}") from e
    except OSError as e:
        what = f"FILES --name {folder.name}" if not folder.is_dir() else folder  # someone's own shards
        what = folder.name if folder.name in READY else f"{what} --tokenizer gpt2"
        raise DataError(f"no dataset in {folder} (no meta.json); make it with: python data.py {what}") from e


# From files to pieces of text. All of these are generators: no file is ever whole in memory.

def progress_bar(label, total, done=0):
    """Returns update(done, final=False), which shows MB, rate and ETA. total: bytes, or None."""
    tty, first, begun = sys.stderr.isatty(), done, time.time()
    shown = begun
    def update(done, final=False):
        nonlocal shown
        if not final and time.time() - shown < (0.2 if tty else 30):
            return
        shown = time.time()
        rate = max(done - first, 1) / max(shown - begun, 1e-9)  # bytes a second
        line = f"{label}: {done / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
        if total and not final:
            line += f", {done / total:.0%}, {(total - done) / rate:.0f} s left"
        # The return comes last, so that whatever is printed next, also an error, replaces the bar.
        print(line.ljust(79), end="\r" if tty and not final else "\n", file=sys.stderr, flush=True)
    return update


def read_lines(f):
    """The lines of a text file; one that is longer than PIECE comes in several chunks."""
    return iter(lambda: f.readline(PIECE), "")


def txt_chunks(f):
    """Lines of a .txt, None after each document. The newline before an end-of-text line or before the
    end of the file belongs to the format, not to the text: hence the delay of one line."""
    last, at_line_start = "", True
    for chunk in read_lines(f):
        if at_line_start and chunk.strip() == EOT:
            yield from (last.removesuffix("\n"), None)
            last = ""
        else:
            yield last
            last = chunk
        at_line_start = chunk.endswith("\n")
    yield from (last.removesuffix("\n"), None)


def jsonl_chunks(f):
    """Lines of each record's "text", None after each. Here a record has to fit in memory."""
    for number, line in enumerate(f, 1):
        if line.strip():
            try:
                text = json.loads(line)["text"] + ""  # a TypeError if it is not a string
            except (ValueError, TypeError, KeyError, RecursionError) as e:
                raise DataError(f'{f.name} line {number} is not JSON with a string "text": {e!r}') from e
            yield from read_lines(io.StringIO(text))
            yield None


def cut(chunks):
    """Joins chunks, at most PIECE characters each and None where a document ends, into pieces of at
    most PIECE. Yields (first, text): does it open its document? A blank document yields nothing."""
    first, held, size = True, [], 0
    for chunk in chunks:
        if chunk is None or size + len(chunk) > PIECE:
            text = "".join(held)
            if text and not (first and text.isspace()):  # space counts once a document has begun
                yield first, text
                first = False
            held, size = [], 0
        if chunk is None:
            first = True
        else:
            held.append(chunk)
            size += len(chunk)


def find_files(patterns):
    """Paths for file names and globs, none twice. DataError if one matches nothing, or no text."""
    found = []
    for pattern in patterns:
        # A name that exists is no glob, even with a [ in it.
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise DataError(f"no file matches {pattern!r} (ready-made: {', '.join(READY)})")
        found += matches
    for path in found:
        if not os.path.isfile(path) or not re.search(r"\.(txt|jsonl)(\.gz|\.xz)?$", path):
            raise DataError(f"{path} is not a .txt or .jsonl file, nor one with .gz or .xz after it")
    return list(dict.fromkeys(found))


DAMAGED = UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError  # what reading it may raise


def unpacked(raw, path):
    """The text of a file that is open as bytes: of .gz and .xz what is in it, without a byte order mark."""
    name = str(path).lower()
    inside = gzip.open(raw) if name.endswith(".gz") else lzma.open(raw) if name.endswith(".xz") else raw
    return io.TextIOWrapper(inside, "utf-8-sig")


def read_pieces(paths):
    """The pieces of every file, (first, text) as in cut(). DataError names a file that is damaged."""
    before, bar = 0, progress_bar("tokenizing", sum(os.path.getsize(path) for path in paths))
    for path in paths:
        with open(path, "rb") as raw:
            f = unpacked(raw, path)
            try:
                for piece in cut(jsonl_chunks(f) if ".jsonl" in path[-9:] else txt_chunks(f)):
                    yield piece
                    bar(before + raw.tell())  # of the compressed file: the only size known ahead
            except DAMAGED as e:
                raise DataError(f"{path} is damaged or not UTF-8: {e}") from e
        before += os.path.getsize(path)
    bar(before, final=True)


def split_of(text, val_fraction):
    """'train' or 'val', from a hash: the same in whatever order, and however often, the text comes."""
    # A lone surrogate, which JSON can hold, has no UTF-8; "replace" makes it a question mark.
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    return "val" if int(digest[:8], 16) < val_fraction * 2**32 else "train"


# From pieces of text to a dataset, and the commands.

def build(folder, tokenizer, pieces, shard_tokens=10**8, overwrite=False):
    """Tokenizes pieces, (split, first, text) each, into the dataset `folder`. It is built beside its
    place and renamed when whole: a crash or Ctrl-C leaves no half dataset, and an old one as it was."""
    if os.path.lexists(folder) and not overwrite:
        raise DataError(f"{folder} is already there; --overwrite replaces it")
    if os.path.lexists(folder) and not Path(folder, "meta.json").is_file():
        raise DataError(f"{folder} is not a dataset (no meta.json), so --overwrite leaves it alone")
    if folder.is_symlink():
        raise DataError(f"{folder} is a link: overwrite the folder that it leads to")
    for path in folder.iterdir() if folder.exists() else ():
        if not re.fullmatch(r"(train|val)_\w+\.bin|meta\.json|tokenizer-\w+\.(tiktoken|json)", path.name):
            raise DataError(f"{path} is not part of a dataset, and --overwrite would delete it: move it away")
    temp, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    encoding, counts = get_tokenizer(tokenizer), {"train": 0, "val": 0}
    try:
        temp.mkdir(parents=True)
        writers = {split: ShardWriter(temp, split, encoding.n_vocab, shard_tokens) for split in counts}
        pieces = iter(pieces)
        while batch := list(itertools.islice(pieces, 128)):  # at most 8 Mi characters
            # "ordinary": text that spells a special token stays text. tiktoken is Rust and lets go of
            # Python's lock, so threads use all cores.
            texts = [text for _, _, text in batch]
            ids = encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count())
            for (split, first, _), tokens in zip(batch, ids):
                writers[split].add([encoding.eot_token] * first + tokens)
                counts[split] += 1
        if not any(counts.values()):
            raise DataError("the files hold no text")
        for split, change in (("train", "lower"), ("val", "raise")):
            writers[split].close()
            if not counts[split]:
                raise DataError(f"none of the {sum(counts.values())} pieces of text (a document, or {PIECE:,} "
                                f"characters of a longer one) fell into {split}: {change} --val_fraction, or add text")
        write_meta(temp, tokenizer, encoding.n_vocab)
        if folder.exists():
            folder.rename(old)  # since a folder cannot be renamed onto a full one
        temp.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)  # stopped between the two renames
        for left in (temp, old):
            if left.exists():
                shutil.rmtree(left)
    return folder


def prepare_stdlib(out="data", overwrite=False):
    """Makes `out`/stdlib from this Python's standard library, split by file. Returns its path."""
    folder, root = Path(out, "stdlib"), Path(sysconfig.get_path("stdlib"))
    if Path(folder, "meta.json").is_file() and not overwrite:
        print(f"{folder} is already there")
        return folder
    # Left out: what is installed later, what some systems ship apart, tests, and generated tables.
    skip = re.compile(r"(^|/)(site-packages|dist-packages|__pycache__|tests?)/"
                      r"|^(idlelib|lib2to3|turtledemo|tkinter|distutils|ensurepip|venv|lib-dynload"
                      r"|encodings|pydoc_data|config-[^/]*)/|^(_sysconfig|sitecustomize|usercustomize)")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    def pieces():
        for name in names:
            if not skip.search(name):
                with tokenize.open(root / name) as f:  # open, but heeds a "coding:" comment
                    for first, text in cut(itertools.chain(read_lines(f), [None])):
                        yield split_of(name, 0.05), first, text
    return build(folder, "bytes", pieces(), overwrite=overwrite)


def prepare_files(patterns, name=None, tokenizer=None, val_fraction=0.01, shard_tokens=10**8,
                  out="data", overwrite=False):
    """Makes `out`/`name` from .txt and .jsonl files. Returns its path."""
    paths = find_files(patterns)
    if not name or not tokenizer:
        raise DataError("your own text needs --name NAME and --tokenizer gpt2|cl100k_base|bytes|FILE")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise DataError(f"--name {name!r}: use letters, digits, '_', '-' and '.', and no path")
    # Pieces and not documents are dealt out, so that even a single long document has a val part.
    pieces = ((split_of(text, val_fraction), first, text) for first, text in read_pieces(paths))
    return build(Path(out, name), tokenizer, pieces, shard_tokens, overwrite)


def prepare_shards(folder, tokenizer="gpt2", overwrite=False):
    """Makes a folder of llm.c shards a dataset: checks them and adds meta.json. Returns its path."""
    if Path(folder, "meta.json").exists() and not overwrite:
        raise DataError(f"{folder}/meta.json is already there; --overwrite replaces it")
    n_vocab = get_tokenizer(tokenizer).n_vocab
    for path in list_shards(folder, "train") + list_shards(folder, "val"):
        largest = open_shard(path).max(initial=0)
        if largest >= n_vocab:  # surely the tokens of another tokenizer
            raise DataError(f"{path} holds token {largest}, but {tokenizer} has only {n_vocab}")
    write_meta(folder, tokenizer, n_vocab)
    return folder


def fetch(url, part, token=None):
    """One attempt to complete the file `part` from where it ends. Returns only if it is whole."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    if token:  # unredirected: not for the host that a redirect leads to
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as e:
        if e.code != 416:  # "nothing to send from there on", which is looked into below
            raise
        response = e
    with response:
        ranges, total = response.headers.get("Content-Range", ""), response.headers.get("Content-Length")
        if response.status == 416 and ranges == f"bytes */{have}":
            return  # it was whole already
        if response.status == 200:
            have = 0  # the server ignores ranges and sends it all
        elif response.status == 206 and ranges.startswith(f"bytes {have}-"):
            total = ranges.split("/")[1]
        else:
            part.unlink(missing_ok=True)
            raise ConnectionError("the server has no such range, starting again")
        total = int(total) if total and total.isdigit() else None
        bar = progress_bar(part.stem, total, have)
        with open(part, "ab" if have else "wb") as f:
            while block := response.read(2**20):
                f.write(block)
                have += len(block)
                bar(have)
    if total not in (None, have):  # http.client takes a lost connection for the end
        raise ConnectionError(f"got {have} of {total} bytes")
    bar(have, final=True)


def download(url, path, token=None, check=None):
    """Downloads url to `path`, going on from path.part; only a whole file that passes check(file) gets
    its name. DataError at once for what will not heal (a 404), after ATTEMPTS for what might."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            fetch(url, part, token)
            break
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as e:
            code = getattr(e, "code", 500)  # only an HTTPError has one
            if attempt == ATTEMPTS or (code < 500 and code != 429):
                hint = "; HF_TOKEN may hold an access token" if code in (401, 403) else ""
                raise DataError(f"{url}: {e} (attempt {attempt} of {ATTEMPTS}){hint}") from e
            print(f"{part.stem}: {e}, trying again".ljust(79), file=sys.stderr)
            time.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
    try:
        if check:
            check(part)
    except DataError:
        part.unlink()  # whole but wrong: going on from it would never mend it
        raise
    os.replace(part, path)


def prepare_fineweb(shards=10, out="data"):
    """Downloads to `out`/fineweb-edu what is missing of the val shard and the first `shards` train
    shards of 100M tokens. Returns its path."""
    folder, host = Path(out, "fineweb-edu"), os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not host.startswith(("http://", "https://")):
        raise DataError(f"HF_ENDPOINT is {host!r}: must start with http:// or https://")
    for name in ["val_000000.bin"] + [f"train_{i:06d}.bin" for i in range(1, shards + 1)]:
        if not (folder / name).exists():
            url = f"{host.rstrip('/')}/datasets/{HF_REPO}/resolve/main/edu_fineweb_{name}"
            download(url, folder / name, os.environ.get("HF_TOKEN"), open_shard)
    write_meta(folder, "gpt2", 50257)  # looks into every shard, old ones too
    return folder


def prepare_shakespeare(tokenizer="bytes", val_fraction=0.1, out="data", overwrite=False):
    """Makes `out`/shakespeare; as in nanoGPT, val is the end of the text. Returns its path."""
    folder, source = Path(out, "shakespeare"), Path(out, "tinyshakespeare.txt")
    if not source.exists():
        download(SHAKESPEARE, source)
    text = source.read_text(encoding="utf-8")
    n = int(len(text) * (1 - val_fraction))
    return build(folder, tokenizer, [("train", True, text[:n]), ("val", True, text[n:])], overwrite=overwrite)


# What train.py and eval.py read.

class Windows:
    """A split seen as one stream of T tokens, in ceil((T - 1) / block_size) windows that overlap by
    one token: each token but the first is a target once an epoch. windows[i] is int64 (block_size + 1,).
    The last window is moved back to end at the last token. DataError if T <= block_size."""
    def __init__(self, folder, split, block_size):
        meta = read_meta(folder)
        self.folder, self.block_size, self.vocab_size = folder, block_size, meta["vocab_size"]
        self.paths = list_shards(folder, split)
        self.open_shard = functools.lru_cache(open_shard)  # 128 at a time: a process has only so many files
        self.starts = np.cumsum([0] + [len(open_shard(path)) for path in self.paths])  # in the stream
        self.tokens = int(self.starts[-1])
        expected = meta[f"{split}_tokens"]
        if self.tokens != expected:
            raise DataError(f"the {split} shards of {folder} hold {self.tokens:,} tokens, but its meta.json says "
                            f"{expected:,}: a shard is missing, or was added")
        if self.tokens <= block_size:
            raise DataError(f"the {split} split of {folder} has {self.tokens} tokens, but one window of "
                            f"block_size {block_size} needs {block_size + 1}")

    def __len__(self):
        return -(-(self.tokens - 1) // self.block_size)

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} of {len(self)}")
        at = min(i * self.block_size, self.tokens - 1 - self.block_size)
        window, filled = np.empty(self.block_size + 1, np.int64), 0
        while filled < len(window):  # once, or again if the window crosses into the next shard
            k = np.searchsorted(self.starts, at + filled, side="right") - 1
            begin = at + filled - self.starts[k]
            part = self.open_shard(self.paths[k])[begin:begin + len(window) - filled]
            window[filled:filled + len(part)] = part
            filled += len(part)
        if window.max() >= self.vocab_size:
            raise DataError(f"{self.folder} holds token {window.max()}, but its meta.json says that "
                            f"vocab_size is {self.vocab_size}")
        return window


class Loader:
    """Batches of shuffled windows, without end. `position` counts the windows taken by all ranks; with
    the seed it says all there is to say, so a run has to save and restore only that one int."""
    def __init__(self, windows, seed, rank=0, world=1):
        self.windows, self.seed, self.rank, self.world = windows, seed, rank, world
        self.position, self.batch_hash, self.epoch = 0, 0, None

    def next_batch(self, n):
        """n windows for this rank: (x, y), int64 tensors (n, block_size), y one token ahead of x."""
        batch = []
        for p in range(self.position + self.rank, self.position + n * self.world, self.world):
            epoch, i = divmod(p, len(self.windows))  # a batch may end one epoch and open the next
            if epoch != self.epoch:
                rng = np.random.default_rng([self.seed, epoch])
                self.epoch, self.order = epoch, rng.permutation(len(self.windows))
            batch.append(self.windows[self.order[i]])
            # A sum, so that it does not depend on how ranks and batches share out the windows.
            self.batch_hash = (self.batch_hash + zlib.crc32(batch[-1].tobytes())) % 2**53
        self.position += n * self.world
        batch = torch.from_numpy(np.stack(batch))  # (n, block_size + 1)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def fixed_windows(windows, count):
    """`count` evenly spread window indices, always the same, to evaluate on; all if 0 or too many."""
    if count == 0 or count >= len(windows):
        return list(range(len(windows)))
    return [i * len(windows) // count for i in range(count)]


# The command line.

def count(text):
    """A number of things, also as 100e6."""
    if not 1 <= float(text) < 2**31:  # a shard's header holds its count as int32
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 2**31 - 1")
    return int(float(text))


def fraction(text):
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


def run_command(argv):
    """Parses the command line and calls the one function that does what it says."""
    def fail(message):  # one line, where argparse would print its usage too
        raise DataError(message)
    parser = argparse.ArgumentParser(description=__doc__, argument_default=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("what", nargs="*", default=[], help="stdlib (the default), shakespeare, fineweb-edu, a folder of llm.c "
        "shards, or .txt and .jsonl files and globs")
    add("--name", help="your text: the dataset's folder inside --out")
    add("--tokenizer", help="bytes, gpt2, cl100k_base or the path of a ranks file or a tokenizer.json")
    add("--val_fraction", type=fraction, help="part of the text for val (default 0.01; shakespeare 0.1)")
    add("--shard_tokens", type=count, help="your text: tokens in a shard (default 100e6)")
    add("--shards", type=count, help="fineweb-edu: train shards of 100M tokens (default 10)")
    add("--out", help="the folder of datasets (default data)")
    add("--overwrite", action="store_true", help="replace a dataset that is already there")
    options = vars(parser.parse_args(argv))  # only those given: SUPPRESS leaves out the rest
    what = options.pop("what") or ["stdlib"]
    kind = what[0] if what in [[name] for name in READY] else "text"
    if len(what) == 1 and os.path.isdir(what[0]) and kind == "text":
        kind = "a folder"
    function, allowed = {"stdlib": (prepare_stdlib, "out overwrite"),
                         "shakespeare": (prepare_shakespeare, "tokenizer val_fraction out overwrite"),
                         "fineweb-edu": (prepare_fineweb, "shards out"),
                         "a folder": (prepare_shards, "tokenizer overwrite"),
                         "text": (prepare_files, "name tokenizer val_fraction shard_tokens out overwrite")}[kind]
    for option in options.keys() - allowed.split():
        raise DataError(f"{kind} takes no --{option}, only --{', --'.join(allowed.split())}")
    folder = function(*{"text": [what], "a folder": what}.get(kind, []), **options)
    print("{}: {train_tokens:,} train and {val_tokens:,} val tokens, {tokenizer}".format(folder, **read_meta(folder)))


def main(argv=None):
    """The command line. Exits with 2, and one line that says why, if the input or the disk is at fault."""
    try:
        run_command(argv)
    except (DataError, OSError) as e:
        print(f"data.py: {e}".ljust(79), file=sys.stderr)  # padded to wipe out a progress bar
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("data.py: interrupted; run the same command again".ljust(79))

if __name__ == "__main__":
    main()
