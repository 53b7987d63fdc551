"""The peers: nanoGPT and llama2.c from where the user has them, transformers from PyPI."""

import importlib.util
import pickle
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import Options

DATASET = "shakespeare_char"  # the name that nanoGPT's recipe has for its text
VOCAB_SIZE = 65  # of tiny Shakespeare; for models that see no text


@dataclass(frozen=True)
class Shape:
    """An architecture and a batch, in our words."""

    n_layers: int
    n_heads: int
    d_model: int
    context_length: int
    batch_size: int

    @property
    def size(self) -> str:
        """Layers, heads and width."""
        return f"{self.n_layers}/{self.n_heads}/{self.d_model}"

    @property
    def name(self) -> str:
        """Layers, heads and width, and the windows of a step."""
        return f"{self.size}, {self.batch_size} x {self.context_length}"

    def fields(self) -> dict[str, int]:
        """For RunConfig, and for the JSON of another process."""
        return asdict(self)


SMALL, LARGE = Shape(4, 4, 128, 64, 12), Shape(6, 6, 384, 256, 8)


def without_nanogpt(options: Options) -> str:
    """Why nanoGPT cannot be measured, or nothing."""
    return "" if options.nanogpt else "no checkout given (--nanogpt DIR)"


def without_transformers() -> str:
    """Why transformers cannot be measured, or nothing."""
    found = importlib.util.find_spec("transformers")
    return "" if found else "not installed (pip install -e .[dev])"


def nanogpt_copy(options: Options, folder: Path) -> Path:
    """A copy of the checkout with the text as its data, encoded as its own script does.

    Of nothing, where there is no checkout: an empty folder.
    """
    copy = folder / "nanoGPT"
    if not options.nanogpt:
        copy.mkdir()
        return copy
    shutil.copytree(options.nanogpt, copy, ignore=shutil.ignore_patterns(".git", "out*"))
    text = options.text.read_text(encoding="utf-8")
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    ids = np.array([numbers[character] for character in text], np.uint16)
    data = copy / "data" / DATASET
    data.mkdir(parents=True, exist_ok=True)
    n_train = int(0.9 * len(ids))
    ids[:n_train].tofile(data / "train.bin")
    ids[n_train:].tofile(data / "val.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": numbers}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    return copy


def nanogpt_train(shape: Shape, steps: int, **flags: object) -> list[str]:
    """Its training command as its README advises for a CPU, for this shape.

    It evaluates first and last only, and logs rarely: less work than the README gives it.
    """
    settings: dict[str, object] = {
        "device": "cpu", "compile": False, "eval_iters": 20, "log_interval": 1000,
        "eval_interval": steps, "block_size": shape.context_length, "dropout": 0.0,
        "batch_size": shape.batch_size, "n_layer": shape.n_layers, "n_head": shape.n_heads,
        "n_embd": shape.d_model, "max_iters": steps, "lr_decay_iters": steps,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in (settings | flags).items()]
    return [sys.executable, "train.py", f"config/train_{DATASET}.py", *words]


def nanogpt_model(checkout: str, shape: dict[str, int]):
    """Its model with random weights, in this process."""
    sys.path.insert(0, checkout)
    from model import GPT, GPTConfig

    sizes = {
        "n_layer": shape["n_layers"], "n_head": shape["n_heads"], "n_embd": shape["d_model"],
        "block_size": shape["context_length"], "vocab_size": VOCAB_SIZE,
    }  # fmt: skip
    return GPT(GPTConfig(**sizes, dropout=0.0, bias=False))


def nanogpt_loss(copy: str) -> float:
    """The loss of its checkpoint over the whole validation split, in nats per character.

    Windows of its context follow one another, as in our evaluation.
    """
    import torch

    sys.path.insert(0, copy)
    from model import GPT, GPTConfig

    saved = torch.load(Path(copy) / "out-shakespeare-char" / "ckpt.pt", weights_only=False)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    ids = np.fromfile(Path(copy) / "data" / DATASET / "val.bin", np.uint16).astype(np.int64)
    length, n = saved["model_args"]["block_size"], len(ids) - 1
    total = 0.0
    whole = n - n % length  # then a shorter window is left
    with torch.no_grad():
        for start, end, width in ((0, whole, length), (whole, n, n - whole)):
            if start == end:
                continue
            x = torch.from_numpy(ids[start:end].reshape(-1, width))
            y = torch.from_numpy(ids[start + 1 : end + 1].reshape(-1, width))
            for inputs, targets in zip(x.split(128), y.split(128), strict=True):
                total += model(inputs, targets)[1].item() * targets.numel()
    return total / n


def gpt2(shape: dict[str, int]):
    """The GPT-2 of transformers with random weights and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=shape["context_length"], n_embd=shape["d_model"],
        n_layer=shape["n_layers"], n_head=shape["n_heads"], resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama2c_files(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """A model with random weights and a vocabulary, as llama2.c reads them (its export version 0).

    Header: seven int32, dim, hidden_dim, n_layers, n_heads, n_kv_heads, -vocab_size (a head of its
    own), seq_len; then float32 tensors, of every kind those of all layers. SwiGLU has as many
    weights as our two matrices when hidden_dim = 8/3 dim. Its character 1 ends a text, so the
    first component of the stream is kept at 1 and makes that character all but impossible.
    """
    dim, layers, length = shape.d_model, shape.n_layers, shape.context_length
    hidden = 8 * dim // 3
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int, count: int = layers) -> np.ndarray:
        return draw.normal(0, 0.02, (count, rows, columns)).astype(np.float32)

    def into_stream(columns: int) -> np.ndarray:
        weights = matrix(dim, columns)
        weights[:, 0] = 0
        return weights

    embedding, head = matrix(VOCAB_SIZE, dim, 1), matrix(VOCAB_SIZE, dim, 1)
    embedding[:, :, 0], head[:, :, 0], head[:, 1, 0] = 1, 0, -10
    gains = np.ones((layers, dim), np.float32)
    tensors = [
        embedding, gains, matrix(dim, dim), matrix(dim, dim), matrix(dim, dim), into_stream(dim),
        gains, matrix(hidden, dim), into_stream(hidden), matrix(hidden, dim), gains[0],
        np.zeros(length * dim // shape.n_heads, np.float32),  # rotations, not read any more
        head,
    ]  # fmt: skip
    header = [dim, hidden, layers, shape.n_heads, shape.n_heads, -VOCAB_SIZE, length]
    model, vocabulary = folder / f"{dim}.bin", folder / "vocabulary.bin"
    with model.open("wb") as file:
        np.array(header, np.int32).tofile(file)
        for tensor in tensors:
            tensor.tofile(file)
    with vocabulary.open("wb") as file:
        np.array([1], np.int32).tofile(file)  # bytes of the longest piece
        for number in range(VOCAB_SIZE):  # score, length, the bytes
            file.write(np.float32(0).tobytes() + np.int32(1).tobytes() + bytes([48 + number]))
    return model, vocabulary
