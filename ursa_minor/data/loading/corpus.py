"""Open the data of a run, wait for shards that are being prepared, and yield batches."""

import logging
import math
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.base.stopping import StopRequest
from ursa_minor.base.wording import pluralize
from ursa_minor.data.loading import batches as window_batches
from ursa_minor.data.loading import order as window_order
from ursa_minor.data.loading import windows
from ursa_minor.data.loading.background import DataWait, Preparation, reader_command
from ursa_minor.data.loading.epochs import note_on_epochs
from ursa_minor.data.loading.token_folder import (
    check_document_mask,
    check_stated_tokenizer,
    warn_of_wrong_ids,
)
from ursa_minor.data.sources.find import FoundSource, find_source
from ursa_minor.data.tokens import documents, pretrained_tokenizer, shards
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.document_counts import describe_missing_text
from ursa_minor.data.tokens.manifest import Manifest
from ursa_minor.recipe import keys, loading
from ursa_minor.recipe.batching import Plan, make_plan, steps_of_epochs

log = logging.getLogger(__name__)

# With data_device = auto, training ids (4 bytes each) up to this size are kept on the GPU.
RESIDENT_BYTES = 2**30
# Prompts of samples, if the recipe has none.
MAX_PROMPTS = 3
PROMPT_TOKENS = 8
PROMPT_WORDS = 4
PROMPT_WINDOWS = 100  # number of validation windows that are searched for prompts
# A note is logged if the bytes per token of validation and training text differ by this factor.
MAX_BYTES_RATIO = 4 / 3


class OpenedSource:
    """One source of a run: the windows of its folder of shards.

    ``train`` grows with ``refresh`` until the source is complete.

    Args:
        weight: share of the training windows, relative to the weights of the other sources.
        folder: the folder of shards.
        manifest: the manifest of the folder.
        model: the model section of the recipe.
        consumed: whether shards that were trained on may have been deleted.
        separator: the end-of-text id. It is inserted before each document of another program's
            files if they contain no separators but an index of the documents.

    Attributes:
        num_inserted: number of separators that are inserted into the train split.

    Raises:
        BadInput: the shards differ from the manifest, or a split has no complete window.
    """

    def __init__(
        self,
        weight: float,
        folder: Path,
        manifest: Manifest,
        model: keys.Model,
        *,
        consumed: bool,
        separator: int,
    ):
        self.weight = weight
        self.folder = folder
        self.manifest = manifest
        self._model = model
        self._consumed = consumed
        self._separator = separator
        self._has_separators = True  # whether the files that were opened contain separators
        self.num_inserted = 0
        # The largest id of the train split, or None if this project wrote the shards.
        self.largest_id: int | None = None
        self.validation = self.open("validation")
        self.train = self.open("train")

    def open(self, split: str) -> windows.Windows:
        """Return the windows of a split's shards."""
        assert self._model.vocab_size is not None  # pretrained.complete sets it for init_from
        opened = windows.Windows(self._model.sequence_length, self._model.vocab_size)
        self._append(opened, split, 0)
        return opened

    def refresh(self) -> None:
        """Open the training shards that were added since the last call."""
        if not self.manifest.complete:
            num_opened = len(self.manifest.splits["train"])
            self.manifest = manifests.describe_folder(self.folder)
            self._append(self.train, "train", num_opened)

    def _append(self, opened: windows.Windows, split: str, num_opened: int) -> None:
        """Open the shards of a split, except for the first ``num_opened``."""
        new_shards = self.manifest.splits[split][num_opened:]
        manifests.check_unchanged(self.folder, new_shards)
        for shard in new_shards:
            path = self.folder / shard.file
            if self._consumed and not path.exists():
                opened.append(path, self._tokens_of_deleted(shard), None, 0)
                continue
            ids: np.ndarray | documents.SeparatedIds
            ids, offset = shards.open_ids(path, shard.tokens)
            if self.manifest.tokenizer is None:
                ids = self._with_separators(path, ids, split)
            opened.append(path, len(ids), ids, offset)
        if self.manifest.tokenizer is None and os.environ.get("RANK", "0") == "0":
            # Shards of another program. Our own shards are checked when they are written.
            largest_id = opened.check_ids()
            if split == "train":
                self.largest_id = largest_id
        if not opened.num_windows and (self.manifest.complete or split != "train"):
            length = self._model.sequence_length
            raise BadInput(
                f"{self.folder}: no shard of the {split} split is long enough for a training "
                f"window, which needs sequence_length + 1 = {length + 1} tokens. The split has "
                f"{opened.num_tokens} tokens in total. Use a smaller --sequence_length, or add text"
            )

    def _with_separators(
        self, path: Path, ids: np.ndarray, split: str
    ) -> np.ndarray | documents.SeparatedIds:
        """Return the ids of another program's file, with separators if it has none."""
        with_separators = documents.with_separators(path, ids, self._separator)
        if isinstance(with_separators, documents.SeparatedIds):
            self._has_separators = False
            if split == "train":
                self.num_inserted += with_separators.num_documents
        return with_separators

    def _tokens_of_deleted(self, shard: shards.Shard) -> int:
        """Return the number of ids that a deleted train shard had, with inserted separators.

        The validation shards, which are opened first, show whether separators are inserted.
        """
        if self._has_separators or shard.documents is None:
            return shard.tokens
        return shard.tokens + shard.documents


