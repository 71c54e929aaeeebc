"""The data of a run: its sources opened, what is still being prepared waited for, batches of it."""

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
from ursa_minor.data.loading import batches as window_batches
from ursa_minor.data.loading import order as window_order
from ursa_minor.data.loading import windows
from ursa_minor.data.loading.background import DataWait, Preparation, reader_command
from ursa_minor.data.sources.find import FoundSource, find_source
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.manifest import Manifest
from ursa_minor.recipe import keys
from ursa_minor.recipe.batching import MANY_EPOCHS, Plan, make_plan

# With data_device = auto, training ids (4 bytes each) up to this size are kept on the GPU.
RESIDENT_BYTES = 2**30
PROMPTS, PROMPT_TOKENS, PROMPT_WORDS = 3, 8, 4  # of samples, where the recipe has none


class OpenedSource:
    """One source of a run: its folder of shards, opened; ``train`` grows with ``refresh`` until the source is complete.

    Args:
        weight: its share of the windows, relative to the others'.
        manifest: of the folder.
        consumed: whether shards that were trained on may be gone.

    Raises BadInput where the shards are not what the manifest says, or hold no window.
    """

    def __init__(
        self, weight: float, folder: Path, manifest: Manifest, model: keys.Model, *, consumed: bool
    ):
        self.weight, self.folder, self.manifest = weight, folder, manifest
        self._model, self._consumed = model, consumed
        self.validation = self.open("validation")
        self.train = self.open("train")

    def open(self, split: str) -> windows.Windows:
        """Return the windows of a split's shards."""
        # pretrained.complete has set it for init_from.
        assert self._model.vocab_size is not None
        opened = windows.Windows(self._model.sequence_length, self._model.vocab_size)
        self._append(opened, split, 0)
        return opened

    def refresh(self) -> None:
        """Open the train shards that are new."""
        if not self.manifest.complete:
            num_opened = len(self.manifest.splits["train"])
            self.manifest = manifests.describe_folder(self.folder)
            self._append(self.train, "train", num_opened)

    def _append(self, opened: windows.Windows, split: str, num_opened: int) -> None:
        """Open the shards of a split from number ``num_opened`` on."""
        new_shards = self.manifest.splits[split][num_opened:]
        manifests.check_unchanged(self.folder, new_shards)
        for shard in new_shards:
            path = self.folder / shard.file
            if self._consumed and not path.exists():
                opened.append(path, shard.tokens, None, 0)
            else:
                opened.append(path, shard.tokens, *shards.open_ids(path, shard.tokens))
        if self.manifest.tokenizer is None and os.environ.get("RANK", "0") == "0":
            opened.check_ids()  # shards that others made; ours were checked when they were written
        if not opened.num_windows and (self.manifest.complete or split != "train"):
            length = self._model.sequence_length
            raise BadInput(
                f"{self.folder}: the {split} split has {opened.num_tokens} tokens, and a window needs sequence_length + 1 "
                f"= {length + 1} of one shard. Give more text, or a smaller --sequence_length"
            )


