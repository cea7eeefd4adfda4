// Device waits. Every wait has a deadline, looks at the abort flag, and leaves one record.
//
// A wait returns false when it gave up. The caller then leaves its role (no trap): whoever waits for
// that role finds the abort flag set and leaves as well, and the host raises at the next call.
#pragma once

#include "ptx.cuh"
#include "workspace.h"

namespace xstage {

// What is waited for, for the record.
struct WaitSite {
  Phase phase;
  int src_rank;       // whose word this is; -1 when it is this rank's own
  uint64_t epoch;     // which call
  uint64_t expected;  // what the word must reach
};

__device__ __forceinline__ bool aborted(Workspace const& workspace) {
  return ld_relaxed_sys(&workspace.control(workspace.rank)->abort) != 0;
}

// The first caller writes the record; everyone sets the abort flag of this rank.
static __device__ __noinline__ void give_up(Workspace const& workspace, WaitSite site,
                                            FaultKind kind, uint64_t seen, uint64_t waited_ns) {
  Control* const control = workspace.control(workspace.rank);
  FaultRecord* const record = workspace.fault_record();
  if (atomicExch(&control->abort, 1u) == 0 && record != nullptr) {
    record->phase = static_cast<uint32_t>(site.phase);
    record->channel = static_cast<uint32_t>(workspace.channel);
    record->rank = static_cast<int32_t>(workspace.rank);
    record->src_rank = site.src_rank;
    record->epoch = site.epoch;
    record->expected = site.expected;
    record->seen = seen;
    record->waited_ns = waited_ns;
    st_release_sys(&record->kind, static_cast<uint32_t>(kind));
  }
}

// Spins until load() >= site.expected. load() carries the memory order of the wait.
template <class Load>
__device__ __forceinline__ bool wait_until(Workspace const& workspace, WaitSite site, Load load) {
  uint64_t seen = load();
  if (seen >= site.expected) return true;
  uint64_t const start_ns = global_timer_ns();
  uint64_t const timeout_ns = static_cast<uint64_t>(workspace.timeout_ms) * 1000000;
  Channel const* const own = workspace.channel_of(workspace.rank);
  bool refused = false;
  uint64_t waited_ns = 0;
  // One look at the rare conditions per 64 polls keeps the common case short.
  for (uint32_t polls = 1;; ++polls) {
    seen = load();
    if (seen >= site.expected) return true;
    if (polls % 64 == 0) {
      if (aborted(workspace)) return false;
      refused = site.src_rank >= 0 && ld_acquire_sys(&own->refused[site.src_rank]) >= site.epoch;
      waited_ns = global_timer_ns() - start_ns;
      if (refused || (timeout_ns != 0 && waited_ns > timeout_ns)) break;
      __nanosleep(64);
    }
  }
  give_up(workspace, site, refused ? FaultKind::kPeerRefused : FaultKind::kTimeout, seen,
          waited_ns);
  return false;
}

}  // namespace xstage
