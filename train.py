"""Pre-train GPT-2: read the recipe, build, loop. Everything that is decided per step stands in ``train``.

    accelerate launch --config_file accelerate_configs/cpu.yaml train.py --recipe recipes/quickstart.yaml
    python train.py --recipe recipes/own_text.yaml --data_files my.txt --max_steps 500

The same command goes on where a stopped or killed run was.
"""

import contextlib
import dataclasses
import functools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    PARENT = os.getppid()  # before all that takes time: a launcher may die meanwhile

from pretrain.recipe import config

if __name__ == "__main__" and (status := config.refuse_at_once(sys.argv[1:])):
    sys.exit(status)  # before the imports below, which take seconds

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from pretrain.base import files
from pretrain.base.errors import BadInput, TrainingStopped, exit_on_bad_input, is_out_of_memory
from pretrain.base.redaction import redact
from pretrain.base.stopping import StopRequest, end_with_launcher, peers
from pretrain.data import shards, sources, tokenization, windows
from pretrain.data.reader import Reader, Supply
from pretrain.evaluation import hellaswag, likelihood, sampling, validation
from pretrain.hub import hub, model_card
from pretrain.machine import cards, estimate, fit, hardware, verdicts
from pretrain.machine.sharding import WholeModel
from pretrain.machine.time_budget import Horizon
from pretrain.model import export
from pretrain.model import model as models
from pretrain.model.loss import NextTokenLoss
from pretrain.optim import muon, optim
from pretrain.run import checkpoint, curves, trackers
from pretrain.run.profile import Profile
from pretrain.run.report import Meter, Report, due, duration, read_metrics

BAD_UPDATES_IN_A_ROW = 3
HINT_AFTER = 50  # updates, when the gauges have settled
PICTURE_SECONDS = 10  # curves.png is drawn at an evaluation, but not more often
PUSH_SECONDS, STOPPED_PUSH_SECONDS = 600, 5  # how long a finished, a stopped run waits for the Hub
CPU_TOKENS = 2**13  # of a micro-batch that auto proposes without a card: more is not faster
LOCK, PENDING = ".lock", "hub"
RESIDENT_BYTES = 2**30  # data_device = auto: train ids up to this size (4 bytes each) live on the card


