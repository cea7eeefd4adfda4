// The All-to-All of Ulysses as one kernel: layout change, stores to peers, completion.
//
// Computes        out_j = for every source rank r, the block of its tensors that rank j needs
//                 (layout.h), at the place where attention or projection reads it.
// Sends           every block straight into the receiver's final tensor. Blocks of the grid walk
//                 chunks whose destinations alternate over all ranks, the own one included: the
//                 link never waits for local copies, and ranks never meet at one receiver.
// Roles           vector: all threads load and store Vec-wide, 4 deep.
//                 bulk:   warp 0 loads chunks into a ring of stages, one bulk copy per contiguous
//                         run; warp 1 stores them from there. No byte passes a register.
// Shared memory   the routes (5.6 KiB); bulk: kStages x kStageBytes
// Barriers        bulk: full, empty of every stage
// Global protocol common/channel.cuh: slots announced by block 0 and awaited by every block;
//                 every block tells the peers at its end; the last block of a rank waits for all
//                 ranks, so that the kernel's end is the call's end. No block waits for another of
//                 its rank, but for block 0's announcement, so not all need to be resident at once.
// Launch          early (common/launch.h): what needs parameters only comes before the wait for the
//                 kernel before
// Requires        a virtual group's ranks co-resident (cooperative launch). Bulk and 16-byte
//                 vectors: bases, strides and runs that are multiples of 16 (checked by the op).
#pragma once

#include "attention/barriers.cuh"
#include "common/channel.cuh"
#include "params.h"

namespace xstage {

constexpr int kVectorThreads = 256;
constexpr int kVectorDepth = 4;
constexpr int kVectorBlocksPerSm = 3;
constexpr int kWarpThreads = 32;
constexpr int kBulkThreads = 2 * kWarpThreads;
constexpr int kStages = 8;
constexpr int kStageBytes = 16384;
constexpr int kStoresInFlight = 4;  // of the stages; loads have the others

// Routes from this rank to every other, [tensor][destination]. In shared memory, since parameters
// that are indexed at run time are slow to walk.
struct RouteTable {
  A2aRoute routes[kMaxA2aTensors * kMaxRanks];

  // All threads of the block.
  __device__ __forceinline__ void fill(A2aParams const& params, A2aRankParams const& rank) {
    int const world = static_cast<int>(rank.workspace.world);
    for (int i = static_cast<int>(threadIdx.x); i < params.num_tensors * world;
         i += static_cast<int>(blockDim.x)) {
      routes[i] = make_route(params, rank, i / world, i % world);
    }
  }
};

struct BulkStorage {
  alignas(128) char stages[kStages][kStageBytes];
  MBarrier full[kStages];   // 1 arrival and the bytes: the chunk has landed
  MBarrier empty[kStages];  // 32 arrivals: its stores have read it
};

// Chunks of this block, one after another: chunk-major, destinations alternating from the rank
// behind the own one on; block 0 has those of the last, never more than another block. The first one
// is found on construction.
class ChunkWalk {
 public:
  __device__ __forceinline__ ChunkWalk(A2aParams const& params, A2aRankParams const& rank,
                                       RouteTable const& table)
      : table_(table),
        num_tensors_(params.num_tensors),
        world_(static_cast<uint32_t>(rank.workspace.world)),
        first_dst_(static_cast<uint32_t>(rank.workspace.rank) + 1),
        index_(gridDim.x - 1 - blockIdx.x),
        end_(static_cast<uint32_t>(params.chunks) * world_) {
    next();
  }

  __device__ __forceinline__ bool done() const { return done_; }
  __device__ __forceinline__ A2aChunk const& chunk() const { return chunk_; }

  __device__ __forceinline__ void next() {
    for (; index_ < end_; index_ += gridDim.x) {
      int32_t number = static_cast<int32_t>(index_ / world_);
      uint32_t const dst_rank = (first_dst_ + index_ % world_) % world_;
      for (uint32_t t = 0; t < num_tensors_; ++t) {
        A2aRoute const& route = table_.routes[t * world_ + dst_rank];
        if (number < route.chunks) {
          chunk_ = chunk_of(route, number);
          index_ += gridDim.x;
          return;
        }
        number -= route.chunks;
      }
    }
    done_ = true;
  }

