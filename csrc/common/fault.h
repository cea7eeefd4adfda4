// What a wait leaves behind when it gives up: one record per rank, in memory that the host can read
// while kernels run (mapped host memory on CUDA, ordinary memory on the CPU).
#pragma once

#include <cstdint>

namespace xstage {

// Where a rank can wait. Python reads the names through `xstage::phase_names`.
#define XS_PHASES(X)                    \
  X(kNone, "none")                      \
  X(kHandshake, "handshake")            \
  X(kSlotCredit, "slot credit")         \
  X(kA2aArrival, "all-to-all arrival")  \
  X(kDispatchCounts, "dispatch counts") \
  X(kDispatchRows, "dispatch rows")     \
  X(kLinear1Ready, "linear-1 ready")    \
  X(kLinear2Ready, "linear-2 ready")    \
  X(kCombineArrival, "combine arrival") \
  X(kGridBarrier, "grid barrier")       \
  X(kBurstBarrier, "burst barrier")

enum class Phase : uint32_t {
#define X(name, text) name,
  XS_PHASES(X)
#undef X
      kCount
};

// What a rank found out. kTimeout: the deadline passed. kPeerFailed: the peer announced that it
// takes no further part (`seen` is its Failure). kPlanDiffers: digests of plan and shapes differ.
// kBadExpert: an expert id out of range was masked.
enum class FaultKind : uint32_t {
  kNone = 0,
  kTimeout = 1,
  kPeerFailed = 2,
  kPlanDiffers = 3,
  kBadExpert = 4
};

// Written by the thread that wins Control::recorded[...]; `kind` is stored last, with release.
struct alignas(64) FaultRecord {
  uint32_t kind;     // FaultKind
  uint32_t phase;    // Phase
  uint32_t channel;  // which operator instance of the workspace
  int32_t rank;      // who waited
  int32_t src_rank;  // for whom; -1: for no single rank
  uint32_t world;
  uint64_t epoch;  // which call of that channel
  uint64_t expected;
  uint64_t seen;
  uint64_t waited_ns;
  uint64_t reserved;
};
static_assert(sizeof(FaultRecord) == 64, "the host reads this record by offset");

// Every rank has two records: what ended a call, and what was masked while the call went on.
enum RecordSlot : int { kFatalRecord = 0, kMaskedRecord = 1, kNumRecords = 2 };

// What is waited for, for the record.
struct WaitSite {
  Phase phase;
  int src_rank;       // whose word this is; -1 when several ranks or none can move it
  uint64_t epoch;     // which call
  uint64_t expected;  // what the word must reach
};

}  // namespace xstage
