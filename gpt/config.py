"""Every setting: its name, type, default, rule and help text, in one place.

A run is described by one ``RunConfig`` of four frozen dataclasses. Field names are unique across
them, so a TOML file and the command line use plain names: ``n_heads = 4`` and ``--n_heads 4``.
Precedence: defaults < files, left to right < flags.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from gpt.checks import at_least, at_most, check_type, check_types, fits, kinds_of, nearest
from gpt.errors import UsageError

NormPosition = Literal[
    "pre", "post", "sandwich", "reordered", "deepnorm", "residual_dual", "lns", "mix"
]
Norm = Literal["layer", "rms", "dyt", "none"]
Positions = Literal["learned", "sinusoidal", "rotary"]
Activation = Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu"]
Init = Literal["gpt2", "xavier", "identity", "native"]
Windows = Literal["random", "epochs"]
Schedule = Literal["constant", "cosine", "linear", "wsd"]
Optimizer = Literal["adamw", "muon"]
Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda", "mps"]

LARGEST_FIXED_TABLE = 2**26
"""Numbers in a table of positions that is computed and not learned: a config alone allocates it."""


# The defaults of the model are the block of the teaching texts, four times.
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer."""

    d_model: int = 128
    """Width of the residual stream."""
    n_heads: int = 4
    """Attention heads; each is d_k = d_model / n_heads wide."""
    n_kv_heads: int | None = None
    """Key and value heads, each shared by n_heads / n_kv_heads query heads (default: n_heads)."""
    n_layers: int = 4
    """Blocks in the stack."""
    d_ff: int | None = None
    """Width inside the feed-forward network (default: 4 d_model; swiglu: 8/3 d_model)."""
    context_length: int = 64
    """Characters the model sees at once."""
    norm_position: NormPosition = "pre"
    """pre: x + f(norm(x)), and a final norm; post: norm(x + f(x)); sandwich: x + norm(f(norm(x)));
    reordered (needs qk_norm): x + norm(f(x)); deepnorm (needs init native): norm(alpha x + f(x));
    residual_dual: post, and the sum of all f(x); lns (not with init gpt2): pre with norm(x) divided
    by sqrt(block number); mix: a quarter of the blocks post, then pre."""
    norm: Norm = "layer"
    """LayerNorm, RMSNorm, dyt (gamma tanh(alpha x) + beta) or none at all."""
    positions: Positions = "learned"
    """How a position enters: a learned table, sine waves, or rotated queries and keys."""
    activation: Activation = "gelu_tanh"
    """Feed-forward nonlinearity; gelu is the exact erf form, relu2 is relu squared."""
    attention_bias: bool = False
    """Biases in W_Q, W_K, W_V and W_O."""
    feedforward_bias: bool | None = None
    """Biases in W_in and W_out (default: yes; swiglu has none)."""
    qk_norm: bool = False
    """RMS-normalise each head's queries and keys."""
    tie_embeddings: bool = True
    """The head reuses the token embedding."""
    init: Init = "gpt2"
    """gpt2: deviation 0.02, less into the stream; xavier: sqrt(2 / (fan_in + fan_out)); identity:
    nothing into the stream, so that every block begins by passing it on; native: what the paper of
    norm_position prescribes (pre gpt2, post and residual_dual xavier, deepnorm xavier with its
    beta, the others 0.02 everywhere)."""
    dropout: float = 0.0
    """Probability of dropping an activation while training."""
    attention_dropout: float | None = None
    """Probability of dropping a weight of attention (default: that of dropout)."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("d_model", "n_heads", "n_kv_heads", "n_layers", "d_ff", "context_length"):
            value = getattr(self, name)
            if value is not None:
                at_least(name, value, 1)
        if self.d_model % self.n_heads:
            below = self.d_model // self.n_heads * self.n_heads
            choices = [str(n) for n in (below, below + self.n_heads) if n > 0]
            raise UsageError(
                f"d_model = {self.d_model} is not divisible by n_heads = {self.n_heads}; "
                f"try d_model {' or '.join(choices)}"
            )
        if self.n_heads % (self.n_kv_heads or self.n_heads):
            few = range(1, min(self.n_heads, 1000) + 1)
            divisors = [str(n) for n in few if self.n_heads % n == 0]
            raise UsageError(
                f"n_heads = {self.n_heads} is not divisible by n_kv_heads = {self.n_kv_heads}; "
                f"try n_kv_heads {', '.join(divisors)}"
            )
        if self.positions == "rotary" and self.d_k % 2:
            raise UsageError(
                f"rotary positions turn pairs, and d_model / n_heads = {self.d_k} is odd; "
                "choose a d_model that makes it even"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise UsageError(
                f"sinusoidal positions are sine and cosine pairs, and d_model = {self.d_model} "
                "is odd; choose an even d_model"
            )
        table = self.context_length * self.d_model
        if self.positions != "learned" and table > LARGEST_FIXED_TABLE:
            raise UsageError(
                f"context_length = {self.context_length:,} times d_model = {self.d_model:,} is "
                f"more than {LARGEST_FIXED_TABLE:,}, the limit for {self.positions} positions; "
                "choose a shorter context"
            )
        if self.activation == "swiglu" and self.feedforward_bias:
            raise UsageError("swiglu has no biases; drop feedforward_bias")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= (getattr(self, name) or 0) < 1:
                raise UsageError(f"{name} = {getattr(self, name)} is not in [0, 1); try 0.1")

    @property
    def d_k(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    def resolved(self) -> "ModelConfig":
        """The same model with every derived default written out."""
        gated = self.activation == "swiglu"
        return dataclasses.replace(
            self,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            d_ff=self.d_ff or (int(8 / 3 * self.d_model) if gated else 4 * self.d_model),
            feedforward_bias=not gated if self.feedforward_bias is None else self.feedforward_bias,
            attention_dropout=(
                self.dropout if self.attention_dropout is None else self.attention_dropout
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text to learn."""

    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]")] = ""
    """Text file to learn, or - for standard input (default: the Shakespeare of data/)."""
    val_fraction: float = 0.1
    """The last part of the text, kept for validation; 0 turns validation off."""
    encoding: str = "utf-8"
    """Encoding of the file."""
    keep_newlines: bool = False
    """Leave CR and CR LF as they are instead of turning them into LF."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.val_fraction < 1:
            raise UsageError(f"val_fraction = {self.val_fraction} is not in [0, 1); try 0.1")
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"text = {self.text!r} is not a Unicode name, so no config can hold it; rename the "
                "file, or give it on standard input: - < FILE"
            ) from error


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the weights are learned. A step is one optimiser update, everywhere."""

    steps: int = 2000
    """Optimiser updates."""
    batch_size: int = 12
    """Windows of context_length characters in one forward pass."""
    windows: Windows = "random"
    """random: windows begin anywhere, drawn with replacement; epochs: without, so that all of the
    text is read before any of it comes again."""
    grad_accumulation: int = 1
    """Forward passes in one update."""
    optimizer: Optimizer = "adamw"
    """adamw, or muon for the matrices of the blocks with adamw for the rest."""
    learning_rate: float = 1e-3
    """Peak learning rate, of both optimisers."""
    warmup_steps: int | None = None
    """Updates of linear warm-up (default: a tenth of the steps, at most 100)."""
    schedule: Schedule = "cosine"
    """After the warm-up; wsd stays at the peak, then falls in a line over decay_fraction."""
    decay_fraction: float = 0.2
    """Last part of the steps in which wsd decays."""
    final_lr_fraction: float = 0.1
    """The schedule ends at this fraction of the peak (constant: at the peak)."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings; never of biases and gains."""
    beta1: float = 0.9
    """AdamW: memory of the gradient."""
    beta2: float = 0.99
    """AdamW: memory of its square."""
    muon_momentum: float = 0.95
    """Muon: memory of the gradient."""
    grad_clip: float = 1.0
    """Largest total gradient norm; 0 turns clipping off."""
    confidence_penalty: float = 0.0
    """Training minimises loss - confidence_penalty * entropy of the predictions, so that a model
    which reads a text often does not grow too sure; losses are told without it."""
    eval_every: int = 250
    """Steps between evaluations; each also saves a checkpoint and writes a sample."""
    log_every: int = 10
    """Steps between points on the curves (at most 1000 points a run)."""
    sample_chars: int = 200
    """Length of the sample after each evaluation; 0 for none."""
    seed: int = 1337
    """Seed of weights, batches, dropout and samples, each a stream of its own."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch_size", "grad_accumulation", "eval_every", "log_every"):
            at_least(name, getattr(self, name), 1)
        for name in ("sample_chars", "weight_decay", "grad_clip", "confidence_penalty", "seed"):
            at_least(name, getattr(self, name), 0)
        at_least("warmup_steps", self.warmup_steps or 0, 0)
        at_most("confidence_penalty", self.confidence_penalty, 100.0)
        for name in ("learning_rate", "weight_decay", "grad_clip"):
            at_most(name, getattr(self, name), 1e30)  # what float32 can still be multiplied with
        if self.learning_rate <= 0:
            raise UsageError(f"learning_rate = {self.learning_rate} is not above 0; try 0.001")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)} is not in [0, 1); try 0.95")
        for name in ("decay_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} = {getattr(self, name)} is not in [0, 1]; try 0.1")

    def resolved(self) -> "TrainingConfig":
        """The same training with every derived default written out."""
        if self.warmup_steps is not None:
            return self
        return dataclasses.replace(self, warmup_steps=min(100, self.steps // 10))


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Where it is computed."""

    device: Device = "auto"
    """auto takes cuda, then mps, then cpu."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""
    native: bool = True
    """On a CPU, use kernels compiled with the system's C compiler, where there is one."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least("threads", self.threads, 0)
        at_most("threads", self.threads, 1024)


