// The symmetric workspace as kernels see it: one block of memory per rank, mapped by every rank.
//
//   [ Control | regions of the operator instances ]
//
// Python allocates the blocks, exchanges addresses, and hands each operator call a descriptor of
// integers (a wire message of kind kWorkspace). Nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fault.h"
#include "host_device.h"

namespace xstage {

constexpr int kMaxRanks = 8;
constexpr int kMaxChannels = 32;

// One word pair that one peer writes: the digest of its plan first, then the epoch with release.
struct alignas(16) Signal {
  uint64_t epoch;
  uint64_t digest;
};

// The counters of one operator instance (one layer, one stream). Only `from` and `refused` are
// written by peers. Epochs only grow, so CUDA graphs replay them and nothing is ever reset.
struct alignas(128) Channel {
  uint64_t calls;     // calls begun by this rank; the kernel that begins one increments it
  uint64_t arrivals;  // blocks that finished, over all calls: the last block of call n sees n * grid
  uint64_t credits;   // slots taken, over all calls
  uint64_t pad[13];
  Signal from[kMaxRanks];       // from[r]: rank r finished storing to this rank in this epoch
  uint64_t refused[kMaxRanks];  // refused[r]: rank r refused this epoch on its host
  uint64_t consumed[kMaxRanks]; // consumed[r]: rank r is done reading its slot of this epoch
};
static_assert(sizeof(Channel) == 384, "peers address this structure by offset");

struct alignas(128) Control {
  uint32_t abort;  // non-zero: every wait on this rank leaves at once
  uint32_t pad[31];
  Channel channels[kMaxChannels];
};

constexpr int64_t kControlBytes = round_up<int64_t>(sizeof(Control), 1024);

enum class MemoryKind : int64_t { kCpu = 0, kCuda = 1 };

// Fields of the descriptor, in order. `bases` follows: kMaxRanks addresses, zero beyond world.
#define XS_WORKSPACE_FIELDS(X)                                                                 \
  X(rank, 0, kMaxRanks - 1, "this rank in the group")                                          \
  X(world, 1, kMaxRanks, "ranks in the group")                                                 \
  X(memory, 0, 1, "0 CPU memory, 1 CUDA memory")                                               \
  X(timeout_ms, 0, int64_t{1} << 40, "deadline of every wait; 0 waits for ever")               \
  X(channel, 0, kMaxChannels - 1, "operator instance")                                         \
  X(region_offset, 0, int64_t{1} << 46, "where the instance's region starts in every block")   \
  X(region_bytes, 0, int64_t{1} << 46, "size of that region")                                  \
  X(fault, 0, INT64_MAX, "address of this rank's FaultRecord")                                 \
  X(digest, INT64_MIN, INT64_MAX, "digest of plan and shapes, equal on every rank")

// The descriptor after reading; travels to kernels by value.
struct Workspace {
#define X(name, min, max, meaning) int64_t name;
  XS_WORKSPACE_FIELDS(X)
#undef X
  char* bases[kMaxRanks];

  XS_HD Control* control(int64_t of_rank) const {
    return reinterpret_cast<Control*>(bases[of_rank]);
  }
  XS_HD Channel* channel_of(int64_t of_rank) const {
    return &control(of_rank)->channels[channel];
  }
  // Address of byte `offset` of the instance's region on a rank.
  template <class T = char>
  XS_HD T* region(int64_t of_rank, int64_t offset = 0) const {
    return reinterpret_cast<T*>(bases[of_rank] + region_offset + offset);
  }
  XS_HD FaultRecord* fault_record() const { return reinterpret_cast<FaultRecord*>(fault); }
};

#if !defined(__CUDA_ARCH__)
}  // namespace xstage

#include "wire.h"

namespace xstage {

inline int64_t num_workspace_fields() {
  int64_t count = 0;
#define X(name, min, max, meaning) ++count;
  XS_WORKSPACE_FIELDS(X)
#undef X
  return count + kMaxRanks;
}

inline Workspace read_workspace(std::vector<int64_t> const& words) {
  WireReader reader(words, WireKind::kWorkspace, "workspace", num_workspace_fields());
  Workspace workspace{};
#define X(name, min, max, meaning) workspace.name = reader.next(#name, min, max);
  XS_WORKSPACE_FIELDS(X)
#undef X
  for (int64_t r = 0; r < kMaxRanks; ++r) {
    int64_t const base = reader.next("base", 0, INT64_MAX);
    XS_CHECK((base != 0) == (r < workspace.world), "xstage: workspace: base of rank ", r,
             " is ", base, " in a group of ", workspace.world, "; is the workspace closed?");
    workspace.bases[r] = reinterpret_cast<char*>(base);
  }
  XS_CHECK(workspace.rank < workspace.world, "xstage: workspace: rank ", workspace.rank,
           " in a group of ", workspace.world);
  return workspace;
}
#endif

}  // namespace xstage
