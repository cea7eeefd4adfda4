// The operators: checks with values, buffers, tensor maps. The kernels are in the .cuh files.
#include <array>
#include <tuple>

#include "burst/burst.cuh"
#include "burst/launch.h"
#include "burst/loop_params.h"
#include "burst/shadow.cuh"
#include "common/tensor_map.h"
#include "common/torch_glue.h"

namespace xstage {
namespace {

constexpr int64_t kMaxSharedBytes = 227 * 1024;

Tensor int32_result(Tensor const& like, std::vector<int64_t> shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Int);
}

Tensor head_result(Tensor const& like, int64_t blocks) {
  std::vector<int64_t> const shape{blocks, kHeadWords};
  Tensor heads = torch::stable::new_empty(like, shape, ScalarType::Long);
  return torch::stable::zero_(heads);
}

void check_workspace(char const* op, Workspace const& workspace, int64_t destinations,
                     int64_t reach) {
  XS_CHECK(workspace.memory == static_cast<int64_t>(MemoryKind::kCuda), "xstage.", op,
           ": workspace: expected CUDA memory, got CPU memory");
  XS_CHECK(destinations < (int64_t{1} << workspace.world), "xstage.", op,
           ": destinations: expected ranks below ", workspace.world, ", got mask ", destinations);
  int64_t const area = landing_area_bytes(workspace.region_bytes, workspace.world);
  XS_CHECK(workspace.region_bytes > kBurstControlBytes && reach <= area, "xstage.", op,
           ": workspace: a burst reaches ", reach, " bytes into a landing area of ", area,
           " bytes (region of ", workspace.region_bytes, " bytes, ", workspace.world,
           " source ranks); enlarge the lease");
}

void check_rows(char const* op, int64_t bytes, int64_t chunk, int64_t row_stride) {
  XS_CHECK((chunk & (chunk - 1)) == 0 && bytes % chunk == 0, "xstage.", op,
           ": chunk_bytes: expected a power of two that divides ", bytes, ", got ", chunk);
  XS_CHECK(row_stride % 16 == 0 && row_stride >= chunk, "xstage.", op,
           ": row_stride: expected a multiple of 16 of at least chunk_bytes ", chunk, ", got ",
           row_stride);
}

void check_burst_plan(char const* op, BurstPlan const& plan, int64_t num_gaps) {
  Mechanism const mechanism = static_cast<Mechanism>(plan.mechanism);
  check_rows(op, plan.bytes, plan.chunk_bytes, plan.row_stride);
  bool const by_threads = mechanism == Mechanism::kSt || mechanism == Mechanism::kPull;
  XS_CHECK(!by_threads || plan.chunk_bytes <= kPassBytes || plan.row_stride == plan.chunk_bytes,
           "xstage.", op, ": row_stride: rows of ", plan.chunk_bytes, " bytes, longer than ",
           kPassBytes, ", are stored contiguously; expected ", plan.chunk_bytes, ", got ",
           plan.row_stride);
  if (mechanism == Mechanism::kTma) {
    XS_CHECK(plan.chunk_bytes <= 512 && plan.rows() % plan.box_rows() == 0, "xstage.", op,
             ": tma: expected rows of 128, 256 or 512 bytes in whole boxes of 64 rows, got ",
             plan.rows(), " rows of ", plan.chunk_bytes, " bytes");
    XS_CHECK(plan.producer_stride % plan.row_stride == 0 && plan.slot_stride % plan.row_stride == 0,
             "xstage.", op, ": tma: producer_stride ", plan.producer_stride, " and slot_stride ",
             plan.slot_stride, " must be multiples of row_stride ", plan.row_stride);
  }
  XS_CHECK(plan.producer_stride % 16 == 0 && plan.slot_stride % 16 == 0, "xstage.", op,
           ": strides: expected multiples of 16, got producer_stride ", plan.producer_stride,
           " and slot_stride ", plan.slot_stride);
  XS_CHECK(plan.sync != static_cast<int64_t>(Sync::kBarrier) || plan.window_cycles == 0, "xstage.",
           op,
           ": window_cycles: a barrier needs the same number of bursts everywhere; expected 0, "
           "got ",
           plan.window_cycles);
  int64_t const shared =
      static_cast<int64_t>(sizeof(BurstShared)) + plan.max_bursts * 16 + num_gaps * 4;
  XS_CHECK(shared <= kMaxSharedBytes, "xstage.", op, ": max_bursts ", plan.max_bursts, " and ",
           num_gaps, " gaps need ", shared, " bytes of shared memory; at most ", kMaxSharedBytes);
}

void check_blocks(char const* op, char const* name, int64_t blocks) {
  XS_CHECK(blocks <= num_sms(), "xstage.", op, ": ", name, ": expected at most one per SM (",
           num_sms(), "), got ", blocks);
}

// The landing area on every rank as rows of chunk_bytes at row_stride.
void encode_landing_maps(BurstParams& params) {
  BurstPlan const& plan = params.plan;
  Workspace const& workspace = params.workspace;
  int64_t const area = landing_area_bytes(workspace.region_bytes, workspace.world);
  uint64_t const dims[2] = {static_cast<uint64_t>(plan.chunk_bytes / 2),
                            static_cast<uint64_t>(area / plan.row_stride)};
  uint64_t const strides[1] = {static_cast<uint64_t>(plan.row_stride)};
  uint32_t const box[2] = {static_cast<uint32_t>(plan.chunk_bytes / 2),
                           static_cast<uint32_t>(plan.box_rows())};
  for (int r = 0; r < workspace.world; ++r) {
    if (!(plan.destinations >> r & 1)) continue;
    char* const base = workspace.region(r, kBurstControlBytes + workspace.rank * area);
    params.maps[r] = encode_bf16_map(base, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
}

BurstParams burst_params(char const* op, Tensor const& gaps, BurstPlan const& plan,
                         std::vector<int64_t> const& words) {
  check_dtype(op, "gap_cycles", gaps, ScalarType::Int);
  check_contiguous(op, "gap_cycles", gaps);
  check_shape(op, "gap_cycles", gaps, {-1, -1});
  XS_CHECK(gaps.size(0) >= 1 && gaps.size(1) >= 1 && gaps.size(1) <= kMaxGaps, "xstage.", op,
           ": gap_cycles: expected [1 or more, 1 to ", kMaxGaps, "], got ", shape_text(gaps));
  BurstParams params{};
  params.workspace = read_workspace(words);
  params.plan = plan;
  check_burst_plan(op, plan, gaps.size(1));
  check_workspace(op, params.workspace, plan.destinations, plan.reach());
  params.gap_cycles = static_cast<int32_t const*>(gaps.data_ptr());
  params.gap_rows = static_cast<int>(gaps.size(0));
  params.num_gaps = static_cast<int>(gaps.size(1));
  if (plan.mechanism == static_cast<int64_t>(Mechanism::kTma)) encode_landing_maps(params);
  return params;
}

std::tuple<Tensor, Tensor> burst_run(Tensor gap_cycles, std::vector<int64_t> plan_words,
                                     std::vector<int64_t> workspace_words) {
  DeviceGuard const guard(gap_cycles.get_device_index());
  BurstPlan const plan = read_burst_plan(plan_words);
  check_blocks("burst_run", "producers", plan.producers);
  BurstParams params = burst_params("burst_run", gap_cycles, plan, workspace_words);
  int64_t const blocks = max_of<int64_t>(1, plan.producers);
  Tensor heads = head_result(gap_cycles, blocks);
  Tensor stamps = int32_result(gap_cycles, {blocks, plan.max_bursts, 4});
  params.heads = static_cast<BurstHead*>(heads.data_ptr());
  params.stamps = static_cast<int4*>(stamps.data_ptr());
  launch_burst(params, static_cast<int>(blocks), current_stream(gap_cycles));
  return {heads, stamps};
}

std::tuple<Tensor, Tensor> burst_shadow(Tensor gap_cycles, Tensor delay_cycles,
                                        std::vector<int64_t> plan_words,
                                        std::vector<int64_t> workspace_words) {
  char const* const op = "burst_shadow";
  DeviceGuard const guard(gap_cycles.get_device_index());
  BurstPlan const plan = read_burst_plan(plan_words);
  check_blocks(op, "producers", plan.producers);
  check_dtype(op, "delay_cycles", delay_cycles, ScalarType::Int);
  check_contiguous(op, "delay_cycles", delay_cycles);
  check_shape(op, "delay_cycles", delay_cycles, {-1});
  XS_CHECK(delay_cycles.get_device_index() == gap_cycles.get_device_index(), "xstage.", op,
           ": delay_cycles: expected device ", gap_cycles.get_device_index(), ", got ",
           delay_cycles.get_device_index());
  XS_CHECK(delay_cycles.size(0) >= 1 && plan.sync == static_cast<int64_t>(Sync::kTimetable),
           "xstage.", op, ": expected one delay or more and a timetable (sync 2), got ",
           delay_cycles.size(0), " delays and sync ", plan.sync);
  XS_CHECK(plan.probe_bytes % 128 == 0 || plan.probe < 2, "xstage.", op,
           ": probe_bytes: expected a multiple of 128, got ", plan.probe_bytes);
  BurstParams params = burst_params(op, gap_cycles, plan, workspace_words);
  int64_t const blocks = num_sms();
  Tensor heads = head_result(gap_cycles, blocks);
  Tensor stamps = int32_result(gap_cycles, {blocks, plan.max_bursts, 4});
  Tensor scratch = int32_result(gap_cycles, {blocks, kProbeBytes / 4});
  scratch = torch::stable::zero_(scratch);  // also brings it into L2
  params.heads = static_cast<BurstHead*>(heads.data_ptr());
  params.stamps = static_cast<int4*>(stamps.data_ptr());
  params.scratch = static_cast<char*>(scratch.data_ptr());
  params.delays = static_cast<int32_t const*>(delay_cycles.data_ptr());
  params.num_delays = static_cast<int>(delay_cycles.size(0));
  uint64_t const dims[2] = {64, static_cast<uint64_t>(blocks * kProbeBytes / 128)};
  uint64_t const strides[1] = {128};
  uint32_t const box[2] = {64, static_cast<uint32_t>(max_of<int64_t>(1, plan.probe_bytes / 128))};
  params.probe_map =
      encode_bf16_map(params.scratch, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
  launch_shadow(params, static_cast<int>(blocks), current_stream(gap_cycles));
  return {heads, stamps};
}

void check_loop_plan(BurstLoopPlan const& plan) {
  char const* const op = "burst_loop";
  check_blocks(op, "blocks", plan.blocks);
  check_rows(op, plan.tile_bytes, plan.chunk_bytes, plan.row_stride);
  XS_CHECK((plan.slice_bytes & (plan.slice_bytes - 1)) == 0 &&
               plan.tile_bytes % min_of(plan.slice_bytes, plan.tile_bytes) == 0,
           "xstage.", op, ": slice_bytes: expected a power of two that divides ", plan.tile_bytes,
           ", got ", plan.slice_bytes);
  XS_CHECK(plan.block_stride % 16 == 0, "xstage.", op,
           ": block_stride: expected a multiple of 16, got ", plan.block_stride);
}

std::tuple<Tensor, Tensor> burst_loop(Tensor a, Tensor b, std::vector<int64_t> plan_words,
                                      std::vector<int64_t> workspace_words) {
  char const* const op = "burst_loop";
  DeviceGuard const guard(a.get_device_index());
  BurstLoopPlan const plan = read_burst_loop_plan(plan_words);
  check_loop_plan(plan);
  check_dtype(op, "a", a, ScalarType::BFloat16);
  check_shape(op, "a", a, {kLoopM, kLoopK});
  check_contiguous(op, "a", a);
  check_dtype(op, "b", b, ScalarType::BFloat16);
  check_shape(op, "b", b, {-1, kLoopK});
  check_contiguous(op, "b", b);
  XS_CHECK(b.size(0) >= kLoopN && b.size(0) % kLoopN == 0, "xstage.", op,
           ": b: expected a multiple of ", kLoopN, " rows, got ", b.size(0));
  XS_CHECK(a.get_device_index() == b.get_device_index(), "xstage.", op, ": b: expected device ",
           a.get_device_index(), ", got ", b.get_device_index());
  LoopParams params{};
  params.workspace = read_workspace(workspace_words);
  params.plan = plan;
  check_workspace(op, params.workspace, plan.destinations, plan.reach());
  params.num_b_tiles = static_cast<int>(b.size(0) / kLoopN);
  Tensor heads = head_result(a, plan.blocks);
  Tensor stamps = int32_result(a, {plan.blocks, plan.tiles, 4});
  params.heads = static_cast<BurstHead*>(heads.data_ptr());
  params.stamps = static_cast<int4*>(stamps.data_ptr());
  uint64_t const strides[1] = {kLoopK * 2};
  uint32_t const box[2] = {kLoopK, kLoopN};
  uint64_t const a_dims[2] = {kLoopK, kLoopM};
  uint64_t const b_dims[2] = {kLoopK, static_cast<uint64_t>(b.size(0))};
  params.a_map = encode_bf16_map(a.data_ptr(), 2, a_dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  params.b_map = encode_bf16_map(b.data_ptr(), 2, b_dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  launch_loop(params, current_stream(a));
  return {heads, stamps};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CUDA, m) {
  m.impl("burst_run", TORCH_BOX(&burst_run));
  m.impl("burst_shadow", TORCH_BOX(&burst_shadow));
  m.impl("burst_loop", TORCH_BOX(&burst_loop));
}

}  // namespace xstage
