// The symmetric workspace as kernels see it: one block of memory per rank, mapped by every rank.
//
//   [ Control | regions of the operator instances ]
//
// Python allocates the blocks, exchanges addresses, and hands each operator call a descriptor of
// integers (a wire message of kind kWorkspace). Nothing here owns memory. All memory is zero when a
// workspace is made, and again after a collective reset.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fault.h"
#include "host_device.h"
#include "wire.h"

namespace xstage {

constexpr int kMaxRanks = 8;
constexpr int kMaxChannels = 32;
constexpr int kMaxSlots = 16;

// A signal is one word: the epoch, and below it a short digest of plan and shapes. One word,
// because a digest that travels in a word of its own may already belong to the next call when it is
// read.
constexpr int kDigestBits = 24;

XS_HD constexpr uint64_t signal_word(uint64_t epoch, uint64_t digest) {
  uint64_t const folded = digest ^ (digest >> kDigestBits) ^ (digest >> (2 * kDigestBits));
  return (epoch << kDigestBits) | (folded & ((uint64_t{1} << kDigestBits) - 1));
}
XS_HD constexpr uint64_t signal_epoch(uint64_t word) {
  return word >> kDigestBits;
}
XS_HD constexpr uint64_t signal_digest(uint64_t word) {
  return word & ((uint64_t{1} << kDigestBits) - 1);
}

// What the blocks of one call add to a peer's counter together (2^kWholeCallBits), each its share.
constexpr int kWholeCallBits = 20;

XS_HD constexpr uint64_t share_of_call(uint32_t block, uint32_t num_blocks) {
  uint64_t const whole = uint64_t{1} << kWholeCallBits;
  return (block + 1) * whole / num_blocks - block * whole / num_blocks;
}

// The counters of one operator instance. Its calls follow each other on one stream. Epochs only
// grow, so CUDA graphs replay them and no call has to reset anything.
struct alignas(128) Channel {
  // Written by this rank.
  uint64_t calls;     // epoch of the last finished call; the next call is calls + 1
  uint32_t arrivals;  // blocks of the running call that have finished; the last one wraps it to 0
  uint32_t pad_arrivals;
  uint64_t parts[kMaxRanks];  // parts[r]: shares of rank r's calls; also written by peers
  uint64_t pad_parts[6];
  uint64_t last_use[kMaxSlots];  // last_use[s]: last call that was granted output slot s
  // Written by peers.
  uint64_t from[kMaxRanks];  // from[r]: signal of rank r's last call; its stores to us are done
  uint64_t failed_at[kMaxRanks];  // failed_at[r]: first call in which rank r took no part; 0: none
  uint64_t released[kMaxSlots][kMaxRanks];  // [s][r]: last call in which rank r had slot s free
};
static_assert(sizeof(Channel) == 1408, "peers address this structure by offset");

// Why a rank takes no further part, until every rank resets the workspace.
enum class Failure : uint64_t { kNone = 0, kRefused = 1, kGaveUp = 2, kClosed = 3 };

struct alignas(128) Control {
  // Byte r: Failure of rank r. A rank ORs its byte into every block; its own byte tells every role
  // of its kernels to leave. One word, so that a waiting thread sees all ranks in one load.
  uint64_t failed;
  uint32_t recorded[kNumRecords];  // non-zero: that fault record is taken
  uint64_t pad[14];
  Channel channels[kMaxChannels];
};

constexpr int64_t kControlBytes = round_up<int64_t>(sizeof(Control), 1024);

XS_HD constexpr uint64_t failure_bits(int64_t rank, Failure failure) {
  return static_cast<uint64_t>(failure) << (8 * rank);
}
XS_HD constexpr Failure failure_of(uint64_t failed, int64_t rank) {
  return static_cast<Failure>((failed >> (8 * rank)) & 0xff);
}

// The rank whose failure ends a wait for src_rank, or -1. A wait for several ranks (src_rank < 0)
// ends when any has failed, but not when one has closed: it finished its calls before it closed.
XS_HD int failed_rank(uint64_t failed, int src_rank) {
  if (src_rank >= 0) return failure_of(failed, src_rank) == Failure::kNone ? -1 : src_rank;
  for (int r = 0; r < kMaxRanks; ++r) {
    Failure const failure = failure_of(failed, r);
    if (failure != Failure::kNone && failure != Failure::kClosed) return r;
  }
  return -1;
}

// Host memory beside a block, one page per rank (mapped into the device on CUDA): what kernels tell
// the host, and what the host remembers of each instance's output slots (slots.h).
struct HostChannel {
  uint64_t eager_calls;     // slots taken by eager calls
  uint64_t captured_calls;  // slots taken by calls in a CUDA graph capture
  uint32_t held;            // bit s: a live result lies in slot s
  uint32_t captured;        // non-zero: a call of this instance was captured
  uint64_t pad;
};

struct alignas(64) HostPage {
  FaultRecord records[kNumRecords];
  HostChannel channels[kMaxChannels];
};
static_assert(sizeof(HostPage) == 1152, "Python allocates and reads this page by offset");

enum class MemoryKind : int64_t { kCpu = 0, kCuda = 1 };

// Fields of the descriptor, in order. `bases` follows: kMaxRanks addresses, zero beyond world.
#define XS_WORKSPACE_FIELDS(X)                                                               \
  X(rank, 0, kMaxRanks - 1, "this rank in the group")                                        \
  X(world, 1, kMaxRanks, "ranks in the group")                                               \
  X(memory, 0, 1, "0 CPU memory, 1 CUDA memory")                                             \
  X(timeout_ms, 0, int64_t{1} << 40, "deadline of waits for peers; 0 waits for ever")        \
  X(channel, 0, kMaxChannels - 1, "operator instance")                                       \
  X(region_offset, 0, int64_t{1} << 46, "where the instance's region starts in every block") \
  X(region_bytes, 0, int64_t{1} << 46, "size of that region")                                \
  X(host_page, 0, INT64_MAX, "address of this rank's HostPage")                              \
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
  XS_HD Channel* channel_of(int64_t of_rank) const { return &control(of_rank)->channels[channel]; }
  // Address of byte `offset` of the instance's region on a rank.
  template <class T = char>
  XS_HD T* region(int64_t of_rank, int64_t offset = 0) const {
    return reinterpret_cast<T*>(bases[of_rank] + region_offset + offset);
  }
  XS_HD FaultRecord* fault_record(RecordSlot slot) const {
    return &reinterpret_cast<HostPage*>(host_page)->records[slot];
  }
  HostChannel* host_channel() const {
    return &reinterpret_cast<HostPage*>(host_page)->channels[channel];
  }
  XS_HD uint64_t signal(uint64_t epoch) const {
    return signal_word(epoch, static_cast<uint64_t>(digest));
  }
};

