"""What a run reads: bytes of text files, or a Megatron .bin/.idx dataset, cut into sequences and sharded over ranks.

Which sequence goes where is a pure function of (seed, iteration, micro-batch, data-parallel rank): any rank can go on
from any iteration without reading what came before, and two runs with one seed see the same batches.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.config import DataConfig

if TYPE_CHECKING:
    import torch

# Installed packages and the standard library's own tests are left out of the default corpus: it should be the same text
# in every virtual environment of one Python version.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# The first bytes of every .idx file that Megatron writes.
_INDEX_MAGIC = b"MMIDIDX\x00\x00"


class Sequences(Protocol):
    """A corpus as numbered sequences of sequence_length + 1 tokens (inputs and, shifted by one, labels)."""

    description: str

    def __len__(self) -> int:
        """Number of sequences."""

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of one sequence: int64 [sequence_length + 1]."""


class ByteSequences:
    """Bytes as tokens, cut into sequences that share one token with the next.

    Args:
        corpus: the bytes, uint8 [number of bytes].
        sequence_length: tokens of one sequence.
        description: what was read, for the user.
    """

    def __init__(self, corpus: np.ndarray, sequence_length: int, description: str):
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.description = description

    def __len__(self) -> int:
        return (len(self.corpus) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.sequence_length
        return self.corpus[start : start + self.sequence_length + 1].astype(np.int64)


class MegatronSequences:
    """A Megatron .bin/.idx pair, its sequences joined end to end and cut anew.

    Megatron's IndexedDataset reads it (memory-mapped). Its GPTDataset was considered: it writes index caches beside the
    data and shuffles by itself, so that one seed would no longer fix the order for both kinds of corpus.

    Args:
        prefix: path without .bin and .idx.
        sequence_length: tokens of one sequence.
    """

    def __init__(self, prefix: str, sequence_length: int):
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self.dataset = IndexedDataset(prefix)
        self.sequence_length = sequence_length
        self.ends = np.cumsum(self.dataset.sequence_lengths, dtype=np.int64)
        self.description = f"{prefix} ({self.number_of_tokens} tokens)"

    @property
    def number_of_tokens(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return (self.number_of_tokens - 1) // self.sequence_length

    def __getitem__(self, index: int) -> np.ndarray:
        position, wanted = index * self.sequence_length, self.sequence_length + 1
        document = int(np.searchsorted(self.ends, position, side="right"))
        parts = []
        while wanted:
            length = int(self.dataset.sequence_lengths[document])
            offset = position - (int(self.ends[document]) - length)
            part = self.dataset.get(document, offset=offset, length=min(wanted, length - offset))
            parts.append(part)
            position, wanted, document = position + len(part), wanted - len(part), document + 1
        return np.concatenate(parts).astype(np.int64)


def _text_files(config: DataConfig) -> list[Path]:
    if config.text is None:
        root = Path(sysconfig.get_path("stdlib"))
        return sorted(
            path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts[:-1])
        )
    files: list[Path] = []
    for name in [config.text] if isinstance(config.text, str) else config.text:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(file for file in path.rglob(config.pattern) if file.is_file())
            if not found:
                fix = "name another folder or change data.pattern"
                raise ConfigError.of("data.text", name, f"no file in it matches {config.pattern!r}", fix)
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError.of("data.text", name, "no such file or folder", "name existing files or folders")
    return files


def _read_bytes(config: DataConfig) -> ByteSequences:
    files = _text_files(config)
    parts: list[bytes] = []
    room = config.max_bytes
    for path in files:
        try:
            with path.open("rb") as stream:
                parts.append(stream.read(room))
        except OSError as error:
            fix = "make it readable or leave it out"
            raise ConfigError.of("data.text", str(path), f"cannot be read ({error.strerror})", fix) from error
        room -= len(parts[-1])
        if room <= 0:
            break
    corpus = np.frombuffer(b"".join(parts), dtype=np.uint8)
    source = "the Python standard library's sources" if config.text is None else str(config.text)
    if not len(corpus):
        raise ConfigError.of("data.text", config.text, "holds no bytes", "name files with text in them")
    return ByteSequences(corpus, config.sequence_length, f"{source} ({len(corpus):,} bytes of {len(parts)} files)")


def load_sequences(config: DataConfig, *, vocab_size: int) -> Sequences:
    """Open the corpus that the configuration names.

    Args:
        config: the section `data`.
        vocab_size: the model's number of tokens.
    Raises:
        ConfigError: missing, empty or unreadable data, a sequence longer than the data, a vocabulary below 256.
    """
    sequences: Sequences
    if config.megatron_dataset is not None:
        prefix = config.megatron_dataset
        for suffix in (".bin", ".idx"):
            if not Path(prefix + suffix).is_file():
                fix = "name the path of the pair without .bin and .idx"
                raise ConfigError.of("data.megatron_dataset", prefix, f"no file {prefix}{suffix}", fix)
        # Looked at here, since a half-built IndexedDataset complains once more when it is dropped.
        with Path(prefix + ".idx").open("rb") as stream:
            if stream.read(len(_INDEX_MAGIC)) != _INDEX_MAGIC:
                fix = "write the pair again with Megatron's preprocessing"
                raise ConfigError.of("data.megatron_dataset", prefix, f"{prefix}.idx is no Megatron index", fix)
        sequences = MegatronSequences(prefix, config.sequence_length)
        tokens = sequences.number_of_tokens
    else:
        if vocab_size < 256:
            raise ConfigError.of("model.vocab_size", vocab_size, "bytes need 256 tokens", "set it to 256 or more")
        sequences = _read_bytes(config)
        tokens = len(sequences.corpus)
    if tokens <= config.sequence_length:
        fix = f"set it to {tokens - 1} or less, or name more data" if tokens > 1 else "name more data"
        reason = f"the data holds only {tokens} tokens, one more than sequence_length are needed"
        raise ConfigError.of("data.sequence_length", config.sequence_length, reason, fix)
    return sequences


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank, every tensor [micro_batch_size, sequence_length]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor


class BatchSampler:
    """Says which sequences make a micro-batch, and builds it.

    Args:
        sequences: the corpus.
        config: the section `data`.
        rank: this rank's number among the data-parallel ranks.
        ranks: how many data-parallel ranks there are.
        vocab_size: the model's number of tokens, to catch a dataset of another tokenizer.
    """

    def __init__(self, sequences: Sequences, config: DataConfig, *, rank: int, ranks: int, vocab_size: int):
        self.sequences = sequences
        self.config = config
        self.rank = rank
        self.ranks = ranks
        self.vocab_size = vocab_size
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def indices(self, iteration: int, microbatch: int) -> list[int]:
        """Numbers of this rank's sequences in one micro-batch."""
        size = self.config.micro_batch_size
        first = ((iteration * self.config.num_microbatches + microbatch) * self.ranks + self.rank) * size
        return [self._shuffled(first + offset) for offset in range(size)]

    def _shuffled(self, number: int) -> int:
        epoch, place = divmod(number, len(self.sequences))
        if epoch != self._epoch:
            generator = np.random.default_rng((self.config.seed, epoch))
            self._epoch, self._order = epoch, generator.permutation(len(self.sequences))
        return int(self._order[place])

    def batch(self, iteration: int, microbatch: int, device: torch.device) -> Batch:
        """Build one micro-batch on the device.

        Raises:
            ConfigError: the dataset holds a token that the model has no row for.
        """
        import torch

        block = np.stack([self.sequences[index] for index in self.indices(iteration, microbatch)])
        if block.max() >= self.vocab_size:
            reason = f"the dataset holds token {block.max()}"
            raise ConfigError.of("model.vocab_size", self.vocab_size, reason, "set it to the tokenizer's size")
        tokens = torch.from_numpy(block).to(device)
        length = self.config.sequence_length
        return Batch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            loss_mask=torch.ones(block.shape[0], length, device=device),
            position_ids=torch.arange(length, device=device).expand(block.shape[0], -1).contiguous(),
        )

    def iterator(self, iteration: int, device: torch.device) -> Iterator[Batch]:
        """The micro-batches of one iteration, in order."""
        for microbatch in range(self.config.num_microbatches):
            yield self.batch(iteration, microbatch, device)
