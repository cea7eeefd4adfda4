// What the CPU and the CUDA operator share: checks, digest, the rank's part of one call.
#pragma once

#include <optional>

#include "common/slots.h"
#include "handshake/layout.h"

namespace xstage::handshake {

// One rank's part of a call.
struct Part {
  Workspace workspace;
  Layout layout;
  std::optional<TakenSlot> slot;  // where the result lives; without: copied out of a bank
  char const* payload;
  Tensor out;  // [world, payload...]
};

inline Part make_part(Tensor const& payload, Workspace workspace, int64_t num_slots,
                      MemoryKind memory, bool capturing) {
  check_memory("handshake", workspace, memory);
  check_contiguous("handshake", "payload", payload);
  int64_t const row_bytes = payload.numel() * payload.element_size();
  Layout const layout = make_layout(workspace.world, row_bytes, num_slots);
  check_region("handshake", workspace, layout.region_bytes());
  mix_digest(workspace, row_bytes);
  mix_digest(workspace, num_slots);

  std::vector<int64_t> sizes{workspace.world};
  for (int64_t i = 0; i < payload.dim(); ++i) sizes.push_back(payload.size(i));
  char const* const bytes = static_cast<char const*>(payload.const_data_ptr());
  if (num_slots == 0) {
    return {workspace, layout, std::nullopt, bytes, torch::stable::new_empty(payload, sizes)};
  }
  TakenSlot slot = take_slot("handshake", workspace, num_slots, capturing);
  Tensor out = slot_tensor(workspace, slot, layout.row_offset(slot.slot, 0), sizes,
                           payload.scalar_type(), payload.device());
  return {workspace, layout, std::move(slot), bytes, std::move(out)};
}

inline std::vector<Part> make_parts(std::vector<Tensor> const& payloads,
                                    std::vector<int64_t> const& workspaces, int64_t num_slots,
                                    MemoryKind memory, bool capturing) {
  std::vector<Workspace> const ranks = read_virtual_workspaces(workspaces);
  XS_CHECK(payloads.size() == ranks.size(), "xstage.handshake: payloads: expected ", ranks.size(),
           " tensors, one per rank, got ", payloads.size());
  std::vector<Part> parts;
  for (size_t r = 0; r < ranks.size(); ++r) {
    parts.push_back(make_part(payloads[r], ranks[r], num_slots, memory, capturing));
  }
  return parts;
}

inline std::vector<Tensor> outputs_of(std::vector<Part> const& parts) {
  std::vector<Tensor> outputs;
  for (Part const& part : parts) outputs.push_back(part.out);
  return outputs;
}

}  // namespace xstage::handshake
