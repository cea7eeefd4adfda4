// The All-to-All of Ulysses as one kernel: layout change, stores to peers, completion.
//
// Computes        out_j = for every source rank r, the block of its tensors that rank j needs
//                 (layout.h), at the place where attention or projection reads it.
// Sends           every block straight into the receiver's final tensor. Blocks of the grid walk
//                 chunks whose destinations alternate over all ranks, the own one included: the
//                 link never waits for local copies, and ranks never meet at one receiver.
// Roles           kVector: all threads load and store Vec-wide, 4 deep.
//                 kBulk:   one warp; lanes issue bulk loads into a ring of stages and bulk stores
//                          out of it, one per contiguous run.
// Shared memory   kBulk: kStages x kStageBytes, one mbarrier per stage (loads landed).
// Global protocol common/channel.cuh: slots announced by block 0 and awaited by every block;
//                 arrivals and signals at the end; the last block of a rank waits for all ranks, so
//                 that the kernel's end is the call's end. No block waits for another of its rank.
// Requires        a virtual group's ranks co-resident (cooperative launch). kBulk and 16-byte
//                 vectors: bases, strides and runs that are multiples of 16 (checked by the op).
#pragma once

#include "attention/barriers.cuh"
#include "common/channel.cuh"
#include "params.h"

namespace xstage {

constexpr int kVectorThreads = 256;
constexpr int kVectorDepth = 4;
constexpr int kWarpThreads = 32;
constexpr int kStages = 8;
constexpr int kStageBytes = 16384;
constexpr int kLoadsAhead = 4;  // the other stages are being read by stores

struct BulkStorage {
  alignas(128) char stages[kStages][kStageBytes];
  MBarrier full[kStages];
};

// Chunks of this block, one after another: chunk-major, destinations alternating from the rank
// behind the own one on.
class ChunkWalk {
 public:
  __device__ __forceinline__ ChunkWalk(A2aParams const& params, A2aRankParams const& rank)
      : params_(params), rank_(rank), index_(blockIdx.x) {}

  __device__ __forceinline__ bool next(A2aChunk& chunk) {
    int32_t const world = static_cast<int32_t>(rank_.workspace.world);
    int32_t const end = params_.chunks * world;
    while (index_ < end) {
      int32_t const turn = index_ % world;
      int32_t const number = index_ / world;
      index_ += gridDim.x;
      int const dst_rank = static_cast<int>((rank_.workspace.rank + 1 + turn) % world);
      if (find_chunk(params_, rank_, dst_rank, number, chunk)) return true;
    }
    return false;
  }

 private:
  A2aParams const& params_;
  A2aRankParams const& rank_;
  int32_t index_;
};

// One 16-byte load that leaves L1 to others: the data is read once.
__device__ __forceinline__ uint4 load_once(uint4 const* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint16_t load_once(uint16_t const* p) {
  return __ldg(p);
}

// The place of a thread in a chunk, as digits (row, run, vector), so that a step of the whole block
// needs additions only.
struct ChunkPlace {
  uint32_t row;
  uint32_t run;
  uint32_t vector;

  __device__ __forceinline__ ChunkPlace(uint32_t index, uint32_t runs, uint32_t per_run)
      : row(index / per_run / runs), run(index / per_run % runs), vector(index % per_run) {}

  __device__ __forceinline__ void step(ChunkPlace const& by, uint32_t runs, uint32_t per_run) {
    vector += by.vector;
    uint32_t const carry = vector >= per_run;
    vector -= carry * per_run;
    run += by.run + carry;
    uint32_t const carry_row = run >= runs;
    run -= carry_row * runs;
    row += by.row + carry_row;
  }
};

// Vec by Vec; kVectorDepth loads are in flight before the first store.
template <class Vec>
__device__ __forceinline__ void copy_chunk(A2aChunk const& chunk) {
  uint32_t const per_run = chunk.run_bytes / sizeof(Vec);
  uint32_t const runs = chunk.runs;
  uint32_t const rows = chunk.rows;
  ChunkPlace const block_step(kVectorThreads, runs, per_run);
  ChunkPlace place(threadIdx.x, runs, per_run);
  while (place.row < rows) {
    Vec values[kVectorDepth];
    Vec* targets[kVectorDepth];
#pragma unroll
    for (int i = 0; i < kVectorDepth; ++i) {
      targets[i] = nullptr;
      if (place.row < rows) {
        char const* const source = chunk.source + place.row * chunk.source_row_stride +
                                   place.run * chunk.source_run_stride;
        char* const target = chunk.destination + place.row * chunk.destination_row_stride +
                             static_cast<int64_t>(place.run) * chunk.run_bytes;
        values[i] = load_once(reinterpret_cast<Vec const*>(source) + place.vector);
        targets[i] = reinterpret_cast<Vec*>(target) + place.vector;
      }
      place.step(block_step, runs, per_run);
    }
#pragma unroll
    for (int i = 0; i < kVectorDepth; ++i) {
      if (targets[i] != nullptr) *targets[i] = values[i];
    }
  }
}

template <class Vec>
__device__ __forceinline__ void send_vectors(A2aParams const& params, A2aRankParams const& rank) {
  ChunkWalk walk(params, rank);
  A2aChunk chunk;
  while (walk.next(chunk)) copy_chunk<Vec>(chunk);
}

__device__ __forceinline__ void bulk_load(void* shared, void const* global, uint32_t bytes,
                                          MBarrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(shared)),
      "l"(global), "r"(bytes), "r"(smem_address(&full))
      : "memory");
}

