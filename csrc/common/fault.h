// What a wait leaves behind when it gives up: one record per rank, in memory that the host can read
// while kernels run (mapped host memory on CUDA, ordinary memory on the CPU).
#pragma once

#include <cstdint>

namespace xstage {

// Where a rank can wait. Python reads the names through `xstage::phase_names`.
#define XS_PHASES(X)                                                            \
  X(kNone, "none")                                                              \
  X(kHandshake, "handshake")                                                    \
  X(kSlotCredit, "slot credit")                                                 \
  X(kA2aArrival, "all-to-all arrival")                                          \
  X(kDispatchCounts, "dispatch counts")                                         \
  X(kDispatchRows, "dispatch rows")                                             \
  X(kLinear1Ready, "linear-1 ready")                                            \
  X(kLinear2Ready, "linear-2 ready")                                            \
  X(kCombineArrival, "combine arrival")                                         \
  X(kGridBarrier, "grid barrier")                                               \
  X(kBurstBarrier, "burst barrier")

enum class Phase : uint32_t {
#define X(name, text) name,
  XS_PHASES(X)
#undef X
      kCount
};

// What a rank found out. kTimeout: the deadline passed. kPeerRefused: the peer announced that it
// refused this call. kBadExpert: an expert id out of range was masked.
enum class FaultKind : uint32_t { kNone = 0, kTimeout = 1, kPeerRefused = 2, kPlanDiffers = 3, kBadExpert = 4 };

// Written once by the first thread that gives up (it wins `claimed`); `kind` is stored last.
struct alignas(64) FaultRecord {
  uint32_t claimed;
  uint32_t kind;     // FaultKind
  uint32_t phase;    // Phase
  uint32_t channel;  // which operator instance of the workspace
  int32_t rank;      // who waited
  int32_t src_rank;  // for whom
  uint64_t epoch;    // which call of that channel
  uint64_t expected;
  uint64_t seen;
  uint64_t waited_ns;
};
static_assert(sizeof(FaultRecord) == 64, "the host reads this record by offset");

}  // namespace xstage
