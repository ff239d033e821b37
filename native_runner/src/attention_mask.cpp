// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "attention_mask.h"

#include <algorithm>
#include <cstdint>

#include "failure.h"

namespace farm {

namespace {

struct Values {
  const char* dtype;
  size_t itemsize;
  unsigned attends;
  unsigned masked;
};

// Values that are added to attention scores: 0 attends and -255 masks, in floating point or quantized so that 0 is the
// greatest value.
constexpr Values kValues[] = {
    {"uint8", 1, 0xFF, 0},
    {"uint16", 2, 0xFFFF, 0},
    {"float16", 2, 0, 0xDBF8},
    {"bfloat16", 2, 0, 0xC37F},
    {"float32", 4, 0, 0xC37F0000},
};

template <typename T>
void fill_elements(void* data, size_t begin, size_t end, unsigned value) {
  auto* elements = static_cast<T*>(data);
  std::fill(elements + begin, elements + end, static_cast<T>(value));
}

}  // namespace

AttentionMask::AttentionMask(void* data, const std::string& dtype, size_t width, size_t context,
                             std::optional<size_t> window)
    : data_(data), width_(width), context_(context), window_(window), shown_(width) {
  for (const Values& values : kValues) {
    if (dtype != values.dtype) continue;
    itemsize_ = values.itemsize;
    attends_ = values.attends;
    masked_ = values.masked;
  }
  if (itemsize_ == 0) throw Failure(Stage::kLoad, "--generate: an attention mask of " + dtype + " is not known here");
  const size_t past = context_ - width_;
  for (size_t row = 0; row < width_; ++row) {
    const size_t first = window_ && row + 1 > *window_ ? row + 1 - *window_ : 0;
    fill(row, 0, context_, false);
    fill(row, past + first, past + row + 1, true);
  }
}

void AttentionMask::clear() {
  for (size_t row = 0; row < width_; ++row) {
    fill(row, shown_[row].begin, shown_[row].end, false);
    shown_[row] = {};
  }
}

void AttentionMask::show(size_t past) {
  for (size_t row = 0; row < width_; ++row) {
    Range& now = shown_[row];
    Range next{0, past};
    if (window_ && past + row + 1 > *window_) next.begin = std::min(past, past + row + 1 - *window_);
    if (next.end < now.end || next.begin < now.begin) {
      fill(row, now.begin, now.end, false);
      now = {next.begin, next.begin};
    }
    fill(row, now.begin, std::min(now.end, next.begin), false);
    fill(row, std::max(now.end, next.begin), next.end, true);
    now = next;
  }
}

void AttentionMask::fill(size_t row, size_t begin, size_t end, bool attends) {
  if (begin >= end) return;
  const size_t at = row * context_;
  const unsigned value = attends ? attends_ : masked_;
  if (itemsize_ == 1) fill_elements<uint8_t>(data_, at + begin, at + end, value);
  if (itemsize_ == 2) fill_elements<uint16_t>(data_, at + begin, at + end, value);
  if (itemsize_ == 4) fill_elements<uint32_t>(data_, at + begin, at + end, value);
}

}  // namespace farm
