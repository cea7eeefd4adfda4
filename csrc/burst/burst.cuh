// The burst microbenchmark: K blocks send B bytes each, pause G, and send again.
//
// Computes   nothing; bytes are a pattern of (seed, producer, position), so that tests can check
//            that what was timed really arrived.
// Sends      per burst `bytes` of every producer, as rows of `chunk_bytes`, to one destination per
//            producer, by 16-byte stores, bulk copies, tensor stores, or as reads of the peer.
// Roles      8 warps of one block per SM. kSt and kPull use all threads, the others one thread.
// Stamps     int32 clock cycles since the block's origin, four per burst:
//              begin   before the first store
//              issued  all stores handed over: the last STG issued, or the last copy committed
//              free    the SM may go on: the load-store unit is free again (kSt), or the source
//                      may be reused (wait_group.read)
//              done    fence only: everything visible (copies: wait_group, then a fence); else =
//              free
//            Earliest begin and latest end over the warps. The clock is read by volatile asm, and
//            tests check in SASS that the reads stand around the stores.
// Global     see start.cuh
// Requires   all blocks resident: a cooperative launch of at most one block per SM.
// Cost       0.35 us (copies) to 0.5 us (stores) between bursts for stamps and barriers; it is part
//            of the recorded gap. Measured on 2 x H200; worlds beyond 2 have not run.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "burst/plan.h"
#include "burst/start.cuh"
#include "common/ptx.cuh"
#include "common/wait.cuh"

namespace xstage {

constexpr int kBurstWarps = 8;
constexpr int kBurstThreads = kBurstWarps * 32;
constexpr int kPassBytes = kBurstThreads * 16;  // all threads once
constexpr int kSlabBytes = 64 * 1024;           // source of copies; longer bursts read it again
constexpr int kSlabWords = kSlabBytes / 16;     // the pattern repeats after so many 16-byte words
constexpr int kMaxGaps = 1024;
constexpr int kHeadWords = 8;  // int64 facts per block: see BurstHead

// Facts of one block, in this order in the operator's first result.
struct BurstHead {
  int64_t sm;
  int64_t origin_ns;     // globaltimer at the block's clock origin
  int64_t end_ns;        // globaltimer when everything was visible
  int64_t origin_clock;  // SM clock at the origin
  int64_t end_clock;
  int64_t bursts;        // issued, also those beyond max_bursts
  int64_t drain_cycles;  // from the end of the last burst until everything was visible
  int64_t completed;     // 1: ran to its end; 0: a wait gave up
};
static_assert(sizeof(BurstHead) == kHeadWords * 8, "Python reads the words by position");

// By value: the kernels read it from constant memory, tensor maps included.
struct BurstParams {
  Workspace workspace;
  BurstPlan plan;
  int32_t const* gap_cycles;  // [gap_rows, num_gaps]
  int32_t const* delays;      // shadow only: [num_delays]
  BurstHead* heads;           // [blocks]
  int4* stamps;               // [blocks, max_bursts]
  char* scratch;              // shadow only: local memory that the probe reads
  int gap_rows;
  int num_gaps;
  int num_delays;
  CUtensorMap probe_map;        // shadow only: the scratch as a tensor
  CUtensorMap maps[kMaxRanks];  // tensor stores: the landing area on each rank
};

// Volatile and clobbering memory, so that the compiler keeps every store between the clocks.
__device__ __forceinline__ void store_16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
// System scope: a load that may be served from L1 would not cross the link.
__device__ __forceinline__ uint4 load_16(void const* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void tensor_store_2d(CUtensorMap const* map, void const* shared, int x,
                                                int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem_address(shared)), "r"(x), "r"(y)
      : "memory");
}

// What 16 bytes at `position` of a producer's burst hold.
__device__ __forceinline__ uint4 pattern_16(BurstPlan const& plan, int producer,
                                            uint32_t position) {
  return {static_cast<uint32_t>(plan.seed), static_cast<uint32_t>(producer), position,
          position ^ 0x5bd1e995u};
}

