// The handshake on the CPU: every rank pushes its payload into every rank's region.
#include <cstring>

#include "common/channel_cpu.h"
#include "handshake/op.h"

namespace xstage::handshake {
namespace {

// Each step runs for all ranks that this call plays before the next step: virtual ranks share a
// thread.
void run(std::vector<Part>& parts) {
  for (Part const& part : parts) {
    if (part.slot) cpu::announce_slots(part.workspace, part.slot->slot, part.slot->free_slots);
  }
  std::vector<uint64_t> epochs;
  for (Part const& part : parts) {
    Workspace const& ws = part.workspace;
    uint64_t const epoch = cpu::call_epoch(ws);
    epochs.push_back(epoch);
    bool const granted = !part.slot || cpu::wait_for_slot(ws, part.slot->slot);
    int64_t const bank = part.slot ? part.slot->slot : part.layout.bank_of(epoch);
    int64_t const offset = part.layout.row_offset(bank, ws.rank);
    for (int64_t i = 1; granted && !cpu::aborted(ws) && i <= ws.world; ++i) {
      std::memcpy(ws.region((ws.rank + i) % ws.world, offset), part.payload,
                  static_cast<size_t>(part.layout.row_bytes));
    }
    cpu::publish(ws, epoch);
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    Part const& part = parts[p];
    Workspace const& ws = part.workspace;
    size_t const bytes = static_cast<size_t>(ws.world * part.layout.row_bytes);
    void* const out = part.out.mutable_data_ptr();
    bool const ok = cpu::wait_for_ranks(ws, epochs[p], Phase::kHandshake);
    if (!ok) {
      std::memset(out, 0xff, bytes);
    } else if (!part.slot) {
      std::memcpy(out,
                  ws.region(ws.rank, part.layout.row_offset(part.layout.bank_of(epochs[p]), 0)),
                  bytes);
    }
  }
}

Tensor handshake(Tensor const& payload, std::vector<int64_t> workspace, int64_t slots) {
  std::vector<Part> parts;
  parts.push_back(make_part(payload, read_workspace(workspace), slots, MemoryKind::kCpu, false));
  run(parts);
  return parts[0].out;
}

std::vector<Tensor> handshake_virtual(std::vector<Tensor> payloads, std::vector<int64_t> workspaces,
                                      int64_t slots) {
  std::vector<Part> parts = make_parts(payloads, workspaces, slots, MemoryKind::kCpu, false);
  run(parts);
  return outputs_of(parts);
}

void announce(Tensor const&, int64_t failure, std::vector<int64_t> workspace) {
  Workspace const ws = read_workspace(workspace, true);
  cpu::announce_failure(ws, read_failure(failure), cpu::call_epoch(ws));
}

int64_t region_bytes(int64_t world, int64_t row_bytes, int64_t slots) {
  return make_layout(world, row_bytes, slots).region_bytes();
}

void load_kernels(Tensor const&) {}  // nothing to load

std::vector<int64_t> layout() {
  return {kControlBytes, sizeof(HostPage), sizeof(HostChannel),         kMaxRanks,
          kMaxChannels,  kMaxSlots,        offsetof(Control, channels), sizeof(Channel)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(xstage, CPU, m) {
  m.impl("handshake", TORCH_BOX(&handshake));
  m.impl("handshake_virtual", TORCH_BOX(&handshake_virtual));
  m.impl("workspace_announce", TORCH_BOX(&announce));
  m.impl("workspace_load", TORCH_BOX(&load_kernels));
}

STABLE_TORCH_LIBRARY_IMPL(xstage, CompositeExplicitAutograd, m) {
  m.impl("workspace_layout", TORCH_BOX(&layout));
  m.impl("handshake_region_bytes", TORCH_BOX(&region_bytes));
}

}  // namespace xstage::handshake
