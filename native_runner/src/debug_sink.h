// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <executorch/devtools/etdump/data_sinks/data_sink_base.h>

#include <cstdint>
#include <vector>

namespace farm {

// Buffer of the intermediate outputs that an ETDump refers to. It grows up to a limit; outputs beyond it are counted
// and dropped, because ExecuTorch aborts after an error here.
class DebugSink final : public executorch::etdump::DataSinkBase {
 public:
  explicit DebugSink(size_t limit) : limit_(limit) {}

  executorch::runtime::Result<size_t> write(const void* data, size_t size) override;
  size_t get_used_bytes() const override { return content_.size(); }

  const std::vector<uint8_t>& content() const { return content_; }

  // Returns the bytes of all outputs; if they exceed the limit, some were dropped.
  size_t needed() const { return needed_; }
  size_t limit() const { return limit_; }

 private:
  size_t limit_;
  size_t needed_ = 0;
  std::vector<uint8_t> content_;
};

}  // namespace farm
