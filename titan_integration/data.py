"""One global sample order, dealt out to any number of data-parallel ranks.

Documents, each followed by the end-of-text token, make one stream of tokens; the stream is cut into windows of
seq_len + 1 tokens, and each epoch visits the training windows in a permutation drawn from the seed and the epoch.
A global batch is the next global_batch_size windows of that order, however many ranks and microbatches share it, so
the state of the loader is one number, the same on all ranks, and resumes at any degree.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS as TITAN_DATASETS
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.tools.logging import logger

from titan_integration.rank_zero import run_on_rank_zero
from titan_integration.text import DATASETS, load_documents

# The end of the token stream is never trained on, whether or not validation is enabled.
VALIDATION_FRACTION = 0.02


class GlobalOrderLoader(BaseDataLoader):
    """Deals one rank's microbatches of a sample order that all ranks share.

    Microbatch m of a step gives rank r the samples at positions `start + (m * dp_world_size + r) * batch_size` and
    following; so the union over ranks and microbatches is a contiguous piece of the order at any degree.

    Yields `({"input": tokens}, labels)`, both int64 of shape (batch_size, seq_len), labels one token ahead.

    Args:
        tokens: 1-D integer array.
        fingerprint: names the content of `tokens`; a resumed run must find the same.
        seq_len: length of a sample.
        batch_size: samples of a rank's microbatch.
        dp_rank, dp_world_size: this rank's place among the ranks that read different data.
        seed: of the order.

    Raises:
        ValueError: fewer windows than one microbatch of all ranks needs.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        fingerprint: str,
        *,
        seq_len: int,
        batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        seed: int,
    ) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._seed = seed
        self._position = 0
        self._order_of_epoch: tuple[int, torch.Tensor] | None = None
        self._order_name = f"{fingerprint} seq_len={seq_len} seed={seed}"
        self.num_samples = len(tokens) // (seq_len + 1)
        needed = batch_size * dp_world_size
        if self.num_samples < needed:
            raise ValueError(
                f"{len(tokens)} tokens make {self.num_samples} samples of seq_len {seq_len}, and a microbatch of all "
                f"{dp_world_size} data-parallel ranks needs {needed}; give more text or a smaller seq_len or batch"
            )

    @property
    def position(self) -> int:
        """Samples dealt out to all ranks together since the beginning of training."""
        return self._position

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self._seq_len

    def _sample(self, position: int) -> torch.Tensor:
        """The window at a position of the global order, int64 of shape (seq_len + 1,)."""
        epoch, index = divmod(position, self.num_samples)
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
            self._order_of_epoch = epoch, torch.randperm(self.num_samples, generator=generator)
        window = int(self._order_of_epoch[1][index])
        length = self._seq_len + 1
        return torch.from_numpy(self._tokens[window * length : (window + 1) * length].astype(np.int64))

    def _next_microbatch(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        first = self._position + self._dp_rank * self._batch_size
        samples = torch.stack([self._sample(first + i) for i in range(self._batch_size)])
        self._position += self._dp_world_size * self._batch_size
        return {"input": samples[:, :-1].contiguous()}, samples[:, 1:].contiguous()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Microbatches from the current position on, without end."""
        while True:
            yield self._next_microbatch()

    def state_dict(self) -> dict[str, int | str]:
        """The position, and the name of the order that it is a position of. The same on all ranks."""
        return {"position": self._position, "order": self._order_name}

    def load_state_dict(self, state_dict: dict[str, int | str]) -> None:
        """Continues at a saved position.

        Raises:
            ValueError: the position belongs to another text, tokenizer, seq_len or seed.
        """
        if not state_dict:
            return
        if state_dict["order"] != self._order_name:
            raise ValueError(
                f"the checkpoint's data position belongs to the sample order '{state_dict['order']}', this run's order "
                f"is '{self._order_name}' (another text, tokenizer, seq_len or data_seed); restore those, or start "
                "the data from its beginning with --checkpoint.exclude_from_loading dataloader"
            )
        self._position = state_dict["position"]


class ValidationLoader(GlobalOrderLoader):
    """The same samples at every pass, as many as make whole microbatches of all ranks."""

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        self._position = 0
        per_microbatch = self._batch_size * self._dp_world_size
        for _ in range(self.num_samples // per_microbatch):
            yield self._next_microbatch()


def _encode(tokenizer: HuggingFaceTokenizer, documents: list[str]) -> np.ndarray:
    """All documents as one stream of tokens, each followed by the end-of-text token."""
    if tokenizer.eos_id is None:
        raise ValueError(
            f"the tokenizer in {tokenizer.tokenizer_path} names no eos_token in its tokenizer_config.json; "
            "documents are joined with it"
        )
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    encoded = tokenizer.tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return np.concatenate([np.asarray([*document.ids, tokenizer.eos_id], dtype=dtype) for document in encoded])


def _cache_tokens(job_config, tokenizer: HuggingFaceTokenizer, dataset: str, dataset_path: str | None):
    """Encodes a data set once. Runs on rank 0; returns (path of the .npy file, name of its content)."""
    documents = load_documents(dataset, dataset_path)
    content = hashlib.sha256(tokenizer.tokenizer.to_str().encode())
    for document in documents:
        content.update(f"\0{len(document)}\0".encode())
        content.update(document.encode("utf-8", errors="replace"))
    fingerprint = f"{dataset}-{content.hexdigest()[:16]}"
    folder = job_config.training.token_cache_folder or os.path.join(job_config.job.dump_folder, "token_cache")
    path = os.path.join(folder, f"{fingerprint}.npy")
    if not os.path.isfile(path):
        os.makedirs(folder, exist_ok=True)
        unfinished = f"{path}.{os.getpid()}.unfinished"
        tokens = _encode(tokenizer, documents)
        with open(unfinished, "wb") as file:
            np.save(file, tokens)
        os.replace(unfinished, path)
        logger.info(f"Tokens: {len(tokens):,} in {path}")
    return path, fingerprint


def load_tokens(job_config, tokenizer: HuggingFaceTokenizer, dataset: str, dataset_path: str | None):
    """The token stream of one of our data sets, and a name for its content.

    Rank 0 encodes it on first use while the others wait; afterwards it is mapped from
    `training.token_cache_folder`, which all ranks must see.

    Returns:
        (1-D array of uint16 or int32, fingerprint).
    """
    path, fingerprint = run_on_rank_zero(lambda: _cache_tokens(job_config, tokenizer, dataset, dataset_path))
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"{path}, written by rank 0, is not visible here; put training.token_cache_folder on a shared file system"
        )
    return np.load(path, mmap_mode="r"), fingerprint


def _check_workers(section: str, dataset: str, options) -> None:
    for name, off in (("num_workers", 0), ("pin_memory", False)):
        value = getattr(options, name)
        if value != off:
            raise ValueError(
                f"{section}.dataloader.{name} = {value} has no effect on data set {dataset!r}, whose tokens are mapped "
                f"into memory; set it to {str(off).lower()}"
            )


def _split(tokens: np.ndarray) -> int:
    """How many tokens at the beginning are for training; the rest is for validation."""
    return len(tokens) - int(len(tokens) * VALIDATION_FRACTION)


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer, job_config) -> BaseDataLoader:
    """torchtitan's `build_dataloader_fn`: ours for our data sets, torchtitan's own for its text data sets."""
    training = job_config.training
    if training.dataset.lower() in TITAN_DATASETS:
        return build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    if training.dataset not in DATASETS:
        known = ", ".join((*DATASETS, *TITAN_DATASETS))
        raise ValueError(f"training.dataset = {training.dataset!r} is not known; choose one of {known}")
    _check_workers("training", training.dataset, training.dataloader)
    tokens, fingerprint = load_tokens(job_config, tokenizer, training.dataset, training.dataset_path)
    return GlobalOrderLoader(
        tokens[: _split(tokens)],
        fingerprint,
        seq_len=training.seq_len,
        batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        seed=training.data_seed,
    )


def build_validation_dataloader(dp_world_size: int, dp_rank: int, tokenizer, job_config) -> ValidationLoader:
    """The held-out end of one of our data sets, named in `validation.dataset`."""
    validation = job_config.validation
    _check_workers("validation", validation.dataset, validation.dataloader)
    tokens, fingerprint = load_tokens(job_config, tokenizer, validation.dataset, validation.dataset_path)
    return ValidationLoader(
        tokens[_split(tokens) :],
        fingerprint,
        seq_len=validation.seq_len,
        batch_size=validation.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        seed=0,
    )
