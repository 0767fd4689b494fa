"""The defects of tests/mutants.py, written by hand: a reviewer could miss each, and the tests must find it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Attributes:
        name: Name of the defect.
        room: Its part of the project.
        file: Its file, relative to the root.
        old: Text that occurs once in the file.
        new: The replacement.
        tests: Files or tests of the short tier that are likely to find it.
        reason: Why the short tier may miss it; "" if it must not.
    """

    name: str
    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str = ""


MUTANTS = (
    # --- shared memory ---------------------------------------------------------------------------
    Mutant(
        "signature_without_root",
        "signatures",
        "csrc/transport/segment_stream.cpp",
        "theirs.root == mine.root && counts && factors;",
        "counts && factors;",
        ("tests/faults/test_mismatch.py",),
    ),
    Mutant(
        "a_rank_that_waits_is_called_late",
        "who is missing",
        "csrc/transport/segment_stream.cpp",
        "    time = 3 * grace_;\n",
        "    return Milliseconds{0};\n",
        (
            "tests/faults/test_silence.py::"
            "test_a_rank_that_is_a_call_ahead_leaves_it_to_the_others_to_say_who_is_missing",
        ),
    ),
    Mutant(
        "ring_reused_a_segment_early",
        "credits",
        "csrc/transport/segment_stream.cpp",
        "if (segment.end > ring) awaitConsumed(segment.end - ring);",
        "if (segment.begin > ring) awaitConsumed(segment.begin - ring);",
        ("tests/transport/test_stores.py", "tests/collectives/test_collectives.py"),
    ),
    Mutant(
        "consumed_before_it_is_read",
        "credits",
        "csrc/algorithms/pipeline.hpp",
        "    drain(s, segment);\n    stream.consume(segment);\n",
        "    stream.consume(segment);\n    drain(s, segment);\n",
        ("tests/transport/test_stores.py", "tests/collectives/test_collectives.py"),
    ),
    Mutant(
        "pair_ring_filled_to_the_last_line",
        "credits",
        "csrc/transport/pair_ring.hpp",
        "PairRecord::size(length) + PairRecord::kLine;",
        "PairRecord::size(length);",
        ("tests/collectives/test_p2p.py",),
    ),
    Mutant(
        "second_half_behind_the_peers_length",
        "staging",
        "csrc/algorithms/exchange.hpp",
        "in_.read(cut_.offset(s) + published + at,",
        "in_.read(cut_.offset(s) + incoming + at,",
        ("tests/collectives/test_exchange.py",),
    ),
    Mutant(
        "ring_freed_while_peers_may_write",
        "retirement",
        "csrc/transport/group_memory.cpp",
        "aborted() ? giveBack(large) : arena().release(large);",
        "arena().release(large);",
        ("tests/faults/test_late_writer.py",),
    ),
    Mutant(
        "memory_of_groups_never_freed",
        "retirement",
        "csrc/transport/arena.cpp",
        "  punch(offset, extent.bytes);\n  if (extent.state",
        "  if (extent.state",
        ("tests/transport/test_shared_memory.py",),
    ),
    # --- algorithms and arithmetic ---------------------------------------------------------------
    Mutant(
        "last_sources_summed_from_left_to_right",
        "tree order",
        "csrc/reduce/loops.inl",
        "carry(j & 1);",
        "carry(waiting);",
        ("tests/collectives/test_reproducible.py",),
    ),
    Mutant(
        "bfloat16_summed_in_bfloat16",
        "rounding",
        "csrc/reduce/float_kernels.inl",
        "    return {op.combine(a.low, b.low), op.combine(a.high, b.high)};",
        "    return Format::unpack(Format::pack({op.combine(a.low, b.low), op.combine(a.high, b.high)}));",
        ("tests/collectives/test_reproducible.py",),
    ),
    Mutant(
        "barrier_waits_for_no_one",
        "algorithms",
        "csrc/algorithms/barrier.cpp",
        "  stream.awaitArrivals();\n",
        "",
        ("tests/collectives/test_barrier.py",),
    ),
    Mutant(
        "uneven_split_read_by_the_own_stride",
        "algorithms",
        "csrc/algorithms/all_to_all.cpp",
        "const Strided theirs(stream.signatureOf(peer).longest, ranks, kFirst);",
        "const Strided theirs(longest, ranks, kFirst);",
        ("tests/collectives/test_collectives.py",),
    ),
    Mutant(
        "scatter_takes_the_roots_place",
        "algorithms",
        "csrc/algorithms/rooted.cpp",
        "strided.place(request.root, stream.rank())",
        "strided.place(stream.rank(), request.root)",
        ("tests/collectives/test_collectives.py",),
    ),
    # --- engine and the front of the process group -----------------------------------------------
    Mutant(
        "receive_matches_any_tag",
        "point-to-point",
        "csrc/engine/point_to_point_receiving.cpp",
        "return (op->peer == rank || op->peer == kAnySource) && op->tag == message.tag;",
        "return op->peer == rank || op->peer == kAnySource;",
        ("tests/collectives/test_p2p.py",),
    ),
    Mutant(
        "receive_is_done_with_its_first_piece",
        "engine",
        "csrc/engine/point_to_point_receiving.cpp",
        "    if (op->moved_ < op->unasked_) return;\n",
        "",
        ("tests/collectives/test_p2p.py",),
    ),
    Mutant(
        "reduce_scatter_counts_no_change",
        "version counters",
        "csrc/base/collectives.def",
        '"reduce_scatter", "reduce_scatter", Row, Each, OnCpu)',
        '"reduce_scatter", "reduce_scatter", Row, Each, Never)',
        ("tests/collectives/test_version_counters.py",),
    ),
    Mutant(
        "sparse_rank_without_entries_expects_scalars",
        "sparse",
        "csrc/calls/sparse.cpp",
        "fields[0] == 0 ? densePart(mine) :",
        "fields[0] == 0 ? 1 :",
        ("tests/collectives/test_sparse.py",),
    ),
    Mutant(
        "list_of_dtypes_in_turns_goes_to_the_last_one",
        "coalesced",
        "csrc/calls/all_reduce.cpp",
        "groups[place->second].push_back(tensor);",
        "groups.back().push_back(tensor);",
        ("tests/collectives/test_coalescing.py", "tests/collectives/test_fused_all_reduce.py"),
    ),
    Mutant(
        "option_wins_over_the_variable",
        "environment",
        "csrc/base/settings.cpp",
        "if (text.empty()) return;",
        "if (text.empty() || all.*member != Settings{}.*member) return;",
        ("tests/transport/test_choice.py",),
    ),
    Mutant(
        "trace_without_the_root",
        "trace",
        "csrc/calls/traced.cpp",
        "  draft.root = request.root;\n",
        "",
        ("tests/faults/test_trace_records.py", "tests/faults/test_trace_dumps.py"),
    ),
    # --- faults ----------------------------------------------------------------------------------
    Mutant(
        "stall_of_a_rank_that_came_has_no_limit",
        "timeouts",
        "csrc/transport/segment_stream.cpp",
        "  Milliseconds time = 2 * grace_;\n",
        "  Milliseconds time = std::chrono::hours(24);\n",
        ("tests/faults/test_silence.py",),
    ),
    Mutant(
        "abort_record_of_the_last_rank_not_written",
        "aborts",
        "csrc/transport/group_memory.cpp",
        "for (int peer = 0; peer < identity_.size; ++peer) {\n    if (listens(peer)) told",
        "for (int peer = 0; peer + 1 < identity_.size; ++peer) {\n    if (listens(peer)) told",
        ("tests/faults/test_first_cause.py", "tests/faults/test_mismatch.py"),
    ),
    Mutant(
        "rank_that_is_waited_for_named_in_place_of_the_dead",
        "aborts",
        "csrc/transport/segment_stream.cpp",
        "stopCause_ = memory_.causeOfSilence(memberOf(peer),",
        "stopCause_ = memory_.causeOfSilence(memberOf(awaited_),",
        ("tests/faults/test_death.py",),
    ),
    Mutant(
        "dead_rank_not_noticed",
        "aborts",
        "csrc/transport/segment_stream.cpp",
        "if (memory_.isDead(memberOf(peer)) || memory_.hasLeft(memberOf(peer))) {",
        "if (memory_.hasLeft(memberOf(peer))) {",
        ("tests/faults/test_death.py",),
    ),
    # --- agreement and hosts ---------------------------------------------------------------------
    Mutant(
        "votes_are_not_counted",
        "votes",
        "csrc/group/agreement.cpp",
        "agreement.hosts = hostsOf(records_, apart);",
        "agreement.hosts = hosts;",
        ("tests/transport/test_choice.py", "tests/faults/test_votes.py"),
    ),
    Mutant(
        "counts_of_a_host_for_those_of_its_leader",
        "hosts",
        "csrc/hosts/links.cpp",
        "counts[hosts_.leader(host)]",
        "counts[host]",
        ("tests/transport/test_hosts.py",),
    ),
    Mutant(
        "uneven_split_expects_what_is_given",
        "hosts",
        "csrc/hosts/outbound_blocks.hpp",
        "given(sender, target) : expected(receiver, source);",
        "given(sender, target) : given(receiver, source);",
        ("tests/transport/test_hosts.py",),
    ),
    Mutant(
        "leader_leaves_without_a_close_notice",
        "hosts",
        "csrc/hosts/links.cpp",
        "    peer.leaving = peer.connection->send(&peer.closeNotice, sizeof(Head), kFrames);\n",
        "",
        ("tests/faults/test_leaving_across_hosts.py",),
    ),
    Mutant(
        "average_between_hosts_divided_by_hosts",
        "hosts",
        "csrc/hosts/partial_sum.cpp",
        "static_cast<double>(subtrees_.size()) : hosts.size())",
        "static_cast<double>(subtrees_.size()) : hosts.count())",
        ("tests/transport/test_hosts.py",),
    ),
    # --- device tensors --------------------------------------------------------------------------
    Mutant(
        "collective_waits_for_no_callers_stream",
        "stream order",
        "csrc/device/device_engine.cpp",
        "    ready->block(stream);\n",
        "",
        ("tests/device/test_device_order.py",),
    ),
    Mutant(
        "tensors_of_another_stream_not_kept",
        "stream order",
        "csrc/device/device_engine.cpp",
        "  if (apart) flight->stash(std::move(used));\n",
        "",
        ("tests/device/test_device_order.py",),
    ),
    Mutant(
        "nccl_call_on_the_callers_stream",
        "NCCL",
        "csrc/device/device_engine.cpp",
        "library_->issue(requests, stream, pair, captured);",
        "library_->issue(requests, calls.front().callers, pair, captured);",
        ("tests/device/test_device_order.py", "tests/device/test_device_engine.py"),
    ),
    Mutant(
        "bfloat16_has_the_code_of_float16",
        "NCCL",
        "csrc/base/dtypes.def",
        "Floating, true,   9)",
        "Floating, true,   6)",
        ("tests/device/test_device_engine.py",),
    ),
    Mutant(
        "failed_nccl_group_not_ended",
        "NCCL",
        "csrc/device/nccl.cpp",
        "  functions_->groupEnd();  // which drops the group\n",
        "",
        ("tests/device/test_device_faults.py",),
    ),
    Mutant(
        "device_call_is_never_late",
        "timeouts",
        "csrc/device/watchdog.cpp",
        "if (!ended[i] && late == nullptr && now",
        "if (!ended[i] && late != nullptr && now",
        ("tests/device/test_device_faults.py",),
    ),
    Mutant(
        "kernels_of_two_streams_do_not_follow",
        "stream order",
        "csrc/device/plans.cpp",
        "  end.block(stream);\n",
        "",
        ("tests/algorithms/test_peer_races.py",),
    ),
    # --- kernels ---------------------------------------------------------------------------------
    Mutant(
        "tail_is_copied_without_its_mask",
        "kernels",
        "kernels/_pieces.py",
        "    tl.store(pointer(target, TARGET, WIDE) + at, value, mask=there)\n\n\n@triton.jit\ndef copy_piece",
        "    tl.store(pointer(target, TARGET, WIDE) + at, value)\n\n\n@triton.jit\ndef copy_piece",
        ("tests/kernels/test_peer_every_rank.py", "tests/kernels/test_peer_exchange.py"),
    ),
    Mutant(
        "ring_reads_the_slot_that_it_sends",
        "kernels",
        "kernels/_ring.py",
        "incoming = own_slots + received % slots * slot_bytes",
        "incoming = own_slots + sent % slots * slot_bytes",
        ("tests/kernels/test_peer_exchange.py",),
    ),
    Mutant(
        "staging_halves_do_not_take_turns",
        "kernels",
        "kernels/_exchange.py",
        "(channel * 2 + (number & 1))",
        "(channel * 2)",
        ("tests/kernels/test_peer_exchange.py",),
    ),
    Mutant(
        "average_drops_the_scale",
        "kernels",
        "kernels/_arithmetic.py",
        "result = _averaged(result, average)",
        "result = _averaged(value, average)",
        ("tests/kernels/test_peer_exchange.py",),
    ),
    Mutant(
        "wait_takes_the_flag_of_the_round_before",
        "kernels",
        "kernels/_exchange.py",
        "missing = wait(mine, there, number, spins, peers, world, rank)",
        "missing = wait(mine, there, number - 1, spins, peers, world, rank)",
        ("tests/kernels/test_peer_exchange.py",),
    ),
    # --- training --------------------------------------------------------------------------------
    Mutant(
        "average_of_sparse_gradients_divided_twice",
        "DDP",
        "fastcoll/ddp/hook.py",
        "dist.all_reduce(buffer, group=settings.process_group, async_op=True)",
        "dist.all_reduce(buffer, settings.op, group=settings.process_group, async_op=True)",
        ("tests/ddp/test_uneven.py",),
    ),
    Mutant(
        "each_rank_keeps_its_own_order_of_buckets",
        "DDP",
        "fastcoll/ddp/synchronizer.py",
        "        broadcast_from_first([order], self.process_group, arrived[0].device)\n",
        "",
        ("tests/ddp/test_synchronizer.py", "tests/ddp/test_synchronizer_passes.py"),
    ),
    Mutant(
        "staging_buffer_given_out_while_it_is_used",
        "FSDP",
        "fastcoll/fsdp/staging.py",
        " <= 2 * needed and not kept.is_used():",
        " <= 2 * needed:",
        ("tests/fsdp/test_fused_fsdp.py",),
    ),
    Mutant(
        "all_devices_are_served_where_one_is_named",
        "names",
        "fastcoll/names.py",
        "{NAME if backend in _replaced else backend}",
        "{NAME}",
        ("tests/features/test_names.py::test_only_the_named_backend_of_a_group_of_two_is_served",),
    ),
    Mutant(
        "ballot_waits_for_ever",
        "votes",
        "fastcoll/cuda/ballot.py",
        "        end = time.monotonic() + self._timeout\n\n        def look() -> None:\n",
        "        def look() -> None:\n            end = time.monotonic() + self._timeout\n",
        ("tests/algorithms/test_peer_agreement.py",),
    ),
)
