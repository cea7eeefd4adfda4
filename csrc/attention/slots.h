// The host's book of output slots: which one a call takes, and which ones are still held.
//
// Every rank hands out slots round-robin, so ranks agree without talking (the slot is part of the
// digest that they compare). A slot is held while a tensor on it lives; taking a held slot is an
// error with numbers, never an overwrite. Slots that a CUDA graph was captured with belong to the
// graph: calls outside graphs pass over them while others are left.
//
// The device side of the contract is grant_slot (common/channel.cuh): peers store into a slot only
// after its last reader on this rank's stream.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "common/torch_glue.h"
#include "layout.h"

namespace xstage {

struct SlotTicket {
  int slot;
  uint32_t free_slots;  // what grant_slot announces to the peers
};

class SlotBook {
 public:
  SlotTicket take(char const* op, int64_t slots, bool capturing) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint32_t const all = (1u << slots) - 1;
    uint32_t const usable = !capturing && (captured_ & all) != all ? all & ~captured_ : all;
    int slot = static_cast<int>(next_ % slots);
    while (((usable >> slot) & 1) == 0) slot = static_cast<int>(++next_ % slots);
    int held = 0;
    uint32_t free_slots = 0;
    for (int s = 0; s < slots; ++s) {
      held += held_[s] > 0;
      if (held_[s] == 0 && (!capturing || ((captured_ >> s) & 1))) free_slots |= 1u << s;
    }
    XS_CHECK(held_[slot] == 0, "xstage.", op, ": output slot ", slot, " of ", slots,
             " still holds a result that is alive (", held, " of ", slots,
             " slots are held); drop older results, copy them out with out=, or raise slots");
    ++next_;
    if (capturing) captured_ |= 1u << slot;
    return {slot, free_slots | (1u << slot)};
  }

  void hold(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++held_[slot];
  }
  void drop(int slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    --held_[slot];
  }

 private:
  std::mutex mutex_;
  uint64_t next_ = 0;
  uint32_t captured_ = 0;
  int held_[kMaxSlots] = {};
};

// Books by the address of this rank's region. A new operator instance starts a new book.
class SlotLibrary {
 public:
  static std::shared_ptr<SlotBook> find(Workspace const& workspace) {
    std::lock_guard<std::mutex> lock(mutex());
    std::shared_ptr<SlotBook>& book = books()[workspace.region(workspace.rank)];
    if (book == nullptr) book = std::make_shared<SlotBook>();
    return book;
  }
  static void reset(Workspace const& workspace) {
    std::lock_guard<std::mutex> lock(mutex());
    books()[workspace.region(workspace.rank)] = std::make_shared<SlotBook>();
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  // Never destroyed: tensors may outlive the interpreter's teardown of this library.
  static std::map<void*, std::shared_ptr<SlotBook>>& books() {
    static auto* const books = new std::map<void*, std::shared_ptr<SlotBook>>();
    return *books;
  }
};

// A contiguous [B, rows, heads, D] tensor on a slot; the slot is held until the tensor dies.
struct SlotShape {
  int64_t batch;
  int64_t rows;
  int64_t heads;
  int64_t head_dim;

  int64_t bytes(ScalarType dtype) const {
    return batch * rows * heads * head_dim * (dtype == ScalarType::Float ? 4 : 2);
  }
};

inline Tensor slot_tensor(std::shared_ptr<SlotBook> const& book, int slot, void* data,
                          SlotShape const& shape, Tensor const& like) {
  std::vector<int64_t> const sizes = {shape.batch, shape.rows, shape.heads, shape.head_dim};
  std::vector<int64_t> const strides = {shape.rows * shape.heads * shape.head_dim,
                                        shape.heads * shape.head_dim, shape.head_dim, 1};
  book->hold(slot);
  return torch::stable::from_blob(data, {sizes.data(), sizes.size()},
                                  {strides.data(), strides.size()}, like.device(),
                                  like.scalar_type(), [book, slot](void*) { book->drop(slot); });
}

}  // namespace xstage