// Shared memory of burst_kernel and shadow_kernel; stamps and gaps follow it.
struct BurstShared {
  alignas(1024) char slab[kSlabBytes];
  Origin origin;
  int begun;  // all ranks and blocks met
  int go_on;
  // Raw clocks by parity of the burst. All 64 bits are stored on purpose: of a clock whose upper
  // half is dead the compiler makes an S2UR, which waits in the queue of the stores; the CS2R of a
  // full clock is read when it is issued.
  int64_t warp_begin[2][kBurstWarps];
  int64_t warp_issued[2][kBurstWarps];
  int64_t warp_done[2][kBurstWarps];
  int64_t warp_free[2][kBurstWarps];
};

// Fills the slab with the pattern that copies send.
__device__ __forceinline__ void fill_slab(BurstPlan const& plan, BurstShared& shared,
                                          int producer) {
  for (uint32_t i = threadIdx.x; i < kSlabWords; i += blockDim.x) {
    reinterpret_cast<uint4*>(shared.slab)[i] = pattern_16(plan, producer, i);
  }
  fence_proxy_async_shared();
}

// Where the threads of a block store: every pass covers kPassBytes of whole or partial rows.
struct StorePath {
  char* first;  // this thread's address in pass 0 of slot 0
  int64_t pass_stride;
  int passes;  // of this thread
};

__device__ __forceinline__ StorePath store_path(BurstParams const& params, int producer) {
  BurstPlan const& plan = params.plan;
  int const dst_rank = destination_of(static_cast<uint32_t>(plan.destinations), producer);
  int64_t const at = int64_t{threadIdx.x} * 16;
  StorePath path;
  path.first = landing_area(params.workspace, dst_rank) + producer * plan.producer_stride +
               at / plan.chunk_bytes * plan.row_stride + at % plan.chunk_bytes;
  path.pass_stride =
      plan.chunk_bytes >= kPassBytes ? kPassBytes : kPassBytes / plan.chunk_bytes * plan.row_stride;
  path.passes = static_cast<int>((plan.bytes - at + kPassBytes - 1) / kPassBytes);
  return path;
}

// Issue functions. Every one returns when the last store has been handed over.

__device__ __forceinline__ void issue_stores(BurstPlan const& plan, StorePath const& path, int slot,
                                             int producer) {
  char* p = path.first + slot * plan.slot_stride;
#pragma unroll 4
  for (int pass = 0; pass < path.passes; ++pass, p += path.pass_stride) {
    store_16(p, pattern_16(plan, producer, (pass * kBurstThreads + threadIdx.x) % kSlabWords));
  }
}

