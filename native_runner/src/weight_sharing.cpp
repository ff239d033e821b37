// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "weight_sharing.h"

#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "failure.h"
#include "files.h"

namespace farm {

#if !defined(__x86_64__)

void refuse_shared_weights(const std::string&) {}

#else

namespace {

// ExecuTorch gives the compile options of a delegate to the delegate alone, which crashes on them. The places of fields
// are from program.fbs and qc_compiler_spec.fbs of ExecuTorch: a field of a flatbuffer keeps its place.
constexpr unsigned kProgramPlans = 1;
constexpr unsigned kPlanDelegates = 7;
constexpr unsigned kDelegateId = 0;
constexpr unsigned kDelegateSpecs = 2;
constexpr unsigned kSpecKey = 0;
constexpr unsigned kSpecValue = 1;
constexpr unsigned kOptionsBackend = 1;
constexpr unsigned kBackendHtp = 1;
constexpr unsigned kHtpSharing = 8;

// Reader of a flatbuffer that may be damaged: a field outside of the data is absent.
class Flatbuffer {
 public:
  explicit Flatbuffer(std::string_view data) : data_(data) {}

  // 0 means no table, here and below: the data begins with the root's offset.
  size_t root() const { return number<uint32_t>(0); }

  size_t table(size_t table, unsigned field) const { return follow(place(table, field)); }

  std::vector<size_t> tables(size_t table, unsigned field) const {
    const size_t vector = follow(place(table, field));
    const size_t count = vector == 0 ? 0 : number<uint32_t>(vector);
    std::vector<size_t> found;
    for (size_t i = 0; i < count && vector + 4 + 4 * i < data_.size(); ++i) found.push_back(follow(vector + 4 + 4 * i));
    return found;
  }

  // Returns the bytes of a string or of a vector of bytes.
  std::string_view bytes(size_t table, unsigned field) const {
    const size_t vector = follow(place(table, field));
    if (vector == 0 || vector + 4 > data_.size()) return {};
    return data_.substr(vector + 4, number<uint32_t>(vector));
  }

  bool boolean(size_t table, unsigned field) const {
    const size_t at = place(table, field);
    return at != 0 && number<uint8_t>(at) != 0;
  }

 private:
  template <typename T>
  T number(size_t at) const {
    T value{};
    if (at <= data_.size() && data_.size() - at >= sizeof(T)) std::memcpy(&value, data_.data() + at, sizeof(T));
    return value;
  }

  size_t follow(size_t at) const {
    const size_t offset = at == 0 ? 0 : number<uint32_t>(at);
    return offset == 0 || at + offset >= data_.size() ? 0 : at + offset;
  }

  size_t place(size_t table, unsigned field) const {
    if (table == 0) return 0;
    const auto slots = static_cast<size_t>(static_cast<int64_t>(table) - number<int32_t>(table));
    const size_t slot = 4 + 2 * size_t{field};
    if (slot + 2 > number<uint16_t>(slots)) return 0;
    const size_t offset = number<uint16_t>(slots + slot);
    return offset == 0 ? 0 : table + offset;
  }

  std::string_view data_;
};

// Returns the description of the program, which lies before its segments; its size is in a header behind the root's
// offset.
std::string read_description(const std::string& path) {
  constexpr size_t kBeginning = 32;
  constexpr size_t kMagicAt = 8;
  constexpr size_t kSizeAt = 16;
  const std::string head = read_beginning(path, kBeginning, Stage::kLoad);
  uint64_t size = file_size(path, Stage::kLoad);
  if (head.size() == kBeginning && head.compare(kMagicAt, 4, "eh00") == 0) {
    std::memcpy(&size, head.data() + kSizeAt, sizeof(size));
  }
  return read_beginning(path, size, Stage::kLoad);
}

bool shares_weights(std::string_view options) {
  const Flatbuffer file(options);
  const size_t backend = file.table(file.root(), kOptionsBackend);
  return file.boolean(file.table(backend, kBackendHtp), kHtpSharing);
}

bool any_delegate_shares_weights(std::string_view program) {
  const Flatbuffer file(program);
  for (const size_t plan : file.tables(file.root(), kProgramPlans)) {
    for (const size_t delegate : file.tables(plan, kPlanDelegates)) {
      if (file.bytes(delegate, kDelegateId) != "QnnBackend") continue;
      for (const size_t spec : file.tables(delegate, kDelegateSpecs)) {
        if (file.bytes(spec, kSpecKey) != "qnn_compile_spec") continue;
        if (shares_weights(file.bytes(spec, kSpecValue))) return true;
      }
    }
  }
  return false;
}

}  // namespace

void refuse_shared_weights(const std::string& path) {
  if (!any_delegate_shares_weights(read_description(path))) return;
  throw Failure(Stage::kLoad, "'" + path + "' is compiled with weights that its methods share, which QNN on x86-64 "
                              "cannot load: compile it without weight sharing for this machine, or run it on a device");
}

#endif

}  // namespace farm