// A rank's byte of its own Control::failed, as an address (little-endian).
inline uint8_t const* failure_byte(Workspace const& workspace) {
  return reinterpret_cast<uint8_t const*>(&workspace.control(workspace.rank)->failed) +
         workspace.rank;
}

constexpr int64_t num_workspace_fields() {
  int64_t count = 0;
#define X(name, min, max, meaning) ++count;
  XS_WORKSPACE_FIELDS(X)
#undef X
  return count + kMaxRanks;
}

// Reads a descriptor. Refuses a workspace whose fault record is taken, so that a call after a fault
// fails on the host; an announcement passes allow_failed.
inline Workspace read_workspace(std::vector<int64_t> const& words, bool allow_failed = false) {
  WireReader reader(words, WireKind::kWorkspace, "workspace", num_workspace_fields());
  Workspace workspace{};
#define X(name, min, max, meaning) workspace.name = reader.next(#name, min, max);
  XS_WORKSPACE_FIELDS(X)
#undef X
  for (int64_t r = 0; r < kMaxRanks; ++r) {
    int64_t const base = reader.next("base", 0, INT64_MAX);
    XS_CHECK((base != 0) == (r < workspace.world), "xstage: workspace: base of rank ", r, " is ",
             base, " in a group of ", workspace.world, "; is the workspace closed?");
    workspace.bases[r] = reinterpret_cast<char*>(base);
  }
  XS_CHECK(workspace.rank < workspace.world, "xstage: workspace: rank ", workspace.rank,
           " in a group of ", workspace.world);
  if (workspace.host_page != 0 && !allow_failed) {
    FaultRecord const* const record = workspace.fault_record(kFatalRecord);
    XS_CHECK(__atomic_load_n(&record->kind, __ATOMIC_ACQUIRE) == 0, "xstage: workspace: call ",
             record->epoch, " of channel ", record->channel, " failed on rank ", record->rank,
             " waiting for rank ", record->src_rank,
             "; SymmetricWorkspace.check() says why, reset() on every rank recovers");
  }
  return workspace;
}

inline Failure read_failure(int64_t value) {
  XS_CHECK(value >= static_cast<int64_t>(Failure::kRefused) &&
               value <= static_cast<int64_t>(Failure::kClosed),
           "xstage: failure: expected 1 to 3, got ", value);
  return static_cast<Failure>(value);
}

inline void check_memory(char const* op, Workspace const& workspace, MemoryKind expected) {
  XS_CHECK(workspace.memory == static_cast<int64_t>(expected), "xstage.", op,
           ": workspace: expected ", expected == MemoryKind::kCuda ? "CUDA" : "CPU",
           " memory like the tensors, got ", workspace.memory != 0 ? "CUDA" : "CPU", " memory");
}

inline void check_region(char const* op, Workspace const& workspace, int64_t needed_bytes) {
  XS_CHECK(workspace.region_bytes >= needed_bytes, "xstage.", op, ": workspace: this call needs ",
           needed_bytes, " bytes of its channel's region, which has ", workspace.region_bytes,
           "; reserve a larger channel");
}

// Mixes a fact of the call (a shape, a dtype) into the digest that rides in its signal, so that
// ranks that differ in it find out.
inline void mix_digest(Workspace& workspace, int64_t fact) {
  uint64_t x =
      static_cast<uint64_t>(workspace.digest) * 0x9e3779b97f4a7c15u ^ static_cast<uint64_t>(fact);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  workspace.digest = static_cast<int64_t>(x ^ (x >> 31));
}

// Reads the descriptors of all virtual ranks, one message after another, in rank order.
inline std::vector<Workspace> read_virtual_workspaces(std::vector<int64_t> const& words) {
  int64_t const stride = kWireHeader + num_workspace_fields();
  int64_t const total = static_cast<int64_t>(words.size());
  XS_CHECK(total > 0 && total % stride == 0, "xstage: workspaces: expected a multiple of ", stride,
           " integers, got ", total);
  std::vector<Workspace> workspaces;
  for (int64_t start = 0; start < total; start += stride) {
    workspaces.push_back(read_workspace({words.begin() + start, words.begin() + start + stride}));
    XS_CHECK(workspaces.back().rank == start / stride && workspaces.back().world == total / stride,
             "xstage: workspaces: message ", start / stride, " is of rank ", workspaces.back().rank,
             " in a group of ", workspaces.back().world, "; expected all ", total / stride,
             " ranks in order");
  }
  return workspaces;
}

}  // namespace xstage
