// Preloaded library that makes a possible mistake of a runner of static decoders, named by DECODER_MUTATION, between
// the runner and the QNN backend. It changes the runner's memory: changed caches stay, and a mask is restored after the
// call.
#include <dlfcn.h>
#include <executorch/runtime/backend/interface.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;

// Unsigned element of 8 or 16 bits of a contiguous tensor.
class Elements {
 public:
  explicit Elements(const Tensor& tensor)
      : data_(static_cast<char*>(tensor.mutable_data_ptr())), size_(tensor.element_size()) {}

  uint32_t get(size_t index) const {
    return size_ == 2 ? reinterpret_cast<uint16_t*>(data_)[index] : reinterpret_cast<uint8_t*>(data_)[index];
  }

  void set(size_t index, uint32_t value) const {
    if (size_ == 2) {
      reinterpret_cast<uint16_t*>(data_)[index] = static_cast<uint16_t>(value);
    } else {
      reinterpret_cast<uint8_t*>(data_)[index] = static_cast<uint8_t>(value);
    }
  }

  uint32_t greatest() const { return size_ == 2 ? 65535 : 255; }

 private:
  char* data_;
  size_t size_;
};

// Keys [1, heads, dim, positions] or values [1, heads, positions, dim] of a layer: a cache, or the new positions of a
// call.
struct Positions {
  Tensor tensor;
  bool is_keys;

  size_t count() const { return tensor.size(is_keys ? 3 : 2); }
  size_t dim() const { return tensor.size(is_keys ? 2 : 3); }
  size_t heads() const { return tensor.size(1); }

  size_t index(size_t head, size_t element, size_t position) const {
    return is_keys ? (head * dim() + element) * count() + position : (head * count() + position) * dim() + element;
  }

  template <typename Action>
  void each(size_t position, const Action& action) const {
    for (size_t head = 0; head < heads(); ++head) {
      for (size_t element = 0; element < dim(); ++element) action(index(head, element, position));
    }
  }

  void exchange(size_t one, size_t other) const {
    const Elements elements(tensor);
    for (size_t head = 0; head < heads(); ++head) {
      for (size_t element = 0; element < dim(); ++element) {
        const size_t a = index(head, element, one), b = index(head, element, other);
        const uint32_t kept = elements.get(a);
        elements.set(a, elements.get(b));
        elements.set(b, kept);
      }
    }
  }
};

// Inputs and outputs of a call of a decoder.
struct Call {
  std::vector<Positions> caches, added;
  std::vector<Tensor> masks;
  std::vector<Tensor> logits;
  size_t width = 1;  // positions of the call
  size_t past = 0;   // positions of a cache
  size_t seen = 0;   // positions of the cache that the first row attends to
};

Call describe(Span<EValue*> args) {
  Call call;
  std::vector<Tensor> fours;
  for (EValue* arg : args) {
    if (!arg->isTensor()) continue;
    const Tensor tensor = arg->toTensor();
    if (tensor.dim() == 3) call.logits.push_back(tensor);
    if (tensor.dim() == 4) fours.push_back(tensor);
  }
  if (call.logits.empty()) return call;
  call.width = call.logits[0].size(1);
  size_t context = 0;
  for (const Tensor& tensor : fours) context = std::max<size_t>(context, std::max(tensor.size(2), tensor.size(3)));
  call.past = context - call.width;
  for (const Tensor& tensor : fours) {
    const size_t third = tensor.size(2), fourth = tensor.size(3);
    if (fourth == context) {
      call.masks.push_back(tensor);
    } else if (fourth == call.past || third == call.past) {
      call.caches.push_back({tensor, fourth == call.past});
    } else {
      call.added.push_back({tensor, fourth == call.width});
    }
  }
  if (!call.masks.empty()) {
    const Elements mask(call.masks[0]);
    while (call.seen < call.past && mask.get(call.seen) != 0) ++call.seen;
  }
  return call;
}

Positions* first_keys(std::vector<Positions>* all) {
  for (Positions& one : *all) {
    if (one.is_keys) return &one;
  }
  return nullptr;
}

class Mutated final : public BackendInterface {
 public:
  Mutated(BackendInterface* real, std::string mutation) : real_(real), mutation_(std::move(mutation)) {}

  bool is_available() const override { return real_->is_available(); }