@dataclass(frozen=True, kw_only=True)
class MachineConfig(ComputeConfig):
    """Where and how precisely it is computed."""

    dtype: Dtype = "auto"
    """Of the matrix products; auto is bfloat16 where the device computes it fast, else float32."""
    compile: bool = False
    """Compile with torch.compile, instead of the C kernels; pays off in long runs on a GPU."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, entirely."""

    text: TextConfig = field(default_factory=TextConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def with_changes(self, changes: dict[str, Any]) -> "RunConfig":
        """The same run with the named fields changed: ``{"norm_position": "post"}``.

        Raises UsageError for an unknown name, a wrong type or a broken rule.
        """
        return from_flat({**to_flat(self), **coerced(changes, "changes")})

    def resolved(self) -> "RunConfig":
        """The same run with every derived default written out."""
        return dataclasses.replace(
            self, model=self.model.resolved(), training=self.training.resolved()
        )


def sections() -> dict[str, type]:
    """The dataclasses that make up a run, by the name of their field."""
    return {f.name: typing.cast(type, f.type) for f in dataclasses.fields(RunConfig)}


def _home_of_fields() -> dict[str, tuple[str, Any]]:
    """Field name -> (section, declared type)."""
    return {
        name: (section, hint)
        for section, cls in sections().items()
        for name, hint in typing.get_type_hints(cls).items()
    }


def to_flat(config: RunConfig) -> dict[str, Any]:
    """All fields of all sections under their plain names; None for derived ones."""
    return {
        f.name: getattr(getattr(config, section), f.name)
        for section, cls in sections().items()
        for f in dataclasses.fields(cls)
    }


def from_flat(values: dict[str, Any], *, checked: bool = True) -> RunConfig:
    """The inverse of ``to_flat``; missing fields take their defaults.

    ``checked=False`` skips the rules between fields: what files say may only become consistent
    once the flags are added.
    """
    home = _home_of_fields()
    grouped: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in values.items():
        grouped[home[name][0]][name] = value
    built = {}
    for section, cls in sections().items():
        if checked:
            built[section] = cls(**grouped[section])
        else:
            built[section] = object.__new__(cls)
            defaults = {f.name: f.default for f in dataclasses.fields(cls)}
            built[section].__dict__.update(defaults | grouped[section])
    return RunConfig(**built)


def changed(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The fields in which two resolved configs differ: name -> (before, after)."""
    old, new = to_flat(before.resolved()), to_flat(after.resolved())
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


def coerced(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The values of known fields, each of its declared type; 1e3 is 1000 where an int is declared.

    Raises UsageError that names the source. Rules between fields are checked later, when all
    files and flags are together.
    """
    home = _home_of_fields()
    typed = {}
    for name, value in values.items():
        if isinstance(value, dict):
            raise UsageError(f"{source}: [{name}] is a section; settings stand without sections")
        if name not in home:
            raise UsageError(f"{source}: unknown field {name!r}.{nearest(name, home)}")
        hint = home[name][1]
        kinds = kinds_of(hint)
        if int in kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        if float in kinds and type(value) is int and fits(value):
            value = float(value)
        check_type(f"{source}: {name}", value, hint)
        typed[name] = value
    return typed
