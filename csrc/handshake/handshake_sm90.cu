// Handshake: every rank pushes its payload into every rank's region; the smallest operator that
// uses the whole protocol of a call.
//
// Computes        out[r] = payload of rank r
// Sends           each rank its n bytes to every rank, 16 bytes per store where alignment allows
// Launches        [grant of an output slot], push, wait (one warp), [copy out of the bank]
// Global protocol common/channel.cuh; the copy leaves all-ones bytes when the call was given up
// Requires        a contiguous payload, a region of handshake_region_bytes (op.h checks)
#include "common/channel.cuh"
#include "common/channel_kernels.h"
#include "handshake/op.h"

namespace xstage::handshake {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBytesPerBlock = 64 * 1024;
constexpr int64_t kMaxBlocks = 32;  // fills a link without taking the whole device

// Ranks of one launch, by value; blockIdx.y plays rank y of them.
struct Params {
  struct Rank {
    Workspace workspace;
    char const* payload;
    char* out;
    int64_t slot;  // -1: no slot
  } ranks[kMaxRanks];
  Layout layout;
};

// Copies with all threads of the grid's x dimension.
__device__ __forceinline__ void copy_bytes(char* dst, char const* src, int64_t num_bytes) {
  int64_t const thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int64_t const threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint64_t const alignment = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src);
  int64_t const vectors = alignment % sizeof(uint4) == 0 ? num_bytes / sizeof(uint4) : 0;
  for (int64_t i = thread; i < vectors; i += threads) {
    reinterpret_cast<uint4*>(dst)[i] = reinterpret_cast<uint4 const*>(src)[i];
  }
  for (int64_t i = vectors * sizeof(uint4) + thread; i < num_bytes; i += threads) dst[i] = src[i];
}

__global__ void __launch_bounds__(kThreads) push_kernel(__grid_constant__ Params const params) {
  auto const& [workspace, payload, out, slot] = params.ranks[blockIdx.y];
  uint64_t const epoch = call_epoch(workspace);
  int64_t const bank = slot >= 0 ? slot : params.layout.bank_of(epoch);
  int64_t const offset = params.layout.row_offset(bank, workspace.rank);
  // A failed grant has marked this rank: it must not touch a slot that somebody still reads.
  if (!aborted(workspace)) {
    for (int64_t i = 1; i <= workspace.world; ++i) {
      int64_t const dst_rank = (workspace.rank + i) % workspace.world;
      copy_bytes(workspace.region(dst_rank, offset), payload, params.layout.row_bytes);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) arrive_and_publish(workspace, epoch, gridDim.x);
}

// The wait was the kernel before this one.
__global__ void __launch_bounds__(kThreads) take_out_kernel(__grid_constant__ Params const params) {
  auto const& [workspace, payload, out, slot] = params.ranks[blockIdx.y];
  int64_t const num_bytes = workspace.world * params.layout.row_bytes;
  if (aborted(workspace)) {
    poison(out, num_bytes, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  } else if (slot < 0) {
    int64_t const bank = params.layout.bank_of(finished_epoch(workspace));
    copy_bytes(out, workspace.region(workspace.rank, params.layout.row_offset(bank, 0)), num_bytes);
  }
}

void run(std::vector<Part> const& parts, cudaStream_t stream) {
  Params params{};
  params.layout = parts[0].layout;
  std::vector<Workspace> workspaces;
  for (size_t p = 0; p < parts.size(); ++p) {
    Part const& part = parts[p];
    workspaces.push_back(part.workspace);
    params.ranks[p] = {part.workspace, part.payload,
                       static_cast<char*>(part.out.mutable_data_ptr()),
                       part.slot ? part.slot->slot : -1};
  }
  if (parts[0].slot) {
    // All virtual ranks took the same slot; one free only on some of them is announced by none.
    uint32_t free_slots = ~0u;
    for (Part const& part : parts) free_slots &= part.slot->free_slots;
    launch_grant_slot(workspaces, parts[0].slot->slot, free_slots, stream);
  }
  int64_t const total = params.layout.row_bytes * parts[0].workspace.world;
  int64_t const blocks = min_of(kMaxBlocks, max_of<int64_t>(1, ceil_div(total, kBytesPerBlock)));
  dim3 const grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts.size()));
  push_kernel<<<grid, kThreads, 0, stream>>>(params);
  XS_LAUNCH_CHECK();
  launch_wait_for_ranks(workspaces, Phase::kHandshake, {}, stream);
  take_out_kernel<<<grid, kThreads, 0, stream>>>(params);
  XS_LAUNCH_CHECK();
}

Tensor handshake(Tensor const& payload, std::vector<int64_t> workspace, int64_t slots) {
  DeviceGuard const guard(payload.get_device_index());
  cudaStream_t const stream = current_stream(payload);
  std::vector<Part> parts;
  parts.push_back(make_part(payload, read_workspace(workspace), slots, MemoryKind::kCuda,
                            is_capturing(stream)));
  run(parts, stream);
  return parts[0].out;
}

std::vector<Tensor> handshake_virtual(std::vector<Tensor> payloads, std::vector<int64_t> workspaces,
                                      int64_t slots) {
  XS_CHECK(!payloads.empty(), "xstage.handshake_virtual: payloads: expected one tensor per rank");
  DeviceGuard const guard(payloads[0].get_device_index());
  cudaStream_t const stream = current_stream(payloads[0]);
  std::vector<Part> const parts =
      make_parts(payloads, workspaces, slots, MemoryKind::kCuda, is_capturing(stream));
  for (Part const& part : parts) {
    XS_CHECK(part.layout.row_bytes == parts[0].layout.row_bytes,
             "xstage.handshake_virtual: payloads: expected the same size for all ranks, got ",
             parts[0].layout.row_bytes, " and ", part.layout.row_bytes, " bytes");
  }
  run(parts, stream);
  return outputs_of(parts);
}

void announce(Tensor const& block, int64_t failure, std::vector<int64_t> workspace) {
  DeviceGuard const guard(block.get_device_index());
  launch_announce_failure(read_workspace(workspace, true), read_failure(failure),
                          current_stream(block));
}

void load_kernels(Tensor const& block) {
  DeviceGuard const guard(block.get_device_index());
  load_channel_kernels();
  cudaFuncAttributes attributes;
  XS_CUDA(cudaFuncGetAttributes(&attributes, push_kernel));
  XS_CUDA(cudaFuncGetAttributes(&attributes, take_out_kernel));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CUDA, m) {
  m.impl("workspace_load", TORCH_BOX(&load_kernels));
  m.impl("handshake", TORCH_BOX(&handshake));
  m.impl("handshake_virtual", TORCH_BOX(&handshake_virtual));
  m.impl("workspace_announce", TORCH_BOX(&announce));
}

}  // namespace xstage::handshake
