"""A byte-level BPE tokenizer, trained on first use on the text it will encode, and kept with the checkpoints."""

from __future__ import annotations

import json
import os
import shutil

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.job_config import Model
from torchtitan.tools.logging import logger

from titan_integration.rank_zero import run_on_rank_zero
from titan_integration.text import DATASETS, load_documents

_EOS = "<eos>"
_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def train_tokenizer(documents: list[str], vocab_size: int, folder: str) -> None:
    """Trains a byte-level BPE tokenizer and saves it as `tokenizer.json` and `tokenizer_config.json` in `folder`.

    The vocabulary has `vocab_size` entries, or fewer where the text has no more pairs to merge. The folder appears
    complete or not at all.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    unfinished = f"{folder}.{os.getpid()}.unfinished"
    os.makedirs(unfinished)
    tokenizer.save(os.path.join(unfinished, "tokenizer.json"))
    with open(os.path.join(unfinished, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"eos_token": _EOS, "add_bos_token": False}, file)
    try:
        os.replace(unfinished, folder)
    except OSError:
        shutil.rmtree(unfinished)
        raise


def checkpoint_tokenizer_folder(job_config) -> str:
    """Where the tokenizer of a run is kept: with its checkpoints, so that a resumed run reads the same tokens."""
    return os.path.join(job_config.job.dump_folder, job_config.checkpoint.folder, "tokenizer")


def _is_tokenizer(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in _FILES)


def _find_or_train(job_config, vocab_size: int) -> str:
    """The folder of the tokenizer to use. Runs on rank 0."""
    folder = checkpoint_tokenizer_folder(job_config)
    if _is_tokenizer(folder):
        return folder
    checkpoint = job_config.checkpoint
    if checkpoint.enable and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf):
        raise ValueError(
            "checkpoint.initial_load_path: those weights were trained with another tokenizer than the one that would "
            "be trained here; name its folder in model.hf_assets_path"
        )
    documents = load_documents(job_config.training.dataset, job_config.training.dataset_path)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    train_tokenizer(documents, vocab_size, folder)
    logger.info(f"Trained a tokenizer of {vocab_size} entries: {folder}")
    return folder


def build_tokenizer(job_config, vocab_size: int) -> HuggingFaceTokenizer:
    """torchtitan's tokenizer of a job; for our data sets trained on first use where the job names none.

    `model.hf_assets_path` names one. Left empty, or at torchtitan's default where that does not exist, the
    tokenizer kept with the checkpoints is used; if there is none yet, rank 0 trains it while the others wait.

    Args:
        job_config: torchtitan's JobConfig.
        vocab_size: of the model flavor.

    Raises:
        FileNotFoundError: `model.hf_assets_path` is set and holds no tokenizer.
        ValueError: the tokenizer has more entries than the model.
    """
    path = job_config.model.hf_assets_path
    unset = not path or (path == Model().hf_assets_path and not os.path.exists(path))
    if unset and job_config.training.dataset in DATASETS:
        path = run_on_rank_zero(lambda: _find_or_train(job_config, vocab_size))
    tokenizer = HuggingFaceTokenizer(path)
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"the tokenizer in {path} has {tokenizer.get_vocab_size()} entries, flavor {job_config.model.flavor!r} of "
            f"{job_config.model.name} only {vocab_size}; use a smaller tokenizer or a flavor with a larger vocab_size"
        )
    return tokenizer
