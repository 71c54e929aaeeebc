"""The README's promises are broken on purpose, one line at a time, in a copy of the tree: the named test must see each."""

import pytest
from breaking import Breakage, assert_seen, copy_tree, run_tests
from conftest import ROOT

BREAKAGES = [
    # Data: windows, order, shards, tokens, sources
    Breakage(
        "pretrain/data/windows.py",
        "return micro_step * self.num_processes + rank",
        "return rank * 2 + micro_step",
        "the windows of a step do not depend on processes and micro-batches",
        "tests/data/test_windows.py::test_the_order_is_the_same_for_any_number_of_processes_and_any_micro_batch",
    ),
    Breakage(
        "pretrain/data/windows.py",
        "return first + int(_block(self.seed, epoch, block, source, length)[place])",
        "return first + place",
        "windows are shuffled within their blocks",
        "tests/data/test_windows.py::test_order_stays_within_shuffle_blocks_and_differs_by_epoch_seed_block_and_source",
    ),
    Breakage(
        "pretrain/data/windows.py",
        "_permutation(length, seed, epoch, block, source)",
        "_permutation(length, seed, block, epoch, source)",
        "the order of windows is the same in every version, so that a run can be resumed under another",
        "tests/data/test_windows.py::test_order_never_changes_between_versions",
    ),
    Breakage(
        "pretrain/data/windows.py",
        "[start : start + self.sequence_length + 1]",
        "[start + 1 : start + self.sequence_length + 2]",
        "every token of a shard but its first is a target once",
        "tests/data/test_windows.py::test_every_token_is_a_target_once_and_no_window_crosses_a_shard",
    ),
    Breakage(
        "pretrain/data/windows.py",
        "        self._refuse_bad_ids(shard, start, row_T1)\n",
        "",
        "an id beyond the vocabulary is refused with file and offset",
        "tests/data/test_windows.py::test_id_beyond_the_vocabulary_is_refused_with_file_and_offset",
    ),
    Breakage(
        "pretrain/data/windows.py",
        "max(math.floor(quota), int(quota > 0))",
        "math.floor(quota)",
        "a source of a mixture with any weight is read",
        "tests/data/test_windows.py::test_a_source_with_any_weight_has_a_place_and_one_without_has_none",
    ),
    Breakage(
        "pretrain/data/shards.py",
        'struct.pack("<3i", *self.format, self._tokens)',
        'struct.pack("<3i", *self.format, 2 * self._tokens)',
        "shards are llm.c's format",
        "tests/data/test_shards.py::test_written_ids_are_read_back_in_llm_c_format",
    ),
    Breakage(
        "pretrain/data/shards.py",
        "        files.fsync(self._temporary)\n",
        "",
        "a shard is on the disk before it has its name",
        "tests/data/test_shards.py::"
        "test_a_shard_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_has_a_row",
    ),
    Breakage(
        "pretrain/data/shards.py",
        "if (found := files.sha256(path)) != before:",
        "if len(found := files.sha256(path)) != len(before):",
        "a shard that has changed is refused by its hash",
        "tests/data/test_shards.py::test_a_changed_byte_is_refused_also_after_copying",
    ),
    Breakage(
        "pretrain/data/shards.py",
        "if ended and fingerprint(",
        "if ended or fingerprint(",
        "a run is resumed on the text that it was trained on only",
        "tests/data/test_shards.py::test_a_run_goes_on_with_the_text_that_it_began_with_only",
    ),
    Breakage(
        "pretrain/data/tokenization.py",
        "self._backend.encode_special_tokens = True",
        "self._backend.encode_special_tokens = False",
        "an end-of-text token that stands in a text is ordinary text",
        "tests/data/test_tokenization.py::test_end_of_text_written_in_a_text_is_ordinary_text",
    ),
    Breakage(
        "pretrain/data/tokenization.py",
        "if not all(map(np.array_equal, encoder(texts), wanted)):",
        "if False:",
        "tiktoken is used only where its ids are the tokenizer's",
        "tests/data/test_tokenization.py::test_tiktoken_with_another_split_is_found_out_and_not_used",
    ),
    Breakage(
        "pretrain/data/tokenization.py",
        "table[[i for i in tokenizer.all_special_ids if i < size]] = 0",
        "pass",
        "bits per byte divide by the bytes of the text, and special tokens stand for none",
        "tests/data/test_tokenization.py::test_bytes_of_ids_sum_to_the_bytes_of_the_text",
    ),
    Breakage(
        "pretrain/data/cuts.py",
        r'GPT2 = re.compile(r"(?s).*(?<=\S)(?=[ \n])")',
        r'GPT2 = re.compile(r"(?s).*(?=[ \n])")',
        "a long text is tokenized in pieces as if it were whole",
        "tests/data/test_sources.py::test_ids_of_the_pieces_joined_are_the_ids_of_the_whole",
    ),
    Breakage(
        "pretrain/data/cuts.py",
        r"(?=[^\S\r\n]*[^\s/])",
        r"(?=[^\S\r\n]*[^\s])",
        "a long text is tokenized in pieces as if it were whole under every known split",
        "tests/data/test_cuts.py::test_ids_of_the_pieces_joined_are_the_ids_of_the_whole_for_every_split",
    ),
    Breakage(
        "pretrain/data/prepare.py",
        "first = end if document.row == number else 0 ",
        "first = 0 ",
        "a text in pieces is resumed inside of a document",
        "tests/scripts/test_prepare_data.py::"
        "test_a_text_in_pieces_has_the_ids_of_the_whole_under_a_split_that_is_not_gpt2s_after_kills_too",
    ),
    Breakage(
        "pretrain/data/sources.py",
        "if twice := set(map(_resolved, train)) & set(map(_resolved, held_out)):",
        "if twice := set(train) & set(held_out):",
        "no text is trained on and validated on",
        "tests/data/test_sources.py::test_a_file_in_both_splits_is_refused_however_it_is_written",
    ),
    Breakage(
        "pretrain/data/remote.py",
        "            if before[mark] != said[mark]:",
        "            if mark not in said:",
        "old and new text of a URL are never mixed",
        "tests/data/test_stream.py::"
        "test_a_file_behind_a_url_that_has_changed_since_a_kill_is_refused_before_texts_are_mixed",
    ),
    Breakage(
        "pretrain/data/patience.py",
        "if self.is_file and (self.local or again) and _is_final(error, self.local):",
        "if self.is_file and again and _is_final(error, self.local):",
        "a local file that is broken is told at once",
        "tests/data/test_stream.py::"
        "test_a_local_file_that_is_not_what_its_name_says_is_refused_at_once_with_file_and_place",
    ),
    Breakage(
        "pretrain/data/shards.py",
        "(newer_than is None or path.stat()",
        "(newer_than is not None and path.stat()",
        "preparing again makes a changed shard again",
        "tests/scripts/test_prepare_data.py::"
        "test_shards_that_are_missing_or_changed_are_made_again_and_the_others_left",
    ),
    # Model: loss, export
    Breakage(
        "pretrain/model/loss.py",
        "logits.add_(vocabulary == ids[:, None], alpha=label_smoothing - 1)",
        "logits.add_(vocabulary == ids[:, None], alpha=-1)",
        "gradients of a loss in parts are those of the whole",
        "tests/model/test_loss.py",
    ),
    Breakage(
        "pretrain/model/loss.py",
        'sums = [F.cross_entropy(head(rows).float(), ids, reduction="sum") for rows, ids in parts]\n'
        "        return torch.stack(sums).sum() / len(targets)",
        "sums = [F.cross_entropy(head(rows).float(), ids) for rows, ids in parts]\n"
        "        return torch.stack(sums).mean()",
        "the loss is the mean over every target",
        "tests/model/test_loss.py::test_loss_is_the_mean_over_every_target_and_equal_in_evaluation",
    ),
    Breakage(
        "pretrain/model/export.py",
        "if activation and getattr(config, activation.key) == activation.training:",
        "if False:",
        "an exported GPT-2 has the config of the stock one, gelu_new",
        "tests/model/test_export.py::test_reloaded_export_gives_the_trained_logits_exactly",
    ),
    Breakage(
        "pretrain/model/export.py",
        "generation.suppress_tokens = [*allowed, *range(ids, config.vocab_size)] or None",
        "generation.suppress_tokens = allowed or None",
        "padding of the vocabulary is never generated",
        "tests/model/test_export.py::test_no_padding_id_is_ever_sampled",
    ),
    Breakage(
        "pretrain/model/attention.py",
        "index_T = torch.arange(T, device=device)",
        "index_T = torch.zeros(T, dtype=torch.int64, device=device)",
        "documents in one row do not see each other",
        "tests/model/test_attention.py::test_the_loss_and_its_gradients_are_those_of_every_document_alone",
    ),
    # Optimizer
    Breakage(
        "pretrain/optim/schedule.py",
        "return peak * (step + 1) / warmup_steps",
        "return peak * step / warmup_steps",
        "the first update has a learning rate",
        "tests/optim/test_schedule.py::test_first_update_has_nonzero_learning_rate",
    ),
    Breakage(
        "pretrain/optim/schedule.py",
        "falling = max_steps - 1 - begin",
        "falling = max_steps - begin",
        "the last update has the floor of the learning rate exactly",
        "tests/optim/test_schedule.py::test_last_update_is_exactly_the_floor",
    ),
    Breakage(
        "pretrain/optim/update.py",
        "clip_grad_norm_(parameters, max_grad_norm or math.inf)",
        "clip_grad_norm_(parameters, math.inf)",
        "gradients are clipped to max_grad_norm",
        "tests/optim/test_update.py::test_gradients_are_clipped_to_the_norm_and_the_norm_is_that_before",
    ),
    Breakage(
        "pretrain/optim/update.py",
        "applied = math.isfinite(mean_loss) and math.isfinite(grad_norm)",
        "applied = math.isfinite(mean_loss)",
        "an update whose gradient is not finite is skipped",
        "tests/optim/test_update.py::test_a_bad_loss_or_gradient_changes_neither_weights_nor_moments",
    ),
    Breakage(
        "pretrain/optim/optimizers.py",
        '{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}',
        '{"params": [p for p in parameters if p.dim() < 2], "weight_decay": weight_decay}',
        "biases and norms do not decay",
        "tests/optim/test_optimizers.py::test_every_parameter_is_held_once_and_only_matrices_decay",
    ),
    Breakage(
        "pretrain/optim/muon.py",
        'stack = torch.cat(stack.chunk(group["parts"], dim=-1))\n',
        "\n",
        "Muon makes query, key and value orthogonal each",
        "tests/optim/test_muon.py::test_query_key_and_value_are_made_orthogonal_each_and_a_step_has_adamws_size",
    ),
    Breakage(
        "pretrain/optim/muon.py",
        "return record.blocks in name",
        'return ".wte." not in name',
        "what is no hidden matrix is AdamW's under Muon",
        "tests/optim/test_muon.py::test_all_that_is_no_hidden_matrix_takes_adamws_step_to_the_bit",
    ),
    # Evaluation
    Breakage(
        "pretrain/evaluation/validation.py",
        "text_bytes += bytes_of_id[targets_BT].sum()",
        "text_bytes += bytes_of_id[inputs_BT].sum()",
        "bits per byte divide by the bytes of the targets",
        "tests/evaluation/test_validation.py::test_bytes_are_counted_of_targets_not_of_inputs",
    ),
    Breakage(
        "pretrain/evaluation/validation.py",
        ".double() * targets_BT.numel()",
        ".double() * len(targets_BT) ** 0",
        "the validation loss is weighted by tokens",
        "tests/evaluation/test_validation.py::test_loss_is_weighted_by_tokens_not_by_batches",
    ),
    Breakage(
        "pretrain/evaluation/hellaswag.py",
        "ctx_b.capitalize()",
        "ctx_b",
        "HellaSwag's text is the harness's",
        "tests/evaluation/test_hellaswag.py::test_text_is_cleaned_by_the_harness_rules",
    ),
    Breakage(
        "pretrain/evaluation/hellaswag.py",
        "first / np.maximum(1, self.characters)",
        "first / self.tokens[:number]",
        "acc_norm is per character, acc_token_norm per token",
        "tests/evaluation/test_hellaswag.py::"
        "test_predictions_are_the_likeliest_ending_and_per_character_and_per_token_of_equals_the_first",
    ),
    Breakage(
        "pretrain/evaluation/likelihood.py",
        "range(len(context), len(context) + end - begin)",
        "range(begin, end)",
        "a context is computed once for all of its endings",
        "tests/evaluation/test_likelihood.py::"
        "test_a_context_is_computed_once_and_logits_only_where_an_ending_is_predicted",
    ),
    Breakage(
        "pretrain/evaluation/likelihood.py",
        "context[-(limit - len(ids) + 1) :]",
        "context[: limit - len(ids) + 1]",
        "what is longer than the context loses tokens from the left",
        "tests/evaluation/test_likelihood.py::"
        "test_what_is_longer_than_the_context_loses_tokens_from_the_left_as_in_the_harness",
    ),
    # Run: checkpoints, metrics, stops
    Breakage(
        "pretrain/run/checkpoint.py",
        "return None if files.sha256(file) == digest else",
        "return None if len(files.sha256(file)) == len(digest) else",
        "a checkpoint with a flipped bit is not resumed from",
        "tests/run/test_checkpoint.py::test_every_single_flipped_bit_is_found",
    ),
    Breakage(
        "pretrain/run/checkpoint.py",
        'aside = folder / f".{path.name}.tmp-{uuid.uuid4().hex[:8]}"',
        "aside = path",
        "a half-written checkpoint never has a checkpoint's name",
        "tests/run/test_checkpoint.py",
    ),
    Breakage(
        "pretrain/run/checkpoint.py",
        "share.state[parameter] = {kind: _moment(tensor, parameter.device) for kind, tensor in kinds.items()}",
        "share.state[parameter] = {}",
        "a resumed run equals the uninterrupted one to the bit",
        "tests/run/test_checkpoint.py::test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit",
    ),
    Breakage(
        "pretrain/run/checkpoint.py",
        "for old in kept[keep:] if keep",
        "for old in kept[keep - 1 :] if keep",
        "the checkpoints that are to be kept are kept",
        "tests/run/test_checkpoint.py::test_rotation_keeps_the_newest_and_goes_only_after_a_verified_save",
    ),
    Breakage(
        "pretrain/run/checkpoint.py",
        "if step_of(old) != spared:",
        "if True:",
        "the checkpoint before wsd's line outlives the others",
        "tests/scripts/test_train.py::test_a_finished_wsd_run_trained_on_equals_one_that_was_as_long_from_the_start",
    ),
    Breakage(
        "pretrain/run/resume.py",
        "if line is not None and checkpoint.step_of(path) <= line:",
        "if True:",
        "a finished run is trained on from before its line down",
        "tests/scripts/test_train.py::test_a_finished_wsd_run_trained_on_equals_one_that_was_as_long_from_the_start",
    ),
    Breakage(
        "pretrain/run/resume.py",
        "return then != schedule and all(",
        "return then != schedule or all(",
        "a schedule may change only where every learning rate so far stays",
        "tests/scripts/test_train.py::test_another_length_is_refused_where_a_learning_rate_so_far_would_be_another",
    ),
    Breakage(
        "pretrain/run/report.py",
        'return step < first_step or (step == first_step and "train/loss" in row)',
        "return step <= first_step",
        "metrics.jsonl of a resumed run has each row once",
        "tests/run/test_report.py::test_resume_drops_rows_past_the_checkpoint_and_evaluations_that_come_again",
    ),
    Breakage(
        "pretrain/run/trackers.py",
        "purge_step=first_step)",
        "purge_step=None)",
        "a killed and resumed run is one curve in TensorBoard",
        "tests/run/test_trackers.py::test_tensorboard_has_one_curve_and_every_point_on_disk_when_killed",
    ),
    Breakage(
        "pretrain/base/stopping.py",
        "return 128 + int(self.signal or signal.SIGTERM)",
        "return 1",
        "a run that was asked to stop ends with the shell's exit code",
        "tests/base/test_stopping.py::test_a_signal_is_noted_and_gives_the_shells_exit_code",
    ),
    Breakage(
        "pretrain/base/stopping.py",
        "op=dist.ReduceOp.MAX",
        "op=dist.ReduceOp.MIN",
        "a request to stop one process stops all at the same step",
        "tests/base/test_stopping.py::test_a_request_to_one_process_stops_both_at_the_same_place",
    ),
    Breakage(
        "pretrain/base/stopping.py",
        "if words is None or isinstance(error, TrainingStopped):",
        "if True:",
        "a run whose other process is lost ends with what to do",
        "tests/scripts/test_train_machines.py::"
        "test_a_lost_process_ends_the_run_and_the_same_command_resumes_it_exactly",
    ),
    Breakage(
        "pretrain/run/checkpoint.py",
        "except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:",
        "except (ValueError, KeyError, TypeError, AttributeError) as error:",
        "a newest checkpoint that the disk cannot read is passed over",
        "tests/run/test_checkpoint.py::"
        "test_a_newest_checkpoint_that_cannot_be_read_is_named_and_the_sound_one_before_it_is_taken",
    ),
    Breakage(
        "pretrain/run/checkpoint.py",
        "if not isinstance(origin, dict) or origin.get(key) != value:",
        "if True:",
        "a run that was begun at a checkpoint goes on from its own newest one after a kill",
        "tests/run/test_checkpoint.py::test_a_run_knows_its_own_checkpoints_by_where_it_began",
    ),
    # Files, messages, secrets
    Breakage(
        "pretrain/base/files.py",
        "            yield temporary\n            fsync(temporary)\n",
        "            temporary = path\n            yield temporary\n            fsync(temporary)\n",
        "a reader sees the whole old file or the whole new one",
        "tests/base/test_files.py::test_replacing_takes_the_place_of_the_old_file",
    ),
    Breakage(
        "pretrain/base/foreign.py",
        'return f"{scheme}://{at and HIDDEN}{at}{host}{slash}{path}{_hidden(query)}"',
        'return f"{scheme}://{user}{at}{host}{slash}{path}{_hidden(query)}"',
        "no user and password of a URL reaches a file or a log",
        "tests/base/test_foreign.py::test_user_password_and_query_are_left_out_and_that_is_said",
    ),
    Breakage(
        "pretrain/base/entry.py",
        'return getattr(error, "status", 1)',
        "return 1",
        "input that the user can mend ends with exit status 2",
        "tests/base/test_errors.py::test_bad_input_prints_each_line_and_exits_2",
    ),
    Breakage(
        "pretrain/base/files.py",
        "            while self._left:\n",
        "            while self._left and not before:\n",
        "no row is lost to a disk that is full for a while",
        "tests/base/test_files.py::test_no_line_is_lost_to_a_disk_that_is_full_for_a_while",
    ),
    Breakage(
        "pretrain/base/entry.py",
        "if (fault := machine_fault(error)) is None:",
        "if True:",
        "a full disk ends a run with a line, not a traceback",
        "tests/base/test_errors.py::"
        "test_what_the_machine_refuses_is_one_line_with_the_name_of_the_place_and_no_traceback",
    ),
    Breakage(
        "pretrain/recipe/reading.py",
        "or values > MOST_VALUES:",
        "or values > 10**30:",
        "a recipe that stands for more than memory holds is refused at once",
        "tests/recipe/test_reading_mutated.py::test_what_would_take_minutes_or_all_memory_is_refused_with_its_line",
    ),
    # Hub
    Breakage(
        "pretrain/hub/push.py",
        "if folder.name in {ref.name for ref in refs.tags}:",
        "if False:",
        "a push that is on the Hub is not sent again",
        "tests/hub/test_push.py::test_step_that_is_on_the_hub_already_is_not_sent_again",
    ),
    Breakage(
        "pretrain/hub/client.py",
        "text = one_line(text)[:300]",
        'text = " ".join(text.split())[:300]',
        "no message has the Hub's token",
        "tests/hub/test_client.py::test_token_is_in_no_file_no_message_and_no_request_but_its_header",
    ),
    Breakage(
        "pretrain/hub/model_card.py",
        'rows = [row for row in rows if row.get("step", math.inf) <= step]',
        "rows = list(rows)",
        "a model card has the figures of its own step",
        "tests/hub/test_model_card.py::test_rows_of_later_steps_are_not_used_and_what_was_measured_earlier_says_when",
    ),
    # Machine
    Breakage(
        "pretrain/optim/optimizers.py",
        "moments=Moments(4.0, 8.0, 8.0)",
        "moments=Moments(8.0, 8.0, 8.0)",
        "the estimate of memory knows what Muon saves",
        "tests/optim/test_optimizers.py::test_what_an_optimizer_keeps_is_what_its_record_states",
    ),
    Breakage(
        "pretrain/model/architectures.py",
        "+ 12 * self.n_layer * self.n_embd * self.sequence_length",
        "+ 6 * self.n_layer * self.n_embd * self.sequence_length",
        "FLOPs of a token are those of forward and backward, so that MFU is the field's",
        "tests/machine/test_estimate.py::test_flops_are_those_that_pytorch_counts_in_forward_and_backward",
    ),
    Breakage(
        "pretrain/machine/fit.py",
        "for _ in range(min(2, micro_batches)):",
        "for _ in range(1):",
        "a micro-batch that is found to fit fits beside the gradients of the first",
        "tests/machine/test_fit.py::test_gradients_of_the_first_micro_batch_are_there_in_the_second",
    ),
    # After pre-training; tokens of the Hub
    Breakage(
        "pretrain/post/positions.py",
        "    model.base_model.register_forward_pre_hook(count, with_kwargs=True)\n",
        "",
        "a padded prompt is trained at the positions that it was sampled at",
        "tests/post/test_positions.py::test_a_padded_row_is_read_as_alone_with_the_hook_and_as_another_without",
    ),
    Breakage(
        "pretrain/post/chat.py",
        "generation.suppress_tokens = [i for i in generation.suppress_tokens or () if i not in ids] or None",
        "pass",
        "a chat model may say that it has ended",
        "tests/post/test_chat.py::test_the_tokens_take_padding_rows_and_the_model_keeps_its_size",
    ),
    Breakage(
        "pretrain/post/rewards.py",
        "math.isfinite(number := float(value))",
        "(number := float(value)) is not None",
        "a reward that is no number counts zero",
        "tests/post/test_rewards.py::test_a_call_that_raises_or_gives_no_number_counts_zero_and_is_counted",
    ),
    Breakage(
        "pretrain/data/fetching.py",
        "            path.unlink()\n            raise Cut(",
        "            Cut(",
        "a token file has its name only when its hash is the Hub's",
        "tests/data/test_fetching.py::test_bytes_that_are_not_the_hubs_are_never_read",
    ),
    Breakage(
        "pretrain/data/fetching.py",
        "            pace.wait(rows)\n",
        "            pass\n",
        "a bounded number of token files is on the disk",
        "tests/data/test_fetching.py::test_consumed_keeps_a_bounded_number_of_files_on_the_disk_and_trains_on_all",
    ),
    Breakage(
        "pretrain/data/documents.py",
        "        ids = ids[inner[0] : inner[-1] + 1] if len(inner) else NO_IDS\n",
        "",
        "rows of ids make the shards that their texts make",
        "tests/scripts/test_prepare_data.py::test_rows_of_ids_make_the_shards_that_their_texts_make",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: f"{breakage.file}: {breakage.promise}")
def test_a_broken_promise_is_seen(breakage, tmp_path):
    assert_seen(breakage, tmp_path)


@pytest.mark.slow
def test_the_promises_are_kept_by_the_tree_as_it_is(tmp_path):
    """Or a test that fails for another reason would be taken for one that sees."""
    done = run_tests(copy_tree(tmp_path / "tree"), " ".join(sorted({b.tests for b in BREAKAGES})), tmp_path / "runs")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: f"{breakage.file}: {breakage.promise}")
def test_a_breakages_line_and_its_test_are_there(breakage):
    """Here, not only where they are run: make test-slow is run seldom."""
    assert (ROOT / breakage.file).read_text(encoding="utf-8").count(breakage.line) == 1
    path, _, name = breakage.tests.partition("::")
    assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8")