__device__ __forceinline__ uint32_t issue_reads(BurstPlan const& plan, StorePath const& path,
                                                int slot) {
  char const* p = path.first + slot * plan.slot_stride;
  uint32_t sum = 0;
#pragma unroll 8
  for (int pass = 0; pass < path.passes; ++pass, p += path.pass_stride) {
    uint4 const v = load_16(p);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  return sum;
}

__device__ __forceinline__ void issue_bulk(BurstParams const& params, BurstShared const& shared,
                                           char* base, int slot) {
  BurstPlan const& plan = params.plan;
  // In registers: the copies clobber memory, so the plan would be read (and divided) for each.
  char* p = base + slot * plan.slot_stride;
  uint32_t const chunk = static_cast<uint32_t>(plan.chunk_bytes);
  int64_t const row_stride = plan.row_stride;
  int const rows = static_cast<int>(plan.bytes) / static_cast<int>(chunk);
  uint32_t source = 0;
#pragma unroll 2
  for (int row = 0; row < rows; ++row, p += row_stride) {
    bulk_store(p, shared.slab + source, chunk);
    source += chunk;
    if (source >= kSlabBytes) source = 0;
  }
  bulk_commit();
}

__device__ __forceinline__ void issue_tensor(BurstParams const& params, BurstShared const& shared,
                                             int dst_rank, int slot, int producer) {
  BurstPlan const& plan = params.plan;
  int const box_rows = static_cast<int>(plan.box_rows());
  uint32_t const box_bytes = static_cast<uint32_t>(box_rows * plan.chunk_bytes);
  int y = static_cast<int>((producer * plan.producer_stride + slot * plan.slot_stride) /
                           plan.row_stride);
  int const boxes = static_cast<int>(plan.bytes) / static_cast<int>(box_bytes);
  uint32_t source = 0;
#pragma unroll 2
  for (int box = 0; box < boxes; ++box, y += box_rows) {
    tensor_store_2d(&params.maps[dst_rank], shared.slab + source, 0, y);
    source += box_bytes;
    if (source >= kSlabBytes) source = 0;
  }
  bulk_commit();
}

// Shared memory and back, behind the stores in the queue of the load-store unit. The last STG
// counts as issued while it still waits there; only what comes behind it feels the queue.
__device__ __forceinline__ void load_store_round_trip(BurstShared& shared) {
  uint32_t volatile* const word = reinterpret_cast<uint32_t volatile*>(shared.slab) + threadIdx.x;
  *word = threadIdx.x;
  uint32_t const back = *word;
  *word = back + 1;  // needs `back`, so the clock behind it is read after the round trip
}

// One burst of this block, with each warp's stamps in `shared`. All kBurstThreads call it.
template <Mechanism kMechanism>
__device__ __forceinline__ void burst_once(BurstParams const& params, BurstShared& shared,
                                           StorePath const& path, int dst_rank, int slot,
                                           int parity) {
  BurstPlan const& plan = params.plan;
  int const producer = blockIdx.x;
  int64_t begin, issued, done;
  if constexpr (kMechanism == Mechanism::kSt || kMechanism == Mechanism::kPull) {
    begin = clock_now();
    if constexpr (kMechanism == Mechanism::kSt) {
      issue_stores(plan, path, slot, producer);
    } else {
      // Storing the sum to shared memory makes the clock below wait for every load.
      uint32_t const sum = issue_reads(plan, path, slot);
      *reinterpret_cast<uint32_t volatile*>(shared.slab + threadIdx.x * 4) = sum;
    }
    issued = clock_now();
    load_store_round_trip(shared);
    int64_t const free = clock_now();
    if (plan.fence) fence_acq_rel_sys();
    done = clock_now();
    if (threadIdx.x % 32 == 0) {
      int const warp = threadIdx.x / 32;
      shared.warp_begin[parity][warp] = begin;
      shared.warp_issued[parity][warp] = issued;
      shared.warp_free[parity][warp] = free;
      shared.warp_done[parity][warp] = done;
    }
  } else if (threadIdx.x == 0) {
    begin = clock_now();
    if (plan.late_wait) bulk_wait_read<0>();
    if constexpr (kMechanism == Mechanism::kBulk) {
      issue_bulk(params, shared, path.first, slot);
    } else {
      issue_tensor(params, shared, dst_rank, slot, producer);
    }
    issued = clock_now();
    if (!plan.late_wait) bulk_wait_read<0>();
    int64_t const free = clock_now();
    if (plan.fence) {
      // wait_group 0 returns as early as wait_group.read when the destination is a peer: only the
      // fence behind it waits for the bytes.
      bulk_wait<0>();
      fence_acq_rel_sys();
    }
    done = clock_now();
    shared.warp_begin[parity][0] = begin;
    shared.warp_free[parity][0] = free;
    shared.warp_issued[parity][0] = issued;
    shared.warp_done[parity][0] = done;
  }
}

// Reduces the stamps of the block, behind a block barrier. Thread 0; returns the end of the burst.
template <Mechanism kMechanism>
__device__ __forceinline__ int4 collect_stamps(BurstShared const& shared, int parity) {
  int64_t begin = shared.warp_begin[parity][0];
  int64_t issued = shared.warp_issued[parity][0];
  int64_t done = shared.warp_done[parity][0];
  int64_t free = shared.warp_free[parity][0];
  if constexpr (kMechanism == Mechanism::kSt || kMechanism == Mechanism::kPull) {
#pragma unroll
    for (int w = 1; w < kBurstWarps; ++w) {
      begin = min_of(begin, shared.warp_begin[parity][w]);
      issued = max_of(issued, shared.warp_issued[parity][w]);
      free = max_of(free, shared.warp_free[parity][w]);
      done = max_of(done, shared.warp_done[parity][w]);
    }
  }
  int64_t const origin = shared.origin.clock;
  return {static_cast<int>(begin - origin), static_cast<int>(issued - origin),
          static_cast<int>(free - origin), static_cast<int>(done - origin)};
}

// Everything visible before the block ends; the time it takes is the backlog.
template <Mechanism kMechanism>
__device__ __forceinline__ void finish_block(BurstParams const& params, BurstShared const& shared,
                                             int4 const* stamps, int bursts, int64_t end,
                                             bool ran) {
  BurstPlan const& plan = params.plan;
  if constexpr (kMechanism == Mechanism::kBulk || kMechanism == Mechanism::kTma) {
    if (threadIdx.x == 0) bulk_wait<0>();
  }
  fence_acq_rel_sys();
  __syncthreads();
  int64_t const drained = clock_now();
  int const recorded = min_of(bursts, static_cast<int>(plan.max_bursts));
  for (int i = threadIdx.x; i < recorded; i += kBurstThreads) {
    params.stamps[blockIdx.x * plan.max_bursts + i] = stamps[i];
  }
  if (threadIdx.x == 0) {
    params.heads[blockIdx.x] = {sm_index(),
                                shared.origin.clock_ns,
                                static_cast<int64_t>(global_timer_ns()),
                                shared.origin.clock,
                                clock_now(),
                                bursts,
                                drained - end,
                                ran && !aborted(params.workspace)};
  }
}

template <Mechanism kMechanism>
__global__ void __launch_bounds__(kBurstThreads)
    burst_kernel(const __grid_constant__ BurstParams params) {
  extern __shared__ __align__(1024) char memory[];
  BurstShared& shared = *reinterpret_cast<BurstShared*>(memory);
  BurstPlan const& plan = params.plan;
  int4* const stamps = reinterpret_cast<int4*>(memory + sizeof(BurstShared));  // (max_bursts)
  int32_t* const gaps = reinterpret_cast<int32_t*>(stamps + plan.max_bursts);  // (num_gaps)
  int const producer = blockIdx.x;
  int const dst_rank = destination_of(static_cast<uint32_t>(plan.destinations), producer);

  StorePath path = store_path(params, producer);
  if constexpr (kMechanism == Mechanism::kBulk || kMechanism == Mechanism::kTma) {
    path.first = landing_area(params.workspace, dst_rank) + producer * plan.producer_stride;
    fill_slab(plan, shared, producer);
  }
  for (int i = threadIdx.x; i < params.num_gaps; i += kBurstThreads) {
    gaps[i] = params.gap_cycles[producer % params.gap_rows * params.num_gaps + i];
  }
  if (threadIdx.x == 0) {
    shared.begun = begin_together(params.workspace, plan.join, gridDim.x, shared.origin);
    shared.go_on = shared.begun && plan.producers != 0;
  }
  __syncthreads();

  Sync const sync = static_cast<Sync>(plan.sync);
  int64_t const origin = shared.origin.clock;
  int64_t const go = shared.origin.go_clock;
  // A window ends every producer at the same time; without one they all issue the same number.
  int64_t const stop = plan.window_cycles != 0 ? go + plan.window_cycles : INT64_MAX;
  int const most = plan.window_cycles != 0 ? INT32_MAX : static_cast<int>(plan.max_bursts);
  int const recordable = static_cast<int>(plan.max_bursts);
  int const slots = static_cast<int>(plan.slots);
  int64_t turn = go;  // thread 0: when the next burst begins
  int64_t end = go;
  int n = 0, slot = 0, gap = 0;
  bool const ran = shared.begun;
  while (shared.go_on) {
    if (threadIdx.x == 0) {
      // The gap is spent on the clock alone: nothing that could queue behind the last burst.
      spin_until(sync == Sync::kTimetable ? turn_clock(shared.origin, turn - go, plan.clock_khz)
                                          : turn);
      // Meeting 0 was the common start. After one that gave up all others give up at once, and the
      // rest of the bursts is over soon.
      if (sync == Sync::kBarrier) {
        meet_relaxed(params.workspace, static_cast<uint64_t>(n + 2) * gridDim.x);
      }
    }
    __syncthreads();
    burst_once<kMechanism>(params, shared, path, dst_rank, slot, n & 1);
    __syncthreads();
    if (threadIdx.x == 0) {
      // Stamps stay in shared memory until the end: a global store here would join the queue that
      // is being measured.
      int4 const stamp = collect_stamps<kMechanism>(shared, n & 1);
      if (n < recordable) stamps[n] = stamp;
      end = origin + stamp.w;
      turn = (sync == Sync::kTimetable ? turn : end) + gaps[gap];
      if (++gap == params.num_gaps) gap = 0;
      if (n + 1 >= most || turn >= stop) shared.go_on = 0;
    }
    ++n;
    if (++slot == slots) slot = 0;
    __syncthreads();
  }

  finish_block<kMechanism>(params, shared, stamps, n, end, ran);
}

}  // namespace xstage
