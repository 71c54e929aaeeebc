"""Flags of other trainers in ours: the answer to a flag that does not exist, and the tables at the end of docs/knobs.md."""

import fnmatch
import re
from pathlib import Path

# A trainer's rows: its names, then what stands for them here; * is any end of a name.
TABLES = {
    "llm.c": """
| `-i`, `-j` pattern of train, of validation shards | `data_dir`: one folder; a file with `val` in its name is validation. Its `.bin` files read in place |
| `-e` model: `d12`; a `.bin` | `n_layer`, `n_head`, `n_embd`; `init_from` (a Transformers model, no `.bin`) |
| `-o` output folder | `output_dir`, or `run_name` |
| `-lg` log the card every so many steps | `logging_steps`: each row has `gpu/utilization`, `gpu/watts`, `gpu/memory` |
| `-n` checkpoint every | `save_steps` |
| `-nk` checkpoints kept | `save_total_limit` (0 = all; 2 at least) |
| `-nm` major checkpoints, never deleted | none: `save_total_limit: 0`, or `hub_strategy: all_checkpoints` |
| `-y 1` resume; `-y 0` | `resume_from_checkpoint: auto`, the default; `none`, in a folder without checkpoints |
| `-b` micro-batch | `per_device_train_batch_size` (a ceiling, or `auto`) |
| `-t` sequence length | `sequence_length` |
| `-d` tokens of a step | `tokens_per_step`, always stated |
| `-x` steps; -1: an epoch | `max_steps`, always stated: tokens / `tokens_per_step` |
| `-k` cosine, linear, constant, wsd | `lr_scheduler_type`. Its `wsd` falls by 1 - sqrt over the last 20%, ours in a line over `decay_ratio` |
| `-l` learning rate | `learning_rate` |
| `-u` warm-up | `warmup_steps`, the same ramp |
| `-q` last rate / peak | `min_lr_ratio` (its default is 1, no decay) |
| `-c` weight decay | `weight_decay`, on the same tensors |
| `-sl`, `-sg` skip an update whose loss, gradient norm is an outlier | none: an update is skipped when loss or norm is not finite, three in a row stop the run; `max_grad_norm` bounds the others |
| `-v` validation every | `eval_steps` |
| `-m` validation batches (-1: all) | `eval_tokens` = `-m` x `-b` x `-t` x processes (0: all) |
| `-s`, `-g` sample every, tokens | `sample_steps`, `sample_tokens`; `sample_prompts` |
| `-h 1` HellaSwag at each validation | `hellaswag_steps`; `acc_token_norm` is its score |
| `-a 1` overfit a batch | none: give a short text and many steps |
| `-f` TF32 | `tf32` |
| `-w` fp32 master weights | none: always, as `-w 1` |
| `-ge` GELU fused into the product | none: the compiler's business (`dynamo_backend`) |
| `-z` ZeRO stage; 0, 1 work there | 0: DDP; 1: `shard_optimizer: true`; 2, 3: `zero2_x8.yaml`, `zero3_x8.yaml` |
| `-r 0`, `-r 1`, `-r 2` recompute nothing, GELU, GELU and norms | `gradient_checkpointing: none`, `mlp`; none for the norms: `full` goes further. Its default is 1 |
| `-pn` processes | YAML `num_processes` |
| `-pr` rank | none: the launcher's; over machines YAML `machine_rank` |
| `-pg` cards of a machine | none: `num_processes` / `num_machines` |
| `-pi` (`-pm` in its help) how processes meet; `-pf` (`-pp`) a shared path | none: the launcher's rendezvous, TCP |
| `-ps` address of the first machine | YAML `main_process_ip` |
| fixed there: beta 0.9 and 0.95, epsilon 1e-8, clipping at 1, seed | `adam_beta1`, `adam_beta2`, `adam_epsilon`, `max_grad_norm`, `seed`, `data_seed` |
""",
    "nanoGPT": """
| `out_dir` | `output_dir`, or `run_name` |
| `eval_interval`, `log_interval` | `eval_steps`, `logging_steps` |
| `eval_iters` | `eval_tokens` = `eval_iters` x `batch_size` x `block_size`; the same windows at each look, validation only |
| `eval_only` | flag `--eval_only` |
| `always_save_checkpoint` | none: always; `save_steps`, and `save_total_limit: 0` to choose the best later |
| `init_from`: scratch, resume, gpt2... | left out; `resume_from_checkpoint: auto` (the default); `init_from: openai-community/gpt2...` |
| `wandb_log`, `wandb_project`, `wandb_run_name` | `report_to: [wandb]`, `project_name`, `run_name` |
| `dataset` | `data_dir`: its folder with `train.bin` and `val.bin`, with `tokenizer`; or `data_files`, `dataset_name` |
| `gradient_accumulation_steps` | none: derived. `tokens_per_step` = `gradient_accumulation_steps` x `batch_size` x `block_size`, over all processes there too |
| `batch_size` | `per_device_train_batch_size` |
| `block_size` | `sequence_length` |
| `n_layer`, `n_head`, `n_embd` | the same |
| `dropout` | `resid_pdrop`, `embd_pdrop`, `attn_pdrop` |
| `bias` | none: GPT-2 has biases; `architecture: llama` has none |
| `learning_rate`, `weight_decay` | the same |
| `beta1`, `beta2`, `grad_clip` | `adam_beta1`, `adam_beta2`, `max_grad_norm` |
| `max_iters` | `max_steps` |
| `lr_decay_iters` | none: the schedule ends where the run does, at `max_steps` |
| `warmup_iters` | `warmup_steps` |
| `min_lr` | `min_lr_ratio` = `min_lr` / `learning_rate` |
| `decay_lr` = False | `lr_scheduler_type: constant`, `warmup_steps: 0` |
| `backend` | none: NCCL on cards, gloo on CPUs |
| `device` | YAML: `cpu.yaml`, `mps.yaml`, a card's; without one the card that is there |
| `dtype` | YAML `mixed_precision` |
| `compile` | YAML `dynamo_backend` |
| vocabulary (50,304, or `meta.pkl`'s) | `vocab_size`, `tokenizer` |
""",
    "Transformers' TrainingArguments": """
| `gradient_accumulation_steps` | none: derived from `tokens_per_step` and printed |
| `num_train_epochs` | none: `max_steps` = epochs x train tokens / `tokens_per_step` |
| `warmup_steps` below 1 (a ratio) | `warmup_steps`, a whole number |
| `lr_scheduler_type` | cosine and cosine_with_min_lr: `cosine`; linear, constant_with_warmup, warmup_stable_decay: `linear`, `constant`, `wsd`. None for the others |
| `lr_scheduler_kwargs` | `min_lr_ratio`, `decay_ratio` |
| `optim` | `optimizer`: adamw_torch_fused is `adamw`; adamw_8bit and adamw_bnb_8bit are `adamw_8bit`; `muon`. None for the others |
| `optim_args`, `optim_target_modules` | none: which tensors Muon takes is fixed |
| `label_smoothing_factor` | `label_smoothing` |
| `bf16`, `fp16`, `bf16_full_eval`, `fp16_full_eval` | YAML `mixed_precision`; evaluation is in the run's |
| `gradient_checkpointing`, `activation_checkpointing` | `gradient_checkpointing: full` (or `mlp`) |
| `torch_compile`, `torch_compile_backend` | YAML `dynamo_backend` |
| `torch_compile_mode` | `compile_mode` |
| `use_liger_kernel` | none: the loss is in parts as it is, and the compiler fuses the rest |
| `neftune_noise_alpha` | none: for instructions |
| `auto_find_batch_size` | `per_device_train_batch_size: auto`, found before the first step |
| `torch_empty_cache_steps` | none: segments grow (`expandable_segments`) |
| `per_device_eval_batch_size` | none: the training's micro-batch |
| `eval_strategy`, `save_strategy`, `logging_strategy` | none: steps; an interval of 0 is never |
| `eval_on_start`, `eval_delay` | none: always at step 0 |
| `load_best_model_at_end`, `metric_for_best_model` | none: one epoch's last is its best; `save_total_limit: 0` to choose |
| `save_only_model`, `enable_jit_checkpoint` | none: checkpoints are whole, and SIGTERM saves one |
| `ignore_data_skip` | none: nothing is skipped, a step's windows are a function of its number |
| `full_determinism` | `deterministic` (below "To the bit"); on a CPU a resumed run equals the uninterrupted one to the bit as it is |
| `dataloader_num_workers`, `dataloader_pin_memory`, `dataloader_prefetch_factor`, `dataloader_persistent_workers`, `dataloader_drop_last`, ... | none: no DataLoader. A batch is a pure function of the step, read from memory-mapped files |
| `train_sampling_strategy`, `remove_unused_columns`, `label_names` | none: windows of equal length, shuffled |
| `average_tokens_across_devices` | none: each process has the same number of tokens |
| `include_num_input_tokens_seen` | none: each metrics row has `tokens` |
| `logging_nan_inf_filter` | none: an update that is not finite is skipped and counted |
| `ddp_find_unused_parameters`, `ddp_bucket_cap_mb`, `ddp_broadcast_buffers`, `ddp_static_graph`, `ddp_backend` | none: settled; larger buckets and a static graph did not pay (measured: `benchmarks/places.py`) |
| `fsdp`, `fsdp_config` | YAML `fsdp_config` |
| `deepspeed` | none: refused; `zero1_x8.yaml`, `zero2_x8.yaml`, `zero3_x8.yaml` need no package |
| `use_cpu` | YAML `use_cpu` |
| `project` | `project_name` |
| `hub_token` | none: `HF_TOKEN`, or `hf auth login` |
| `hub_always_push` | none: pushes wait in line |
| `do_eval` | flag `--eval_only` |
""",
    "Transformers' run_clm.py": """
| `model_name_or_path` | `init_from` |
| `model_type`, `config_overrides`, `config_name` | `architecture`, and the keys of "Model" |
| `tokenizer_name` | `tokenizer` |
| `dtype` | none: fp32 weights |
| `model_revision`, `cache_dir`, `token` | none: the newest; `HF_HOME`; `HF_TOKEN` |
| `trust_remote_code` | none: never |
| `dataset_name`, `dataset_config_name` | the same |
| `train_file`, `validation_file` | `data_files`, `validation_files` |
| `validation_split_percentage` | `validation_fraction` for text (0.05 for 5), `validation_tokens` for data sets |
| `max_train_samples`, `max_eval_samples` | `limit_tokens`, `eval_tokens` |
| `streaming` | none: always, and kept as shards; `stream_keep: consumed` for a small disk |
| `block_size` | `sequence_length` |
| `preprocessing_num_workers` | none: threads are used; several jobs: `prepare_data.py --job_index I --num_jobs N` |
| `overwrite_cache` | none: another text, split or tokenizer is another folder |
| `keep_linebreaks` | none: every byte is kept |
""",
    "other scripts": """
| `gpu`, `device_name` | none: `accelerate launch --config_file accelerate_configs/CARD.yaml train.py`; plain `python train.py` chooses precision, compiler and micro-batch by itself. `check_setup.py` names your card's YAML |
| `steps`, `num_steps`, `num_train_steps`, `total_steps`, `iters` | `max_steps` |
| `lr`, `max_lr`, `peak_lr` | `learning_rate` |
| `min_learning_rate` | `min_lr_ratio` = lowest rate / `learning_rate` |
| `batch`, `bs`, `micro_batch_size`, `train_batch_size`, `total_batch_size`, `global_batch_size` | `per_device_train_batch_size` for one micro-batch, `tokens_per_step` for the whole step, in tokens |
| `grad_accum*`, `accumulation_steps`, `gradient_accumulation` | none: derived. `tokens_per_step` / (`per_device_train_batch_size` x `sequence_length` x processes) |
| `max_length`, `max_seq_len*`, `seq_len`, `seq_length`, `context_length`, `context_size`, `n_positions`, `n_ctx` | `sequence_length` |
| `epochs`, `num_epochs` | none: `max_steps` = epochs x train tokens / `tokens_per_step` |
| `warmup`, `warmup_ratio` | `warmup_steps` |
| `amp_dtype`, `use_amp`, `amp`, `precision`, `mixed_precision` | YAML `mixed_precision`; plain `python train.py` takes bf16 where the card has it, else fp16 |
| `use_compile`, `torch_compile*`, `no_compile` | YAML `dynamo_backend`: INDUCTOR or NO |
| `enable_tf32`, `allow_tf32` | `tf32` |
| `enable_gradient_checkpointing`, `grad_checkpointing`, `use_gradient_checkpointing` | `gradient_checkpointing: full` (or `mlp`) |
| `enable_flash*`, `enable_sdpa`, `use_flash*`, `flash*`, `attn_implementation` | none: always SDPA, told "causal", so flash where the card has it |
| `enable_*` | none: what pays is on by itself; [cards.md](cards.md) lists what is chosen |
| `num_workers`, `prefetch_factor`, `pin_memory`, `dataloader_*` | none: no DataLoader. A batch is a pure function of the step, read from memory-mapped files |
| `model`, `model_name`, `model_size` | `--size d12`, `d24`, `d36`, `d48` (or `gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`); `init_from` for weights that exist |
| `d_model`, `hidden_size`, `embed_dim`, `depth`, `num_layers`, `num_heads` | `n_embd`, `n_layer`, `n_head` |
| `eval_every`, `val_every`, `eval_freq`; `save_every`, `checkpoint_every`, `save_freq`; `log_every`, `log_freq` | `eval_steps`; `save_steps`; `logging_steps` |
| `resume`, `resume_from`, `resume_path` | none: the same command resumes; `resume_from_checkpoint` for another folder or the Hub |
| `wandb`, `use_wandb` | `report_to: wandb` |
| `hub_repo`, `hub_repo_id`, `repo_id` | `hub_model_id`, with `push_to_hub` |
| `input`, `input_file`, `train_data`, `data_path`, `text_file` | `data_files` |
""",
}


