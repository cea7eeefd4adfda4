// Tensor maps and the cooperative launch of the megamoe kernel.
#include "common/launch.h"
#include "common/tensor_map.h"
#include "kernel_sm90.cuh"
#include "launch.h"

namespace xstage {
namespace {

using Traits = MegaMoeTraits;

CUtensorMap ring_map(char* base, int64_t width, int64_t rows) {
  uint64_t const dims[2] = {static_cast<uint64_t>(width), static_cast<uint64_t>(rows)};
  uint64_t const strides[1] = {static_cast<uint64_t>(2 * width)};
  uint32_t const box[2] = {Traits::kBlockK, 64};
  return encode_bf16_map(base, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

// (hidden, intermediate, gate or up, expert): gates and ups lie in two halves, or in turns.
CUtensorMap w13_map(MegaMoePlan const& plan, void const* w13) {
  bool const in_turns = plan.weight_layout == kGateUpInTurns;
  uint64_t const hidden = plan.hidden;
  uint64_t const intermediate = plan.intermediate;
  uint64_t const dims[4] = {hidden, intermediate, 2,
                            static_cast<uint64_t>(plan.experts_per_rank())};
  uint64_t const strides[3] = {2 * hidden * (in_turns ? 2 : 1),
                               2 * hidden * (in_turns ? 1 : intermediate),
                               2 * hidden * 2 * intermediate};
  uint32_t const box[4] = {Traits::kBlockK, 64, 1, 1};
  return encode_bf16_map(const_cast<void*>(w13), 4, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap w2_map(MegaMoePlan const& plan, void const* w2) {
  uint64_t const hidden = plan.hidden;
  uint64_t const intermediate = plan.intermediate;
  uint64_t const dims[3] = {intermediate, hidden, static_cast<uint64_t>(plan.experts_per_rank())};
  uint64_t const strides[2] = {2 * intermediate, 2 * intermediate * hidden};
  uint32_t const box[3] = {Traits::kBlockK, Traits::kBlockN / 2, 1};
  return encode_bf16_map(const_cast<void*>(w2), 3, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Raises the shared-memory limit, once per device; returns how many CTAs can be resident.
template <bool kTrace>
int resident_blocks() {
  constexpr int kMaxDevices = 64;
  static int resident[kMaxDevices] = {};
  int device = 0;
  XS_CUDA(cudaGetDevice(&device));
  XS_CHECK(device < kMaxDevices, "xstage.megamoe: device ", device, ": expected below ",
           kMaxDevices);
  if (resident[device] != 0) return resident[device];
  XS_CUDA(cudaFuncSetAttribute(megamoe_sm90<kTrace>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(sizeof(MegaMoeShared))));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(Traits::kCluster);
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = sizeof(MegaMoeShared);
  int clusters = 0;
  XS_CUDA(cudaOccupancyMaxActiveClusters(&clusters, megamoe_sm90<kTrace>, &config));
  return resident[device] = clusters * Traits::kCluster;
}

template <bool kTrace>
void launch_as(std::vector<MegaMoeParams> const& ranks, cudaStream_t stream) {
  size_t const num_ranks = ranks.size();
  int const blocks = ranks[0].plan.num_sms * static_cast<int>(num_ranks);
  int const resident = resident_blocks<kTrace>();
  XS_CHECK(blocks <= resident, "xstage.megamoe: plan: num_sms: ", blocks, " CTAs for ", num_ranks,
           " ranks in one launch, but this device holds ", resident, "; lower num_sms");
  // Entries behind the last rank are never read.
  auto const rank = [&](size_t r) { return ranks[min_of(r, num_ranks - 1)]; };
  MegaMoeLaunch const launch{
      {rank(0), rank(1), rank(2), rank(3), rank(4), rank(5), rank(6), rank(7)}};
  LaunchShape const shape{dim3(blocks), Traits::kThreads, sizeof(MegaMoeShared), stream,
                          LaunchKind::kCooperative};
  launch_kernel(megamoe_sm90<kTrace>, shape, launch);
}

}  // namespace

void check_megamoe_instance(MegaMoePlan const& plan) {
  XS_CHECK(plan.block_m == Traits::kBlockM && plan.block_n == Traits::kBlockN &&
               plan.cluster_size == Traits::kCluster,
           "xstage.megamoe: plan: block_m, block_n, cluster_size: expected one of ",
           megamoe_instances(), "got ", plan.block_m, ' ', plan.block_n, ' ', plan.cluster_size);
}

std::string megamoe_instances() {
  std::string lines;
  for (int store : {kPlainStores, kBulkBurst, kBulkPaced}) {
    lines += concat(Traits::kBlockM, ' ', Traits::kBlockN, ' ', Traits::kCluster, ' ', store, '\n');
  }
  return lines;
}

void encode_megamoe_maps(MegaMoeParams& params, void const* w13, void const* w2) {
  MegaMoePlan const& plan = params.plan;
  MegaMoeView const own = params.view(params.workspace.rank);
  params.x_ring = ring_map(own.x_block<char>(plan, params.layout, 0), plan.hidden,
                           int64_t{1} * plan.x_ring_blocks * plan.block_m);
  params.h_ring = ring_map(own.h_block<char>(plan, params.layout, 0), plan.intermediate,
                           int64_t{1} * plan.h_ring_blocks * plan.block_m);
  params.w13 = w13_map(plan, w13);
  params.w2 = w2_map(plan, w2);
}

void launch_megamoe(std::vector<MegaMoeParams> const& ranks, cudaStream_t stream) {
  ranks[0].trace != nullptr ? launch_as<true>(ranks, stream) : launch_as<false>(ranks, stream);
}

}  // namespace xstage
