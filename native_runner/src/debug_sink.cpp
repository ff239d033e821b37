// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "debug_sink.h"

namespace farm {

namespace {
// Alignment of ExecuTorch's own buffer.
constexpr size_t kSinkAlignment = 64;
}  // namespace

executorch::runtime::Result<size_t> DebugSink::write(const void* data, size_t size) {
  const size_t offset = (needed_ + kSinkAlignment - 1) / kSinkAlignment * kSinkAlignment;
  needed_ = offset + size;
  if (needed_ > limit_) return size_t{0};
  const auto* bytes = static_cast<const uint8_t*>(data);
  content_.resize(offset);
  content_.insert(content_.end(), bytes, bytes + size);
  return offset;
}

}  // namespace farm