class Corpus:
    """The data of a run. At the end of its ``with`` block, the processes that prepare data end.

    Sources that are not complete are prepared in the background. The constructor waits until each
    has its validation split and its first training shard.

    Args:
        recipe: the complete recipe.
        argv: the flags that make prepare_data.py read the same recipe.

    Attributes:
        sources: the opened sources.
        test: the windows of the test split, if the only source has one, else None.
        tokenizer: the tokenizer of all shards.
        bytes_per_token: (vocab_size,) int64, number of bytes of text of each id.
        data_wait: the processes in the background.
        is_consumed: whether shards are deleted when they have been trained on.
    """

    def __init__(self, recipe: keys.Recipe, argv: Sequence[str]):
        self._recipe = recipe
        self._weights = tuple(source.weight for source in recipe.data.resolved_sources)
        self.is_consumed = recipe.data.stream_keep == "consumed"
        _allow_open_files()

        found_sources: list[FoundSource | None] = []
        folders: list[Path] = []
        for source in recipe.data.resolved_sources:
            found_source = None if source.is_token_folder else find_source(source)
            found_sources.append(found_source)
            folders.append(found_source.folder if found_source else Path(str(source.data_dir)))
        if self.is_consumed:
            self._check_single_epoch(found_sources)

        readers = [_start_reader(number, found, argv) for number, found in enumerate(found_sources)]
        self.data_wait = DataWait(readers, self.refresh)
        started = [found.folder / shards.MANIFEST for found in found_sources if found]
        self.data_wait.until(
            lambda: all(path.is_file() for path in started),
            "the reader prepares the validation split, then the first shard",
        )

        source_manifests = [manifests.describe_folder(folder) for folder in folders]
        self.tokenizer = open_tokenizer(recipe, dict(zip(folders, source_manifests, strict=True)))
        self.bytes_per_token = _bytes_of_ids(self.tokenizer, recipe.model)
        if recipe.loss.document_mask:
            for folder, manifest in zip(folders, source_manifests, strict=True):
                check_document_mask(folder, manifest, self.tokenizer.eos_token_id)
        self.sources = [
            OpenedSource(
                weight,
                folder,
                manifest,
                recipe.model,
                consumed=self.is_consumed,
                separator=self.tokenizer.eos_token_id,
            )
            for weight, folder, manifest in zip(
                self._weights, folders, source_manifests, strict=True
            )
        ]
        for opened in self.sources:
            if opened.largest_id is not None:
                warn_of_wrong_ids(opened.folder, opened.train, opened.largest_id, self.tokenizer)
        has_test = len(source_manifests) == 1 and "test" in source_manifests[0].splits
        self.test = self.sources[0].open("test") if has_test else None

    def __enter__(self) -> "Corpus":
        return self

    def __exit__(self, *_) -> None:
        self.data_wait.close()

    @property
    def complete(self) -> bool:
        """Whether all sources are completely prepared."""
        return all(source.manifest.complete for source in self.sources)

    @property
    def stays_complete(self) -> bool:
        """Whether the training split is complete, and stays so (it is not consumed)."""
        return self.complete and not self.is_consumed

    @property
    def epoch_windows(self) -> list[int | None]:
        """Number of windows in an epoch of each source, or None while it is being prepared."""
        return [
            source.train.num_windows if source.manifest.complete else None
            for source in self.sources
        ]

    def refresh(self) -> bool:
        """Open the new training shards. Return ``complete``."""
        for source in self.sources:
            source.refresh()
        return self.complete

    def wait_until_complete(self, stop: StopRequest) -> None:
        """Wait until all data is prepared in every process, or one of them is asked to stop.

        Every process calls this.

        Raises:
            BadInput: the data could not be prepared.
            TrainingStopped: the preparation has stopped, in this or in another process.
        """
        if not self.complete:
            log.info(
                "data     training starts when all data is prepared, because num_train_epochs "
                "states the length of the run"
            )
        self.data_wait.wait_until_complete(lambda: stop.requested, stop.any_of)

    def complete_recipe(self, *, logs_advice: bool) -> keys.Recipe:
        """Return the recipe with the ``max_steps`` that follow from ``num_train_epochs``.

        Args:
            logs_advice: whether to log settings that are valid but rarely intended.

        Raises:
            BadInput: the schedule does not fit into the number of steps.
        """
        assert self.complete  # wait_until_complete() has returned
        epochs = self._recipe.schedule.num_train_epochs
        assert epochs is not None
        max_steps = steps_of_epochs(epochs, self.num_train_windows, self._recipe)
        self._recipe = loading.with_max_steps(self._recipe, max_steps, logs_advice=logs_advice)
        return self._recipe

    @property
    def num_train_windows(self) -> int:
        """Number of training windows that are prepared, of all sources together."""
        return sum(source.train.num_windows for source in self.sources)

    def order(self, plan: Plan) -> window_order.TrainOrder:
        """Return the order of the training windows."""
        return window_order.TrainOrder(
            weights=self._weights,
            sequence_length=self._recipe.model.sequence_length,
            sequences_per_step=plan.sequences_per_step,
            micro_batch_size=plan.per_device_train_batch_size,
            num_processes=plan.num_processes,
            seed=self._recipe.data.data_seed,
            block_tokens=self._recipe.data.shuffle_block_tokens,
        )

    def loader(self, plan: Plan, device: torch.device, rank: int) -> "TrainLoader":
        """Return the training batches of the process ``rank``."""
        return TrainLoader(self, plan, device, rank)

    def train_batches(
        self, device: torch.device
    ) -> window_batches.Mapped | window_batches.Resident:
        """Return an object that reads training windows from memory maps or the device's memory.

        Raises:
            BadInput: data_device = cuda on another device, or before the data are complete.
        """
        data_device = self._recipe.data.data_device
        train = [source.train for source in self.sources]
        if data_device == "cuda" and device.type != "cuda":
            raise BadInput(
                f"data_device = cuda: this run uses the device {device}, not a GPU. "
                f"Use --data_device auto"
            )
        if data_device == "cuda" and not self.complete:
            raise BadInput(
                "data_device = cuda: the data must be completely prepared before the run starts. "
                "Run prepare_data.py first, or use --data_device auto"
            )
        num_bytes = 4 * sum(split.num_tokens for split in train)
        fits = self.complete and num_bytes <= RESIDENT_BYTES
        if data_device == "cuda" or (data_device == "auto" and device.type == "cuda" and fits):
            return window_batches.Resident(train, device)
        return window_batches.Mapped(train, device)

    def eval_batches(
        self,
        split: str,
        *,
        max_tokens: int,
        batch_size: int,
        device: torch.device,
        rank: int,
        num_processes: int,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this process's share of a split: inputs_BT and targets_BT, (B, T) int64.

        Args:
            split: validation or test.
            max_tokens: approximate number of tokens, spread evenly over the split, or 0 for all.
            batch_size: number of sequences in a batch. The last batch may have fewer.
            device: device that the batches are copied to.
            rank: rank of this process.
            num_processes: number of processes that share the split.
        """
        split_windows = [source.validation for source in self.sources]
        if split == "test":
            assert self.test is not None  # the caller has checked it
            split_windows = [self.test]
        max_windows = 0
        if max_tokens:
            max_windows = max(1, max_tokens // self._recipe.model.sequence_length)
        num_windows = [windows_of_source.num_windows for windows_of_source in split_windows]
        draws = window_order.eval_draws(num_windows, self._weights, max_windows=max_windows)
        batches = window_batches.Mapped(split_windows, device)
        return window_batches.eval_batches(
            batches, draws, batch_size=batch_size, rank=rank, num_processes=num_processes
        )

    def identities(self) -> list[dict]:
        """Return the identity of each source, by which a resumed run recognizes its data."""
        return [
            {"weight": source.weight} | manifests.train_identity(source.manifest)
            for source in self.sources
        ]

    def check_same_data(self, checkpoint: Path, before: list[dict]) -> None:
        """Check that the training data are those of a checkpoint, or have only grown since.

        While the data are being prepared, wait until there are enough shards for the comparison.

        Args:
            checkpoint: path of the checkpoint, for messages.
            before: ``identities()`` of the run that wrote the checkpoint.

        Raises:
            BadInput: the weights of the sources or the shards differ.
        """
        weights = [source.weight for source in self.sources]
        if [state["weight"] for state in before] != weights:
            raise BadInput(
                f"{checkpoint} was trained with different weights of the sources. Restore these "
                f"weights, or start a new run with a different --run_name"
            )

        pairs = list(zip(before, self.sources, strict=True))

        def are_shards_prepared() -> bool:
            for state, source in pairs:
                needed = state["shards"]
                if state["complete"]:
                    # A complete split must not have grown. One more shard shows that it has, and
                    # the end of the preparation shows that it has not.
                    needed += 1
                num_shards = len(source.manifest.splits["train"])
                if not source.manifest.complete and num_shards < needed:
                    # Look for new shards. Only complete data are certain to be enough. Otherwise
                    # the shards are counted again at the next call.
                    return self.refresh()
            return True

        self.data_wait.until(are_shards_prepared, "the shards that the checkpoint was trained on")
        for state, source in pairs:
            manifests.check_same_train_split(checkpoint, state, source.manifest)

    def describe(self, plan: Plan) -> Iterator[str]:
        """Yield one line for each source of the run, and notes about its text and its disk."""
        order = self.order(plan)
        num_read = order.read_before(self._recipe.schedule.total_steps)
        if self._recipe.schedule.num_train_epochs is not None:
            yield self._describe_length(plan, num_read)
        for source, windows_read, share in zip(self.sources, num_read, order.shares(), strict=True):
            # The folder may have grown since its shards were opened.
            manifest = manifests.describe_folder(source.folder)
            tokens_read = windows_read * source.train.sequence_length
            # The opened shards may have more tokens, because of inserted separators.
            num_tokens = max(source.train.num_tokens, shards.count_tokens(manifest.splits["train"]))
            yield _describe_source(source.folder, manifest, num_tokens, tokens_read, share)
            if source.num_inserted:
                yield (
                    f"note     the documents in {source.folder} are not separated. The run inserts "
                    f"{self.tokenizer.eos_token} before each of the {source.num_inserted:,} train "
                    f"documents that the index of the files lists"
                )
            yield from self._describe_text(source, manifest, tokens_read)
            mount = files.network_mount(source.folder)
            if mount:
                yield (
                    f"note     {source.folder} is on a network file system ({mount}), which may "
                    f"slow down the training. To train from a local disk, copy the folder with "
                    f"cp -r {source.folder} /local/disk, and use --data_dir "
                    f"/local/disk/{source.folder.name}"
                )

    def _describe_length(self, plan: Plan, num_read: Sequence[int]) -> str:
        """Return the header's line about the length of a run that states its epochs.

        Args:
            plan: the division of a step.
            num_read: number of windows of each source that the run reads.
        """
        schedule = self._recipe.schedule
        epochs = "1 epoch"
        if schedule.num_train_epochs != 1:
            epochs = f"{schedule.num_train_epochs:g} epochs"
        windows = pluralize(self.num_train_windows, "window", "windows")
        steps = pluralize(schedule.total_steps, "step", "steps")
        sequences = pluralize(plan.sequences_per_step, "sequence", "sequences")
        line = f"length   {epochs} of {windows} = {steps} of {sequences}"
        if len(self.sources) > 1:
            times = [
                f"{source.folder} {windows_read / source.train.num_windows:.2f} times"
                for source, windows_read in zip(self.sources, num_read, strict=True)
            ]
            line += f"; the run reads {', '.join(times)}"
        return line

    def _describe_text(
        self, source: OpenedSource, manifest: Manifest, tokens_read: int
    ) -> Iterator[str]:
        """Yield notes about the text of a source.

        Args:
            source: the opened source.
            manifest: current manifest of the source's folder.
            tokens_read: number of the source's tokens that the run reads.
        """
        missing_text = describe_missing_text((manifest.counts or {}).values())
        if missing_text:
            yield f"note     {source.folder}: {missing_text}"
        dropped = source.train.dropped_tokens
        if dropped > 0.01 * source.train.num_tokens:
            yield (
                f"note     {dropped:,} tokens of {source.folder} are not used for training. They "
                f"are at the ends of shards, after the last complete window"
            )
        overlap = manifests.overlap_note(manifest)
        if overlap:
            yield f"note     {source.folder}: {overlap}"
        num_tokens = shards.count_tokens(manifest.splits["train"])
        if manifest.complete:
            text_bytes = shards.count_text_bytes(manifest.splits["train"])
            note = note_on_epochs(self._recipe, text_bytes, num_tokens, tokens_read)
            if note:
                yield f"note     {note}"
        validation_bytes = _bytes_per_token(manifest.splits["validation"])
        train_bytes = _bytes_per_token(manifest.splits["train"])
        if validation_bytes and train_bytes:
            ratio = validation_bytes / train_bytes
            if not 1 / MAX_BYTES_RATIO < ratio < MAX_BYTES_RATIO:
                advice = "Use validation text of the same kind as the training text"
                if self._recipe.data.data_files:
                    advice += ": --validation_files PATH"
                yield (
                    f"note     the validation text has {validation_bytes:.2f} bytes per token and "
                    f"the training text {train_bytes:.2f}, so they may be different kinds of text. "
                    f"{advice}"
                )

    def beginnings(self) -> list[str]:
        """Return the beginnings of the first validation documents, as prompts of samples."""
        validation = self.sources[0].validation
        eos_token_id = self.tokenizer.eos_token_id
        prompts = []
        row_T1 = np.empty(self._recipe.model.sequence_length + 1, dtype=np.int64)
        for window in range(min(validation.num_windows, PROMPT_WINDOWS)):
            validation.read(window, row_T1)
            for start in np.flatnonzero(row_T1[:-1] == eos_token_id):
                ids = row_T1[start + 1 : start + 1 + PROMPT_TOKENS]
                # Keep the ids of this document only.
                ids = ids[np.cumsum(ids == eos_token_id) == 0]
                text = tokenization.decode(self.tokenizer, ids.tolist())
                prompts.append(text.partition("\n")[0])

        data = self._recipe.data
        starts_with_document = data.validation_files or data.document_separator
        if len(prompts) == 1 and data.data_files and not starts_with_document:
            # The validation split is the last part of one text, so it may start inside a word.
            prompts = self._first_words() or [prompts[0].partition(" ")[2] or prompts[0]]
        prompts = [prompt for prompt in prompts if prompt.strip()]
        return prompts[:MAX_PROMPTS] or [""]

    def _first_words(self) -> list[str]:
        """Return the first words of the first line of text in the validation split, if any."""
        validation = self.sources[0].validation
        row_T1 = np.empty(self._recipe.model.sequence_length + 1, dtype=np.int64)
        for window in range(min(validation.num_windows, PROMPT_WINDOWS)):
            validation.read(window, row_T1)
            text = tokenization.decode(self.tokenizer, row_T1.tolist())
            for line in text.split("\n")[1:-1]:  # the first and the last line are incomplete
                words = line.split()
                if line[:1].isalpha() and len(words) > PROMPT_WORDS:
                    return [" ".join(words[:PROMPT_WORDS])]
        return []

    def _check_single_epoch(self, found_sources: Sequence[FoundSource | None]) -> None:
        """Raise BadInput if the run would read a consumed source more than once."""
        plan = make_plan(self._recipe, int(os.environ.get("WORLD_SIZE", "1")))
        sequence_length = self._recipe.model.sequence_length
        most_windows = [_most_windows(found, sequence_length) for found in found_sources]
        max_steps = self._recipe.schedule.total_steps
        self.order(plan).check_single_epoch(max_steps, most_windows)


def _allow_open_files() -> None:
    """Raise this process's limit of open files as far as possible. Each shard needs one."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _bytes_of_ids(tokenizer: PreTrainedTokenizerFast, model: keys.Model) -> np.ndarray:
    """Return the number of bytes of text of each id, (vocab_size,) int64; 0 for padding rows."""
    assert model.vocab_size is not None  # pretrained.complete sets it for init_from
    bytes_per_token = np.zeros(model.vocab_size, dtype=np.int64)
    bytes_per_token[: len(tokenizer)] = tokenization.token_bytes(tokenizer)
    return bytes_per_token


def _describe_source(
    folder: Path, manifest: Manifest, num_tokens: int, tokens_read: int, share: float
) -> str:
    """Return the header's line about a source: its size, and how much of it the run reads.

    Args:
        folder: the folder of shards.
        manifest: manifest of the folder.
        num_tokens: number of train tokens.
        tokens_read: number of the source's tokens that the run reads.
        share: the source's share of the training windows.
    """
    size = f"{num_tokens:,} train tokens"
    reads = f"the run reads {tokens_read:,}"
    if manifest.complete:
        reads += f" ({tokens_read / num_tokens:.2f} epochs)"
    elif num_tokens:
        size += " so far, more are being prepared"
    else:
        size = "the first train tokens are being prepared"
    if share < 1:
        reads += f", {share:.1%} of all training windows"
    return f"data     {folder}: {size}; {reads}"


def _bytes_per_token(split_shards: list[shards.Shard]) -> float:
    """Return the mean number of bytes per token of a split, or 0 if it is not known."""
    return shards.count_text_bytes(split_shards) / max(1, shards.count_tokens(split_shards))


class TrainLoader:
    """The training micro-batches of one process.

    A micro-batch depends on nothing but the recipe, the step and its number, so a loader has no
    state that a checkpoint would save.
    """

    def __init__(self, corpus: Corpus, plan: Plan, device: torch.device, rank: int):
        self._corpus = corpus
        self._rank = rank
        self._order = corpus.order(plan)
        self._batches = corpus.train_batches(device)

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs_BT and targets_BT, (B, T) int64 on the device."""
        draws = self._order.windows(step, micro_step, self._rank, self._corpus.epoch_windows)
        return self._batches.batch(draws)

    def number(self, micro_step: int) -> int:
        """Return the number of a micro-batch in its step, counted over all processes."""
        return self._order.number(micro_step, self._rank)

    def wait_for(self, step: int, stop: StopRequest) -> str | None:
        """Wait until every process has the data of a step, or one of them stops.

        Returns:
            The reason if the data cannot be prepared.
        """
        corpus = self._corpus

        def num_windows() -> list[int]:
            return [source.train.num_windows for source in corpus.sources]

        needed = self._order.needed(step)
        failure = corpus.data_wait.wait(needed, num_windows, lambda: stop.requested, stop.any_of)
        if failure or not corpus.is_consumed:
            return failure
        try:
            # The size of an epoch may not have been known earlier.
            self._order.check_single_epoch(step + 1, corpus.epoch_windows)
        except BadInput as error:
            return str(error)
        return None

    def delete_consumed(self, step: int) -> None:
        """With stream_keep = consumed, delete the shards that no step from ``step`` on reads."""
        if not self._corpus.is_consumed:
            return
        oldest_windows = self._order.oldest_needed(step)
        for source, oldest in zip(self._corpus.sources, oldest_windows, strict=True):
            for path in source.train.release_before(oldest):
                for side_file in shards.side_files(path):
                    side_file.unlink(missing_ok=True)
                path.unlink(missing_ok=True)


def open_tokenizer(
    recipe: keys.Recipe, manifest_by_folder: dict[Path, Manifest]
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with which the shards of all folders were made.

    Args:
        recipe: the complete recipe.
        manifest_by_folder: the folders of shards and their manifests.

    Raises:
        BadInput: the folders, the recipe's tokenizer and the model's tokenizer do not agree.
    """
    stated_name = recipe.data.tokenizer
    # A tokenizer that was trained on the text is stored next to its shards.
    stored = [folder / "tokenizer" for folder in manifest_by_folder]
    stored = [path for path in stored if path.is_dir()]
    name = str(stored[0]) if stored else stated_name
    if name in keys.TRAINED_TOKENIZERS:
        folder = next(iter(manifest_by_folder))
        raise BadInput(
            f"tokenizer = {name}: this tokenizer is trained on text, but {folder} contains token "
            f"shards. Use the tokenizer with which they were made, for example "
            f"--tokenizer openai-community/gpt2, or a folder"
        )
    tokenizer = pretrained_tokenizer.load(name)
    fingerprint = tokenization.fingerprint(tokenizer)
    for folder, manifest in manifest_by_folder.items():
        _check_tokenizer_of_shards(folder, manifest, stated_name, fingerprint)
        if manifest.tokenizer is None:
            for shard in manifest.shards:
                shards.check_vocabulary_of_headerless(folder / shard.file, len(tokenizer))
            for stated in _tokenizers_of_files(folder, manifest):
                check_stated_tokenizer(folder, stated, name, fingerprint)

    init_from = recipe.model.init_from
    if init_from not in (None, name) and _fingerprint_of(init_from) not in (None, fingerprint):
        raise BadInput(
            f"tokenizer = {stated_name}: this is not the tokenizer of init_from = {init_from}, so "
            f"the model would read the ids as different text. Use --tokenizer {init_from}, both to "
            f"prepare the data and to train"
        )
    assert recipe.model.vocab_size is not None  # pretrained.complete sets it for init_from
    if len(tokenizer) > recipe.model.vocab_size:
        next_multiple = math.ceil(len(tokenizer) / 64) * 64
        raise BadInput(
            f"vocab_size = {recipe.model.vocab_size}: the tokenizer has more ids, "
            f"{len(tokenizer)}. Use --vocab_size {next_multiple}"
        )
    return tokenizer


def _check_tokenizer_of_shards(
    folder: Path, manifest: Manifest, stated_name: str, fingerprint: str
) -> None:
    """Raise BadInput if the shards of a folder were encoded with a different tokenizer.

    Args:
        folder: the folder of shards.
        manifest: manifest of the folder. If another program wrote the shards, it does not name
            their tokenizer.
        stated_name: the recipe's tokenizer.
        fingerprint: fingerprint of the tokenizer that the run uses.
    """
    reference = manifest.tokenizer
    if reference is None:
        return
    has_other_name = stated_name not in (reference.name, *keys.TRAINED_TOKENIZERS)
    differs = reference.fingerprint != fingerprint
    if has_other_name and not differs:
        # The same tokenizer may have two names.
        differs = _fingerprint_of_name(stated_name) != fingerprint
    if not differs:
        return
    if has_other_name:
        raise BadInput(
            f"tokenizer = {stated_name}: the shards in {folder} were encoded with the tokenizer "
            f"{reference.name}. Prepare this text again with --tokenizer {stated_name}, or use "
            f"--tokenizer {reference.name} if all shards of the run were encoded with it"
        )
    raise BadInput(
        f"tokenizer = {stated_name}: the shards in {folder} were not encoded with the tokenizer "
        f"that the run uses. Delete this folder, and prepare all text of the run again with the "
        f"same tokenizer, for example with --tokenizer FOLDER"
    )


def _tokenizers_of_files(folder: Path, manifest: Manifest) -> set[str]:
    """Return the tokenizers that the token files of another program state."""
    paths = [folder / shard.file for shard in manifest.shards]
    names = {shards.tokenizer_name(path) for path in paths if path.exists()}
    return {name for name in names if name is not None}


def _fingerprint_of_name(name: str) -> str:
    return tokenization.fingerprint(pretrained_tokenizer.load(name))


def _fingerprint_of(model: str) -> str | None:
    """Return the fingerprint of a model's tokenizer, or None if the model has none."""
    try:
        return _fingerprint_of_name(model)
    except BadInput:
        return None


def _start_reader(
    number: int, source: FoundSource | None, argv: Sequence[str]
) -> Preparation | None:
    """Start prepare_data.py for a source that is not complete.

    Only the first process of each machine starts one.
    """
    is_first_process = os.environ.get("LOCAL_RANK", "0") == "0"
    if source is None or not is_first_process or manifests.is_complete(source.folder):
        return None
    return Preparation(reader_command(argv, number))


def _most_windows(source: FoundSource | None, sequence_length: int) -> int | None:
    """Return an upper bound of the windows in an epoch that is known before reading, or None."""
    if source is None:
        return None
    bounds = [bound for bound in (source.most_tokens, source.config.limit_tokens) if bound]
    return min(bounds) // sequence_length if bounds else None
