// Output slots: results that peers write live in a fixed ring of slots of the instance's region,
// and a call's result is a Tensor over its slot, not a copy.
//
// Who may write into a slot when:
//   - Here, on the host: a call takes the next slot of the ring. All ranks take the same one, since
//     all make the same calls in the same order. A slot that a live result still holds is an error
//     with numbers, never an overwrite. It is held until the last tensor over it is freed.
//   - On the device: grant_slot (channel.cuh) waits until every rank has announced, in the order of
//     its stream, that it is done with the slot.
// So a result must be read on the stream of the call, or that stream must wait for the reader
// before the result is dropped.
//
// CUDA graphs: captured calls use the upper half of the ring from the first capture on and leave
// the lower half to eager calls, so an eager result is never overwritten by a replay. A captured
// result is valid until the next replay.
#pragma once

#include <memory>

#include "torch_glue.h"
#include "workspace.h"

namespace xstage {

// Held by every tensor over the slot and by the call while it runs.
class SlotHold {
 public:
  SlotHold(HostChannel* channel, int slot) : channel_(channel), slot_(slot) {}
  ~SlotHold() { __atomic_fetch_and(&channel_->held, ~(1u << slot_), __ATOMIC_ACQ_REL); }
  SlotHold(SlotHold const&) = delete;
  SlotHold& operator=(SlotHold const&) = delete;

 private:
  HostChannel* channel_;
  int slot_;
};

struct TakenSlot {
  int slot;
  uint32_t free_slots;  // slots of this ring without a live result here, for grant_slot
  std::shared_ptr<SlotHold> hold;
};

// Takes the next slot for a call. `num_slots` is the size of the instance's ring.
inline TakenSlot take_slot(char const* op, Workspace const& workspace, int64_t num_slots,
                           bool capturing) {
  XS_CHECK(num_slots >= 1 && num_slots <= kMaxSlots, "xstage.", op, ": slots: expected 1 to ",
           kMaxSlots, ", got ", num_slots);
  XS_CHECK(workspace.host_page != 0, "xstage.", op, ": workspace: host page is missing");
  HostChannel* const channel = workspace.host_channel();
  if (capturing) channel->captured = 1;
  int64_t const num_eager = channel->captured != 0 ? (num_slots + 1) / 2 : num_slots;
  bool const upper = capturing && num_eager < num_slots;
  int64_t const first = upper ? num_eager : 0;
  int64_t const size = upper ? num_slots - num_eager : num_eager;
  uint64_t* const taken = upper ? &channel->captured_calls : &channel->eager_calls;
  int const slot = static_cast<int>(first + static_cast<int64_t>(*taken) % size);

  uint32_t const bit = 1u << slot;
  uint32_t const held = __atomic_fetch_or(&channel->held, bit, __ATOMIC_ACQ_REL);
  XS_CHECK((held & bit) == 0, "xstage.", op, ": output slots: calls take turns through ", size,
           ", and the one whose turn it is still holds the result of ", size,
           " calls ago (channel ", workspace.channel, ", ", __builtin_popcount(held), " of ",
           num_slots,
           " slots hold live results); drop results before the next call, pass out=, or "
           "ask for more slots");
  *taken += 1;
  uint32_t const ring = ((1u << size) - 1) << first;
  return {slot, (ring & ~held) | bit, std::make_shared<SlotHold>(channel, slot)};
}

// A result over the slot: `offset` counts from the start of the instance's region.
inline Tensor slot_tensor(Workspace const& workspace, TakenSlot const& taken, int64_t offset,
                          std::vector<int64_t> const& sizes, std::vector<int64_t> const& strides,
                          ScalarType dtype, torch::stable::Device device) {
  auto const release = [hold = taken.hold](void*) mutable { hold.reset(); };
  return torch::stable::from_blob(workspace.region(workspace.rank, offset), sizes, strides, device,
                                  dtype, release);
}

inline Tensor slot_tensor(Workspace const& workspace, TakenSlot const& taken, int64_t offset,
                          std::vector<int64_t> const& sizes, ScalarType dtype,
                          torch::stable::Device device) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int64_t i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; --i) {
    strides[i] = strides[i + 1] * max_of<int64_t>(sizes[i + 1], 1);
  }
  return slot_tensor(workspace, taken, offset, sizes, strides, dtype, device);
}

#if defined(USE_CUDA)
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  XS_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}
#endif

}  // namespace xstage