__device__ __forceinline__ void load_chunk(A2aChunk const& chunk, char* stage, MBarrier& full) {
  uint32_t const lines = chunk.rows * chunk.runs;
  if (threadIdx.x == 0) full.arrive_and_expect_tx(lines * chunk.run_bytes);
  __syncwarp();
  for (uint32_t line = threadIdx.x; line < lines; line += kWarpThreads) {
    uint32_t const row = line / chunk.runs;
    uint32_t const run = line % chunk.runs;
    bulk_load(stage + line * chunk.run_bytes,
              chunk.source + row * chunk.source_row_stride + run * chunk.source_run_stride,
              chunk.run_bytes, full);
  }
}

__device__ __forceinline__ void store_chunk(A2aChunk const& chunk, char const* stage) {
  uint32_t const bytes = chunk.runs * chunk.run_bytes;  // runs lie side by side at the receiver
  for (uint32_t row = threadIdx.x; row < static_cast<uint32_t>(chunk.rows); row += kWarpThreads) {
    bulk_store(chunk.destination + row * chunk.destination_row_stride, stage + row * bytes, bytes);
  }
  bulk_commit();
}

// One warp. Loads run kLoadsAhead chunks ahead of stores; a stage is loaded again when the stores
// out of it have read it (every lane knows of its own stores, hence the __syncwarp).
__device__ __forceinline__ void send_bulk(A2aParams const& params, A2aRankParams const& rank,
                                          BulkStorage& storage) {
  ChunkWalk load_walk(params, rank);
  ChunkWalk store_walk(params, rank);
  RingState<kStages> load_at;
  RingState<kStages> store_at;
  A2aChunk chunk;
  int ahead = 0;
  bool more = true;
  for (;;) {
    while (more && ahead < kLoadsAhead) {
      more = load_walk.next(chunk);
      if (!more) break;
      bulk_wait_read<kStages - kLoadsAhead>();
      __syncwarp();
      load_chunk(chunk, storage.stages[load_at.stage], storage.full[load_at.stage]);
      load_at.advance();
      ++ahead;
    }
    if (ahead == 0) break;
    store_walk.next(chunk);
    storage.full[store_at.stage].wait(store_at.phase);
    store_chunk(chunk, storage.stages[store_at.stage]);
    store_at.advance();
    --ahead;
  }
  bulk_wait<0>();
}

// The last block of a rank stays until all ranks have stored to it.
__device__ __forceinline__ void finish_call(A2aParams const& params, A2aRankParams const& rank,
                                            uint64_t epoch) {
  __shared__ bool last;
  __shared__ bool arrived;
  Workspace const& workspace = rank.workspace;
  __syncthreads();
  if (threadIdx.x == 0) last = arrive_and_publish(workspace, epoch, gridDim.x);
  __syncthreads();
  if (!last) return;
  if (threadIdx.x < kWarpThreads) {
    if (threadIdx.x == 0) record_slot_use(workspace, epoch, params.slot);
    arrived = wait_for_ranks(workspace, epoch, Phase::kA2aArrival);
  }
  __syncthreads();
  if (!arrived) {
    poison(workspace.region(workspace.rank, params.slot_offset), params.slot_bytes, threadIdx.x,
           blockDim.x);
  }
}

// Announces the free slots of this rank and waits for the slot of this call.
__device__ __forceinline__ bool begin_call(A2aParams const& params, A2aRankParams const& rank,
                                           uint64_t epoch) {
  __shared__ bool granted;
  if (threadIdx.x < kWarpThreads) {
    if (blockIdx.x == 0) announce_slots(rank.workspace, epoch, params.free_slots);
    bool const ok = wait_for_slot(rank.workspace, epoch, params.slot);
    if (threadIdx.x == 0) granted = ok;
  }
  __syncthreads();
  return granted;
}

template <class Vec>
__global__ void __launch_bounds__(kVectorThreads)
    a2a_vector_kernel(__grid_constant__ A2aParams const params) {
  A2aRankParams const& rank = params.ranks[blockIdx.y];
  uint64_t const epoch = call_epoch(rank.workspace);
  if (begin_call(params, rank, epoch)) send_vectors<Vec>(params, rank);
  finish_call(params, rank, epoch);
}

__global__ void __launch_bounds__(kWarpThreads)
    a2a_bulk_kernel(__grid_constant__ A2aParams const params) {
  extern __shared__ __align__(128) char shared[];
  BulkStorage& storage = *reinterpret_cast<BulkStorage*>(shared);
  A2aRankParams const& rank = params.ranks[blockIdx.y];
  uint64_t const epoch = call_epoch(rank.workspace);
  if (threadIdx.x < kStages) storage.full[threadIdx.x].init(1);
  cutlass::arch::fence_barrier_init();
  if (begin_call(params, rank, epoch)) send_bulk(params, rank, storage);
  finish_call(params, rank, epoch);
}

}  // namespace xstage
