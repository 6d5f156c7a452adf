// SPDX-License-Identifier: GPL-2.0-or-later
//
// PyTorch's large CPU tensors in memory of the step before. malloc gives such memory back to the
// kernel, which clears it for the next step: that was half of a step's time.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>
#include <utility>

class KeptPages final : public c10::Allocator {
 public:
  static KeptPages& instance() {
    static auto* const kept = new KeptPages;  // tensors may outlive static objects
    return *kept;
  }

  at::DataPtr allocate(size_t bytes) override {
    if (bytes < kLarge) return small_->allocate(bytes);
    const std::lock_guard lock(mutex_);
    auto found = idle_.lower_bound(bytes);
    if (found == idle_.end() || found->first > bytes + bytes / 4) {
      const size_t size = bytes + bytes / 8;  // the rest is touched when sizes grow, not before
      found = idle_.emplace(size, Block{small_->allocate(size), false});
    }
    found->second.used = true;
    auto* const block = new Node(idle_.extract(found));
    return {block->mapped().data.get(), block, give_back, at::kCPU};
  }

  // Frees what was not used since the last call, as sizes have changed since.
  void sweep() {
    const std::lock_guard lock(mutex_);
    for (auto block = idle_.begin(); block != idle_.end();)
      block = std::exchange(block->second.used, false) ? std::next(block) : idle_.erase(block);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Block {
    at::DataPtr data;
    bool used;
  };
  using Blocks = std::multimap<size_t, Block>;
  using Node = Blocks::node_type;

  KeptPages() { c10::SetCPUAllocator(this, /*priority=*/1); }

  static void give_back(void* block) {
    auto* const node = static_cast<Node*>(block);
    const std::lock_guard lock(instance().mutex_);
    instance().idle_.insert(std::move(*node));
    delete node;
  }

  static constexpr size_t kLarge = 1 << 20;  // malloc keeps what is smaller
  c10::Allocator* const small_ = c10::GetDefaultCPUAllocator();
  std::mutex mutex_;
  Blocks idle_;
};
