"""What a run reads: bytes and Megatron datasets, how they are cut and sharded, and what is refused."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from combined_1f1b.errors import ConfigError
from combined_1f1b.training.config import DataConfig
from combined_1f1b.training.data import BatchSampler, load_sequences

pytestmark = pytest.mark.world_size(1)

CPU = torch.device("cpu")


def config_for(**changes) -> DataConfig:
    return dataclasses.replace(DataConfig(sequence_length=4, micro_batch_size=2, num_microbatches=2), **changes)


def sequences_of(**changes):
    return load_sequences(config_for(**changes), vocab_size=256)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """200 bytes that count up."""
    path = tmp_path / "corpus.bin"
    path.write_bytes(bytes(range(200)))
    return path


def write_megatron_dataset(prefix: Path, documents: list[list[int]]) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_bytes_are_cut_into_sequences_that_share_a_token(corpus):
    sequences = sequences_of(text=str(corpus))
    assert len(sequences) == 49  # (200 - 1) // 4
    assert sequences[0].tolist() == [0, 1, 2, 3, 4]
    assert sequences[1].tolist() == [4, 5, 6, 7, 8]
    assert sequences[48].tolist() == [192, 193, 194, 195, 196]
    assert sequences[0].dtype == np.int64


def test_folders_and_files_are_joined_in_order(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "b.txt").write_text("bbbb")
    (tmp_path / "folder" / "inner" / "a.txt").write_text("aaaa")
    (tmp_path / "folder" / "c.log").write_text("cccc")
    (tmp_path / "last.txt").write_text("zzzz")
    sequences = sequences_of(text=[str(tmp_path / "folder"), str(tmp_path / "last.txt")], pattern="*.txt")
    assert sequences.corpus.tobytes() == b"bbbbaaaazzzz"


def test_reading_stops_at_the_limit(corpus):
    assert len(sequences_of(text=[str(corpus), str(corpus)], max_bytes=250).corpus) == 250


def test_the_default_is_the_standard_library(tmp_path):
    sequences = sequences_of(max_bytes=50_000)
    assert len(sequences.corpus) == 50_000
    assert "standard library" in sequences.description
    first = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))[0]
    assert first.read_bytes()[:20] in sequences.corpus.tobytes()


def test_labels_are_the_next_tokens(corpus):
    config = config_for(text=str(corpus))
    sampler = BatchSampler(load_sequences(config, vocab_size=256), config, rank=0, ranks=1, vocab_size=256)
    batch = sampler.batch(0, 0, CPU)
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == batch.position_ids.shape == (2, 4)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2


def test_an_epoch_visits_every_sequence_once_over_all_ranks(corpus):
    config = config_for(text=str(corpus), micro_batch_size=1, num_microbatches=7)
    sequences = load_sequences(config, vocab_size=256)
    samplers = [BatchSampler(sequences, config, rank=rank, ranks=7, vocab_size=256) for rank in range(7)]
    seen = [index for sampler in samplers for microbatch in range(7) for index in sampler.indices(0, microbatch)]
    assert sorted(seen) == list(range(49))
    next_epoch = [index for sampler in samplers for microbatch in range(7) for index in sampler.indices(1, microbatch)]
    assert sorted(next_epoch) == list(range(49))
    assert next_epoch != seen


def test_batches_depend_on_the_seed_and_the_place_only(corpus):
    config = config_for(text=str(corpus))
    sequences = load_sequences(config, vocab_size=256)

    def sampler(**changes):
        return BatchSampler(sequences, dataclasses.replace(config, **changes), rank=0, ranks=2, vocab_size=256)

    in_order = sampler()
    for iteration in range(5):
        list(in_order.iterator(iteration, CPU))
    assert torch.equal(in_order.batch(9, 1, CPU).tokens, sampler().batch(9, 1, CPU).tokens)
    assert not torch.equal(sampler().batch(0, 0, CPU).tokens, sampler(seed=2).batch(0, 0, CPU).tokens)


def test_an_iteration_has_its_micro_batches(corpus):
    config = config_for(text=str(corpus), num_microbatches=3)
    sampler = BatchSampler(load_sequences(config, vocab_size=256), config, rank=0, ranks=1, vocab_size=256)
    assert len(list(sampler.iterator(0, CPU))) == 3


def test_a_megatron_dataset_is_joined_over_documents(tmp_path):
    prefix = write_megatron_dataset(tmp_path / "set", [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9], [10, 11]])
    sequences = sequences_of(megatron_dataset=prefix)
    assert len(sequences) == 2
    assert sequences[0].tolist() == [0, 1, 2, 3, 4]
    assert sequences[1].tolist() == [4, 5, 6, 7, 8]
    assert "12 tokens" in sequences.description


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    prefix = write_megatron_dataset(tmp_path / "set", [[0, 1, 2, 3, 400]])
    config = config_for(megatron_dataset=prefix)
    sampler = BatchSampler(load_sequences(config, vocab_size=300), config, rank=0, ranks=1, vocab_size=300)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=300: the dataset holds token 400"):
        sampler.batch(0, 0, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "nowhere"}, "data.text='nowhere': no such file or folder"),
        ({"text": "{folder}/empty"}, "holds no bytes"),
        ({"text": "{folder}", "pattern": "*.none"}, "no file in it matches"),
        ({"text": "{folder}/short"}, "data.sequence_length=4: the data holds only 4 tokens.*set it to 3 or less"),
        ({"megatron_dataset": "{folder}/none"}, "no file .*none.bin"),
        ({"megatron_dataset": "{folder}/broken"}, "is no Megatron index"),
    ],
)
def test_data_that_cannot_work_is_refused(tmp_path, changes, message):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"abcd")
    (tmp_path / "broken.bin").write_bytes(b"abcd")
    (tmp_path / "broken.idx").write_bytes(b"no index at all")
    changes = {key: value.replace("{folder}", str(tmp_path)) for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        sequences_of(**changes)


def test_bytes_need_a_row_each():
    with pytest.raises(ConfigError, match=r"model\.vocab_size=128"):
        load_sequences(config_for(), vocab_size=128)
