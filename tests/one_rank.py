"""The tests of behaviour with stores of one rank of several machines' types.

`TORCHKV_TEST_TYPES=dist_sync` makes the tests of the contract use this type in a job of
this process alone. push waits until it is applied, so that tests may look at what it
has done.
"""

from __future__ import annotations

import functools
import os

import torch

import torchkv

# Tests that only hold on one machine, by the part of their name that tells, and why.
DIFFERENT = {
    "copies, pickles and archives are refused": (
        "test_copies.py",
        "test_copies_in_use.py",
        "test_script_save.py",
        "test_only_pushed_rows_and_their_state_change",
        "test_steps_in_all_shards",
        "test_without_lazy_all_rows_step",
        "test_lazy_by_name_and_as_an_attribute",
        "is_copied",
        "a_copied_store",
        "a_copy_",
        "test_a_damaged_optimizer_is_rejected",
        "test_str_in_torchscript",
        "test_an_archive_is_loaded_after_import_torchkv",
        "test_a_module_with_a_store_is_saved_and_copied",
        "test_an_empty_store_is_saved_with_options",
        "test_adam_with_decoupled_weight_decay_is_adamw",
    ),
    "values are not shared": (
        "test_share.py",
        "test_share_errors.py",
        "shared_value",
        "of a shared",
    ),
    "stored values are contiguous": ("test_stored_values_that_are_not_contiguous",),
    "memory and times are those of servers": (
        "test_memory.py",
        "test_stats.py",
        "test_counts_the_rows",
        "test_stats_and_repr",
        "test_a_billion_rows",
    ),
    "work is not done when the call returns": ("test_async.py",),
    "a forked child, in which the test runs, has no store": (
        "test_fork.py",
        "test_spawn.py",
        "test_updater_tampering.py",
        "test_a_mock_of_a_tensor_is_refused",
        "test_a_tensor_under_functionalization_is_refused",
        "test_the_work_is_the_same_inside_a_mode",
        "test_rows_are_the_same_inside_a_mode",
        "test_wide_unsigned",
        "test_a_script_function_keeps_alive_what_it_calls",
    ),
    "an updater's error is a RemoteError of a later call": (
        "test_reentry.py",
        "test_updater_errors.py",
        "test_script_errors.py",
        "test_a_mock_as_updater",
        "is_an_error",
        "test_an_updater_that_raises",
        "test_what_an_updater_must_not_do",
        "test_calling_the_store",
        "test_rows_that_the_key_cannot_have",
        "-raises]",
    ),
    "the updater runs on another thread, on a copy in TorchScript": (
        "test_a_users_mode_sees_the_operators_of_an_updater",
        "test_two_stores_share_one_script_updater",
        "test_a_script_updater_of_several_stores_runs_once_at_a_time",
        "test_a_script_updater_never_runs_twice_at_once",
        "test_threads_push_while_the_main_thread_holds_the_gil",
        "test_script_module_keeps_its_state_in_a_dict",
        "test_a_script_updater_may_keep_its_arguments",
        "test_set_updater_inside_torchscript_shares_the_submodule",
        "test_an_updater_is_released",
        "test_an_adapted_optimizer_keeps_no_reference_to_stored_values",
        "test_cycles.py",
    ),
}

# Of dist_async, whose updates have one push each.
WITHOUT_ALL_GRADIENTS = (
    "skip_nonfinite",
    "test_clipping_by_norm",
    "test_a_skipped_step_changes_no_row",
)


def is_used() -> bool:
    return "TORCHKV_TEST_TYPES" in os.environ


def applies(item) -> bool:
    """Whether a collected test uses the types and holds for them."""
    different = [name for names in DIFFERENT.values() for name in names]
    if "dist_async" in item.nodeid:
        different += WITHOUT_ALL_GRADIENTS
    return bool({"store_type", "each_kv"} & {*item.fixturenames}) and not any(
        name in item.nodeid for name in different
    )


def start() -> None:
    """Makes this process the only rank of a job."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    start.store = store  # type: ignore[attr-defined]  # as long as the process
    push = torchkv.KVStore.push

    @functools.wraps(push)
    def push_and_wait(self, *args, **kwargs):
        work = push(self, *args, **kwargs)
        self._impl.flush()
        return work

    torchkv.KVStore.push = push_and_wait
