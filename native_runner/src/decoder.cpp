// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "failure.h"

namespace farm {

namespace {

// Copies one unit per row, such as all keys of one token, with a size that is known at compile time.
template <typename T>
void copy_units(char* to, size_t to_step, const char* from, size_t from_step, size_t rows) {
  for (size_t row = 0; row < rows; ++row) std::memcpy(to + row * to_step, from + row * from_step, sizeof(T));
}

void copy_runs(char* to, size_t to_step, const char* from, size_t from_step, size_t rows, size_t bytes) {
  if (bytes == 1) return copy_units<uint8_t>(to, to_step, from, from_step, rows);
  if (bytes == 2) return copy_units<uint16_t>(to, to_step, from, from_step, rows);
  if (bytes == 4) return copy_units<uint32_t>(to, to_step, from, from_step, rows);
  for (size_t row = 0; row < rows; ++row) std::memcpy(to + row * to_step, from + row * from_step, bytes);
}

}  // namespace

Decoder::Decoder(const std::shared_ptr<Program>& program, const std::string& method, const ModelSettings& settings)
    : model_(program, method, settings),
      layout_(decoder_layout(method, model_.inputs(), model_.outputs())),
      logits_(model_.outputs()[0].dtype, layout_.vocabulary, program->number("get_logits_scale"),
              program->number("get_logits_zero_point")),
      row_bytes_(layout_.vocabulary * model_.outputs()[0].itemsize) {
  if (layout_.masks.size() < 2) return;
  const std::optional<double> window = program->number("get_sliding_window");
  // NaN is refused as well.
  if (!window || !(*window >= 1)) {
    throw Failure(Stage::kLoad, "--generate: method '" + method + "' has a mask for a sliding window, and the program "
                                "does not say how wide that is (get_sliding_window)");
  }
  window_ = *window < static_cast<double>(layout_.context) ? static_cast<size_t>(*window) : layout_.context;
}

int64_t Decoder::load() {
  const auto start = std::chrono::steady_clock::now();
  model_.load(model_.inputs());
  const auto end = std::chrono::steady_clock::now();
  for (const MaskLayout& mask : layout_.masks) {
    masks_.emplace_back(model_.input_data(mask.input), model_.inputs()[mask.input].dtype, layout_.width,
                        layout_.context, mask.windowed ? window_ : std::nullopt);
  }
  clear();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
}

void Decoder::clear() {
  for (AttentionMask& mask : masks_) mask.clear();
  for (const CacheLayout& cache : layout_.caches) {
    if (cache.input) std::memset(model_.input_data(*cache.input), 0, model_.inputs()[*cache.input].nbytes);
  }
}

size_t Decoder::takes(size_t done, size_t end) const {
  // At the end of the caches the call begins earlier and takes some tokens again.
  return std::min(end, base(done) + layout_.width) - done;
}

int64_t Decoder::feed(const std::vector<int32_t>& tokens, size_t done, size_t count) {
  first_ = base(done);
  for (AttentionMask& mask : masks_) mask.show(first_);
  for (size_t row = 0; row < layout_.width; ++row) {
    const size_t position = first_ + row;
    write_index(0, row, position < done + count ? tokens[position] : 0);
    if (layout_.positions) write_index(*layout_.positions, row, static_cast<int64_t>(position));
  }
  return model_.execute();
}

const void* Decoder::logits_of(size_t position) const {
  const auto* rows = static_cast<const char*>(model_.results()[0].toTensor().const_data_ptr());
  return rows + (position - first_) * row_bytes_;
}

void Decoder::remember(size_t done, size_t count, Decoder* to) const {
  const size_t past = to->layout_.past;
  if (done >= past) return;
  const size_t fitting = std::min(count, past - done);
  for (size_t i = 0; i < layout_.caches.size(); ++i) {
    const CacheLayout& cache = layout_.caches[i];
    const auto* from = static_cast<const char*>(model_.results()[cache.output].toTensor().const_data_ptr());
    auto* target = static_cast<char*>(to->model_.input_data(*to->layout_.caches[i].input));
    copy_runs(target + done * cache.unit, past * cache.unit, from + (done - first_) * cache.unit,
              layout_.width * cache.unit, cache.rows, fitting * cache.unit);
  }
}

void Decoder::write_index(size_t input, size_t element, int64_t value) {
  void* data = model_.input_data(input);
  if (model_.inputs()[input].itemsize == sizeof(int64_t)) {
    static_cast<int64_t*>(data)[element] = value;
  } else {
    static_cast<int32_t*>(data)[element] = static_cast<int32_t>(value);
  }
}

}  // namespace farm