  Result<DelegateHandle*> init(BackendInitContext& context, FreeableBuffer* processed,
                               ArrayRef<CompileSpec> specs) const override {
    return real_->init(context, processed, specs);
  }

  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> args) const override {
    Call call = describe(args);
    std::vector<std::string> masks;
    for (const Tensor& mask : call.masks) {
      masks.emplace_back(static_cast<const char*>(mask.const_data_ptr()), mask.nbytes());
    }
    before(&call);
    const Error error = real_->execute(context, handle, args);
    if (mutation_ == "layers_exchanged") exchange_layers(&call);
    if (mutation_ == "wrong_place") misplace(&call);
    for (size_t i = 0; i < masks.size(); ++i) {
      std::memcpy(call.masks[i].mutable_data_ptr(), masks[i].data(), masks[i].size());
    }
    after(&call);
    return error;
  }

  void destroy(DelegateHandle* handle) const override { real_->destroy(handle); }

  Error set_option(BackendOptionContext& context, const Span<BackendOption>& options) override {
    return real_->set_option(context, options);
  }

  Error get_option(BackendOptionContext& context, Span<BackendOption>& options) override {
    return real_->get_option(context, options);
  }

 private:
  void before(Call* call) const {
    if (mutation_ == "mask_off_by_one") hide_the_last(call);
    if (mutation_ == "layers_exchanged") exchange_layers(call);
    if (mutation_ == "wrong_place") misplace(call);
    if (mutation_ == "stale_cache") show_stale(call);
    if (mutation_ == "wrong_element" && call->seen == 4) {
      const Positions* keys = first_keys(&call->caches);
      const Elements elements(keys->tensor);
      const size_t index = keys->index(0, 5, 2);
      elements.set(index, elements.get(index) ^ ((elements.greatest() + 1) / 4));
    }
  }

  void after(Call* call) const {
    if (mutation_ == "value_not_written" && call->seen <= 3 && 3 < call->seen + call->width) {
      // Earlier content: the caches were cleared and not written since.
      const Positions* keys = first_keys(&call->added);
      Elements(keys->tensor).set(keys->index(0, 3, 3 - call->seen), 0);
    }
    if (mutation_ == "wrong_scale") {
      for (const Positions& one : call->added) {
        if (one.is_keys) scale(one.tensor, 1.05);
      }
    }
    if (mutation_ == "wrong_logits_scale") scale(call->logits[0], 1.02);
  }

  static void scale(const Tensor& tensor, double factor) {
    const Elements elements(tensor);
    const double middle = (elements.greatest() + 1) / 2.0;
    for (size_t i = 0; i < static_cast<size_t>(tensor.numel()); ++i) {
      const double value = middle + (elements.get(i) - middle) * factor;
      elements.set(i, static_cast<uint32_t>(std::clamp(value, 0.0, static_cast<double>(elements.greatest()))));
    }
  }

  // No position attends to the position before it.
  static void hide_the_last(Call* call) {
    for (const Tensor& tensor : call->masks) {
      const Elements mask(tensor);
      const size_t context = call->past + call->width;
      for (size_t row = 0; row < call->width; ++row) {
        if (row > 0) {
          mask.set(row * context + call->past + row - 1, 0);
        } else if (call->seen > 0) {
          mask.set(call->seen - 1, 0);
        }
      }
    }
  }

  static void exchange_layers(Call* call) {
    for (const bool is_keys : {true, false}) {
      std::vector<Tensor> two;
      for (const Positions& one : call->caches) {
        if (one.is_keys == is_keys && two.size() < 2) two.push_back(one.tensor);
      }
      if (two.size() < 2) continue;
      char* a = static_cast<char*>(two[0].mutable_data_ptr());
      std::swap_ranges(a, a + two[0].nbytes(), static_cast<char*>(two[1].mutable_data_ptr()));
    }
  }

  // The newest keys are one place too far.
  static void misplace(Call* call) {
    if (call->seen == 0 || call->seen >= call->past) return;
    for (const Positions& one : call->caches) {
      if (one.is_keys) one.exchange(call->seen - 1, call->seen);
    }
  }

  // From the second text on, positions of the text before are still attended to.
  void show_stale(Call* call) const {
    if (call->seen == 0 && !left_.empty()) {
      stale_ = left_;
      stale_count_ = left_count_;
    }
    for (size_t i = 0; i < stale_.size() && i < call->caches.size(); ++i) {
      const Positions& cache = call->caches[i];
      const Elements elements(cache.tensor);
      for (size_t position = call->seen; position < std::min(stale_count_, call->past); ++position) {
        cache.each(position, [&](size_t index) { elements.set(index, stale_[i][index]); });
      }
    }
    for (const Tensor& tensor : call->masks) {
      const Elements mask(tensor);
      for (size_t row = 0; row < call->width; ++row) {
        for (size_t position = call->seen; position < std::min(stale_count_, call->past); ++position) {
          mask.set(row * (call->past + call->width) + position, mask.greatest());
        }
      }
    }
    left_.clear();
    for (const Positions& cache : call->caches) {
      const Elements elements(cache.tensor);
      left_.emplace_back(cache.tensor.numel());
      for (size_t i = 0; i < left_.back().size(); ++i) left_.back()[i] = elements.get(i);
    }
    left_count_ = call->seen;
  }

  BackendInterface* real_;
  std::string mutation_;
  mutable std::vector<std::vector<uint32_t>> left_, stale_;
  mutable size_t left_count_ = 0, stale_count_ = 0;
};

}  // namespace

namespace executorch::runtime {

__attribute__((visibility("default"))) Error register_backend(const Backend& backend) {
  void* found = dlsym(RTLD_NEXT, "_ZN10executorch7runtime16register_backendERKNS0_7BackendE");
  const auto real = reinterpret_cast<Error (*)(const Backend&)>(found);
  const char* mutation = std::getenv("DECODER_MUTATION");
  if (mutation == nullptr || std::strcmp(backend.name, "QnnBackend") != 0) return real(backend);
  return real({backend.name, new Mutated(backend.backend, mutation)});
}

}  // namespace executorch::runtime