class Corpus:
    """The data of a run; a context manager that ends the processes which prepare it.

    What is not prepared yet is prepared in the background; construction waits for the validation split.

    Args:
        argv: the command line of the run, for the processes that prepare.

    Attributes:
        sources: one, or those of a mixture.
        test: the windows of that split, where a single source has one.
        tokenizer: of all shards; ``bytes_per_token``: (vocab_size,) int64, bytes of text of each id.
        data_wait: the background processes.
        is_consumed: whether shards are deleted when they have been trained on.
    """

    def __init__(self, recipe: keys.Recipe, argv: Sequence[str]):
        self._recipe = recipe
        self.is_consumed = recipe.data.stream_keep == "consumed"
        data, model = recipe.data, recipe.model
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Each shard needs an open file.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        asked = data.resolved_sources
        found = [None if source.is_token_folder else find_source(source) for source in asked]
        folders = [
            one.folder if one else Path(str(each.data_dir))
            for one, each in zip(found, asked, strict=True)
        ]
        self._weights = tuple(source.weight for source in asked)
        if self.is_consumed:
            plan = make_plan(recipe, int(os.environ.get("WORLD_SIZE", "1")))
            most_windows = [_most_windows(source, model.sequence_length) for source in found]
            self.order(plan).check_single_epoch(recipe.schedule.max_steps, most_windows)
        readers = [_start_reader(number, source, argv) for number, source in enumerate(found)]
        self.data_wait = DataWait(readers, self.refresh)
        streams = [source.folder / shards.MANIFEST for source in found if source]
        self.data_wait.until(
            lambda: all(path.is_file() for path in streams),
            "the reader prepares the validation split, then the first shard",
        )
        source_manifests = [manifests.describe_folder(folder) for folder in folders]
        self.tokenizer = open_tokenizer(recipe, dict(zip(folders, source_manifests, strict=True)))
        assert model.vocab_size is not None  # of init_from, pretrained.complete has filled it in
        self.bytes_per_token = np.zeros(model.vocab_size, dtype=np.int64)
        self.bytes_per_token[: len(self.tokenizer)] = tokenization.token_bytes(self.tokenizer)
        self.sources = [
            OpenedSource(weight, folder, manifest, model, consumed=self.is_consumed)
            for weight, folder, manifest in zip(
                self._weights, folders, source_manifests, strict=True
            )
        ]
        has_test = len(source_manifests) == 1 and "test" in source_manifests[0].splits
        self.test = self.sources[0].open("test") if has_test else None

    def __enter__(self) -> "Corpus":
        return self

    def __exit__(self, *_) -> None:
        self.data_wait.close()  # what they have finished is kept

    @property
    def complete(self) -> bool:
        """Whether no source grows any more."""
        return all(source.manifest.complete for source in self.sources)

    @property
    def whole(self) -> bool:
        """Whether all of the train split is there: complete, and nothing of it is deleted after its use."""
        return self.complete and not self.is_consumed

    @property
    def epoch_windows(self) -> list[int | None]:
        """How many windows an epoch of each source has; None while that is not known."""
        return [one.train.num_windows if one.manifest.complete else None for one in self.sources]

    def refresh(self) -> bool:
        """Open the train shards that are new; return ``complete``."""
        for source in self.sources:
            source.refresh()
        return self.complete

    def order(self, plan: Plan) -> window_order.TrainOrder:
        """Return which windows each process reads at each step."""
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
        """Return where batches come from: memory-mapped files, or ids that live on the card whole (data_device)."""
        wanted, train = self._recipe.data.data_device, [source.train for source in self.sources]
        if wanted == "cuda" and device.type != "cuda":
            raise BadInput(f"data_device = cuda: this run is on {device}; use --data_device auto")
        if wanted == "cuda" and not self.complete:
            raise BadInput(
                "data_device = cuda needs all of the data: run prepare_data.py first, or use auto"
            )
        small = self.complete and 4 * sum(split.num_tokens for split in train) <= RESIDENT_BYTES
        whole = wanted == "cuda" or (wanted == "auto" and device.type == "cuda" and small)
        return (window_batches.Resident if whole else window_batches.Mapped)(train, device)

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
            max_tokens: about so many of the split, spread evenly; 0 = all.
        """
        found = [source.validation for source in self.sources]
        if split == "test":
            assert self.test is not None  # who asks for it has seen that it is there
            found = [self.test]
        draws = window_order.eval_draws(
            [opened.num_windows for opened in found],
            self._weights,
            max_windows=max(1, max_tokens // self._recipe.model.sequence_length)
            if max_tokens
            else 0,
        )
        batches = window_batches.Mapped(found, device)
        return window_batches.eval_batches(
            batches, draws, batch_size=batch_size, rank=rank, num_processes=num_processes
        )

    def contents(self) -> list[dict]:
        """Return the identity of each source, which a resumed run must find again."""
        return [
            {"weight": source.weight} | manifests.contents(source.manifest)
            for source in self.sources
        ]

    def check_same_data(self, where: Path, before: list[dict]) -> None:
        """Raise BadInput unless the data begins as it was ``before``; what is being read anew is waited for."""
        if [state["weight"] for state in before] != [source.weight for source in self.sources]:
            raise BadInput(
                f"{where}: was trained with other weights of its sources; restore them, or give another --run_name"
            )

        pairs = list(zip(before, self.sources, strict=True))

        def there() -> bool:
            # Of data that had ended it is known only at its end, or beyond it, that this ends at the same place.
            for state, source in pairs:
                num_shards = len(source.manifest.splits["train"])
                needed = state["shards"] + state["complete"]
                if not source.manifest.complete and num_shards < needed:
                    return self.refresh()
            return True

        self.data_wait.until(there, "the shards that the checkpoint has seen")
        for state, source in pairs:
            manifests.check_same_contents(where, state, source.manifest)

    def describe(self, plan: Plan) -> Iterator[str]:
        """Yield one line for each source that the run reads, and notes on its text and its disk."""
        order = self.order(plan)
        read = order.read_before(self._recipe.schedule.max_steps)
        for source, windows_read, share in zip(self.sources, read, order.shares(), strict=True):
            folder = source.folder
            train = source.train
            manifest = manifests.describe_folder(folder)
            complete = manifest.complete
            tokens = windows_read * train.sequence_length
            # While the folder grows, it has more tokens than are opened.
            there = shards.count_tokens(manifest.splits["train"])
            epochs = f" ({tokens / there:.2f} epochs)" if complete else ""
            state = "" if complete else " so far, more are being read"
            part = f", {share:.1%} of its windows" if share < 1 else ""
            yield f"data     {folder}: {there:,} train tokens{state}; the run reads {tokens:,}{epochs}{part}"
            if train.dropped_tokens > 0.01 * train.num_tokens:
                yield f"note     {train.dropped_tokens:,} of its tokens, at the ends of shards, are in no window"
            if complete and tokens > MANY_EPOCHS * there:
                fix = "Give more text or fewer --max_steps, a smaller model, or dropout"
                if self._recipe.saving.load_best_model_at_end:
                    fix = "model/ keeps the weights of the lowest one"
                yield (
                    f"note     more than {MANY_EPOCHS} epochs: the model begins to learn this text by heart, and the "
                    f"validation loss may rise. {fix}"
                )
            held_out = _bytes_per_token(manifest.splits["validation"])
            trained = _bytes_per_token(manifest.splits["train"])
            if held_out and trained and not 3 / 4 < held_out / trained < 4 / 3:
                fix = ": --validation_files FILE" if self._recipe.data.data_files else ""
                yield (
                    f"note     validation has {held_out:.2f} bytes per token, train {trained:.2f}: they may be of other "
                    f"kinds. Validate on text like that of training{fix}"
                )
            if mount := files.network_mount(folder):
                yield (
                    f"note     {folder} lies on {mount}, over the network: each window is fetched from there. Copy it to "
                    f"a local disk: cp -r {folder} /local/disk, then --data_dir /local/disk/{folder.name}"
                )

    def beginnings(self) -> list[str]:
        """Return the beginnings of the first documents of the validation split, for samples to continue."""
        validation, end, found = self.sources[0].validation, self.tokenizer.eos_token_id, []
        row_T1 = np.empty(self._recipe.model.sequence_length + 1, dtype=np.int64)
        for window in range(min(validation.num_windows, 100)):
            validation.read(window, row_T1)
            for start in np.flatnonzero(row_T1[:-1] == end):
                ids = row_T1[start + 1 : start + 1 + PROMPT_TOKENS]
                # Keep the ids of this document only.
                text = tokenization.decode(self.tokenizer, ids[np.cumsum(ids == end) == 0].tolist())
                found.append(text.partition("\n")[0])
        if (
            len(found) == 1
            and self._recipe.data.data_files
            and not self._recipe.data.validation_files
        ):
            # The text was cut, perhaps inside a word.
            found = self._first_words() or [found[0].partition(" ")[2] or found[0]]
        return [text for text in found if text.strip()][:PROMPTS] or [""]

    def _first_words(self) -> list[str]:
        """Return the first words of the validation split's first line of words, if any."""
        validation, row_T1 = (
            self.sources[0].validation,
            np.empty(self._recipe.model.sequence_length + 1, np.int64),
        )
        for window in range(min(validation.num_windows, 100)):
            validation.read(window, row_T1)
            for line in tokenization.decode(self.tokenizer, row_T1.tolist()).split("\n")[1:-1]:
                if line[:1].isalpha() and len(words := line.split()) > PROMPT_WORDS:
                    return [" ".join(words[:PROMPT_WORDS])]
        return []


