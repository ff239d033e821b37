// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "outputs.h"

#include "failure.h"
#include "files.h"

namespace farm {

namespace {

template <typename T>
TensorSpec write_scalar(const std::string& path, T value, const char* dtype) {
  write_file(path, &value, sizeof(value), Stage::kOutputs);
  return {{}, dtype, sizeof(value), sizeof(value)};
}

// What of a tensor is written. A backend that runs a dynamic shape may leave the tensor at its upper bound,
// with the values of the smaller one in front: QNN does, XNNPACK gives it its shape.
TensorSpec written_spec(const TensorSpec& actual, const TensorSpec* expected) {
  if (expected == nullptr || expected->shape == actual.shape) return actual;
  if (expected->nbytes > actual.nbytes) {
    throw Failure(Stage::kOutputs, "--output_shape_path says " + to_string(*expected) + ", it is " + to_string(actual));
  }
  return *expected;
}

TensorSpec write_value(const std::string& path, const executorch::runtime::EValue& value, const TensorSpec* expected) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    const TensorSpec spec = written_spec(spec_of(tensor), expected);
    if (spec.nbytes > 0 && tensor.const_data_ptr() == nullptr) throw Failure(Stage::kOutputs, "it has no data");
    write_file(path, tensor.const_data_ptr(), spec.nbytes, Stage::kOutputs);
    return spec;
  }
  if (value.isInt()) return write_scalar(path, value.toInt(), "int64");
  if (value.isDouble()) return write_scalar(path, value.toDouble(), "float64");
  if (value.isBool()) return write_scalar(path, value.toBool(), "bool");
  throw Failure(Stage::kOutputs, "it is neither a tensor nor a number");
}

}  // namespace

std::vector<TensorSpec> write_outputs(const std::string& folder, int64_t line,
                                      const std::vector<executorch::runtime::EValue>& values,
                                      const std::vector<TensorSpec>& expected) {
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string name = "output_" + std::to_string(line) + "_" + std::to_string(i) + ".raw";
    try {
      specs.push_back(write_value(folder + "/" + name, values[i], i < expected.size() ? &expected[i] : nullptr));
    } catch (const Failure& failure) {
      throw Failure(Stage::kOutputs, name + ": " + failure.what(), failure.code, line);
    }
  }
  return specs;
}

}  // namespace farm