@exit_on_bad_input
def main(argv: list[str] | None = None, parent: int | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 2 bad input, 1 cannot go on, 128 + n for signal n."""
    end_with_launcher(parent or os.getppid())
    argv = sys.argv[1:] if argv is None else argv
    hub.bound_client()
    if argv[:1] == ["--push_pending"] and len(argv) == 2:  # needs no recipe, so it works in any folder
        return push_pending(Path(argv[1]))
    recipe, extras = config.parse_command(argv, config.TRAINS, config.TRAIN_MODES)
    if "push_pending" in extras:
        raise BadInput(f"--push_pending {extras['push_pending']}: stands alone; leave the other flags out")
    if recipe.init_from:
        stated = {name: getattr(recipe, name) for name in (*config.MODEL_KEYS, "sequence_length")}
        recipe = config.fill(recipe, models.source(recipe.init_from, **stated))
    config.make_plan(recipe, int(os.environ.get("WORLD_SIZE", "1")))  # refuse before anything is written
    run_dir = Path(recipe.output_dir)
    if "eval_only" not in extras:  # which writes nothing
        refuse_foreign_run(recipe, run_dir)
        trackers.check(tracker_names(recipe), recipe.project_name)
        repo_id = check_hub(recipe, run_dir)
    disable_progress_bar()  # Transformers' own bars, over saving and loading one file
    device = hardware.this_device()
    refuse_missing_kernels(device)
    accelerator = hardware.make_accelerator(
        device,
        tf32=recipe.tf32,
        compile_mode=recipe.compile_mode,
        deterministic=recipe.deterministic,
        timeout=recipe.ddp_timeout,
    )
    if recipe.optimizer == "adamw_8bit" and "eval_only" not in extras:
        optim.check_8bit(accelerator.device, sharded=accelerator.is_fsdp2)
    with peers(), contextlib.closing(Corpus(recipe, argv)) as corpus:
        if "eval_only" in extras:
            status = evaluate(recipe, corpus, run_dir, accelerator)
        else:
            with (
                run_folder(recipe, run_dir, accelerator),
                checkpoint_saver(recipe, corpus, run_dir, accelerator) as saver,
            ):
                status = train(recipe, corpus, run_dir, saver, accelerator, repo_id, profiled="profile" in extras)
        accelerator.end_training()  # leaves the group of processes; after a fault it may wait for lost ones
    return status


def train(
    recipe: config.Recipe,
    corpus: "Corpus",
    run_dir: Path,
    saver: checkpoint.Saver,
    accelerator: Accelerator,
    repo_id: str | None,
    profiled: bool = False,
) -> int:
    """Train to ``max_steps``, from the newest checkpoint where there is one; return the exit status."""
    device, rank = accelerator.device, accelerator.process_index
    stop = StopRequest(recipe.ddp_timeout)

    # Accelerate moves, wraps (DDP, FSDP2), compiles and autocasts the module that returns the loss. `model` stays the
    # bare model of Transformers that shares its weights: it is what is saved, evaluated, sampled and exported.
    model = build_model(recipe, corpus).to(device)
    training_module, optimizer = prepare(recipe, corpus, model, accelerator)
    state, notes = resume(recipe, corpus, run_dir, model, optimizer, accelerator)
    first_step, bad_in_a_row, skipped = state["step"], state["bad_in_a_row"], state["skipped_updates"]
    horizon = Horizon(
        max_steps=recipe.max_steps,
        warmup_steps=recipe.warmup_steps,
        max_hours=recipe.max_hours,
        planned=state.get("planned"),
    )
    whole_model = WholeModel(model, device, (lambda: build_model(recipe, corpus)) if accelerator.is_fsdp2 else None)

    # Which windows a step reads is a pure function of recipe and step: there is no reader's state to save.
    batches = train_batches(recipe, corpus, device)
    plan = fit_micro_batch(recipe, state, model, optimizer, training_module, accelerator, stop, corpus.say)
    order = train_order(recipe, corpus.sources, plan)

    shape = recipe_shape(recipe)
    flops = shape.flops_per_token
    peak = cards.peak_flops(hardware.device_name(device), accelerator.mixed_precision)
    report = Report(
        run_dir,
        first_step=first_step,
        max_steps=horizon.max_steps,
        tokens_per_step=recipe.tokens_per_step,
        is_main=accelerator.is_main_process,
    )
    for line in [*header(recipe, plan, corpus, order, model, flops, accelerator), *notes]:
        report.say(line)
    track(recipe, run_dir, report, state)
    report.start_progress()
    meter = Meter(flops, peak * plan.num_processes if peak else None, state["elapsed_seconds"])
    publisher = Publisher(recipe, corpus, run_dir, repo_id, plan, horizon, model, accelerator)
    saver.saved = publisher.saved
    corpus.say, corpus.supply.waited_seconds = report.say, state["data_wait_seconds"]

    def mean(tensor: torch.Tensor) -> torch.Tensor:
        """Average over the processes."""
        return accelerator.reduce(tensor.to(device), "mean")

    def look(step: int, split: str) -> None:
        """Evaluate one split and report it, unless a request to stop abandons it."""
        with whole_model() as whole:
            result = validation_loss(recipe, plan, corpus, split, whole, accelerator, lambda: stop.requested)
        if result is not None:
            prefix = "eval" if split == "validation" else split
            report.log(step, {f"{prefix}/{name}": value for name, value in result.items()})
            report.say(f"step {step}: {describe_loss(split, result)}")
            publisher.draw(at_least=PICTURE_SECONDS)

    def look_hellaswag(step: int) -> None:
        """Score the model on HellaSwag and report it, unless a request to stop abandons it."""
        with whole_model() as whole:
            result = hellaswag_scores(corpus, whole, accelerator, lambda: stop.requested)
        if result is not None:
            report.log(step, {f"hellaswag/{name}": value for name, value in result.items()})
            report.say(f"step {step}: {describe_hellaswag(result)}")
            publisher.draw(at_least=PICTURE_SECONDS)

    def sample(step: int, show: bool) -> None:
        """Write samples."""
        with whole_model() as whole:
            write_samples(recipe, corpus, report, step, whole, show=show)

    def save(step: int, alone: bool = False) -> None:
        """Begin to save: all processes together, or one ``alone`` whose peers wait for it in vain."""
        counters = {"skipped_updates": skipped, "bad_in_a_row": bad_in_a_row, "elapsed_seconds": meter.elapsed}
        counters |= {"planned": horizon.planned, "micro_batch": plan.per_device_train_batch_size}
        counters["trackers"] = report.trackers.ids if report.trackers else {}
        save_checkpoint(recipe, corpus, saver, step, counters, model, optimizer, accelerator, alone)
        if recipe.stream_keep == "consumed" and not alone:
            corpus.delete_consumed(order, run_dir)

    profile = Profile(run_dir / "profile" if profiled and accelerator.is_main_process else None, device, report.say)
    failure = None
    # `step` = updates attempted. max_steps updates take max_steps + 1 visits: the last one only looks and saves.
    for step in range(first_step, recipe.max_steps + 1):
        last = step >= horizon.max_steps

        with meter.paused():  # looking is not training: it never counts as time
            if due(step, recipe.eval_steps, last):
                look(step, "validation")
            if due(step, recipe.hellaswag_steps, last):
                look_hellaswag(step)
            if due(step, recipe.sample_steps, last):
                sample(step, show=last)
            if due(step, recipe.save_steps, last) and step > first_step:
                save(step)
        if last:
            stopping = stop.agreed()
            break

        failure = wait_for_data(corpus, order, step, stop)  # for a stream that is behind
        lr = learning_rate(recipe, step, horizon)
        optim.set_lr(optimizer, lr)

        loss = torch.zeros((), device=device)  # nats per token, mean over this process's share of the step
        with out_of_memory_told(recipe, plan, device, lambda: step > first_step and save(step, alone=True)):  # noqa: B023
            for micro_step in range(plan.gradient_accumulation_steps):
                if (stopping := stop.agreed()) or failure:
                    break  # the partial step is abandoned: a resumed run does it again, to the bit
                inputs_BT, targets_BT = batches.batch(order.windows(step, micro_step, rank, corpus.epoch_windows))
                seed_dropout(recipe, step, micro_step, rank)
                last_micro = micro_step + 1 == plan.gradient_accumulation_steps
                with gradient_exchange(accelerator, training_module, last_micro):
                    micro_loss = training_module(inputs_BT, targets_BT)
                    accelerator.backward(micro_loss / plan.gradient_accumulation_steps)
                loss += micro_loss.detach() / plan.gradient_accumulation_steps
        if stopping or failure:
            break

        outcome = optim.update(
            optimizer,
            list(model.parameters()),
            loss,
            max_grad_norm=recipe.max_grad_norm,
            scaler=accelerator.scaler,
            reduce_mean=mean,
        )
        profile.step()
        meter.count(recipe.tokens_per_step)
        saver.prepare(model, optimizer)
        skipped += not outcome.applied
        bad_in_a_row = 0 if outcome.applied else bad_in_a_row + (not outcome.overflow)
        if not outcome.applied:  # the weights are as before; an fp16 overflow is no fault of theirs
            report.say(f"step {step + 1}: update skipped: {outcome.reason}")
        if bad_in_a_row == BAD_UPDATES_IN_A_ROW:
            bad_in_a_row = 0  # so that a resumed run, which goes on after these windows, has its own three
            save(step + 1)
            raise TrainingStopped(diverged(run_dir, step + 1, outcome.reason))
        if news := horizon.plan(step + 1, meter.elapsed, mean):
            report.extend(horizon.max_steps, news)
            save(step + 1)  # so that a resumed run keeps the plan
        if due(step + 1, recipe.logging_steps, step + 1 == horizon.max_steps):
            tell(recipe, plan, report, corpus, meter, step + 1, outcome, lr, skipped, device)

    profile.close()
    if step > first_step and (stopping or failure):
        save(step)
    if failure and not stopping:
        raise TrainingStopped(failure)
    if stopping:
        report.say(f"stopped by {stop.signal.name} after {step} steps; the same command goes on from there")
    else:
        with meter.paused():
            if corpus.test:
                look(step, "test")
            with whole_model() as whole:
                finish(corpus, run_dir, whole, report, meter, accelerator)
    saver.finish()
    if recipe.stream_keep == "consumed":
        corpus.delete_consumed(order, run_dir)
    publisher.draw()
    if not stopping:
        publisher.finished(step)
    report.close()
    accelerator.wait_for_everyone()
    publisher.wait(STOPPED_PUSH_SECONDS if stopping else PUSH_SECONDS, lambda: stop.requested and not stopping)
    return stop.exit_code if stopping else 0


# What the story above calls, in its order. Each knows the recipe and hands plain values to a leaf.


@dataclass
class Source:
    """One source of a run: its folder of shards, opened. ``train`` and ``manifest`` may still grow."""

    weight: float
    folder: Path
    found: sources.Source | None  # None: a folder that was given
    manifest: dict = None
    train: windows.Windows = None
    validation: windows.Windows = None

    @property
    def epoch_windows(self) -> int | None:
        """How many windows an epoch has; None while that is not known."""
        return self.train.num_windows if self.manifest["complete"] else None

    @property
    def most_tokens(self) -> int | None:
        """A bound of an epoch's tokens that is known before any is read."""
        bounds = [bound for bound in (self.found.most_tokens, self.found.identity["limit_tokens"]) if bound]
        return min(bounds, default=None)


class Corpus:
    """The data of a run.

    Attributes:
        sources: one, or those of a mixture; ``test``: the windows of that split, where a single source has one.
        hellaswag: its items as ids, where the run scores itself on them; ``hellaswag_cut``: how many the context cuts.
        supply: the processes that read what is not there yet.
    """

    def __init__(self, recipe: config.Recipe, argv: list[str]):
        self.recipe = recipe
        self.is_first = os.environ.get("RANK", "0") == "0"
        scored = recipe.hellaswag_steps or recipe.hellaswag_files  # files alone are for eval_only
        items = hellaswag.read_items(recipe.hellaswag_files) if scored else None
        self.say = lambda line: print(line, file=sys.stderr, flush=True) if self.is_first else None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each shard is an open file
        self.sources = []
        for asked in config.sources(recipe):
            found = None if asked["data_dir"] else sources.find_source(**asked["find"])
            self.sources.append(Source(asked["weight"], found.folder if found else Path(asked["data_dir"]), found))
        if recipe.stream_keep == "consumed":
            most = [source.most_tokens and source.most_tokens // recipe.sequence_length for source in self.sources]
            plan = config.make_plan(recipe, int(os.environ.get("WORLD_SIZE", "1")))
            train_order(recipe, self.sources, plan).refuse_second_epoch(recipe.max_steps, most)
        readers = [self._start_reader(index, argv) for index in range(len(self.sources))]
        self.supply = Supply(readers, self.refresh, lambda line: self.say(line))
        streams = [source.folder / shards.MANIFEST for source in self.sources if source.found]
        self.supply.until(
            lambda: all(path.is_file() for path in streams),
            "the reader prepares the validation split, then the first shard",
        )
        for source in self.sources:
            source.manifest = shards.describe_folder(source.folder)
        self.tokenizer = open_tokenizer(recipe, self.sources)
        self.bytes_per_token = np.zeros(recipe.vocab_size, dtype=np.int64)
        self.bytes_per_token[: len(self.tokenizer)] = tokenization.token_bytes(self.tokenizer)
        self.hellaswag = hellaswag.Test(items, self.tokenizer) if items else None
        self.hellaswag_cut = self.hellaswag.longer_than(recipe.sequence_length) if items else 0
        for source in self.sources:
            source.validation = self._append(self._empty(), source, "validation", 0)
            source.train = self._append(self._empty(), source, "train", 0)
        only = self.sources[0]
        has_test = len(self.sources) == 1 and "test" in only.manifest["splits"]
        self.test = self._append(self._empty(), only, "test", 0) if has_test else None

    @property
    def train(self) -> list[windows.Windows]:
        """The train windows of each source."""
        return [source.train for source in self.sources]

    @property
    def complete(self) -> bool:
        """Whether no source grows any more."""
        return all(source.manifest["complete"] for source in self.sources)

    @property
    def epoch_windows(self) -> list[int | None]:
        """How many windows an epoch of each source has; None while that is not known."""
        return [source.epoch_windows for source in self.sources]

    def refresh(self) -> bool:
        """Open the train shards that are new; return ``complete``."""
        for source in self.sources:
            if not source.manifest["complete"]:
                opened = len(source.manifest["splits"]["train"])
                source.manifest = shards.describe_folder(source.folder)
                self._append(source.train, source, "train", opened)
        return self.complete

    def contents(self) -> list[dict]:
        """Return what a resumed run must find again of each source."""
        return [{"weight": source.weight} | shards.contents(source.manifest) for source in self.sources]

    def refuse_other(self, where: Path, before: list[dict]) -> None:
        """Raise BadInput unless the data begins as it was ``before``; what is being read anew is waited for."""
        if [state["weight"] for state in before] != [source.weight for source in self.sources]:
            raise BadInput(
                f"{where}: was trained on sources of other weights; set them back, or give another --run_name"
            )
        pairs = list(zip(before, self.sources, strict=True))

        def there() -> bool:
            opened = all(len(source.manifest["splits"]["train"]) >= state["shards"] for state, source in pairs)
            return opened or self.refresh()

        self.supply.until(there, "the shards that the checkpoint has seen")
        for state, source in pairs:
            shards.refuse_other_contents(where, state, source.manifest)

    def delete_consumed(self, order: windows.TrainOrder, run_dir: Path) -> None:
        """Delete the train shards that the oldest checkpoint kept, and so any resumed run, has no more use for."""
        if kept := checkpoint.list_checkpoints(run_dir / "checkpoints"):
            oldest = order.oldest_needed(checkpoint.step_of(kept[-1]))
            for train, first in zip(self.train, oldest, strict=True):
                for path in train.paths_before(first):
                    train.release(path)
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the readers; what they have finished is kept."""
        self.supply.close()

    def _start_reader(self, index: int, argv: list[str]) -> Reader | None:
        """Start prepare_data.py for a source that is not complete: the first process of each machine does."""
        source = self.sources[index]
        if source.found is None or os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        if (shards.read_manifest(source.folder) or {"complete": False})["complete"]:
            return None
        words = [word for word in argv if word not in {f"--{name}" for name in config.TRAIN_MODES}]
        script = Path(__file__).with_name("prepare_data.py")
        command = [sys.executable, str(script), *words, "--source", str(index), "--follow"]
        return Reader(command, lambda line: self.say(f"data     {line}"))

    def _empty(self) -> windows.Windows:
        return windows.Windows(self.recipe.sequence_length, self.recipe.vocab_size)

    def _append(self, opened: windows.Windows, source: Source, split: str, first_row: int) -> windows.Windows:
        rows = source.manifest["splits"][split][first_row:]
        shards.refuse_changed(source.folder, rows)
        for row in rows:
            path = source.folder / row["file"]
            consumed = self.recipe.stream_keep == "consumed" and not path.exists()
            opened.append(path, row["tokens"], *((None, 0) if consumed else shards.open_ids(path, row["tokens"])))
        if source.manifest["tokenizer"] is None and self.is_first:
            opened.check_ids()  # of shards that others made; ours were looked at when they were written
        if not opened.num_windows and (source.manifest["complete"] or split != "train"):
            raise BadInput(
                f"{source.folder}: the {split} split has {opened.num_tokens} tokens, and no shard of it one window of "
                f"sequence_length + 1 = {self.recipe.sequence_length + 1}. Give more text, or a smaller --sequence_length"
            )
        return opened


class Publisher:
    """What a run shows to others: its picture, its model card, and what it pushes to the Hub; by the main process.

    A push is laid ready on disk when its checkpoint is there, and sent beside training.

    Args:
        repo_id: where to; None = nowhere.
    """

    def __init__(
        self,
        recipe: config.Recipe,
        corpus: Corpus,
        run_dir: Path,
        repo_id: str | None,
        plan: config.Plan,
        horizon: Horizon,
        model: PreTrainedModel,
        accelerator: Accelerator,
    ):
        self.recipe, self.corpus, self.run_dir, self.repo_id = recipe, corpus, run_dir, repo_id
        self.plan, self.horizon, self.parameters = plan, horizon, models.count_parameters(model)
        self.device = hardware.device_name(accelerator.device)
        self.precision = accelerator.mixed_precision if accelerator.mixed_precision != "no" else "fp32"
        self.is_main, self._drawn = accelerator.is_main_process, time.monotonic()
        self._draws = self.is_main and find_spec("matplotlib") is not None
        if self.is_main and not self._draws:
            corpus.say("curves.png is not drawn: matplotlib is not installed; metrics.jsonl has its numbers")
        self._pusher, self._pushes = None, 0
        if repo_id and self.is_main:
            self._pusher = hub.Pusher(run_dir / PENDING, lambda line: corpus.say(line))
            with tempfile.TemporaryDirectory() as folder:
                export.describe(model.config, Path(folder), corpus.tokenizer)
                self._description = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}

    def draw(self, at_least: float = 0.0) -> None:
        """Draw curves.png, unless less than ``at_least`` seconds have passed since it was."""
        if self._draws and time.monotonic() - self._drawn >= at_least:
            rows = read_metrics(self.run_dir / "metrics.jsonl")
            published = model_card.published(config.public(self.recipe), hellaswag.PUBLISHED)
            curves.draw_curves(rows, self.run_dir / "curves.png", self.recipe.run_name, published=published)
            self._drawn = time.monotonic()

    def saved(self, path: Path) -> None:
        """Lay a checkpoint's push ready; called beside training. The last one waits for ``finished``."""
        step = checkpoint.step_of(path)
        if self._pusher and self.recipe.hub_strategy != "end" and step < self.horizon.max_steps:
            self._try_to_stage(step, self._description | {"model.safetensors": path / checkpoint.MODEL})

    def finished(self, step: int) -> None:
        """Lay the run's last push ready: what ``model/`` holds."""
        if self._pusher:
            self._try_to_stage(step, {path.name: path for path in (self.run_dir / "model").iterdir()})

    def wait(self, seconds: float, given_up: Callable[[], bool]) -> None:
        """Wait for the Hub; what is not sent stays where it is."""
        if not self._pusher:
            return
        until, left = time.monotonic() + seconds, self._pusher.close(1)
        if left:
            self.corpus.say(f"hub      {left} push(es) to go; Ctrl-C leaves them for --push_pending")
        while left and self._pusher.sending and time.monotonic() < until and not given_up():
            left = self._pusher.close(1)
        if left:
            command = f"python train.py --push_pending {self.run_dir}"
            self.corpus.say(f"hub      {left} push(es) wait in {self.run_dir / PENDING}; to send them: {command}")
        elif self._pushes:
            self.corpus.say(f"hub      all pushes are in {self.repo_id}")

    def _card(self, step: int) -> str:
        return model_card.model_card(
            repo_id=self.repo_id,
            step=step,
            rows=read_metrics(self.run_dir / "metrics.jsonl"),
            recipe=config.public(self.recipe),
            command=command_line(),
            hardware=self.device,
            num_processes=self.plan.num_processes,
            precision=self.precision,
            parameters=self.parameters,
            flops_per_token=recipe_shape(self.recipe).flops_per_token,
            tokenizer_size=len(self.corpus.tokenizer),
            scores=hellaswag.PUBLISHED,
            sources=hellaswag.SOURCES,
        )

    def _try_to_stage(self, step: int, files: dict[str, Path | str]) -> None:
        try:
            self._stage(step, files)
        except Exception as error:  # whatever it is, a push ends no run
            self.corpus.say(f"error: no push of step {step}: {type(error).__name__}: {error}. The run goes on")

    def _stage(self, step: int, files: dict[str, Path | str]) -> None:
        """Lay a push ready: the model's ``files``, what tells about it and, as hub_strategy says, its checkpoint."""
        files = {name: file for name, file in files.items() if hub.ALLOWED.fullmatch(name)}
        rows = [row for row in read_metrics(self.run_dir / "metrics.jsonl") if row["step"] <= step]
        files["README.md"] = self._card(step)
        files["metrics.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
        optional = [self.run_dir / "recipe.yaml", self.run_dir / "curves.png"]
        files |= {path.name: path for path in optional if path.is_file()}
        path = self.run_dir / "checkpoints" / f"step-{step:08d}"
        if self.recipe.hub_strategy in ("checkpoint", "all_checkpoints") and path.is_dir():
            newest = self.recipe.hub_strategy == "checkpoint"
            within = "last-checkpoint" if newest else f"checkpoints/{path.name}"
            files |= {f"{within}/{file.name}": file for file in path.iterdir()}
        now = {name: value for row in rows if row["step"] == step for name, value in row.items()}
        losses = {name: now[name] for name in ("train/loss", "eval/loss") if name in now}
        words = ", ".join(
            f"{name.replace('eval', 'validation').replace('/', ' ')} {x:.4f}" for name, x in losses.items()
        )
        self._pushes += 1
        self._pusher.add(
            step,
            repo_id=self.repo_id,
            private=self.recipe.hub_private_repo,
            title=f"{self.recipe.run_name}, step {step}: {words}",
            tag=f"step-{step:08d}",
            files=files,
        )


def train_order(recipe: config.Recipe, opened: list[Source], plan: config.Plan) -> windows.TrainOrder:
    """Return which windows each process reads at each step."""
    return windows.TrainOrder(
        weights=tuple(source.weight for source in opened),
        sequence_length=recipe.sequence_length,
        sequences_per_step=plan.sequences_per_step,
        micro_batch_size=plan.per_device_train_batch_size,
        num_processes=plan.num_processes,
        seed=recipe.data_seed,
        block_tokens=recipe.shuffle_block_tokens,
    )


def refuse_foreign_run(recipe: config.Recipe, run_dir: Path) -> None:
    """Raise BadInput when the run folder holds another recipe's run, or is no run folder."""
    old = run_dir / "recipe.yaml"
    if recipe.resume_from_checkpoint not in ("auto", "none") and not hub.is_address(recipe.resume_from_checkpoint):
        checkpoint.read_state(Path(recipe.resume_from_checkpoint))
    if run_dir.exists() and not run_dir.is_dir():
        raise BadInput(f"output_dir = {run_dir}: is a file; give another --run_name or --output_dir")
    if not old.is_file():
        if run_dir.is_dir() and any(path.name != LOCK for path in run_dir.iterdir()):
            raise BadInput(f"output_dir = {run_dir}: has files and no recipe.yaml: not a run folder of ours")
        return
    config.refuse_changed_science(old, config.science(config.load_recipe(old)), recipe)
    if recipe.resume_from_checkpoint == "none" and checkpoint.list_checkpoints(run_dir / "checkpoints"):
        raise BadInput(f"resume_from_checkpoint = none: {run_dir} holds checkpoints; give another --run_name")


def refuse_missing_kernels(device: hardware.Device) -> None:
    """Raise BadInput where this build of torch has no kernels for the card: its first product would be a traceback."""
    if device.kind == "cuda":
        verdict = verdicts.architecture(device.name, device.capability, torch.cuda.get_arch_list())
        if verdict.level == verdicts.ERROR:
            raise BadInput(f"{verdict.text}; {verdict.remedy}")


def command_line() -> list[str]:
    """Return the words that started this run: the launcher's, where there is one; URLs in them are redacted."""
    words = [Path(sys.argv[0]).name, *map(redact, sys.argv[1:])] if sys.argv else []
    try:
        import psutil  # comes with Accelerate; only this needs it
    except ImportError:
        return ["python", *words]
    parent = psutil.Process().parent()
    launcher = [*map(redact, parent.cmdline())] if parent else []
    for place, word in enumerate(launcher[:3]):
        if Path(word).name in ("accelerate", "torchrun"):
            return [Path(word).name, *launcher[place + 1 :]]
    return ["python", *words]


def tracker_names(recipe: config.Recipe) -> list[str]:
    """Return which trackers the run reports to."""
    return [name for name in recipe.report_to or () if name != "none"]


def track(recipe: config.Recipe, run_dir: Path, report: Report, state: dict) -> None:
    """Let the trackers that the recipe names hear what is reported, as the same runs as before a resume."""
    if (names := tracker_names(recipe)) and report.is_main:
        report.trackers = trackers.Trackers(
            names,
            run_dir=run_dir,
            project_name=recipe.project_name,
            run_name=recipe.run_name,
            tags=tuple(recipe.tags),
            config=config.public(recipe),
            ids=state.get("trackers", {}),
            rows=read_metrics(report.metrics_path),
            say=report.say,
        )


def check_hub(recipe: config.Recipe, run_dir: Path) -> str | None:
    """Return the repository that the run pushes to, on the first process; None: it pushes nothing.

    Raises BadInput for what cannot work.
    """
    if not recipe.push_to_hub or os.environ.get("RANK", "0") != "0":
        return None
    fresh = not checkpoint.list_checkpoints(run_dir / "checkpoints") and not hub.is_address(
        recipe.resume_from_checkpoint
    )
    repo_id, notes = hub.check(
        recipe.hub_model_id or recipe.run_name,
        private=recipe.hub_private_repo,
        fresh=fresh,
        card=model_card.metadata(config.public(recipe)),
    )
    for note in notes:
        print(f"hub      {note}", file=sys.stderr)
    return repo_id


def push_pending(run_dir: Path) -> int:
    """Send what waits in a run folder; return 0 when nothing is left."""
    if not run_dir.is_dir():
        raise BadInput(f"--push_pending {run_dir}: no such run folder")
    return 1 if hub.push_pending(run_dir / PENDING, lambda line: print(line, file=sys.stderr, flush=True)) else 0


def open_tokenizer(recipe: config.Recipe, opened: list[Source]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that all shards were made with. Raises BadInput when they do not fit it, or each other."""
    own = [source.folder / "tokenizer" for source in opened if (source.folder / "tokenizer").is_dir()]
    name = str(own[0]) if own else recipe.tokenizer
    if name in config.MADE:
        raise BadInput(
            f"tokenizer = {name}: is made from text, and {opened[0].folder} holds shards of others; give the one that "
            f"they were made with: --tokenizer openai-community/gpt2, or a folder"
        )
    tokenizer = tokenization.load(name)
    fingerprint = tokenization.fingerprint(tokenizer)
    for source in opened:
        made = source.manifest["tokenizer"]
        if made and made["fingerprint"] != fingerprint:
            raise BadInput(f"{source.folder}: its shards were made with another tokenizer than {name}")
        otherwise_named = made and recipe.tokenizer not in (made["name"], *config.MADE)
        if otherwise_named and tokenization.fingerprint(tokenization.load(recipe.tokenizer)) != fingerprint:
            raise BadInput(f"tokenizer = {recipe.tokenizer}: the shards in {source.folder} were made with another one")
    refuse_foreign_tokenizer(recipe, name, fingerprint)
    if len(tokenizer) > recipe.vocab_size:
        fits = -(-len(tokenizer) // 64) * 64
        raise BadInput(
            f"vocab_size = {recipe.vocab_size}: the tokenizer has {len(tokenizer)} ids; use --vocab_size {fits}"
        )
    return tokenizer


def refuse_foreign_tokenizer(recipe: config.Recipe, name: str, fingerprint: str) -> None:
    """Raise BadInput when ``init_from`` has a tokenizer and it is another one: the same ids would be other text."""
    if recipe.init_from in (None, name):
        return
    try:
        own = tokenization.load(recipe.init_from)
    except BadInput:  # weights without a tokenizer: the recipe's word is taken for it
        return
    if tokenization.fingerprint(own) != fingerprint:
        raise BadInput(
            f"tokenizer = {recipe.tokenizer}: is not the one of init_from = {recipe.init_from}, whose ids mean other "
            f"text; use --tokenizer {recipe.init_from}"
        )


@contextlib.contextmanager
def run_folder(recipe: config.Recipe, run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Make the run folder and hold it: one trainer a folder."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        yield
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    busy = f"output_dir = {run_dir}: process {{pid}} is training there; stop it, or give another --run_name"
    with files.locked(run_dir / LOCK, busy):
        checkpoint.clear_partial(run_dir / "checkpoints")
        files.write_text(run_dir / "recipe.yaml", config.as_yaml(recipe))
        accelerator.wait_for_everyone()
        yield


def build_model(recipe: config.Recipe, corpus: Corpus) -> PreTrainedModel:
    """Build the recipe's model, on the CPU in fp32, the same on every process."""
    shape = {name: getattr(recipe, name) for name in config.MODEL_KEYS if getattr(recipe, name) is not None}
    return models.build(
        **shape,
        sequence_length=recipe.sequence_length,
        resid_pdrop=recipe.resid_pdrop,
        embd_pdrop=recipe.embd_pdrop,
        attn_pdrop=recipe.attn_pdrop,
        eos_token_id=corpus.tokenizer.eos_token_id,
        seed=recipe.seed,
        init_from=recipe.init_from,
        gradient_checkpointing=recipe.gradient_checkpointing,
    )


def loss_of(recipe: config.Recipe, corpus: Corpus, model: PreTrainedModel) -> NextTokenLoss:
    """Return the module that returns the loss: in training with the recipe's extras, in evaluation without."""
    separator = corpus.tokenizer.eos_token_id
    return NextTokenLoss(
        model,
        label_smoothing=recipe.label_smoothing,
        z_loss=recipe.z_loss,
        context=functools.partial(models.within_documents, separator=separator) if recipe.document_mask else None,
    )


def prepare(
    recipe: config.Recipe, corpus: Corpus, model: PreTrainedModel, accelerator: Accelerator
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the module that returns the loss, as Accelerate wraps it, and the optimizer of the model's weights."""
    loss_module = loss_of(recipe, corpus, model)
    make = {
        "adamw": optim.adamw,
        "adamw_8bit": optim.adamw_8bit,
        "muon": functools.partial(muon.muon, momentum=recipe.muon_momentum),
    }
    optimizer = make[recipe.optimizer](
        model,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        beta1=recipe.adam_beta1,
        beta2=recipe.adam_beta2,
        epsilon=recipe.adam_epsilon,
        shard=recipe.shard_optimizer and accelerator.num_processes > 1 and not accelerator.is_fsdp2,
    )
    if accelerator.is_fsdp2:  # its sharded weights are other tensors, which the optimizer must be given
        # Weights are gathered a block at a time.
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(model._no_split_modules)
        training_module, prepared = accelerator.prepare(loss_module, optimizer)
        return training_module, prepared.optimizer
    return accelerator.prepare(loss_module), optimizer


def recipe_shape(recipe: config.Recipe) -> estimate.Shape:
    """Return the model's size, for estimates."""
    names = [field.name for field in dataclasses.fields(estimate.Shape)]
    return estimate.Shape(**{name: getattr(recipe, name) for name in names if getattr(recipe, name) is not None})


def fit_micro_batch(
    recipe: config.Recipe,
    state: dict,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    training_module: torch.nn.Module,
    accelerator: Accelerator,
    stop: StopRequest,
    say: Callable[[str], None],
) -> config.Plan:
    """Share a step after trying one micro-batch; auto: halve it until no process runs out of memory.

    Raises BadInput, on all processes, when a given size does not fit, or not one sequence.
    """
    auto, ceiling = recipe.per_device_train_batch_size == "auto", None
    if auto:
        free = hardware.free_memory_bytes(accelerator.device, accelerator.num_processes)
        # A resumed run keeps its size, and so its bits.
        mine = state.get("micro_batch") or propose_micro_batch(recipe, hardware.this_device(), free, accelerator)
        ceiling = int(accelerator.gather(torch.tensor([mine], device=accelerator.device)).min())

    def forward_and_backward(inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
        with gradient_exchange(accelerator, training_module, wanted=False):
            accelerator.backward(training_module(inputs_BT, targets_BT))

    if accelerator.state.dynamo_plugin.backend.value.lower() != "no":
        say("compiling: the first micro-batch takes a minute or two")
    while True:
        plan = config.make_plan(recipe, accelerator.num_processes, ceiling)
        refuse_cuda_graphs(plan, accelerator)
        if (
            accelerator.is_fsdp2
        ):  # where its forward pass is an exchange: one process's failure would leave the rest waiting
            return plan
        failed = fit.runs_out_of_memory(
            forward_and_backward,
            model.parameters(),
            micro_batch=plan.per_device_train_batch_size,
            sequence_length=recipe.sequence_length,
            micro_batches=plan.gradient_accumulation_steps,
            room_bytes=0 if state["step"] else moment_bytes(recipe, accelerator),  # a resumed run has them already
            device=accelerator.device,
        )
        if not any(stop.any_of(failed)):
            return plan
        ceiling = plan.per_device_train_batch_size // 2
        if auto and ceiling:
            say(f"a micro-batch of {plan.per_device_train_batch_size} sequences runs out of memory: trying {ceiling}")
        if not auto or not ceiling:
            raise BadInput(out_of_memory(recipe, plan, accelerator.device))


def moment_bytes(recipe: config.Recipe, accelerator: Accelerator) -> int:
    """Return what the optimizer will keep on this process's device."""
    whole = estimate.moment_bytes(recipe_shape(recipe), recipe.optimizer)
    return int(whole / (accelerator.num_processes if recipe.shard_optimizer else 1))


def refuse_cuda_graphs(plan: config.Plan, accelerator: Accelerator) -> None:
    """Raise BadInput for CUDA graphs and several micro-batches: a graph run again overwrites gradients that wait.

    https://github.com/pytorch/pytorch/issues/169545
    """
    mode, count = accelerator.state.dynamo_plugin.mode, plan.gradient_accumulation_steps
    if accelerator.device.type == "cuda" and mode in ("reduce-overhead", "max-autotune") and count > 1:
        raise BadInput(
            f"compile_mode = {mode}: its CUDA graphs would overwrite the gradients of {count} micro-batches a step; use "
            f"--compile_mode max-autotune-no-cudagraphs, or a --tokens_per_step that fits in one"
        )


def propose_micro_batch(recipe: config.Recipe, device: hardware.Device, free: float, accelerator: Accelerator) -> int:
    """Return where auto begins: the largest size that the memory model lets fit."""
    sharded = {"moments"} if recipe.shard_optimizer else set()
    if accelerator.is_fsdp2:
        sharded = {"weights", "gradients", "moments"}
        sharded |= {"half copies"} if accelerator.state.fsdp_plugin.reshard_after_forward else set()
    fits = estimate.largest_micro_batch(
        recipe_shape(recipe),
        free,
        most_tokens=estimate.MOST_TOKENS if device.kind == "cuda" else CPU_TOKENS,
        half=accelerator.mixed_precision != "no",
        compiled=accelerator.state.dynamo_plugin.backend.value.lower() != "no",
        checkpointing=recipe.gradient_checkpointing,
        optimizer=recipe.optimizer,
        shards=accelerator.num_processes,
        sharded=frozenset(sharded),
    )
    return max(1, fits)


def out_of_memory(recipe: config.Recipe, plan: config.Plan, device: torch.device) -> str:
    """Say what ran out of memory and what to do."""
    size = plan.per_device_train_batch_size
    asked = recipe.per_device_train_batch_size
    remedies = [f"--per_device_train_batch_size {size // 2}{' or auto' if asked != 'auto' else ''}"] if size > 1 else []
    remedies += [] if recipe.gradient_checkpointing == "full" else ["--gradient_checkpointing full"]
    remedies += [] if size > 1 else ["a smaller model or --sequence_length", "or, on several cards, zero3_x8.yaml"]
    return (
        f"per_device_train_batch_size = {asked}: {hardware.device_name(device)} runs out of memory at a micro-batch of "
        f"{size} x {recipe.sequence_length} tokens. Use {', or '.join(remedies)}; what is learned stays the same"
    )


@contextlib.contextmanager
def out_of_memory_told(
    recipe: config.Recipe, plan: config.Plan, device: torch.device, save: Callable[[], object]
) -> Iterator[None]:
    """End the run with a checkpoint and a remedy when memory runs out after all.

    This process does so alone: the others may sit in an exchange already, and end with it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        save()
        message = out_of_memory(recipe, plan, device)
        raise TrainingStopped(f"{message}; the run goes on from its newest checkpoint", alone=True) from None


def find_checkpoint(recipe: config.Recipe, run_dir: Path, accelerator: Accelerator) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to go on from, the same on all processes, and a line for each newer one that is damaged."""
    asked = recipe.resume_from_checkpoint
    if asked == "none":
        return None, []
    if asked != "auto" and not hub.is_address(asked):
        return Path(asked), []
    found: list = [None, [], None]
    if accelerator.is_main_process:
        try:
            found[:2] = checkpoint.find_newest(run_dir / "checkpoints")
            if found[0] is None and hub.is_address(asked):  # later starts of the same command go on from this folder
                print(f"hub      fetching {asked}", file=sys.stderr, flush=True)
                found[0] = hub.fetch_checkpoint(asked, run_dir / "checkpoints", run_dir)
        except BadInput as error:
            found[2] = error.lines
    broadcast_object_list(found)
    if found[2]:
        raise BadInput(found[2])
    return found[0], found[1]


def resume(
    recipe: config.Recipe,
    corpus: Corpus,
    run_dir: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
) -> tuple[dict, list[str]]:
    """Load the newest checkpoint that verifies, if any; return its counters and what to tell the user."""
    path, damaged = find_checkpoint(recipe, run_dir, accelerator)
    notes = [f"skipped a damaged checkpoint: {line}" for line in damaged]
    if path is None:
        counters = {
            "step": 0,
            "skipped_updates": 0,
            "bad_in_a_row": 0,
            "elapsed_seconds": 0.0,
            "data_wait_seconds": 0.0,
        }
        return counters, notes
    state = checkpoint.read_state(path)
    config.refuse_changed_science(path, state["science"], recipe)  # a path may lead to another run
    corpus.refuse_other(path, state["data"])
    checkpoint.load(path, model, optimizer)
    if accelerator.scaler is not None and state["scaler"]:
        accelerator.scaler.load_state_dict(state["scaler"])
    notes.append(f"resumed from {path}")
    max_steps, _ = state.get("planned") or (recipe.max_steps, 0)
    if state["step"] >= max_steps:
        notes.append(f"nothing is left to train: max_steps = {max_steps} is reached")
    if state["threads"] != torch.get_num_threads():
        notes.append(f"note: it ran with {state['threads']} threads; bits may differ with {torch.get_num_threads()}")
    return state, notes


def header(
    recipe: config.Recipe,
    plan: config.Plan,
    corpus: Corpus,
    order: windows.TrainOrder,
    model: PreTrainedModel,
    flops: int,
    accelerator: Accelerator,
) -> list[str]:
    """Return the lines that say what this run is."""
    tokens = recipe.max_steps * recipe.tokens_per_step
    compiled = accelerator.state.dynamo_plugin.backend.value.lower()
    tf32 = torch.get_float32_matmul_precision() == "high"
    options = [
        f"precision {accelerator.mixed_precision if accelerator.mixed_precision != 'no' else 'fp32'}",
        *(["TF32"] if tf32 else []),
        *(["deterministic"] if recipe.deterministic else []),
        f"compile {compiled}{f' ({recipe.compile_mode})' if recipe.compile_mode != 'default' else ''}",
        *(
            [f"{recipe.gradient_checkpointing} gradient checkpointing"]
            if recipe.gradient_checkpointing != "none"
            else []
        ),
        *(
            ["FSDP2"]
            if accelerator.is_fsdp2
            else ["ZeRO-1"]
            if recipe.shard_optimizer and plan.num_processes > 1
            else []
        ),
    ]
    return [
        f"run      {recipe.run_name} in {recipe.output_dir}",
        describe_model(recipe, corpus, model),
        *describe_data(recipe, corpus, order),
        f"step     {recipe.tokens_per_step:,} tokens = {plan.num_processes} process(es) x "
        f"{plan.gradient_accumulation_steps} micro-batch(es) x {plan.per_device_train_batch_size} sequences x "
        f"{recipe.sequence_length} tokens",
        f"device   {hardware.device_name(accelerator.device)}, {', '.join(options)}",
        *describe_hellaswag_test(recipe, corpus),
        f"compute  {flops / 1e6:,.1f} MFLOP per token, {flops * tokens:.2e} FLOP in all; expected time follows the "
        f"first steps",
    ]


def describe_model(recipe: config.Recipe, corpus: Corpus, model: PreTrainedModel) -> str:
    """Say what is trained, and from what it begins."""
    kind = {"gpt2": "GPT-2", "llama": "Llama-type"}[recipe.architecture]
    shared = recipe.num_key_value_heads or recipe.n_head
    return (
        f"model    {kind}, {models.count_parameters(model) / 1e6:.1f}M parameters: {recipe.n_layer} layers, "
        f"{recipe.n_head} heads{f' ({shared} of keys)' if shared != recipe.n_head else ''}, {recipe.n_embd} wide, "
        f"context {recipe.sequence_length}, vocabulary {recipe.vocab_size} ({len(corpus.tokenizer)} used)"
        f"{f'; from {recipe.init_from}' if recipe.init_from else ''}"
    )


def describe_hellaswag_test(recipe: config.Recipe, corpus: Corpus) -> Iterator[str]:
    """Say that the run scores itself on HellaSwag, and on what."""
    if recipe.hellaswag_steps:
        cut = f"; {corpus.hellaswag_cut} texts lose their beginning to the context" if corpus.hellaswag_cut else ""
        yield f"score    {len(corpus.hellaswag.items):,} HellaSwag items every {recipe.hellaswag_steps} steps{cut}"


def describe_data(recipe: config.Recipe, corpus: Corpus, order: windows.TrainOrder) -> Iterator[str]:
    """Say what the run reads, a line a source, and what the user should know about where it lies."""
    read, shares = order.read_before(recipe.max_steps), order.shares()
    for source, windows_read, share in zip(corpus.sources, read, shares, strict=True):
        folder, train, manifest = source.folder, source.train, shards.describe_folder(source.folder)
        tokens, complete = windows_read * recipe.sequence_length, manifest["complete"]
        there = sum(row["tokens"] for row in manifest["splits"]["train"])  # a reader may be further than what is opened
        yield (
            f"data     {folder}: {there:,} train tokens{'' if complete else ' so far, more are being read'}; "
            f"the run reads {tokens:,}{f' ({tokens / there:.2f} epochs)' if complete else ''}"
            f"{f', {share:.1%} of its windows' if len(shares) > 1 else ''}"
        )
        if train.dropped_tokens > 0.01 * train.num_tokens:
            yield (
                f"note     {train.dropped_tokens:,} of its tokens are in no window: ends of shards, and shards shorter "
                f"than sequence_length"
            )
        if mount := hardware.network_mount(folder):
            yield (
                f"note     {folder} lies on {mount}, over the network: each window is fetched from there. Copy it to a "
                f"local disk: cp -r {folder} /local/disk, then --data_dir /local/disk/{folder.name}"
            )


def wait_for_data(corpus: Corpus, order: windows.TrainOrder, step: int, stop: StopRequest) -> str | None:
    """Wait until all that ``step`` reads is there; return why it never will be, if so."""
    have = lambda: [train.num_windows for train in corpus.train]  # noqa: E731
    failure = corpus.supply.wait(order.needed(step), have, lambda: stop.requested, stop.any_of)
    if corpus.recipe.stream_keep == "consumed" and not failure:
        try:
            order.refuse_second_epoch(step + 1, corpus.epoch_windows)  # how long an epoch is may not be known earlier
        except BadInput as error:
            return str(error)
    return failure


def train_batches(recipe: config.Recipe, corpus: Corpus, device: torch.device) -> windows.Mapped | windows.Resident:
    """Return where batches come from: memory-mapped files, or ids that live on the card whole (data_device)."""
    size = 4 * sum(source.num_tokens for source in corpus.train)
    if recipe.data_device == "cuda":
        if device.type != "cuda":
            raise BadInput(f"data_device = cuda: this run is on {device}; use --data_device auto")
        if not corpus.complete:
            raise BadInput("data_device = cuda needs all of the data: run prepare_data.py first, or use auto")
    small = recipe.data_device == "auto" and device.type == "cuda" and corpus.complete and size <= RESIDENT_BYTES
    kind = windows.Resident if small or recipe.data_device == "cuda" else windows.Mapped
    return kind(corpus.train, device)


def validation_loss(
    recipe: config.Recipe,
    plan: config.Plan,
    corpus: Corpus,
    split: str,
    model: PreTrainedModel,
    accelerator: Accelerator,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return the loss of a split over all processes (None when stopped): nats per token and bits per byte."""
    found = [corpus.test] if split == "test" else [source.validation for source in corpus.sources]
    draws = windows.eval_draws(
        [opened.num_windows for opened in found],
        [source.weight for source in corpus.sources],
        max_windows=max(1, recipe.eval_tokens // recipe.sequence_length) if recipe.eval_tokens else 0,
    )
    batches = windows.eval_batches(
        windows.Mapped(found, accelerator.device),
        draws,
        batch_size=plan.per_device_train_batch_size,
        rank=accelerator.process_index,
        num_processes=plan.num_processes,
    )
    with hardware.autocast(accelerator):
        return validation.validation_loss(
            loss_of(recipe, corpus, model),
            batches,
            device=accelerator.device,
            reduce_sum=lambda tensor: accelerator.reduce(tensor, "sum"),
            bytes_per_token=corpus.bytes_per_token,
            stop=stop,
        )


def describe_loss(split: str, result: dict[str, float]) -> str:
    """Say a validation result in one line."""
    bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
    return f"{split} loss {result['loss']:.4f} nats per token{bits}"


def hellaswag_scores(
    corpus: Corpus, model: PreTrainedModel, accelerator: Accelerator, stop: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Return the three scores and their errors, all processes sharing the work (None when stopped)."""
    test = corpus.hellaswag
    with hardware.autocast(accelerator):
        found = likelihood.log_likelihoods(
            model,
            test.questions,
            context_length=corpus.recipe.sequence_length,
            reduce_sum=lambda tensor: accelerator.reduce(tensor, "sum"),
            rank=accelerator.process_index,
            num_processes=accelerator.num_processes,
            stop=stop,
        )
    return None if found is None else test.scores(test.predictions(found)) | {"items": len(test.items)}


def describe_hellaswag(result: dict[str, float]) -> str:
    """Say HellaSwag's scores in one line, in per cent."""
    each = (f"{score} {100 * result[score]:.2f}% ± {100 * result[f'{score}_stderr']:.2f}" for score in hellaswag.SCORES)
    return f"HellaSwag {', '.join(each)}"


def checkpoint_saver(
    recipe: config.Recipe, corpus: Corpus, run_dir: Path, accelerator: Accelerator
) -> checkpoint.Saver:
    """Return what saves checkpoints into the run folder while training goes on."""
    return checkpoint.Saver(
        run_dir / "checkpoints",
        is_main=accelerator.is_main_process,
        keep=recipe.save_total_limit,
        say=lambda line: corpus.say(line),
    )


def save_checkpoint(
    recipe: config.Recipe,
    corpus: Corpus,
    saver: checkpoint.Saver,
    step: int,
    counters: dict,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    alone: bool = False,
) -> None:
    """Begin to save a checkpoint; a full disk is said and survived, for the older checkpoints still stand.

    Args:
        alone: the other processes do not call. Where tensors are sharded nothing can be saved then.
    """
    if alone and (accelerator.is_fsdp2 or recipe.shard_optimizer) and accelerator.num_processes > 1:
        return
    state = {
        **counters,
        "tokens": step * recipe.tokens_per_step,
        "scaler": accelerator.scaler.state_dict() if accelerator.scaler else None,
        "science": config.science(recipe),
        "data": corpus.contents(),
        "data_wait_seconds": corpus.supply.waited_seconds,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }
    saver.save(step, model, optimizer, state, alone=alone)


def write_samples(
    recipe: config.Recipe, corpus: Corpus, report: Report, step: int, model: PreTrainedModel, *, show: bool
) -> None:
    """Sample from each prompt into samples.txt, and onto the terminal where ``show``; the main process does it."""
    if not report.is_main:
        return
    texts = []
    for number, prompt in enumerate(recipe.sample_prompts):
        ids = sampling.sample(
            model,
            tokenization.encode_prompt(corpus.tokenizer, prompt),
            corpus.tokenizer,
            max_new_tokens=recipe.sample_tokens,
            temperature=0.8,
            top_k=200,
            top_p=1.0,
            seed=recipe.seed + number,
        )
        text = corpus.tokenizer.decode(ids, skip_special_tokens=True)
        texts.append((prompt, text))
        if show:
            report.say(f"---- sample, prompt {prompt!r}\n{prompt}{text}")
    report.samples(step, texts)


def learning_rate(recipe: config.Recipe, step: int, horizon: Horizon) -> float:
    """Return the learning rate for the update after ``step``: a pure function, no scheduler's state."""
    return optim.lr_at(
        step,
        peak=recipe.learning_rate,
        warmup_steps=horizon.warmup_steps,
        max_steps=horizon.max_steps,
        min_ratio=recipe.min_lr_ratio,
        shape=recipe.lr_scheduler_type,
        decay_ratio=recipe.decay_ratio,
    )


def seed_dropout(recipe: config.Recipe, step: int, micro_step: int, rank: int) -> None:
    """Make dropout, if any, a function of where the run is, so that no generator's state needs to be saved."""
    if not (recipe.resid_pdrop or recipe.embd_pdrop or recipe.attn_pdrop):
        return
    mixed = np.random.SeedSequence([recipe.seed, step, micro_step, rank]).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(mixed >> np.uint64(1)))


def gradient_exchange(
    accelerator: Accelerator, module: torch.nn.Module, wanted: bool
) -> contextlib.AbstractContextManager:
    """Exchange gradients between processes in this backward pass, or leave them for a later one.

    FSDP exchanges in each: whole gradients that wait for a later one are the memory that it is there to save.
    """
    return contextlib.nullcontext() if wanted or accelerator.is_fsdp2 else accelerator.no_sync(module)


def tell(
    recipe: config.Recipe,
    plan: config.Plan,
    report: Report,
    corpus: Corpus,
    meter: Meter,
    step: int,
    outcome: optim.Update,
    lr: float,
    skipped: int,
    device: torch.device,
) -> None:
    """Report an update: the metrics row, the progress line and, once a run, what would use the card better."""
    gauges = hardware.gauges(device)
    row = {"train/loss": outcome.loss, "train/grad_norm": outcome.grad_norm, "train/lr": lr}
    row |= {"skipped_updates": skipped, "elapsed_seconds": meter.elapsed, **meter.read(), **gauges}
    row["data_wait_seconds"] = corpus.supply.waited_seconds  # of elapsed_seconds
    report.log(step, row)
    report.progress(step, row)
    if meter.updates >= HINT_AFTER:
        report.hint(
            hardware.hint(
                gauges,
                micro_batch=plan.per_device_train_batch_size,
                most=plan.per_device_train_batch_size * plan.gradient_accumulation_steps,
                tokens=plan.per_device_train_batch_size * recipe.sequence_length,
                waiting=corpus.supply.waited_seconds / max(meter.elapsed, 1e-9),
            )
        )


def diverged(run_dir: Path, step: int, reason: str) -> str:
    """Say why the run stopped and what stands."""
    newest = next(iter(checkpoint.list_checkpoints(run_dir / "checkpoints")), "none")
    return (
        f"{BAD_UPDATES_IN_A_ROW} updates in a row were skipped, the last at step {step}: {reason}. The weights are those "
        f"of the last good update, in {newest}. Lower learning_rate or look at the data; the same command goes on"
    )


def finish(
    corpus: Corpus, run_dir: Path, model: PreTrainedModel, report: Report, meter: Meter, accelerator: Accelerator
) -> None:
    """Write ``model/`` and say where everything lies."""
    if accelerator.is_main_process:
        export.write(model, run_dir / "model", corpus.tokenizer)
    report.say(f"trained for {duration(meter.elapsed)} (looking and saving not counted)")
    for name, what in {
        "model": f"load it with AutoModelForCausalLM.from_pretrained, or: python generate.py --model {run_dir}",
        "metrics.jsonl": "every number above",
        "curves.png": "loss, learning rate, speed",
        "samples.txt": "text on the way",
        "checkpoints": "to resume from",
    }.items():
        if (run_dir / name).exists():
            report.say(f"{str(run_dir / name) + ('/' if '.' not in name else ''):32} {what}")


def evaluate(recipe: config.Recipe, corpus: Corpus, run_dir: Path, accelerator: Accelerator) -> int:
    """Score the run's newest checkpoint, or ``init_from``: validation loss and HellaSwag; print one JSON line."""
    model = build_model(recipe, corpus).to(accelerator.device)
    path = None if recipe.init_from else find_checkpoint(recipe, run_dir, accelerator)[0]
    if path is None and not recipe.init_from:
        raise BadInput(f"eval_only: {run_dir} holds no checkpoint; train first, or give --init_from MODEL")
    if path is not None:
        config.refuse_changed_science(path, checkpoint.read_state(path)["science"], recipe)
        checkpoint.load(path, model, None)
    ceiling = None  # what trains fits, for there is no gradient here
    if recipe.per_device_train_batch_size == "auto":
        free = hardware.free_memory_bytes(accelerator.device, accelerator.num_processes)
        ceiling = propose_micro_batch(recipe, hardware.this_device(), free, accelerator)
    plan = config.make_plan(recipe, accelerator.num_processes, ceiling)
    result = validation_loss(recipe, plan, corpus, "validation", model, accelerator)
    line = {"model": recipe.init_from or str(path)} | {f"eval/{name}": value for name, value in result.items()}
    if corpus.hellaswag:
        found = hellaswag_scores(corpus, model, accelerator)
        line |= {f"hellaswag/{name}": value for name, value in found.items()}
    if accelerator.is_main_process:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main(parent=PARENT))