 private:
  RouteTable const& table_;
  uint32_t num_tensors_;
  uint32_t world_;
  uint32_t first_dst_;
  uint32_t index_;
  uint32_t end_;
  A2aChunk chunk_;
  bool done_ = false;
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
__device__ __forceinline__ void send_vectors(ChunkWalk walk) {
  for (; !walk.done(); walk.next()) copy_chunk<Vec>(walk.chunk());
}

// Where run `line` of a chunk begins, those of a row one after another.
__device__ __forceinline__ char const* source_line(A2aChunk const& chunk, uint32_t line) {
  uint32_t const row = line / chunk.runs;
  uint32_t const run = line % chunk.runs;
  return chunk.source + row * chunk.source_row_stride + run * chunk.source_run_stride;
}

__device__ __forceinline__ void load_chunk(A2aChunk const& chunk, char* stage, MBarrier& full) {
  uint32_t const lines = chunk.rows * chunk.runs;
  uint32_t const lane = threadIdx.x % kWarpThreads;
  if (lane == 0) full.arrive_and_expect_tx(lines * chunk.run_bytes);
  __syncwarp();
  for (uint32_t line = lane; line < lines; line += kWarpThreads) {
    bulk_load(stage + line * chunk.run_bytes, source_line(chunk, line), chunk.run_bytes, &full);
  }
}

// Into the L2, while the kernel before still runs: the first load finds it there. Where that kernel is
// still writing it, the L2 has what it writes.
__device__ __forceinline__ void prefetch_chunk(A2aChunk const& chunk) {
  uint32_t const lines = chunk.rows * chunk.runs;
  for (uint32_t line = threadIdx.x % kWarpThreads; line < lines; line += kWarpThreads) {
    bulk_prefetch_l2(source_line(chunk, line), chunk.run_bytes);
  }
}

__device__ __forceinline__ void store_chunk(A2aChunk const& chunk, char const* stage) {
  uint32_t const bytes = chunk.runs * chunk.run_bytes;  // runs lie side by side at the receiver
  uint32_t const lane = threadIdx.x % kWarpThreads;
  for (uint32_t row = lane; row < static_cast<uint32_t>(chunk.rows); row += kWarpThreads) {
    bulk_store(chunk.destination + row * chunk.destination_row_stride, stage + row * bytes, bytes);
  }
  bulk_commit();
}

__device__ __forceinline__ void load_role(ChunkWalk walk, BulkStorage& storage) {
  RingState<kStages> at;
  for (; !walk.done(); walk.next()) {
    storage.empty[at.stage].wait(at.phase ^ 1);
    load_chunk(walk.chunk(), storage.stages[at.stage], storage.full[at.stage]);
    at.advance();
  }
}

// A stage goes back when the stores of kStoresInFlight chunks later have been issued and its own
// have read it; every lane knows of its own stores only, so every lane gives it back. Without a
// slot chunks are taken and not stored.
__device__ __forceinline__ void store_role(ChunkWalk walk, BulkStorage& storage, bool granted) {
  RingState<kStages> at;
  RingState<kStages> returned;
  for (int issued = 0; !walk.done(); walk.next(), ++issued) {
    storage.full[at.stage].wait(at.phase);
    if (granted) store_chunk(walk.chunk(), storage.stages[at.stage]);
    at.advance();
    if (issued < kStoresInFlight) continue;
    bulk_wait_read<kStoresInFlight>();
    storage.empty[returned.stage].arrive();
    returned.advance();
  }
  bulk_wait<0>();
}

// The last block of a rank stays until all ranks have stored to it.
__device__ __forceinline__ void finish_call(A2aParams const& params, A2aRankParams const& rank,
                                            uint64_t epoch, uint64_t call) {
  __shared__ bool last;
  __shared__ bool arrived;
  Workspace const& workspace = rank.workspace;
  __syncthreads();
  if (threadIdx.x == 0) last = add_share(workspace, epoch, call, blockIdx.x, gridDim.x);
  __syncthreads();
  if (!last) return;
  if (threadIdx.x < kWarpThreads) {
    if (threadIdx.x == 0) record_slot_use(workspace, epoch, params.slot);
    arrived = wait_for_shares(workspace, epoch, call, Phase::kA2aArrival);
  }
  __syncthreads();
  if (!arrived) {
    poison(workspace.region(workspace.rank, params.slot_offset), params.slot_bytes, threadIdx.x,
           blockDim.x);
  }
}

// One warp, behind the kernel before: announces the free slots of this rank and the call, and waits
// for the slot of this call. Block 0 announces: it starts first, whatever else holds SMs, and has no
// more chunks than another, since the fence in front of the announcement holds up its first store.
__device__ __forceinline__ bool begin_call(A2aParams const& params, A2aRankParams const& rank,
                                           uint64_t epoch) {
  if (blockIdx.x == 0) {
    announce_slots(rank.workspace, epoch, params.free_slots);
    announce_call(rank.workspace, epoch);
  }
  return wait_for_slot(rank.workspace, epoch, params.slot);
}

template <class Vec>
__global__ void __launch_bounds__(kVectorThreads, kVectorBlocksPerSm)
    a2a_vector_kernel(__grid_constant__ A2aParams const params) {
  __shared__ RouteTable table;
  __shared__ bool granted;
  A2aRankParams const& rank = params.ranks[blockIdx.y];
  table.fill(params, rank);
  __syncthreads();
  ChunkWalk const walk(params, rank, table);
  wait_for_kernel_before();
  uint64_t const epoch = call_epoch(rank.workspace);
  uint64_t const call = shared_call(rank.workspace);
  if (threadIdx.x < kWarpThreads) {
    bool const ok = begin_call(params, rank, epoch);
    if (threadIdx.x == 0) granted = ok;
  }
  __syncthreads();
  if (granted) send_vectors<Vec>(walk);
  launch_dependent_kernel();
  finish_call(params, rank, epoch, call);
}

__global__ void __launch_bounds__(kBulkThreads)
    a2a_bulk_kernel(__grid_constant__ A2aParams const params) {
  extern __shared__ __align__(128) char shared[];
  __shared__ RouteTable table;
  BulkStorage& storage = *reinterpret_cast<BulkStorage*>(shared);
  A2aRankParams const& rank = params.ranks[blockIdx.y];
  if (threadIdx.x < kStages) {
    storage.full[threadIdx.x].init(1);
    storage.empty[threadIdx.x].init(kWarpThreads);
  }
  cutlass::arch::fence_barrier_init();
  table.fill(params, rank);
  __syncthreads();
  ChunkWalk const walk(params, rank, table);
  if (threadIdx.x < kWarpThreads && !walk.done()) prefetch_chunk(walk.chunk());
  wait_for_kernel_before();
  uint64_t const epoch = call_epoch(rank.workspace);
  uint64_t const call = shared_call(rank.workspace);
  if (threadIdx.x < kWarpThreads) {
    load_role(walk, storage);
  } else {
    store_role(walk, storage, begin_call(params, rank, epoch));
  }
  launch_dependent_kernel();
  finish_call(params, rank, epoch, call);
}

}  // namespace xstage
