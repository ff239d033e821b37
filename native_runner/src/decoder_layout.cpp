// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "decoder_layout.h"

#include <algorithm>

#include "failure.h"

namespace farm {

namespace {

// Reader of the tensors of a method, in order.
class Reader {
 public:
  Reader(const std::string& method, const std::vector<TensorSpec>& inputs, const std::vector<TensorSpec>& outputs)
      : inputs_(inputs), outputs_(outputs) {
    layout_.method = method;
  }

  DecoderLayout read() {
    read_tokens();
    size_t next = read_masks(1);
    if (next < inputs_.size() && inputs_[next].shape == inputs_[0].shape && is_index(inputs_[next])) {
      layout_.positions = next++;
    }
    layout_.past = layout_.context - layout_.width;
    read_logits();
    read_caches(next);
    return layout_;
  }

 private:
  void read_tokens() {
    if (inputs_.empty() || inputs_[0].shape.size() != 2 || inputs_[0].shape[0] != 1 || !is_index(inputs_[0])) {
      refuse("its first input is not the tokens, int32[1,A]");
    }
    layout_.width = size(inputs_[0], 1);
    if (layout_.width == 0) refuse("it takes no token");
  }

  // Returns the index of the next input.
  size_t read_masks(size_t next) {
    for (; next < inputs_.size() && layout_.masks.size() < 2 && is_mask(inputs_[next]); ++next) {
      const size_t context = size(inputs_[next], 1, true);
      if (!layout_.masks.empty() && context != layout_.context) refuse("its masks are for different contexts");
      layout_.context = context;
      layout_.masks.push_back({next, !layout_.masks.empty()});
    }
    if (layout_.masks.empty()) refuse("its second input is not an attention mask, [1,1,A,C]");
    return next;
  }

  void read_logits() {
    if (outputs_.empty() || outputs_[0].shape.size() < 2 || size(outputs_[0], 2, true) != layout_.width ||
        !all_ones(outputs_[0], 2)) {
      refuse("its first output is not the logits of every token, [1," + std::to_string(layout_.width) + ",vocabulary]");
    }
    layout_.vocabulary = size(outputs_[0], 1, true);
    if (layout_.vocabulary == 0) refuse("its vocabulary has no token");
  }

  void read_caches(size_t next) {
    const size_t taken = inputs_.size() - next;
    const size_t given = outputs_.size() - 1;
    if (given == 0 || given % 2 != 0 || (taken != 0 && taken != given)) {
      refuse("it takes " + std::to_string(taken) + " caches and gives " + std::to_string(given) +
             ": keys and values of every layer are expected");
    }
    if ((taken == 0) != (layout_.past == 0)) refuse("its caches do not have the positions that its mask shows");
    if ((taken == 0) != !layout_.positions) refuse("it takes caches without positions, or positions without caches");
    for (size_t i = 0; i < given; ++i) {
      const bool is_key = i < given / 2;
      CacheLayout cache = read_cache(outputs_[i + 1], is_key, layout_.width, "output " + std::to_string(i + 1));
      cache.output = i + 1;
      if (taken != 0) {
        const std::string what = "input " + std::to_string(next + i);
        const CacheLayout past = read_cache(inputs_[next + i], is_key, layout_.past, what);
        if (past.rows != cache.rows || past.unit != cache.unit || inputs_[next + i].dtype != outputs_[i + 1].dtype) {
          refuse(what + ", " + to_string(inputs_[next + i]) + ", is not the cache of output " + std::to_string(i + 1) +
                 ", " + to_string(outputs_[i + 1]));
        }
        cache.input = next + i;
      }
      layout_.caches.push_back(cache);
    }
  }

  CacheLayout read_cache(const TensorSpec& spec, bool is_key, size_t positions, const std::string& what) const {
    if (spec.shape.size() < 3 || spec.shape[0] != 1 || size(spec, is_key ? 1 : 2, true) != positions) {
      refuse(what + ", " + to_string(spec) + ", is not " + (is_key ? "keys [1,H,D," : "values [1,H,") +
             std::to_string(positions) + (is_key ? "]" : ",D]"));
    }
    CacheLayout cache;
    cache.unit = is_key ? spec.itemsize : spec.itemsize * size(spec, 1, true);
    cache.rows = cache.unit * positions == 0 ? 0 : spec.nbytes / (cache.unit * positions);
    return cache;
  }

  bool is_mask(const TensorSpec& spec) const {
    return spec.shape.size() >= 3 && size(spec, 2, true) == layout_.width && size(spec, 1, true) >= layout_.width &&
           all_ones(spec, 2);
  }

  // Returns true if all dimensions but the last `count` are 1.
  static bool all_ones(const TensorSpec& spec, size_t count) {
    return std::all_of(spec.shape.begin(), spec.shape.end() - static_cast<std::ptrdiff_t>(count),
                       [](int64_t dimension) { return dimension == 1; });
  }

  static bool is_index(const TensorSpec& spec) { return spec.dtype == "int32" || spec.dtype == "int64"; }

  // Returns the size of a dimension; `from_behind` counts from the end, where 1 is the last one.
  static size_t size(const TensorSpec& spec, size_t dimension, bool from_behind = false) {
    return static_cast<size_t>(spec.shape[from_behind ? spec.shape.size() - dimension : dimension]);
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw Failure(Stage::kLoad, "--generate: method '" + layout_.method + "' is not a static decoder: " + why);
  }

  const std::vector<TensorSpec>& inputs_;
  const std::vector<TensorSpec>& outputs_;
  DecoderLayout layout_;
};

}  // namespace

DecoderLayout decoder_layout(const std::string& method, const std::vector<TensorSpec>& inputs,
                             const std::vector<TensorSpec>& outputs) {
  return Reader(method, inputs, outputs).read();
}

void require_same_caches(const DecoderLayout& from, const DecoderLayout& to) {
  bool same = from.context == to.context && from.vocabulary == to.vocabulary && from.caches.size() == to.caches.size();
  for (size_t i = 0; same && i < from.caches.size(); ++i) {
    same = from.caches[i].rows == to.caches[i].rows && from.caches[i].unit == to.caches[i].unit;
  }
  if (same) return;
  throw Failure(Stage::kLoad, "--generate: methods '" + from.method + "' and '" + to.method +
                                  "' differ in context, vocabulary or caches: what one of them reads is of no use to "
                                  "the other");
}

}  // namespace farm
