"""Flags of other trainers and the flags of train.py that replace them.

The tables are used only in error messages about unknown flags and recipe keys. They do not convert
values: if a value has another unit, the advice says so. docs/questions.md has complete commands.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

# Parsers that know this key read recipes. Advice without a replacement is meant for them only.
RECIPE_KEY = "tokens_per_step"

LAUNCHER_ADVICE = "Start several processes with torchrun or accelerate launch"
PRECISION_ADVICE = (
    "The precision is chosen automatically. To set it, use the option --mixed_precision of "
    "accelerate launch"
)
COMPILE_ADVICE = (
    "Compilation is set by dynamo_backend in the files of accelerate_configs/, "
    "which are for accelerate launch"
)
ATTENTION_ADVICE = "PyTorch's scaled dot-product attention is always used"
LOADER_ADVICE = "There is no DataLoader: batches are read from memory-mapped files"
RESUME_ADVICE = "The same command resumes a run automatically"
RATIO_ADVICE = "It is a number of steps: the ratio times max_steps"
MIN_LR_ADVICE = "It is the ratio of the last learning rate to learning_rate"
MICRO_BATCH_ADVICE = (
    "It is an upper limit for the sequences in the micro-batch of one GPU, or auto, and does not "
    "change the result. The batch of an update is tokens_per_step = accumulation steps x batch "
    "size x sequence_length x processes of the other trainer"
)
ACCUMULATION_ADVICE = (
    "Gradient accumulation is computed from it. It is a number of tokens: "
    "accumulation steps x micro-batch x sequence_length x processes"
)
EVAL_TOKENS_ADVICE = "It is a number of tokens; 0 is the whole validation split"
CPU_ADVICE = (
    "A GPU is used if there is one. To train on the CPU use accelerate launch --quiet "
    "--config_file accelerate_configs/cpu.yaml"
)
TOKENS_ADVICE = "It is the number of tokens / tokens_per_step"


@dataclass(frozen=True, kw_only=True)
class OtherFlag:
    """Flags of another trainer that have the same replacement here.

    Attributes:
        names: their names without leading dashes, separated by spaces.
        replacements: the flags that replace them, without dashes, separated by spaces. Empty if
            there are none.
        advice: a sentence without a full stop about the value, or about what to do instead.
    """

    names: str
    replacements: str = ""
    advice: str = ""


LLM_C = (
    OtherFlag(
        names="i",
        replacements="data_dir",
        advice="It is one folder. Files with val in their names are the validation split",
    ),
    OtherFlag(
        names="j",
        replacements="data_dir",
        advice="It is one folder. Files with val in their names are the validation split",
    ),
    OtherFlag(
        names="e",
        replacements="size",
        advice="For weights of Transformers instead of a size use init_from",
    ),
    OtherFlag(names="o", replacements="output_dir"),
    OtherFlag(names="n", replacements="save_steps"),
    OtherFlag(names="nk", replacements="save_total_limit"),
    OtherFlag(names="y", replacements="resume_from_checkpoint", advice=RESUME_ADVICE),
    OtherFlag(names="b", replacements="per_device_train_batch_size", advice=MICRO_BATCH_ADVICE),
    OtherFlag(names="t", replacements="sequence_length"),
    OtherFlag(names="d", replacements="tokens_per_step"),
    OtherFlag(names="x", replacements="max_steps"),
    OtherFlag(names="k", replacements="lr_scheduler_type"),
    OtherFlag(names="l", replacements="learning_rate"),
    OtherFlag(names="u", replacements="warmup_steps"),
    OtherFlag(names="q", replacements="min_lr_ratio"),
    OtherFlag(names="c", replacements="weight_decay"),
    OtherFlag(names="v", replacements="eval_steps"),
    OtherFlag(names="m", replacements="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(names="s", replacements="sample_steps"),
    OtherFlag(names="g", replacements="sample_tokens"),
    OtherFlag(names="f", replacements="tf32"),
    OtherFlag(
        names="z",
        replacements="shard_optimizer",
        advice="It is true for 1. For 2 and 3 use accelerate_configs/zero2_x8.yaml or "
        "zero3_x8.yaml",
    ),
    OtherFlag(
        names="r",
        replacements="gradient_checkpointing",
        advice="It is none for 0, and mlp or full to recompute",
    ),
    OtherFlag(names="pn pr pg pi pm pf pp ps", advice=LAUNCHER_ADVICE),
    OtherFlag(names="w", advice="The optimizer's weights are always fp32"),
    OtherFlag(names="sl sg", advice="Updates with a loss or norm that is not finite are skipped"),
)

NANOGPT = (
    OtherFlag(names="out_dir", replacements="output_dir"),
    OtherFlag(names="eval_interval", replacements="eval_steps"),
    OtherFlag(names="log_interval", replacements="logging_steps"),
    OtherFlag(names="eval_iters", replacements="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(
        names="always_save_checkpoint",
        replacements="save_steps",
        advice="Checkpoints are always saved. load_best_model_at_end keeps the best weights",
    ),
    OtherFlag(names="wandb_log", replacements="report_to", advice="Its value for W&B is wandb"),
    OtherFlag(names="wandb_project", replacements="project_name"),
    OtherFlag(names="wandb_run_name", replacements="run_name"),
    OtherFlag(
        names="dataset",
        replacements="data_dir",
        advice="It takes the folder with train.bin and val.bin. For a data set of the Hub use "
        "dataset_name",
    ),
    OtherFlag(
        names="batch_size", replacements="per_device_train_batch_size", advice=MICRO_BATCH_ADVICE
    ),
    OtherFlag(names="block_size", replacements="sequence_length"),
    OtherFlag(names="dropout", replacements="resid_pdrop embd_pdrop attn_pdrop"),
    OtherFlag(
        names="bias", advice="GPT-2 always has biases. A model with architecture llama has none"
    ),
    OtherFlag(names="beta1", replacements="adam_beta1"),
    OtherFlag(names="beta2", replacements="adam_beta2"),
    OtherFlag(names="grad_clip", replacements="max_grad_norm"),
    OtherFlag(names="max_iters", replacements="max_steps"),
    OtherFlag(names="lr_decay_iters", advice="The learning rate always decays until max_steps"),
    OtherFlag(names="warmup_iters", replacements="warmup_steps"),
    OtherFlag(names="min_lr", replacements="min_lr_ratio", advice=MIN_LR_ADVICE),
    OtherFlag(
        names="decay_lr",
        replacements="lr_scheduler_type",
        advice="Its value for a constant learning rate is constant",
    ),
    OtherFlag(names="backend", advice="NCCL is used on GPUs and gloo on CPUs"),
    OtherFlag(names="device", advice=CPU_ADVICE),
    OtherFlag(names="dtype", advice=PRECISION_ADVICE),
    OtherFlag(names="compile", advice=COMPILE_ADVICE),
)

NANOGPT_SAMPLE = (
    OtherFlag(names="start", replacements="prompt"),
    OtherFlag(names="out_dir init_from", replacements="model"),
)

TRANSFORMERS = (
    OtherFlag(
        names="gradient_accumulation_steps",
        replacements="tokens_per_step",
        advice=ACCUMULATION_ADVICE,
    ),
    OtherFlag(names="warmup_ratio", replacements="warmup_steps", advice=RATIO_ADVICE),
    OtherFlag(names="lr_scheduler_kwargs", replacements="min_lr_ratio decay_ratio"),
    OtherFlag(names="optim", replacements="optimizer"),
    OtherFlag(names="label_smoothing_factor", replacements="label_smoothing"),
    OtherFlag(names="bf16 fp16 torch_dtype", advice=PRECISION_ADVICE),
    OtherFlag(
        names="activation_checkpointing",
        replacements="gradient_checkpointing",
        advice="Its values are none, mlp and full",
    ),
    OtherFlag(names="torch_compile torch_compile_backend", advice=COMPILE_ADVICE),
    OtherFlag(names="torch_compile_mode", replacements="compile_mode"),
    OtherFlag(
        names="auto_find_batch_size",
        replacements="per_device_train_batch_size",
        advice="Its value auto finds the largest micro-batch that fits",
    ),
    OtherFlag(
        names="per_device_eval_batch_size",
        replacements="per_device_train_batch_size",
        advice="Evaluation uses the micro-batch of training",
    ),
    OtherFlag(
        names="eval_strategy evaluation_strategy", replacements="eval_steps", advice="0 is never"
    ),
    OtherFlag(names="save_strategy", replacements="save_steps", advice="0 is only at the end"),
    OtherFlag(names="logging_strategy", replacements="logging_steps"),
    OtherFlag(names="eval_delay", replacements="eval_on_start"),
    OtherFlag(names="full_determinism", replacements="deterministic"),
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
    OtherFlag(names="use_cpu no_cuda", advice=CPU_ADVICE),
    OtherFlag(names="project", replacements="project_name"),
    OtherFlag(names="do_train", advice="train.py trains without it"),
    OtherFlag(
        names="do_eval", replacements="eval_only", advice="A run also validates every eval_steps"
    ),
    OtherFlag(
        names="overwrite_output_dir",
        replacements="run_name",
        advice="The same command resumes a run. Another name starts a new one",
    ),
    OtherFlag(names="model_name_or_path", replacements="init_from"),
    OtherFlag(
        names="config_overrides",
        replacements="n_layer n_head n_embd",
        advice="Give each value as a flag",
    ),
    OtherFlag(
        names="model_type", replacements="architecture", advice="Its values are gpt2 and llama"
    ),
    OtherFlag(names="config_name", replacements="size"),
    OtherFlag(names="tokenizer_name", replacements="tokenizer"),
    OtherFlag(names="train_file", replacements="data_files"),
    OtherFlag(names="validation_file", replacements="validation_files"),
    OtherFlag(
        names="validation_split_percentage",
        replacements="validation_fraction",
        advice="It is a fraction, for example 0.05 for 5 percent",
    ),
    OtherFlag(
        names="max_train_samples",
        replacements="limit_tokens",
        advice="It is a number of tokens",
    ),
    OtherFlag(names="max_eval_samples", replacements="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(
        names="streaming",
        replacements="stream_keep",
        advice="A data set of the Hub is always streamed",
    ),
    OtherFlag(names="trust_remote_code", advice="Code from the Hub is never executed"),
)

LITGPT = (
    OtherFlag(
        names="train.global_batch_size",
        replacements="tokens_per_step",
        advice="It is a number of tokens: global_batch_size x sequence_length",
    ),
    OtherFlag(
        names="train.micro_batch_size",
        replacements="per_device_train_batch_size",
        advice=MICRO_BATCH_ADVICE,
    ),
    OtherFlag(
        names="train.max_tokens",
        replacements="max_steps",
        advice=TOKENS_ADVICE,
    ),
    OtherFlag(names="train.max_steps", replacements="max_steps"),
    OtherFlag(names="train.epochs", replacements="num_train_epochs"),
    OtherFlag(names="train.max_time", replacements="max_hours", advice="It is a number of hours"),
    OtherFlag(names="train.max_seq_length", replacements="sequence_length"),
    OtherFlag(names="train.lr_warmup_steps", replacements="warmup_steps"),
    OtherFlag(names="train.lr_warmup_fraction", replacements="warmup_steps", advice=RATIO_ADVICE),
    OtherFlag(names="train.save_interval", replacements="save_steps"),
    OtherFlag(names="train.log_interval", replacements="logging_steps"),
    OtherFlag(names="train.min_lr", replacements="min_lr_ratio", advice=MIN_LR_ADVICE),
    OtherFlag(names="train.max_norm", replacements="max_grad_norm"),
    OtherFlag(
        names="train.tie_embeddings",
        replacements="tie_word_embeddings",
        advice="The embeddings of GPT-2 are always tied",
    ),
    OtherFlag(names="eval.interval", replacements="eval_steps"),
    OtherFlag(names="eval.max_iters", replacements="eval_tokens", advice=EVAL_TOKENS_ADVICE),
    OtherFlag(names="eval.initial_validation", replacements="eval_on_start"),
    OtherFlag(names="optimizer.lr optimizer.init_args.lr", replacements="learning_rate"),
    OtherFlag(
        names="optimizer.weight_decay optimizer.init_args.weight_decay", replacements="weight_decay"
    ),
    OtherFlag(names="data.train_data_path", replacements="data_files"),
    OtherFlag(names="data.val_data_path", replacements="validation_files"),
    OtherFlag(names="initial_checkpoint_dir", replacements="init_from"),
    OtherFlag(names="tokenizer_dir", replacements="tokenizer"),
    OtherFlag(names="logger_name", replacements="report_to"),
    OtherFlag(names="devices num_nodes", advice=LAUNCHER_ADVICE),
)

NANOCHAT = (
    OtherFlag(
        names="device_batch_size",
        replacements="per_device_train_batch_size",
        advice=MICRO_BATCH_ADVICE,
    ),
    OtherFlag(
        names="total_batch_size", replacements="tokens_per_step", advice="It is a number of tokens"
    ),
    OtherFlag(names="max_seq_len", replacements="sequence_length"),
    OtherFlag(names="num_iterations", replacements="max_steps"),
    OtherFlag(names="depth", replacements="n_layer", advice="n_head and n_embd do not follow it"),
    OtherFlag(names="matrix_lr", replacements="learning_rate"),
    OtherFlag(names="final_lr_frac", replacements="min_lr_ratio"),
    OtherFlag(
        names="warmdown_ratio",
        replacements="decay_ratio",
        advice="It has an effect with lr_scheduler_type wsd",
    ),
    OtherFlag(names="eval_every", replacements="eval_steps"),
    OtherFlag(names="sample_every", replacements="sample_steps"),
    OtherFlag(names="save_every", replacements="save_steps"),
    OtherFlag(names="core_metric_every", replacements="task_steps"),
    OtherFlag(names="run model_tag", replacements="run_name"),
    OtherFlag(
        names="resume_from_step", replacements="resume_from_checkpoint", advice=RESUME_ADVICE
    ),
)

OTHERS = (
    OtherFlag(names="gpu gpu_type device_name", replacements="card"),
    OtherFlag(
        names="gpu gpu_type device_name card",
        advice="python train.py chooses the settings for the GPU. To state them, use accelerate "
        "launch --quiet --config_file with a file of accelerate_configs/",
    ),
    OtherFlag(
        names="steps max_iter num_steps num_train_steps total_steps iters iterations",
        replacements="max_steps",
    ),
    OtherFlag(
        names="tokens max_tokens num_tokens total_tokens train_tokens",
        replacements="max_steps",
        advice=TOKENS_ADVICE,
    ),
    OtherFlag(
        names="hours time max_time time_limit max_runtime",
        replacements="max_hours",
        advice="It is a number of hours",
    ),
    OtherFlag(names="config config_file config_path cfg", replacements="recipe"),
    OtherFlag(names="wd", replacements="weight_decay"),
    OtherFlag(names="betas", replacements="adam_beta1 adam_beta2"),
    OtherFlag(names="eps", replacements="adam_epsilon"),
    OtherFlag(
        names="clip clip_grad clip_grad_norm gradient_clip gradient_clip_val gradient_clipping "
        "grad_norm_clip",
        replacements="max_grad_norm",
    ),
    OtherFlag(
        names="lr_decay schedule cosine",
        replacements="lr_scheduler_type",
        advice="Its value cosine is usual",
    ),
    OtherFlag(
        names="cooldown cooldown_ratio",
        replacements="decay_ratio",
        advice="It has an effect with lr_scheduler_type wsd",
    ),
    OtherFlag(names="patience early_stop", replacements="early_stopping_patience"),
    OtherFlag(
        names="random_seed manual_seed rng_seed",
        replacements="seed",
        advice="The order of the data depends on data_seed",
    ),
    OtherFlag(names="lr max_lr peak_lr", replacements="learning_rate"),
    OtherFlag(names="min_learning_rate", replacements="min_lr_ratio", advice=MIN_LR_ADVICE),
    OtherFlag(
        names="batch bs mbs micro_batch micro_batch_size train_batch_size",
        replacements="per_device_train_batch_size",
        advice=MICRO_BATCH_ADVICE,
    ),
    OtherFlag(
        names="global_batch_size global_batch gbs effective_batch_size",
        replacements="tokens_per_step",
        advice="It is a number of tokens: the number of sequences x sequence_length",
    ),
    OtherFlag(
        names="accum accumulate grad_accum grad_accum_steps gradient_accumulation "
        "accumulation_steps",
        replacements="tokens_per_step",
        advice=ACCUMULATION_ADVICE,
    ),
    OtherFlag(
        names="max_length max_sequence_length max_seq_length seq_len seq_length context_length "
        "context_size n_positions n_ctx",
        replacements="sequence_length",
    ),
    OtherFlag(names="epochs num_epochs max_epochs n_epochs", replacements="num_train_epochs"),
    OtherFlag(names="warmup", replacements="warmup_steps"),
    OtherFlag(
        names="warmup_fraction warmup_frac warmup_proportion",
        replacements="warmup_steps",
        advice=RATIO_ADVICE,
    ),
    OtherFlag(
        names="precision mixed_precision amp amp_dtype use_amp enable_amp half float16 bfloat16",
        advice=PRECISION_ADVICE,
    ),
    OtherFlag(names="cpu cuda mps", advice=CPU_ADVICE),
    OtherFlag(names="use_compile enable_compile no_compile", advice=COMPILE_ADVICE),
    OtherFlag(names="enable_tf32 allow_tf32", replacements="tf32"),
    OtherFlag(
        names="grad_checkpointing enable_gradient_checkpointing use_gradient_checkpointing",
        replacements="gradient_checkpointing",
        advice="Its values are none, mlp and full",
    ),
    OtherFlag(
        names="attn_implementation attention sdpa flash flash_attention flash_attn "
        "use_flash_attention use_flash_attn enable_flash_attention enable_sdpa",
        advice=ATTENTION_ADVICE,
    ),
    OtherFlag(
        names="num_workers workers num_proc prefetch_factor pin_memory persistent_workers",
        advice=LOADER_ADVICE,
    ),
    OtherFlag(
        names="model model_name model_size",
        replacements="size",
        advice="For a trained model use init_from",
    ),
    OtherFlag(
        names="init base_model pretrained pretrained_model finetune finetune_from",
        replacements="init_from",
    ),
    OtherFlag(
        names="d_model hidden_size hidden_dim embed_dim embedding_size width dim",
        replacements="n_embd",
    ),
    OtherFlag(names="layers num_layers num_hidden_layers", replacements="n_layer"),
    OtherFlag(names="heads num_heads num_attention_heads", replacements="n_head"),
    OtherFlag(
        names="d_ff ffn_dim mlp_dim n_inner mlp_ratio",
        replacements="intermediate_size",
        advice="It is a key of architecture llama. The MLP of GPT-2 has 4 x n_embd",
    ),
    OtherFlag(names="attention_dropout", replacements="attn_pdrop"),
    OtherFlag(names="vocabulary n_vocab", replacements="vocab_size"),
    OtherFlag(names="init_std", replacements="initializer_range"),
    OtherFlag(names="tie_weights tie_embeddings", replacements="tie_word_embeddings"),
    OtherFlag(
        names="activation activation_function activation_fn act act_fn hidden_act "
        "hidden_activation nonlinearity gelu relu swiglu",
        advice="The activation of architecture gpt2 is gelu_new, and llama has silu in a SwiGLU "
        "MLP. docs/extend.md shows how to train with another activation",
    ),
    OtherFlag(
        names="rope rotary norm rmsnorm rms_norm layernorm gqa",
        replacements="architecture",
        advice="llama has rotary embeddings, RMSNorm and grouped-query attention. docs/extend.md "
        "shows how to add another architecture",
    ),
    OtherFlag(
        names="moe experts num_experts qk_norm softcap alibi pos_emb position_embedding "
        "positional_encoding",
        advice="The architectures are gpt2 and llama. docs/extend.md shows how to add another one",
    ),
    OtherFlag(names="val_every eval_freq", replacements="eval_steps"),
    OtherFlag(names="checkpoint_every save_freq save_interval", replacements="save_steps"),
    OtherFlag(names="log_every log_freq", replacements="logging_steps"),
    OtherFlag(
        names="resume resume_from resume_path",
        replacements="resume_from_checkpoint",
        advice=RESUME_ADVICE,
    ),
    OtherFlag(
        names="checkpoint checkpoint_path ckpt ckpt_path load_checkpoint load_from",
        replacements="resume_from_checkpoint",
        advice="To start a new run from the weights of a model use init_from",
    ),
    OtherFlag(names="keep keep_last keep_last_n max_checkpoints", replacements="save_total_limit"),
    OtherFlag(names="save_best best", replacements="load_best_model_at_end"),
    OtherFlag(
        names="overwrite force",
        replacements="run_name",
        advice="The same command resumes a run. Another name starts a new one",
    ),
    OtherFlag(
        names="wandb use_wandb log_wandb",
        replacements="report_to",
        advice="Its value for W&B is wandb",
    ),
    OtherFlag(
        names="tb tensorboard trackio tracker mlflow",
        replacements="report_to",
        advice="Its values are the names of trackers, such as tensorboard and trackio",
    ),
    OtherFlag(names="name wandb_name exp_name experiment_name", replacements="run_name"),
    OtherFlag(
        names="hub_repo hub_repo_id repo_id repo hf_repo",
        replacements="hub_model_id",
        advice="push_to_hub switches pushing on",
    ),
    OtherFlag(names="push hub", replacements="push_to_hub hub_model_id"),
    OtherFlag(names="private public", replacements="hub_private_repo"),
    OtherFlag(
        names="data input input_file train_data data_path text_file text file files path folder "
        "dir csv parquet jsonl",
        replacements="data_files",
    ),
    OtherFlag(names="val_data val_file eval_data eval_file", replacements="validation_files"),
    OtherFlag(names="data_set dataset_id hf_dataset", replacements="dataset_name"),
    OtherFlag(names="text_key text_field", replacements="text_column"),
    OtherFlag(
        names="cache cache_dir",
        replacements="prepared_data_dir",
        advice="Downloads of the Hub are stored in the folder of the variable HF_HOME",
    ),
    OtherFlag(
        names="tokenizer_path tokenizer_file tokenizer_type bpe",
        replacements="tokenizer",
        advice="It is a folder, a Hub id, bpe or characters",
    ),
    OtherFlag(names="out output save_dir checkpoint_dir log_dir logdir", replacements="output_dir"),
    OtherFlag(names="evaluate", replacements="eval_only"),
    OtherFlag(
        names="eval_task hellaswag",
        replacements="tasks task_steps",
        advice="eval_tasks.py scores a model after its training",
    ),
    OtherFlag(names="prompt prompts", replacements="sample_prompts"),
    OtherFlag(names="samples", replacements="sample_steps"),
    OtherFlag(names="max_new_tokens", replacements="sample_tokens"),
    OtherFlag(names="profiler profile_steps", replacements="profile"),
    OtherFlag(
        names="dry_run",
        advice="check_setup.py with the option --estimate estimates a run, and prepare_data.py "
        "with the option --dry_run its data",
    ),
    OtherFlag(
        names="top_p top_k temperature",
        replacements="sample_top_p sample_top_k",
        advice="They are for the samples of a run. generate.py has more options",
    ),
    OtherFlag(
        names="num_gpus ngpus gpus n_gpus num_devices nproc nproc_per_node nnodes world_size ddp "
        "parallel",
        advice=LAUNCHER_ADVICE,
    ),
)

# The trainers in order of precedence. For an unknown flag, suggestion() uses the first entry that
# contains its name and whose replacements are flags of the script.
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
    """Return a message about a flag of another trainer, or None if the flag is not in the tables.

    Args:
        flag: the flag with its dashes, or the name of a recipe key.
        known: the flags of the script or the recipe keys, without dashes. Only these are
            suggested.
        dashes: the prefix of the flags that are suggested.
    """
    name = flag.lstrip("-").replace("-", "_")
    for trainer, entry in _entries_of(name):
        replacements = entry.replacements.split()
        if not replacements and RECIPE_KEY not in known:
            continue
        if not set(replacements) <= set(known):
            continue
        sentences = [f"{flag} is a flag of {trainer}"]
        if replacements:
            flags = [f"{dashes}{replacement}" for replacement in replacements]
            sentences.append(f"Use {_join_and(flags)}")
        if entry.advice:
            sentences.append(entry.advice)
        return ". ".join(sentences)
    return None


def _entries_of(name: str) -> Iterator[tuple[str, OtherFlag]]:
    """Yield each trainer that has a flag of this name, and the entry with the flag."""
    for trainer, entries in TRAINERS.items():
        for entry in entries:
            if name in entry.names.split():
                yield trainer, entry


def _join_and(names: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " and " + names[-1]
