// Device waits. Every wait has a deadline, looks at the failure word, and leaves one record.
//
// A wait returns false when it gave up. The caller then leaves its role (no trap), but its block
// still arrives at the end of the call (channel.cuh): whoever waits for that role finds this rank's
// failure byte set and leaves as well, peers are told at once, and the host raises at its next
// call.
#pragma once

#include "ptx.cuh"
#include "workspace.h"

namespace xstage {

// True when this rank has given up: every role should leave.
__device__ __forceinline__ bool aborted(Workspace const& workspace) {
  uint64_t const failed = ld_relaxed_sys(&workspace.control(workspace.rank)->failed);
  return failure_of(failed, workspace.rank) != Failure::kNone;
}

// Writes a record unless there is one already. The claim lies in device memory: atomics on mapped
// host memory are not atomic everywhere.
static __device__ __noinline__ void record_fault(Workspace const& workspace, RecordSlot slot,
                                                 WaitSite site, FaultKind kind, uint64_t seen,
                                                 uint64_t waited_ns) {
  if (workspace.host_page == 0) return;
  if (atomicExch(&workspace.control(workspace.rank)->recorded[slot], 1u) != 0) return;
  FaultRecord* const record = workspace.fault_record(slot);
  record->phase = static_cast<uint32_t>(site.phase);
  record->channel = static_cast<uint32_t>(workspace.channel);
  record->rank = static_cast<int32_t>(workspace.rank);
  record->src_rank = site.src_rank;
  record->world = static_cast<uint32_t>(workspace.world);
  record->epoch = site.epoch;
  record->expected = site.expected;
  record->seen = seen;
  record->waited_ns = waited_ns;
  st_release_sys(&record->kind, static_cast<uint32_t>(kind));
}

// Marks this rank as failed in every block, its own first: from call `epoch` of this channel on it
// takes no part. Peers that wait for it leave.
static __device__ __noinline__ void announce_failure(Workspace const& workspace, Failure failure,
                                                     uint64_t epoch) {
  for (int64_t i = 0; i < workspace.world; ++i) {
    int64_t const dst_rank = (workspace.rank + i) % workspace.world;
    st_relaxed_sys(&workspace.channel_of(dst_rank)->failed_at[workspace.rank], epoch);
    red_or_release_sys(&workspace.control(dst_rank)->failed, failure_bits(workspace.rank, failure));
  }
}

// Ends this rank's part: one record, then the announcement. Roles may call it on their own
// findings.
static __device__ __noinline__ void give_up(Workspace const& workspace, WaitSite site,
                                            FaultKind kind, uint64_t seen, uint64_t waited_ns) {
  if (aborted(workspace)) return;
  record_fault(workspace, kFatalRecord, site, kind, seen, waited_ns);
  announce_failure(workspace, Failure::kGaveUp, site.epoch);
}

// True unless a rank failed in this call or before. A call whose waits were satisfied asks at its
// end, so that ranks agree on whether it succeeded when one gave up after it had sent its part. A
// failure in a later call does not concern this one.
__device__ __forceinline__ bool nobody_failed(Workspace const& workspace, WaitSite site) {
  uint64_t const failed = ld_acquire_sys(&workspace.control(workspace.rank)->failed);
  if (failed == 0) return true;
  if (failure_of(failed, workspace.rank) != Failure::kNone) return false;
  Channel const* const own = workspace.channel_of(workspace.rank);
  for (int r = 0; r < workspace.world; ++r) {
    Failure const failure = failure_of(failed, r);
    uint64_t const failed_at = ld_relaxed_sys(&own->failed_at[r]);
    if (failure == Failure::kNone || failed_at == 0 || failed_at > site.epoch) continue;
    site.src_rank = r;
    give_up(workspace, site, FaultKind::kPeerFailed, static_cast<uint64_t>(failure), 0);
    return false;
  }
  return true;
}

// Spins until load() >= site.expected. load() carries the memory order of the wait. False when it is
// to be given up; `end` is told why, unless this rank has failed already. Who waits for roles of its
// own rank, or does not know for whom, takes an eighth longer: a role that waits for a peer shall
// speak first, though it may have begun to wait last.
template <class Load, class End>
__device__ __forceinline__ bool poll_until(Workspace const& workspace, WaitSite site, Load load,
                                           End end) {
  uint64_t seen = load();
  if (seen >= site.expected) return true;
  uint64_t const start_ns = global_timer_ns();
  bool const names_a_peer = site.src_rank >= 0 && site.src_rank != workspace.rank;
  uint64_t const timeout_ns =
      static_cast<uint64_t>(workspace.timeout_ms) * 125000 * (names_a_peer ? 8 : 9);
  Control const* const control = workspace.control(workspace.rank);
  uint64_t waited_ns = 0;
  // One look at the rare conditions per 64 polls keeps the common case short.
  for (uint32_t polls = 1;; ++polls) {
    seen = load();
    if (seen >= site.expected) return true;
    if (polls % 64 != 0) continue;
    uint64_t const failed = ld_acquire_sys(&control->failed);
    if (failure_of(failed, workspace.rank) != Failure::kNone) return false;
    int const culprit = failed_rank(failed, site.src_rank);
    waited_ns = global_timer_ns() - start_ns;
    if (culprit >= 0) {
      // What the peer stored before it failed is visible now; it may be all that we need.
      seen = load();
      if (seen >= site.expected) return true;
      site.src_rank = culprit;
      seen = static_cast<uint64_t>(failure_of(failed, culprit));
      end(site, FaultKind::kPeerFailed, seen, waited_ns);
      return false;
    }
    if (timeout_ns != 0 && waited_ns > timeout_ns) break;
    __nanosleep(64);
  }
  end(site, FaultKind::kTimeout, seen, waited_ns);
  return false;
}

// The wait of one thread: false when it gave up.
template <class Load>
__device__ __forceinline__ bool wait_until(Workspace const& workspace, WaitSite site, Load load) {
  auto const end = [&](WaitSite const& at, FaultKind kind, uint64_t seen, uint64_t waited_ns) {
    give_up(workspace, at, kind, seen, waited_ns);
  };
  return poll_until(workspace, site, load, end);
}

// The same by a whole warp, with one answer: a lane that gave up does not leave the others to
// instructions that take all lanes. The vote comes first: values that the code behind the wait needs
// must not have to survive the call, which costs registers.
template <class Load>
__device__ __forceinline__ bool warp_wait_until(Workspace const& workspace, WaitSite site,
                                                Load load) {
  FaultKind kind = FaultKind::kNone;
  uint64_t seen = 0, waited_ns = 0;
  auto const end = [&](WaitSite const& at, FaultKind why, uint64_t saw, uint64_t ns) {
    site = at, kind = why, seen = saw, waited_ns = ns;
  };
  bool const ok = poll_until(workspace, site, load, end);
  if (__all_sync(0xffffffffu, ok)) return true;
  if (kind != FaultKind::kNone) give_up(workspace, site, kind, seen, waited_ns);
  return false;
}

}  // namespace xstage