def answer(flag: str, value: str | None = None) -> str | None:
    """Return whose ``flag`` (as typed, with its dashes) is and what stands for it here; None: it is nobody's known.

    Args:
        value: the word behind it; only a card's name, which leads to its YAML, is used.
    """
    name = flag if len(flag) == 2 + flag.startswith("--") else flag.lstrip("-").replace("-", "_")
    for trainer, table in TABLES.items():
        for theirs, ours in re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE):
            words = [word.split()[0] for word in re.findall(r"`([^`]+)`", theirs)]
            if any(fnmatch.fnmatchcase(name, word) for word in words):
                plain = re.sub(r"\[(.*?)\]\(.*?\)", r"docs/\1", ours.replace("`", ""))
                plain = plain.replace("CARD.yaml", _yaml_of(value or ""))
                begin = "not needed" if plain.startswith("none: ") else "it is"
                return f"{flag}: a flag of {trainer}; here {begin}: {plain.removeprefix('none: ')}"
    return None


def _yaml_of(card: str) -> str:
    """Return the YAML of a card in other people's words (rtx_a6000, NVIDIA H100, 4090), CARD.yaml for any other word."""
    found = [path.name for path in (Path(__file__).parents[2] / "accelerate_configs").glob("*.yaml")]
    return next((name for name in found if _bare(name.removesuffix(".yaml")) == _bare(card)), "CARD.yaml")


def _bare(card: str) -> str:
    return re.sub("^(nvidia|geforce|quadro|tesla|rtx)*", "", re.sub(r"[^a-z0-9]", "", card.lower()))
