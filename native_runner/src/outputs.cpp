// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "outputs.h"

#include <functional>
#include <string_view>

#include "failure.h"
#include "files.h"

namespace farm {

namespace {

// Returns the shape of the written tensor. For a dynamic shape QNN leaves the tensor at its upper bound, with the
// values of the smaller shape in front; XNNPACK sets the shape.
TensorSpec written_spec(const TensorSpec& actual, const TensorSpec* expected) {
  if (expected == nullptr || expected->shape == actual.shape) return actual;
  if (expected->nbytes > actual.nbytes) {
    throw Failure(Stage::kOutputs, "--output_shape_path says " + to_string(*expected) + ", it is " + to_string(actual));
  }
  return *expected;
}

// Calls `take(data, size)` with the bytes of a value and returns its description.
template <typename Take>
TensorSpec take_value(const executorch::runtime::EValue& value, const TensorSpec* expected, const Take& take) {
  const auto scalar = [&](auto number, const char* dtype) {
    take(&number, sizeof(number));
    return TensorSpec{{}, dtype, sizeof(number), sizeof(number)};
  };
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    const TensorSpec spec = written_spec(spec_of(tensor), expected);
    if (spec.nbytes > 0 && tensor.const_data_ptr() == nullptr) throw Failure(Stage::kOutputs, "it has no data");
    take(tensor.const_data_ptr(), spec.nbytes);
    return spec;
  }
  if (value.isInt()) return scalar(value.toInt(), "int64");
  if (value.isDouble()) return scalar(value.toDouble(), "float64");
  if (value.isBool()) return scalar(value.toBool(), "bool");
  throw Failure(Stage::kOutputs, "it is neither a tensor nor a number");
}

// Calls `take(file name, data, size)` with the bytes of every output and returns their descriptions.
template <typename Take>
std::vector<TensorSpec> take_outputs(int64_t line, const std::vector<executorch::runtime::EValue>& values,
                                     const std::vector<TensorSpec>& expected, const Take& take) {
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string name = "output_" + std::to_string(line) + "_" + std::to_string(i) + ".raw";
    try {
      specs.push_back(take_value(values[i], i < expected.size() ? &expected[i] : nullptr,
                                 [&](const void* data, size_t size) { take(name, data, size); }));
    } catch (const Failure& failure) {
      throw Failure(Stage::kOutputs, name + ": " + failure.what(), failure.code, line);
    }
  }
  return specs;
}

std::string_view bytes_of(const void* data, size_t size) { return {static_cast<const char*>(data), size}; }

}  // namespace

uint64_t digest_outputs(int64_t line, const std::vector<executorch::runtime::EValue>& values,
                        const std::vector<TensorSpec>& expected) {
  constexpr std::hash<std::string_view> kHash;
  std::vector<size_t> digests;
  take_outputs(line, values, expected, [&](const std::string&, const void* data, size_t size) {
    digests.push_back(kHash(bytes_of(data, size)));
  });
  return kHash(bytes_of(digests.data(), digests.size() * sizeof(size_t)));
}

std::vector<TensorSpec> write_outputs(const std::string& folder, int64_t line,
                                      const std::vector<executorch::runtime::EValue>& values,
                                      const std::vector<TensorSpec>& expected) {
  return take_outputs(line, values, expected, [&](const std::string& name, const void* data, size_t size) {
    write_file(folder + "/" + name, data, size, Stage::kOutputs);
  });
}

}  // namespace farm
