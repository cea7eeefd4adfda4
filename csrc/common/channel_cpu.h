// The life of one call of an operator instance, on the CPU: the protocol of channel.cuh over memory
// that processes share (or that virtual ranks own), with the same flags, deadline and record.
//
//   epoch = cpu::call_epoch(ws)
//   ... store into peers' regions ...
//   cpu::publish(ws, epoch)                 one thread, after all of this rank's stores
//   cpu::wait_for_ranks(ws, epoch, phase)   one thread
//
// Virtual ranks in one thread run each step for all ranks before the next step.
#pragma once

#include <time.h>

#include "workspace.h"

namespace xstage::cpu {

// Atomics on shared memory, order in the name. Plain integers, because the kernels' view of the
// same structures has no std::atomic.

inline uint64_t ld_acquire(uint64_t const* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void st_release(uint64_t* p, uint64_t v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void or_release(uint64_t* p, uint64_t v) {
  __atomic_fetch_or(p, v, __ATOMIC_RELEASE);
}

inline uint64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000 + static_cast<uint64_t>(t.tv_nsec);
}

inline bool aborted(Workspace const& workspace) {
  uint64_t const failed = ld_acquire(&workspace.control(workspace.rank)->failed);
  return failure_of(failed, workspace.rank) != Failure::kNone;
}

inline void record_fault(Workspace const& workspace, RecordSlot slot, WaitSite site, FaultKind kind,
                         uint64_t seen, uint64_t waited_ns) {
  if (workspace.host_page == 0) return;
  uint32_t* const claim = &workspace.control(workspace.rank)->recorded[slot];
  if (__atomic_exchange_n(claim, 1u, __ATOMIC_ACQ_REL) != 0) return;
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
  __atomic_store_n(&record->kind, static_cast<uint32_t>(kind), __ATOMIC_RELEASE);
}

// Marks this rank as failed in every block, its own first: from call `epoch` of this channel on it
// takes no part. Peers that wait for it leave.
inline void announce_failure(Workspace const& workspace, Failure failure, uint64_t epoch) {
  for (int64_t i = 0; i < workspace.world; ++i) {
    int64_t const dst_rank = (workspace.rank + i) % workspace.world;
    st_release(&workspace.channel_of(dst_rank)->failed_at[workspace.rank], epoch);
    or_release(&workspace.control(dst_rank)->failed, failure_bits(workspace.rank, failure));
  }
}

inline void give_up(Workspace const& workspace, WaitSite site, FaultKind kind, uint64_t seen,
                    uint64_t waited_ns) {
  if (aborted(workspace)) return;
  record_fault(workspace, kFatalRecord, site, kind, seen, waited_ns);
  announce_failure(workspace, Failure::kGaveUp, site.epoch);
}

// True unless a rank failed in this call or before; asked at a call's end, see wait.cuh.
inline bool nobody_failed(Workspace const& workspace, WaitSite site) {
  uint64_t const failed = ld_acquire(&workspace.control(workspace.rank)->failed);
  if (failure_of(failed, workspace.rank) != Failure::kNone) return false;
  for (int r = 0; r < workspace.world; ++r) {
    Failure const failure = failure_of(failed, r);
    uint64_t const failed_at = ld_acquire(&workspace.channel_of(workspace.rank)->failed_at[r]);
    if (failure == Failure::kNone || failed_at == 0 || failed_at > site.epoch) continue;
    site.src_rank = r;
    give_up(workspace, site, FaultKind::kPeerFailed, static_cast<uint64_t>(failure), 0);
    return false;
  }
  return true;
}

// Polls until load() >= site.expected; sleeps longer and longer (at most 0.2 ms) between polls,
// since the rank that it waits for may need this very core.
template <class Load>
bool wait_until(Workspace const& workspace, WaitSite site, Load load) {
  uint64_t const start_ns = monotonic_ns();
  uint64_t const timeout_ns = static_cast<uint64_t>(workspace.timeout_ms) * 1000000;
  for (uint32_t polls = 0;; ++polls) {
    uint64_t seen = load();
    if (seen >= site.expected) return true;
    uint64_t const failed = ld_acquire(&workspace.control(workspace.rank)->failed);
    if (failure_of(failed, workspace.rank) != Failure::kNone) return false;
    int const culprit = failed_rank(failed, site.src_rank);
    uint64_t const waited_ns = monotonic_ns() - start_ns;
    if (culprit >= 0) {
      // What the peer stored before it failed is visible now; it may be all that we need.
      if (load() >= site.expected) return true;
      site.src_rank = culprit;
      seen = static_cast<uint64_t>(failure_of(failed, culprit));
      give_up(workspace, site, FaultKind::kPeerFailed, seen, waited_ns);
      return false;
    }
    if (timeout_ns != 0 && waited_ns > timeout_ns) {
      give_up(workspace, site, FaultKind::kTimeout, seen, waited_ns);
      return false;
    }
    timespec const pause{0, min_of<long>(200000, 1000L * (1 + polls))};
    nanosleep(&pause, nullptr);
  }
}

inline uint64_t call_epoch(Workspace const& workspace) {
  return ld_acquire(&workspace.channel_of(workspace.rank)->calls) + 1;
}

// After all stores of this rank's call. A call that was aborted publishes nothing.
inline void publish(Workspace const& workspace, uint64_t epoch) {
  if (!aborted(workspace)) {
    for (int64_t i = 1; i <= workspace.world; ++i) {
      int64_t const dst_rank = (workspace.rank + i) % workspace.world;
      st_release(&workspace.channel_of(dst_rank)->from[workspace.rank], workspace.signal(epoch));
    }
  }
  st_release(&workspace.channel_of(workspace.rank)->calls, epoch);
}

// Waits for every rank's signal and compares digests. After true, what the peers stored is visible.
inline bool wait_for_ranks(Workspace const& workspace, uint64_t epoch, Phase phase) {
  uint64_t const expected = workspace.signal(epoch);
  for (int src_rank = 0; src_rank < workspace.world; ++src_rank) {
    uint64_t const* const word = &workspace.channel_of(workspace.rank)->from[src_rank];
    WaitSite site{phase, src_rank, epoch, epoch};
    if (!wait_until(workspace, site, [&] { return signal_epoch(ld_acquire(word)); })) return false;
    // A rank that is already a call ahead has compared this call's digests itself.
    uint64_t const seen = ld_acquire(word);
    if (signal_epoch(seen) == epoch && seen != expected) {
      site.expected = signal_digest(expected);
      give_up(workspace, site, FaultKind::kPlanDiffers, signal_digest(seen), 0);
      return false;
    }
  }
  return nobody_failed(workspace, WaitSite{phase, -1, epoch, epoch});
}

// Before a call that stores into output slot `slot` of every rank, in two steps; see grant_slot in
// channel.cuh. First: announces the slots that nobody on this rank reads any more.
inline void announce_slots(Workspace const& workspace, int slot, uint32_t free_slots) {
  uint64_t const epoch = call_epoch(workspace);
  free_slots |= 1u << slot;
  for (int64_t dst_rank = 0; dst_rank < workspace.world; ++dst_rank) {
    Channel* const dst = workspace.channel_of(dst_rank);
    for (int s = 0; s < kMaxSlots; ++s) {
      if ((free_slots >> s) & 1) st_release(&dst->released[s][workspace.rank], epoch);
    }
  }
}

// Second: waits until every rank has released `slot` since its last use.
inline bool wait_for_slot(Workspace const& workspace, int slot) {
  uint64_t const epoch = call_epoch(workspace);
  Channel* const own = workspace.channel_of(workspace.rank);
  for (int src_rank = 0; src_rank < workspace.world; ++src_rank) {
    uint64_t const* const word = &own->released[slot][src_rank];
    WaitSite const site{Phase::kSlotCredit, src_rank, epoch, own->last_use[slot] + 1};
    if (!wait_until(workspace, site, [&] { return ld_acquire(word); })) return false;
  }
  own->last_use[slot] = epoch;
  return !aborted(workspace);
}

}  // namespace xstage::cpu
