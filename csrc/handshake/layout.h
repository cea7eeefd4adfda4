// Where a handshake's payloads lie in the region of its operator instance.
//
//   bank 0 | bank 1 | ...     one bank per parity of the call, or one per output slot
//   each bank: [world, n] bytes, row r written by rank r
//
// Two banks are enough without slots: a rank is at most one call ahead of another.
#pragma once

#include "common/host_device.h"
#include "common/workspace.h"

namespace xstage::handshake {

constexpr int64_t kBankAlign = 1024;

struct Layout {
  int64_t row_bytes;   // n: bytes of one rank's payload
  int64_t bank_bytes;  // stride of banks
  int64_t num_banks;

  XS_HD int64_t bank_of(uint64_t epoch) const {
    return static_cast<int64_t>(epoch % static_cast<uint64_t>(num_banks));
  }
  XS_HD int64_t row_offset(int64_t bank, int64_t src_rank) const {
    return bank * bank_bytes + src_rank * row_bytes;
  }
  XS_HD int64_t region_bytes() const { return num_banks * bank_bytes; }
};

// num_slots of 0: the result is copied out, and banks alternate.
XS_HD constexpr Layout make_layout(int64_t world, int64_t row_bytes, int64_t num_slots) {
  return {row_bytes, round_up(max_of<int64_t>(world * row_bytes, 1), kBankAlign),
          num_slots > 0 ? num_slots : 2};
}

}  // namespace xstage::handshake