def _bytes_per_token(split_shards: list[shards.Shard]) -> float:
    """Return the mean of the shards of a split. 0 if it is not known."""
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
        """With stream_keep = consumed, delete the shards that neither ``step`` nor a later one reads."""
        if not self._corpus.is_consumed:
            return
        oldest_windows = self._order.oldest_needed(step)
        for source, oldest in zip(self._corpus.sources, oldest_windows, strict=True):
            for path in source.train.release_before(oldest):
                path.unlink(missing_ok=True)


def open_tokenizer(
    recipe: keys.Recipe, manifest_by_folder: dict[Path, Manifest]
) -> PreTrainedTokenizerFast:
    """Return the tokenizer that the shards of all folders, with their manifests, were made with.

    Raises BadInput when they do not fit it, or each other.
    """
    wanted = recipe.data.tokenizer
    own = [folder / "tokenizer" for folder in manifest_by_folder if (folder / "tokenizer").is_dir()]
    name = str(own[0]) if own else wanted
    if name in keys.TRAINED_TOKENIZERS:
        raise BadInput(
            f"tokenizer = {name}: is made from text, and {next(iter(manifest_by_folder))} holds shards of others; give the one "
            f"that they were made with: --tokenizer openai-community/gpt2, or a folder"
        )
    tokenizer = tokenization.load(name)
    fingerprint = tokenization.fingerprint(tokenizer)
    for folder, manifest in manifest_by_folder.items():
        reference = manifest.tokenizer
        if reference is None:
            continue
        is_other = reference.fingerprint != fingerprint
        if wanted not in (reference.name, *keys.TRAINED_TOKENIZERS) and not is_other:
            # The same tokenizer may have two names.
            is_other = tokenization.fingerprint(tokenization.load(wanted)) != fingerprint
        if is_other:
            raise BadInput(
                f"tokenizer = {wanted}: the shards in {folder} were made with another tokenizer"
            )
    begun_from = recipe.model.init_from
    if begun_from not in (None, name) and _fingerprint_at(begun_from) not in (None, fingerprint):
        raise BadInput(
            f"tokenizer = {wanted}: is not the one of init_from = {begun_from}, whose ids mean other text; use "
            f"--tokenizer {begun_from}"
        )
    assert recipe.model.vocab_size is not None  # of init_from, pretrained.complete has filled it in
    if len(tokenizer) > recipe.model.vocab_size:
        raise BadInput(
            f"vocab_size = {recipe.model.vocab_size}: the tokenizer has {len(tokenizer)} ids; use --vocab_size "
            f"{-(-len(tokenizer) // 64) * 64}"
        )
    return tokenizer


def _fingerprint_at(model: str) -> str | None:
    """Return the fingerprint of a model's own tokenizer; None where it has none, and the recipe decides."""
    try:
        return tokenization.fingerprint(tokenization.load(model))
    except BadInput:
        return None


def _start_reader(
    number: int, source: FoundSource | None, argv: Sequence[str]
) -> Preparation | None:
    """Start prepare_data.py for a source that is not complete: the first process of each machine does."""
    if (
        source is None
        or os.environ.get("LOCAL_RANK", "0") != "0"
        or manifests.is_complete(source.folder)
    ):
        return None
    return Preparation(reader_command(argv, number))


def _most_windows(source: FoundSource | None, sequence_length: int) -> int | None:
    """Return a bound of an epoch's windows that is known before any is read."""
    bounds = [source.most_tokens, source.config.limit_tokens] if source else []
    most = min(filter(None, bounds), default=None)
    return most and most // sequence_length
