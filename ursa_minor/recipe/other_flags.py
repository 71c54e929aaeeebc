"""Flags of other trainers and the flags of train.py that replace them.

The table is used only to answer flags and recipe keys that are unknown here. It does not convert
values: where a value has another unit, the advice says so. docs/questions.md has complete commands.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

# Parsers that know this key read recipes. Advice without a flag of ours is for them only.
RECIPE_KEY = "tokens_per_step"

LAUNCHER_ADVICE = "Start several processes with torchrun or accelerate launch"
PRECISION_ADVICE = (
    "The precision is chosen automatically. To set it, use accelerate launch --mixed_precision"
)
COMPILE_ADVICE = "Compilation is set by dynamo_backend in the files of accelerate_configs/, which are for accelerate launch"
ATTENTION_ADVICE = "PyTorch's scaled dot-product attention is always used"
LOADER_ADVICE = "There is no DataLoader: batches are read from memory-mapped files"
RESUME_ADVICE = "The same command resumes a run automatically"
RATIO_ADVICE = "It is a number of steps: the ratio times max_steps"
MIN_LR_ADVICE = "It is the ratio of the last learning rate to learning_rate"
MICRO_BATCH_ADVICE = "It is an upper limit, or auto"
ACCUMULATION_ADVICE = (
    "Gradient accumulation is computed from it. It is a number of tokens: "
    "accumulation steps x micro-batch x sequence_length x processes"
)
EVAL_TOKENS_ADVICE = "It is a number of tokens; 0 is the whole validation split"
EPOCHS_ADVICE = "An epoch has as many steps as the number of training tokens / tokens_per_step"


@dataclass(frozen=True, kw_only=True)
class OtherFlag:
    """Flags of another trainer that have the same counterpart here.

    Attributes:
        names: their names without leading dashes, separated by spaces.
        ours: the flags that replace them, without dashes, separated by spaces. Empty if there are
            none.
        advice: a sentence without a full stop about the value, or about what to do instead.
    """

    names: str
    ours: str = ""
    advice: str = ""


LLM_C = (
    OtherFlag(
        names="i",
        ours="data_dir",
        advice="It is one folder. Files with val in their names are the validation split",
    ),
    OtherFlag(
        names="j",
        ours="data_dir",
        advice="It is one folder. Files with val in their names are the validation split",
    ),
    OtherFlag(
        names="e", ours="size", advice="For weights of Transformers instead of a size use init_from"
    ),
    OtherFlag(names="o", ours="output_dir"),
    OtherFlag(names="n", ours="save_steps"),
    OtherFlag(names="nk", ours="save_total_limit"),
    OtherFlag(names="y", ours="resume_from_checkpoint", advice=RESUME_ADVICE),
    OtherFlag(names="b", ours="per_device_train_batch_size", advice=MICRO_BATCH_ADVICE),
    OtherFlag(names="t", ours="sequence_length"),
    OtherFlag(names="d", ours="tokens_per_step"),
    OtherFlag(names="x", ours="max_steps"),
    OtherFlag(names="k", ours="lr_scheduler_type"),
    OtherFlag(names="l", ours="learning_rate"),
    OtherFlag(names="u", ours="warmup_steps"),
    OtherFlag(names="q", ours="min_lr_ratio"),
    OtherFlag(names="c", ours="weight_decay"),
    OtherFlag(names="v", ours="eval_steps"),
    OtherFlag(names="m", ours="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(names="s", ours="sample_steps"),
    OtherFlag(names="g", ours="sample_tokens"),
    OtherFlag(names="f", ours="tf32"),
    OtherFlag(
        names="z",
        ours="shard_optimizer",
        advice="It is true for 1. For 2 and 3 use accelerate_configs/zero2_x8.yaml or zero3_x8.yaml",
    ),
    OtherFlag(
        names="r",
        ours="gradient_checkpointing",
        advice="It is none for 0, and mlp or full to recompute",
    ),
    OtherFlag(names="pn pr pg pi pm pf pp ps", advice=LAUNCHER_ADVICE),
    OtherFlag(names="w", advice="The optimizer's weights are always fp32"),
    OtherFlag(names="sl sg", advice="Updates with a loss or norm that is not finite are skipped"),
)

NANOGPT = (
    OtherFlag(names="out_dir", ours="output_dir"),
    OtherFlag(names="eval_interval", ours="eval_steps"),
    OtherFlag(names="log_interval", ours="logging_steps"),
    OtherFlag(names="eval_iters", ours="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(
        names="always_save_checkpoint",
        ours="save_steps",
        advice="Checkpoints are always saved. load_best_model_at_end keeps the best weights",
    ),
    OtherFlag(names="wandb_log", ours="report_to", advice="Its value for W&B is wandb"),
    OtherFlag(names="wandb_project", ours="project_name"),
    OtherFlag(names="wandb_run_name", ours="run_name"),
    OtherFlag(
        names="dataset",
        ours="data_dir",
        advice="It takes the folder with train.bin and val.bin. For a data set of the Hub use dataset_name",
    ),
    OtherFlag(names="batch_size", ours="per_device_train_batch_size", advice=MICRO_BATCH_ADVICE),
    OtherFlag(names="block_size", ours="sequence_length"),
    OtherFlag(names="dropout", ours="resid_pdrop embd_pdrop attn_pdrop"),
    OtherFlag(
        names="bias", advice="GPT-2 always has biases. A model with architecture llama has none"
    ),
    OtherFlag(names="beta1", ours="adam_beta1"),
    OtherFlag(names="beta2", ours="adam_beta2"),
    OtherFlag(names="grad_clip", ours="max_grad_norm"),
    OtherFlag(names="max_iters", ours="max_steps"),
    OtherFlag(names="lr_decay_iters", advice="The learning rate always decays until max_steps"),
    OtherFlag(names="warmup_iters", ours="warmup_steps"),
    OtherFlag(names="min_lr", ours="min_lr_ratio", advice=MIN_LR_ADVICE),
    OtherFlag(
        names="decay_lr",
        ours="lr_scheduler_type",
        advice="Its value for a constant learning rate is constant",
    ),
    OtherFlag(names="backend", advice="NCCL is used on GPUs and gloo on CPUs"),
    OtherFlag(
        names="device",
        advice="A GPU is used if there is one. To train on the CPU use accelerate launch "
        "--config_file accelerate_configs/cpu.yaml",
    ),
    OtherFlag(names="dtype", advice=PRECISION_ADVICE),
    OtherFlag(names="compile", advice=COMPILE_ADVICE),
)

NANOGPT_SAMPLE = (
    OtherFlag(names="start", ours="prompt"),
    OtherFlag(names="out_dir init_from", ours="model"),
)

TRANSFORMERS = (
    OtherFlag(
        names="gradient_accumulation_steps", ours="tokens_per_step", advice=ACCUMULATION_ADVICE
    ),
    OtherFlag(names="num_train_epochs", ours="max_steps", advice=EPOCHS_ADVICE),
    OtherFlag(names="warmup_ratio", ours="warmup_steps", advice=RATIO_ADVICE),
    OtherFlag(names="lr_scheduler_kwargs", ours="min_lr_ratio decay_ratio"),
    OtherFlag(names="optim", ours="optimizer"),
    OtherFlag(names="label_smoothing_factor", ours="label_smoothing"),
    OtherFlag(names="bf16 fp16 torch_dtype", advice=PRECISION_ADVICE),
    OtherFlag(
        names="activation_checkpointing",
        ours="gradient_checkpointing",
        advice="Its values are none, mlp and full",
    ),
    OtherFlag(names="torch_compile torch_compile_backend", advice=COMPILE_ADVICE),
    OtherFlag(names="torch_compile_mode", ours="compile_mode"),
    OtherFlag(
        names="auto_find_batch_size",
        ours="per_device_train_batch_size",
        advice="Its value auto finds the largest micro-batch that fits",
    ),
    OtherFlag(
        names="per_device_eval_batch_size",
        ours="per_device_train_batch_size",
        advice="Evaluation uses the micro-batch of training",
    ),
    OtherFlag(names="eval_strategy evaluation_strategy", ours="eval_steps", advice="0 is never"),
    OtherFlag(names="save_strategy", ours="save_steps", advice="0 is only at the end"),
    OtherFlag(names="logging_strategy", ours="logging_steps"),
    OtherFlag(names="eval_delay", ours="eval_on_start"),
    OtherFlag(names="full_determinism", ours="deterministic"),
    OtherFlag(
        names="dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_drop_last",
        advice=LOADER_ADVICE,
    ),
    OtherFlag(
        names="fsdp fsdp_config deepspeed",
        advice="Use accelerate launch with zero1_x8.yaml, zero2_x8.yaml, zero3_x8.yaml or "
        "fsdp2_x8.yaml of accelerate_configs/",
    ),
    OtherFlag(
        names="use_cpu no_cuda",
        advice="To train on the CPU use accelerate launch --config_file accelerate_configs/cpu.yaml",
    ),
    OtherFlag(names="project", ours="project_name"),
    OtherFlag(names="do_train", advice="train.py trains without it"),
    OtherFlag(names="do_eval", ours="eval_only", advice="A run also validates every eval_steps"),
    OtherFlag(
        names="overwrite_output_dir",
        ours="run_name",
        advice="The same command resumes a run. Another name starts a new one",
    ),
    OtherFlag(names="model_name_or_path", ours="init_from"),
    OtherFlag(
        names="config_overrides", ours="n_layer n_head n_embd", advice="Give each value as a flag"
    ),
    OtherFlag(names="model_type", ours="architecture", advice="Its values are gpt2 and llama"),
    OtherFlag(names="config_name", ours="size"),
    OtherFlag(names="tokenizer_name", ours="tokenizer"),
    OtherFlag(names="train_file", ours="data_files"),
    OtherFlag(names="validation_file", ours="validation_files"),
    OtherFlag(
        names="validation_split_percentage",
        ours="validation_fraction",
        advice="It is a fraction, for example 0.05 for 5 percent",
    ),
    OtherFlag(
        names="max_train_samples",
        ours="limit_tokens",
        advice="It is a number of tokens",
    ),
    OtherFlag(names="max_eval_samples", ours="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(
        names="streaming", ours="stream_keep", advice="A data set of the Hub is always streamed"
    ),
    OtherFlag(names="trust_remote_code", advice="Code from the Hub is never executed"),
)

LITGPT = (
    OtherFlag(
        names="train.global_batch_size",
        ours="tokens_per_step",
        advice="It is a number of tokens: global_batch_size x sequence_length",
    ),
    OtherFlag(
        names="train.micro_batch_size",
        ours="per_device_train_batch_size",
        advice=MICRO_BATCH_ADVICE,
    ),
    OtherFlag(
        names="train.max_tokens",
        ours="max_steps",
        advice="It is the number of tokens / tokens_per_step",
    ),
    OtherFlag(names="train.max_steps", ours="max_steps"),
    OtherFlag(names="train.epochs", ours="max_steps", advice=EPOCHS_ADVICE),
    OtherFlag(names="train.max_time", ours="max_hours", advice="It is a number of hours"),
    OtherFlag(names="train.max_seq_length", ours="sequence_length"),
    OtherFlag(names="train.lr_warmup_steps", ours="warmup_steps"),
    OtherFlag(names="train.lr_warmup_fraction", ours="warmup_steps", advice=RATIO_ADVICE),
    OtherFlag(names="train.save_interval", ours="save_steps"),
    OtherFlag(names="train.log_interval", ours="logging_steps"),
    OtherFlag(names="train.min_lr", ours="min_lr_ratio", advice=MIN_LR_ADVICE),
    OtherFlag(names="train.max_norm", ours="max_grad_norm"),
    OtherFlag(
        names="train.tie_embeddings",
        ours="tie_word_embeddings",
        advice="The embeddings of GPT-2 are always tied",
    ),
    OtherFlag(names="eval.interval", ours="eval_steps"),
    OtherFlag(names="eval.max_iters", ours="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(names="eval.initial_validation", ours="eval_on_start"),
    OtherFlag(names="optimizer.lr optimizer.init_args.lr", ours="learning_rate"),
    OtherFlag(names="optimizer.weight_decay optimizer.init_args.weight_decay", ours="weight_decay"),
    OtherFlag(names="data.train_data_path", ours="data_files"),
    OtherFlag(names="data.val_data_path", ours="validation_files"),
    OtherFlag(names="initial_checkpoint_dir", ours="init_from"),
    OtherFlag(names="tokenizer_dir", ours="tokenizer"),
    OtherFlag(names="logger_name", ours="report_to"),
    OtherFlag(names="devices num_nodes", advice=LAUNCHER_ADVICE),
)

NANOCHAT = (
    OtherFlag(
        names="device_batch_size", ours="per_device_train_batch_size", advice=MICRO_BATCH_ADVICE
    ),
    OtherFlag(names="total_batch_size", ours="tokens_per_step", advice="It is a number of tokens"),
    OtherFlag(names="max_seq_len", ours="sequence_length"),
    OtherFlag(names="num_iterations", ours="max_steps"),
    OtherFlag(names="depth", ours="n_layer", advice="n_head and n_embd do not follow it"),
    OtherFlag(names="matrix_lr", ours="learning_rate"),
    OtherFlag(names="final_lr_frac", ours="min_lr_ratio"),
    OtherFlag(
        names="warmdown_ratio",
        ours="decay_ratio",
        advice="It has an effect with lr_scheduler_type wsd",
    ),
    OtherFlag(names="eval_every", ours="eval_steps"),
    OtherFlag(names="sample_every", ours="sample_steps"),
    OtherFlag(names="save_every", ours="save_steps"),
    OtherFlag(names="core_metric_every", ours="task_steps"),
    OtherFlag(names="run model_tag", ours="run_name"),
    OtherFlag(names="resume_from_step", ours="resume_from_checkpoint", advice=RESUME_ADVICE),
)

OTHERS = (
    OtherFlag(names="gpu gpu_type device_name", ours="card"),
    OtherFlag(
        names="gpu gpu_type device_name card",
        advice="python train.py chooses the settings for the GPU. To state them, use accelerate "
        "launch --config_file with a file of accelerate_configs/",
    ),
    OtherFlag(
        names="steps num_steps num_train_steps total_steps iters iterations", ours="max_steps"
    ),
    OtherFlag(names="lr max_lr peak_lr", ours="learning_rate"),
    OtherFlag(names="min_learning_rate", ours="min_lr_ratio", advice=MIN_LR_ADVICE),
    OtherFlag(
        names="batch bs micro_batch_size train_batch_size",
        ours="per_device_train_batch_size",
        advice=MICRO_BATCH_ADVICE,
    ),
    OtherFlag(
        names="global_batch_size",
        ours="tokens_per_step",
        advice="It is a number of tokens",
    ),
    OtherFlag(
        names="grad_accum grad_accum_steps gradient_accumulation accumulation_steps",
        ours="tokens_per_step",
        advice=ACCUMULATION_ADVICE,
    ),
    OtherFlag(
        names="max_length max_sequence_length max_seq_length seq_len seq_length context_length "
        "context_size n_positions n_ctx",
        ours="sequence_length",
    ),
    OtherFlag(names="epochs num_epochs", ours="max_steps", advice=EPOCHS_ADVICE),
    OtherFlag(names="warmup", ours="warmup_steps"),
    OtherFlag(
        names="warmup_fraction warmup_frac warmup_proportion",
        ours="warmup_steps",
        advice=RATIO_ADVICE,
    ),
    OtherFlag(
        names="precision mixed_precision amp amp_dtype use_amp enable_amp", advice=PRECISION_ADVICE
    ),
    OtherFlag(names="use_compile enable_compile no_compile", advice=COMPILE_ADVICE),
    OtherFlag(names="enable_tf32 allow_tf32", ours="tf32"),
    OtherFlag(
        names="grad_checkpointing enable_gradient_checkpointing use_gradient_checkpointing",
        ours="gradient_checkpointing",
        advice="Its values are none, mlp and full",
    ),
    OtherFlag(
        names="attn_implementation flash flash_attention flash_attn use_flash_attention "
        "use_flash_attn enable_flash_attention enable_sdpa",
        advice=ATTENTION_ADVICE,
    ),
    OtherFlag(
        names="num_workers prefetch_factor pin_memory persistent_workers", advice=LOADER_ADVICE
    ),
    OtherFlag(
        names="model model_name model_size",
        ours="size",
        advice="For a trained model use init_from",
    ),
    OtherFlag(names="d_model hidden_size embed_dim", ours="n_embd"),
    OtherFlag(names="num_layers", ours="n_layer"),
    OtherFlag(names="num_heads", ours="n_head"),
    OtherFlag(names="val_every eval_freq", ours="eval_steps"),
    OtherFlag(names="checkpoint_every save_freq", ours="save_steps"),
    OtherFlag(names="log_every log_freq", ours="logging_steps"),
    OtherFlag(
        names="resume resume_from resume_path", ours="resume_from_checkpoint", advice=RESUME_ADVICE
    ),
    OtherFlag(names="wandb use_wandb", ours="report_to", advice="Its value for W&B is wandb"),
    OtherFlag(names="hub_repo hub_repo_id repo_id", ours="hub_model_id"),
    OtherFlag(names="data input input_file train_data data_path text_file", ours="data_files"),
    OtherFlag(names="out output save_dir checkpoint_dir", ours="output_dir"),
    OtherFlag(
        names="top_p top_k temperature",
        ours="sample_top_p sample_top_k",
        advice="They are for the samples of a run. generate.py has more options",
    ),
    OtherFlag(names="num_gpus ngpus", advice=LAUNCHER_ADVICE),
)

# The first row that has a name, and whose counterparts exist for the script, is the answer.
TRAINERS = {
    "nanoGPT": NANOGPT,
    "nanoGPT's sample.py": NANOGPT_SAMPLE,
    "Transformers": TRANSFORMERS,
    "litgpt": LITGPT,
    "nanochat": NANOCHAT,
    "other trainers": OTHERS,
    "llm.c": LLM_C,
}


def suggestion(flag: str, known: Collection[str], dashes: str = "--") -> str | None:
    """Return a message about a flag of another trainer, or None if the flag is not in the table.

    Args:
        flag: the flag with its dashes, or the name of a recipe key.
        known: the flags of the script, or the recipe keys, without dashes. Others are not suggested.
        dashes: what to write in front of the flags that are suggested.
    """
    name = flag.lstrip("-").replace("-", "_")
    for trainer, row in _rows_of(name):
        counterparts = row.ours.split()
        if not counterparts and RECIPE_KEY not in known:
            continue
        if not set(counterparts) <= set(known):
            continue
        sentences = [f"{flag} is a flag of {trainer}"]
        if counterparts:
            names = [f"{dashes}{counterpart}" for counterpart in counterparts]
            sentences.append(f"Use {_joined(names)}")
        if row.advice:
            sentences.append(row.advice)
        return ". ".join(sentences)
    return None


def _rows_of(name: str) -> Iterator[tuple[str, OtherFlag]]:
    for trainer, rows in TRAINERS.items():
        for row in rows:
            if name in row.names.split():
                yield trainer, row


def _joined(names: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " and " + names[-1]
